"""A plan built stage by stage, from the pipeline's end: what may be chosen next, and what is seen of each choice.

One episode is one plan. The first decision is the number of micro-batches, every further one the option of the next
stage towards the front, or STOP; the balancer then gives out the layers. From the end, because the stage s-th from the
end holds min(s, m) micro-batches in flight: its memory is known when it is chosen, and `initial.Room` says what the
devices left could still hold, so that a legal choice never leads to a dead end.

What is seen of a choice (`FEATURES`) are ratios only, so that a policy can be asked about any problem, however many
device groups, options and stages it has. Nothing here computes an iteration time. The functions below are the readable
statement; `space.construction_kernels` is their compiled twin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from haap_rl.cost.estimator import FIRST, LAST
from haap_rl.problem.plan import RECOMPUTE_MODES
from haap_rl.space.balance import even_split, pipeline_fill

if TYPE_CHECKING:
    from haap_rl.space.space import Genome, Space

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Observation = npt.NDArray[np.float32]
MOST = 4.0  # features are clipped to this size
NOTHING = 1e-9  # a speed that is but the rounding of sums

FEATURES = (
    "legal",  # 1; a row of zeros is no choice
    "is_microbatches",  # 1 for a number of micro-batches
    "is_stop",  # 1 for STOP
    # what does not change while a plan is built
    "log2_microbatches",  # / 7
    "ideal",  # log(ideal iteration at this number of micro-batches / at the best one)
    "speed",  # layers/s of the option / ideal layers/s of the cluster
    "fair_layers",  # its share of the layers by speed, / 8
    "rounding",  # log(those layers as a whole number, at least one / as they are)
    "devices",  # of its group that it takes, a share
    "log2_tp",  # / 3
    "log2_dp",  # / 3
    "recompute",  # 0, 1/2, 1
    "efficiency",  # speed per device / best of its group
    "group_speed",  # best speed per device of its group / best of the cluster
    "embedding",  # seconds of the embedding / ideal seconds of a micro-batch
    "head",
    "sync",  # gradient sync and optimiser step with its share of layers / ideal iteration
    "group_size",  # devices of its group / all devices
    # what does
    "depth",  # stages chosen, with this one, / 16
    "depth_over_m",  # whether the pipeline can be filled
    "speed_before",  # speeds of the chosen stages, summed
    "speed_after",
    "speed_left",  # speed of the devices that are idle then, at their best
    "fit",  # most layers that fit here / all layers
    "fit_over_fair",  # the same / its share of layers
    "held_before",  # most layers that the chosen stages can hold / all layers
    "held_after",
    "room_after",  # the same with the most that could come
    "group_left",  # devices of its group left idle then, a share
    "divides",  # 1 where those are whole stages like this one
    "send",  # sends to and from the stage behind / ideal seconds of a micro-batch
    "same_option",  # as the stage behind
    "same_group",
    "speed_ratio",  # log(speed / mean speed of the chosen stages)
    # the load balancer's, as times of a pipeline over those of an ideal one, log
    "stop_now",  # if the plan ended with this stage, with its gradient sync; 4 where it cannot
    "slowest",  # of that, the slowest stage alone
    "use_rest",  # if the idle devices became one more stage, at their best
    "repeat",  # if more stages like this one took what it can of them first
    "copies",  # how many these would be, / 16
)
COLUMN = {name: i for i, name in enumerate(FEATURES)}
VERSION = 1  # of these features: a policy trained on another version cannot be used


class Construction(NamedTuple):
    """A space as arrays for building plans. K options, F feasible micro-batch counts, G device groups, S = most stages.

    m           (F,) numbers of micro-batches
    space_index (F,) their indices in the space
    group, devices, units   (K, 2) of each option's one or two replica groups; 0 devices: it has no second one
    step        (K,) what an option takes of a state of `room`
    most        (F, 4, S+1, K) `Tables.max_layers`, options last
    room        (F, S+2, states) `Room.flat`
    strides     (G,) of the states, which count devices in units of `unit`
    total       (G,) devices of the cluster
    per_device  (F, G) best speed of one device / ideal speed of the cluster
    speed       (F, K) of an option / ideal speed
    fixed       (F, K + 1, len(FEATURES)) the features that do not change, STOP last
    start       (F, len(FEATURES)) features of each number of micro-batches
    send        (F, K, K) sends both ways between two options / ideal seconds of a micro-batch
    ends        (F, 2, K) seconds of embedding and head / the same
    tail        (F, K) gradient sync and optimiser step of a layer / ideal seconds of an iteration
    blocking    share of a send that keeps both stages busy
    load_balance   `SpaceSpec.load_balance`
    ideal_s     seconds of an iteration without any loss, at the best number of micro-batches
    """

    m: Ints
    space_index: Ints
    group: Ints
    devices: Ints
    units: Ints
    step: Ints
    most: Ints
    room: npt.NDArray[np.int32]
    strides: Ints
    unit: int
    total: Ints
    per_device: Floats
    speed: Floats
    fixed: Observation
    start: Observation
    send: Floats
    ends: Floats
    tail: Floats
    blocking: float
    load_balance: bool
    ideal_s: float
    num_layers: int
    max_stages: int


def build(space: Space) -> Construction:
    """The Construction of a space of which some plan fits."""
    t, layers = space.stage_tables, space.num_layers
    counts = space.feasible_microbatches
    tables, rooms = [space.tables(m) for m in counts], [space.room(m) for m in counts]
    group = np.array([[part[0] for part in (*o.parts, (0, 0, 0))[:2]] for o in space.options], np.int64)
    devices = np.array([[part[1] * part[2] for part in (*o.parts, (0, 0, 0))[:2]] for o in space.options], np.int64)
    second = devices[:, 1] > 0
    most = np.ascontiguousarray(np.stack([table.max_layers for table in tables]).transpose(0, 2, 3, 1))
    usable = (most.max((1, 2)) > 0) & np.isfinite([table.layer_s for table in tables])
    layer_s = np.where(usable, [table.layer_s for table in tables], np.inf)
    per_device = np.zeros((len(counts), len(space.num_devices)))
    for g in range(len(space.num_devices)):
        alone = (group[:, 0] == g) & ~second
        if alone.any():
            per_device[:, g] = (1.0 / layer_s / devices.sum(1))[:, alone].max(1)
    ideal_speed = per_device @ np.array(space.num_devices)  # layers/s of one micro-batch after another
    per_device, speed = per_device / ideal_speed[:, None], 1.0 / layer_s / ideal_speed[:, None]
    microbatch_s = layers / ideal_speed
    ideal_s = np.array(counts) * microbatch_s

    shape = (len(counts), len(space.options) + 1, len(FEATURES))
    fixed, start = np.zeros(shape), np.zeros((len(counts), len(FEATURES)))
    own = fixed[:, :-1]
    fair = layers * speed
    whole = np.clip(np.rint(fair), 1, layers).astype(np.int64)
    ends = np.array([[table.embedding_s, table.head_s] for table in tables]) / microbatch_s[:, None, None]
    ends = np.where(usable[:, None], ends, 0.0)
    rows, total = t.row[:, 0], np.array(space.num_devices)
    f, k = np.arange(len(counts))[:, None], np.arange(len(space.options))
    sync_s = (t.sync_s + t.optimizer_s)[_index(space, counts)[:, None], rows[None], 0, whole]
    values = {
        "speed": speed,
        "fair_layers": fair / 8,
        "rounding": np.log(whole / np.maximum(fair, 1e-9)),
        "devices": devices[:, 0] / total[group[:, 0]],
        "log2_tp": [math.log2(o.tp) / 3 for o in space.options],
        "log2_dp": [math.log2(o.dp) / 3 for o in space.options],
        "recompute": [RECOMPUTE_MODES.index(o.recompute) / 2 for o in space.options],
        "efficiency": speed / devices.sum(1) / np.maximum(per_device[f, group[k, 0]], 1e-300),
        "group_speed": (per_device / per_device.max(1, keepdims=True))[f, group[k, 0]],
        "embedding": ends[:, 0],
        "head": ends[:, 1],
        "sync": sync_s / ideal_s[:, None],
        "group_size": total[group[:, 0]] / total.sum(),
    }
    for name, value in values.items():
        own[:, :, COLUMN[name]] = np.where(usable, value, 0.0)
    own[~usable] = 0.0
    fixed[:, -1, COLUMN["is_stop"]] = start[:, COLUMN["is_microbatches"]] = 1.0
    for rows_of in (fixed.transpose(1, 0, 2), start[None]):
        rows_of[:, :, COLUMN["legal"]] = 1.0
        rows_of[:, :, COLUMN["log2_microbatches"]] = np.log2(counts) / 7
        rows_of[:, :, COLUMN["ideal"]] = np.log(ideal_s / ideal_s.min())
    least = np.array([room.min_stages(layers) for room in rooms])
    start[:, COLUMN["depth"]] = least / 16
    start[:, COLUMN["depth_over_m"]] = least / np.array(counts)
    start[:, COLUMN["room_after"]] = [room.most_layers / layers for room in rooms]
    start[:, COLUMN["stop_now"]] = np.log((np.array(counts) - 1 + least) / np.array(counts))
    return Construction(
        m=np.array(counts, np.int64),
        space_index=_index(space, counts),
        group=group,
        devices=devices,
        units=np.take_along_axis(rooms[0].units, group, 1) * (devices > 0),
        step=rooms[0].step,
        most=most,
        room=np.array([room.flat for room in rooms], np.int32),
        strides=rooms[0].strides,
        unit=int(rooms[0].unit),
        total=total.astype(np.int64),
        per_device=per_device,
        speed=speed,
        fixed=_clipped(fixed),
        start=_clipped(start),
        send=_sends(space, counts) / microbatch_s[:, None, None],
        ends=ends,
        tail=np.where(usable, sync_s / whole / ideal_s[:, None], 0.0),
        blocking=float(t.blocking),
        load_balance=bool(space.spec.load_balance),
        ideal_s=float(ideal_s.min()),
        num_layers=int(layers),
        max_stages=int(space.max_stages),
    )


def _index(space: Space, counts: tuple[int, ...]) -> Ints:
    return np.array([space.num_microbatches.index(m) for m in counts], np.int64)


def _clipped(values: Floats) -> Observation:
    return np.clip(values, -MOST, MOST).astype(np.float32)


def _sends(space: Space, counts: tuple[int, ...]) -> Floats:
    """(F, K, K) seconds of the sends both ways between two options; inside one node where both are so small."""
    t = space.stage_tables
    side = t.side[t.row[:, 0]]
    near = np.zeros((len(side), len(side)), np.int64)
    for k, a in enumerate(space.options):
        for q, b in enumerate(space.options):
            per_node = space.problem.cluster.groups[a.group].devices_per_node
            alone = a.partner is None and b.partner is None and a.group == b.group
            near[k, q] = alone and a.num_devices + b.num_devices <= per_node
    return np.stack([2.0 * t.send_s[i][side[:, None], side[None], near] for i in _index(space, counts)])


# ------------------------------------------------------------------------------- one plan, as it is built
@dataclass(frozen=True, slots=True)
class Partial:
    """A plan that is being built. Options are counted from the pipeline's end.

    count     which of the Construction's numbers of micro-batches; -1: to be chosen
    options   chosen so far
    left      idle devices of each group
    held      most layers that the chosen stages can hold, none of them the pipeline's first
    speed     of the chosen stages, summed, / ideal speed
    fixed     of each of them, what it is busy for besides layers / ideal seconds of a micro-batch: head, blocking sends
    delay     of the sends between them that block nobody, summed / the same
    """

    count: int
    options: tuple[int, ...]
    left: tuple[int, ...]
    held: int
    speed: float
    fixed: tuple[float, ...]
    delay: float


def begin(c: Construction) -> Partial:
    """Nothing chosen yet."""
    return Partial(-1, (), tuple(int(n) for n in c.total), 0, 0.0, (), 0.0)


def chosen(c: Construction, partial: Partial, action: int) -> Partial:
    """After a legal choice other than STOP: an index into `m` first, then options."""
    if partial.count < 0:
        return replace(partial, count=action)
    s = len(partial.options) + 1
    left = list(partial.left)
    for group, devices in zip(c.group[action], c.devices[action], strict=True):
        left[group] -= int(devices)
    send = float(c.send[partial.count, action, partial.options[-1]]) if s > 1 else 0.0
    return replace(
        partial,
        options=(*partial.options, action),
        left=tuple(left),
        fixed=_fixed(c, partial, action),
        delay=partial.delay + (1.0 - c.blocking) * send,
        held=partial.held + int(c.most[partial.count, LAST if s == 1 else 0, s, action]),
        speed=partial.speed + float(c.speed[partial.count, action]),
    )


def _fixed(c: Construction, partial: Partial, k: int) -> tuple[float, ...]:
    """`Partial.fixed` once option k was chosen too."""
    if not partial.options:
        return (float(c.ends[partial.count, 1, k]),)
    blocked = c.blocking * float(c.send[partial.count, k, partial.options[-1]])
    return (*partial.fixed[:-1], partial.fixed[-1] + blocked, blocked)


def _caps(c: Construction, partial: Partial, ends: bool) -> list[int]:
    """Most layers of each stage; ends: the one chosen last is the pipeline's first stage."""
    caps = []
    for i, k in enumerate(partial.options):
        position = (LAST if i == 0 else 0) | (FIRST if ends and i == len(partial.options) - 1 else 0)
        caps.append(int(c.most[partial.count, position, i + 1, k]))
    return caps


class Ended(NamedTuple):
    """A plan that ends with the stages chosen: layers from the pipeline's end (None: they do not fit), and features."""

    layers: tuple[int, ...] | None
    stop_now: float
    slowest: float


def ended(c: Construction, partial: Partial) -> Ended:
    """What the balancer makes of a plan if the stage chosen last is the pipeline's first.

    With M the slowest stage, R the round trip of one micro-batch, G the first stage's tail: ((m - 1) M + R + G) over m
    ideal micro-batches.
    """
    f, m, layers, options = partial.count, int(c.m[partial.count]), c.num_layers, partial.options
    fixed = (*partial.fixed[:-1], partial.fixed[-1] + float(c.ends[f, 0, options[-1]]))
    each = [1.0 / (layers * float(c.speed[f, k])) for k in options]  # in ideal seconds of a micro-batch
    caps = _caps(c, partial, ends=True)
    placed = pipeline_fill(each, fixed, caps, layers, m) if c.load_balance else even_split(caps, layers)
    if placed is None:
        return Ended(None, MOST, MOST)
    times = [n * one + more for n, one, more in zip(placed, each, fixed, strict=True)]
    pipeline = ((m - 1) * max(times) + sum(times) + partial.delay) / m + placed[-1] * float(c.tail[f, options[-1]])
    return Ended(placed, math.log(pipeline), math.log(max(times)))


def genome(space: Space, partial: Partial) -> Genome:
    """The genome of a plan that is complete."""
    from haap_rl.space.space import Genome

    layers = ended(space.construction, partial).layers
    if layers is None:
        raise AssertionError("a legal plan cannot hold the layers")
    count = space.num_microbatches[space.construction.space_index[partial.count]]
    return Genome(count, tuple(reversed(partial.options)), tuple(reversed(layers)))


def with_rest(c: Construction, partial: Partial, rest: float) -> float:
    """`use_rest`: the same as `stop_now` if idle devices of that speed became one more stage, layers being divisible.

    The level at which all layers are placed, each stage between one layer and its cap, after Bitran and Hax 1981:
    again and again the stages beyond that bound which is broken by more layers are set to it.
    """
    f, m, layers, options = partial.count, int(c.m[partial.count]), c.num_layers, partial.options
    fixed, caps = partial.fixed, _caps(c, partial, ends=False)
    rest = rest if rest > NOTHING else 0.0
    free, left, level = list(range(len(options))), float(layers), 0.0
    while True:
        rate = rest + sum(float(c.speed[f, options[i]]) for i in free)
        if rate <= 0.0:  # every stage is at a bound
            if left > NOTHING:
                return MOST
            break
        work = left / layers + sum(fixed[i] * float(c.speed[f, options[i]]) for i in free)
        level = work / rate
        over = under = 0.0
        for i in free:
            n = (level - fixed[i]) * layers * float(c.speed[f, options[i]])
            over, under = over + max(0.0, n - caps[i]), under + max(0.0, 1.0 - n)
        if over <= NOTHING and under <= NOTHING:
            break
        kept = []
        for i in free:
            n = (level - fixed[i]) * layers * float(c.speed[f, options[i]])
            if over > under and n > caps[i]:
                left -= caps[i]
            elif over <= under and n < 1.0:
                left -= 1.0
            else:
                kept.append(i)
        free = kept
    slowest = trip = level if rest > 0.0 else 0.0
    for i, k in enumerate(options):
        speed = layers * float(c.speed[f, k])
        time = min(max((level - fixed[i]) * speed, 1.0), float(max(caps[i], 1))) / speed + fixed[i]
        slowest, trip = max(slowest, time), trip + time
    return math.log(max(((m - 1) * slowest + trip + partial.delay) / m, 1e-9))


def legal(c: Construction, partial: Partial) -> npt.NDArray[np.bool_]:
    """(K + 1,) which options may come next, and whether to stop; of the first decision (F,) which counts."""
    if partial.count < 0:
        return np.ones(len(c.m), np.bool_)
    s, left, held = len(partial.options) + 1, np.array(partial.left), partial.held
    mask = np.zeros(len(c.step) + 1, np.bool_)
    if s > 1:
        previous, last = partial.options[-1], LAST if s == 2 else 0
        inner = c.most[partial.count, last, s - 1, previous]
        front = c.most[partial.count, last | FIRST, s - 1, previous]
        mask[-1] = front > 0 and held - inner + front >= c.num_layers
        if inner <= 0:  # it can only be the pipeline's first stage
            return mask
    if s <= c.max_stages:
        last = LAST if s == 1 else 0
        inner, front = c.most[partial.count, last, s], c.most[partial.count, last | FIRST, s]
        ends = (front > 0) & (held + front >= c.num_layers)
        goes_on = (inner > 0) & (held + inner + _room(c, partial) >= c.num_layers) & (s < c.num_layers)
        mask[:-1] = (left[c.group] >= c.devices).all(1) & (ends | goes_on)
    return mask


def _room(c: Construction, partial: Partial) -> Ints:
    """(K,) most layers of what could come after each option; far below zero where devices are lacking."""
    s = len(partial.options) + 1
    if s > c.max_stages:
        return np.full(len(c.step), -(10**9))
    units = np.array(partial.left) // c.unit
    enough = (units[c.group] >= c.units).all(1)
    state = np.where(enough, int(units @ c.strides) - c.step, 0)
    room: Ints = np.where(enough, c.room[partial.count, s + 1, state], -(10**9)).astype(np.int64)
    return room


def features(c: Construction, partial: Partial) -> Observation:
    """(K + 1, len(FEATURES)) what is seen of every choice, or (F, ...) of the first one; zeros where not legal."""
    mask = legal(c, partial)
    if partial.count < 0:
        return c.start.copy()
    f, s, left, speed = partial.count, len(partial.options) + 1, np.array(partial.left), partial.speed
    m, layers, n = int(c.m[f]), c.num_layers, len(c.step)
    x = np.zeros((n + 1, len(FEATURES)))
    own, fit = x[:-1], c.most[f, LAST if s == 1 else 0, s] if s <= c.max_stages else np.zeros(n)
    idle = float(left @ c.per_device[f])
    after, rest = speed + c.speed[f], idle - (c.devices * c.per_device[f][c.group]).sum(1)
    group_left = left[c.group[:, 0]] - c.devices[:, 0]
    x[:, COLUMN["depth"]] = s / 16
    x[:, COLUMN["depth_over_m"]] = s / m
    x[:, COLUMN["speed_before"]] = x[-1, COLUMN["speed_after"]] = speed
    own[:, COLUMN["speed_after"]] = after
    own[:, COLUMN["speed_left"]] = rest
    x[-1, COLUMN["speed_left"]] = idle
    own[:, COLUMN["fit"]] = fit / layers
    own[:, COLUMN["fit_over_fair"]] = fit / np.maximum(layers * c.speed[f], 1e-9)
    x[:, COLUMN["held_before"]] = x[-1, COLUMN["held_after"]] = partial.held / layers
    own[:, COLUMN["held_after"]] = (partial.held + fit) / layers
    own[:, COLUMN["room_after"]] = (partial.held + fit + np.maximum(_room(c, partial), 0)) / layers
    own[:, COLUMN["group_left"]] = group_left / c.total[c.group[:, 0]]
    own[:, COLUMN["divides"]] = group_left % c.devices[:, 0] == 0
    if s > 1:
        previous = partial.options[-1]
        own[:, COLUMN["send"]] = c.send[f, :, previous]
        own[:, COLUMN["same_option"]] = np.arange(n) == previous
        own[:, COLUMN["same_group"]] = c.group[:, 0] == c.group[previous, 0]
        own[:, COLUMN["speed_ratio"]] = np.log(np.maximum(c.speed[f], 1e-9) / (speed / (s - 1)))
    for k in np.flatnonzero(mask[:-1]).tolist():
        taken = chosen(c, partial, k)
        _, x[k, COLUMN["stop_now"]], x[k, COLUMN["slowest"]] = ended(c, taken)
        x[k, COLUMN["use_rest"]] = with_rest(c, taken, float(rest[k]))
        copies = c.max_stages - s
        for group, devices in zip(c.group[k].tolist(), c.devices[k].tolist(), strict=True):
            copies = min(copies, taken.left[group] // devices if devices else copies)
        for _ in range(copies):
            taken = chosen(c, taken, k)
        used = float((c.devices[k] * c.per_device[f][c.group[k]]).sum())
        x[k, COLUMN["repeat"]] = with_rest(c, taken, float(rest[k]) - copies * used)
        x[k, COLUMN["copies"]] = copies / 16
    if mask[-1]:
        _, x[-1, COLUMN["stop_now"]], x[-1, COLUMN["slowest"]] = ended(c, partial)
        x[-1, COLUMN["use_rest"]] = with_rest(c, partial, idle)
    seen: Observation = _clipped(x) + c.fixed[f]
    seen[~mask] = 0.0
    return seen
