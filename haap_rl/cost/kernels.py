"""The estimator's arithmetic on integer-coded plans, compiled: batches of plans, and what-ifs on one plan.

A plan is a row of whole numbers, front to back, its costs those of `cost.stage_tables.StageTables`:

    [micro-batch index, stages p, kind of each stage (S places), layers of each stage (S places)]

Everything that a searcher can vary is priced: placement node by node, links inside and between nodes, the NICs that
devices share, the blocking part of sends, host time, the tied embedding's all-reduce, stages on several device groups,
the exact 1F1B recurrence. `cost.estimator.Estimator` is the readable twin, `cost.schedule` that of the schedule.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from haap_rl.cost import comm
from haap_rl.cost.compiling import jit, jit_inlined, machine_code
from haap_rl.cost.estimator import FIRST, LAST
from haap_rl.cost.stage_tables import VARIANTS, StageTables

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
SLACK = 1e-12  # relative, of bounds: their sums are put together in another order than the schedule's
_ring_all_reduce_s = machine_code(comm)["ring_all_reduce_s"]


# ------------------------------------------------------------------------------------------- one plan
class Scratch(NamedTuple):
    """Working memory of one plan's pricing; S stages at most."""

    rows: Ints  # (S,)
    spot: Ints  # (S,) the node that holds the whole stage, or -1 - stage
    taken: Ints  # (G, sizes) devices that larger and earlier replica groups take
    times: Floats  # (9, S): see the constants below
    seen: Ints  # identities of unit times, by the last plan that had them


FORWARD, BACKWARD, DELAY, SYNC, STEP, BLOCK, FREE, SENT, UP = range(9)  # block: what sends block, per direction


def scratch(tables: StageTables) -> Scratch:
    """Working memory for the kernels on these tables."""
    stages = tables.max_stages
    return Scratch(
        np.zeros(stages, np.int64),
        np.zeros(stages, np.int64),
        np.zeros((len(tables.aligned), tables.num_sizes), np.int64),
        np.zeros((9, stages)),
        np.zeros(int(tables.unit_key.max()) + 1, np.int64),
    )


@jit
def place(t, plan, work):
    """Fill the row and the spot of each stage as `problem.placement.place` places it; False where it cannot be."""
    p, parts = plan[1], t.group.shape[1]
    taken = work.taken
    for g in range(taken.shape[0]):
        for size in range(taken.shape[1]):
            taken[g, size] = 0
    for i in range(p):
        k = plan[2 + i]
        for j in range(parts):
            if t.group[k, j] >= 0:
                taken[t.group[k, j], t.size_rank[k, j]] += t.devices[k, j]
    for g in range(taken.shape[0]):  # where the replica groups of each size begin
        before = 0
        for size in range(taken.shape[1]):
            here = taken[g, size]
            taken[g, size] = before
            before += here
    for i in range(p):
        k = plan[2 + i]
        code, factor, spot, groups = 0, 1, -1 - i, 0
        for j in range(parts):
            g = t.group[k, j]
            if g < 0:
                continue
            groups += 1
            devices, tp = t.devices[k, j], t.tp[k, j]
            offset = taken[g, t.size_rank[k, j]]
            taken[g, t.size_rank[k, j]] = offset + devices
            if offset + devices >= t.node.shape[1]:
                return False
            node = t.node[g, offset]
            if t.aligned[g]:
                one = t.needed[k, j] == 1
            else:
                nodes = t.node[g, offset + devices - 1] - node + 1
                one = nodes == 1
                if nodes > t.needed[k, j]:
                    code += factor
                if nodes > 1 and (offset % tp or t.per_node[g] % tp):
                    for d in range(offset, offset + devices, tp):
                        if t.node[g, d + tp - 1] > t.node[g, d]:
                            code += 2 * factor
                            break
            if one:
                spot = node
            factor *= VARIANTS
        if groups > 1:
            spot = -1 - i
        work.spot[i] = spot
        work.rows[i] = t.row[k, code]
        if work.rows[i] < 0:
            return False
    return True


@jit
def stage_times(t, plan, work):
    """Fill the times of a placed plan: forward and backward with what sends block of them, delays, sync and step."""
    mi, p, S = plan[0], plan[1], t.max_stages
    times = work.times
    received = 0.0
    for i in range(p):
        position = (FIRST if i == 0 else 0) | (LAST if i == p - 1 else 0)
        r, n = work.rows[i], plan[2 + S + i]
        send_s = 0.0
        if i < p - 1:
            near = 1 if work.spot[i] == work.spot[i + 1] else 0
            send_s = t.send_s[mi, t.side[r], t.side[work.rows[i + 1]], near]
        times[BLOCK, i] = t.blocking * (send_s + received)
        times[FORWARD, i] = t.forward_s[mi, r, position, n] + times[BLOCK, i]
        times[BACKWARD, i] = t.backward_s[mi, r, position, n] + times[BLOCK, i]
        times[DELAY, i] = (1.0 - t.blocking) * send_s
        times[SYNC, i] = t.sync_s[mi, r, position, n]
        times[STEP, i] = t.optimizer_s[mi, r, position, n]
        received = send_s
    if t.tied_bytes > 0.0 and p > 1:
        tied_s = tied_embeddings_s(t, work.rows[0], work.rows[p - 1], work.spot[0] == work.spot[p - 1])
        times[SYNC, 0] += tied_s
        times[SYNC, p - 1] += tied_s


@jit
def tied_embeddings_s(t, first, last, one_node):
    """Seconds of the all-reduce of the tied embedding's gradient between the rows of the first and the last stage."""
    pairs = float(min(t.replicas[first], t.replicas[last]))
    rate = t.tied_rate[t.side[first], t.side[last], 1 if one_node else 0]
    return _ring_all_reduce_s(pairs * t.tied_bytes, 2, rate[0], rate[1])


@jit_inlined
def missing_bytes(t, mi, r, position, n, in_flight):
    """Bytes that a stage lacks on one device of each of its replica groups, summed."""
    missing = 0
    for j in range(t.bytes.shape[2]):
        b = t.bytes[mi, r, j, position]
        needed = b[0] + n * b[1] + in_flight * (b[2] + n * b[3]) + b[4] - b[5]
        if needed > 0:
            missing += needed
    return missing


@jit
def plan_missing_bytes(t, plan, work):
    """Bytes that a placed plan lacks, stages and replica groups summed."""
    mi, p, S = plan[0], plan[1], t.max_stages
    m = t.num_microbatches[mi]
    missing = 0
    for i in range(p):
        position = (FIRST if i == 0 else 0) | (LAST if i == p - 1 else 0)
        missing += missing_bytes(t, mi, work.rows[i], position, plan[2 + S + i], min(p - i, m))
    return missing


# ------------------------------------------------------------------ the schedule; twins in cost/schedule.py
@jit
def exact_s(times, p, m):
    """`schedule.stage_ends_s`, then the last end of any stage with its sync and optimiser step, in seconds."""
    forward, backward, delay = times[FORWARD], times[BACKWARD], times[DELAY]
    free, sent = times[FREE], times[SENT]
    last = p - 1
    for i in range(p):
        free[i] = sent[i] = 0.0
    for step in range(-last, m):
        for i in range(min(last, last + step), max(-1, last + step - m), -1):
            start = free[i]
            if i > 0:
                arrival = sent[i - 1] + delay[i - 1]
                if arrival > start:
                    start = arrival
            free[i] = sent[i] = start + forward[i]
        if step < 0:
            continue
        end = -np.inf  # of the same micro-batch one stage behind
        for i in range(last, -1, -1):
            start = free[i]
            if i < last and end + delay[i] > start:
                start = end + delay[i]
            end = start + backward[i]
            free[i] = end
    longest = 0.0
    for i in range(p):
        longest = max(longest, free[i] + times[SYNC, i] + times[STEP, i])
    return longest


@jit
def period_s(times, p):
    """`schedule.steady_period_s`."""
    period = 0.0
    for i in range(p):
        trip = 0.0
        for j in range(i, p):
            trip += times[FORWARD, j] + times[BACKWARD, j]
            period = max(period, trip / (j - i + 1))
            trip += 2.0 * times[DELAY, j]
    return period


@jit
def truncated_s(times, p, m, per_stage):
    """Exact for the first `per_stage` x p micro-batches, then one steady period for each further one; no bound."""
    simulated = min(m, max(1, per_stage * p))
    return exact_s(times, p, simulated) + (m - simulated) * period_s(times, p)


@jit
def lower_s(times, p, m):
    """`schedule.lower_bound_s` with tails: seconds that the iteration takes at least, in O(p)."""
    lone = 0.0
    for i in range(p):
        lone += times[FORWARD, i] + times[BACKWARD, i] + 2.0 * times[DELAY, i]
    best = lone + times[SYNC, 0] + times[STEP, 0]
    # front to back: the round trip through the stages before, all of a stage's work, then up to the best tail
    before = up = 0.0
    tail, waits = -np.inf, -np.inf
    for i in range(p):
        busy = times[FORWARD, i] + times[BACKWARD, i]
        own_tail = times[SYNC, i] + times[STEP, i] - up
        best = max(best, lone + waits + own_tail)
        ahead = min(p - 1 - i, m - 1)
        waits = max(waits, (m - 1 - ahead) * busy + ahead * times[FORWARD, i])
        tail = max(tail, own_tail)
        times[UP, i] = tail
        best = max(best, before + m * busy + tail)
        before += busy + 2.0 * times[DELAY, i]
        up += times[BACKWARD, i] + times[DELAY, i]
    # back to front: the path leaves a stage once, then ends at the best tail of the stages before it
    trip = 0.0
    for i in range(p - 1, -1, -1):
        f, b = times[FORWARD, i], times[BACKWARD, i]
        ahead = min(p - 1 - i, m - 1)
        stays = (m - 1) * max(f, b) + (m - 1 - ahead) * min(f, b)
        trip += f + b
        if m - 2 - (p - 1 - i) >= 0:  # the last micro-batch's trip to the end and back counts a second time
            stays = max(stays, (m - 2 - (p - 1 - i)) * (f + b) + trip)
        best = max(best, lone + stays + times[UP, i])
        if i > 0:
            trip += 2.0 * times[DELAY, i - 1]
    return best


@jit
def upper_s(times, p, m):
    """`schedule.upper_bound_s` with the longest tail, in O(p^2)."""
    period = period_s(times, p)
    longest_forward = longest_backward = tail = 0.0
    for i in range(p):
        longest_forward = max(longest_forward, times[FORWARD, i])
        longest_backward = max(longest_backward, times[BACKWARD, i])
        tail = max(tail, times[SYNC, i] + times[STEP, i])
    repeat = longest_forward + longest_backward
    best = trip = 0.0
    for j in range(p):
        trip += times[FORWARD, j] + times[BACKWARD, j]
        ahead = min(p - 1 - j, m - 1)
        best = max(best, trip + (m - 1 - ahead) * period + ahead * repeat)
        trip += 2.0 * times[DELAY, j]
    return best + tail


# ------------------------------------------------------------------------------------------- batches
@jit
def price_many(t, plans, limit_s, work, seconds, missing, capacity, counts):
    """Price every row of `plans` into `seconds` and `missing`, `capacity` of its stages beside.

    A plan that fits and whose lower bound is at least `limit_s` gets that bound: it cannot be better than the limit.
    counts: recurrences run, operator latencies that an estimator without memo computes, and one that computes each
    distinct one once per plan.
    """
    S, parts = t.max_stages, t.unit_key.shape[2]
    for key in range(work.seen.shape[0]):
        work.seen[key] = -1
    for x in range(plans.shape[0]):
        plan = plans[x]
        mi, p = plan[0], plan[1]
        m = t.num_microbatches[mi]
        if not place(t, plan, work):
            seconds[x], missing[x], capacity[x] = np.inf, 1, 1
            continue
        stage_times(t, plan, work)
        missing[x] = plan_missing_bytes(t, plan, work)
        room = 0
        for i in range(p):
            r = work.rows[i]
            room += t.capacity[r]
            for j in range(parts):
                key = t.unit_key[mi, r, j]
                if key < 0:
                    continue
                counts[1] += plan[2 + S + i] * t.operators[1]
                ends = (t.operators[0] if i == 0 else 0) + (t.operators[2] if i == p - 1 else 0)
                counts[1] += ends
                counts[2] += ends
                if work.seen[key] != x:
                    work.seen[key] = x
                    counts[2] += t.operators[1]
        capacity[x] = room
        if missing[x] == 0 and limit_s < np.inf:
            seconds[x] = lower_s(work.times, p, m) * (1.0 - SLACK)
            if seconds[x] >= limit_s:
                continue
        seconds[x] = exact_s(work.times, p, m)
        counts[0] += 1


@jit
def loads(t, plan, work, seconds, missing):
    """Fill `Estimate.loads_s` and the bytes missing of each stage of one plan."""
    mi, p, S = plan[0], plan[1], t.max_stages
    m = t.num_microbatches[mi]
    place(t, plan, work)
    stage_times(t, plan, work)
    times = work.times
    for i in range(p):
        position = (FIRST if i == 0 else 0) | (LAST if i == p - 1 else 0)
        seconds[i] = m * (times[FORWARD, i] + times[BACKWARD, i]) + (times[SYNC, i] + times[STEP, i])
        missing[i] = missing_bytes(t, mi, work.rows[i], position, plan[2 + S + i], min(p - i, m))


# -------------------------------------------------------------------------------- what-ifs on one plan
class State(NamedTuple):
    """A plan that is being edited: priced, with what makes a change of one or two stages a few look-ups.

    plan, before    its row, and the one it had before the last `commit`
    work            its rows, spots and times
    sums (7, S+2)   see the constants; from place 1 on, so that 0 and p+1 are "no stage"
    spare           working memory for a row
    whole (4,)      S, iteration seconds, the seconds it had before, bytes missing
    trial           working memory for a candidate; its times are those of the plan between two what-ifs
    """

    plan: Ints
    before: Ints
    spare: Ints
    work: Scratch
    sums: Floats
    whole: Floats
    trial: Scratch


# of the stages before a place: their round trip; the longest path through one of them that stays for all its work, and
# that leaves it once, less S; the same two of the stages from a place on; and of the stage itself
TRIP, WORK_BEFORE, STAY_BEFORE, WORK_FROM, STAY_FROM, WORK, STAY = range(7)
# how a what-if was decided: by the O(1) bound, by the bounds of the whole plan, by the recurrence, by memory
BY_CHANGE, BY_LOWER, BY_UPPER, BY_RECURRENCE, BY_MEMORY = range(5)


def state_of(tables: StageTables, plan: Ints) -> State:
    """The State of a plan, a row of whole numbers."""
    stages = tables.max_stages
    state = State(
        plan.copy(), plan.copy(), plan.copy(), scratch(tables), np.zeros((7, stages + 2)), np.zeros(4), scratch(tables)
    )
    commit(tables, state, plan)
    return state


@jit
def stay_s(f, b, p, m, i):
    """Seconds beyond one micro-batch alone of the path that leaves stage i once, as in `schedule.lower_bound_s`."""
    ahead = min(p - 1 - i, m - 1)
    return (m - 1) * max(f, b) + (m - 1 - ahead) * min(f, b)


@jit
def commit(t, state, plan):
    """Make `plan` the state's plan, in O(p) and one recurrence; `undo` goes back."""
    own, work, sums = state.plan, state.work, state.sums
    for x in range(own.shape[0]):
        state.before[x] = own[x]
        own[x] = plan[x]
    place(t, own, work)
    stage_times(t, own, work)
    p, m = own[1], t.num_microbatches[own[0]]
    times = work.times
    sums[WORK_BEFORE, 0] = sums[STAY_BEFORE, 0] = sums[TRIP, 1] = 0.0
    for i in range(p):
        f, b = times[FORWARD, i], times[BACKWARD, i]
        sums[WORK, i + 1], sums[STAY, i + 1] = sums[TRIP, i + 1] + m * (f + b), stay_s(f, b, p, m, i)
        sums[WORK_BEFORE, i + 1] = max(sums[WORK_BEFORE, i], sums[WORK, i + 1])
        sums[STAY_BEFORE, i + 1] = max(sums[STAY_BEFORE, i], sums[STAY, i + 1])
        sums[TRIP, i + 2] = sums[TRIP, i + 1] + f + b + 2.0 * times[DELAY, i]
    sums[WORK_FROM, p + 1] = sums[STAY_FROM, p + 1] = 0.0
    for i in range(p, 0, -1):
        sums[WORK_FROM, i] = max(sums[WORK, i], sums[WORK_FROM, i + 1])
        sums[STAY_FROM, i] = max(sums[STAY, i], sums[STAY_FROM, i + 1])
    state.whole[2] = state.whole[1]
    state.whole[0], state.whole[1] = sums[TRIP, p + 1], exact_s(times, p, m)
    state.whole[3] = plan_missing_bytes(t, own, work)
    for y in range(FREE):
        for i in range(p):
            state.trial.times[y, i] = times[y, i]


@jit
def undo(t, state):
    """Take the last `commit` back."""
    for x in range(state.plan.shape[0]):
        state.spare[x] = state.before[x]
    commit(t, state, state.spare)


@jit
def stays_put(t, k, other):
    """Whether a stage may change from kind k to another without any stage being placed anew: same devices, aligned."""
    for j in range(t.group.shape[1]):
        g = t.group[k, j]
        if g != t.group[other, j] or t.devices[k, j] != t.devices[other, j]:
            return False
        if g >= 0 and not t.aligned[g]:
            return False
    return True


@jit_inlined
def row_of(t, state, i, k):
    """The row of stage i with kind k on the devices that it has."""
    return state.work.rows[i] if k == state.plan[2 + i] else t.row[k, 0]


@jit_inlined
def position_of(i, p):
    """The position of stage i of p, as bits."""
    return (FIRST if i == 0 else 0) | (LAST if i == p - 1 else 0)


@jit_inlined
def change_bound_s(t, state, i, k, n, j, q, o):
    """Lower bound in seconds if stage i had kind k with n layers and stage j > i kind q with o.

    Their devices stay (`stays_put`), so neither transfers nor any other stage change: O(1) for neighbours, else O(j-i)
    for the stages between. j = -1: only stage i changes.
    """
    plan, sums, times = state.plan, state.sums, state.work.times
    mi, p = plan[0], plan[1]
    m = t.num_microbatches[mi]
    row, position = row_of(t, state, i, k), position_of(i, p)
    f = t.forward_s[mi, row, position, n] + times[BLOCK, i]
    b = t.backward_s[mi, row, position, n] + times[BLOCK, i]
    longer = f + b - (times[FORWARD, i] + times[BACKWARD, i])
    works = max(sums[WORK_BEFORE, i], sums[TRIP, i + 1] + m * (f + b))
    stays = max(sums[STAY_BEFORE, i], stay_s(f, b, p, m, i))
    tail = times[SYNC, 0] + times[STEP, 0]
    if i == 0:
        tail = t.sync_s[mi, row, position, n] + t.optimizer_s[mi, row, position, n]
    if t.tied_bytes > 0.0:
        tail += changed_tied_s(t, state, i, k, j, q)
    last = i
    if j >= 0:
        for x in range(i + 2, j + 1):
            works = max(works, sums[WORK, x] + longer)
            stays = max(stays, sums[STAY, x])
        row, position = row_of(t, state, j, q), position_of(j, p)
        f = t.forward_s[mi, row, position, o] + times[BLOCK, j]
        b = t.backward_s[mi, row, position, o] + times[BLOCK, j]
        works = max(works, sums[TRIP, j + 1] + longer + m * (f + b))
        stays = max(stays, stay_s(f, b, p, m, j))
        longer += f + b - (times[FORWARD, j] + times[BACKWARD, j])
        last = j
    works = max(works, sums[WORK_FROM, last + 2] + longer)
    stays = max(stays, sums[STAY_FROM, last + 2])
    return max(state.whole[0] + longer + stays, works) + tail


@jit
def changed_tied_s(t, state, i, k, j, q):
    """Seconds that `change_bound_s` adds to the first stage's tail where embeddings are tied: it, or the last stage,
    may have other replicas then."""
    rows, p = state.work.rows, state.plan[1]
    if p == 1:
        return 0.0
    first = row_of(t, state, 0, k) if i == 0 else rows[0]
    last = rows[p - 1]
    if i == p - 1:
        last = row_of(t, state, i, k)
    elif j == p - 1:
        last = row_of(t, state, j, q)
    one_node = state.work.spot[0] == state.work.spot[p - 1]
    added = tied_embeddings_s(t, first, last, one_node)
    return added if i == 0 else added - tied_embeddings_s(t, rows[0], rows[p - 1], one_node)


@jit
def changed_plan(state, i, k, n, j, q, o, plan):
    """Fill `plan` with the state's plan after a change as `change_bound_s` takes it."""
    S = (plan.shape[0] - 2) // 2
    for x in range(plan.shape[0]):
        plan[x] = state.plan[x]
    plan[2 + i], plan[2 + S + i] = k, n
    if j >= 0:
        plan[2 + j], plan[2 + S + j] = q, o


@jit_inlined
def change_missing_bytes(t, state, i, k, n, j, q, o):
    """Bytes that the plan lacks after a change as `change_bound_s` takes it."""
    plan, rows, S = state.plan, state.work.rows, t.max_stages
    mi, p = plan[0], plan[1]
    m = t.num_microbatches[mi]
    missing = missing_bytes(t, mi, row_of(t, state, i, k), position_of(i, p), n, min(p - i, m))
    if j >= 0:
        missing += missing_bytes(t, mi, row_of(t, state, j, q), position_of(j, p), o, min(p - j, m))
    if state.whole[3] > 0.0:
        missing += int(state.whole[3]) - missing_bytes(
            t, mi, rows[i], position_of(i, p), plan[2 + S + i], min(p - i, m)
        )
        if j >= 0:
            missing -= missing_bytes(t, mi, rows[j], position_of(j, p), plan[2 + S + j], min(p - j, m))
    return missing


@jit_inlined
def set_stage(t, state, i, k, n):
    """Set the times of stage i in the trial to those of kind k with n layers."""
    times, mi = state.trial.times, state.plan[0]
    row, position = row_of(t, state, i, k), position_of(i, state.plan[1])
    times[FORWARD, i] = t.forward_s[mi, row, position, n] + times[BLOCK, i]
    times[BACKWARD, i] = t.backward_s[mi, row, position, n] + times[BLOCK, i]
    times[SYNC, i] = t.sync_s[mi, row, position, n]
    times[STEP, i] = t.optimizer_s[mi, row, position, n]


@jit
def set_tied(t, state, i, k, n, j, q, o):
    """Set the sync seconds of the ends in the trial where embeddings are tied, for a change as in `change_bound_s`."""
    plan, times, S = state.plan, state.trial.times, t.max_stages
    mi, p = plan[0], plan[1]
    if p == 1:
        return
    first, last, front = state.work.rows[0], state.work.rows[p - 1], plan[2 + S]
    back = plan[1 + S + p]
    if i == 0:
        first, front = row_of(t, state, i, k), n
    if i == p - 1:
        last, back = row_of(t, state, i, k), n
    elif j == p - 1:
        last, back = row_of(t, state, j, q), o
    tied_s = tied_embeddings_s(t, first, last, state.work.spot[0] == state.work.spot[p - 1])
    times[SYNC, 0] = t.sync_s[mi, first, FIRST, front] + tied_s
    times[SYNC, p - 1] = t.sync_s[mi, last, LAST, back] + tied_s


@jit_inlined
def reset_stage(state, i):
    """Set the times of stage i in the trial to those of the plan."""
    times, own = state.trial.times, state.work.times
    times[FORWARD, i], times[BACKWARD, i] = own[FORWARD, i], own[BACKWARD, i]
    times[SYNC, i], times[STEP, i] = own[SYNC, i], own[STEP, i]


@jit
def decide(times, p, m, limit_s):
    """(seconds, how) of a plan's times against a limit: its lower bound where that is at least the limit (BY_LOWER),
    its upper bound where that is below it (BY_UPPER), else its exact time (BY_RECURRENCE)."""
    seconds = lower_s(times, p, m) * (1.0 - SLACK)
    if seconds >= limit_s:
        return seconds, BY_LOWER
    seconds = upper_s(times, p, m) * (1.0 + SLACK)
    if seconds < limit_s:
        return seconds, BY_UPPER
    return exact_s(times, p, m), BY_RECURRENCE


@jit_inlined
def what_if(t, state, i, k, n, j, q, o, limit_s):
    """`decide` for a change as `change_bound_s` takes it, most of which the O(1) bound decides (BY_CHANGE).

    BY_MEMORY: infinity, it does not fit.
    """
    seconds = change_bound_s(t, state, i, k, n, j, q, o) * (1.0 - SLACK)
    if seconds >= limit_s:
        return seconds, BY_CHANGE
    if change_missing_bytes(t, state, i, k, n, j, q, o) > 0:
        return np.inf, BY_MEMORY
    p = state.plan[1]
    set_stage(t, state, i, k, n)
    if j >= 0:
        set_stage(t, state, j, q, o)
    if t.tied_bytes > 0.0:
        set_tied(t, state, i, k, n, j, q, o)
    seconds, how = decide(state.trial.times, p, t.num_microbatches[state.plan[0]], limit_s)
    reset_stage(state, i)
    if j >= 0:
        reset_stage(state, j)
    if t.tied_bytes > 0.0:
        reset_stage(state, 0)
        reset_stage(state, p - 1)
    return seconds, how


@jit
def polish(t, state, alike, most, plan, decided):
    """Improve the state's plan by changes that keep every stage's devices, until none helps; evaluations used.

    In turn: a layer from each stage to each other one, then each other kind of each stage on its devices (`alike`
    (K, X), -1 beyond); the first one that helps is made. At most `most` evaluations. decided (5,): how many were
    decided how. The plan must fit.
    """
    evaluations = 0
    S = t.max_stages
    improved = True
    while improved:
        improved = False
        p = state.plan[1]
        for x in range(p):
            for y in range(p + alike.shape[1]):
                own, layers = state.plan[2 + x], state.plan[2 + S + x]
                if y < p:
                    if y == x or layers == 1:
                        continue
                    i, j = min(x, y), max(x, y)
                    n, o = state.plan[2 + S + i], state.plan[2 + S + j]
                    n, o = (n - 1, o + 1) if i == x else (n + 1, o - 1)
                    k, q = state.plan[2 + i], state.plan[2 + j]
                else:
                    k = alike[own, y - p]
                    if k < 0:
                        break
                    i, n, j, q, o = x, layers, -1, 0, 0
                if evaluations >= most:
                    return evaluations
                evaluations += 1
                limit_s = state.whole[1]
                seconds, how = what_if(t, state, i, k, n, j, q, o, limit_s)
                decided[how] += 1
                if seconds < limit_s:
                    changed_plan(state, i, k, n, j, q, o, plan)
                    commit(t, state, plan)
                    improved = True
    return evaluations


@jit
def bound_many(t, plans, work, lower, upper, exact, missing):
    """Both bounds of every plan, its exact time and the bytes it lacks (for checks)."""
    for x in range(plans.shape[0]):
        p, m = plans[x, 1], t.num_microbatches[plans[x, 0]]
        place(t, plans[x], work)
        stage_times(t, plans[x], work)
        missing[x] = plan_missing_bytes(t, plans[x], work)
        lower[x], upper[x] = lower_s(work.times, p, m), upper_s(work.times, p, m)
        exact[x] = exact_s(work.times, p, m)


# ------------------------------------------------------------------------------- one plan, explained
BUSY, PARALLEL, BLOCKED, SYNCED, STEPPED, MEMORY = range(6)  # rows of `stages` below


@jit
def explain(t, plans, work, seconds, missing, capacity, counts, stages, whole):
    """Price the one row of `plans` as `price_many` does, and say what the price is made of.

    stages: (6, p) of each stage what `StageTime` and `StageMemory` hold: busy, tensor-parallel, blocked, sync and step
    seconds, and the largest share of memory that one of its replica groups needs. whole: makespan in seconds, bubble
    and balance of `Estimate`.
    """
    price_many(t, plans, np.inf, work, seconds, missing, capacity, counts)
    plan, times = plans[0], work.times
    mi, p, S = plan[0], plan[1], t.max_stages
    m = t.num_microbatches[mi]
    devices, used_s, total_s, slowest_s = 0, 0.0, 0.0, 0.0
    for i in range(p):
        k, r, n = plan[2 + i], work.rows[i], plan[2 + S + i]
        position = (FIRST if i == 0 else 0) | (LAST if i == p - 1 else 0)
        busy_s = times[FORWARD, i] + times[BACKWARD, i]
        share, here = 0.0, 0
        for j in range(t.group.shape[1]):
            if t.group[k, j] < 0:
                continue
            here += t.devices[k, j]
            b = t.bytes[mi, r, j, position]
            needed = b[0] + n * b[1] + min(p - i, m) * (b[2] + n * b[3]) + b[4]
            share = max(share, (needed + t.reserve_bytes) / (b[5] + t.reserve_bytes))
        stages[BUSY, i], stages[PARALLEL, i] = busy_s, t.parallel_s[mi, r, position, n]
        stages[BLOCKED, i] = 2.0 * times[BLOCK, i]
        stages[SYNCED, i], stages[STEPPED, i], stages[MEMORY, i] = times[SYNC, i], times[STEP, i], share
        devices += here
        used_s += here * busy_s
        total_s += busy_s
        slowest_s = max(slowest_s, busy_s)
    whole[0] = times[FREE, 0]  # where `exact_s` leaves the end of the last backward of all
    whole[1], whole[2] = 1.0 - used_s * m / (devices * whole[0]), total_s / p / slowest_s
