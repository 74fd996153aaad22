"""The baseline heuristic after AutoHAAP (HPCA 2026; only its abstract is public): relieve the bottleneck stage.

From a memory-aware start, price every move that relieves the stage with the largest load (one that does not fit
first), take the best; where none improves, try the next loaded stages; at a local optimum restart from another start.
What the abstract names is here: the memory-aware initialisation draws the starts, the load-balancing balancer gives
each candidate its layers, the estimator's cache makes a what-if cheap. The neighbourhood is our own choice.
"""

from __future__ import annotations

import numpy as np

from haap_rl.cost.estimate import Estimate
from haap_rl.problem.errors import positive_int
from haap_rl.problem.plan import Problem
from haap_rl.search.base import Objective
from haap_rl.space import moves
from haap_rl.space.space import Genome


class AutoHAAP:
    """Bottleneck relief with restarts.

    starts: plans drawn for each descent, of which the best is descended from.
    """

    def __init__(self, starts: int = 100) -> None:
        self.starts = positive_int("search=autohaap", "starts", starts)

    def search(self, problem: Problem, objective: Objective, rng: np.random.Generator) -> None:
        while True:
            self.descend(objective, rng)

    def descend(self, objective: Objective, rng: np.random.Generator) -> None:
        """From a fresh start down to a local optimum."""
        genome, estimate = objective.best_of([objective.space.draw(rng) for _ in range(self.starts)])
        while (step := self._relieve(objective, genome, estimate)) is not None:
            genome, estimate = step

    def _relieve(self, objective: Objective, genome: Genome, estimate: Estimate) -> tuple[Genome, Estimate] | None:
        """The best neighbour that relieves the most loaded stage that can be relieved, or None at a local optimum."""
        loads = estimate.loads_s
        bottleneck = estimate.bottleneck[0]
        order = sorted(range(len(loads)), key=lambda i: (i != bottleneck, -loads[i]))
        for stage in order:
            neighbours = list(moves.relief(objective.space, genome, stage))
            if not neighbours:
                continue
            neighbour, relieved = objective.best_of(neighbours)
            if objective.rank(relieved) < objective.rank(estimate):
                return neighbour, relieved
        return None
