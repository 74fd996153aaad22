"""The space's neighbour moves, relief and draws on integer-coded plans, compiled.

Twins of `space.balance`, `space.moves` and `space.initial`, which stay the readable statement of what is done: a
kernel gives the same plans in the same order and takes the same numbers from the same generator (tests hold them
equal). Nothing here knows what a plan costs.

A plan is a row of whole numbers, front to back, as in `cost.kernels`; places that are not used hold 0, so that equal
plans have equal rows:

    [micro-batch index, stages p, option of each stage (S places), layers of each stage (S places)]
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from haap_rl.cost.compiling import jit
from haap_rl.cost.estimator import FIRST, LAST
from haap_rl.problem.plan import RECOMPUTE_MODES
from haap_rl.space import moves
from haap_rl.space.moves import TRIES, Move
from haap_rl.space.space import Space

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

KINDS = (
    "balance", "microbatches", "shift", "tp", "devices", "recompute", "group", "remove", "split", "insert", "swap",
    "merge",
)  # fmt: skip
(BALANCE, MICROBATCHES, SHIFT, TP, DEVICES, RECOMPUTE, GROUP, REMOVE, SPLIT, INSERT, SWAP, MERGE) = range(len(KINDS))

# columns of `Neighbourhood.option`: devices first, then indices of options that are like it (-1: not in the space)
GROUP_A, DEVICES_A, UNITS_A, GROUP_B, DEVICES_B, UNITS_B, STEP, IS_BASE = range(8)
TP_UP, TP_DOWN, DP_UP, DP_DOWN, HALF, HEAVIER, LIGHTER, MODE = range(8, 16)
ON_GROUP = MODE + len(RECOMPUTE_MODES)
MODES = len(RECOMPUTE_MODES)


class Neighbourhood(NamedTuple):
    """A space as arrays. M micro-batch counts (F of them feasible), K options, S = most stages, G device groups.

    option          (K, ON_GROUP + G) see the columns above. A: its devices; B: those of its second replica group (0 if
                    it has none); units and step: the same in `Room`; base: of the first mode of recomputation
    devices         (G,) of the cluster
    most            (M, 4, S+1, K) `Tables.max_layers`, options last
    seconds         (M, K, 3) of a layer, an embedding, a head, per micro-batch
    other_count     (M, 2) index of twice and of half as many micro-batches; -1: not in the space
    converted       (M, K) the option at another micro-batch count; -1: none
    largest_idle    (M, G, most devices + 1) the option with most devices among so many idle ones; -1: none
    feasible        (F,) indices of the micro-batch counts at which some plan fits
    least           (F,) stages that a plan needs at least
    room            (F, S+2, states) `Room.flat`
    strides         (G,) of the states, which count devices in units of `unit`

    The rest is working memory, so two threads must not share a Neighbourhood.
    """

    option: Ints
    devices: Ints
    most: Ints
    seconds: Floats
    other_count: Ints
    converted: Ints
    largest_idle: Ints
    feasible: Ints
    least: Ints
    room: npt.NDArray[np.int32]
    strides: Ints
    unit: int
    num_layers: int
    max_stages: int
    load_balance: bool
    left: Ints  # (G,) idle devices
    caps: Ints  # (S,) most layers of each stage
    times: Floats  # (3, S) seconds of a layer, fixed seconds, seconds with one layer more
    row: Ints  # (2+2S,) a plan that a move starts from or leads to
    chosen: Ints  # (K,) options that may be drawn
    slots: Ints  # hash table of the rows that `relief` found; entries below `epoch` are empty
    epoch: Ints  # (1,)


# ------------------------------------------------------------------------------------- codes and tables
def coded(edits: Iterable[Move]) -> Ints:
    """(n, 3) moves as numbers: kind, stage, argument."""
    return np.array([(KINDS.index(kind), *where) for kind, *where in edits], np.int64).reshape(-1, 3)


def most_relief(space: Space) -> int:
    """Rows that `relief` finds at most: every option, beside one halved stage or none; exchanges, shifts, others."""
    return space.max_stages * (len(space.options) + 2) + 2 * len(space.num_devices) + 7


def build(space: Space) -> Neighbourhood:
    """The Neighbourhood of a space; its tables and rooms are those that the space keeps."""
    tables = [space.tables(m) for m in space.num_microbatches]
    feasible = [space.num_microbatches.index(m) for m in space.feasible_microbatches]
    rooms = [space.room(m) for m in space.feasible_microbatches]
    most, groups, count = space.max_stages, len(space.num_devices), len(space.options)
    any_room = space.room(space.num_microbatches[0])  # units and strides are the same for every count
    bound = most_relief(space)
    return Neighbourhood(
        option=_option_columns(space, any_room.units, any_room.step),
        devices=np.array(space.num_devices, np.int64),
        most=np.ascontiguousarray(np.stack([table.max_layers for table in tables]).transpose(0, 2, 3, 1)),
        seconds=np.stack([np.array([t.layer_s, t.embedding_s, t.head_s]).T for t in tables]).copy(),
        other_count=np.array([[_index(space, 2 * m), _index(space, m // 2)] for m in space.num_microbatches], np.int64),
        converted=np.array(
            [[_or_none(moves.at_count(space, k, m)) for k in range(count)] for m in space.num_microbatches], np.int64
        ),
        largest_idle=_largest_idle(space),
        feasible=np.array(feasible, np.int64),
        least=np.array([room.min_stages(space.num_layers) for room in rooms], np.int64),
        room=np.array([room.flat for room in rooms], np.int32).reshape(len(rooms), most + 2, -1)
        if rooms
        else np.zeros((0, 0, 0), np.int32),
        strides=any_room.strides,
        unit=int(any_room.unit),
        num_layers=int(space.num_layers),
        max_stages=int(most),
        load_balance=bool(space.spec.load_balance),
        left=np.zeros(groups, np.int64),
        caps=np.zeros(most, np.int64),
        times=np.zeros((3, most)),
        row=np.zeros(2 + 2 * most, np.int64),
        chosen=np.zeros(count, np.int64),
        slots=np.zeros(1 << (2 * bound).bit_length(), np.int64),
        epoch=np.ones(1, np.int64),
    )


def _or_none(index: int | None) -> int:
    return -1 if index is None else index


def _index(space: Space, m: int) -> int:
    return space.num_microbatches.index(m) if m in space.num_microbatches else -1


def _option_columns(space: Space, units: Ints, step: Ints) -> Ints:
    """(K, ON_GROUP + G) what the moves look up of every option."""
    groups = len(space.num_devices)
    columns = np.full((len(space.options), ON_GROUP + groups), -1, np.int64)
    for k, option in enumerate(space.options):
        (a, tp, dp), (b, tp_b, dp_b) = option.parts[0], option.parts[-1] if option.partner else (0, 0, 0)
        columns[k, :MODE] = (
            *(a, tp * dp, units[k, a]),
            *(b, tp_b * dp_b, units[k, b] if option.partner else 0),
            step[k],
            option.recompute == space.spec.recompute[0],
            *map(_or_none, (moves.scaled(space, option, 2, 0.5), moves.scaled(space, option, 0.5, 2))),
            *map(_or_none, (moves.scaled(space, option, 1, 2), moves.scaled(space, option, 1, 0.5))),
            _or_none(moves.half(space, option)),
            *(_or_none(moves.with_recompute(space, option, way)) for way in (1, -1)),
        )
        columns[k, MODE:ON_GROUP] = [_or_none(moves.with_mode(space, option, mode)) for mode in RECOMPUTE_MODES]
        columns[k, ON_GROUP:] = [_or_none(moves.on_group(space, option, group)) for group in range(groups)]
    return columns


def _largest_idle(space: Space) -> Ints:
    """(M, G, most devices + 1) `moves.largest_idle` for every number of idle devices."""
    table = np.full((len(space.num_microbatches), len(space.num_devices), max(space.num_devices) + 1), -1, np.int64)
    for i, m in enumerate(space.num_microbatches):
        best: list[dict[int, tuple[int, int]]] = [{} for _ in space.num_devices]
        for k, option in enumerate(space.options):
            if option.partner is None and space.problem.global_batch_size // m % option.dp == 0:
                of_size, size = best[option.group], option.num_devices
                of_size[size] = min(of_size.get(size, (option.tp, k)), (option.tp, k))
        for group, of_size in enumerate(best):
            for size in sorted(of_size):
                table[i, group, size:] = of_size[size][1]
    return table


# ------------------------------------------------------------------------------------ layers by speed
@jit
def water_fill(seconds_per_layer, fixed_s, caps, p, num_layers, next_s, layers):
    """Fill `layers` of p stages as `balance.water_fill` does; False if they cannot be placed. `next_s` is overwritten.

    With the level at which sum_i max(1, (level - fixed_i) / seconds_i) is all layers, no stage ends up lower than the
    level or its cap: else every layer given so far ended below the level, and fewer than all would be given. So the
    greedy choice starts there, and has at most one layer per stage left to give besides those that caps turn away.
    """
    total = 0
    for i in range(p):
        if caps[i] < 1:
            return False
        total += caps[i]
    if num_layers < p or total < num_layers:
        return False
    for i in range(p):
        next_s[i] = 1.0 / seconds_per_layer[i]
    level, above, before = np.inf, p, p + 1  # stages that the level gives more than one layer
    while above < before and above > 0:
        before = above
        work, rate = float(num_layers), 0.0
        for i in range(p):
            if fixed_s[i] + seconds_per_layer[i] <= level:
                work += fixed_s[i] * next_s[i]
                rate += next_s[i]
            else:
                work -= 1.0
        level = work / rate
        above = 0
        for i in range(p):
            if fixed_s[i] + seconds_per_layer[i] <= level:
                above += 1
    left = num_layers
    for i in range(p):
        lowest = (level - fixed_s[i]) * next_s[i] - 1e-3  # far more than rounding can add
        layers[i] = min(int(lowest), caps[i]) if lowest >= 2.0 else 1
        left -= layers[i]
    if left < 0:
        left = num_layers - p
        for i in range(p):
            layers[i] = 1
    for i in range(p):
        next_s[i] = fixed_s[i] + (layers[i] + 1) * seconds_per_layer[i] if layers[i] < caps[i] else np.inf
    for _ in range(left):
        first = 0
        for i in range(1, p):
            if next_s[i] < next_s[first]:
                first = i
        layers[first] += 1
        if layers[first] < caps[first]:
            next_s[first] = fixed_s[first] + (layers[first] + 1) * seconds_per_layer[first]
        else:
            next_s[first] = np.inf
    return True


@jit
def set_caps(nb, code):
    """Fill `nb.caps` as `Tables.caps`; whether they hold the layers, each stage at least one."""
    mi, p = code[0], code[1]
    total, lowest = 0, 1
    for i in range(p):
        position, s = 0, p - i
        if i == 0:
            position |= FIRST
        if s == 1:
            position |= LAST
        cap = nb.most[mi, position, s, code[2 + i]]
        nb.caps[i] = cap
        total += cap
        lowest = min(lowest, cap)
    return lowest > 0 and total >= nb.num_layers


@jit
def set_left(nb, code):
    """Fill `nb.left` with the idle devices; whether no group is over-used."""
    left, o = nb.left, nb.option
    for g in range(len(left)):
        left[g] = nb.devices[g]
    for i in range(code[1]):
        k = code[2 + i]
        left[o[k, GROUP_A]] -= o[k, DEVICES_A]
        left[o[k, GROUP_B]] -= o[k, DEVICES_B]
    for g in range(len(left)):  # noqa: SIM110 a loop is what compiles to one
        if left[g] < 0:
            return False
    return True


@jit
def fill_layers(nb, code):
    """Give out the layers within `nb.caps`; False if they cannot be placed."""
    mi, p, S = code[0], code[1], nb.max_stages
    each, fixed = nb.times[0], nb.times[1]
    for i in range(p):
        each[i] = nb.seconds[mi, code[2 + i], 0] if nb.load_balance else 1.0
        fixed[i] = 0.0
    if nb.load_balance:
        fixed[0] += nb.seconds[mi, code[2], 1]
        fixed[p - 1] += nb.seconds[mi, code[1 + p], 2]
    for i in range(p, S):
        code[2 + S + i] = 0
    return water_fill(each, fixed, nb.caps, p, nb.num_layers, nb.times[2], code[2 + S :])


@jit
def decode(nb, code):
    """Fill the layers of a row from its options, `Space.decode`; False if they do not fit. Devices are not checked."""
    return set_caps(nb, code) and fill_layers(nb, code)


@jit
def holds(nb, code):
    """`Space.holds`."""
    return set_left(nb, code) and set_caps(nb, code)


# ---------------------------------------------------------------------------------------------- moves
@jit
def copy(source, target):
    """Copy a row; a loop, for `target[:] = source` would allot memory in case the two overlap."""
    for x in range(len(source)):
        target[x] = source[x]


@jit
def same(a, b):
    """Whether two rows are equal."""
    for x in range(len(a)):  # noqa: SIM110 a loop is what compiles to one
        if a[x] != b[x]:
            return False
    return True


@jit
def shifted(nb, code, source, target, out):
    """Move one layer from stage `source` to stage `target`; False if it has but one or there is no room."""
    p, S = code[1], nb.max_stages
    if not (0 <= source < p and 0 <= target < p) or code[2 + S + source] == 1:
        return False
    set_caps(nb, code)
    if code[2 + S + target] >= nb.caps[target]:
        return False
    copy(code, out)
    out[2 + S + source] -= 1
    out[2 + S + target] += 1
    return True


@jit
def changed_options(nb, code, kind, i, argument, out):
    """Micro-batches and options after a move that changes them; False if it makes no sense. Memory is not checked."""
    p, S, o = code[1], nb.max_stages, nb.option
    if kind == MICROBATCHES:
        mi = nb.other_count[code[0], 0 if argument > 0 else 1]
        if mi < 0:
            return False
        for j in range(p):
            k = nb.converted[mi, code[2 + j]]
            if k < 0:
                return False
            out[2 + j] = k
        for j in range(p, S):
            out[2 + j] = 0
        out[0], out[1] = mi, p
        return True
    if not 0 <= i < p:
        return False
    k = code[2 + i]
    taken = given = 1  # stages i, ... that make way, and options that come: `new`, then `then`
    new = then = -1
    if kind == TP:
        new = o[k, TP_UP if argument > 0 else TP_DOWN]
    elif kind == DEVICES:
        new = o[k, DP_UP if argument > 0 else DP_DOWN]
    elif kind == RECOMPUTE:
        new = o[k, HEAVIER if argument > 0 else LIGHTER]
    elif kind == GROUP:
        new = o[k, ON_GROUP + argument]
    elif kind == REMOVE:
        given, new = 0, 0 if p > 1 else -1
    elif kind == SPLIT:
        given, new = 2, o[k, HALF]
        then = new
    elif kind == INSERT:
        set_left(nb, code)
        idle = nb.left[argument]
        given, new = 2, k
        then = nb.largest_idle[code[0], argument, idle] if idle >= 0 else -1
    elif i < p - 1:
        taken, other = 2, code[3 + i]
        if kind == SWAP:
            given = 2
            new, then = (other, k) if other != k else (-1, -1)
        else:  # merge
            new = o[k, DP_UP] if k == other else -1
            if new < 0:
                mine = o[k, DEVICES_A] + o[k, DEVICES_B]
                new = k if mine >= o[other, DEVICES_A] + o[other, DEVICES_B] else other
    after = p - taken + given
    if new < 0 or (given == 2 and then < 0) or after > S:
        return False
    out[0], out[1] = code[0], after
    for j in range(i):
        out[2 + j] = code[2 + j]
    if given > 0:
        out[2 + i] = new
    if given > 1:
        out[3 + i] = then
    for j in range(i + given, after):
        out[2 + j] = code[2 + j + taken - given]
    for j in range(after, S):
        out[2 + j] = 0
    return True


@jit
def apply(nb, code, kind, stage, argument, out):
    """Write the plan after a move to `out`, `moves.apply`; False (and anything in `out`) if the move is not legal."""
    if kind == SHIFT:
        return shifted(nb, code, stage, stage + argument, out)
    if kind == BALANCE:
        copy(code, out)
        return decode(nb, out) and not same(code, out)
    return changed_options(nb, code, kind, stage, argument, out) and holds(nb, out) and fill_layers(nb, out)


@jit
def is_legal(nb, code, kind, stage, argument):
    """`moves.is_legal`: whether `apply` would give a plan, without balancing any layers."""
    if kind in (SHIFT, BALANCE):
        return apply(nb, code, kind, stage, argument, nb.row)
    return changed_options(nb, code, kind, stage, argument, nb.row) and holds(nb, nb.row)


@jit
def legal_mask(nb, code, edits, out):
    """Fill `out` (booleans) with which of the coded moves are legal; returns how many."""
    count = 0
    for x in range(len(edits)):
        out[x] = is_legal(nb, code, edits[x, 0], edits[x, 1], edits[x, 2])
        count += out[x]
    return count


@jit
def random_neighbour(nb, code, edits, numbers, out):
    """Write a random neighbour of one row to `out`."""
    n = len(edits)
    for y in range(TRIES - 1 if n > 0 else 0):
        x = int(numbers[y] * n)
        if apply(nb, code, edits[x, 0], edits[x, 1], edits[x, 2], out):
            return
    legal = 0
    for x in range(n):
        legal += is_legal(nb, code, edits[x, 0], edits[x, 1], edits[x, 2])
    if legal > 0:
        legal = int(numbers[TRIES - 1] * legal)
        for x in range(n):
            if apply(nb, code, edits[x, 0], edits[x, 1], edits[x, 2], out):
                legal -= 1
                if legal < 0:
                    return
    copy(code, out)


@jit
def _random_neighbours(nb, codes, edits, numbers, out):
    for x in range(len(codes)):
        random_neighbour(nb, codes[x], edits, numbers[x], out[x])


def random_neighbours(nb: Neighbourhood, codes: Ints, edits: Ints, rng: np.random.Generator, out: Ints) -> None:
    """Write a random neighbour of each row to `out`, `moves.random_neighbour`; `out` must be another array.

    Random numbers are drawn here, not in the kernel: numba runs Python to take a generator, where Ctrl-C kills it.
    """
    _random_neighbours(nb, codes, edits, rng.random((len(codes), TRIES)), out)


# --------------------------------------------------------------------------------------------- relief
@jit
def keep_fresh(nb, code, out, count):
    """Keep row `count` of `out` unless it is `code` or an earlier row; the number of rows then."""
    row = out[count]
    if same(row, code):
        return count
    mixed = np.uint64(14695981039346656037)  # FNV-1a over words, with its high bits folded in
    for x in range(len(row)):
        mixed = (mixed ^ np.uint64(row[x])) * np.uint64(1099511628211)
        mixed ^= mixed >> np.uint64(29)
    epoch, mask = nb.epoch[0], len(nb.slots) - 1
    slot = np.int64(mixed & np.uint64(mask))
    while nb.slots[slot] >= epoch:
        if same(row, out[nb.slots[slot] - epoch]):
            return count
        slot = (slot + 1) & mask
    nb.slots[slot] = epoch + count
    return count + 1


@jit
def shapes(nb, others, stage, k, code, out, count):
    """Add the plans with option k's shape at `stage`, lightest recomputation first, none heavier than memory asks."""
    for mode in range(MODES):
        heavier = nb.option[k, MODE + mode]
        if heavier < 0:
            continue
        row = out[count]
        copy(others, row)
        row[2 + stage] = heavier
        if not set_left(nb, row):
            return count  # no mode has fewer devices
        if set_caps(nb, row) and fill_layers(nb, row):
            has_room = row[2 + nb.max_stages + stage] < nb.caps[stage]
            count = keep_fresh(nb, code, out, count)
            if has_room:
                return count
    return count


@jit
def relief(nb, code, stage, out):
    """Write the plans of `moves.relief` to the first rows of `out`, in its order; returns how many.

    out: (most_relief(space) + 1, 2+2S); the row after those found is overwritten.
    """
    p, o, groups = code[1], nb.option, len(nb.devices)
    nb.epoch[0] += len(out) + 1
    copy(code, out[0])
    count = keep_fresh(nb, code, out, 0) if decode(nb, out[0]) else 0
    for k in range(len(o)):
        if o[k, IS_BASE] == 0:
            continue
        count = shapes(nb, code, stage, k, code, out, count)
        copy(code, nb.row)
        nb.row[2 + stage] = k
        if set_left(nb, nb.row):
            continue
        short_a = nb.left[o[k, GROUP_A]] < 0
        short_b = o[k, DEVICES_B] > 0 and nb.left[o[k, GROUP_B]] < 0
        for j in range(p):
            other = code[2 + j]
            g, smaller = o[other, GROUP_A], o[other, HALF]
            lacking = (short_a and g == o[k, GROUP_A]) or (short_b and g == o[k, GROUP_B])
            if j != stage and smaller >= 0 and lacking:
                copy(code, nb.row)
                nb.row[2 + j] = smaller
                count = shapes(nb, nb.row, stage, k, code, out, count)
    for j in range(p):
        if j != stage:
            row = out[count]
            copy(code, row)
            row[2 + stage], row[2 + j] = code[2 + j], code[2 + stage]
            if holds(nb, row) and fill_layers(nb, row):
                count = keep_fresh(nb, code, out, count)
            if shifted(nb, code, stage, j, out[count]):
                count = keep_fresh(nb, code, out, count)
    for x in range(6 + 2 * groups):
        kind, i, argument = MICROBATCHES, 0, 1  # the order of `structural` in moves.relief
        if x < 2:
            kind, i = (SPLIT, REMOVE)[x], stage
        elif x < 4:
            kind, i = MERGE, stage - (x - 2)
        elif x < 4 + 2 * groups:
            kind, i, argument = INSERT, stage - 1 + (x - 4) // groups, (x - 4) % groups
        elif x == 5 + 2 * groups:
            argument = -1
        if apply(nb, code, kind, i, argument, out[count]):
            count = keep_fresh(nb, code, out, count)
    return count


# ---------------------------------------------------------------------------------------------- draws
@jit
def choices(nb, f, s, held, ends):
    """Fill `nb.chosen` with the options that stage s from the end may get, as the front stage or not; how many."""
    position, o, left = 0, nb.option, nb.left
    if s == 1:
        position |= LAST
    if ends:
        position |= FIRST
    most = nb.most[nb.feasible[f], position, s]
    state = 0
    for g in range(len(left)):
        state += left[g] // nb.unit * nb.strides[g]
    count = 0
    if not ends and s >= nb.num_layers:
        return 0
    for k in range(len(most)):
        a, b = o[k, GROUP_A], o[k, GROUP_B]
        if most[k] <= 0 or left[a] < o[k, DEVICES_A] or left[b] < o[k, DEVICES_B]:
            continue
        total = held + most[k]
        if not ends:
            if left[a] // nb.unit < o[k, UNITS_A] or left[b] // nb.unit < o[k, UNITS_B]:
                continue
            total += nb.room[f, s + 1, state - o[k, STEP]]
        if total >= nb.num_layers:
            nb.chosen[count] = k
            count += 1
    return count


@jit
def draw_one(nb, numbers, row):
    """Fill a row with a random plan that fits; some micro-batch count must be feasible."""
    S, o, left = nb.max_stages, nb.option, nb.left
    f = int(numbers[0] * len(nb.feasible))
    aim = nb.least[f] + int(numbers[1] * (S + 1 - nb.least[f]))
    for x in range(len(row)):
        row[x] = 0
    row[0] = nb.feasible[f]
    copy(nb.devices, left)
    held = 0
    for s in range(1, S + 1):
        ends = s >= aim
        count = choices(nb, f, s, held, ends)
        if count == 0:
            ends = not ends
            count = choices(nb, f, s, held, ends)
        k = nb.chosen[int(numbers[1 + s] * count)]
        row[1], row[1 + s] = s, k
        if ends:
            break
        left[o[k, GROUP_A]] -= o[k, DEVICES_A]
        left[o[k, GROUP_B]] -= o[k, DEVICES_B]
        held += nb.most[row[0], LAST if s == 1 else 0, s, k]
    p = row[1]
    for i in range(p // 2):  # drawn from the last stage to the first
        row[2 + i], row[1 + p - i] = row[1 + p - i], row[2 + i]
    decode(nb, row)


@jit
def _draw(nb, numbers, out):
    for x in range(len(out)):
        draw_one(nb, numbers[x], out[x])


def draw(nb: Neighbourhood, rng: np.random.Generator, out: Ints) -> bool:
    """Fill every row of `out` with a random plan that fits, `Space.draw`; False if no micro-batch count has one."""
    if len(nb.feasible) == 0:
        return False
    _draw(nb, rng.random((len(out), 2 + nb.max_stages)), out)
    return True
