"""Random search: independent draws of the memory-aware initialisation."""

from __future__ import annotations

import numpy as np

from haap_rl.problem.plan import Problem
from haap_rl.search.base import Objective

BATCH = 256  # plans priced at a time


class RandomSearch:
    """Draws plans that fit and forgets them: the baseline that every other searcher must beat."""

    def search(self, problem: Problem, objective: Objective, rng: np.random.Generator) -> None:
        while True:
            objective.many(objective.space.draws(rng, BATCH))
