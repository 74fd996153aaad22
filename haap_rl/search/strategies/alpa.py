"""How Alpa chooses: a dynamic program over stages cuts layers and devices at once.

After Zheng et al. 2022 (OSDI, arXiv 2201.12023), section 5: the cluster is cut into submeshes of 1, 2, 4, ... devices
of a node or of whole nodes, all of which are used. A stage takes on its submesh what its fastest (tp, dp) takes among
those that fit, the s-th from the end holding s micro-batches. Over all ways to cut, it makes least

    sum_i t_i + (m - 1) max_i t_i

one pass per limit t_max of the slowest stage. m and whether to rematerialise are inputs of Alpa; its users try several,
so the program runs for every m and recompute mode of the space, and each plan is run.

Deviations: (tp, dp) of whole layers for the operators' sharding that an integer program chooses in Alpa; layers as they
are, where Alpa clusters operators into layers first; sizes of the declared space, so no submesh of, say, three nodes;
the limits are taken downwards (`stages.squeeze`), with the same minimum. As in Alpa, sends and the gradient's
synchronisation are no part of what the program makes least; the estimator prices them afterwards. Deterministic; on a
mixed cluster see `strategies.one_type`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from haap_rl.cost.estimator import FIRST, LAST
from haap_rl.problem.plan import Problem
from haap_rl.search.base import Objective
from haap_rl.search.strategies import one_type
from haap_rl.search.strategies.stages import Solved, modes, note_if_nothing, squeeze
from haap_rl.space.space import Genome, Space


class Alpa:
    """The inter-operator dynamic program, for every number of micro-batches and recompute mode.

    devices   of a mixed cluster: all, part (the largest of one type), or None: both
    """

    def __init__(self, devices: str | None = None) -> None:
        self.devices = one_type.one_of("search=alpa", devices)

    def search(self, problem: Problem, objective: Objective, rng: np.random.Generator) -> None:
        solves = states = 0
        views = one_type.views(objective, self.devices)
        try:
            for view in views:
                for m in view.space.num_microbatches:
                    for mode in modes(view.space):
                        program = InterOperator(objective, view.space, m, mode)
                        best, passes = squeeze(program.solve, m)
                        solves, states = solves + passes, states + program.states
                        if best is not None:
                            view.run([program.genome(best)])
            note_if_nothing(objective, "Alpa")
        finally:
            one_type.note_best(objective, {view.groups: view.best_s for view in views})
            objective.note(f"Alpa's dynamic program: {solves:,} solves, {states:,} states")


class Submesh(NamedTuple):
    """A stage as the tables know it: the s-th from the end, on submesh c, with so many layers."""

    foremost: bool
    s: int
    c: int
    layers: int


class InterOperator:
    """Alpa's dynamic program on one device group at m micro-batches, every stage with one recompute mode.

    sizes    (C,) devices of the submeshes
    inner    [s] (C, L+1) least seconds of n layers as the s-th stage from the end, infinite where nothing fits
    front    [s] the same of the foremost of s stages
    options  of both, the option behind each
    states   (stages, layers, devices) reached, over all passes
    """

    def __init__(self, objective: Objective, space: Space, m: int, mode: str) -> None:
        self.objective, self.space, self.m = objective, space, m
        (self.num_devices,) = space.num_devices
        per_node = space.problem.cluster.groups[0].devices_per_node
        shapes: dict[int, list[int]] = {}
        for k, option in enumerate(space.options):
            size = option.num_devices
            in_node = size <= per_node and size & (size - 1) == 0
            if option.recompute == mode and (in_node or size % per_node == 0) and space.sizes(m, k) is not None:
                shapes.setdefault(size, []).append(k)
        self.sizes = sorted(shapes)
        self.states = 0
        self.inner, self.front = {}, {}  # type: dict[int, npt.NDArray[np.float64]], dict[int, npt.NDArray[np.float64]]
        self.options: dict[tuple[bool, int], npt.NDArray[np.int64]] = {}
        for s in range(1, space.max_stages + 1):
            for foremost, tables in ((False, self.inner), (True, self.front)):
                tables[s], self.options[foremost, s] = self._fastest(shapes, s, foremost)

    def _fastest(
        self, shapes: dict[int, list[int]], s: int, foremost: bool
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """(C, L+1) seconds of the fastest option that fits, by submesh and layers, and which one it is."""
        tables, most = self.space.tables(self.m), self.space.num_layers
        position = (FIRST if foremost else 0) | (LAST if s == 1 else 0)
        layers = np.arange(most + 1)
        seconds = np.full((len(self.sizes), most + 1), math.inf)
        options = np.zeros((len(self.sizes), most + 1), np.int64)
        times = tables.forward_s + tables.backward_s  # (K, 3) of embedding, layer, head
        for c, size in enumerate(self.sizes):
            each = np.array(shapes[size])
            ends = times[each, 0] * bool(position & FIRST) + times[each, 2] * bool(position & LAST)
            here = ends[:, None] + times[each, 1][:, None] * layers
            caps = tables.max_layers[each, position, s]
            here[(layers < 1) | (layers > caps[:, None])] = math.inf
            fastest = here.argmin(0)
            seconds[c], options[c] = here[fastest, layers], each[fastest]
        return seconds, options

    def solve(self, limit_s: float) -> Solved[list[Submesh]] | None:
        """The stages, front to back, with the least sum of times and none above the limit; None if there are none."""
        self.objective.check_seconds()
        layers, devices = self.space.num_layers, self.num_devices
        least = [np.full((layers + 1, devices + 1), math.inf)]  # [s][layers, devices] of the last s stages
        least[0][0, 0] = 0.0
        best_s, foremost = math.inf, Submesh(True, 0, 0, 0)
        for s in range(1, self.space.max_stages + 1):
            before = least[s - 1]
            for c, n, seconds in self._within(self.front[s], limit_s):
                total_s = seconds + before[layers - n, devices - self.sizes[c]]
                if total_s < best_s:
                    best_s, foremost = float(total_s), Submesh(True, s, c, n)
            here = np.full_like(before, math.inf)
            for c, n, seconds in self._within(self.inner[s], limit_s):
                size = self.sizes[c]
                target = here[n:, size:]
                np.minimum(target, before[: layers + 1 - n, : devices + 1 - size] + seconds, out=target)
            least.append(here)
            reached = int(np.isfinite(here).sum())
            self.states += reached
            if not reached:
                break
        if best_s == math.inf:
            return None
        stages = self._traced(least, foremost, limit_s)
        return Solved(best_s, max(self._seconds(stage) for stage in stages), stages)

    def _within(self, table: npt.NDArray[np.float64], limit_s: float) -> Iterator[tuple[int, int, float]]:
        """(submesh, layers, seconds) of what is possible and not above the limit."""
        for c, n in zip(*np.nonzero((table <= limit_s) & np.isfinite(table)), strict=True):
            if self.sizes[c] <= self.num_devices:
                yield int(c), int(n), float(table[c, n])

    def _seconds(self, stage: Submesh) -> float:
        return float((self.front if stage.foremost else self.inner)[stage.s][stage.c, stage.layers])

    def _traced(self, least: list[npt.NDArray[np.float64]], foremost: Submesh, limit_s: float) -> list[Submesh]:
        """The stages, front to back, behind the least sum with this foremost one."""
        stages = [foremost]
        layers, devices = self.space.num_layers - foremost.layers, self.num_devices - self.sizes[foremost.c]
        for s in range(foremost.s - 1, 0, -1):
            stage = next(
                Submesh(False, s, c, n)
                for c, n, seconds in self._within(self.inner[s], limit_s)
                if n <= layers
                and self.sizes[c] <= devices
                and least[s - 1][layers - n, devices - self.sizes[c]] + seconds == least[s][layers, devices]
            )
            stages.append(stage)
            layers, devices = layers - stage.layers, devices - self.sizes[stage.c]
        return stages

    def genome(self, solved: Solved[list[Submesh]]) -> Genome:
        """The plan of a solution, in the space of the view."""
        options = tuple(int(self.options[stage.foremost, stage.s][stage.c, stage.layers]) for stage in solved.choice)
        return Genome(self.m, options, tuple(stage.layers for stage in solved.choice))
