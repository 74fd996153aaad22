"""What was measured beats the curves; what was not falls back in a way that is said. Small numbers worked by hand."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from haap_rl.cost import comm
from haap_rl.cost.calibration import DEFAULT
from haap_rl.cost.estimator import Estimator, UnitKey, fingerprint
from haap_rl.cost.profiles import CollectiveCell, Grid, MeasuredFor, Profile, Timing, UnitCell, _never_falling
from haap_rl.problem.errors import InputError
from haap_rl.problem.plan import Plan, ReplicaGroup, Stage
from haap_rl.search.base import Budget, load_searcher, run_search
from haap_rl.space.bound import lower_bound
from haap_rl.space.options import SpaceSpec
from tests.builders import group, plan, problem, random_plans, stage

FAST, SLOW = "fast_device", "slow_device"  # of the builders' two groups
LAYER = (
    UnitCell(FAST, "layer", 1, 1, 0.010, 0.030),
    UnitCell(FAST, "layer", 1, 4, 0.016, 0.036),
    UnitCell(FAST, "layer", 2, 1, 0.006, 0.018),
)
REDUCES = CollectiveCell(FAST, "all_reduce", 2, True, (Timing(1000, 1e-3), Timing(10_000_000, 5e-3)))
SPEC = SpaceSpec(num_microbatches=(2, 4, 8), max_stages=3, group_sizes=(1, 2, 4))


def made_of(*units, collectives=(), **conditions):
    return Profile("test", MeasuredFor(**conditions), units, tuple(collectives))


def unit_time(profile, unit="layer", tp=1, size=1, group=0, tp_nodes=1, target=None):
    estimator = Estimator(target or problem(), profile=profile)
    return estimator.unit_time(UnitKey(unit, group, tp, tp_nodes, size, True))


def seconds(time):
    return time.forward_s, time.backward_s


def gap(profile, unit="layer", tp=1, size=1, device=FAST):
    return Estimator(problem(), profile=profile)._measured.unit_gap(device, unit, tp, size)


# ------------------------------------------------------------------------------------------ units
def test_a_measured_cell_is_the_price_and_the_host_is_in_it():
    assert seconds(unit_time(made_of(*LAYER))) == (0.010, 0.030)
    quick = made_of(UnitCell(FAST, "layer", 1, 1, 1e-6, 2e-6))  # far below host_layer_s
    assert seconds(unit_time(quick)) == (1e-6, 2e-6)
    assert gap(made_of(*LAYER)) == ""


def test_between_two_micro_batches_the_price_is_linear_and_above_it_goes_on_along_the_last_two():
    assert seconds(unit_time(made_of(*LAYER), size=2)) == pytest.approx((0.012, 0.032))
    assert seconds(unit_time(made_of(*LAYER), size=8)) == pytest.approx((0.024, 0.044))
    assert gap(made_of(*LAYER), size=2) == ""
    assert gap(made_of(*LAYER), size=8) == (
        "layer on fast_device at tp 1, micro-batch 8: forward extrapolated from micro-batches 1 and 4, "
        "backward extrapolated from micro-batches 1 and 4"
    )


def test_a_falling_pair_is_not_extrapolated_below_its_last_point():
    falling = made_of(UnitCell(FAST, "layer", 1, 1, 0.02, 0.02), UnitCell(FAST, "layer", 1, 2, 0.01, 0.01))
    assert seconds(unit_time(falling, size=64)) == (0.01, 0.01)


@pytest.mark.parametrize(("tp", "size", "near"), [(4, 1, (2, 1)), (2, 4, (2, 1)), (4, 4, (2, 1))])
def test_a_gap_is_the_curve_scaled_by_the_nearest_cell_and_says_so(tp, size, near):
    estimator = Estimator(problem())

    def curve(tp, size):  # without collectives: so are the cells
        return estimator._curve_s(UnitKey("layer", 0, tp, 1, size, True))

    measured = made_of(*LAYER)
    time = unit_time(measured, tp=tp, size=size)
    added_s = 2 * estimator._tensor_parallel_all_reduce_s(UnitKey("layer", 0, tp, 1, size, True))
    assert time.forward_s == pytest.approx(curve(tp, size)[0] * 0.006 / curve(*near)[0] + added_s)
    assert time.backward_s == pytest.approx(curve(tp, size)[1] * 0.018 / curve(*near)[1] + added_s)
    assert f"forward is the curve scaled by tp {near[0]}, micro-batch {near[1]}" in gap(measured, tp=tp, size=size)


def test_below_the_smallest_micro_batch_the_curve_is_scaled():
    late = made_of(UnitCell(FAST, "layer", 1, 4, 0.016, 0.036), UnitCell(FAST, "layer", 1, 8, 0.03, 0.07))
    assert 0 < unit_time(late, size=1).forward_s < 0.016
    assert "scaled by tp 1, micro-batch 4" in gap(late, size=1)


def test_a_direction_that_was_not_measured_is_scaled_by_the_other_one_and_never_free():
    half = made_of(UnitCell(FAST, "embedding", 1, 1, 0.5, None))
    plain, time = unit_time(None, "embedding"), unit_time(half, "embedding")
    assert time.forward_s == 0.5
    assert time.backward_s == pytest.approx(plain.backward_s * 0.5 / plain.forward_s)
    assert gap(half, "embedding").endswith("backward is the curve scaled by tp 1, micro-batch 1")


def test_a_device_without_a_cell_keeps_its_curve_and_says_so():
    measured = made_of(*LAYER)
    assert unit_time(measured, group=1) == unit_time(None, group=1)
    assert gap(measured, device=SLOW) == "layer on slow_device: nothing measured, the estimator's curve"
    two = plan(stage(3, "fast"), stage(3, "slow"), m=8)
    lines = Estimator(problem(), profile=measured).gaps(two)
    assert [line for line in lines if "slow_device: nothing" in line]
    assert Estimator(problem()).gaps(two) == ()


def test_a_cell_that_ran_out_of_memory_is_a_gap_that_says_why_and_drops_no_plan():
    full = UnitCell(FAST, "layer", 1, 16, out_of_memory=True)
    assert "out of memory when measured, forward extrapolated" in gap(made_of(*LAYER, full), size=16)
    assert unit_time(made_of(*LAYER, full), size=16) == unit_time(made_of(*LAYER), size=16)
    assert unit_time(made_of(full), size=16) == unit_time(None, size=16)
    one = plan(stage(6, "fast", size=8), m=1)
    assert Estimator(problem(), profile=made_of(full))(one).iteration_s > 0


def test_full_recompute_adds_the_measured_forward_and_selective_the_attention():
    measured = made_of(LAYER[0]._replace(attention_s=0.004))
    time = unit_time(measured)
    assert time.backward_full_s == pytest.approx(0.040)
    assert time.backward_selective_s == pytest.approx(0.034)
    unsplit, plain = unit_time(made_of(*LAYER)), unit_time(None)
    assert 0.030 < unsplit.backward_selective_s < unsplit.backward_full_s
    assert plain.backward_s < plain.backward_selective_s


def test_collectives_come_on_top_unless_the_measured_times_hold_them():
    apart = unit_time(made_of(*LAYER, collectives=[REDUCES]), tp=2)
    assert apart.forward_s > 0.006
    assert apart.forward_s - 0.006 == pytest.approx(apart.tensor_parallel_s / 2)
    inside = unit_time(made_of(*LAYER, collectives_included=True), tp=2)
    assert seconds(inside) == (0.006, 0.018)


def test_a_tied_head_does_the_work_of_a_head():
    head = made_of(UnitCell(FAST, "head", 1, 1, 0.2, 0.4))
    assert seconds(unit_time(head, "tied_head")) == seconds(unit_time(head, "head")) == (0.2, 0.4)


def test_a_straddling_replica_is_never_faster_than_one_within_a_node():
    wide = problem(model_changes={"hidden": 2048, "heads": 32, "kv_heads": 32, "head_dim": 64})
    slow_links = CollectiveCell(FAST, "all_reduce", 2, True, (Timing(1, 10.0),))
    for profile in (
        made_of(*LAYER, collectives=[slow_links]),
        made_of(*LAYER, collectives=[REDUCES]),
        made_of(*LAYER, collectives_included=True),
    ):
        within, across = (unit_time(profile, tp=2, tp_nodes=nodes, target=wide) for nodes in (1, 2))
        assert across.forward_s >= within.forward_s
        assert across.backward_s >= within.backward_s


# -------------------------------------------------------------------------------------- collectives
def test_a_measured_collective_is_interpolated_in_its_size():
    measured = Estimator(problem(), profile=made_of(collectives=[REDUCES]))._measured

    def of(num_bytes, ranks=2):
        return measured.collective_s(FAST, "all_reduce", ranks, num_bytes, lambda n: 1.0 * n)

    assert of(1000) == of(1) == 1e-3  # latency below the smallest
    assert of(5_000_500) == pytest.approx(3e-3)
    assert of(20_000_000) == pytest.approx(10e-3)  # rate above the largest
    assert of(1000, ranks=4) == pytest.approx(2e-3)  # the formula, scaled by what 2 ranks took
    assert measured.collective_gap(FAST, "all_reduce", 4).endswith("scaled by 2 ranks")
    assert measured.collective_gap(FAST, "all_gather", 2).endswith("nothing measured, the alpha-beta model")
    assert measured.collective_s(SLOW, "all_reduce", 2, 1000, lambda n: 1.0) is None


def test_gradient_sync_in_a_node_is_a_measured_reduce_scatter_and_all_gather():
    cells = [
        CollectiveCell(FAST, operation, 2, True, (Timing(1, seconds), Timing(10**12, seconds)))
        for operation, seconds in (("reduce_scatter", 0.25), ("all_gather", 0.5), ("all_reduce", 0.6))
    ]
    fast = group("fast")
    bf16 = dataclasses.replace(fast.device, peak_flops=(("bf16", 100e12),))
    target = problem((dataclasses.replace(fast, device=bf16),), precision="bf16")
    # Megatron-LM reduces gradients of 4 bytes and gathers weights of 2; of equal sizes the all-reduce is faster
    for some, zero_stage, wanted_s in ((cells, 1, 0.75), (cells, 0, 0.6), (cells, 2, 0.5), (cells[2:], 1, 0.6)):
        one = Plan((stage(6, "fast", dp=2),), 4, zero_stage=zero_stage)
        found = Estimator(target, profile=made_of(collectives=some))(one).stages[0]
        shown = 1.0 - DEFAULT.framework("megatron").sync_hidden
        assert found.gradient_sync_s == pytest.approx(max(shown * wanted_s, wanted_s - found.backward_s))


def test_what_was_measured_between_nodes_does_not_price_a_node():
    outside = REDUCES._replace(inside_node=False)
    assert unit_time(made_of(collectives=[outside]), tp=2) == unit_time(None, tp=2)


def test_times_that_fall_with_size_are_averaged_and_rising_ones_kept():
    assert _never_falling([(3, 1.0), (2, 3.0), (1, 1.0), (4, 5.0)]) == [(1, 1.0), (2, 2.0), (3, 2.0), (4, 5.0)]
    rng = np.random.default_rng(0)
    points = _never_falling((i, float(s)) for i, s in enumerate(rng.random(200)))
    assert all(before <= after for (_, before), (_, after) in itertools.pairwise(points))
    assert sum(s for _, s in points) == pytest.approx(np.random.default_rng(0).random(200).sum())


# ------------------------------------------------------------------------------------------- memory
def activation(profile, mode="none", tp=1, size=1, group=0, sequence_parallel=True, **settings):
    estimator = Estimator(problem(**settings), profile=profile)
    return estimator.unit_memory("layer", tp, 1, size, mode, 1, sequence_parallel, group)


KEEPS = made_of(LAYER[0]._replace(activation_bytes=123_456_789))


def test_measured_activation_bytes_are_what_a_layer_keeps():
    assert activation(KEEPS).activation == 123_456_789
    assert activation(KEEPS, group=1) == activation(None, group=1)
    one = Estimator(problem(), profile=KEEPS)(plan(stage(6, "fast"), m=8))
    plain = Estimator(problem())(plan(stage(6, "fast"), m=8))
    formula = activation(None).activation
    assert one.memory[0][0].activations_bytes - plain.memory[0][0].activations_bytes == 4 * (123_456_789 - formula)


def test_recomputed_layers_keep_the_formula_and_work_in_the_measured_bytes():
    for mode in ("selective", "full"):
        kept = activation(KEEPS, mode)
        assert kept.activation == activation(None, mode).activation
        assert kept.working == 123_456_789 - kept.activation
    fused = activation(KEEPS, "selective", fused_attention=True)  # it never keeps scores
    assert fused.activation == 123_456_789
    assert fused.working == 0


def test_a_gap_in_activation_bytes_is_the_formula_scaled():
    base = activation(None).activation
    wider = activation(KEEPS, size=4).activation
    assert wider == pytest.approx(123_456_789 * activation(None, size=4).activation / base, abs=1)
    # measured without sequence parallelism, asked for with it: by the ratio of the formulas
    split = made_of(LAYER[2]._replace(activation_bytes=10**8))
    without, with_it = (activation(None, tp=2, sequence_parallel=sp).activation for sp in (False, True))
    assert activation(split, tp=2, sequence_parallel=False).activation == 10**8
    assert activation(split, tp=2).activation == pytest.approx(10**8 * with_it / without, abs=1)
    lines = Estimator(problem(), profile=split).gaps(plan(stage(6, "fast", tp=2), m=8))
    assert any("measured without sequence parallelism" in line for line in lines)


# ----------------------------------------------------------------------------- the profile as a whole
@pytest.mark.parametrize(
    ("conditions", "words"),
    [
        ({"dimensions": (("hidden", 4096),)}, ["hidden=4096", "has 1024"]),
        ({"dimensions": (("kv_heads", 8),)}, ["kv_heads=8"]),
        ({"dimensions": (("gated_mlp", True),)}, ["gated_mlp=true", "has false"]),
        ({"seq_len": 2048}, ["seq_len=2048", "has 512"]),
        ({"precision": "bf16"}, ["precision=bf16"]),
        ({"fused_attention": True}, ["fused_attention=true"]),
    ],
)
def test_a_profile_of_another_problem_is_refused_in_one_line(conditions, words):
    with pytest.raises(InputError) as error:
        Estimator(problem(), profile=dataclasses.replace(made_of(**conditions), file="mine.json"))
    text = str(error.value)
    assert "\n" not in text
    assert all(word in text for word in ["profile 'mine.json'", "drop estimator.profile", *words]), text


def test_what_a_profile_does_not_state_is_not_refused():
    Estimator(problem(), profile=made_of())


@pytest.mark.parametrize(
    ("cluster", "profile", "same"),
    [
        ("a100_80", "a100_80", True),
        ("a100_40_16gib", "a100_40", True),  # as the reader of Metis clusters names a card of another memory
        ("a100_80", "a100", True),  # a bare family, as Metis writes it
        ("a100_80_pcie", "a100_80", False),
        ("a100_80", "a10", False),
        ("l40s", "l40", False),
    ],
)
def test_which_devices_a_profile_speaks_of(cluster, profile, same):
    groups = problem().cluster.groups
    group = dataclasses.replace(groups[0], device=dataclasses.replace(groups[0].device, name=cluster))
    target = problem((group,))
    time = unit_time(made_of(LAYER[0]._replace(device=profile)), target=target)
    assert (seconds(time) == (0.010, 0.030)) is same


def noisy(seed=0, **conditions):
    """A profile with gaps: some cells of both devices, some collectives, all at random."""
    rng = np.random.default_rng(seed)
    target = problem()
    curve = Estimator(target)
    units = []
    for index, where in enumerate(target.cluster.groups):
        for unit in ("embedding", "layer", "head"):
            for tp, size in ((1, 1), (1, 2), (1, 8), (2, 1), (2, 4), (4, 2)):
                if rng.random() < 0.4:
                    continue
                time = curve.unit_time(UnitKey(unit, index, tp, 1, size, False))
                factors = np.exp(rng.normal(0, 0.3, 3))
                units.append(
                    UnitCell(
                        where.device.name,
                        unit,
                        tp,
                        size,
                        float(time.forward_s * factors[0]),
                        float(time.backward_s * factors[1]) if rng.random() < 0.8 else None,
                        activation_bytes=int(30_000_000 * size / tp * factors[2]) if unit == "layer" else None,
                    )
                )
    sizes = (10**4, 10**6, 10**8)
    collectives = [
        CollectiveCell(FAST, operation, ranks, True, tuple(Timing(n, 1e-4 + n * 1e-10 * rng.random()) for n in sizes))
        for operation in ("all_reduce", "reduce_scatter", "all_gather")
        for ranks in (2, 4)
        if rng.random() < 0.7
    ]
    return made_of(*units, collectives=collectives, **conditions)


@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_cached_and_uncached_estimates_with_a_profile_are_equal_bit_for_bit(seed, included):
    target, profile = problem(), noisy(seed, collectives_included=included)
    cached, plain = Estimator(target, profile=profile), Estimator(target, cached=False, profile=profile)
    for candidate in random_plans(target, 60, seed):
        estimate = cached(candidate)
        assert estimate == plain(candidate)
        assert math.isfinite(estimate.iteration_s)
        assert estimate.iteration_s > 0
        assert cached.gaps(candidate) == plain.gaps(candidate)


def test_search_bound_and_counts_all_use_the_profile_and_traces_repeat():
    target = problem()
    for seed in range(3):
        profile = noisy(seed)
        exact = run_search(load_searcher("exact"), target, Budget(20_000), 0, SPEC, profile=profile)
        assert exact.proven_optimal
        assert lower_bound(target, SPEC, profile).seconds <= exact.estimate.iteration_s
        runs = [
            run_search(load_searcher("autohaap"), target, Budget(150), 1, SPEC, cached=cached, profile=profile)
            for cached in (True, True, False)
        ]
        assert runs[0] == runs[1]
        assert runs[0].plan == runs[2].plan
        assert [p.best_iteration_time_s for p in runs[0].trace] == [p.best_iteration_time_s for p in runs[2].trace]
        assert runs[0].estimate.iteration_s >= exact.estimate.iteration_s
        assert Estimator(target, profile=profile)(exact.plan) == exact.estimate
    assert exact.profile is profile
    assert exact.profile_gaps == Estimator(target, profile=profile).gaps(exact.plan)


def test_a_profile_can_turn_the_order_of_two_devices():
    cells = [
        UnitCell(device, unit, 1, size, seconds * size, 2 * seconds * size)
        for device, seconds in ((FAST, 0.04), (SLOW, 0.004))
        for unit in ("embedding", "layer", "head")
        for size in (1, 2, 4)
    ]
    few = SpaceSpec(num_microbatches=(8,), max_stages=2, max_tp=1, group_sizes=(1,))

    def layers_on_slow(profile):
        found = run_search(load_searcher("exact"), problem(), Budget(5000), 0, few, profile=profile).plan
        return sum(s.num_units for s in found.stages if s.replicas[0].group == "slow")

    assert layers_on_slow(None) < layers_on_slow(made_of(*cells)) == 6


def test_the_fingerprint_holds_the_profile_and_the_checksum_its_content():
    one, other = made_of(*LAYER), made_of(*LAYER[:2])
    assert len({fingerprint(), fingerprint(profile=one), fingerprint(profile=other)}) == 3
    assert dataclasses.replace(one, file="elsewhere.json").checksum == one.checksum
    assert dataclasses.replace(one, grid=Grid((1,), (1,), (), (4,), 1, 1)).checksum != one.checksum


def test_a_mixed_stage_across_two_devices_is_priced_and_its_gaps_are_named():
    mixed = Stage(6, (ReplicaGroup("fast", 1, 2, 1), ReplicaGroup("slow", 1, 2, 1)))
    estimator = Estimator(problem(), profile=noisy())
    assert estimator(Plan((mixed,), 2)).iteration_s > 0
    assert not any("reduce_scatter" in line for line in estimator.gaps(Plan((mixed,), 2)))


def test_measured_collectives_of_the_estimator_fall_back_to_the_model_it_has():
    key = UnitKey("layer", 1, 2, 1, 1, True)  # the slow group, of which none was measured
    link = problem().cluster.groups[1].intra_node
    num_bytes = 512 * 1024 * 2.0
    wanted = comm.ring_all_reduce_s(num_bytes, 2, *DEFAULT.inside(link)) + DEFAULT.collective_s
    assert Estimator(problem(), profile=noisy())._tensor_parallel_all_reduce_s(key) == wanted
