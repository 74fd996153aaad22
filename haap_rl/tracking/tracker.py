"""Who follows a search besides its record: nobody, or W&B."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from haap_rl.problem.errors import InputError, check_keys
from haap_rl.problem.plan import Problem
from haap_rl.search.base import Objective, SearchResult


class Tracker:
    """Follows one search, as a context manager around it. This one keeps nothing.

    start, progress and log are the `on_start`, `on_progress` and `on_log` of `run_search`. finish comes after the
    record was written. None of them raises: a search does not end because nobody could follow it.
    """

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def start(self) -> None:
        """The search is about to begin; its clock does not run yet."""

    def progress(self, objective: Objective) -> None:
        """Some more evaluations, or some more time."""

    def log(self, objective: Objective, values: Mapping[str, float]) -> None:
        """Figures of the searcher's own."""

    def point(self, values: Mapping[str, float]) -> None:
        """Figures of a round of `train_policy`."""

    def finish(self, problem: Problem, result: SearchResult) -> None:
        """What came out."""


def tracker_from_config(config: Mapping[str, Any], directory: Path) -> Tracker:
    """The tracker that `config["tracking"]` asks for, keeping its files in `directory`; nothing is started yet.

    Raises InputError for unknown keys and values. Only here is W&B loaded, and only if asked for.
    """
    tracking = config["tracking"]
    if not isinstance(tracking, Mapping) or tracking.get("backend") not in (None, "wandb"):
        raise InputError(f"tracking: backend={tracking!r} is not known; choose tracking=none or tracking=wandb")
    if tracking["backend"] is None:
        check_keys("tracking", tracking, ("backend",))
        return Tracker()
    from haap_rl.tracking.weights_and_biases import WandbSettings, WandbTracker

    return WandbTracker(WandbSettings.from_config(tracking), config, directory)
