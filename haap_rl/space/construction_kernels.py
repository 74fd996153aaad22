"""Many plans built side by side, compiled: the twin of `space.construction` (tests hold them equal).

Nothing here knows what a plan costs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from haap_rl.cost.compiling import jit
from haap_rl.cost.estimator import FIRST, LAST
from haap_rl.space import construction
from haap_rl.space.construction import COLUMN, FEATURES, MOST
from haap_rl.space.kernels import Neighbourhood, decode

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
WIDTH = len(FEATURES)
(LEGAL, DEPTH, DEPTH_OVER_M, SPEED_BEFORE, SPEED_AFTER, SPEED_LEFT, FIT, FIT_OVER_FAIR, HELD_BEFORE, HELD_AFTER,
 ROOM_AFTER, GROUP_LEFT, DIVIDES, SEND, SAME_OPTION, SAME_GROUP, SPEED_RATIO, STOP_NOW, USE_REST) = (
    COLUMN[name] for name in (
        "legal", "depth", "depth_over_m", "speed_before", "speed_after", "speed_left", "fit", "fit_over_fair",
        "held_before", "held_after", "room_after", "group_left", "divides", "send", "same_option", "same_group",
        "speed_ratio", "stop_now", "use_rest",
    )
)  # fmt: skip


class Partials(NamedTuple):
    """n plans that are being built, `construction.Partial`s as arrays; of problems with at most G groups, S stages."""

    count: Ints  # (n,)
    stages: Ints  # (n,) chosen so far
    options: Ints  # (n, S) from the pipeline's end
    left: Ints  # (n, G)
    held: Ints  # (n,)
    speed: Floats  # (n,)


def partials(n: int, max_stages: int, groups: int) -> Partials:
    """Room for n plans."""
    return Partials(
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
        np.zeros((n, max_stages), np.int64),
        np.zeros((n, groups), np.int64),
        np.zeros(n, np.int64),
        np.zeros(n),
    )


@jit
def begin(c, b, x):
    """`construction.begin` for plan x."""
    b.count[x] = -1
    b.stages[x] = b.held[x] = 0
    b.speed[x] = 0.0
    for g in range(len(c.total)):
        b.left[x, g] = c.total[g]


@jit
def choose(c, b, x, action):
    """`construction.chosen` for plan x."""
    f = b.count[x]
    if f < 0:
        b.count[x] = action
        return
    s = b.stages[x] + 1
    b.stages[x] = s
    b.options[x, s - 1] = action
    for part in range(2):
        b.left[x, c.group[action, part]] -= c.devices[action, part]
    b.held[x] += c.most[f, LAST if s == 1 else 0, s, action]
    b.speed[x] += c.speed[f, action]


@jit
def clipped(value):
    """A feature within its bounds."""
    return min(max(value, -MOST), MOST)


@jit
def observe(c, b, x, out):
    """Fill `out` (A, WIDTH), A > K and A >= F, with `construction.features` of plan x."""
    f, layers, n = b.count[x], c.num_layers, len(c.step)
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
            row[STOP_NOW] = clipped(math.log((m - 2 + s) / (m * speed)))
            row[USE_REST] = clipped(math.log((m - 1 + s) / (m * (speed + idle))))
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
        row[STOP_NOW] = clipped(math.log((m - 1 + s) / (m * max(after, 1e-9))))
        row[USE_REST] = clipped(math.log((m + s) / (m * max(after + max(rest, 0.0), 1e-9))))


@jit
def _step(c, b, members, actions, rows, observations, ended):
    for y in range(len(members)):
        x, action = members[y], actions[y]
        ended[y] = b.count[x] >= 0 and action == len(c.step)
        if not ended[y]:
            choose(c, b, x, action)
            observe(c, b, x, observations[x])
            continue
        row, p = rows[y], b.stages[x]
        for z in range(len(row)):
            row[z] = 0
        row[0], row[1] = c.index[b.count[x]], p
        for i in range(p):
            row[2 + i] = b.options[x, p - 1 - i]


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

    Returns which of them ended, and (members, 2 + 2 S) the rows of those, whose layers are yet to be given out.
    """
    ended = np.zeros(len(members), np.bool_)
    rows = np.zeros((len(members), 2 + 2 * c.max_stages), np.int64)
    _step(c, b, members, actions, rows, observations, ended)
    return ended, rows


@jit
def _decode(nb, rows):
    for x in range(len(rows)):
        decode(nb, rows[x])


def give_out_layers(nb: Neighbourhood, rows: Ints) -> None:
    """Fill the layers of rows of which only the options are known, `Space.decode`."""
    _decode(nb, rows)
