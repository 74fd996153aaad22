"""The estimator differentiates itself: its gradient by every constant is that of finite differences."""

import numpy as np
import pytest

from experiments.dual import Dual, value_of
from haap_rl.cost.calibration import parameters, with_parameters
from haap_rl.cost.estimator import Estimator
from haap_rl.problem.plan import ReplicaGroup, Stage
from tests.builders import calibration, group, plan, problem, stage

OF_MEMORY = ("reserve_bytes", "fragmentation")  # no second depends on them
CONSTANTS = calibration(
    gemm_efficiency=0.5, attention_efficiency=0.25, fused_attention_efficiency=0.25, memory_bandwidth_share=0.75,
    efficiency=0.5, latency_scale=2.0, host_layer_s=1e-4, host_microbatch_s=2e-4, host_iteration_s=1e-3,
    send_blocking=0.75, sync_hidden=0.25, gemm_half_size=100.0, unaligned_share=0.5, sharded_hidden=0.25,
    straggler_share=0.125, elementwise_passes=1.5, gemm_half_tokens=60.0, collective_s=3e-5, contention=0.125,
    small_message_s=1e-3,
)  # fmt: skip
CONSTANTS = with_parameters(  # a faster kind of link waits less, else its gradient is that of the kind below
    CONSTANTS,
    {
        "nvlink.latency_scale": 1.5, "rdma.latency_scale": 1.5, "fast_ethernet.latency_scale": 1.75,
        "rdma.small_message_s": 2.5e-4, "fast_ethernet.small_message_s": 5e-4,
    },
)  # fmt: skip
GROUPS = (  # no two links alike: a tie of a max or a min is no place to differentiate
    group("a100", nodes=2, inter_gb=90, nics=2),
    group("v100", nodes=2, tflops=20.0, intra_gb=20, inter_gb=10, latencies_us=(15, 60)),
)
MIXED = Stage(4, (ReplicaGroup("a100", 1, 1, 2), ReplicaGroup("v100", 2, 1, 2)))
PLANS = {
    "mixed stage, recompute, tied embeddings": plan(stage(6, "a100", 2, 2, 2, "selective", 3), MIXED, m=2),
    "sharded weights over two nodes": plan(stage(10, "a100", 1, 8, 1), m=1, zero_stage=3),
    "interleaved stages": plan(
        stage(5, "a100", 2, 2, 1, "full", 2), stage(5, "v100", 1, 2, 1), m=4, zero_stage=2, virtual_stages=2
    ),
}


def estimator(constants, framework="megatron"):
    target = problem(GROUPS, {"num_layers": 8, "tied_embeddings": True, "heads": 16}, framework=framework)
    return Estimator(target, calibration=with_parameters(CONSTANTS, constants))


@pytest.mark.parametrize("name", PLANS)
def test_the_gradient_by_every_constant_is_that_of_finite_differences(name):
    constants = {key: value for key, value in parameters(CONSTANTS).items() if not key.endswith(OF_MEMORY)}
    axes = np.eye(len(constants))
    duals = {key: Dual(value, axis) for (key, value), axis in zip(constants.items(), axes, strict=True)}
    seconds = estimator(duals)(PLANS[name]).iteration_s
    assert seconds.value == pytest.approx(estimator({})(PLANS[name]).iteration_s, rel=1e-14)
    for (key, value), slope in zip(constants.items(), seconds.gradient, strict=True):
        step = 1e-4 * value
        higher, lower = (estimator({key: value + h})(PLANS[name]).iteration_s for h in (step, -step))
        noise = 1e-13 * seconds.value / step
        assert slope == pytest.approx((higher - lower) / (2 * step), rel=1e-5, abs=noise), key
    moved = {key for key, slope in zip(constants, seconds.gradient, strict=True) if slope != 0}
    assert {"ampere.gemm_efficiency", "gemm_half_size", "megatron.host_layer_s"} <= moved
    assert not any(key.startswith(("hopper", "turing", "deepspeed", "fsdp")) for key in moved)


def test_dual_arithmetic():
    x = Dual(2.0, np.array([1.0, 0.0]))
    y = Dual(3.0, np.array([0.0, 1.0]))
    for result, value, gradient in (
        (x + y, 5, (1, 1)),
        (1 + x - y, 0, (1, -1)),
        (5 - x, 3, (-1, 0)),
        (x * y * 2, 12, (6, 4)),
        (x / y, 2 / 3, (1 / 3, -2 / 9)),
        (6 / x, 3, (-1.5, 0)),
        (x**3.0, 8, (12, 0)),
        (np.float64(2) * x, 4, (2, 0)),
        (max(x, y), 3, (0, 1)),
        (min(x, 1.0), 1, (0, 0)),
        (sum([x, y, 1]), 6, (1, 1)),
    ):
        assert value_of(result) == pytest.approx(value)
        if isinstance(result, Dual):
            assert result.gradient == pytest.approx(gradient)
    assert x < y
    assert x == 2.0
    assert not x >= 3
