"""Expected throughput: counts, sets and draws agree with the Markov chain and with simulated traces; laws; by hand."""

import math
import statistics

import numpy as np
import pytest

from haap_rl.faults import expected
from haap_rl.faults.checkpoint import dalys_efficiency, youngs_interval_s
from haap_rl.faults.cost import FaultEstimator
from haap_rl.faults.expected import Counts, by_draws, by_sets, elements, expected_throughput
from haap_rl.faults.markov import long_run
from haap_rl.faults.model import Hazard
from haap_rl.faults.policy import POLICIES, Constants, policy_named
from haap_rl.faults.reactions import Reactions
from haap_rl.faults.simulate import simulate
from haap_rl.faults.traces import draw
from haap_rl.mecefo.options import MecefoOptions
from haap_rl.problem.plan import ReplicaGroup, Stage
from tests.builders import group, plan, problem, stage

OPTIONS = MecefoOptions(rank=8, takeover="most_slack")
SEPARABLE = ("restart", "recycle", "naive_neighbour", "mecefo")
HOUR_S = 3600.0
DEVICES = (Hazard("device", recovery_s=2 * HOUR_S, mtbf_s=20 * HOUR_S),)
NODES = (Hazard("node", recovery_s=3 * HOUR_S, mtbf_s=30 * HOUR_S),)


def grid(p, dp, tp=1, **settings):
    """(problem, plan) of p stages of dp replicas of tp devices on as many devices."""
    layers = settings.pop("layers", 4)
    groups = (group("fast", nodes=settings.pop("nodes", 1), per_node=settings.pop("per_node", p * dp * tp)),)
    changes = {"num_layers": layers, **settings.pop("model_changes", {})}
    spec = {key: settings.pop(key) for key in ("zero_stage", "mode") if key in settings}
    target = problem(groups, changes, global_batch_size=4 * dp, **settings)
    units = [(layers + 2) // p + (i < (layers + 2) % p) for i in range(p)]
    stages = []
    for i, n in enumerate(units):
        layers_here, mode = n - (i == 0) - (i == p - 1), spec.get("mode", "none")
        stages.append(stage(n, "fast", tp=tp, dp=dp, mode=mode, recomputed=layers_here if mode != "none" else 0))
    return target, plan(*stages, m=4, zero_stage=spec.get("zero_stage", 1))


def mixed():
    """A stage on two device types beside one on one type."""
    target = problem((group("fast", per_node=3), group("slow", per_node=2, tflops=50.0)), global_batch_size=12)
    both = Stage(2, (ReplicaGroup("fast", 1, 1, 2), ReplicaGroup("slow", 1, 1, 1)))
    return target, plan(both, Stage(4, (ReplicaGroup("fast", 1, 2, 1), ReplicaGroup("slow", 1, 1, 1))), m=4)


CASES = {
    "2 x 2": lambda: (*grid(2, 2), DEVICES),
    "3 x 2": lambda: (*grid(3, 2, layers=7), DEVICES),
    "2 x 3, ZeRO-0": lambda: (*grid(2, 3, zero_stage=0), DEVICES),
    "tied embeddings": lambda: (*grid(2, 2, model_changes={"tied_embeddings": True}), DEVICES),
    "recomputing": lambda: (*grid(2, 2, mode="full"), DEVICES),
    "one stage": lambda: (*grid(1, 4), DEVICES),
    "mixed types": lambda: (*mixed(), DEVICES),
    "two rates": lambda: (
        *mixed(),
        (
            *DEVICES[:0],
            *(
                Hazard("device", HOUR_S, mtbf_s=h * HOUR_S, device=f"{d}_device")
                for d, h in (("fast", 40), ("slow", 9))
            ),
        ),
    ),
    "nodes": lambda: (*grid(2, 2, nodes=2, per_node=2), NODES),
    "nodes across": lambda: (*grid(2, 3, nodes=3, per_node=2), NODES),
    "nodes and devices": lambda: (*grid(2, 2, nodes=2, per_node=2), (*NODES, *DEVICES)),
    "cells across nodes": lambda: (*grid(1, 3, tp=2, nodes=2, per_node=3), NODES),
}


def reactions_of(target, healthy, hazards, policy="mecefo", constants=None, options=OPTIONS):
    estimator = FaultEstimator(target, options=options)
    components = [c for hazard in hazards for c in hazard.components(target.cluster, "test")]
    chosen = policy_named(policy, options, constants or Constants())
    chosen.check(healthy)
    return Reactions(estimator, healthy, chosen, components)


def figures(found):
    return found.tokens_per_s, found.fidelity, found.stopped, found.stops_per_s, found.interval_s


# -------------------------------------------------------------------------------- three ways, one figure
@pytest.mark.parametrize("policy", SEPARABLE)
@pytest.mark.parametrize("case", CASES)
def test_counting_failures_is_looking_at_every_set_of_them(case, policy):
    reactions = reactions_of(*CASES[case](), policy)
    counted = expected_throughput(reactions, Counts(reactions.estimator, reactions.policy, 1e-300))
    by_hand = by_sets(reactions, elements(reactions))
    assert figures(counted) == pytest.approx(figures(by_hand), rel=1e-9)
    assert counted.lower <= by_hand.tokens_per_s * (1 + 1e-9)
    assert counted.upper >= by_hand.tokens_per_s * (1 - 1e-9)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", ["2 x 2", "3 x 2", "2 x 3, ZeRO-0"])
def test_every_set_is_the_markov_chain(case, policy):
    reactions = reactions_of(*CASES[case](), policy)
    found = by_sets(reactions, elements(reactions))
    exact = long_run(reactions.components, reactions.with_interval(found.interval_s))
    assert found.tokens_per_s == pytest.approx(exact.tokens_per_s, rel=1e-9)
    assert (found.stopped, found.stops_per_s) == pytest.approx((exact.stopped, exact.stops_per_s), rel=1e-9)
    assert 1 - found.fidelity == pytest.approx(exact.attention_lost, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_set_is_what_simulated_traces_bring_within_three_standard_errors(policy):
    # no checkpoints: where several sets run, what they keep of a visit is an approximation
    continuous = Constants(checkpoint_interval_s=0.0)
    reactions = reactions_of(*CASES["2 x 2"](), policy, continuous)
    mean = by_sets(reactions, elements(reactions)).tokens_per_s
    each = np.random.default_rng(5).spawn(40)
    runs = [simulate(draw(reactions.components, 2e6, rng, stationary=True), reactions) for rng in each]
    values = [run.tokens_per_s for run in runs]
    error = statistics.stdev(values) / math.sqrt(len(values))
    assert abs(statistics.fmean(values) - mean) <= 3 * error
    assert error < 0.02 * mean


@pytest.mark.parametrize("policy", POLICIES)
def test_drawn_sets_agree_with_every_set_within_three_standard_errors(policy):
    reactions = reactions_of(*CASES["3 x 2"](), policy)
    parts = elements(reactions)
    every, drawn = by_sets(reactions, parts), by_draws(reactions, parts)
    assert drawn == by_draws(reactions, parts)  # the same numbers again
    half = (drawn.upper - drawn.lower) / 2  # a 95 % interval, 1.96 standard errors
    assert abs(drawn.tokens_per_s - every.tokens_per_s) <= 3 / 1.96 * half
    assert (drawn.method, every.method) == ("draws", "sets")


def test_restarting_is_daly_s_efficiency_times_availability_by_hand():
    target, healthy = grid(2, 2)
    constants = Constants(checkpoint_s=60.0, restart_s=600.0)
    reactions = reactions_of(target, healthy, DEVICES, "restart", constants)
    found = expected_throughput(reactions)
    mtbf_s = 20 * HOUR_S / 4  # of the four devices while all are up
    available = (20 / 22) ** 4
    interval_s = youngs_interval_s(60.0, mtbf_s / available)  # stops come while it runs only
    assert found.interval_s == pytest.approx(interval_s)
    assert found.stops_per_s == pytest.approx(available / mtbf_s)
    kept = dalys_efficiency(interval_s, 60.0, mtbf_s, 600.0)
    assert found.tokens_per_s == pytest.approx(found.failure_free * available * kept)
    assert found.share == pytest.approx(available * kept)
    assert found.fidelity == 1


# ------------------------------------------------------------------------------------------------- laws
@pytest.mark.parametrize("least", [1e-2, 1e-3, 1e-5])
@pytest.mark.parametrize("policy", SEPARABLE)
@pytest.mark.parametrize("case", ["2 x 2", "2 x 3, ZeRO-0", "one stage", "mixed types", "two rates", "nodes"])
def test_bounds_hold_the_exact_figure_however_coarse_and_close_in_on_it(case, policy, least):
    given = Constants(checkpoint_interval_s=1800.0)
    reactions = reactions_of(*CASES[case](), policy, given)
    exact = by_sets(reactions, elements(reactions)).tokens_per_s
    found = Counts(reactions.estimator, reactions.policy, least)(reactions, elements(reactions))
    fine = Counts(reactions.estimator, reactions.policy, least / 100)(reactions, elements(reactions))
    assert found.lower * (1 - 1e-9) <= exact <= found.upper * (1 + 1e-9)
    assert found.lower * (1 - 1e-9) <= found.tokens_per_s <= found.upper * (1 + 1e-9)
    assert fine.upper - fine.lower <= (found.upper - found.lower) * (1 + 1e-9)
    assert fine.states >= found.states


def scaled(mtbf=1.0, recovery=1.0):
    return (Hazard("device", recovery_s=2 * HOUR_S * recovery, mtbf_s=20 * HOUR_S * mtbf),)


@pytest.mark.parametrize("policy", POLICIES)
def test_expected_is_never_above_failure_free_and_more_failures_or_longer_repairs_are_never_better(policy):
    target, healthy = grid(2, 2)

    def expected(hazards, **constants):
        return expected_throughput(reactions_of(target, healthy, hazards, policy, Constants(**constants)))

    free = expected(scaled()).failure_free
    for change in ("mtbf", "recovery"):
        factors = (8.0, 2.0, 1.0, 0.4) if change == "mtbf" else (0.1, 0.5, 1.0, 3.0)
        values = [expected(scaled(**{change: factor})).tokens_per_s for factor in factors]
        assert free > values[0]
        assert values == sorted(values, reverse=True)
    for change in ("detect_s", "checkpoint_s", "restart_s"):
        assert expected(scaled(), **{change: 900.0}).tokens_per_s < expected(scaled(), **{change: 1.0}).tokens_per_s * (
            1 + 1e-12
        )


@pytest.mark.parametrize("policy", POLICIES)
def test_without_failures_it_is_the_failure_free_throughput(policy):
    for hazards in ((), (Hazard("device", recovery_s=10.0, mtbf_s=1e15),)):
        found = expected_throughput(reactions_of(*grid(2, 2), hazards, policy))
        assert found.tokens_per_s == pytest.approx(found.failure_free, rel=1e-6)
        assert found.fidelity == pytest.approx(1)
        assert found.stopped == pytest.approx(0, abs=1e-6)


def test_the_interval_that_is_given_is_used_and_checkpoints_that_cost_nothing_are_continuous():
    target, healthy = grid(2, 2)
    for policy in ("restart", "bamboo"):
        found = expected_throughput(
            reactions_of(target, healthy, DEVICES, policy, Constants(checkpoint_interval_s=77.0))
        )
        assert found.interval_s == 77
        free = expected_throughput(reactions_of(target, healthy, DEVICES, policy, Constants(checkpoint_s=0.0)))
        assert free.interval_s == 0
        young = expected_throughput(reactions_of(target, healthy, DEVICES, policy))
        assert young.interval_s == pytest.approx(youngs_interval_s(30.0, 1 / young.stops_per_s))
        assert found.tokens_per_s < young.tokens_per_s < free.tokens_per_s


def test_never_stopping_means_never_writing_a_checkpoint():
    # two of the stage's four replicas fail, as one
    target = problem((group("fast", per_node=2), group("slow", per_node=2)), global_batch_size=16)
    both = Stage(6, (ReplicaGroup("fast", 1, 2, 1), ReplicaGroup("slow", 1, 2, 1)))
    hazard = Hazard("node", recovery_s=HOUR_S, mtbf_s=10 * HOUR_S, device="fast_device")
    found = expected_throughput(reactions_of(target, plan(both, m=4), (hazard,)))
    assert (found.stopped, found.stops_per_s, found.interval_s) == (0, 0, math.inf)
    assert 0 < found.fidelity < 1


# ------------------------------------------------------------------------------------- what is enumerated
def test_replicas_with_two_causes_of_failure_are_not_counted():
    for case, method in (("nodes", "counts"), ("2 x 2", "counts"), ("nodes and devices", "sets")):
        assert expected_throughput(reactions_of(*CASES[case]())).method == method, case
    assert expected_throughput(reactions_of(*CASES["cells across nodes"]())).method == "sets"


def test_where_no_number_of_failures_is_likely_sets_are_drawn():
    # 5 stages of 8 replicas, each down half of the time: no combination of counts reaches 0.01
    target, healthy = grid(5, 8, layers=5)
    reactions = reactions_of(target, healthy, (Hazard("device", recovery_s=HOUR_S, mtbf_s=HOUR_S),))
    found = expected_throughput(reactions, Counts(reactions.estimator, reactions.policy, 0.01))
    assert found.method == "draws"
    assert 0 <= found.lower <= found.tokens_per_s <= found.upper <= found.failure_free


def test_thousands_of_replicas_alike_are_counted():
    target = problem((group("fast", nodes=600, per_node=4),), {"num_layers": 1}, global_batch_size=2400)
    wide = plan(stage(3, "fast", dp=2400), m=1)
    found = expected_throughput(
        reactions_of(target, wide, (Hazard("device", recovery_s=HOUR_S, mtbf_s=2400 * HOUR_S),))
    )
    assert found.method == "counts"
    assert found.lower > 0.99 * found.tokens_per_s
    assert found.tokens_per_s < found.failure_free


def test_components_of_equal_effect_are_one_element_that_is_down_as_often():
    target, healthy = grid(2, 2, tp=2)
    reactions = reactions_of(target, healthy, DEVICES)
    parts = elements(reactions)
    assert len(reactions.components) == 8
    assert len(parts) == 4  # both devices of a replica take it with them
    up = 20 / 22
    assert all(part.unavailability == pytest.approx(1 - up**2) for part in parts)
    assert all(part.fails == pytest.approx(2 / (20 * HOUR_S)) for part in parts)


def test_idle_devices_matter_to_spares_alone():
    target, healthy = grid(2, 2, per_node=6)
    for policy in POLICIES:
        parts = elements(reactions_of(target, healthy, DEVICES, policy))
        assert len(parts) == (6 if policy == "spare" else 4)


def test_ways_out_are_remembered_from_plan_to_plan():
    target, healthy = grid(2, 2)
    reactions = reactions_of(target, healthy, DEVICES)
    counts = Counts(reactions.estimator, reactions.policy)
    first = expected_throughput(reactions, counts)
    known = dict(counts._stages)
    assert len(known) == 2
    assert expected_throughput(reactions, counts) == first == expected_throughput(reactions)
    assert counts._stages == known


@pytest.mark.parametrize(("case", "tp"), [("idle devices", 1), ("two devices a replica", 2)])
def test_it_is_what_simulated_traces_bring_where_some_failures_make_no_difference(case, tp):
    # half of the devices are idle, or fail beside a replica's other one that is down: dead times are long, to see it
    target, healthy = grid(2, 2, tp=tp, per_node=8)
    constants = Constants(checkpoint_interval_s=0.0, detect_s=1800.0)
    reactions = reactions_of(target, healthy, DEVICES, "mecefo", constants)
    expected = expected_throughput(reactions).tokens_per_s
    each = np.random.default_rng(5).spawn(40)
    runs = [simulate(draw(reactions.components, 2e6, rng, stationary=True), reactions) for rng in each]
    values = [run.tokens_per_s for run in runs]
    error = statistics.stdev(values) / math.sqrt(len(values))
    assert abs(statistics.fmean(values) - expected) <= 3 * error + 0.003 * expected, case
    assert error < 0.01 * expected


@pytest.mark.parametrize("policy", SEPARABLE)
def test_numbers_of_failures_that_are_drawn_agree_with_those_that_are_enumerated(policy, monkeypatch):
    reactions = reactions_of(*grid(2, 4), DEVICES, policy)
    every = expected_throughput(reactions)
    monkeypatch.setattr(expected, "LEAST_COVERED", 2.0)
    drawn = expected_throughput(reactions)
    assert (every.method, drawn.method) == ("counts", "draws")
    assert drawn == expected_throughput(reactions)  # the same numbers again
    half = (drawn.upper - drawn.lower) / 2  # a 95 % interval, 1.96 standard errors
    assert abs(drawn.tokens_per_s - every.tokens_per_s) <= 3 / 1.96 * half
    assert drawn.fidelity == pytest.approx(every.fidelity, abs=0.02)
