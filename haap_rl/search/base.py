"""The contract of every searcher: one objective that counts, times, remembers the best and stops.

    result = run_search(AutoHAAP(), problem, Budget(evaluations=10_000), seed=0)

A searcher takes (problem, objective, rng) and proposes plans with `objective(plan)` until it returns or
`BudgetExhausted` passes through it. It holds no clock, counter, log, best-so-far or global randomness. Figures of its
own it hands to `objective.log`, things worth keeping (a trained model) to `artifacts`; where they go is not its matter.

An evaluation is any candidate whose iteration time is computed: what-ifs and plans that do not fit included. Looking
into memory tables and at single stages is not one.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Protocol

import numpy as np

from haap_rl.cost.estimate import Estimate
from haap_rl.cost.estimator import Estimator
from haap_rl.cost.profiles import Profile
from haap_rl.problem.cluster import GIB
from haap_rl.problem.errors import InputError, check_keys, positive_float, positive_int
from haap_rl.problem.plan import Plan, Problem
from haap_rl.space.bound import lower_bound
from haap_rl.space.initial import PruningReport, no_plan_fits, pruning_report
from haap_rl.space.options import SpaceSpec
from haap_rl.space.space import Genome, Space

OPTIMAL_WITHIN = 1e-9  # relative: the rounding of the schedule's sums
ENTRY_POINT_GROUP = "haap_rl.searchers"  # where installed packages offer theirs


class BudgetExhausted(Exception):
    """Raised by the objective when the budget is spent."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a search may use. `seconds` is checked between evaluations; None = no limit (and reproducible)."""

    evaluations: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.evaluations is not None:
            object.__setattr__(self, "evaluations", positive_int("budget", "evaluations", self.evaluations))
        if self.seconds is not None:
            object.__setattr__(self, "seconds", positive_float("budget", "seconds", self.seconds))
        if self.evaluations is None and self.seconds is None:
            raise InputError("budget: neither evaluations nor seconds is given; set budget.evaluations=10000")


@dataclass(frozen=True, slots=True)
class TracePoint:
    """State of a search when its best improved, and at its end."""

    evaluations: int
    best_iteration_time_s: float | None  # None until a plan fits
    operator_evaluations: int
    operator_evaluations_avoided: int  # against an estimator without any memo
    seconds: float = field(compare=False)  # the only field in which two runs of one seed differ


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found, and what it took. plan and estimate are None if nothing fits; `reason` then says why.

    operator_evaluations            operator latencies computed, tables included
    operator_evaluations_avoided    fewer than without any memo
    operator_evaluations_avoided_per_plan   fewer than pricing each distinct operator once per plan
    lower_bound_s                   no plan of the declared space is faster (inf if none fits)
    artifacts                       what the searcher made besides: file name -> content
    """

    plan: Plan | None
    estimate: Estimate | None
    trace: tuple[TracePoint, ...]
    evaluations: int
    operator_evaluations: int
    operator_evaluations_avoided: int
    operator_evaluations_avoided_per_plan: int
    wall_time_s: float = field(compare=False)
    lower_bound_s: float
    proven_optimal: bool
    stopped_by: str  # "budget", "finished", "interrupted" or "infeasible"
    reason: str
    seed: int
    pruning: PruningReport
    artifacts: Mapping[str, bytes] = field(default_factory=dict, compare=False, repr=False)  # zip files hold a time
    profile: Profile | None = field(default=None, repr=False)  # what the estimator's times were measured by
    profile_gaps: tuple[str, ...] = ()  # what in the plan's price that profile had to leave to the curves

    @property
    def gap_to_lower_bound(self) -> float | None:
        """Iteration time / bound - 1, a fraction; None without a plan or a bound."""
        if self.estimate is None or self.lower_bound_s <= 0:
            return None
        return self.estimate.iteration_s / self.lower_bound_s - 1


Progress = Callable[["Objective", Estimate], None]
Log = Callable[["Objective", Mapping[str, float]], None]


class Objective:
    """The only scorer: `objective(plan)`, or `objective.many(plans)` for a batch.

    space       the declared space, bound to the problem and to this objective's estimator
    remaining   evaluations left, for schedules (a temperature, PPO's rollout length), never for stopping
    best        (plan, estimate) of the best so far, or None
    lower_bound_s   what no plan of the space can beat, as far as proven; a searcher that proves more calls `prove`
    Without arguments beyond the problem it is unlimited, for interactive use and environments of their own.
    """

    def __init__(
        self,
        problem: Problem,
        budget: Budget | None = None,
        space: SpaceSpec | None = None,
        cached: bool = True,
        on_progress: Progress | None = None,
        lower_bound_s: float = 0.0,
        on_log: Log | None = None,
        profile: Profile | None = None,
    ) -> None:
        self.problem, self.budget, self.lower_bound_s = problem, budget, lower_bound_s
        self.estimator = Estimator(problem, cached, profile=profile)
        self.space = Space(problem, space or SpaceSpec(), self.estimator)
        self.evaluations = 0
        self.best: tuple[Plan, Estimate] | None = None
        self.trace: list[TracePoint] = []
        self._on_progress, self._on_log = on_progress, on_log
        self._started = time.perf_counter()

    def __deepcopy__(self, memo: dict[int, object]) -> Objective:
        """Itself: Gymnasium deep-copies the arguments of `make`, and a copy would count apart."""
        return self

    @property
    def seconds(self) -> float:
        """Wall-clock seconds since the search began."""
        return time.perf_counter() - self._started

    @property
    def remaining(self) -> int | None:
        """Evaluations left, or None where they are not limited."""
        if self.budget is None or self.budget.evaluations is None:
            return None
        return self.budget.evaluations - self.evaluations

    def rank(self, estimate: Estimate) -> tuple[bool, int, float]:
        """The order of plans that every searcher uses; smaller is better."""
        return estimate.rank

    def __call__(self, plan: Plan) -> Estimate:
        """The estimate of `plan`, counted. Raises BudgetExhausted instead if the budget is spent."""
        self.checkpoint()
        estimate = self.estimator(plan)
        self.evaluations += 1
        if self.best is None or self.rank(estimate) < self.rank(self.best[1]):
            self.best = plan, estimate
            self.record()
        if self._on_progress is not None:
            self._on_progress(self, estimate)
        return estimate

    def checkpoint(self) -> None:
        """Raise BudgetExhausted if the budget is spent; for a searcher that works long between two evaluations."""
        remaining = self.remaining
        if remaining is not None and remaining <= 0:
            raise BudgetExhausted
        if self.budget is not None and self.budget.seconds is not None and self.seconds > self.budget.seconds:
            raise BudgetExhausted

    def many(self, plans: Sequence[Plan]) -> list[Estimate]:
        """Estimates of a batch, counted one by one."""
        return [self(plan) for plan in plans]

    def best_of(self, genomes: Sequence[Genome]) -> tuple[Genome, Estimate]:
        """The best of some genomes of the space, all of them counted; the first one where several are alike."""
        estimates = self.many([self.space.plan(genome) for genome in genomes])
        best = min(range(len(genomes)), key=lambda i: self.rank(estimates[i]))
        return genomes[best], estimates[best]

    def prove(self, lower_bound_s: float) -> None:
        """Take note that no plan of the space takes less than `lower_bound_s` seconds."""
        self.lower_bound_s = max(self.lower_bound_s, lower_bound_s)

    def log(self, values: Mapping[str, float]) -> None:
        """Hand a searcher's own figures (a loss, a temperature) to whoever listens; nobody may."""
        if self._on_log is not None:
            self._on_log(self, values)

    def state(self) -> TracePoint:
        """The present state, as the trace has it."""
        estimator = self.estimator
        return TracePoint(
            self.evaluations,
            self.best[1].iteration_s if self.best is not None and self.best[1].fits else None,
            estimator.operators_computed,
            max(0, estimator.operators_requested - estimator.operators_computed),
            self.seconds,
        )

    def record(self) -> None:
        """Append the present state to the trace."""
        self.trace.append(self.state())


class Searcher(Protocol):
    """Proposes plans to `objective` until it returns or BudgetExhausted passes through it.

    All randomness comes from `rng`. What it proves on the way it tells `objective.prove`.
    A searcher may also have `artifacts() -> Mapping[str, bytes]`, file names and contents worth keeping: it is asked
    once after the search, however that ended, and the files are written beside the record.
    """

    def search(self, problem: Problem, objective: Objective, rng: np.random.Generator) -> None: ...


def run_search(
    searcher: Searcher,
    problem: Problem,
    budget: Budget,
    seed: int = 0,
    space: SpaceSpec | None = None,
    on_progress: Progress | None = None,
    cached: bool = True,
    on_log: Log | None = None,
    on_start: Callable[[], None] | None = None,
    profile: Profile | None = None,
) -> SearchResult:
    """Run one searcher on one problem; the seed enters here and nowhere else.

    on_start: called once before the clock starts, if any plan can fit. on_progress: called after every evaluation with
    (objective, estimate). on_log: called with (objective, figures) of the searcher's own. cached: the estimator's memo
    (idea 3 of the paper); results do not depend on it. profile: measured times, for plans, bound and counts alike.
    Ctrl-C ends the search with the best plan so far.
    """
    spec = space or SpaceSpec()
    bound = lower_bound(problem, spec, profile)
    pruning = pruning_report(problem, spec, profile)
    if on_start is not None and bound.seconds != np.inf:
        on_start()
    objective = Objective(problem, budget, spec, cached, on_progress, bound.seconds, on_log, profile)
    stopped_by, reason = "finished", ""
    if bound.seconds == np.inf:
        stopped_by = "infeasible"
        reason = no_plan_fits(problem, spec, objective.space.options, objective.estimator)
    else:
        try:
            searcher.search(problem, objective, np.random.default_rng(seed))
        except BudgetExhausted:
            stopped_by = "budget"
        except KeyboardInterrupt:
            stopped_by = "interrupted"
    objective.record()
    best = objective.best
    if best is not None and not best[1].fits:
        reason = f"no plan that was tried fits; the closest misses {best[1].bytes_missing / GIB:.2f} GiB in all"
        best = None
    if best is None and not reason:
        reason = "the search ended before it tried a plan"
    estimator = objective.estimator
    return SearchResult(
        plan=best[0] if best else None,
        estimate=best[1] if best else None,
        trace=tuple(objective.trace),
        evaluations=objective.evaluations,
        operator_evaluations=estimator.operators_computed,
        operator_evaluations_avoided=objective.trace[-1].operator_evaluations_avoided,
        operator_evaluations_avoided_per_plan=max(0, estimator.operators_distinct - estimator.operators_computed),
        wall_time_s=objective.trace[-1].seconds,
        lower_bound_s=objective.lower_bound_s,
        proven_optimal=best is not None and best[1].iteration_s <= objective.lower_bound_s * (1 + OPTIMAL_WITHIN),
        stopped_by=stopped_by,
        reason=reason,
        seed=seed,
        pruning=pruning,
        artifacts=_artifacts(searcher) if stopped_by != "infeasible" else {},
        profile=profile,
        profile_gaps=estimator.gaps(best[0]) if best else (),
    )


def _artifacts(searcher: Searcher) -> dict[str, bytes]:
    """What the searcher made besides plans. Raises ValueError for a name that is not a plain file name."""
    made: dict[str, bytes] = dict(getattr(searcher, "artifacts", dict)())
    for name in made:
        if not name or name.startswith(".") or PurePath(name).name != name or "\\" in name:
            raise ValueError(f"{type(searcher).__name__}.artifacts: {name!r} is not a plain file name")
    return made


def load_searcher(name: str, parameters: Mapping[str, Any] | None = None) -> Searcher:
    """The searcher called `name`, built with `parameters`; its module is imported only now.

    It is the class of the module `haap_rl.search.<name>`, or else what an installed package offers under that name in
    the entry point group `haap_rl.searchers`. Raises InputError for an unknown name or parameter, and for an entry
    point that does not lead to a searcher.
    """
    searcher_class = _own_class(name) or _installed_class(name)
    if parameters is not None:
        known = list(inspect.signature(searcher_class).parameters)
        check_keys(f"search={name}", parameters, (), known)
    searcher: Searcher = searcher_class(**(parameters or {}))
    return searcher


def _own_class(name: str) -> Any:
    """The one class with a search method in our module `name`; None where there is no such module."""
    if not name.isidentifier() or name in ("base", "__init__"):
        return None
    if importlib.util.find_spec(f"haap_rl.search.{name}") is None:
        return None
    module = importlib.import_module(f"haap_rl.search.{name}")
    found = [
        kind
        for kind in vars(module).values()
        if inspect.isclass(kind) and kind.__module__ == module.__name__ and hasattr(kind, "search")
    ]
    if len(found) != 1:
        raise TypeError(f"{module.__name__} must define exactly one class with a search method, it has {len(found)}")
    return found[0]


def _installed_class(name: str) -> Any:
    """The class behind the entry point `name`. Raises InputError where there is none, or it cannot be had."""
    from importlib.metadata import entry_points

    offered = {point.value: point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == name}
    if not offered:
        installed = sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)})
        raise InputError(
            f"search={name!r} is not known; see conf/search/ for the choices, besides them installed packages offer "
            f"{', '.join(installed) or 'none'} (entry point group {ENTRY_POINT_GROUP})"
        )
    if len(offered) > 1:
        raise InputError(
            f"search={name!r} is offered by several installed packages ({', '.join(sorted(offered))}); "
            "uninstall all but one"
        )
    point = next(iter(offered.values()))
    package = f" of package {point.dist.name!r}" if point.dist is not None else ""
    where = f"search={name!r}: entry point {point.value!r}{package}"
    try:
        kind = point.load()
    except Exception as error:  # whatever importing somebody else's module raises
        reason = " ".join(str(error).split()) or "no message"
        raise InputError(f"{where} cannot be imported ({type(error).__name__}: {reason}); repair it") from error
    if not inspect.isclass(kind) or not hasattr(kind, "search"):
        raise InputError(f"{where} is not a class with a search method; let it name one, as module:Class")
    return kind


@contextlib.contextmanager
def seeded_global_random(rng: np.random.Generator) -> Iterator[int]:
    """Seed the global generators that libraries draw from (Python, numpy, torch if loaded) and restore them after.

    Yields the seed. torch runs on one thread meanwhile: its sums must not depend on the machine's cores.
    """
    seed = int(rng.integers(2**31))
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002 - to be restored
    torch = sys.modules.get("torch")
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - for libraries that use it
    if torch is not None:
        torch_state, threads = torch.get_rng_state(), torch.get_num_threads()
        torch.manual_seed(seed)
        torch.set_num_threads(1)
    try:
        yield seed
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        if torch is not None:
            torch.set_rng_state(torch_state)
            torch.set_num_threads(threads)
