"""Simulated annealing on the neighbour moves of the space (Kirkpatrick, Gelatt, Vecchi 1983)."""

from __future__ import annotations

import math

import numpy as np

from haap_rl.problem.errors import positive_float, positive_int
from haap_rl.problem.plan import Problem
from haap_rl.search.base import Objective
from haap_rl.space import moves


class Annealing:
    """Metropolis walks on the log of the iteration time, each cooled geometrically.

    start, end   temperatures: a plan e^T times slower is accepted with probability 1/e
    cycle        moves of one cooling, after which it starts anew (fewer where the budget is smaller)
    starts       plans drawn per cooling, of which the best is walked from
    """

    def __init__(self, start: float = 0.02, end: float = 0.0005, cycle: int = 1500, starts: int = 100) -> None:
        where = "search=annealing"
        self.start, self.end = positive_float(where, "start", start), positive_float(where, "end", end)
        self.cycle, self.starts = positive_int(where, "cycle", cycle), positive_int(where, "starts", starts)

    def search(self, problem: Problem, objective: Objective, rng: np.random.Generator) -> None:
        space = objective.space
        edits = moves.edits(space)
        while True:
            genome, estimate = objective.best_of([space.draw(rng) for _ in range(self.starts)])
            energy = estimate.energy
            total = self.cycle if objective.remaining is None else min(self.cycle, objective.remaining)
            for step in range(total):
                temperature = self.start * (self.end / self.start) ** (step / total)
                neighbour = moves.random_neighbour(space, genome, edits, rng)
                candidate = objective(space.plan(neighbour)).energy
                if candidate <= energy or rng.random() < math.exp((energy - candidate) / temperature):
                    genome, energy = neighbour, candidate
