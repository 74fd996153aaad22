"""Simulated annealing on the neighbour moves of the space (Kirkpatrick, Gelatt, Vecchi 1983)."""

from __future__ import annotations

import math

import numpy as np

from haap_rl.problem.plan import Problem
from haap_rl.search.base import Objective
from haap_rl.space import moves


class Annealing:
    """Metropolis walk on the log of the iteration time, cooled geometrically over the budget.

    start, end   temperatures: a plan e^T times slower is accepted with probability 1/e
    cycle        evaluations of one cooling where the budget does not limit them
    starts       plans drawn first, of which the best is walked from
    """

    def __init__(self, start: float = 0.1, end: float = 0.002, cycle: int = 10_000, starts: int = 20) -> None:
        self.start, self.end, self.cycle, self.starts = start, end, cycle, starts

    def search(self, problem: Problem, objective: Objective, rng: np.random.Generator) -> None:
        space = objective.space
        edits = moves.edits(space)
        while True:
            total = objective.remaining or self.cycle
            genomes = [space.draw(rng) for _ in range(self.starts)]
            estimates = objective.many([space.plan(genome) for genome in genomes])
            best = min(range(self.starts), key=lambda i: objective.rank(estimates[i]))
            genome, energy = genomes[best], estimates[best].energy
            for step in range(total):
                temperature = self.start * (self.end / self.start) ** (step / total)
                neighbour = moves.random_neighbour(space, genome, edits, rng)
                candidate = objective(space.plan(neighbour)).energy
                if candidate <= energy or rng.random() < math.exp((energy - candidate) / temperature):
                    genome, energy = neighbour, candidate
