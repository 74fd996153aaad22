"""Crossover of the genetic algorithm, compiled; rows as in `space.kernels`. Twin of `search.ga.cross`.

Nothing here knows what a plan costs. The random cuts are drawn outside.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from haap_rl.cost.compiling import jit
from haap_rl.space.kernels import DEVICES_A, DEVICES_B, GROUP_A, GROUP_B, Neighbourhood, copy, fill_layers, holds

Ints = npt.NDArray[np.int64]


def as_table(smaller: list[list[tuple[int, ...]]]) -> Ints:
    """(M, K, most) `ga.smaller_options`, -1 where there are fewer."""
    most = max(len(found) for of_count in smaller for found in of_count)
    return np.array([[(*found, *[-1] * (most - len(found))) for found in of_count] for of_count in smaller], np.int64)


@jit
def add_stage(nb, smaller, k, row):
    """Append to a row the largest option like k for which `nb.left` has the devices, if any."""
    o, left, p = nb.option, nb.left, row[1]
    for x in range(smaller.shape[2]):
        s = smaller[row[0], k, x]
        if s < 0 or p == nb.max_stages:
            return
        a, b = o[s, GROUP_A], o[s, GROUP_B]
        if o[s, DEVICES_A] <= left[a] and o[s, DEVICES_B] <= left[b]:
            left[a] -= o[s, DEVICES_A]
            left[b] -= o[s, DEVICES_B]
            row[2 + p] = s
            row[1] += 1
            return


@jit
def cross_one(nb, smaller, mother, father, cut, row):
    """Fill a row with the child of two; False (and anything in the row) if there is none."""
    S = nb.max_stages
    for x in range(len(row)):
        row[x] = 0
    row[0] = mother[0]
    copy(nb.devices, nb.left)
    end = begin = 0
    for i in range(mother[1]):
        end += mother[2 + S + i]
        if end <= cut:
            add_stage(nb, smaller, mother[2 + i], row)
    for i in range(father[1]):
        if begin >= cut:
            add_stage(nb, smaller, father[2 + i], row)
        begin += father[2 + S + i]
    return row[1] > 0 and holds(nb, row) and fill_layers(nb, row)


@jit
def _cross(nb, smaller, mothers, fathers, which, cuts, made, row):
    count = 0
    for x in range(len(which)):
        i = which[x]
        if cross_one(nb, smaller, mothers[i], fathers[i], cuts[x], row):
            copy(row, mothers[i])
            made[count] = i
            count += 1
    return count


def cross(nb: Neighbourhood, smaller: Ints, mothers: Ints, fathers: Ints, which: Ints, cuts: Ints) -> Ints:
    """Put children in place of the mothers `which`, cut at the layers `cuts`; the indices of those that have one.

    smaller: `as_table`.
    """
    made = np.empty(len(which), np.int64)
    return made[: _cross(nb, smaller, mothers, fathers, which, cuts, made, np.empty(mothers.shape[1], np.int64))]
