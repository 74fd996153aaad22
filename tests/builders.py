"""Small problems for tests: whole-number clusters and models whose costs can be worked out by hand."""

from haap_rl.problem.cluster import Cluster, DeviceGroup, DeviceType, Link
from haap_rl.problem.model import Model
from haap_rl.problem.plan import Plan, Problem, Recompute, ReplicaGroup, Stage

GB = 10**9


def device(name="dev", tflops=100.0, memory_gb=40.0, bandwidth_gb=1000.0):
    return DeviceType(name, (("fp16", tflops * 1e12),), int(memory_gb * GB), bandwidth_gb * 1e9)


def group(name="fast", nodes=1, per_node=4, intra_gb=100.0, inter_gb=10.0, latencies_us=(20, 50), **kind):
    return DeviceGroup(
        name,
        device(f"{name}_device", **kind),
        nodes,
        per_node,
        Link(1e-6 * latencies_us[0], intra_gb * 1e9),
        Link(1e-6 * latencies_us[1], inter_gb * 1e9),
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


def stage(units, where, tp=1, dp=1, size=1, mode="none", recomputed=0):
    return Stage(units, (ReplicaGroup(where, tp, dp, size),), Recompute(mode, recomputed))


def plan(*stages, m=8, **settings):
    return Plan(tuple(stages), m, **settings)
