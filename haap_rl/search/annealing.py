"""Simulated annealing on the neighbour moves of the space (Kirkpatrick, Gelatt, Vecchi 1983)."""

from __future__ import annotations

import numpy as np

from haap_rl.problem.errors import positive_float, positive_int
from haap_rl.problem.plan import Problem
from haap_rl.search.base import Objective
from haap_rl.space import kernels, moves


class Annealing:
    """Metropolis walks on the log of the iteration time, some side by side, each cooled geometrically.

    start, end   temperatures: a plan e^T times slower is accepted with probability 1/e
    cycle        moves of one cooling, after which it starts anew (fewer where the budget is smaller)
    chains       walks side by side; their moves are priced as one batch
    starts       plans drawn per walk and cooling, of which the best is walked from
    """

    def __init__(
        self, start: float = 0.01, end: float = 0.002, cycle: int = 300, chains: int = 2, starts: int = 25
    ) -> None:
        where = "search=annealing"
        self.start, self.end = positive_float(where, "start", start), positive_float(where, "end", end)
        self.cycle, self.starts = positive_int(where, "cycle", cycle), positive_int(where, "starts", starts)
        self.chains = positive_int(where, "chains", chains)

    def search(self, problem: Problem, objective: Objective, rng: np.random.Generator) -> None:
        space = objective.space
        edits = kernels.coded(moves.edits(space))
        while True:
            codes = space.draws(rng, self.chains * self.starts)
            energies = objective.many(codes).energy
            best = energies.reshape(self.chains, self.starts).argmin(1) + self.starts * np.arange(self.chains)
            codes, energies = codes[best], energies[best]
            neighbours = np.empty_like(codes)
            total = self.cycle if objective.remaining is None else min(self.cycle, objective.remaining // self.chains)
            for step in range(max(1, total)):
                temperature = self.start * (self.end / self.start) ** (step / max(1, total))
                kernels.random_neighbours(space.neighbourhood, codes, edits, rng, neighbours)
                candidates = objective.many(neighbours).energy
                accepted = candidates <= energies - temperature * np.log(1.0 - rng.random(self.chains))
                codes[accepted], energies[accepted] = neighbours[accepted], candidates[accepted]
