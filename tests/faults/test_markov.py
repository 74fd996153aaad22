"""The exact long run: equal to products and to Daly where those hold, and to simulated traces within their error."""

import math
import statistics

import numpy as np
import pytest

from haap_rl.faults.checkpoint import dalys_efficiency
from haap_rl.faults.markov import long_run, stationary_distribution
from haap_rl.faults.response import Response, Transitions
from haap_rl.faults.simulate import simulate
from haap_rl.faults.traces import draw
from haap_rl.problem.errors import InputError
from tests.faults.scripted import FREE, STOPPED, Scripted, device

FOUR = [device(i, mtbf_s=1e4 * (i + 1), recovery_s=3e3) for i in range(4)]


def of_the_set(down):
    """Depends on the set and not only on its size; stopped where 0 and 1 are down, out of memory where three are."""
    if {0, 1} <= down or len(down) >= 3:
        return Response(0.0, reason="stopped", out_of_memory=len(down) >= 3)
    return Response(100.0 - 20 * len(down) - (5 if 2 in down else 0), attention_lost=0.1 * len(down))


def assert_means_agree(reactions, components, expected, figure, traces=60, horizon_s=1e6, seed=3):
    """The mean of `figure(run)` over stationary traces is within 3 standard errors of what is expected."""
    each = np.random.default_rng(seed).spawn(traces)
    values = [figure(simulate(draw(components, horizon_s, rng, stationary=True), reactions)) for rng in each]
    error = statistics.stdev(values) / math.sqrt(traces)
    assert abs(statistics.fmean(values) - expected) <= 3 * error + 1e-12 * abs(expected)
    assert error < 0.02 * abs(expected) + 1e-12  # else it would say nothing


def test_components_that_fail_by_themselves_make_a_product():
    probability = stationary_distribution(FOUR)
    for state, value in enumerate(probability):
        product = math.prod(c.unavailability if state >> i & 1 else 1 - c.unavailability for i, c in enumerate(FOUR))
        assert value == pytest.approx(product, rel=1e-9)


def test_throughput_by_hand_for_one_component():
    one = [device(mtbf_s=90.0, recovery_s=10.0)]
    found = long_run(one, Scripted(lambda down: Response(4.0) if down else Response(10.0)))
    assert found.tokens_per_s == pytest.approx(0.9 * 10 + 0.1 * 4)
    # dead times: of the 90 s up e^(-3/90) is left after a return, of the 10 s down e^(-2/10) after a failure
    slow = Transitions(failure_s=2.0, return_s=3.0, restart_s=99.0, checkpoint_s=0.0, checkpoint_interval_s=0.0)
    found = long_run(one, Scripted(lambda down: Response(4.0) if down else Response(10.0), slow))
    assert found.tokens_per_s == pytest.approx(0.9 * math.exp(-3 / 90) * 10 + 0.1 * math.exp(-0.2) * 4)
    assert found.transitions == pytest.approx(1 - 0.9 * math.exp(-3 / 90) - 0.1 * math.exp(-0.2))
    assert found.stopped == found.restarts == found.stops_per_s == 0


def test_restarting_from_checkpoints_is_daly_s_formula_times_availability():
    one = [device(mtbf_s=2e4, recovery_s=4e3)]
    restart = Transitions(0.0, 0.0, restart_s=700.0, checkpoint_s=100.0, checkpoint_interval_s=1500.0)
    reactions = Scripted(lambda down: STOPPED if down else Response(10.0), restart)
    expected = 10 * dalys_efficiency(1500.0, 100.0, 2e4, 700.0) * 2e4 / 2.4e4
    found = long_run(one, reactions)
    assert found.tokens_per_s == pytest.approx(expected, rel=1e-12)
    assert found.stops_per_s == pytest.approx(1 / 2.4e4)
    assert_means_agree(reactions, one, expected, lambda run: run.tokens_per_s)


@pytest.mark.parametrize("dead", [FREE, Transitions(300.0, 100.0, 900.0, 0.0, 0.0)])
def test_simulation_agrees_within_three_standard_errors(dead):
    reactions = Scripted(of_the_set, dead)
    found = long_run(FOUR, reactions)
    for expected, figure in (
        (found.tokens_per_s, lambda run: run.tokens_per_s),
        (found.trained, lambda run: run.seconds.trained / run.horizon_s),
        (found.transitions, lambda run: run.seconds.transitions / run.horizon_s),
        (found.attention_lost, lambda run: run.attention_lost),
    ):
        assert_means_agree(reactions, FOUR, expected, figure)


def test_checkpoints_are_a_good_approximation_where_several_states_run():
    reactions = Scripted(of_the_set, Transitions(300.0, 100.0, 900.0, checkpoint_s=60.0, checkpoint_interval_s=1200.0))
    each = np.random.default_rng(0).spawn(60)
    runs = [simulate(draw(FOUR, 1e6, rng, stationary=True), reactions) for rng in each]
    assert statistics.fmean(run.tokens_per_s for run in runs) == pytest.approx(
        long_run(FOUR, reactions).tokens_per_s, rel=0.01
    )


def test_shares_of_time_add_up():
    reactions = Scripted(of_the_set, Transitions(300.0, 100.0, 900.0, 60.0, 1200.0))
    found = long_run(FOUR, reactions)
    parts = (found.trained, found.transitions, found.restarts, found.checkpoints_and_lost, found.stopped)
    assert math.fsum(parts) == pytest.approx(1, rel=1e-12)
    assert all(part > 0 for part in parts)


def test_nothing_that_fails_is_the_failure_free_throughput():
    cycle = Transitions(9.0, 9.0, 9.0, checkpoint_s=10.0, checkpoint_interval_s=90.0)
    found = long_run((), Scripted(lambda down: Response(100.0), cycle))
    assert (found.tokens_per_s, found.trained) == pytest.approx((90.0, 0.9))


def test_what_it_cannot_solve_is_refused():
    with pytest.raises(InputError, match=r"13 components have .* sets"):
        stationary_distribution([device(i) for i in range(13)])
    for kind in ({"shape": 0.7}, {"fixed_recovery": True}):
        with pytest.raises(InputError, match="needs exponential times"):
            stationary_distribution([device(**kind)])
