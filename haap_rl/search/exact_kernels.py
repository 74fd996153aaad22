"""The compiled inside of `search/exact.py`: one pass of its dynamic program, and the walk back through its tables.

Both speak of one number of micro-batches m. A stage is known by its place s from the end of the pipeline, its shape c
(devices per group) and the option k and layers n that run it; used devices are one whole number u (mixed radix over
the groups). See `search/exact.py` for what is computed and why it proves anything.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from haap_rl.cost.compiling import jit, jit_allotting
from haap_rl.cost.estimator import FIRST, LAST
from haap_rl.cost.kernels import exact_s, lower_s, place, plan_missing_bytes, stage_times

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
INF = 1e300  # seconds of "no plan"; finite, so that sums stay finite


class Program(NamedTuple):
    """One m. K options, C shapes, L layers, S stages, U device states, Y stage types, V kinds of boundary.

    A boundary has a level: how slow it is, in a few steps, rounded down. A stage type is a shape with the level of the
    boundary to the stage in front and, where that is not 0, the bucket of the stage's own busy time. A kind of boundary
    is its level and the bucket of the stage behind.

    forward_s, backward_s (K, 4, L+1) without transfers, at the best placement; tail_s (K, 4, L+1) sync and step
    fits (K, 4, S+1) most layers; member (C, K') options of a shape, -1 beyond
    link_s (C, C) what a boundary adds to S; blocked_s (C, C) what it blocks of both stages, per direction; delay_s
    (C, C) what it delays, both directions; level (C, C) index in `levels`, ascending, of blocked_s rounded down, and in
    `delays`, one direction
    type_of (C, C, B) type of the second shape behind the first; type_shape, type_level, type_bucket (Y,), the types of
    a shape from first_type[c] to first_type[c + 1]
    kind_of (levels, B) kind of boundary; kind_level, kind_bucket (V,)
    lows (B,) where a bucket begins, as a share of the limit on busy time
    step (C,), enough (C, U): u + step[c] is a state
    groups (C,), used_groups (U,): device groups as bits; contiguous: each group is one run of stages
    layer_s, down_s: least seconds of one layer, forward and backward, and forward alone
    """

    m: int
    count_index: int  # of m in the space's micro-batch counts
    num_layers: int
    max_stages: int
    forward_s: Floats
    backward_s: Floats
    tail_s: Floats
    fits: Ints
    member: Ints
    link_s: Floats
    blocked_s: Floats
    delay_s: Floats
    level: Ints
    levels: Floats
    delays: Floats
    type_of: Ints
    type_shape: Ints
    type_level: Ints
    type_bucket: Ints
    first_type: Ints
    kind_of: Ints
    kind_level: Ints
    kind_bucket: Ints
    lows: Floats
    step: Ints
    enough: npt.NDArray[np.bool_]
    groups: Ints
    used_groups: Ints
    contiguous: bool
    layer_s: float
    down_s: float


class Pass(NamedTuple):
    """Tables of one pass.

    open_s (S+1, Y, L+1, U) least S of the last s stages where more follow in front; open_p: least P, see `solve`
    closed_p (S+1, C, U) least P where the foremost is the first
    active (S+1, L+1, U) states of any type, num_active (S+1, L+1) how many; alive (S+1, L+1, U): as a mask
    """

    open_s: Floats
    open_p: Floats
    closed_p: Floats
    alive: npt.NDArray[np.bool_]
    active: npt.NDArray[np.int32]
    num_active: Ints


@jit
def apart(pr, c, behind, u):
    """Whether a stage of shape c in front of `behind`, u used so far, would take up a device group a second time."""
    return pr.contiguous and pr.groups[c] & pr.used_groups[u] & ~pr.groups[behind] != 0


@jit
def waits(pr, s, f, b):
    """c of a stage at place s whose path stays there in the forward direction, before it goes on to the end."""
    ahead = min(s - 1, pr.m - 1)
    return (pr.m - 1 - ahead) * (f + b) + ahead * f


@jit
def leaves_once(pr, s, f, b):
    """The same in whichever direction is longer; it then ends with the tail of this stage or of one in front."""
    ahead = min(s - 1, pr.m - 1)
    return (pr.m - 1 - ahead) * (f + b) + ahead * max(f, b)


@jit
def blocked_weight(pr, s):
    """What one second of blocking, in each direction, adds to c at place s."""
    ahead = min(s - 1, pr.m - 1)
    return 2.0 * (pr.m - 1 - ahead) + ahead


class Choices(NamedTuple):
    """What a stage at each place may be. Types 0..Y-1 stand inside the pipeline, Y + shape in front.

    f, z    (S+1, Y+C, V, L+1, Q) by the kind V of the boundary behind: forward seconds, and forward, backward and
            tail together, of the choices that no other one beats in both
    t       (S+1, Y+C, V, L+1) least busy seconds of any choice
    most    (S+1, Y+C, V) most layers
    room    (S+2, U) most layers of stages s, s+1, ... by devices used
    """

    f: Floats
    z: Floats
    t: Floats
    most: Ints
    room: Ints


CHOICES = 3


@jit
def keep(list_a, list_b, a, b):
    """Insert (a, b) where no kept choice is at least as good in both; merge the last two where there is no room."""
    last = list_a.shape[0] - 1
    for q in range(last + 1):
        if list_a[q] <= a and list_b[q] <= b:
            return
    kept = 0
    for q in range(last + 1):  # drop what the new one beats
        if list_a[q] < INF and not (a <= list_a[q] and b <= list_b[q]):
            list_a[kept], list_b[kept] = list_a[q], list_b[q]
            kept += 1
    for q in range(kept, last + 1):
        list_a[q] = list_b[q] = INF
    if kept > last:  # full: the new one and the last become their better halves, which bounds both
        a, b = min(a, list_a[last]), min(b, list_b[last])
        list_a[last] = list_b[last] = INF
        kept = last
    q = kept
    while q > 0 and list_a[q - 1] > a:
        list_a[q], list_b[q] = list_a[q - 1], list_b[q - 1]
        q -= 1
    list_a[q], list_b[q] = a, b


@jit
def bucket_of(pr, busy_s, most_c):
    """The bucket of a stage's busy time."""
    bucket = 0
    while bucket + 1 < pr.lows.shape[0] and busy_s * (pr.m - 1) >= pr.lows[bucket + 1] * most_c:
        bucket += 1
    return bucket


@jit
def pair_trip(pr, s, busy_s, trip_s, v, most_c):
    """c of a path that cycles through a stage at place s and the one behind it, whose bucket the kind of boundary v
    knows, and then takes the last micro-batch to the end and back (trip_s)."""
    level, turns = pr.kind_level[v], pr.m - 1 - s
    if level == 0 or s == 1 or turns < 0:
        return 0.0
    behind_s = pr.lows[pr.kind_bucket[v]] * most_c / (pr.m - 1)
    cycles = turns // 2
    return cycles * (busy_s + behind_s + 2.0 * pr.delays[level]) + (turns - 2 * cycles) * busy_s + trip_s


@jit
def choose(pr, s, most_c, best_s, ch):
    """Fill the choices of place s within c <= most_c, none that could not end before `best_s` even alone."""
    last = LAST if s == 1 else 0
    Y, C = pr.type_shape.shape[0], pr.step.shape[0]
    ch.f[s], ch.z[s], ch.t[s] = INF, INF, INF
    ch.most[s] = 0
    weight = blocked_weight(pr, s)
    for y in range(Y + C):
        first = y >= Y
        c = y - Y if first else pr.type_shape[y]
        level = 0 if first else pr.type_level[y]
        position = last | FIRST if first else last
        for x in range(pr.member.shape[1]):
            k = pr.member[c, x]
            if k < 0:
                break
            for n in range(1, pr.fits[k, position, s] + 1):
                f, b = pr.forward_s[k, position, n], pr.backward_s[k, position, n]
                own_c = waits(pr, s, f, b) + weight * pr.levels[level]
                if own_c > most_c:
                    break
                z = f + b + pr.tail_s[k, position, n]
                if z + own_c >= best_s:
                    continue
                for v in range(pr.kind_level.shape[0]):
                    blocked_s = pr.levels[level] + pr.levels[pr.kind_level[v]]
                    if waits(pr, s, f + blocked_s, b + blocked_s) > most_c:
                        break
                    busy_s = f + b + 2.0 * blocked_s
                    if level > 0 and bucket_of(pr, busy_s, most_c) != pr.type_bucket[y]:
                        continue
                    keep(ch.f[s, y, v, n], ch.z[s, y, v, n], f, z)
                    ch.t[s, y, v, n] = min(ch.t[s, y, v, n], f + b)
                    ch.most[s, y, v] = max(ch.most[s, y, v], n)


@jit
def second_trip(pr, s, busy_s, trip_s):
    """c of a stage whose path also takes the last micro-batch to the end and back (trip_s, its own time included)."""
    turns = pr.m - 1 - s
    return turns * busy_s + trip_s if turns >= 0 else 0.0


@jit
def clear(tables):
    """Empty the states that the last pass left in the tables."""
    tables.closed_p[:] = INF
    for s in range(tables.num_active.shape[0]):
        for done in range(tables.num_active.shape[1]):
            for x in range(tables.num_active[s, done]):
                u = tables.active[s, done, x]
                tables.alive[s, done, u] = False
                for y in range(tables.open_s.shape[1]):
                    tables.open_s[s, y, done, u] = INF
                    tables.open_p[s, y, done, u] = INF
    tables.num_active[:] = 0


@jit
def fill_room(pr, ch):
    """Fill `room` from the choices: the balance bound."""
    S, C, U, Y = pr.max_stages, pr.step.shape[0], pr.enough.shape[1], pr.type_shape.shape[0]
    room = ch.room
    room[:] = -1
    for s in range(S, 0, -1):
        for c in range(C):
            more = 0
            for y in range(pr.first_type[c], pr.first_type[c + 1]):
                more = max(more, ch.most[s, y, 0])
            for u in range(U):
                if pr.enough[c, u]:
                    held = ch.most[s, Y + c, 0]
                    if more > 0 and s < S and room[s + 1, u + pr.step[c]] > 0:
                        held = max(held, more + room[s + 1, u + pr.step[c]])
                    if held > room[s, u]:
                        room[s, u] = held


@jit
def fold(pr, tables):
    """Give the first bucket of every type the least of all its buckets: a pass told them apart, a walk need not."""
    for s in range(tables.num_active.shape[0]):
        for done in range(tables.num_active.shape[1]):
            for x in range(tables.num_active[s, done]):
                u = tables.active[s, done, x]
                for y in range(pr.type_shape.shape[0]):
                    first = y - pr.type_bucket[y]
                    if first != y:
                        tables.open_s[s, first, done, u] = min(
                            tables.open_s[s, first, done, u], tables.open_s[s, y, done, u]
                        )
                        tables.open_p[s, first, done, u] = min(
                            tables.open_p[s, first, done, u], tables.open_p[s, y, done, u]
                        )


@jit_allotting
def solve(pr, most_c, least_c, best_s, tables, ch):
    """Fill `tables` with least S and least P subject to c <= most_c; (least P of a whole plan, states).

    P of the stages behind a place: from the start of the foremost one's forward pass, down to the end, and up to the
    stage whose tail then ends last. With S behind it, half a boundary h = link / 2, f, b and tail of the next stage,

        S' = S + 2 h + f + b        P' = max(f + h + P, S + 2 h + f + b + tail)

    Both are minimised on their own, which bounds both. Every plan of interest has c > least_c and takes less than
    best_s, and P + c bounds what it takes; so what would reach best_s is not kept, nor layers left that exceed what the
    devices left can hold within most_c.
    """
    L, S = pr.num_layers, pr.max_stages
    C, V, Y, B = pr.step.shape[0], pr.kind_level.shape[0], pr.type_shape.shape[0], pr.lows.shape[0]
    room = ch.room
    for s in range(S, 0, -1):
        choose(pr, s, most_c, best_s, ch)
    fill_room(pr, ch)
    clear(tables)
    reach_s, reach_p = np.empty(V), np.empty(V)
    least, states = INF, 0
    if room[1, 0] < L:
        return least, states
    for s in range(1, S + 1):
        any_state = False
        turns = pr.m - 1 - min(s - 1, pr.m - 1)
        for done in range(L if s > 1 else 1):
            left = L - done
            count = tables.num_active[s - 1, done] if s > 1 else 1
            for x in range(count):
                u = tables.active[s - 1, done, x] if s > 1 else 0
                for c in range(C):
                    if not pr.enough[c, u]:
                        continue
                    to = u + pr.step[c]
                    beyond = room[s + 1, to]
                    if left > ch.most[s, Y + c, 0] and beyond <= 0:
                        continue
                    reach_s[:] = INF
                    reach_p[:] = INF
                    if s == 1:
                        reach_s[0] = reach_p[0] = 0.0
                    else:
                        for behind in range(C):
                            if apart(pr, c, behind, u):
                                continue
                            level = pr.level[c, behind]
                            for bucket in range(B if level > 0 else 1):
                                y = pr.type_of[c, behind, bucket]
                                value = tables.open_s[s - 1, y, done, u]
                                if value < INF:
                                    v = pr.kind_of[level, bucket]
                                    reach_s[v] = min(reach_s[v], value + pr.link_s[c, behind])
                                    value = tables.open_p[s - 1, y, done, u] + 0.5 * pr.link_s[c, behind]
                                    reach_p[v] = min(reach_p[v], value)
                    for v in range(V):
                        if reach_s[v] + least_c >= best_s:
                            continue
                        blocked_s = 2.0 * pr.levels[pr.kind_level[v]]
                        if left <= ch.most[s, Y + c, v]:
                            busy_s = ch.t[s, Y + c, v, left]
                            trip_c = second_trip(pr, s, busy_s + blocked_s, reach_s[v] + busy_s)
                            trip_c = max(trip_c, pair_trip(pr, s, busy_s + blocked_s, reach_s[v] + busy_s, v, most_c))
                            if trip_c <= most_c:
                                for q in range(CHOICES):
                                    value = reach_p[v] + ch.f[s, Y + c, v, left, q]
                                    value = max(value, reach_s[v] + ch.z[s, Y + c, v, left, q])
                                    if value + max(least_c, trip_c) < best_s and value < tables.closed_p[s, c, to]:
                                        tables.closed_p[s, c, to] = value
                                        least = min(least, value)
                        if s == S or beyond <= 0:
                            continue
                        for y in range(pr.first_type[c], pr.first_type[c + 1]):
                            both_s = blocked_s + 2.0 * pr.levels[pr.type_level[y]]
                            for n in range(max(1, left - beyond), min(ch.most[s, y, v], left - 1) + 1):
                                busy_s = ch.t[s, y, v, n]
                                alone_s = reach_s[v] + busy_s
                                trip_c = second_trip(pr, s, busy_s + both_s, alone_s)
                                trip_c = max(trip_c, pair_trip(pr, s, busy_s + both_s, alone_s, v, most_c))
                                if trip_c > most_c:  # also where there is no choice
                                    continue
                                own_c = max(least_c, trip_c, turns * (busy_s + both_s))
                                if alone_s + pr.layer_s * (left - n) + own_c >= best_s:
                                    continue
                                path_s = INF
                                for q in range(CHOICES):
                                    value = reach_p[v] + ch.f[s, y, v, n, q]
                                    path_s = min(path_s, max(value, reach_s[v] + ch.z[s, y, v, n, q]))
                                if path_s + pr.down_s * (left - n) + own_c >= best_s:
                                    continue
                                if path_s < tables.open_p[s, y, done + n, to]:
                                    tables.open_p[s, y, done + n, to] = path_s
                                if alone_s < tables.open_s[s, y, done + n, to]:
                                    tables.open_s[s, y, done + n, to] = alone_s
                                tables.alive[s, done + n, to] = True
                                any_state = True
        if not any_state:
            break
        for done in range(1, L):
            count = 0
            for u in range(tables.alive.shape[2]):
                if tables.alive[s, done, u]:
                    tables.active[s, done, count] = u
                    count += 1
            tables.num_active[s, done] = count
            states += count
    fold(pr, tables)
    return least, states


class Walk(NamedTuple):
    """Where a walk stands, so that it can be left and taken up again: per depth (0: first stage) the stage in choice.

    whole (7, S+1) and real (12, S+1): see the constants; control (4,): depth (-1: at the next start), next start, plans
    that were complete, nodes
    """

    whole: Ints
    real: Floats
    control: Ints


# of the stage at a depth: place, shape, layers of it and those behind, devices used by them, what is tried now
PLACE, SHAPE, LEFT, USED, MEMBER, LAYERS, BEHIND = range(7)
# before it: S (link included, tail not), largest c, blocking by the stage in front, way up, best tail - way up, best of
# that + c, longest stay in the forward direction; of the stage once chosen: forward, backward, delay to the stage
# behind in both directions; before it again: way down, largest c of paths that wait in the forward direction
ALONE, LARGEST, BLOCKED, WAY_UP, TAIL, TAIL_C, WAITS, OWN_F, OWN_B, DELAY, WAY_DOWN, FORWARD_C = range(12)
DEPTH, START, EVALUATED, NODES = range(4)


@jit
def walk(pr, tables, t, work, state, starts, most_c, least_c, limit_s, best_s, most_nodes, most_plans, ask, plan, best):
    """Go on through every plan of the tables whose bound is below `limit_s`, and score those exactly; the best time.

    Plans better than `best_s` replace `best`, and the walk then looks below them only. It stops when nothing is left
    (control[DEPTH] < 0 and control[START] past the last start), after `most_nodes` nodes or `most_plans` plans, and
    with `ask` after the first better plan, about which the caller may think otherwise.
    """
    w, r, control = state.whole, state.real, state.control
    L, S, C, X = pr.num_layers, pr.max_stages, pr.step.shape[0], pr.member.shape[1]
    nodes = plans = 0
    while nodes < most_nodes and plans < most_plans:
        ceiling = min(limit_s, best_s)
        d = control[DEPTH]
        if d < 0:
            x = control[START]
            if x >= starts.shape[0]:
                break
            control[START] = x + 1
            s, c, u = starts[x, 0], starts[x, 1], starts[x, 2]
            if tables.closed_p[s, c, u] + least_c >= ceiling:
                continue
            d = 0
            control[DEPTH] = 0
            w[PLACE, 0], w[SHAPE, 0], w[LEFT, 0], w[USED, 0] = s, c, L, u
            w[MEMBER, 0], w[LAYERS, 0], w[BEHIND, 0] = 0, 0, 0
            r[:, 0] = 0.0
            r[LARGEST, 0], r[FORWARD_C, 0] = least_c, least_c
            r[TAIL, 0], r[TAIL_C, 0], r[WAITS, 0] = -INF, -INF, -INF
            plan[0], plan[1] = pr.count_index, s
        s, c, left = w[PLACE, d], w[SHAPE, d], w[LEFT, d]
        k = pr.member[c, w[MEMBER, d]] if w[MEMBER, d] < X else -1
        if k < 0:
            control[DEPTH] = d - 1
            continue
        position = (FIRST if d == 0 else 0) | (LAST if s == 1 else 0)
        rest = w[USED, d] - pr.step[c]
        n, behind = w[LAYERS, d], w[BEHIND, d] + 1
        if n == 0 or behind == C or s == 1:  # the next number of layers for which there are stages behind
            behind = 0
            n += 1
            most = min(pr.fits[k, position, s], left if s == 1 else left - (s - 1))
            if s == 1:
                n = left if n == 1 and rest == 0 else left + 1
            else:
                while n <= most and not tables.alive[s - 1, left - n, rest]:
                    n += 1
            done = n > most
            if not done:
                f, b = pr.forward_s[k, position, n], pr.backward_s[k, position, n]
                own_c = waits(pr, s, f, b) + blocked_weight(pr, s) * r[BLOCKED, d]
                done = own_c > most_c or r[ALONE, d] + f + b + max(own_c, r[LARGEST, d]) >= ceiling
            if done:
                w[MEMBER, d] += 1
                w[LAYERS, d], w[BEHIND, d] = 0, 0
                continue
        nodes += 1
        w[LAYERS, d], w[BEHIND, d] = n, behind
        f, b = pr.forward_s[k, position, n], pr.backward_s[k, position, n]
        tail_s = pr.tail_s[k, position, n]
        own_s = r[ALONE, d] + f + b
        behind_s = blocked_s = link_s = 0.0
        path_s = f  # least P of this stage and those behind it
        if s > 1:
            behind_s = tables.open_s[s - 1, pr.type_of[c, behind, 0], left - n, rest]
            if behind_s >= INF or apart(pr, c, behind, rest):
                continue
            link_s = pr.link_s[c, behind]
            path_s += 0.5 * link_s + tables.open_p[s - 1, pr.type_of[c, behind, 0], left - n, rest]
            own_s += link_s
            blocked_s = pr.blocked_s[c, behind]
        path_s = r[WAY_DOWN, d] + max(path_s, f + b + tail_s + link_s + behind_s)
        way_down = r[WAY_DOWN, d] + f + 0.5 * link_s
        f += r[BLOCKED, d] + blocked_s
        b += r[BLOCKED, d] + blocked_s
        again_c = second_trip(pr, s, f + b, own_s - r[ALONE, d] + behind_s)
        own_c = max(leaves_once(pr, s, f, b), again_c)
        forward_c = max(r[FORWARD_C, d], waits(pr, s, f, b), again_c)
        if path_s + forward_c >= ceiling:
            continue
        tail0_s = tail_s if d == 0 else r[TAIL, 1]
        if own_s + behind_s + max(r[LARGEST, d], own_c) + tail0_s >= ceiling:
            continue
        tail = max(r[TAIL, d], tail_s - r[WAY_UP, d])
        tail_c = max(r[TAIL_C, d], tail + own_c, r[WAITS, d] + tail_s - r[WAY_UP, d])
        if own_s + behind_s + tail_c >= ceiling:
            continue
        # stages i..this one: cycles of their round trip; and a second trip from i to the end
        largest = max(r[LARGEST, d], own_c)
        ahead = min(s - 1, pr.m - 1)
        turns = pr.m - 1 - ahead
        trip, longest = f + b, max(f, b)
        for i in range(d - 1, -1, -1):
            busy = r[OWN_F, i] + r[OWN_B, i]
            trip += busy + r[DELAY, i]
            longest = max(longest, max(r[OWN_F, i], r[OWN_B, i]))
            length = d - i + 1
            cycles = turns // length
            largest = max(largest, cycles * trip + (turns - cycles * length) * (f + b) + ahead * longest)
            ends_s = own_s - r[ALONE, i] + behind_s
            again_c = second_trip(pr, s + length - 1, busy, ends_s)
            left_turns = pr.m - s - length
            if left_turns > 0:
                cycles = left_turns // length
                again_c = max(again_c, cycles * trip + (left_turns - cycles * length) * busy + ends_s)
            largest, forward_c = max(largest, again_c), max(forward_c, again_c)
        if own_s + behind_s + largest + tail0_s >= ceiling or path_s + forward_c >= ceiling:
            continue
        plan[2 + d], plan[2 + S + d] = k, n
        if s > 1:
            e = d + 1
            delay_s = pr.delay_s[c, behind]
            r[OWN_F, d], r[OWN_B, d], r[DELAY, d] = f, b, delay_s
            w[PLACE, e], w[SHAPE, e], w[LEFT, e], w[USED, e] = s - 1, behind, left - n, rest
            w[MEMBER, e], w[LAYERS, e], w[BEHIND, e] = 0, 0, 0
            r[ALONE, e], r[LARGEST, e], r[BLOCKED, e] = own_s, largest, blocked_s
            r[WAY_UP, e], r[TAIL, e], r[TAIL_C, e] = r[WAY_UP, d] + b + 0.5 * delay_s, tail, tail_c
            r[WAY_DOWN, e], r[FORWARD_C, e] = way_down, forward_c
            r[WAITS, e] = max(r[WAITS, d], turns * (f + b) + ahead * f)
            control[DEPTH] = e
            continue
        p = plan[1]
        for i in range(p, S):
            plan[2 + i] = plan[2 + S + i] = 0
        plans += 1
        if place(t, plan, work):
            stage_times(t, plan, work)
            if lower_s(work.times, p, pr.m) < best_s and plan_missing_bytes(t, plan, work) == 0:
                seconds = exact_s(work.times, p, pr.m)
                if seconds < best_s:
                    best_s = seconds
                    for i in range(plan.shape[0]):
                        best[i] = plan[i]
                    if ask:
                        break
    control[NODES] += nodes
    control[EVALUATED] += plans
    return best_s


@jit
def any_of_least_p(pr, tables, most_c, start, plan):
    """Fill `plan` with a plan of the tables that comes closest to the P of a start; its largest c, as `solve` has it.

    At each place the predecessor that explains the value best is taken.
    """
    L, S, C = pr.num_layers, pr.max_stages, pr.step.shape[0]
    s, c, u, left = start[0], start[1], start[2], L
    value, largest, d, front_s = tables.closed_p[s, c, u], 0.0, 0, 0.0
    plan[:] = 0
    plan[0], plan[1] = pr.count_index, s
    while s > 0:
        position = (FIRST if d == 0 else 0) | (LAST if s == 1 else 0)
        rest = u - pr.step[c]
        weight = blocked_weight(pr, s)
        best_error, best_k, best_n, best_behind, best_c, best_value = INF, -1, 0, 0, 0.0, 0.0
        for x in range(pr.member.shape[1]):
            k = pr.member[c, x]
            if k < 0:
                break
            for n in range(left if s == 1 else 1, min(pr.fits[k, position, s], left if s == 1 else left - 1) + 1):
                f, b = pr.forward_s[k, position, n], pr.backward_s[k, position, n]
                z = f + b + pr.tail_s[k, position, n]
                if s == 1 and rest != 0:
                    continue
                for behind in range(1 if s == 1 else C):
                    behind_s = behind_p = link_s = level_s = 0.0
                    if s > 1:
                        y = pr.type_of[c, behind, 0]
                        behind_s, behind_p = (
                            tables.open_s[s - 1, y, left - n, rest],
                            tables.open_p[s - 1, y, left - n, rest],
                        )
                        if behind_s >= INF or apart(pr, c, behind, rest):
                            continue
                        link_s, level_s = pr.link_s[c, behind], pr.levels[pr.level[c, behind]]
                    error = abs(max(f + 0.5 * link_s + behind_p, z + link_s + behind_s) - value)
                    if error >= best_error:
                        continue
                    own_c = waits(pr, s, f, b) + weight * (front_s + level_s)
                    trip_s = f + b + link_s + behind_s
                    again_c = second_trip(pr, s, f + b + 2.0 * (front_s + level_s), trip_s)
                    if max(own_c, again_c) <= most_c:
                        best_error, best_k, best_n, best_behind = error, k, n, behind
                        best_c, best_value = max(own_c, again_c), behind_p
        if best_k < 0:
            plan[1] = 0
            return most_c
        plan[2 + d], plan[2 + S + d] = best_k, best_n
        largest = max(largest, best_c)
        if s > 1:
            front_s = pr.levels[pr.level[c, best_behind]]
        u, c, value, left = rest, best_behind, best_value, left - best_n
        s -= 1
        d += 1
    return largest
