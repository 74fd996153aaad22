"""The baseline heuristic after AutoHAAP (HPCA 2026; only its abstract is public): relieve the bottleneck stage.

From memory-aware starts, half of them regular (each device group one run of equal stages), keep the best few plans.
Always take the most promising of them, relieve its most loaded stage that was not relieved yet (one that does not fit
first), price what that gives and keep what is good enough. When every plan kept has been relieved at every stage, all
of them are local optima: restart from other starts.
What the abstract names is here: the memory-aware initialisation draws the starts, the load-balancing balancer gives
each candidate its layers, the estimator's tables make a what-if cheap. The neighbourhood is our own choice:
`space.moves.relief`, and all stages that are alike given another shape at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from haap_rl.problem.errors import positive_float, positive_int
from haap_rl.problem.plan import Problem
from haap_rl.search import relief_kernels
from haap_rl.search.base import Objective
from haap_rl.space import kernels
from haap_rl.space.space import Code, Codes

NOTHING = (True, 2**63, np.inf)  # a rank that every plan has a better one than


class Kept:
    """A plan with its rank and the stages to relieve yet, the next one last; None before its loads were looked at."""

    def __init__(self, rank: tuple[bool, int, float], code: Code) -> None:
        self.rank, self.code = rank, code
        self.relieved, self.stages = 0, None  # type: int, list[int] | None


class AutoHAAP:
    """Best-first bottleneck relief with restarts.

    starts    plans drawn for each descent
    width     plans kept, the best ones
    patience  a plan counts as slower by this share for every stage that was relieved already: 0 relieves every stage
              of the best plan before it turns to the next one
    """

    def __init__(self, starts: int = 100, width: int = 10, patience: float = 0.03) -> None:
        where = "search=autohaap"
        self.starts, self.width = positive_int(where, "starts", starts), positive_int(where, "width", width)
        self.patience = positive_float(where, "patience", patience)

    def search(self, problem: Problem, objective: Objective, rng: np.random.Generator) -> None:
        while True:
            self.descend(objective, rng)

    def descend(
        self, objective: Objective, rng: np.random.Generator, most: int | None = None, kept: Sequence[Kept] = ()
    ) -> None:
        """Until all plans kept are local optima, or until `most` evaluations; from `kept`, or else fresh starts."""
        space = objective.space
        until = None if most is None else objective.evaluations + most
        found = np.zeros((kernels.most_relief(space) + len(space.options) + 1, 2 + 2 * space.max_stages), np.int64)
        kept, known = sorted(kept, key=lambda plan: plan.rank)[: self.width], set[bytes]()
        codes = found[:0]
        if kept:
            self._fresh(np.array([plan.code for plan in kept]), known)
        else:
            codes = space.draws(rng, self.starts)
            relief_kernels.regular(space.neighbourhood, relief_kernels.regular_options(space), rng, codes[::2])
        while True:
            codes = self._fresh(codes, known)
            if until is not None:
                codes = codes[: until - objective.evaluations]
            if len(codes):
                worst = kept[-1].rank if len(kept) == self.width else NOTHING
                prices = objective.many(codes, np.inf if worst[0] else worst[2])
                kept += [Kept(rank, codes[i].copy()) for i in range(len(codes)) if (rank := prices.rank(i)) < worst]
                kept = sorted(kept, key=lambda plan: plan.rank)[: self.width]
            elif until is not None and objective.evaluations >= until:
                return
            promising = [plan for plan in kept if plan.stages != []]
            if not promising:
                return
            plan = min(promising, key=self._promise)
            if plan.stages is None:
                loads_s, bottleneck = objective.loads_s(plan.code)
                plan.stages = sorted(range(len(loads_s)), key=lambda i: (i == bottleneck, loads_s[i]))
            plan.relieved += 1
            codes = found[: relief_kernels.candidates(space.neighbourhood, plan.code, plan.stages.pop(), found)]

    def _promise(self, plan: Kept) -> tuple[int, float]:
        """What the plan to relieve next has least of."""
        return plan.rank[1], plan.rank[2] * (1.0 + self.patience * plan.relieved)

    def _fresh(self, codes: Codes, known: set[bytes]) -> Codes:
        """The rows not priced before in this descent."""
        fresh = []
        for i, key in enumerate(row.tobytes() for row in codes.astype(np.int32)):
            if key not in known:
                known.add(key)
                fresh.append(i)
        return codes[fresh]
