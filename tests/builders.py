"""Small problems for tests: whole-number clusters and models whose costs can be worked out by hand."""

import numpy as np

from haap_rl.cost.calibration import DEFAULT, LITERATURE, parameters, with_parameters
from haap_rl.problem.cluster import Cluster, DeviceGroup, DeviceType, Link
from haap_rl.problem.model import Model
from haap_rl.problem.plan import Plan, Problem, Recompute, ReplicaGroup, Stage

GB = 10**9

# every device reaches its data sheet, no host, nothing hidden, nothing blocks, all memory usable
PLAIN_CONSTANTS = {
    "gemm_efficiency": 1.0,
    "attention_efficiency": 1.0,
    "fused_attention_efficiency": 1.0,
    "memory_bandwidth_share": 1.0,
    "efficiency": 1.0,
    "latency_scale": 1.0,
    "host_layer_s": 0.0,
    "host_microbatch_s": 0.0,
    "host_iteration_s": 0.0,
    "send_blocking": 0.0,
    "sync_hidden": 0.0,
    "gemm_half_size": 0.0,
    "unaligned_share": 1.0,
    "elementwise_passes": 1.0,
    "optimizer_bytes": 30.0,
    "gemm_half_tokens": 0.0,
    "collective_s": 0.0,
    "contention": 0.0,
    "small_message_s": 0.0,
    "sharded_hidden": 0.0,
    "straggler_share": 0.0,
    "reserve_bytes": 0,
    "fragmentation": 0.0,
}


def calibration(**changes):
    """Plain constants with `changes`, by the name of a field; alike for every architecture, tier and framework."""
    values = {**PLAIN_CONSTANTS, **changes}
    known = {name: name.rpartition(".")[2] for name in parameters(LITERATURE)}
    assert set(changes) <= set(known.values()), changes
    return with_parameters(LITERATURE, {name: values[last] for name, last in known.items() if last in values})


PLAIN = calibration()


def room(gb):
    """GB of a device that leaves a plan `gb` where the usual constants and framework reserve their part."""
    return gb + DEFAULT.framework("megatron").reserve_bytes / GB


def device(name="dev", tflops=100.0, memory_gb=40.0, bandwidth_gb=1000.0):
    return DeviceType(name, (("fp16", tflops * 1e12),), int(memory_gb * GB), bandwidth_gb * 1e9)


def group(name="fast", nodes=1, per_node=4, intra_gb=100.0, inter_gb=10.0, latencies_us=(20, 50), nics=1, **kind):
    return DeviceGroup(
        name,
        device(f"{name}_device", **kind),
        nodes,
        per_node,
        Link(1e-6 * latencies_us[0], intra_gb * 1e9),
        Link(1e-6 * latencies_us[1], inter_gb * 1e9),
        nics,
    )


def model(**changes):
    values = {
        "name": "tiny",
        "num_layers": 4,
        "hidden": 1024,
        "heads": 16,
        "kv_heads": 16,
        "head_dim": 64,
        "ffn": 4096,
        "gated_mlp": False,
        "vocab": 32000,
        "max_positions": 2048,
        "learned_positions": True,
        "norm": "layernorm",
        "tied_embeddings": False,
        "biases": True,
        "dropout": True,
    }
    return Model(**{**values, **changes})


def problem(groups=None, model_changes=None, **settings):
    """Two unequal groups of four devices and a four-layer model, unless told otherwise."""
    groups = groups or (group("fast"), group("slow", tflops=50.0, memory_gb=16.0))
    settings = {"seq_len": 512, "global_batch_size": 8, **settings}
    return Problem(Cluster("test", tuple(groups)), model(**(model_changes or {})), **settings)


def three_groups(model_changes=None, **settings):
    """Three unequal groups with little memory and a seven-layer model."""
    groups = [
        group("fast", per_node=4, memory_gb=room(3.0)),
        group("slow", nodes=2, per_node=4, memory_gb=room(1.2), tflops=40.0),
        group("old", per_node=2, memory_gb=room(2.0), tflops=20.0),
    ]
    settings = {"global_batch_size": 16, "seq_len": 1024, **settings}
    return problem(groups, {"num_layers": 7, **(model_changes or {})}, **settings)


def stage(units, where, tp=1, dp=1, size=1, mode="none", recomputed=0):
    return Stage(units, (ReplicaGroup(where, tp, dp, size),), Recompute(mode, recomputed))


def plan(*stages, m=8, **settings):
    return Plan(tuple(stages), m, **settings)


def set_tables(space, m, layer_s, embedding_s=0, head_s=0, most=None):
    """Whole seconds and layers for a test's arithmetic, in place of what the estimator says at `m` micro-batches.

    layer_s(option): seconds of one layer. most(option, s): layers that fit s-th from the end; all of them if None.
    """
    tables = space.tables(m)
    for k, option in enumerate(space.options):
        if space.sizes(m, k) is None:
            continue
        tables.forward_s[k], tables.backward_s[k] = (embedding_s, layer_s(option), head_s), 0.0
        for s in range(1, tables.max_stages + 1):
            tables.max_layers[k, :, s] = space.num_layers if most is None else most(option, s)
    tables.embedding_s, tables.layer_s, tables.head_s = (tables.forward_s + tables.backward_s).T.tolist()
    tables._caps = tables.max_layers.tolist()


def random_plans(target, count, seed=0):
    """Random legal plans on every group of `target`: mixed stages, every ZeRO stage and interleaving included."""
    rng = np.random.default_rng(seed)
    while count:
        m = int(2 ** rng.integers(0, 4))
        samples = target.global_batch_size // m
        p = int(rng.integers(1, 5))
        chunks = 2 if p > 1 and m % p == 0 and rng.random() < 0.5 else 1
        if chunks == 1:
            cuts = np.sort(rng.choice(np.arange(1, target.model.num_units), p - 1, replace=False))
            units = np.diff([0, *cuts, target.model.num_units])
        else:  # as even as whole chunks allow
            runs = np.full(p, target.model.num_layers // (chunks * p)) + (rng.permutation(p) == 0) * (
                target.model.num_layers // chunks % p
            )
            units = chunks * runs + (np.arange(p) == 0) + (np.arange(p) == p - 1)
        stages = []
        for i, n in enumerate(units):
            sizes = [int(2 ** rng.integers(0, 3)) for _ in range(2)]
            where = target.cluster.groups[int(rng.integers(len(target.cluster.groups)))].name
            replicas = (ReplicaGroup(where, sizes[0], sizes[1], max(1, samples // sizes[1])),)
            if rng.random() < 0.2 and samples > 1:
                names = [g.name for g in target.cluster.groups]
                replicas = (ReplicaGroup(names[0], 1, 1, samples - 1), ReplicaGroup(names[-1], 1, 1, 1))
            mode = ("none", "selective", "full")[int(rng.integers(3))]
            layers = int(n) - (i == 0) - (i == p - 1)
            again = 0 if mode == "none" or layers < 1 else int(rng.integers(1, layers + 1))
            again -= again % chunks
            stages.append(Stage(int(n), replicas, Recompute(mode if again else "none", again)))
        candidate = Plan(tuple(stages), m, int(rng.integers(4)), bool(rng.integers(2)), chunks)
        try:
            target.validate(candidate)
        except ValueError:
            continue
        count -= 1
        yield candidate
