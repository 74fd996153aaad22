"""Progress of a search: a bar on a terminal; elsewhere a plain line at first and after every tenth of the budget."""

from __future__ import annotations

import math
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from haap_rl.search.base import Objective


class SearchProgress:
    """Context manager whose instance is the `on_progress` of `run_search`."""

    def __init__(self, console: Console, name: str, evaluations: int | None) -> None:
        self._console, self._name, self._total = console, name, evaluations
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._shown_s = 0.0
        self._tenths = -1  # of the budget, that the last line told of

    def __enter__(self) -> SearchProgress:
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"))
            self._bar = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True)
            self._task = self._bar.add_task(self._name, total=self._total, state="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, objective: Objective) -> None:
        if self._bar is not None:
            if objective.seconds - self._shown_s > 0.1:
                self._shown_s = objective.seconds
                self._bar.update(self._task, completed=objective.evaluations, state=self._state(objective))
        elif (tenths := int(10 * objective.used + 1e-9)) > self._tenths:  # a batch may jump over several
            self._tenths = tenths
            self._console.print(f"{self._name}: {self._state(objective)}", highlight=False)

    def _state(self, objective: Objective) -> str:
        total = f" of {self._total:,}" if self._total else ""
        speed = objective.evaluations / max(objective.seconds, 1e-9)
        state = f"{objective.evaluations:,}{total} plans, {speed:,.0f}/s"
        best_s = objective.best_s
        if best_s < math.inf:
            state += f", best {best_s:.3f} s"
            if objective.lower_bound_s > 0:
                state += f", gap {best_s / objective.lower_bound_s - 1:.1%}"
        return state
