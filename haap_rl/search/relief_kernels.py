"""What AutoHAAP draws and changes beyond the space's own draws and moves, compiled; rows as in `space.kernels`.

Nothing here knows what a plan costs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from haap_rl.cost.compiling import jit
from haap_rl.space.kernels import (
    DEVICES_A,
    DEVICES_B,
    GROUP_A,
    IS_BASE,
    MODE,
    MODES,
    Neighbourhood,
    copy,
    fill_layers,
    holds,
    relief,
)
from haap_rl.space.space import Space

Ints = npt.NDArray[np.int64]
TRIES = 20  # for a regular plan, before any plan will do


def regular_options(space: Space) -> Ints:
    """(G, X) lightest options with which few enough stages hold all of a group's devices; -1 where there are fewer."""
    of_group: list[list[int]] = [[] for _ in space.num_devices]
    for k, option in enumerate(space.options):
        stages = space.num_devices[option.group] // option.num_devices
        if option.partner is None and option.recompute == space.spec.recompute[0] and stages <= space.max_stages:
            of_group[option.group].append(k)
    most = max(1, *map(len, of_group))
    return np.array([options + [-1] * (most - len(options)) for options in of_group], np.int64)


@jit
def lighten(nb, chosen, first, row):
    """Give stages first[x] to first[x+1] of a row the mode of recomputation of option chosen[x] that memory asks for.

    The lightest with which all alike fit, then run by run a lighter one if that fits too; False if none fits.
    """
    for mode in range(MODES):
        if not set_modes(nb, chosen, first, 0, len(chosen), mode, row) or not holds(nb, row):
            continue
        for x in range(len(chosen)):
            for lighter in range(mode):
                if set_modes(nb, chosen, first, x, x + 1, lighter, row) and holds(nb, row):
                    break
                set_modes(nb, chosen, first, x, x + 1, mode, row)
        return holds(nb, row)
    return False


@jit
def set_modes(nb, chosen, first, begin, end, mode, row):
    """Put the stages of runs `begin` to `end` on their options with a mode; False if the space lacks one."""
    for x in range(begin, end):
        k = nb.option[chosen[x], MODE + mode] if chosen[x] >= 0 else -1
        if k < 0 and first[x + 1] > first[x]:
            return False
        for i in range(first[x], first[x + 1]):
            row[2 + i] = k
    return True


@jit
def regular_one(nb, options, numbers, chosen, first, row):
    """Fill a row with a random regular plan: each device group one run of equal stages, or idle; False if it fails."""
    groups = len(options)
    for x in range(len(row)):
        row[x] = 0
    row[0] = nb.feasible[int(numbers[0] * len(nb.feasible))]
    order = nb.left  # until `holds` needs it
    for x in range(groups):  # each group put before a random one, or last
        place = int(numbers[1 + x] * (x + 1))
        order[x] = order[place]
        order[place] = x
    for x in range(groups):
        group, count = order[x], 0
        while count < options.shape[1] and options[group, count] >= 0:
            count += 1
        choice = int(numbers[1 + groups + x] * (count + (groups > 1)))
        chosen[x] = options[group, choice] if choice < count else -1
        stages = nb.devices[group] // nb.option[chosen[x], DEVICES_A] if chosen[x] >= 0 else 0
        first[x + 1] = first[x] + stages
    row[1] = first[groups]
    return 0 < row[1] <= nb.max_stages and lighten(nb, chosen, first, row) and fill_layers(nb, row)


@jit
def _regular(nb, options, numbers, chosen, first, row, out):
    for x in range(len(out)):
        for y in range(numbers.shape[1]):
            if regular_one(nb, options, numbers[x, y], chosen, first, row):
                copy(row, out[x])
                break


def regular(nb: Neighbourhood, options: Ints, rng: np.random.Generator, out: Ints) -> None:
    """Fill rows of `out` with random regular plans that fit; a row for which none is found in TRIES stays as it is."""
    groups = len(options)
    numbers = rng.random((len(out), TRIES, 1 + 2 * groups))
    _regular(nb, options, numbers, np.zeros(groups, np.int64), np.zeros(groups + 1, np.int64), out[0].copy(), out)


@jit
def reshard(nb, code, stage, out, count):
    """Add to `out` the plans in which all stages alike `stage` change shape, on the same devices; the count then."""
    p, S, o, k = code[1], nb.max_stages, nb.option, code[2 + stage]
    if o[k, DEVICES_B] > 0:
        return count
    alike = 0
    for i in range(p):
        alike += code[2 + i] == k
    devices = alike * o[k, DEVICES_A]
    for other in range(len(o)):
        if o[other, IS_BASE] == 0 or o[other, DEVICES_B] > 0 or o[other, GROUP_A] != o[k, GROUP_A]:
            continue
        stages = devices // o[other, DEVICES_A]
        if stages * o[other, DEVICES_A] != devices or p - alike + stages > S:
            continue
        for mode in range(MODES):
            new = o[other, MODE + mode]
            if new == k:
                break
            row = out[count]
            copy(code, row)
            seen = after = 0
            for i in range(p):  # as many of them in place of the first x stages as their share
                if code[2 + i] != k:
                    row[2 + after] = code[2 + i]
                    after += 1
                    continue
                for _ in range(stages * seen // alike, stages * (seen + 1) // alike):
                    row[2 + after] = new
                    after += 1
                seen += 1
            for i in range(after, S):
                row[2 + i] = 0
            row[1] = after
            if new >= 0 and holds(nb, row) and fill_layers(nb, row):
                count += 1
                break
    return count


@jit
def candidates(nb, code, stage, out):
    """Write to `out` the plans that relieve a stage; how many.

    out: at least `most_relief(space) + 1` rows and one for every option.
    """
    return reshard(nb, code, stage, out, relief(nb, code, stage, out))
