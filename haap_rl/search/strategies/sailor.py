"""How Sailor chooses: even layers, one dp for all stages, the least tp that fits on each device type, places by DP.

After Strati et al. 2025 (SOSP, arXiv 2504.17096): for every pipeline depth, micro-batch and dp, a dynamic program goes
over the stages and the devices left in each region and of each type. A stage's replicas have, per device type, the
least tp inside a node with which they fit; that prunes most of the space. What is made least is

    sum_i t_i + (m - 1) max_i t_i + sum of the sends between stages

per depth, micro-batch and dp; the estimator, as Sailor's simulator, says which of those plans is fastest.

Deviations: a region is a device group; replicas of one stage sit on one device group, where Sailor may mix types in a
stage; recomputation is an input, so every mode of the space is tried; cost in money is not looked at. Deterministic: it
ends when every combination is planned and priced.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from haap_rl.cost.estimator import FIRST, LAST
from haap_rl.problem.plan import Problem, even_layers
from haap_rl.search.base import Objective
from haap_rl.search.strategies.stages import Solved, modes, send_s, squeeze
from haap_rl.space.options import Option
from haap_rl.space.space import Genome, Space


class Sailor:
    """Enumerates depth, micro-batches, dp and recompute mode, and places each by a dynamic program."""

    def search(self, problem: Problem, objective: Objective, rng: np.random.Generator) -> None:
        space, solves, states = objective.space, 0, 0
        degrees = sorted({option.dp for option in space.options})
        try:
            for m in space.num_microbatches:
                found = []
                for p in range(1, space.max_stages + 1):
                    for dp in degrees:
                        for mode in modes(space):
                            objective.check_seconds()
                            regions = Regions(space, m, p, dp, mode)
                            best, passes = squeeze(regions.solve, m) if regions.possible else (None, 0)
                            solves, states = solves + passes, states + regions.states
                            if best is not None:
                                found.append(regions.genome(best))
                if found:
                    objective.many(space.encode(found))
        finally:
            objective.note(f"Sailor's dynamic program: {solves:,} solves, {states:,} states")


Placed = Solved[tuple[int, ...]]  # stages placed so far, the option of each


class Regions:
    """Sailor's dynamic program at m micro-batches: p stages of even layers, each on one of the device groups.

    choices   per stage, per device group with the least tp that fits: (option, seconds per micro-batch)
    states    (stages, device group of the last, devices used of each) reached, over all passes
    """

    def __init__(self, space: Space, m: int, p: int, dp: int, mode: str) -> None:
        self.space, self.m, self.layers = space, m, even_layers(space.num_layers, p)
        self.choices = [self._fitting(i, dp, mode) for i in range(p)]
        self.possible = all(self.choices)
        self.states = 0

    def _fitting(self, i: int, dp: int, mode: str) -> list[tuple[int, float]]:
        space, p, n = self.space, len(self.layers), self.layers[i]
        tables = space.tables(self.m)
        position = FIRST * (i == 0) | LAST * (i == p - 1)
        found = []
        for group in range(len(space.num_devices)):
            for tp in sorted({option.tp for option in space.options}):
                k = space.option_index.get(Option(group, tp, dp, mode))
                fits = k is not None and space.sizes(self.m, k) is not None
                if k is None or not fits or tables.max_layers[k, position, p - i] < n:
                    continue
                seconds = n * tables.layer_s[k]
                seconds += tables.embedding_s[k] * (i == 0) + tables.head_s[k] * (i == p - 1)
                found.append((k, seconds))
                break
        return found

    def solve(self, limit_s: float) -> Placed | None:
        """The places with the least sum of stage times and sends, with no stage slower than the limit."""
        space = self.space
        reached: dict[tuple[int, tuple[int, ...]], Placed] = {(-1, space.num_devices): Solved(0.0, 0.0, ())}
        for choices in self.choices:
            here: dict[tuple[int, tuple[int, ...]], Placed] = {}
            for (_, left), before in reached.items():
                for k, seconds in choices:
                    option = space.options[k]
                    rest = left[option.group] - option.num_devices
                    if seconds > limit_s or rest < 0:
                        continue
                    total_s = before.total_s + seconds + self._sends_s(before.choice[-1:], k)
                    key = option.group, (*left[: option.group], rest, *left[option.group + 1 :])
                    known = here.get(key)
                    if known is None or total_s < known.total_s:
                        here[key] = Solved(total_s, max(before.slowest_s, seconds), (*before.choice, k))
            reached = here
            self.states += len(here)
        return min(reached.values(), key=lambda placed: placed.total_s, default=None)

    def _sends_s(self, before: Sequence[int], k: int) -> float:
        """Seconds of both directions of the boundary in front of a stage; none in front of the first."""
        return sum(2 * send_s(self.space, self.m, sender, k) for sender in before)

    def genome(self, placed: Placed) -> Genome:
        """The plan of a solution."""
        return Genome(self.m, placed.choice, self.layers)
