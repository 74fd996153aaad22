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
    """One m. K options, C shapes, L layers, S stages, U device states, V levels of blocking, Y stage types.

    A stage type is a shape with the level of what the boundary to the stage in front blocks.

    forward_s, backward_s (K, 4, L+1) without transfers, at the best placement; tail_s (K, 4, L+1) sync and step
    fits (K, 4, S+1) most layers; member (C, K') options of a shape, -1 beyond
    link_s (C, C) what a boundary adds to S; blocked_s (C, C) what it blocks of both stages, per direction; delay_s
    (C, C) what it delays, both directions; level (C, C) index in `levels` (V,), ascending, of blocked_s rounded down
    type_of (C, C) type of the second shape behind the first; type_shape, type_level (Y,)
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
    type_of: Ints
    type_shape: Ints
    type_level: Ints
    step: Ints
    enough: npt.NDArray[np.bool_]
    groups: Ints
    used_groups: Ints
    contiguous: bool
    layer_s: float
    down_s: float


class Pass(NamedTuple):
    """Tables of one pass, least S of the last s stages.

    open_s (S+1, Y, L+1, U) where more stages follow in front; closed_s (S+1, C, U) where the foremost is the first
    active (S+1, L+1, U) states of any type, num_active (S+1, L+1) how many; alive (S+1, L+1, U) the same as a mask
    """

    open_s: Floats
    closed_s: Floats
    alive: npt.NDArray[np.bool_]
    active: npt.NDArray[np.int32]
    num_active: Ints


@jit
def apart(pr, c, behind, u):
    """Whether a stage of shape c in front of `behind`, u used so far, would take up a device group a second time."""
    return pr.contiguous and pr.groups[c] & pr.used_groups[u] & ~pr.groups[behind] != 0


@jit
def leaves_once(pr, s, f, b):
    """c of a stage at place s: the path that leaves it once stays there so long, beyond the stage's share of S."""
    ahead = min(s - 1, pr.m - 1)
    return (pr.m - 1 - ahead) * (f + b) + ahead * max(f, b)


@jit
def blocked_weight(pr, s):
    """What one second of blocking, in each direction, adds to c at place s."""
    ahead = min(s - 1, pr.m - 1)
    return 2.0 * (pr.m - 1 - ahead) + ahead


class Choices(NamedTuple):
    """What a stage at each place may be, with what no other choice beats in both: Q of them, ascending in `least_s`.

    inner_* (S+1, Y, V, L+1, Q), front_* (S+1, C, V, L+1, Q) by the level V of the boundary behind:
    s    its part of S (of a first stage with the tail)
    x    c + tail: a path that leaves the stage once and ends with its tail
    t    (without Q) least busy seconds of any choice, for the second trip
    most (without L, Q) most layers
    room (S+2, U) most layers of stages s, s+1, ... by devices used
    """

    inner_s: Floats
    inner_x: Floats
    inner_most: Ints
    front_s: Floats
    front_x: Floats
    front_t: Floats
    front_most: Ints
    room: Ints


CHOICES = 3


@jit
def keep(list_s, list_x, own_s, x):
    """Insert (own_s, x) where no kept choice is at least as good in both; merge the last two where there is no room."""
    last = list_s.shape[0] - 1
    for q in range(last + 1):
        if list_s[q] <= own_s and list_x[q] <= x:
            return
    kept = 0
    for q in range(last + 1):  # drop what the new one beats
        if list_s[q] < INF and not (own_s <= list_s[q] and x <= list_x[q]):
            list_s[kept], list_x[kept] = list_s[q], list_x[q]
            kept += 1
    for q in range(kept, last + 1):
        list_s[q] = list_x[q] = INF
    if kept > last:  # full: the new one and the last become their better halves, which bounds both
        own_s, x = min(own_s, list_s[last]), min(x, list_x[last])
        list_s[last] = list_x[last] = INF
        kept = last
    q = kept
    while q > 0 and list_s[q - 1] > own_s:
        list_s[q], list_x[q] = list_s[q - 1], list_x[q - 1]
        q -= 1
    list_s[q], list_x[q] = own_s, x


@jit
def choose(pr, s, most_c, best_s, ch):
    """Fill the choices of place s within c <= most_c, none that could not end before `best_s` even alone."""
    last = LAST if s == 1 else 0
    ch.inner_s[s], ch.inner_x[s], ch.front_s[s], ch.front_x[s], ch.front_t[s] = INF, INF, INF, INF, INF
    ch.inner_most[s], ch.front_most[s] = 0, 0
    weight = blocked_weight(pr, s)
    for y in range(-pr.step.shape[0], pr.type_shape.shape[0]):
        first = y < 0
        c = -1 - y if first else pr.type_shape[y]
        front_s = 0.0 if first else pr.levels[pr.type_level[y]]
        position = last | FIRST if first else last
        for x in range(pr.member.shape[1]):
            k = pr.member[c, x]
            if k < 0:
                break
            for n in range(1, pr.fits[k, position, s] + 1):
                f, b = pr.forward_s[k, position, n], pr.backward_s[k, position, n]
                own_c = leaves_once(pr, s, f, b) + weight * front_s
                if own_c > most_c:
                    break
                tail_s = pr.tail_s[k, position, n]
                if f + b + own_c + tail_s >= best_s:
                    continue
                for v in range(pr.levels.shape[0]):
                    total_c = own_c + weight * pr.levels[v]
                    if total_c > most_c:
                        break
                    if first:
                        keep(ch.front_s[s, c, v, n], ch.front_x[s, c, v, n], f + b + tail_s, total_c + tail_s)
                        ch.front_t[s, c, v, n] = min(ch.front_t[s, c, v, n], f + b)
                        ch.front_most[s, c, v] = max(ch.front_most[s, c, v], n)
                    else:
                        keep(ch.inner_s[s, y, v, n], ch.inner_x[s, y, v, n], f + b, total_c + tail_s)
                        ch.inner_most[s, y, v] = max(ch.inner_most[s, y, v], n)


@jit
def second_trip(pr, s, busy_s, trip_s):
    """c of a stage whose path also takes the last micro-batch to the end and back (trip_s, its own time included)."""
    turns = pr.m - 1 - s
    return turns * busy_s + trip_s if turns >= 0 else 0.0


@jit
def clear(tables):
    """Empty the states that the last pass left in the tables."""
    tables.closed_s[:] = INF
    for s in range(tables.num_active.shape[0]):
        for done in range(tables.num_active.shape[1]):
            for x in range(tables.num_active[s, done]):
                u = tables.active[s, done, x]
                tables.alive[s, done, u] = False
                for y in range(tables.open_s.shape[1]):
                    tables.open_s[s, y, done, u] = INF
    tables.num_active[:] = 0


@jit_allotting
def solve(pr, most_c, cut_s, best_s, tables, ch):
    """Fill `tables` with least S subject to c <= most_c and S < cut_s; (least S, states).

    Not kept is what the bounds rule out: layers left that exceed what the devices left can hold within most_c (`room`,
    the balance bound); S that cannot stay below cut_s with the fastest layers there are; a second trip above most_c;
    a path that ends with a stage's tail at best_s or later.
    """
    L, S = pr.num_layers, pr.max_stages
    C, V, U, Y = pr.step.shape[0], pr.levels.shape[0], pr.enough.shape[1], pr.type_shape.shape[0]
    room = ch.room
    for s in range(S, 0, -1):
        choose(pr, s, most_c, best_s, ch)
    room[:] = -1
    for s in range(S, 0, -1):
        for c in range(C):
            more = 0
            for y in range(Y):
                if pr.type_shape[y] == c:
                    more = max(more, ch.inner_most[s, y, 0])
            for u in range(U):
                if pr.enough[c, u]:
                    held = ch.front_most[s, c, 0]
                    if more > 0 and s < S and room[s + 1, u + pr.step[c]] > 0:
                        held = max(held, more + room[s + 1, u + pr.step[c]])
                    if held > room[s, u]:
                        room[s, u] = held
    clear(tables)
    reach = np.empty(V)
    least, states = INF, 0
    if room[1, 0] < L:
        return least, states
    for s in range(1, S + 1):
        any_state = False
        mark = tables.alive[s]
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
                    if left > ch.front_most[s, c, 0] and beyond <= 0:
                        continue
                    reach[:] = INF
                    if s == 1:
                        reach[0] = 0.0
                    else:
                        for behind in range(C):
                            value = tables.open_s[s - 1, pr.type_of[c, behind], done, u]
                            if value < INF and not apart(pr, c, behind, u):
                                value += pr.link_s[c, behind]
                                v = pr.level[c, behind]
                                if value < reach[v]:
                                    reach[v] = value
                    for v in range(V):
                        if reach[v] >= cut_s:
                            continue
                        blocked_s = 2.0 * pr.levels[v]
                        if left <= ch.front_most[s, c, v]:
                            busy_s = ch.front_t[s, c, v, left]
                            trip_c = second_trip(pr, s, busy_s + blocked_s, reach[v] + busy_s)
                            for q in range(CHOICES):
                                value = reach[v] + ch.front_s[s, c, v, left, q]
                                if value >= cut_s:
                                    break
                                path_s = reach[v] + busy_s + ch.front_x[s, c, v, left, q]
                                if trip_c <= most_c and path_s < best_s and value < tables.closed_s[s, c, to]:
                                    tables.closed_s[s, c, to] = value
                                    if value < least:
                                        least = value
                        if s == S or beyond <= 0:
                            continue
                        for y in range(Y):
                            if pr.type_shape[y] != c:
                                continue
                            both_s = blocked_s + 2.0 * pr.levels[pr.type_level[y]]
                            for n in range(max(1, left - beyond), min(ch.inner_most[s, y, v], left - 1) + 1):
                                down_s = pr.down_s * (left - n)
                                for q in range(CHOICES):
                                    own_s = ch.inner_s[s, y, v, n, q]
                                    value = reach[v] + own_s
                                    if value + pr.layer_s * (left - n) >= cut_s:
                                        break
                                    if value >= tables.open_s[s, y, done + n, to]:
                                        break
                                    if value + ch.inner_x[s, y, v, n, q] + down_s >= best_s:
                                        continue
                                    if second_trip(pr, s, own_s + both_s, value) > most_c:
                                        continue
                                    tables.open_s[s, y, done + n, to] = value
                                    mark[done + n, to] = True
                                    any_state = True
                                    break
        if not any_state:
            break
        for done in range(1, L):
            count = 0
            for u in range(U):
                if mark[done, u]:
                    tables.active[s, done, count] = u
                    count += 1
            tables.num_active[s, done] = count
            states += count
    return least, states


class Walk(NamedTuple):
    """Where a walk stands, so that it can be left and taken up again: per depth (0: first stage) the stage in choice.

    whole (7, S+1) and real (10, S+1): see the constants; control (4,): depth (-1: at the next start), next start, plans
    that were complete, nodes
    """

    whole: Ints
    real: Floats
    control: Ints


# of the stage at a depth: place, shape, layers of it and those behind, devices used by them, what is tried now
PLACE, SHAPE, LEFT, USED, MEMBER, LAYERS, BEHIND = range(7)
# before it: S (link included, tail not), largest c, blocking by the stage in front, way up, best tail - way up, best of
# that + c, longest stay in the forward direction; of the stage once chosen: forward, backward, delay to the stage
# behind in both directions
ALONE, LARGEST, BLOCKED, WAY_UP, TAIL, TAIL_C, WAITS, OWN_F, OWN_B, DELAY = range(10)
DEPTH, START, EVALUATED, NODES = range(4)


@jit
def walk(pr, tables, t, work, state, starts, most_c, least_c, limit_s, best_s, most_nodes, most_plans, plan, best):
    """Go on through every plan of the tables whose bound is below `limit_s`, and score those exactly; the best time.

    Plans better than `best_s` replace `best`, and the walk then looks below them only. It stops when nothing is left
    (control[DEPTH] < 0 and control[START] past the last start), after `most_nodes` nodes or `most_plans` plans.
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
            if tables.closed_s[s, c, u] + least_c >= ceiling:
                continue
            d = 0
            control[DEPTH] = 0
            w[PLACE, 0], w[SHAPE, 0], w[LEFT, 0], w[USED, 0] = s, c, L, u
            w[MEMBER, 0], w[LAYERS, 0], w[BEHIND, 0] = 0, 0, 0
            r[:, 0] = 0.0
            r[LARGEST, 0], r[TAIL, 0], r[TAIL_C, 0], r[WAITS, 0] = least_c, -INF, -INF, -INF
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
                own_c = leaves_once(pr, s, f, b) + blocked_weight(pr, s) * r[BLOCKED, d]
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
        behind_s = blocked_s = 0.0
        if s > 1:
            behind_s = tables.open_s[s - 1, pr.type_of[c, behind], left - n, rest]
            if behind_s >= INF or apart(pr, c, behind, rest):
                continue
            own_s += pr.link_s[c, behind]
            blocked_s = pr.blocked_s[c, behind]
        f += r[BLOCKED, d] + blocked_s
        b += r[BLOCKED, d] + blocked_s
        own_c = leaves_once(pr, s, f, b)
        own_c = max(own_c, second_trip(pr, s, f + b, own_s - r[ALONE, d] + behind_s))
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
            largest = max(largest, second_trip(pr, s + length - 1, busy, own_s - r[ALONE, i] + behind_s))
        if own_s + behind_s + largest + tail0_s >= ceiling:
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
    control[NODES] += nodes
    control[EVALUATED] += plans
    return best_s


@jit
def any_of_least_s(pr, tables, ch, most_c, best_s, start, plan):
    """Fill `plan` with a plan of the tables whose S is that of a start; its largest c, as `solve` counts it.

    At each place the predecessor that explains the value best is taken, with everything that `solve` asks for.
    """
    L, S, C = pr.num_layers, pr.max_stages, pr.step.shape[0]
    s, c, u, left = start[0], start[1], start[2], L
    value, largest, d, front_s, front = tables.closed_s[s, c, u], 0.0, 0, 0.0, True
    plan[:] = 0
    plan[0], plan[1] = pr.count_index, s
    while s > 0:
        position = (FIRST if front else 0) | (LAST if s == 1 else 0)
        rest = u - pr.step[c]
        weight = blocked_weight(pr, s)
        best_error, best_k, best_n, best_behind, best_c, best_value = INF, -1, 0, 0, 0.0, 0.0
        for x in range(pr.member.shape[1]):
            k = pr.member[c, x]
            if k < 0:
                break
            for n in range(left if s == 1 else 1, min(pr.fits[k, position, s], left if s == 1 else left - 1) + 1):
                f, b, tail_s = pr.forward_s[k, position, n], pr.backward_s[k, position, n], pr.tail_s[k, position, n]
                own_s = f + b + (tail_s if front else 0.0)
                if own_s > value * (1 + 1e-9):
                    break
                if s == 1 and rest != 0:
                    continue
                down_s = pr.down_s * (L - left)  # of layers in front
                for behind in range(1 if s == 1 else C):
                    behind_s = link_s = level_s = 0.0
                    v = 0
                    if s > 1:
                        behind_s = tables.open_s[s - 1, pr.type_of[c, behind], left - n, rest]
                        if behind_s >= INF or apart(pr, c, behind, rest):
                            continue
                        v = pr.level[c, behind]
                        link_s, level_s = pr.link_s[c, behind], pr.levels[v]
                    error = abs(own_s + link_s + behind_s - value)
                    if error >= best_error:
                        continue
                    own_c = leaves_once(pr, s, f, b) + weight * (front_s + level_s)
                    busy_s = ch.front_t[s, c, v, n] if front else f + b
                    trip_s = busy_s + link_s + behind_s
                    again_c = second_trip(pr, s, busy_s + 2.0 * (front_s + level_s), trip_s)
                    if max(own_c, again_c) <= most_c and trip_s + own_c + tail_s + down_s < best_s:
                        best_error, best_k, best_n, best_behind = error, k, n, behind
                        best_c, best_value = max(own_c, again_c), behind_s
        if best_k < 0:
            return most_c
        plan[2 + d], plan[2 + S + d] = best_k, best_n
        largest = max(largest, best_c)
        if s > 1:
            front_s = pr.levels[pr.level[c, best_behind]]
        u, c, value, left = rest, best_behind, best_value, left - best_n
        s -= 1
        d += 1
        front = False
    return largest
