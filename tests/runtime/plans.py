"""Asymmetric plans of a small model on six devices of two kinds, for the runtime's tests."""

from dataclasses import replace

from haap_rl.problem.cluster import Cluster, DeviceGroup, DeviceType, Link
from haap_rl.problem.model import Model
from haap_rl.problem.plan import Plan, Problem, Recompute, ReplicaGroup, Stage
from haap_rl.runtime.job import Job, full_size

GPT = Model(
    name="tiny_gpt", num_layers=4, hidden=16, heads=4, kv_heads=4, head_dim=4, ffn=32, gated_mlp=False, vocab=50,
    max_positions=8, learned_positions=True, norm="layernorm", tied_embeddings=False, biases=True, dropout=True,
)  # fmt: skip
LLAMA = replace(
    GPT, name="tiny_llama", kv_heads=4, heads=8, head_dim=2, gated_mlp=True, learned_positions=False, norm="rmsnorm",
    biases=False, dropout=False,
)  # fmt: skip


def group(name, devices):
    kind = DeviceType(f"{name}_device", (("fp32", 1e12),), 2**36, 1e11)
    return DeviceGroup(name, kind, 1, devices, Link(1e-5, 1e10), Link(1e-4, 1e9))


CLUSTER = Cluster("two kinds", (group("a", 6), group("b", 6)))


def problem(model=GPT, batch=12, **settings):
    return Problem(CLUSTER, model, seq_len=8, global_batch_size=batch, precision="fp32", **settings)


def job(target, dtype="float32", **changes) -> Job:
    return replace(full_size(target, dtype), **changes)


def stage(units, *replicas, mode="none", layers=0):
    """replicas: (group, tp, dp, samples)."""
    return Stage(units, tuple(ReplicaGroup(*replica) for replica in replicas), Recompute(mode, layers))


def plan(*stages, m=2, zero=1):
    return Plan(stages, m, zero, sequence_parallel=False)


PLANS = {
    "three stages": plan(stage(2, ("a", 1, 1, 6)), stage(3, ("a", 1, 1, 6)), stage(1, ("b", 1, 1, 6))),
    "tp 2 -> dp 3 unequal": plan(
        stage(3, ("a", 2, 1, 6)), stage(3, ("b", 1, 1, 2), ("b", 1, 1, 3), ("b", 1, 1, 1), mode="full", layers=2)
    ),
    "dp 2 -> dp 3": plan(
        stage(3, ("a", 1, 1, 2), ("b", 1, 1, 4), mode="full", layers=1),
        stage(3, ("b", 1, 1, 1), ("b", 1, 1, 2), ("b", 1, 1, 3)),
    ),
    "tp 2 x dp 2 -> tp 1": plan(stage(3, ("a", 2, 1, 4), ("b", 2, 1, 2)), stage(3, ("b", 1, 1, 6))),
    "tp 1 -> tp 4 -> tp 1": plan(
        stage(2, ("a", 1, 1, 6)), stage(2, ("b", 4, 1, 6), mode="full", layers=2), stage(2, ("a", 1, 1, 6))
    ),
    "one stage, dp 4 unequal": plan(stage(6, ("a", 1, 2, 2), ("b", 1, 2, 1))),
    "m < p": plan(
        stage(2, ("a", 2, 1, 12)), stage(1, ("b", 1, 1, 12)), stage(1, ("b", 1, 1, 12)), stage(2, ("b", 1, 1, 12)), m=1
    ),
    "four stages, selective": plan(
        stage(2, ("a", 1, 1, 4), mode="selective", layers=1), stage(1, ("a", 1, 1, 4)),
        stage(2, ("b", 1, 1, 4), mode="selective", layers=2), stage(1, ("b", 1, 1, 4)), m=3,
    ),
    "other tp in one stage": plan(stage(4, ("a", 2, 1, 4), ("b", 1, 1, 2)), stage(2, ("b", 2, 1, 6))),
    "tp 4 beside tp 2": plan(stage(6, ("a", 4, 1, 8), ("b", 2, 1, 4), mode="full", layers=2), m=1),
    "no ZeRO": plan(stage(4, ("a", 1, 2, 1), ("b", 1, 1, 4)), stage(2, ("b", 2, 1, 6)), zero=0),
    "four micro-batches": plan(
        stage(3, ("a", 2, 1, 3)), stage(2, ("b", 1, 1, 2), ("b", 1, 1, 1), mode="full", layers=1),
        stage(1, ("b", 1, 1, 3)), m=4,
    ),
    "dp 3 -> tp 2": plan(stage(3, ("b", 1, 3, 2)), stage(3, ("a", 2, 1, 6), mode="selective", layers=1)),
    "one rank": plan(stage(6, ("a", 1, 1, 6), mode="full", layers=3)),
}  # fmt: skip
