"""Progress where there is no terminal: a line at first and after each tenth of the budget, however it is reached."""

import io

import numpy as np
from rich.console import Console

from haap_rl.report.progress import SearchProgress
from haap_rl.search.base import Budget, Objective
from tests.builders import group, problem


def lines(batches, budget):
    """The evaluations that each printed line tells of, after batches of so many plans."""
    text = io.StringIO()
    with SearchProgress(Console(file=text, width=120), "random", budget.evaluations) as progress:
        objective = Objective(problem((group("one", per_node=2, memory_gb=60.0),)), budget, on_progress=progress)
        for count in batches:
            objective.many(objective.space.draws(np.random.default_rng(0), count))
        objective.account(0)  # time has passed, no plan was priced
    assert "best" in text.getvalue()
    return [int(line.split()[1]) for line in text.getvalue().splitlines()]


def test_batches_may_jump_over_tenths():
    assert lines([1] * 30, Budget(evaluations=30)) == [1, *range(3, 31, 3)]
    assert lines([7, 1, 3, 40, 4, 45], Budget(evaluations=100)) == [7, 11, 51, 100]
    assert lines([100], Budget(evaluations=100)) == [100]


def test_a_budget_of_seconds_has_tenths_too():
    assert lines([5, 5, 5], Budget(seconds=1e6)) == [5]
