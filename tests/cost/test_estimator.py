"""The estimator as a whole: parts by hand, and what mixed clusters need."""

import dataclasses

import pytest

from haap_rl.cost import compute
from haap_rl.cost.estimator import Estimator
from haap_rl.problem.cluster import Cluster, Link
from haap_rl.problem.plan import Plan, ReplicaGroup, Stage
from tests.builders import PLAIN, calibration, group, plan, problem, stage


def two_stages(**changes):
    values = {"m": 8, "tp": 1, "mode": "none", "recomputed": 0} | changes
    tp, mode, count = values["tp"], values["mode"], values["recomputed"]
    return plan(stage(3, "fast", tp, 1, 1, mode, count), stage(3, "slow"), m=values["m"])


def test_gemm_by_hand():
    # 2 x 100 x 200 x 300 = 12e6 FLOPs at half of 24e6 FLOP/s: 1 s
    def gemm_s(outputs=300, peak=24e6, efficiency=0.5, half=0.0, half_tokens=0.0, unaligned=1.0, bytes_per_s=1e12):
        return compute.gemm_s(100, 200, outputs, peak, efficiency, half, half_tokens, unaligned, bytes_per_s, 2)

    assert gemm_s() == 1.0
    # 100 wasted beside 100 tokens: x (1 + 1); beside weights of 200 and 300: x (1 + 1/2) (1 + 1/3)
    assert gemm_s(half_tokens=100.0) == pytest.approx(2.0)
    assert gemm_s(half=100.0) == pytest.approx(2.0)
    assert gemm_s(half=100.0, half_tokens=100.0) == pytest.approx(4.0)
    # 300 is no multiple of 8: a fifth of the speed; 304 is one
    assert gemm_s(unaligned=0.2) == pytest.approx(5.0)
    assert gemm_s(304, unaligned=0.2) == pytest.approx(304 / 300)
    # memory-bound: 2 bytes x (100x200 + 200x300 + 100x300) = 220,000 bytes at 1,000 bytes/s
    assert gemm_s(peak=1e15, efficiency=1.0, bytes_per_s=1000.0) == 220


def attention_s(head_dim=64, fused=False, dropout=False, peak=1.0, efficiency=1.0, passes=1.0, bytes_per_s=1e30):
    """Of 10 queries of a sequence of 100 on 2 heads; an unaligned head keeps a quarter of the speed."""
    return compute.attention_s(10, 100, 2, head_dim, fused, dropout, peak, efficiency, 0.25, passes, bytes_per_s, 2)


def test_fused_attention_does_half_the_square_and_no_score_traffic():
    separate = attention_s()
    assert separate == 4 * 10 * 100 * 2 * 64
    assert attention_s(fused=True) == separate / 2
    assert attention_s(efficiency=0.5) == 2 * separate
    traffic = attention_s(peak=1e30, bytes_per_s=1.0)
    assert traffic == pytest.approx(2 * (4 * 10 * 2 * 64 + 4 * 10 * 100 * 2))
    # dropout reads and writes a 2-byte value and a 1-byte mask of each score
    dropped = attention_s(dropout=True, peak=1e30, bytes_per_s=1.0)
    assert dropped - traffic == pytest.approx(5 * 10 * 100 * 2)
    # a softmax of three kernels moves all of it three times; a fused one has no such passes
    assert attention_s(peak=1e30, bytes_per_s=1.0, passes=3.0) == pytest.approx(3 * traffic)
    assert attention_s(fused=True, passes=3.0) == attention_s(fused=True)


def test_heads_of_an_odd_size_leave_the_tensor_cores():
    even = attention_s(80, fused=True)
    odd = attention_s(50, fused=True)
    assert odd == pytest.approx(even * 50 / 80 * 4)


def test_the_host_hides_behind_the_device_or_sets_the_pace():
    assert compute.launched_s(3.0, 0.0) == 3
    assert compute.launched_s(0.0, 3.0) == 3
    assert compute.launched_s(1.0, 1.0) == pytest.approx(2**0.25)
    assert compute.launched_s(100.0, 1.0) == pytest.approx(100, rel=1e-8)
    assert compute.launched_s(2.0, 5.0) == compute.launched_s(5.0, 2.0)


def test_a_stage_is_its_units_and_backward_is_twice_forward():
    estimator = Estimator(problem(), calibration=PLAIN)
    first, last = estimator(two_stages()).stages
    operators = [
        compute.gemm_s(512, k, n, 100e12, 1.0, 0.0, 0.0, 1.0, 1e12, 2)
        for k, n in ((1024, 3072), (1024, 1024), (1024, 4096), (4096, 1024))
    ]
    operators.append(compute.attention_s(512, 512, 16, 64, False, True, 100e12, 1.0, 1.0, 1.0, 1e12, 2))
    moved = (1024 * 2) * 2 + (3 * 1024) * 2 + 2 * 4096
    layer = sum(operators) + compute.elementwise_s(512, moved, 1e12, 2)
    embedding = compute.elementwise_s(512, 2 * 1024, 1e12, 2)
    assert first.forward_s == pytest.approx(2 * layer + embedding)
    assert first.backward_s == pytest.approx(2 * first.forward_s)
    assert last.forward_s > first.forward_s  # half the peak, and the head


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recompute_costs_time_and_saves_memory(mode):
    estimator = Estimator(problem())
    keep, again = estimator(two_stages()), estimator(two_stages(mode=mode, recomputed=2))
    one = estimator(two_stages(mode=mode, recomputed=1))
    assert keep.stages[0].backward_s < one.stages[0].backward_s < again.stages[0].backward_s
    assert keep.memory[0][0].activations_bytes > one.memory[0][0].activations_bytes
    assert one.memory[0][0].activations_bytes > again.memory[0][0].activations_bytes
    assert again.stages[0].recompute_s == pytest.approx(again.stages[0].backward_s - keep.stages[0].backward_s)


def test_the_host_sets_a_floor_per_layer():
    slow_host = Estimator(problem(), calibration=calibration(host_layer_s=1.0, host_microbatch_s=0.5))
    first = slow_host(two_stages()).stages[0]
    assert first.forward_s == pytest.approx(2 * 1.0 + 0.5, rel=1e-3)
    assert first.backward_s == pytest.approx(2 * 1.0, rel=1e-3)


def test_iteration_is_the_schedule_plus_the_last_tail_and_lies_between_its_bounds():
    estimate = Estimator(problem())(two_stages())
    lower, upper = estimate.bounds_s
    assert lower <= estimate.iteration_s * (1 + 1e-12)
    assert estimate.iteration_s <= upper * (1 + 1e-12)
    assert estimate.iteration_s >= estimate.makespan_s
    assert 0 < estimate.bubble < 1
    assert 0 < estimate.balance <= 1
    assert estimate.tokens_per_s == pytest.approx(8 * 512 / estimate.iteration_s)
    assert max(slot.end_s for slot in estimate.timeline()) == pytest.approx(estimate.makespan_s)


def test_blocking_sends_keep_both_stages_busy():
    free = Estimator(problem(), calibration=PLAIN)(two_stages())
    waits = Estimator(problem(), calibration=calibration(send_blocking=0.75))(two_stages())
    for stage_free, stage_waits in zip(free.stages, waits.stages, strict=True):
        assert stage_waits.forward_s - stage_free.forward_s == pytest.approx(0.75 * free.stages[0].send_s)
    assert waits.delays_s[0] == pytest.approx(0.25 * free.delays_s[0])


def test_send_uses_the_nics_of_the_narrower_side_and_node_links_inside_a_node():
    fast = group("fast", nodes=1, per_node=4, intra_gb=100, inter_gb=10)
    slow = group("slow", nodes=2, per_node=4, intra_gb=100, inter_gb=2)
    estimator = Estimator(problem((fast, slow)), calibration=PLAIN)
    num_bytes = 2 * 512 * 1024 * 8  # a micro-batch of 8
    narrow = plan(stage(3, "fast", 1, 4, 2), stage(3, "slow", 1, 4, 2), m=1)
    wide = plan(stage(3, "fast", 1, 4, 2), stage(3, "slow", 1, 8, 1), m=1)
    inside = plan(stage(3, "fast", 1, 2, 4), stage(3, "fast", 1, 2, 4), m=1)
    assert estimator(narrow).stages[0].send_s == pytest.approx(50e-6 + num_bytes / 2e9)
    assert estimator(wide).stages[0].send_s == pytest.approx(50e-6 + num_bytes / 4e9)
    assert estimator(inside).stages[0].send_s == pytest.approx(20e-6 + num_bytes / 200e9)


def test_a_link_between_groups_counts():
    base = problem()
    fast = dataclasses.replace(
        base, cluster=Cluster("linked", base.cluster.groups, (("slow", "fast", Link(1e-3, 1e8)),))
    )
    assert Estimator(fast)(two_stages()).iteration_s > Estimator(base)(two_stages()).iteration_s


def test_gradient_sync_across_nodes_is_slower_and_shares_the_nic():
    def sync(nodes, per_node, tp=1, dp=4):
        one = group("fast", nodes=nodes, per_node=per_node, intra_gb=100, inter_gb=1)
        estimate = Estimator(problem((one,)), calibration=PLAIN)(plan(stage(6, "fast", tp, dp, 1), m=8 // dp))
        return estimate.stages[0].gradient_sync_s

    assert sync(2, 2) > 5 * sync(1, 4)
    # tp 2, dp 2 on two nodes: half the bytes per ring, but two rings share each NIC: per NIC the same bytes as dp 2,
    # but for the few parameters that every tensor-parallel rank holds
    assert sync(2, 2, tp=2, dp=2) == pytest.approx(sync(2, 1, tp=1, dp=2), rel=0.02)
    assert sync(1, 4, dp=1) == 0


def test_groups_that_straddle_nodes_pay_the_slow_tier():
    # three devices per node: a pair placed behind two devices lies across the node border
    three = group("fast", nodes=2, per_node=3, intra_gb=100, inter_gb=0.1)
    inside = plan(stage(6, "fast", 2, 1, 1))
    across = plan(stage(3, "fast", 2, 1, 1), stage(3, "fast", 2, 1, 1))
    estimator = Estimator(problem((three,)))
    second = estimator(across).stages[1]
    assert second.tensor_parallel_s > 10 * estimator(inside).stages[0].tensor_parallel_s / 2


def test_tied_embeddings_are_reduced_between_first_and_last_stage_only():
    tied = Estimator(problem(model_changes={"tied_embeddings": True}), calibration=PLAIN)
    free = Estimator(problem(), calibration=PLAIN)
    three = plan(stage(2, "fast"), stage(2, "fast"), stage(2, "slow"))
    extra = [a.gradient_sync_s - b.gradient_sync_s for a, b in zip(tied(three).stages, free(three).stages, strict=True)]
    # an all-reduce of two: 2 x (50 us + half of the 16-bit gradient over the 10 GB/s of one adapter)
    assert extra[0] == extra[2] == pytest.approx(2 * 50e-6 + 32000 * 1024 * 2 / 10e9)
    assert extra[1] == 0
    alone = plan(stage(6, "fast"))
    assert tied(alone).stages[0].gradient_sync_s == 0
    assert tied(alone).memory[0][0].weights_bytes == free(alone).memory[0][0].weights_bytes - 2 * 32000 * 1024


def test_a_mixed_stage_goes_at_the_pace_of_its_slowest_replica_and_syncs_over_the_slowest_link():
    both = problem()
    mixed = Stage(6, (ReplicaGroup("fast", 1, 1, 4), ReplicaGroup("slow", 1, 1, 4)))
    only_slow = plan(stage(6, "slow", 1, 2, 4), m=1)
    estimator = Estimator(both)
    estimate, slow = estimator(Plan((mixed,), 1)), estimator(only_slow)
    assert estimate.stages[0].forward_s == slow.stages[0].forward_s
    assert estimate.stages[0].gradient_sync_s > slow.stages[0].gradient_sync_s


def test_in_flight_microbatches_fill_the_first_stage_most():
    deep = plan(*(stage(units, "fast") for units in (2, 1, 1, 2)), m=8)
    activations = [groups[0].activations_bytes for groups in Estimator(problem())(deep).memory]
    assert activations[1] == pytest.approx(1.5 * activations[2])
    assert activations[0] > activations[1]


def test_better_hardware_is_never_slower():
    base = {"tflops": 50.0, "bandwidth_gb": 500.0, "intra_gb": 20.0, "inter_gb": 2.0}
    candidate = plan(stage(3, "fast", 2, 1, 4), stage(3, "slow", 1, 4, 1), m=2)

    def seconds(**changes):
        slow = group("slow", nodes=2, per_node=2, **{**base, **changes})
        return Estimator(problem((group("fast"), slow)))(candidate).iteration_s

    before = seconds()
    for key, value in base.items():
        assert seconds(**{key: 2 * value}) <= before
    assert seconds(inter_gb=20.0) < before


def test_one_device_sends_through_one_adapter_and_all_devices_through_all():
    # nodes of four devices and four adapters that share 8 GB/s
    groups = tuple(group(name, per_node=4, inter_gb=8, nics=4) for name in ("fast", "slow"))
    estimator = Estimator(problem(groups), calibration=PLAIN)
    num_bytes = 2 * 512 * 1024 * 8  # a micro-batch of 8

    def send_s(front, behind):
        return (
            estimator(plan(stage(3, "fast", 1, front, 8 // front), stage(3, "slow", 1, behind, 8 // behind), m=1))
            .stages[0]
            .send_s
        )

    assert send_s(1, 1) == pytest.approx(50e-6 + num_bytes / 2e9)
    assert send_s(2, 2) == pytest.approx(50e-6 + num_bytes / 4e9)
    assert send_s(4, 4) == pytest.approx(50e-6 + num_bytes / 8e9)
    assert send_s(1, 4) == send_s(4, 1) == send_s(1, 1)  # the narrower side


def test_the_same_network_in_more_adapters_is_never_faster():
    def seconds(nics, dp):
        one = group("fast", nodes=2, per_node=4, inter_gb=8, nics=nics)
        return Estimator(problem((one,)), calibration=PLAIN)(plan(stage(6, "fast", 1, dp, 8 // dp), m=1)).iteration_s

    assert seconds(1, 8) == seconds(4, 8)  # four devices of each node reach all four
    assert seconds(1, 8) < seconds(8, 8)  # of eight they reach four


def test_a_replica_over_two_nodes_pays_the_network_and_shares_it():
    # tp 8 on two nodes of four against tp 4 on one: its all-reduces cross 1 GB/s
    target = problem((group("fast", nodes=2, per_node=4, intra_gb=100, inter_gb=1),))
    estimator = Estimator(target, calibration=PLAIN)
    inside, across = (estimator(plan(stage(6, "fast", tp))).stages[0] for tp in (4, 8))
    num_bytes = 512 * 1024 * 2
    # 18 all-reduces: 4 in each of 4 layers, one of the embedding, one of the head. Inside: a ring of four
    assert inside.tensor_parallel_s == pytest.approx(18 * 2 * (3 * 20e-6 + 0.75 * num_bytes / 100e9))
    # across: the same in each node, and four rings of two that share the adapter, each with a quarter of the bytes
    between_s = 2 * (50e-6 + 0.5 * num_bytes / 4 / 0.25e9)
    assert across.tensor_parallel_s == pytest.approx(inside.tensor_parallel_s + 18 * between_s)
    assert across.tensor_parallel_s > 9 * inside.tensor_parallel_s
