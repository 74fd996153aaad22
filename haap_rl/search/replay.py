"""A plan found elsewhere, replayed: priced, recorded, reported and held against the bound as if it had been found here.

    python -m haap_rl.train +search=replay search.plan=plan.json

The file is a plan as every record has one (`plan.json`, schema haap_rl.plan/1); other planners' results can be written
so. The plan may lie outside the declared space: then the note says why, and the bound, which speaks of the space only,
may be beaten.
"""

from __future__ import annotations

import numpy as np

from haap_rl.problem.errors import InputError, shown
from haap_rl.problem.plan import Problem
from haap_rl.search.base import Objective, outside


class Replay:
    """One plan, one evaluation.

    plan   the plan file
    """

    def __init__(self, plan: str | None = None) -> None:
        self.plan = plan

    def search(self, problem: Problem, objective: Objective, rng: np.random.Generator) -> None:
        """Price the plan. Raises InputError if there is no file, or what `Problem.load_plan` raises for it."""
        if not isinstance(self.plan, str):
            raise InputError(f"search=replay: plan={shown(self.plan)} is no plan file; give search.plan=plan.json")
        plan = problem.load_plan(self.plan)
        objective(plan)
        if reason := outside(objective.space, plan):
            objective.note(f"the plan lies outside the declared space, so the bound does not speak of it: {reason}")
