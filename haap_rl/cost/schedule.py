"""The 1F1B pipeline schedule on unequal stages: exact recurrence, lower bound, safe upper bound.

p stages, m micro-batches. Stage i takes forward[i] and backward[i] seconds per micro-batch; send_forward[i] seconds
carry activations from i to i+1 and send_backward[i] carry gradients from i+1 to i (p-1 values each). Sends delay the
receiver; they never queue. What a send also costs the two stages it joins must already be in their times.

Schedule: Narayanan et al. 2021 (arXiv 2104.04473), non-interleaved: w_i = min(p-1-i, m-1) warm-up forwards that run
ahead, then one forward and one backward in turn, then the remaining backwards. At most min(p-i, m) micro-batches are
in flight on stage i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

Times = Sequence[float]


class Slot(NamedTuple):
    """One operation of the schedule, in seconds from the start of the iteration; `chunk` where stages interleave."""

    stage: int
    microbatch: int
    is_forward: bool
    start_s: float
    end_s: float
    chunk: int = 0


def in_flight(num_stages: int, stage: int, num_microbatches: int) -> int:
    """Micro-batches whose activations `stage` holds at its peak."""
    return min(num_stages - stage, num_microbatches)


def stage_ends_s(
    forward: Times,
    backward: Times,
    send_forward: Times,
    send_backward: Times,
    m: int,
    slots: list[Slot] | None = None,
) -> list[float]:
    """Seconds at which each stage ends its last backward, shape (p,); element 0 is the pipeline's makespan.

    Event-exact in p m steps without an event queue. Give forward F(i, k) the time step k - (p-1-i) and backward
    B(i, k) the step k. Step by step, forwards before backwards and late stages first, every operation comes after all
    it waits for: F(i, k) after F(i-1, k), one step earlier; B(i, k) after B(i+1, k), same step, later stage. Within a
    stage that order *is* the 1F1B order. `slots`, if given, receives every operation (for drawing).
    """
    last = len(forward) - 1
    free = [0.0] * (last + 1)  # when stage i ends its latest operation
    sent = [0.0] * (last + 1)  # when stage i ended its latest forward
    for step in range(-last, m):
        # late stages first: sent[i-1] must still belong to the previous step, i.e. to the same micro-batch
        for i in range(min(last, last + step), max(-1, last + step - m), -1):
            start = free[i]
            if i:
                arrival = sent[i - 1] + send_forward[i - 1]
                if arrival > start:
                    start = arrival
            free[i] = sent[i] = start + forward[i]
            if slots is not None:
                slots.append(Slot(i, step + last - i, True, start, free[i]))
        if step < 0:
            continue
        for i in range(last, -1, -1):
            start = free[i]
            if i < last:
                arrival = free[i + 1] + send_backward[i]  # free[i+1] is the end of B(i+1, step), computed just before
                if arrival > start:
                    start = arrival
            free[i] = start + backward[i]
            if slots is not None:
                slots.append(Slot(i, step, False, start, free[i]))
    return free


def lower_bound_s(
    forward: Times, backward: Times, send_forward: Times, send_backward: Times, m: int, tails: Times | None = None
) -> float:
    """Path bound in seconds, O(p): never above the end of the iteration, max over i of (end of stage i + tails[i]).

    S = one micro-batch alone, down and up; up_j = the way up from stage j to the first, which a path that ends with
    the tail of stage j does not take. Paths through the event graph for every stage i, j = 0..i:
      round trip through the stages before i, all of stage i's work, up to j:  pre_i + m (f_i + b_i) - up_j + tail_j
      the path leaves stage i once:  S + (m-1) max(f_i, b_i) + (m-1-w_i) min(f_i, b_i) - up_j + tail_j
      the same, where the last micro-batch goes from i to the end and back instead of waiting, trip_i long:
        S + (m-2-w_i) (f_i + b_i) + trip_i - up_j + tail_j   if m >= w_i + 2
    and, for j behind i, one that stays at stage i in the forward direction:
      S + (m-1-w_i) (f_i + b_i) + w_i f_i - up_j + tail_j
    `tails` None: the makespan.
    """
    p = len(forward)
    lone = sum(forward) + sum(backward) + sum(send_forward) + sum(send_backward)
    best, before, up = lone + (0.0 if tails is None else tails[0]), 0.0, 0.0
    tail, waits, trip = -math.inf, -math.inf, lone  # best of tail_j - up_j; longest stay forward; from i to the end
    for i in range(p):
        long, short = max(forward[i], backward[i]), min(forward[i], backward[i])
        ahead = min(p - 1 - i, m - 1)
        own_tail = (0.0 if tails is None else tails[i]) - up
        best = max(best, lone + waits + own_tail)
        waits = max(waits, (m - 1 - ahead) * (long + short) + ahead * forward[i])
        tail = max(tail, own_tail)
        stays = (m - 1) * long + (m - 1 - ahead) * short
        if m >= p - i + 1:
            stays = max(stays, (m - 1 - p + i) * (long + short) + trip)
        best = max(best, before + m * (long + short) + tail, lone + stays + tail)
        if i < p - 1:
            before += forward[i] + backward[i] + send_forward[i] + send_backward[i]
            up += backward[i] + send_backward[i]
            trip -= forward[i] + backward[i] + send_forward[i] + send_backward[i]
    return best


def steady_period_s(forward: Times, backward: Times, send_forward: Times, send_backward: Times) -> float:
    """Seconds per micro-batch in the steady state, O(p^2): the maximum mean segment lambda.

    lambda = max over i <= j of [sum_{k=i..j} (f_k + b_k) + sum_{k=i..j-1} (send_fwd_k + send_bwd_k)] / (j - i + 1)

    A micro-batch occupies that round trip, while the 1F1B order lets stage i run only j - i + 1 micro-batches ahead
    meanwhile: the maximum cycle ratio of the schedule's event graph.
    """
    p, period = len(forward), 0.0
    for i in range(p):
        round_trip = 0.0
        for j in range(i, p):
            round_trip += forward[j] + backward[j]
            period = max(period, round_trip / (j - i + 1))
            if j < p - 1:
                round_trip += send_forward[j] + send_backward[j]
    return period


def upper_bound_s(forward: Times, backward: Times, send_forward: Times, send_backward: Times, m: int) -> float:
    """Upper bound on the makespan in seconds, O(p^2): never below the exact one.

    max over j of  S_{0..j} + (m-1-w_j) lambda + w_j (max f + max b)

    S_{0..j} is the round trip through stages 0..j. The critical path is one simple trip 0 -> j -> 0, steady-state
    cycles (at most lambda per micro-batch) and w_j repeats each of a warm-up forward and a drain backward.
    """
    p = len(forward)
    period = steady_period_s(forward, backward, send_forward, send_backward)
    repeat = max(forward) + max(backward)
    best, trip = 0.0, 0.0
    for j in range(p):
        trip += forward[j] + backward[j]
        ahead = min(p - 1 - j, m - 1)
        best = max(best, trip + (m - 1 - ahead) * period + ahead * repeat)
        if j < p - 1:
            trip += send_forward[j] + send_backward[j]
    return best


# ------------------------------------------------------------------------------------------------ interleaved
def interleaved_in_flight(num_stages: int, stage: int, num_microbatches: int, num_chunks: int) -> int:
    """Chunks' worth of activations that `stage` holds at its peak: its warm-up forwards and one more."""
    return min(_warm_up(num_stages, stage, num_microbatches, num_chunks) + 1, num_microbatches * num_chunks)


def _warm_up(num_stages: int, stage: int, num_microbatches: int, num_chunks: int) -> int:
    """Forwards that a stage runs before its first backward (Narayanan et al. 2021, section 2.2; Megatron-LM)."""
    return min(2 * (num_stages - 1 - stage) + (num_chunks - 1) * num_stages, num_microbatches * num_chunks)


def interleaved_ends_s(
    forward: Sequence[Times], backward: Sequence[Times], send: Times, m: int, slots: list[Slot] | None = None
) -> list[float]:
    """Seconds at which each stage ends its last backward when it runs several chunks of layers in turn, shape (p,).

    forward[c][i], backward[c][i]: seconds per micro-batch of chunk c on stage i. send[i]: seconds from stage i to the
    next one, the last stage sending to the first. m must be a multiple of p. Event by event: every stage runs
    Megatron-LM's order, groups of p micro-batches through one chunk after the other; an operation starts when the
    stage is free and its input is there.
    """
    num_chunks, p = len(forward), len(send)
    total = m * num_chunks
    orders = []
    for i in range(p):
        ahead = _warm_up(p, i, m, num_chunks)
        order = [(True, k) for k in range(ahead)]
        for k in range(total - ahead):
            order += [(True, ahead + k), (False, k)]
        orders.append(order + [(False, k) for k in range(total - ahead, total)])
    ends: dict[tuple[bool, int, int, int], float] = {}  # (is forward, chunk, stage, micro-batch) -> seconds
    free = [0.0] * p
    position = [0] * p
    waiting = list(range(p))
    while waiting:
        i = waiting.pop()
        while position[i] < len(orders[i]):
            is_forward, k = orders[i][position[i]]
            chunk = k % (p * num_chunks) // p
            microbatch = k // (p * num_chunks) * p + k % p
            if not is_forward:
                chunk = num_chunks - 1 - chunk
            start = free[i]
            before = _interleaved_input(is_forward, chunk, i, microbatch, num_chunks, p)
            if before is not None:
                if before not in ends:
                    break
                arrival = ends[before]
                if before[2] != i:
                    arrival = arrival + send[before[2] if is_forward else i]
                start = max(start, arrival)
            end = start + (forward if is_forward else backward)[chunk][i]
            ends[is_forward, chunk, i, microbatch] = free[i] = end
            if slots is not None:
                slots.append(Slot(i, microbatch, is_forward, start, end, chunk))
            position[i] += 1
            for near in ((i + 1) % p, (i - 1) % p):
                if near not in waiting:
                    waiting.append(near)
    return free


def _interleaved_input(
    is_forward: bool, chunk: int, stage: int, microbatch: int, num_chunks: int, p: int
) -> tuple[bool, int, int, int] | None:
    """The operation whose result another one needs; None for the first forward of a micro-batch."""
    if is_forward:
        if stage > 0:
            return (True, chunk, stage - 1, microbatch)
        return (True, chunk - 1, p - 1, microbatch) if chunk > 0 else None
    if stage < p - 1:
        return (False, chunk, stage + 1, microbatch)
    if chunk < num_chunks - 1:
        return (False, chunk + 1, 0, microbatch)
    return (True, chunk, stage, microbatch)
