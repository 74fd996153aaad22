"""The estimator as a whole: parts by hand, laws, what mixed clusters need, and the memo that cannot lie."""

import dataclasses
import itertools

import numpy as np
import pytest

from haap_rl.cost import compute
from haap_rl.cost.calibration import DEFAULT, Calibration
from haap_rl.cost.estimator import Estimator
from haap_rl.problem.cluster import Cluster, Link
from haap_rl.problem.plan import Plan, Recompute, ReplicaGroup, Stage
from haap_rl.problem.presets import load_problem
from tests.builders import group, plan, problem, stage

IDEAL = Calibration(
    gemm_efficiency=1.0, gemm_efficiency_by_device=(), gemm_half_size=0.0, memory_bandwidth_share=1.0,
    host_layer_s=0.0, host_microbatch_s=0.0, link_efficiency=1.0, gradient_sync_hidden=0.0, send_blocking=0.0,
)  # fmt: skip


def two_stages(**changes):
    values = {"m": 8, "tp": 1, "mode": "none", "recomputed": 0} | changes
    tp, mode, count = values["tp"], values["mode"], values["recomputed"]
    return plan(stage(3, "fast", tp, 1, 1, mode, count), stage(3, "slow"), m=values["m"])


def test_gemm_by_hand():
    # 2 x 100 x 200 x 300 = 12e6 FLOPs at half of 24e6 FLOP/s: 1 s; half_size 100: x (1 + 1)(1 + 1/2)(1 + 1/3) = 4
    assert compute.gemm_s(100, 200, 300, 24e6, 0.5, 0.0, 1e12, 2) == 1.0
    assert compute.gemm_s(100, 200, 300, 24e6, 0.5, 100.0, 1e12, 2) == pytest.approx(4.0)
    # memory-bound: 2 bytes x (100x200 + 200x300 + 100x300) = 220,000 bytes at 1,000 bytes/s
    assert compute.gemm_s(100, 200, 300, 1e15, 1.0, 0.0, 1000, 2) == 220


def test_fused_attention_does_half_the_square_and_no_score_traffic():
    separate = compute.attention_s(10, 100, 2, 50, False, False, 1.0, 1.0, 0.0, 1e30, 2)
    assert separate == 4 * 10 * 100 * 2 * 50
    assert compute.attention_s(10, 100, 2, 50, True, False, 1.0, 1.0, 0.0, 1e30, 2) == separate / 2
    traffic = compute.attention_s(10, 100, 2, 50, False, False, 1e30, 1.0, 0.0, 1.0, 2)
    assert traffic == pytest.approx(2 * (4 * 10 * 2 * 50 + 4 * 10 * 100 * 2))


def test_a_stage_is_its_units_and_backward_is_twice_forward():
    estimator = Estimator(problem(), calibration=IDEAL)
    first, last = estimator(two_stages()).stages
    operators = [
        compute.gemm_s(512, k, n, 100e12, 1.0, 0.0, 1e12, 2)
        for k, n in ((1024, 3072), (1024, 1024), (1024, 4096), (4096, 1024))
    ]
    operators.append(compute.attention_s(512, 512, 16, 64, False, True, 100e12, 1.0, 0.0, 1e12, 2))
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
    slow_host = Estimator(problem(), calibration=dataclasses.replace(IDEAL, host_layer_s=1.0, host_microbatch_s=0.5))
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
    free = Estimator(problem(), calibration=dataclasses.replace(DEFAULT, send_blocking=0.0))(two_stages())
    waits = Estimator(problem())(two_stages())
    for stage_free, stage_waits in zip(free.stages, waits.stages, strict=True):
        extra = stage_waits.forward_s - stage_free.forward_s
        assert extra == pytest.approx(DEFAULT.send_blocking * free.stages[0].send_s)
    assert waits.delays_s[0] == pytest.approx(0.2 * free.delays_s[0])


def test_send_uses_the_nics_of_the_narrower_side_and_node_links_inside_a_node():
    fast = group("fast", nodes=1, per_node=4, intra_gb=100, inter_gb=10)
    slow = group("slow", nodes=2, per_node=4, intra_gb=100, inter_gb=2)
    estimator = Estimator(problem((fast, slow)), calibration=IDEAL)
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
        return Estimator(problem((one,)))(plan(stage(6, "fast", tp, dp, 1), m=8 // dp)).stages[0].gradient_sync_s

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
    tied = Estimator(problem(model_changes={"tied_embeddings": True}))
    free = Estimator(problem())
    three = plan(stage(2, "fast"), stage(2, "fast"), stage(2, "slow"))
    extra = [a.gradient_sync_s - b.gradient_sync_s for a, b in zip(tied(three).stages, free(three).stages, strict=True)]
    assert extra[0] == extra[2] == pytest.approx(2 * 50e-6 + 32000 * 1024 * 4 / (10e9 * DEFAULT.link_efficiency))
    assert extra[1] == 0
    alone = plan(stage(6, "fast"))
    assert tied(alone).stages[0].gradient_sync_s == 0
    assert tied(alone).memory[0][0].weights_bytes == free(alone).memory[0][0].weights_bytes - 2 * 32000 * 1024


def test_memory_is_checked_on_each_device_type_of_a_mixed_stage():
    groups = (group("fast", memory_gb=40), group("slow", memory_gb=2))
    mixed = Stage(6, (ReplicaGroup("fast", 1, 2, 3), ReplicaGroup("slow", 1, 2, 1)))
    estimate = Estimator(problem(groups))(Plan((mixed,), 1))
    fast, slow = estimate.memory[0]
    assert fast.missing_bytes == 0
    assert slow.missing_bytes > 0
    assert not estimate.fits
    assert estimate.bottleneck == (0, "memory")


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


def test_where_a_slow_node_sits_matters():
    estimator = Estimator(problem(global_batch_size=8))
    front = plan(stage(2, "slow"), stage(2, "fast"), stage(2, "fast"))
    middle = plan(stage(2, "fast"), stage(2, "slow"), stage(2, "fast"))
    assert estimator(front).iteration_s != estimator(middle).iteration_s


def test_twelve_devices_per_node():
    wide = group("fast", nodes=2, per_node=12)
    estimate = Estimator(problem((wide,), global_batch_size=48))(plan(stage(6, "fast", 1, 24, 1), m=2))
    assert estimate.fits
    assert estimate.stages[0].num_devices == 24


def test_doubling_the_microbatches_of_a_fixed_batch_never_halves_the_time():
    estimator = Estimator(problem(global_batch_size=64))
    for m in (1, 2, 4, 8):
        few = plan(stage(3, "fast", 1, 1, 64 // m), stage(3, "slow", 1, 1, 64 // m), m=m)
        many = plan(stage(3, "fast", 1, 1, 32 // m), stage(3, "slow", 1, 1, 32 // m), m=2 * m)
        assert estimator(many).iteration_s > estimator(few).iteration_s / 2


# ---------------------------------------------------------------------------------- the memo
def random_plans(target, count, seed=0):
    """Random legal plans on every group of `target`, mixed stages included."""
    rng = np.random.default_rng(seed)
    while count:
        m = int(2 ** rng.integers(0, 4))
        samples = target.global_batch_size // m
        p = int(rng.integers(1, 5))
        cuts = np.sort(rng.choice(np.arange(1, target.model.num_units), p - 1, replace=False))
        units = np.diff([0, *cuts, target.model.num_units])
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
            again = 0 if mode == "none" else int(rng.integers(1, layers + 1)) if layers > 0 else 0
            stages.append(Stage(int(n), replicas, Recompute(mode if again else "none", again)))
        candidate = Plan(tuple(stages), m, int(rng.integers(2)), bool(rng.integers(2)))
        try:
            target.validate(candidate)
        except ValueError:
            continue
        count -= 1
        yield candidate


@pytest.mark.parametrize("preset", [("llama3_8b", "a100x8_v100x16"), ("gpt3_1_3b", "v100x4_t4x4")])
def test_cached_and_uncached_estimates_are_equal_bit_for_bit(preset):
    target = load_problem(*preset)
    cached, plain = Estimator(target), Estimator(target, cached=False)
    for candidate in random_plans(target, 150):
        assert cached(candidate) == plain(candidate)
    assert plain.operators_computed == plain.operators_requested == cached.operators_requested
    assert cached.operators_distinct == plain.operators_distinct
    assert cached.operators_computed < cached.operators_distinct < cached.operators_requested


def test_same_plan_same_cost_whatever_was_priced_before():
    target = load_problem()
    plans = list(random_plans(target, 40, seed=3))
    warm = Estimator(target)
    first = [warm(candidate) for candidate in plans]
    again = [warm(candidate) for candidate in reversed(plans)][::-1]
    cold = [Estimator(target)(candidate) for candidate in plans]
    assert first == again == cold


def test_random_plans_lie_between_their_closed_form_bounds():
    target = load_problem()
    estimator = Estimator(target)
    for candidate in random_plans(target, 150, seed=5):
        estimate = estimator(candidate)
        lower, upper = estimate.bounds_s
        assert lower <= estimate.iteration_s * (1 + 1e-12)
        assert estimate.iteration_s <= upper * (1 + 1e-12)


def test_more_tensor_parallel_never_needs_more_memory_per_device():
    target = load_problem()
    estimator = Estimator(target)
    used = [
        estimator(Plan((Stage(34, (ReplicaGroup("a100", tp, 1, 1),)),), 128)).memory[0][0].used_bytes
        for tp in (1, 2, 4, 8)
    ]
    assert all(narrow < wide for wide, narrow in itertools.pairwise(used))
