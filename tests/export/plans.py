"""Problems and random plans for the exporters."""

import os
from dataclasses import replace

import numpy as np

from haap_rl.export.megatron import JobRecompute, with_recompute
from haap_rl.problem.errors import PlanError
from haap_rl.problem.plan import Plan, ReplicaGroup, Stage
from tests.builders import group, problem, random_plans

LLAMA = {"norm": "rmsnorm", "learned_positions": False, "biases": False, "gated_mlp": True, "dropout": False}
# docs/export.md has the figures of 10,000: HAAP_RL_EXPORTS=2500 HAAP_RL_EXPORTS_SEED=0 (10, 20, 30) pytest tests/export
COUNT, SEED = (int(os.environ.get(f"HAAP_RL_EXPORTS{key}", value)) for key, value in (("", "300"), ("_SEED", "0")))


def in_bf16(target):
    """The problem in bf16, which its devices then have."""
    groups = []
    for g in target.cluster.groups:
        peaks = (*g.device.peak_flops, ("bf16", g.device.peak("fp16")))
        groups.append(replace(g, device=replace(g.device, peak_flops=peaks)))
    return replace(target, cluster=replace(target.cluster, groups=tuple(groups)), precision="bf16")


def problems():
    """A GPT in fp16, the same with tied embeddings, and a Llama in bf16 on more nodes."""
    wide = (group("fast", nodes=2), group("slow room", nodes=3, tflops=40.0, memory_gb=30.0))
    return [
        problem(model_changes={"num_layers": 12}, global_batch_size=16),
        problem(model_changes={"num_layers": 12, "tied_embeddings": True}, global_batch_size=16),
        in_bf16(problem(wide, {"num_layers": 12, "kv_heads": 4, **LLAMA}, global_batch_size=16)),
    ]


def any_plans(count, seed=0):
    """(problem, plan) of `count` random legal plans, the problems in turn."""
    sources = problems()
    each = [random_plans(target, -(-count // len(sources)), seed + k) for k, target in enumerate(sources)]
    for number in range(count):
        yield sources[number % len(sources)], next(each[number % len(sources)])


def wide_problem(num_layers=32, **changes):
    """A cluster with room for 16 stages of up to 8 devices."""
    groups = (group("fast", nodes=8, per_node=8), group("slow", nodes=16, per_node=8, tflops=40.0))
    return in_bf16(problem(groups, {"num_layers": num_layers, **LLAMA, **changes}, global_batch_size=64))


def uniform_random(target, count, seed=0, most_stages=16):
    """Random plans of one tp and dp and one recomputation, 2 to `most_stages` stages, interleaved or not."""
    rng = np.random.default_rng(seed)
    names = [g.name for g in target.cluster.groups]
    while count:
        p, m = int(rng.integers(2, most_stages + 1)), int(2 ** rng.integers(0, 6))
        tp, dp = (int(2 ** rng.integers(0, 3)) for _ in range(2))
        samples = target.global_batch_size // m
        chunks = int(rng.integers(1, 4)) if m % p == 0 else 1
        layers = target.model.num_layers
        if samples % dp or layers // chunks < p:
            continue
        if layers % chunks:
            continue
        cuts = np.sort(rng.choice(np.arange(1, layers // chunks), p - 1, replace=False))
        counts = chunks * np.diff([0, *cuts, layers // chunks])
        if chunks == 1 and rng.random() < 0.3:  # embedding or head on a stage of its own
            end = (0, -1)[int(rng.integers(2))]
            counts[1 if end == 0 else -2] += counts[end]
            counts[end] = 0
        stages = []
        for i, n in enumerate(counts.tolist()):
            replicas = (ReplicaGroup(names[int(rng.integers(len(names)))], tp, dp, samples // dp),)
            if dp > 1 and rng.random() < 0.2:  # the two halves of a stage on two device groups
                replicas = tuple(ReplicaGroup(name, tp, dp // 2, samples // dp) for name in names[:2])
            stages.append(Stage(n + (i == 0) + (i == p - 1), replicas))
        plan = Plan(tuple(stages), m, int(rng.integers(2)), bool(rng.integers(2)), chunks)
        mode = ("none", "selective", "full")[int(rng.integers(3))]
        plan = with_recompute(plan, JobRecompute(mode, int(rng.integers(1, 4)) if mode == "full" else 0))
        try:
            target.validate(plan)
        except PlanError:
            continue
        count -= 1
        yield plan
