"""The what-if features of `space.move_features` and steps of many plans at once, compiled.

A kernel gives the features of the readable twin (tests hold the two equal). It looks at single stages only: nothing
here runs a schedule or computes a bound. Plans are rows of whole numbers as in `cost.kernels`, moves as
`space.kernels.coded` gives them.
"""

from __future__ import annotations

import math

from haap_rl.cost.compiling import jit
from haap_rl.cost.estimator import FIRST, LAST
from haap_rl.cost.kernels import BACKWARD, DELAY, FORWARD, FREE, SENT, STEP, SYNC, place, stage_times
from haap_rl.space.kernels import BALANCE, DEVICES, GROUP, MERGE, MICROBATCHES, RECOMPUTE, SHIFT, SWAP, TP, apply, copy
from haap_rl.space.move_features import FEATURES, WIDEST

(LEGAL, STAY, SLOWEST, ROUND_TRIP, FILL_NOW, BUBBLE, BALANCE_NOW, BALANCE_THEN, TAIL, MEMORY_NOW, MEMORY, MISSING_NOW,
 MISSING, IDLE_NOW, IDLE, MICROBATCHES_UP, STAGES, LOAD, RELIEVES, IS_LAYERS, IS_DEVICES, IS_RECOMPUTE, IS_STRUCTURE,
 MOVES_LEFT, SPEED_UP) = range(len(FEATURES))  # fmt: skip
BUSY, BUSY_NOW = FREE, SENT  # rows of a Scratch that only the schedule uses, which is not run here


@jit
def squashed(ratio):
    """`move_features.squashed`: tanh(log r) = (r^2 - 1) / (r^2 + 1), written so that infinity gives 1."""
    return 4.0 * (1.0 - 2.0 / (ratio * ratio + 1.0))


@jit
def look(t, plan, work):
    """`move_features.Look.at`, but for idle: (busy seconds of the slowest stage, round trip in seconds, balance, tail,
    memory, missing, devices in use). The busy seconds of every stage are in row BUSY of the times then.
    """
    place(t, plan, work)
    stage_times(t, plan, work)
    mi, p, S, times = plan[0], plan[1], t.max_stages, work.times
    m = t.num_microbatches[mi]
    slowest_s = total_s = round_trip_s = tail = memory = 0.0
    lacking = capacity = devices = 0
    for i in range(p):
        k, r, n = plan[2 + i], work.rows[i], plan[2 + S + i]
        position = (FIRST if i == 0 else 0) | (LAST if i == p - 1 else 0)
        busy_s, tail_s = times[FORWARD, i] + times[BACKWARD, i], times[SYNC, i] + times[STEP, i]
        load_s = m * busy_s + tail_s
        times[BUSY, i] = load_s
        total_s += load_s
        round_trip_s += busy_s + 2.0 * times[DELAY, i]
        if load_s > slowest_s:
            slowest_s, tail = load_s, tail_s / load_s
        for j in range(t.group.shape[1]):
            if t.group[k, j] < 0:
                continue
            devices += t.devices[k, j]
            b = t.bytes[mi, r, j, position]
            needed = b[0] + n * b[1] + min(p - i, m) * (b[2] + n * b[3]) + b[4]
            memory = max(memory, (needed + t.reserve_bytes) / (b[5] + t.reserve_bytes))
            lacking += max(0, needed - b[5])
        capacity += t.capacity[r]
    missing = 1.0 + lacking / capacity if lacking > 0 else 0.0
    return slowest_s, round_trip_s, total_s / p / slowest_s, tail, memory, missing, devices


@jit
def load_now_s(times, kind, stage, argument, slowest_s):
    """Busy seconds now of the slowest stage that a legal move names, `move_features.named`."""
    if kind in (BALANCE, MICROBATCHES):
        return slowest_s
    load_s = times[BUSY_NOW, stage]
    if kind == SHIFT:
        load_s = max(load_s, times[BUSY_NOW, stage + argument])
    elif kind in (SWAP, MERGE):
        load_s = max(load_s, times[BUSY_NOW, stage + 1])
    return load_s


@jit
def observe_one(t, nb, work, code, edits, moves_left, speed_up, out):
    """Fill the (moves + 1, features) of one plan; returns how many moves are legal."""
    p, times, after = code[1], work.times, nb.row
    m = t.num_microbatches[code[0]]
    now_s, now_trip_s, balance, tail, memory, missing, devices = look(t, code, work)
    for i in range(p):
        times[BUSY_NOW, i] = times[BUSY, i]
    all_devices = 0
    for g in range(len(nb.devices)):
        all_devices += nb.devices[g]
    fill, idle, gained = now_trip_s / (now_trip_s + now_s), 1.0 - devices / all_devices, 0.25 * squashed(speed_up)
    memory_now, missing_now = min(memory, WIDEST), min(missing, WIDEST)
    count, stay = 0, len(edits)
    for x in range(stay + 1):
        row = out[x]
        for y in range(len(row)):
            row[y] = 0.0
        if x < stay:
            kind, stage, argument = edits[x, 0], edits[x, 1], edits[x, 2]
            if not apply(nb, code, kind, stage, argument, after):
                continue
            count += 1
            then_s, trip_s, then_balance, tail, memory, missing, devices = look(t, after, work)
            then_m, then_p = t.num_microbatches[after[0]], after[1]
            load_s = load_now_s(times, kind, stage, argument, now_s)
            group = IS_STRUCTURE
            if kind in (SHIFT, BALANCE):
                group = IS_LAYERS
            elif kind in (TP, DEVICES, GROUP):
                group = IS_DEVICES
            elif kind == RECOMPUTE:
                group = IS_RECOMPUTE
            if kind != MICROBATCHES:
                row[group] = 1.0
        else:
            if count > 0:
                continue
            then_s, trip_s, then_balance, then_m, then_p, load_s = now_s, now_trip_s, balance, m, p, now_s
            row[STAY] = 1.0
        row[LEGAL] = 1.0
        row[SLOWEST], row[ROUND_TRIP] = squashed(then_s / now_s), squashed(trip_s / now_trip_s)
        row[FILL_NOW], row[BUBBLE] = fill, (then_p - 1) / (then_m + then_p - 1)
        row[BALANCE_NOW], row[BALANCE_THEN], row[TAIL] = balance, then_balance, tail
        row[MEMORY_NOW], row[MEMORY] = memory_now, min(memory, WIDEST)
        row[MISSING_NOW], row[MISSING] = missing_now, min(missing, WIDEST)
        row[IDLE_NOW], row[IDLE] = idle, 1.0 - devices / all_devices
        row[MICROBATCHES_UP], row[STAGES] = math.log2(then_m / m), then_p - p
        row[LOAD], row[RELIEVES] = load_s / now_s, 1.0 if load_s == now_s else 0.0
        row[MOVES_LEFT], row[SPEED_UP] = moves_left, gained
    return count


@jit
def observe(t, nb, work, codes, edits, moves_left, speed_up, out):
    """Fill the features of n plans, `move_features.rows`.

    t: StageTables, nb: Neighbourhood of one space. work: a Scratch. codes (n, 2+2S). edits (X, 3). moves_left (n,):
    share of the episode's; speed_up (n,): iteration time that the episode began with over that now.
    out (n, X + 1, features) float32.
    """
    for x in range(len(codes)):
        observe_one(t, nb, work, codes[x], edits, moves_left[x], speed_up[x], out[x])


@jit
def apply_each(nb, codes, edits, actions, out, legal):
    """Apply to each of n plans the edit of that number: plans to `out`, legal (n,) whether it was.

    Where it was not, or there is no such edit, the plan stays as it is.
    """
    for x in range(len(codes)):
        a = actions[x]
        legal[x] = 0 <= a < len(edits) and apply(nb, codes[x], edits[a, 0], edits[a, 1], edits[a, 2], out[x])
        if not legal[x]:
            copy(codes[x], out[x])
