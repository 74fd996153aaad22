"""The 1F1B recurrence against a hand-computed case and an independent event simulation; its bounds."""

import heapq
import itertools

import numpy as np
import pytest

from haap_rl.cost import kernels, schedule


def event_simulation_s(forward, backward, send_forward, send_backward, m):
    """Stage end times from a discrete-event simulation: every stage works through its 1F1B list, inputs permitting."""
    p = len(forward)
    work = []
    for i in range(p):
        warm = min(p - 1 - i, m)
        order = [("F", k) for k in range(warm)]
        for k in range(m - warm):
            order += [("F", warm + k), ("B", k)]
        work.append(order + [("B", k) for k in range(m - warm, m)])
    ready = {("F", 0, k): 0.0 for k in range(m)}
    position, busy_until, ends = [0] * p, [0.0] * p, [0.0] * p
    agenda = [(0.0, i) for i in range(p)]
    while agenda:
        now, i = heapq.heappop(agenda)
        if position[i] == len(work[i]) or now < busy_until[i]:
            continue
        kind, k = work[i][position[i]]
        arrival = ready.get((kind, i, k))
        if arrival is None or arrival > now:
            continue  # the message itself wakes the stage up
        end = now + (forward[i] if kind == "F" else backward[i])
        position[i], busy_until[i], ends[i] = position[i] + 1, end, end
        heapq.heappush(agenda, (end, i))
        if kind == "F" and i < p - 1:
            message, delay = ("F", i + 1, k), send_forward[i]
        elif kind == "F":
            message, delay = ("B", i, k), 0.0
        elif i > 0:
            message, delay = ("B", i - 1, k), send_backward[i - 1]
        else:
            continue
        ready[message] = end + delay
        heapq.heappush(agenda, (end + delay, message[1]))
    assert all(position[i] == len(work[i]) for i in range(p))
    return ends


def random_case(rng, most_stages=10):
    p = int(rng.integers(1, most_stages + 1))
    m = int(rng.integers(1, 4 * p + 2))
    forward = rng.uniform(0.1, 1.0, p)
    backward = forward * rng.uniform(0.2, 5.0, p)
    scale = rng.choice([0.0, 0.05, 0.5])
    return forward.tolist(), backward.tolist(), *(rng.uniform(0, scale, p - 1).tolist() for _ in range(2)), m


def test_two_stages_three_microbatches_in_whole_seconds():
    # Stage 0: f=1 b=2, stage 1: f=3 b=5, one second per transfer.
    # Stage 1 gets its first input at 2 and is never idle again: F0 2-5 B0 5-10 F1 10-13 B1 13-18 F2 18-21 B2 21-26.
    # The last gradient reaches stage 0 at 27, which ends at 29.
    ends = schedule.stage_ends_s([1, 3], [2, 5], [1], [1], 3)
    assert ends == [29, 26]


def test_one_stage_is_the_sum_of_its_work():
    assert schedule.stage_ends_s([2], [3], [], [], 4) == [20]


def test_slots_hold_every_operation_without_overlap():
    slots = []
    schedule.stage_ends_s([1, 3], [2, 5], [1], [1], 3, slots)
    assert len(slots) == 12
    for stage in (0, 1):
        mine = sorted((slot.start_s, slot.end_s) for slot in slots if slot.stage == stage)
        assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(mine))


def test_recurrence_equals_event_simulation_on_random_pipelines():
    rng = np.random.default_rng(0)
    for _ in range(10_000):
        case = random_case(rng, most_stages=5)
        np.testing.assert_allclose(schedule.stage_ends_s(*case), event_simulation_s(*case), rtol=1e-12)


def test_bounds_enclose_the_exact_makespan():
    rng = np.random.default_rng(1)
    for _ in range(100_000):
        case = random_case(rng, most_stages=4)
        exact = schedule.stage_ends_s(*case)[0]
        assert schedule.lower_bound_s(*case) <= exact * (1 + 1e-12)
        assert schedule.upper_bound_s(*case) >= exact * (1 - 1e-12)


def with_tails_s(case, tails):
    """Seconds until every stage has ended its tail as well."""
    return max(end + tail for end, tail in zip(schedule.stage_ends_s(*case), tails, strict=True))


def test_the_lower_bound_with_tails_is_below_the_last_tail_and_above_the_bound_without():
    rng = np.random.default_rng(3)
    for _ in range(4000):
        case = random_case(rng)
        tails = (rng.choice([0.1, 3.0, 30.0]) * rng.uniform(0, 1, len(case[0]))).tolist()
        bound = schedule.lower_bound_s(*case, tails)
        assert bound <= with_tails_s(case, tails) * (1 + 1e-12)
        assert bound >= (schedule.lower_bound_s(*case) + tails[0]) * (1 - 1e-12)


def test_the_compiled_schedule_keeps_its_bounds_with_tails():
    rng = np.random.default_rng(4)
    times = np.zeros((kernels.UP + 1, 10))
    rows = [kernels.FORWARD, kernels.BACKWARD, kernels.DELAY, kernels.SYNC, kernels.STEP]
    for x in range(20_000):
        forward, backward, sends, _, m = random_case(rng)
        p = len(forward)
        tails = rng.choice([0.1, 3.0, 30.0]) * rng.uniform(0, 1, (2, p))
        times[rows, :p] = forward, backward, [*sends, 0.0], *tails
        lower, exact, upper = (find(times, p, m) for find in (kernels.lower_s, kernels.exact_s, kernels.upper_s))
        assert lower <= exact * (1 + 1e-12)
        assert upper >= exact * (1 - 1e-12)
        if x % 20 == 0:
            case, tail = (forward, backward, sends, sends, m), tails.sum(0).tolist()
            assert lower == pytest.approx(schedule.lower_bound_s(*case, tail), rel=1e-12)
            assert exact == pytest.approx(with_tails_s(case, tail), rel=1e-12)
            assert upper == pytest.approx(schedule.upper_bound_s(*case) + max(tail), rel=1e-12)


def test_safe_upper_bound_holds_where_the_classic_form_fails():
    case = [10.0, 0.1, 0.1], [0.1, 10.0, 0.1], [0.0, 0.0], [0.0, 0.0], 2
    exact = schedule.stage_ends_s(*case)[0]
    assert exact == pytest.approx(40.2)
    assert schedule.upper_bound_s(*case) >= exact
    classic = sum(case[0]) + sum(case[1]) + schedule.steady_period_s(*case[:4])
    assert classic < exact


@pytest.mark.parametrize(("p", "stage", "m", "expected"), [(4, 0, 8, 4), (4, 3, 8, 1), (4, 0, 2, 2)])
def test_microbatches_in_flight(p, stage, m, expected):
    assert schedule.in_flight(p, stage, m) == expected


def test_more_microbatches_never_finish_earlier():
    rng = np.random.default_rng(2)
    for _ in range(200):
        *times, m = random_case(rng)
        assert schedule.stage_ends_s(*times, m + 1)[0] >= schedule.stage_ends_s(*times, m)[0]
