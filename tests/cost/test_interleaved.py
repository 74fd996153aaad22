"""Interleaved stages: by hand, against an independent event simulation, and the laws of the papers."""

import heapq
import itertools

import numpy as np
import pytest

from haap_rl.cost import schedule
from haap_rl.cost.estimator import Estimator
from tests.builders import PLAIN, calibration, group, plan, problem, stage


def megatron_order(p, i, m, chunks):
    """Operations of stage i as Megatron-LM runs them: (is forward, chunk, micro-batch)."""
    turns = [(c, g * p + k) for g in range(m // p) for c in range(chunks) for k in range(p)]
    forwards = [(True, c, k) for c, k in turns]
    backwards = [(False, chunks - 1 - c, k) for c, k in turns]
    ahead = min((p - i - 1) * 2 + (chunks - 1) * p, len(turns))
    order = forwards[:ahead]
    for one, other in zip(forwards[ahead:], backwards, strict=False):
        order += [one, other]
    return order + backwards[len(turns) - ahead :]


def event_simulation_s(forward, backward, send, m):
    """Stage end times and most chunks' activations held, by a queue of messages and ends of operations."""
    chunks, p = len(forward), len(send)
    orders = [megatron_order(p, i, m, chunks) for i in range(p)]
    inbox = {(0, True, 0, k): 0.0 for k in range(m)}  # (stage, is forward, chunk, micro-batch) -> arrival
    done, busy_until, held, most = [0] * p, [0.0] * p, [0] * p, [0] * p
    agenda = [(0.0, i) for i in range(p)]
    while agenda:
        now, i = heapq.heappop(agenda)
        if done[i] == len(orders[i]) or now < busy_until[i]:
            continue
        is_forward, c, k = orders[i][done[i]]
        if inbox.get((i, is_forward, c, k), np.inf) > now:
            continue  # the message itself wakes the stage up
        end = now + (forward if is_forward else backward)[c][i]
        done[i], busy_until[i] = done[i] + 1, end
        held[i] += 1 if is_forward else -1
        most[i] = max(most[i], held[i])
        heapq.heappush(agenda, (end, i))
        position = c * p + i  # of the chunk in the model
        if is_forward:
            following, delay = position + 1, send[i]
        else:
            following, delay = position - 1, send[i - 1]
        if is_forward and following == p * chunks:
            message, delay = (i, False, c, k), 0.0
        elif following < 0:
            continue
        else:
            message = (following % p, is_forward, following // p, k)
        inbox[message] = end + delay
        heapq.heappush(agenda, (end + delay, message[0]))
    assert [len(order) for order in orders] == done
    return busy_until, most


def random_case(rng):
    p, chunks = int(rng.integers(2, 7)), int(rng.integers(1, 5))
    m = p * int(rng.integers(1, 4))
    forward = rng.uniform(0.1, 1.0, (chunks, p))
    backward = forward * rng.uniform(0.5, 4.0, (chunks, p))
    send = rng.uniform(0, rng.choice([0.0, 0.05, 0.5]), p)
    return forward.tolist(), backward.tolist(), send.tolist(), m


def test_two_stages_of_two_chunks_and_two_microbatches_in_whole_seconds():
    # f = 1, b = 2, nothing to send; Fcm is the forward of chunk c and micro-batch m
    # stage 0: F00 0-1  F01 1-2  F10 2-3  F11 3-4                    B10 6-8  B11 9-11  B00 11-13  B01 13-15
    # stage 1:          F00 1-2  F01 2-3  F10 3-4  B10 4-6  F11 6-7  B11 7-9  B00 9-11  B01 11-13
    slots = []
    ends = schedule.interleaved_ends_s([[1, 1], [1, 1]], [[2, 2], [2, 2]], [0, 0], 2, slots)
    assert ends == [15, 13]
    begin = {(slot.stage, slot.is_forward, slot.chunk, slot.microbatch): slot.start_s for slot in slots}
    assert [begin[0, True, c, k] for c, k in ((0, 0), (0, 1), (1, 0), (1, 1))] == [0, 1, 2, 3]
    assert [begin[0, False, c, k] for c, k in ((1, 0), (1, 1), (0, 0), (0, 1))] == [6, 9, 11, 13]
    assert [begin[1, True, c, k] for c, k in ((0, 0), (0, 1), (1, 0), (1, 1))] == [1, 2, 3, 6]
    assert [begin[1, False, c, k] for c, k in ((1, 0), (1, 1), (0, 0), (0, 1))] == [4, 7, 9, 11]


def test_two_stages_of_two_chunks_and_four_microbatches():
    # stage 1 waits 1 s for its first input, then works 24 s without a gap; its last gradient takes stage 0 b = 2 s more
    assert schedule.interleaved_ends_s([[1, 1], [1, 1]], [[2, 2], [2, 2]], [0, 0], 4) == [27, 25]


def test_a_transfer_counts_where_stages_differ_and_around_the_corner():
    # one micro-batch per stage: down chunk 0, around, down chunk 1, and back, each stage's own turn included
    forward, backward = [[1, 1], [1, 1]], [[2, 2], [2, 2]]
    free = schedule.interleaved_ends_s(forward, backward, [0, 0], 2)[0]
    between = schedule.interleaved_ends_s(forward, backward, [10, 0], 2)[0]
    around = schedule.interleaved_ends_s(forward, backward, [0, 10], 2)[0]
    assert between > free + 4 * 10 - 15  # four passes over the link 0-1 on the critical path
    assert free + 2 * 10 - 15 < around < between  # two passes over the link 1-0


def test_interleaving_equals_an_independent_event_simulation():
    rng = np.random.default_rng(0)
    for _ in range(400):
        forward, backward, send, m = random_case(rng)
        ends, most = event_simulation_s(forward, backward, send, m)
        np.testing.assert_allclose(schedule.interleaved_ends_s(forward, backward, send, m), ends, rtol=1e-12)
        p, chunks = len(send), len(forward)
        assert most == [schedule.interleaved_in_flight(p, i, m, chunks) for i in range(p)]


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_the_bubble_shrinks_with_the_number_of_chunks(p, chunks, groups):
    # Narayanan et al. 2021: the bubble of (p-1) (f+b) is divided by v, for a chunk takes 1/v of a stage's f and b
    m, f, b = groups * p, 1.0, 2.0
    ends = schedule.interleaved_ends_s([[f] * p] * chunks, [[b] * p] * chunks, [0.0] * p, m)
    assert ends[0] == pytest.approx(m * chunks * (f + b) + (p - 1) * (f + b))


def test_one_chunk_is_plain_1f1b_for_equal_stages():
    for p, m in ((2, 2), (2, 6), (4, 8)):
        plain = schedule.stage_ends_s([1.0] * p, [2.0] * p, [0.0] * (p - 1), [0.0] * (p - 1), m)
        interleaved = schedule.interleaved_ends_s([[1.0] * p], [[2.0] * p], [0.0] * p, m)
        assert interleaved[0] == plain[0]
        assert len(interleaved) == len(plain)


def test_slots_hold_every_operation_once_without_overlap():
    rng = np.random.default_rng(3)
    for _ in range(20):
        forward, backward, send, m = random_case(rng)
        slots = []
        ends = schedule.interleaved_ends_s(forward, backward, send, m, slots)
        assert len({(*slot[:3], slot.chunk) for slot in slots}) == len(slots) == 2 * m * len(forward) * len(send)
        for i, end in enumerate(ends):
            mine = sorted((slot.start_s, slot.end_s) for slot in slots if slot.stage == i)
            assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(mine))
            assert mine[-1][1] == end


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_the_first_stage_holds_more_activations_by_the_factor_of_korthikanti(p, chunks):
    # Korthikanti et al. 2022: 1 + (p-1)/(p v) times the p micro-batches of plain 1F1B; one chunk: 2 - 1/p
    held = schedule.interleaved_in_flight(p, 0, 8 * p, chunks) / chunks
    assert held == pytest.approx(p * (1 + (p - 1) / (p * chunks)))


def four_stages(chunks, **settings):
    layers = (5, 4, 4, 5)
    return plan(*(stage(n, "fast", size=1) for n in layers), m=8, virtual_stages=chunks, **settings)


def sixteen_layers(**settings):
    return problem((group("fast", per_node=4),), {"num_layers": 16, "dropout": False}, **settings)


def test_an_interleaved_plan_holds_korthikantis_share_of_activations():
    estimator = Estimator(sixteen_layers(), calibration=PLAIN)
    plain = estimator(four_stages(1)).memory[0][0]
    for chunks in (2, 4):
        memory = estimator(four_stages(chunks)).memory[0][0]
        assert memory.activations_bytes == pytest.approx(plain.activations_bytes * (1 + 3 / (4 * chunks)), rel=1e-6)
        assert memory.weights_bytes == plain.weights_bytes


def test_an_interleaved_plan_has_a_smaller_bubble_and_the_same_work():
    estimator = Estimator(sixteen_layers(), calibration=PLAIN)
    plain, two, four = (estimator(four_stages(chunks)) for chunks in (1, 2, 4))
    assert four.bubble < two.bubble < plain.bubble
    for one, other in zip(plain.stages, four.stages, strict=True):
        assert other.busy_s == pytest.approx(one.busy_s, rel=1e-9)
        assert other.optimizer_s == one.optimizer_s
    for estimate in (plain, two, four):
        lower, upper = estimate.bounds_s
        assert lower <= estimate.iteration_s * (1 + 1e-12)
        assert estimate.iteration_s <= upper * (1 + 1e-12)
        assert max(slot.end_s for slot in estimate.timeline()) == pytest.approx(estimate.makespan_s)


def test_an_interleaved_plan_sends_as_often_as_it_has_chunks():
    estimator = Estimator(sixteen_layers(), calibration=calibration(send_blocking=0.5))
    plain, four = estimator(four_stages(1)), estimator(four_stages(4))
    # an inner stage: half of one transfer on either side, in both directions, for each chunk
    assert plain.stages[1].blocked_s == pytest.approx(2 * 0.5 * (plain.stages[0].send_s + plain.stages[1].send_s))
    assert four.stages[1].blocked_s == pytest.approx(4 * plain.stages[1].blocked_s)
    assert four.stages[-1].send_s > 0  # the last stage sends to the first
    assert plain.stages[-1].send_s == 0


def test_recompute_of_an_interleaved_stage_is_that_of_its_chunks():
    estimator = Estimator(sixteen_layers(), calibration=PLAIN)
    keep = estimator(four_stages(2))
    again = estimator(plan(*(stage(n, "fast", mode="full", recomputed=4) for n in (5, 4, 4, 5)), m=8, virtual_stages=2))
    for one, other in zip(keep.stages, again.stages, strict=True):
        assert other.backward_s - one.backward_s == pytest.approx(other.recompute_s)
        assert other.recompute_s > 0


def test_the_network_does_not_matter_to_interleaved_stages_of_one_node():
    looped = plan(stage(3, "fast"), stage(3, "fast"), virtual_stages=2)
    slow, quick = (problem((group("fast", inter_gb=gb), group("slow"))) for gb in (0.1, 100))
    assert Estimator(slow)(looped).iteration_s == Estimator(quick)(looped).iteration_s
