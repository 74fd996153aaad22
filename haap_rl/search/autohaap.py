"""The baseline heuristic after AutoHAAP (HPCA 2026; only its abstract is public): relieve the bottleneck stage.

From a memory-aware start, price every move that relieves the stage with the largest load (one that does not fit
first), take the best; where none improves, try the next loaded stages; at a local optimum restart from another start.
What the abstract names is here: the memory-aware initialisation draws the starts, the load-balancing balancer gives
each candidate its layers, the estimator's tables make a what-if cheap. The neighbourhood is our own choice.
"""

from __future__ import annotations

import numpy as np

from haap_rl.problem.errors import positive_int
from haap_rl.problem.plan import Problem
from haap_rl.search.base import Objective
from haap_rl.space import kernels


class AutoHAAP:
    """Bottleneck relief with restarts.

    starts: plans drawn for each descent, of which the best is descended from.
    """

    def __init__(self, starts: int = 100) -> None:
        self.starts = positive_int("search=autohaap", "starts", starts)

    def search(self, problem: Problem, objective: Objective, rng: np.random.Generator) -> None:
        while True:
            self.descend(objective, rng)

    def descend(self, objective: Objective, rng: np.random.Generator, most: int | None = None) -> None:
        """From a fresh start down to a local optimum, or until `most` evaluations."""
        space = objective.space
        until = None if most is None else objective.evaluations + most
        neighbours = np.zeros((kernels.most_relief(space) + 1, 2 + 2 * space.max_stages), np.int64)
        codes = space.draws(rng, self.starts if most is None else min(self.starts, most))
        prices = objective.many(codes)
        code, rank = codes[prices.best], prices.rank(prices.best)
        improved = True
        while improved:
            improved = False
            loads_s, bottleneck = objective.loads_s(code)
            for stage in sorted(range(len(loads_s)), key=lambda i: (i != bottleneck, -loads_s[i])):
                count = kernels.relief(space.neighbourhood, code, stage, neighbours)
                if until is not None:
                    count = min(count, until - objective.evaluations)
                if count == 0:
                    continue
                prices = objective.many(neighbours[:count], np.inf if rank[0] else rank[2])
                if prices.rank(prices.best) < rank:
                    code, rank, improved = neighbours[prices.best].copy(), prices.rank(prices.best), True
                    break
