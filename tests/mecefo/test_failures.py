"""Who is down when, and who takes over, follows from the schedule and the options alone."""

import numpy as np
import pytest

from haap_rl.mecefo.failures import (
    Cell,
    Grid,
    Outage,
    Restart,
    Restarted,
    Schedule,
    Timeline,
    affected,
    arriving,
    redrawn,
    takers,
)
from haap_rl.mecefo.options import MecefoOptions

RING = MecefoOptions()


def options(**changes):
    return MecefoOptions(**changes)


def test_a_cell_is_down_from_its_failure_to_its_repair():
    schedule = Schedule((Outage(Cell(1, 0), 3, 6), Outage(Cell(2, 1), 5, 7)))
    down = [sorted(schedule.down(step, RING)) for step in range(8)]
    assert down == [[], [], [], [(1, 0)], [(1, 0)], [(1, 0), (2, 1)], [(2, 1)], []]


@pytest.mark.parametrize("rule", ["next_step", "refresh_boundary"])
def test_failing_and_returning_within_one_step_is_no_failure(rule):
    schedule = Schedule((Outage(Cell(1, 0), 3, 3),))
    assert not any(schedule.down(step, options(return_rule=rule)) for step in range(100))


def test_at_a_refresh_boundary_a_cell_returns_with_new_projectors():
    at = options(return_rule="refresh_boundary", refresh_steps=5)
    down = [bool(Schedule((Outage(Cell(0, 0), 3, end),)).down(step, at)) for end in (4, 5, 6) for step in range(12)]
    assert [sum(down[i : i + 12]) for i in (0, 12, 24)] == [2, 2, 7]


def test_after_a_restart_failures_go_by_the_clock_and_boundaries_by_the_training_step():
    """Step 8, at clock 8, failed; step 5 is done at clock 12, 7 ahead."""
    timeline = Timeline((Restarted(failed=8, failed_clock=8, step=5, clock=12),))
    assert (timeline.clock(5), timeline.clock(9), timeline.lost, timeline.waited) == (12, 16, 3, 4)
    schedule = Schedule((Outage(Cell(1, 0), 13, 15), Outage(Cell(0, 0), 8, 12)))
    assert [bool(schedule.down(step, RING, timeline)) for step in range(5, 11)] == [False, True, True] + [False] * 3
    at = options(return_rule="refresh_boundary", refresh_steps=10)  # repaired before step 8, back before step 10
    assert [bool(schedule.down(step, at, timeline)) for step in range(5, 11)] == [False] + [True] * 4 + [False]
    assert schedule.returns(Cell(1, 0), 6, at, timeline) == 10
    assert schedule.returns(Cell(1, 0), 5, at, timeline) is None


def test_the_ring_neighbour_takes_over():
    assert takers({1}, 4, RING) == {1: (2,)}
    assert takers({1, 3}, 4, RING) == {1: (2,), 3: (0,)}
    assert takers(set(), 4, RING) == {}


def test_where_the_neighbour_is_dead_too_the_least_loaded_peer_takes_over():
    assert takers({0, 1}, 4, RING) == {1: (2,), 0: (3,)}
    assert takers({0, 1, 2}, 4, RING) == {2: (3,), 0: (3,), 1: (3,)}


def test_or_training_restarts_if_so_asked():
    with pytest.raises(Restart, match="cell 0 of a stage and its neighbour 1 are both dead"):
        takers({0, 1}, 4, options(on_overload="restart"))


@pytest.mark.parametrize("takeover", ["ring", "most_slack", "spread"])
def test_a_stage_without_live_cells_always_restarts(takeover):
    down = {Cell(0, 1), Cell(1, 1), Cell(0, 0)}
    with pytest.raises(Restart, match="stage 1: no live cell is left"):
        affected(down, Grid(2, 2), options(takeover=takeover))


def test_on_equal_cells_most_slack_is_the_peer_with_the_fewest_tasks():
    slack = options(takeover="most_slack", on_overload="restart")
    assert takers({1}, 4, slack) == {1: (2,)}
    assert takers({0, 1}, 4, slack) == {0: (2,), 1: (3,)}  # which never has to restart for want of a neighbour


def test_spreading_makes_every_peer_a_taker():
    assert takers({2}, 4, options(takeover="spread")) == {2: (0, 1, 3)}
    assert affected({Cell(2, 0)}, Grid(4), options(takeover="spread")) == [frozenset(range(4))]


def test_affected_are_the_dead_and_their_takers_stage_by_stage():
    down = {Cell(0, 0), Cell(2, 1)}
    assert affected(down, Grid(4, 2), RING) == [frozenset({0, 1}), frozenset({2, 3})]


def test_layers_are_shared_out_evenly_among_stages():
    assert [Grid(2, 2).stage_of(layer, 5) for layer in range(5)] == [0, 0, 0, 1, 1]


def test_redrawn_failures_are_always_so_many_and_leave_each_stage_a_live_cell():
    schedule = redrawn(Grid(2, 3), 3, 10, 95, np.random.default_rng(0))
    for step in range(95):
        down = schedule.down(step, RING)
        assert len(down) == 3
        affected(down, Grid(2, 3), RING)
    sets = {schedule.down(step, RING) for step in range(95)}
    assert len(sets) > 3
    assert all(schedule.down(step, RING) == schedule.down(step - step % 10, RING) for step in range(95))


def test_more_failures_than_stages_survive_are_refused():
    with pytest.raises(ValueError, match="cells_down=4 would leave a stage of the grid 2 x 3 without a live cell"):
        redrawn(Grid(2, 3), 4, 10, 95, np.random.default_rng(0))
    with pytest.raises(ValueError, match="a grid of 0 x 1 has no cell"):
        Grid(0)


def test_cells_down_are_recovery_over_interval_on_average():
    """Little's law, as Table 1's low scenario has it: one failure per 2 h, 4 h to recover, 2 cells down."""
    steps = 20_000
    schedule = arriving(Grid(16, 2), 20.0, 40, steps, np.random.default_rng(0))
    down = [sum(o.start <= step < o.end for o in schedule.outages) for step in range(0, steps, 7)]
    assert np.mean(down) == pytest.approx(2.0, rel=0.1)
    assert arriving(Grid(16, 2), 20.0, 40, steps, np.random.default_rng(0)) == schedule
