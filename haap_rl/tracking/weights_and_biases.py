"""A run's figures in Weights & Biases. The only module that imports wandb, and only once a search begins.

W&B gets a copy: the record is written first, and what W&B cannot do is said in one line and ends nothing. Keys:
search/* along the search, over search/evaluations; the searcher's own (Stable-Baselines3: train/*, rollout/*, time/*)
over the same axis; plan/* in the summary, stage by stage in the table plan/stages_table.
"""

from __future__ import annotations

import contextlib
import netrc
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from haap_rl.cost.estimate import Estimate
from haap_rl.problem.errors import InputError, check_keys
from haap_rl.problem.plan import Plan, Problem
from haap_rl.search.base import Objective, SearchResult, TracePoint
from haap_rl.tracking.tracker import Tracker

MODES = ("online", "offline", "disabled")
POINTS = 100  # logged along a search at even intervals, besides its improvements
STEP = "search/evaluations"
STAGE_COLUMNS = (
    "stage",
    "group",
    "units",
    "tp",
    "dp",
    "microbatch_size",
    "recompute",
    "memory_used_bytes",
    "memory_capacity_bytes",
    "busy_s",
    "load_s",
)


@dataclass(frozen=True, slots=True)
class WandbSettings:
    """The keys of `conf/tracking/wandb.yaml`; mode None: online when logged in, else offline."""

    project: str
    entity: str | None
    group: str | None
    name: str | None
    tags: tuple[str, ...]
    mode: str | None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> WandbSettings:
        """Settings of a composed `tracking`. Raises InputError naming the key, its value and the rule."""
        keys = ("project", "entity", "group", "name", "tags", "mode")
        check_keys("tracking", config, ("backend", *keys))
        for key in ("project", "entity", "group", "name"):
            value = config[key]
            if not ((isinstance(value, str) and value.strip()) or (value is None and key != "project")):
                raise InputError(f"tracking: {key}={value!r} must be text; quote numbers, as in tracking.{key}=\"'1'\"")
        tags, mode = config["tags"], config["mode"]
        if not isinstance(tags, list) or not all(isinstance(tag, str) and 0 < len(tag) <= 64 for tag in tags):
            raise InputError(f"tracking: tags={tags!r} must be a list of texts of 1 to 64 letters, as in [a,b]")
        if mode is not None and mode not in MODES:
            raise InputError(f"tracking: mode={mode!r} must be one of {', '.join(MODES)}; null chooses by the log-in")
        return cls(**{**{key: config[key] for key in keys}, "tags": tuple(tags)})


class WandbTracker(Tracker):
    """Sends one search to one W&B run of its own, whose files lie in the run's directory."""

    def __init__(self, settings: WandbSettings, config: Mapping[str, Any], directory: Path) -> None:
        self._settings, self._config, self._directory = settings, config, directory
        self._run: Any = None
        self._follows = False  # until W&B fails once
        self._improvements = 0
        self._next_point = 0.0  # share of the budget at which the next even point is due

    def start(self) -> None:
        modes: tuple[str, ...] = ()
        with self._kept_apart():
            modes = self._modes()
        for mode in modes:
            with self._kept_apart():
                self._open(mode)
                self._follows = True
                self._announce()
            if self._run is not None:
                return

    def progress(self, objective: Objective) -> None:
        if not self._follows:
            return
        share = objective.used
        if len(objective.trace) == self._improvements and share < self._next_point:
            return
        self._improvements = len(objective.trace)
        if share >= self._next_point:
            self._next_point = share + 1 / POINTS
        self._log(_search_figures(objective.state(), objective.lower_bound_s))

    def log(self, objective: Objective, values: Mapping[str, float]) -> None:
        self._log({**values, STEP: objective.evaluations})

    def point(self, values: Mapping[str, float]) -> None:
        self._log(values)

    def finish(self, problem: Problem, result: SearchResult) -> None:
        self._log(_search_figures(result.trace[-1], result.lower_bound_s))
        if self._follows:
            with self._kept_apart():
                self._summarise(result)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._run is not None:
            with self._kept_apart():
                self._run.finish(exit_code=0 if error is None else 1)

    @contextlib.contextmanager
    def _kept_apart(self) -> Iterator[None]:
        """Whatever W&B raises inside becomes one line, and W&B gets no more figures."""
        try:
            yield
        except Exception as error:  # a service of others: the search and its record come first
            self._follows = False
            reason = (str(error).strip() or "no message").splitlines()[0]
            print(
                f"haap_rl: W&B failed ({type(error).__name__}: {reason}); the record does not need it", file=sys.stderr
            )

    def _asked_mode(self) -> str | None:
        return self._settings.mode or os.environ.get("WANDB_MODE")

    def _modes(self) -> tuple[str, ...]:
        """The modes to try in turn: what was asked for, else what the log-in allows; offline where online fails."""
        import wandb

        mode = self._asked_mode() or ("online" if _is_logged_in(wandb.setup().settings) else "offline")
        return (mode, "offline") if mode == "online" else (mode,)

    def _open(self, mode: Any) -> None:
        import wandb

        settings = self._settings
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            group=settings.group,
            name=settings.name,
            tags=settings.tags,
            config=dict(self._config),
            dir=str(self._directory),
            mode=mode,
            reinit="create_new",  # each point of a sweep is a run of its own
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric(STEP)
        for keys in ("search/*", "train/*", "rollout/*", "time/*"):
            self._run.define_metric(keys, step_metric=STEP)

    def _announce(self) -> None:
        run = self._run
        if run.disabled:
            print("W&B: disabled")
        elif run.offline:
            reason = "" if self._asked_mode() or _is_logged_in(run.settings) else " (not logged in)"
            print(f"W&B: offline{reason}; to upload the run later: wandb sync {Path(run.dir).parent}")
        else:
            print(f"W&B: {run.url}")

    def _log(self, values: Mapping[str, float]) -> None:
        if self._follows:
            with self._kept_apart():
                self._run.log(dict(values))

    def _summarise(self, result: SearchResult) -> None:
        import wandb

        self._run.summary.update(summary(result))
        if result.plan is not None and result.estimate is not None:
            rows = stage_rows(result.plan, result.estimate)
            table = wandb.Table(columns=list(STAGE_COLUMNS), data=rows)
            self._run.log({"plan/stages_table": table, STEP: result.evaluations})


def summary(result: SearchResult) -> dict[str, Any]:
    """The outcome under plan/* and search/*; keys without a value are left out."""
    figures: dict[str, Any] = {
        "search/stopped_by": result.stopped_by,
        "search/proven_optimal": result.proven_optimal,
        "search/lower_bound_s": result.lower_bound_s,
        "search/gap_to_lower_bound": result.gap_to_lower_bound,
        "plan/fits": result.estimate is not None,
    }
    if result.plan is not None and result.estimate is not None:
        estimate = result.estimate
        figures |= {
            "plan/stages": len(result.plan.stages),
            "plan/num_microbatches": result.plan.num_microbatches,
            "plan/iteration_time_s": estimate.iteration_s,
            "plan/tokens_per_s": estimate.tokens_per_s,
            "plan/bubble": estimate.bubble,
            "plan/bottleneck_stage": estimate.bottleneck[0],
            "plan/bottleneck_resource": estimate.bottleneck[1],
        }
    return {key: value for key, value in figures.items() if value is not None}


def stage_rows(plan: Plan, estimate: Estimate) -> list[list[Any]]:
    """One row of `STAGE_COLUMNS` per replica group of each stage; bytes of one device, busy_s of one micro-batch."""
    return [
        [
            i,
            replica.group,
            stage.num_units,
            replica.tp,
            replica.dp,
            replica.microbatch_size,
            stage.recompute.mode,
            memory.used_bytes,
            memory.capacity_bytes,
            estimate.stages[i].busy_s,
            estimate.loads_s[i],
        ]
        for i, stage in enumerate(plan.stages)
        for replica, memory in zip(stage.replicas, estimate.memory[i], strict=True)
    ]


def _search_figures(point: TracePoint, lower_bound_s: float) -> dict[str, float]:
    figures = {
        STEP: point.evaluations,
        "search/operator_evaluations": point.operator_evaluations,
        "search/operator_evaluations_avoided": point.operator_evaluations_avoided,
        "search/seconds": point.seconds,
    }
    if point.best_iteration_time_s is not None:
        figures["search/best_iteration_time_s"] = point.best_iteration_time_s
        if lower_bound_s > 0:
            figures["search/gap_to_lower_bound"] = point.best_iteration_time_s / lower_bound_s - 1
    return figures


def _is_logged_in(settings: Any) -> bool:
    """Whether W&B will find credentials without asking: in its settings, the environment or the netrc file."""
    if settings.api_key or settings.identity_token_file or os.environ.get("WANDB_API_KEY"):
        return True
    named = os.environ.get("NETRC")
    for path in [named] if named else ["~/.netrc", "~/_netrc"]:
        try:
            if netrc.netrc(os.path.expanduser(path)).hosts.get(urlsplit(settings.base_url).netloc):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
