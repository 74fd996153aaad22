"""Many plans built side by side, compiled: the twin of `space.construction` (tests hold them equal).

Nothing here knows what a plan costs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from haap_rl.cost.compiling import jit, jit_inlined
from haap_rl.cost.estimator import FIRST, LAST
from haap_rl.space import construction
from haap_rl.space.balance import SLIGHTLY
from haap_rl.space.construction import COLUMN, FEATURES, MOST, NOTHING
from haap_rl.space.kernels import water_fill

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
WIDTH = len(FEATURES)
(LEGAL, DEPTH, DEPTH_OVER_M, SPEED_BEFORE, SPEED_AFTER, SPEED_LEFT, FIT, FIT_OVER_FAIR, HELD_BEFORE, HELD_AFTER,
 ROOM_AFTER, GROUP_LEFT, DIVIDES, SEND, SAME_OPTION, SAME_GROUP, SPEED_RATIO, STOP_NOW, SLOWEST, USE_REST,
 REPEAT, COPIES) = (
    COLUMN[name] for name in (
        "legal", "depth", "depth_over_m", "speed_before", "speed_after", "speed_left", "fit", "fit_over_fair",
        "held_before", "held_after", "room_after", "group_left", "divides", "send", "same_option", "same_group",
        "speed_ratio", "stop_now", "slowest", "use_rest", "repeat", "copies",
    )
)  # fmt: skip


class Partials(NamedTuple):
    """n plans that are being built, `construction.Partial`s as arrays; of problems with at most G groups, S stages.

    each ... zeros   (S,) working memory
    """

    which: Ints  # (n,) `Partial.count`
    stages: Ints  # (n,) chosen so far
    options: Ints  # (n, S) from the pipeline's end
    left: Ints  # (n, G)
    held: Ints  # (n,)
    speed: Floats  # (n,)
    fixed: Floats  # (n, S)
    delay: Floats  # (n,)
    each: Floats
    busy: Floats
    caps: Ints
    next_s: Floats
    layers: Ints
    bounded: Ints
    rate: Floats
    order: Ints
    most: Ints
    trial: Ints
    ones: Floats
    zeros: Floats

    def picked(self, plans: Ints) -> Partials:
        """Copies of some of the plans."""
        return self._replace(**{name: getattr(self, name)[plans] for name in OF_EACH})


OF_EACH = ("which", "stages", "options", "left", "held", "speed", "fixed", "delay")  # fields with an entry per plan


def partials(n: int, max_stages: int, groups: int) -> Partials:
    """Room for n plans."""
    return Partials(
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
        np.zeros((n, max_stages), np.int64),
        np.zeros((n, groups), np.int64),
        np.zeros(n, np.int64),
        np.zeros(n),
        np.zeros((n, max_stages)),
        np.zeros(n),
        np.zeros(max_stages),
        np.zeros(max_stages),
        np.zeros(max_stages, np.int64),
        np.zeros(max(2, max_stages)),
        np.zeros(max_stages, np.int64),
        np.zeros(max_stages, np.int64),
        np.zeros(max_stages),
        np.zeros(max_stages, np.int64),
        np.zeros(max_stages, np.int64),
        np.zeros(max_stages, np.int64),
        np.ones(max_stages),
        np.zeros(max_stages),
    )


@jit
def begin(c, b, x):
    """`construction.begin` for plan x."""
    b.which[x] = -1
    b.stages[x] = b.held[x] = 0
    b.speed[x] = b.delay[x] = 0.0
    for g in range(len(c.total)):
        b.left[x, g] = c.total[g]


@jit
def choose(c, b, x, action):
    """`construction.chosen` for plan x."""
    f = b.which[x]
    if f < 0:
        b.which[x] = action
        return
    s = b.stages[x] + 1
    b.delay[x] = attach(c, b, x, action)
    b.stages[x] = s
    for part in range(2):
        b.left[x, c.group[action, part]] -= c.devices[action, part]
    b.held[x] += c.most[f, LAST if s == 1 else 0, s, action]
    b.speed[x] += c.speed[f, action]


@jit_inlined
def attach(c, b, x, k):
    """Put option k behind the chosen stages of plan x, which are not counted up yet; the delays then."""
    f, s = b.which[x], b.stages[x] + 1
    b.options[x, s - 1] = k
    if s == 1:
        b.fixed[x, 0] = c.ends[f, 1, k]
        return 0.0
    send = c.send[f, k, b.options[x, s - 2]]
    b.fixed[x, s - 2] += c.blocking * send
    b.fixed[x, s - 1] = c.blocking * send
    return b.delay[x] + (1.0 - c.blocking) * send


@jit_inlined
def pipeline_s(b, p, m, layers):
    """(m - 1) M + S of p stages with these layers; M is left in `b.next_s[0]`, S in `b.next_s[1]`."""
    slowest = total = 0.0
    for i in range(p):
        time = layers[i] * b.each[i] + b.busy[i]
        slowest, total = max(slowest, time), total + time
    b.next_s[0], b.next_s[1] = slowest, total
    return (m - 1) * slowest + total


@jit_inlined
def fastest_first(b, p, num_layers, most, layers):
    """Fill `layers`: the fastest stages, in `b.order`, up to `most`, one layer at least on each."""
    left = num_layers - p
    for i in range(p):
        layers[i] = 1
    for y in range(p):
        i = b.order[y]
        more = min(most[i] - 1, left)
        layers[i] += more
        left -= more


@jit_inlined
def pipeline_fill(b, p, num_layers, m):
    """`balance.pipeline_fill` of p stages of `b.each`, `b.busy` and `b.caps` into `b.layers`; False if it fails."""
    if not water_fill(b.each, b.busy, b.caps, p, num_layers, b.next_s, b.layers):
        return False
    best_s = pipeline_s(b, p, m, b.layers)
    limit_s = b.next_s[0]
    for i in range(p):  # insertion sort, stable
        y = i
        while y > 0 and b.each[b.order[y - 1]] > b.each[i]:
            b.order[y] = b.order[y - 1]
            y -= 1
        b.order[y] = i
    fastest_first(b, p, num_layers, b.caps, b.trial)
    pipeline_s(b, p, m, b.trial)
    least_s = b.next_s[1]
    if (m - 1) * limit_s + least_s >= best_s:  # the usual case: nothing to gain
        return True
    for i in range(p):
        b.most[i] = b.layers[i]
        while b.most[i] < b.caps[i] and (b.most[i] + 1) * b.each[i] + b.busy[i] <= limit_s:
            b.most[i] += 1
    while True:
        fastest_first(b, p, num_layers, b.most, b.trial)
        found_s = pipeline_s(b, p, m, b.trial)
        if found_s < best_s * (1.0 - SLIGHTLY):
            best_s = found_s
            for i in range(p):
                b.layers[i] = b.trial[i]
        first, least = -1, np.inf
        for i in range(p):
            if b.most[i] < b.caps[i]:
                time = (b.most[i] + 1) * b.each[i] + b.busy[i]
                if time < least:
                    first, least = i, time
        if first < 0 or (m - 1) * least + least_s >= best_s:
            return True
        b.most[first] += 1


@jit_inlined
def set_stage(c, b, f, i, k):
    """Put option k's speed and cap (as no first stage of a pipeline) at place i of the working memory."""
    b.rate[i] = c.num_layers * c.speed[f, k]
    b.each[i] = 1.0 / b.rate[i]
    b.caps[i] = c.most[f, LAST if i == 0 else 0, i + 1, k]


@jit_inlined
def ended(c, b, x, p, k, delay):
    """`construction.ended` of p stages, set before, the first of which has option k: stop_now.

    Layers are left in `b.layers`, `slowest` in `b.next_s[0]`.
    """
    f, layers, inner = b.which[x], c.num_layers, b.caps[p - 1]
    m = c.m[f]
    for i in range(p):
        b.busy[i] = b.fixed[x, i]
    b.caps[p - 1] = c.most[f, FIRST | (LAST if p == 1 else 0), p, k]
    b.busy[p - 1] += c.ends[f, 0, k]
    if c.load_balance:
        placed = pipeline_fill(b, p, layers, m)
    else:
        placed = water_fill(b.ones, b.zeros, b.caps, p, layers, b.next_s, b.layers)
    b.caps[p - 1] = inner
    if not placed:
        b.next_s[0] = MOST
        return MOST
    total = pipeline_s(b, p, m, b.layers)
    b.next_s[0] = math.log(b.next_s[0])
    return math.log((total + delay) / m + b.layers[p - 1] * c.tail[f, k])


@jit_inlined
def with_rest(c, b, x, p, delay, rest):
    """`construction.with_rest` of p stages, set before."""
    m, left, level = c.m[b.which[x]], 1.0, 0.0  # layers in shares of all
    if rest <= NOTHING:
        rest = 0.0
    for i in range(p):
        b.bounded[i] = 0
    layers = float(c.num_layers)
    while True:
        rate, work = rest * layers, left * layers
        for i in range(p):
            if not b.bounded[i]:
                rate += b.rate[i]
                work += b.fixed[x, i] * b.rate[i]
        if rate <= 0.0:
            if left > NOTHING:
                return MOST
            break
        level = work / rate
        over = under = 0.0
        for i in range(p):
            if not b.bounded[i]:
                n = (level - b.fixed[x, i]) * b.rate[i]
                if n > b.caps[i]:
                    over += n - b.caps[i]
                if n < 1.0:
                    under += 1.0 - n
        if over <= NOTHING and under <= NOTHING:
            break
        for i in range(p):
            if not b.bounded[i]:
                n = (level - b.fixed[x, i]) * b.rate[i]
                if over > under and n > b.caps[i]:
                    left -= b.caps[i] / layers
                    b.bounded[i] = 1
                elif over <= under and n < 1.0:
                    left -= 1.0 / layers
                    b.bounded[i] = 1
    slowest = level if rest > 0.0 else 0.0
    trip = slowest
    for i in range(p):
        n = min(max((level - b.fixed[x, i]) * b.rate[i], 1.0), float(max(b.caps[i], 1)))
        time = n * b.each[i] + b.fixed[x, i]
        slowest, trip = max(slowest, time), trip + time
    return math.log(max(((m - 1) * slowest + trip + delay) / m, 1e-9))


@jit_inlined
def clipped(value):
    """A feature within its bounds."""
    return min(max(value, -MOST), MOST)


@jit
def observe(c, b, x, out):
    """Fill `out` (A, WIDTH), A > K and A >= F, with `construction.features` of plan x."""
    f, layers, n = b.which[x], c.num_layers, len(c.step)
    for row in range(out.shape[0]):
        for y in range(WIDTH):
            out[row, y] = 0.0
    if f < 0:
        for row in range(len(c.m)):
            for y in range(WIDTH):
                out[row, y] = c.start[row, y]
        return
    s, held, speed = b.stages[x] + 1, b.held[x], b.speed[x]
    m, left = c.m[f], b.left[x]
    idle = 0.0
    for g in range(len(c.total)):
        idle += left[g] * c.per_device[f, g]
    previous = b.options[x, s - 2] if s > 1 else -1
    for i in range(s - 1):
        set_stage(c, b, f, i, b.options[x, i])
    if s > 1:
        last = LAST if s == 2 else 0
        inner, front = c.most[f, last, s - 1, previous], c.most[f, last | FIRST, s - 1, previous]
        if front > 0 and held - inner + front >= layers:
            row = out[n]
            for y in range(WIDTH):
                row[y] = c.fixed[f, n, y]
            row[DEPTH], row[DEPTH_OVER_M] = clipped(s / 16), clipped(s / m)
            row[SPEED_BEFORE] = row[SPEED_AFTER] = clipped(speed)
            row[SPEED_LEFT] = clipped(idle)
            row[HELD_BEFORE] = row[HELD_AFTER] = clipped(held / layers)
            row[STOP_NOW] = clipped(ended(c, b, x, s - 1, previous, b.delay[x]))
            row[SLOWEST] = clipped(b.next_s[0])
            row[USE_REST] = clipped(with_rest(c, b, x, s - 1, b.delay[x], idle))
        if inner <= 0:
            return
    if s > c.max_stages:
        return
    last, state = LAST if s == 1 else 0, 0
    for g in range(len(c.total)):
        state += left[g] // c.unit * c.strides[g]
    mean = speed / (s - 1) if s > 1 else 1.0
    for k in range(n):
        g, h, devices = c.group[k, 0], c.group[k, 1], c.devices[k, 0]
        if left[g] < devices or left[h] < c.devices[k, 1]:
            continue
        inner, front = c.most[f, last, s, k], c.most[f, last | FIRST, s, k]
        room = -(10**9)
        if left[g] // c.unit >= c.units[k, 0] and left[h] // c.unit >= c.units[k, 1]:
            room = c.room[f, s + 1, state - c.step[k]]
        if not ((front > 0 and held + front >= layers) or (inner > 0 and held + inner + room >= layers and s < layers)):
            continue
        row, own = out[k], c.speed[f, k]
        for y in range(WIDTH):
            row[y] = c.fixed[f, k, y]
        after, group_left = speed + own, left[g] - devices
        rest = idle - devices * c.per_device[f, g] - c.devices[k, 1] * c.per_device[f, h]
        row[DEPTH], row[DEPTH_OVER_M] = clipped(s / 16), clipped(s / m)
        row[SPEED_BEFORE], row[SPEED_AFTER], row[SPEED_LEFT] = clipped(speed), clipped(after), clipped(rest)
        row[FIT] = clipped(inner / layers)
        row[FIT_OVER_FAIR] = clipped(inner / max(layers * own, 1e-9))
        row[HELD_BEFORE], row[HELD_AFTER] = clipped(held / layers), clipped((held + inner) / layers)
        row[ROOM_AFTER] = clipped((held + inner + max(room, 0)) / layers)
        row[GROUP_LEFT] = clipped(group_left / c.total[g])
        row[DIVIDES] = 1.0 if group_left % devices == 0 else 0.0
        if s > 1:
            row[SEND] = clipped(c.send[f, k, previous])
            row[SAME_OPTION] = 1.0 if k == previous else 0.0
            row[SAME_GROUP] = 1.0 if g == c.group[previous, 0] else 0.0
            row[SPEED_RATIO] = clipped(math.log(max(own, 1e-9) / mean))
        behind = b.fixed[x, s - 2] if s > 1 else 0.0
        delay = attach(c, b, x, k)
        set_stage(c, b, f, s - 1, k)
        row[STOP_NOW] = clipped(ended(c, b, x, s, k, delay))
        row[SLOWEST] = clipped(b.next_s[0])
        row[USE_REST] = clipped(with_rest(c, b, x, s, delay, rest))
        copies = min(c.max_stages - s, group_left // devices)
        if c.devices[k, 1] > 0:
            copies = min(copies, (left[h] - c.devices[k, 1]) // c.devices[k, 1])
        send = c.send[f, k, k]
        for i in range(s, s + copies):
            set_stage(c, b, f, i, k)
            b.fixed[x, i - 1] += c.blocking * send
            b.fixed[x, i] = c.blocking * send
            delay += (1.0 - c.blocking) * send
        used = devices * c.per_device[f, g] + c.devices[k, 1] * c.per_device[f, h]
        row[REPEAT] = clipped(with_rest(c, b, x, s + copies, delay, rest - copies * used))
        row[COPIES] = copies / 16
        if s > 1:
            b.fixed[x, s - 2] = behind


@jit
def _step(c, b, members, actions, rows, observations, done):
    for y in range(len(members)):
        x, action = members[y], actions[y]
        done[y] = b.which[x] >= 0 and action == len(c.step)
        if not done[y]:
            choose(c, b, x, action)
            observe(c, b, x, observations[x])
            continue
        row, p = rows[y], b.stages[x]
        for z in range(len(row)):
            row[z] = 0
        row[0], row[1] = c.space_index[b.which[x]], p
        for i in range(p):
            set_stage(c, b, b.which[x], i, b.options[x, i])
        ended(c, b, x, p, b.options[x, p - 1], b.delay[x])
        for i in range(p):
            row[2 + i] = b.options[x, p - 1 - i]
            row[2 + c.max_stages + i] = b.layers[p - 1 - i]


@jit
def _begin(c, b, members, counts, observations):
    for y in range(len(members)):
        x = members[y]
        begin(c, b, x)
        if counts[y] >= 0:
            choose(c, b, x, counts[y])
        observe(c, b, x, observations[x])


def begin_many(
    c: construction.Construction, b: Partials, members: Ints, counts: Ints, observations: construction.Observation
) -> None:
    """Begin plans `members` anew and fill their observations; counts: which number of micro-batches, -1 to choose."""
    _begin(c, b, members, counts, observations)


def step_many(
    c: construction.Construction,
    b: Partials,
    members: Ints,
    actions: Ints,
    observations: construction.Observation,
) -> tuple[npt.NDArray[np.bool_], Ints]:
    """Make a legal choice in each of plans `members`, and fill their observations.

    Returns which of them ended, and (members, 2 + 2 S) the rows of those.
    """
    done = np.zeros(len(members), np.bool_)
    rows = np.zeros((len(members), 2 + 2 * c.max_stages), np.int64)
    _step(c, b, members, actions, rows, observations, done)
    return done, rows
