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
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from haap_rl.cost.estimate import Estimate
from haap_rl.cost.estimator import Estimator
from haap_rl.cost.profiles import Profile
from haap_rl.problem.cluster import GIB
from haap_rl.problem.errors import InputError, check_keys, positive_float, positive_int
from haap_rl.problem.plan import Plan, Problem
from haap_rl.space.bound import bound_of_part, lower_bound
from haap_rl.space.initial import PruningReport, no_plan_fits, pruning_report
from haap_rl.space.options import SpaceSpec, stage_options
from haap_rl.space.space import Code, Codes, Genome, Space
from haap_rl.space.target import parts, sayable

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
PARTS_AT_ONCE = 8  # parts of a space that what is left of a budget is divided among
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
    notes: tuple[str, ...] = ()  # what the searcher has to say about the result
    profile_gaps: tuple[str, ...] = ()  # what in the plan's price that profile had to leave to the curves
    score_s: float | None = None  # what the plan was ranked by; its iteration time but for a `Scorer`
    scored: Mapping[str, Any] | None = None  # what the scorer has to say of the plan, if there is one

    @property
    def gap_to_lower_bound(self) -> float | None:
        """Iteration time, or what plans were ranked by, / bound - 1, a fraction; None without a plan or a bound."""
        if self.score_s is None or self.lower_bound_s <= 0:
            return None
        return self.score_s / self.lower_bound_s - 1


class Prices(NamedTuple):
    """What a batch of plans costs, in its order.

    iteration_s      seconds; where a limit was given and the plan's lower bound reaches it, that bound
    bytes_missing    of one device of each replica group, summed; 0: it fits
    capacity_bytes   of the same devices
    """

    iteration_s: Floats
    bytes_missing: Ints
    capacity_bytes: Ints

    @property
    def best(self) -> int:
        """Index of the best plan by the one order (`Estimate.rank`); the first one where several are alike."""
        return int(np.lexsort((self.iteration_s, self.bytes_missing))[0])

    def rank(self, i: int) -> tuple[bool, int, float]:
        """`Estimate.rank` of the i-th plan."""
        return bool(self.bytes_missing[i]), int(self.bytes_missing[i]), float(self.iteration_s[i])

    @property
    def energy(self) -> Floats:
        """`Estimate.energy` of each plan."""
        misses = self.bytes_missing > 0
        energy: Floats = np.log(self.iteration_s) + np.where(
            misses, 1.0 + self.bytes_missing / self.capacity_bytes, 0.0
        )
        return energy


class Explained(NamedTuple):
    """What one plan costs and what that is made of; arrays have an entry per stage, front to back.

    Names are those of `Estimate`, `StageTime` and `StageMemory`, whose values these are.
    """

    prices: Prices  # of this plan alone
    busy_s: Floats
    tensor_parallel_s: Floats
    blocked_s: Floats
    gradient_sync_s: Floats
    optimizer_s: Floats
    memory_share: Floats  # largest needed_bytes / capacity_bytes of the stage's replica groups
    makespan_s: float
    bubble: float
    balance: float

    @property
    def iteration_s(self) -> float:
        return float(self.prices.iteration_s[0])

    @property
    def fits(self) -> bool:
        return not self.prices.bytes_missing[0]

    @property
    def energy(self) -> float:
        """`Estimate.energy`."""
        (seconds,), (missing,), (capacity,) = (values.tolist() for values in self.prices)
        return math.log(seconds) + 1.0 + missing / capacity if missing else math.log(seconds)

    @classmethod
    def of(cls, estimate: Estimate) -> Explained:
        """The same from the readable estimator."""
        stages = [
            (s.busy_s, s.tensor_parallel_s, s.blocked_s, s.gradient_sync_s, s.optimizer_s,
             max(group.needed_bytes / group.capacity_bytes for group in groups))
            for s, groups in zip(estimate.stages, estimate.memory, strict=True)
        ]  # fmt: skip
        whole = [estimate.makespan_s, estimate.bubble, estimate.balance]
        return cls(_prices_of([estimate]), *np.array(stages).T, *whole)


def _prices_of(estimates: Sequence[Estimate]) -> Prices:
    capacity = [sum(group.capacity_bytes for groups in e.memory for group in groups) for e in estimates]
    return Prices(
        np.array([e.iteration_s for e in estimates], float),
        np.array([e.bytes_missing for e in estimates], np.int64),
        np.array(capacity, np.int64),
    )


class Scorer(Protocol):
    """What plans are ranked by instead of their iteration time, in seconds and never less than that.

    So bounds on the iteration time hold for it too, and whatever a searcher does with seconds it does with these.
    """

    def estimator(self, problem: Problem, cached: bool, profile: Profile | None) -> Estimator:
        """The estimator that the objective prices plans with; asked for once, before anything is scored."""

    def seconds(self, plan: Plan) -> float:
        """The score of a plan that fits."""

    def facts(self, plan: Plan) -> dict[str, Any]:
        """What is to be recorded of the plan that was found, as JSON data."""

    def lines(self, plan: Plan) -> list[str]:
        """The same in words."""

    def artifacts(self) -> dict[str, bytes]:
        """Files worth keeping beside the record, after the search."""


Progress = Callable[["Objective"], None]
Log = Callable[["Objective", Mapping[str, float]], None]


class Objective:
    """The only scorer: `objective.many(codes)` for a batch of the space, `objective(plan)` for any plan.

    space       the declared space, bound to the problem and to this objective's estimator
    remaining   evaluations left, for schedules (a temperature, PPO's rollout length), never for stopping
    best        (plan, estimate) of the best so far, or None
    last        Prices of what was priced last
    lower_bound_s   what no plan of the space can beat, as far as proven; a searcher that proves more calls `prove`
    Without arguments beyond the problem it is unlimited, for interactive use and environments of their own.
    `cached` False: no memo, no tables, no compiled code, every plan priced anew by the readable estimator; same values.
    `scorer` None: plans are ranked by their iteration time; else by what it gives, which then stands for iteration time
    in Prices, ranks, trace and `best_s`. The estimate of a plan is always that of its iteration.
    `allowed` None: every plan may be kept; else those it says yes to. The others are priced and counted all the same.
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
        scorer: Scorer | None = None,
        allowed: Callable[[Plan], bool] | None = None,
    ) -> None:
        self.problem, self.budget, self.lower_bound_s, self.cached = problem, budget, lower_bound_s, cached
        self.scorer = scorer
        if scorer is None:
            self.estimator = Estimator(problem, cached, profile=profile)
        else:
            self.estimator = scorer.estimator(problem, cached, profile)
        self.space = Space(problem, space or SpaceSpec(), self.estimator)
        self.evaluations = 0
        self.last = Prices(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64))
        self.best_rank: tuple[bool, int, float] | None = None
        self.trace: list[TracePoint] = []
        self.notes: list[str] = []
        self._best: tuple[Plan, Estimate] | Code | None = None
        self._ranks: dict[int, tuple[Estimate, tuple[bool, int, float]]] = {}  # the estimate is kept, and so its id
        self._on_progress, self._on_log = on_progress, on_log
        self._kernel: CompiledPrices | None = None
        self._started = time.perf_counter()
        self._budget_from: tuple[int, float] = 0, 0.0  # evaluations and seconds before the present budget
        self.allowed = allowed

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
        return self.budget.evaluations - (self.evaluations - self._budget_from[0])

    @property
    def used(self) -> float:
        """Share of the budget that is spent, by whichever of its limits is nearer; 0 without one."""
        evaluations, seconds = (None, None) if self.budget is None else (self.budget.evaluations, self.budget.seconds)
        return max(
            0.0 if evaluations is None else (self.evaluations - self._budget_from[0]) / evaluations,
            0.0 if seconds is None else (self.seconds - self._budget_from[1]) / seconds,
        )

    @property
    def best(self) -> tuple[Plan, Estimate] | None:
        """The best plan so far with its estimate, which fits if any plan tried did."""
        if isinstance(self._best, np.ndarray):
            plan = self._plan_of(self._best)
            self._best = plan, self._explained(plan)
        return self._best

    @property
    def best_s(self) -> float:
        """Iteration seconds of the best plan so far that fits; infinity before there is one."""
        return math.inf if self.best_rank is None or self.best_rank[0] else self.best_rank[2]

    def _explained(self, plan: Plan) -> Estimate:
        """The estimate of a plan that is priced already: no evaluation, and no operator counted again."""
        estimator = self.estimator
        counts = estimator.operators_requested, estimator.operators_distinct
        computed = estimator.operators_computed
        estimate = estimator(plan)
        estimator.operators_requested, estimator.operators_distinct = counts
        if not self.cached:
            estimator.operators_computed = computed
        return estimate

    def __call__(self, plan: Plan) -> Estimate:
        """The estimate of `plan`, counted. Raises BudgetExhausted instead if the budget is spent."""
        self.checkpoint()
        estimate = self.estimator(plan)
        self.evaluations += 1
        self.last = self._scored(_prices_of([estimate]), lambda _: plan, math.inf)
        if self.scorer is not None:
            self._ranks[id(estimate)] = estimate, self.last.rank(0)
        self._offer(self.last, lambda _: (plan, estimate))
        return estimate

    def rank(self, estimate: Estimate) -> tuple[bool, int, float]:
        """The order of plans that every searcher uses, smaller is better, of an estimate that the objective gave."""
        return estimate.rank if self.scorer is None else self._ranks[id(estimate)][1]

    def checkpoint(self) -> None:
        """Raise BudgetExhausted if the budget is spent; for a searcher that works long between two evaluations."""
        remaining = self.remaining
        if remaining is not None and remaining <= 0:
            raise BudgetExhausted
        self.check_seconds()

    def check_seconds(self) -> None:
        """Raise BudgetExhausted if the seconds are spent; for work that prices nothing."""
        if self.budget is None or self.budget.seconds is None:
            return
        if self.seconds - self._budget_from[1] > self.budget.seconds:
            raise BudgetExhausted

    def enter(self, space: SpaceSpec, budget: Budget, lower_bound_s: float) -> None:
        """Go on in another declared space, a part of the whole, with a budget and a bound of its own.

        The best plan so far, the trace and all counts stay.
        """
        _ = self.best  # kept as a row, it would mean another plan there
        self.space = Space(self.problem, space, self.estimator)
        self.budget, self.lower_bound_s, self._kernel = budget, lower_bound_s, None
        self._budget_from = self.evaluations, self.seconds

    def many(self, codes: Codes, limit_s: float = math.inf) -> Prices:
        """Prices of a batch of the space's plans, one row each (`Space.encode`), counted one by one.

        limit_s: a plan whose lower bound is at least so much, and at least the best time so far, need not be priced to
        the end; it counts all the same.
        Where the budget ends within the batch, what is left of it is priced and BudgetExhausted raised.
        """
        self.checkpoint()
        allowed = len(codes) if self.remaining is None else min(len(codes), self.remaining)
        limit_s = max(limit_s, self.best_s)  # so that a bound never passes for the time of a better plan
        self.last = prices = self._price(np.ascontiguousarray(codes[:allowed]), limit_s)
        self.evaluations += allowed
        self._offer(prices, lambda i: codes[i].copy())
        if allowed < len(codes):
            raise BudgetExhausted
        return prices

    def explain(self, code: Code) -> Explained:
        """Price of one of the space's plans with what it is made of, counted. Raises BudgetExhausted as `many` does."""
        self.checkpoint()
        plan = self._plan_of(code)
        explained = self._compiled().explain(code) if self.cached else Explained.of(self.estimator(plan))
        explained = explained._replace(prices=self._scored(explained.prices, lambda _: plan, math.inf))
        self.last = explained.prices
        self.evaluations += 1
        self._offer(explained.prices, lambda _: code.copy())
        return explained

    def account(self, evaluations: int, code: Code | None = None) -> None:
        """Count `evaluations` of a compiled loop that priced candidates by itself; `code`: its best plan, if any."""
        self.evaluations += evaluations
        prices = self.last
        if code is not None:
            prices = self._price(code[None], math.inf)
        self.last = prices
        self._offer(prices if code is not None else None, lambda _: code)

    def _price(self, codes: Codes, limit_s: float) -> Prices:
        """Prices of some rows, by the kernels or, uncached, by the readable estimator."""
        if self.cached:
            prices = self._compiled()(codes, limit_s)
        else:
            prices = _prices_of([self.estimator(self._plan_of(code)) for code in codes])
        return self._scored(prices, lambda i: self._plan_of(codes[i]), limit_s)

    def _scored(self, prices: Prices, plan_of: Callable[[int], Plan], limit_s: float) -> Prices:
        """The prices with the scorer's seconds, if there is one; a plan that is too slow already needs no score."""
        if self.scorer is None:
            return prices
        seconds = prices.iteration_s.copy()
        for i in np.flatnonzero((prices.bytes_missing == 0) & (prices.iteration_s < limit_s)).tolist():
            seconds[i] = self.scorer.seconds(plan_of(i))
        return prices._replace(iteration_s=seconds)

    def _plan_of(self, code: Code) -> Plan:
        return self.space.plan(self.space.genome_of(code))

    def _compiled(self) -> CompiledPrices:
        if self._kernel is None:
            self._kernel = CompiledPrices(self.space)
        return self._kernel

    def _offer(self, prices: Prices | None, plan_of: Callable[[int], Any]) -> None:
        """Keep what is better than the best so far, each improvement in the trace, and report progress."""
        if prices is not None and len(prices.iteration_s):
            first = self.evaluations - len(prices.iteration_s) + 1
            rank = self.best_rank
            better = list(range(len(prices.iteration_s)))
            if rank is not None and not rank[0]:  # the usual case, at the speed of numpy
                better = np.flatnonzero((prices.bytes_missing == 0) & (prices.iteration_s < rank[2])).tolist()
            found = None
            for i in better:
                if (rank is None or prices.rank(i) < rank) and self._may_keep(plan_of(i)):
                    rank, found = prices.rank(i), i
                    self.trace.append(self._state(first + i, rank))
            if found is not None:
                self.best_rank, self._best = rank, plan_of(found)
        if self._on_progress is not None:
            self._on_progress(self)

    def _may_keep(self, offered: tuple[Plan, Estimate] | Code) -> bool:
        if self.allowed is None:
            return True
        return self.allowed(self._plan_of(offered) if isinstance(offered, np.ndarray) else offered[0])

    def prove(self, lower_bound_s: float) -> None:
        """Take note that no plan of the space takes less than `lower_bound_s` seconds."""
        self.lower_bound_s = max(self.lower_bound_s, lower_bound_s)

    def log(self, values: Mapping[str, float]) -> None:
        """Hand a searcher's own figures (a loss, a temperature) to whoever listens; nobody may."""
        if self._on_log is not None:
            self._on_log(self, values)

    def note(self, text: str) -> None:
        """Say something about the result that a person should read, one line; nothing for an empty text."""
        if text:
            self.notes.append(text)

    def loads_s(self, code: Code) -> tuple[list[float], int]:
        """(busy seconds of each stage over the iteration, the stage to relieve first) of a plan priced already.

        The stage that lacks most memory, if one does, else the one that is busy for longest.
        """
        if self.cached:
            loads, missing = self._compiled().loads(code)
        else:
            estimate = self._explained(self._plan_of(code))
            loads = estimate.loads_s
            missing = [sum(group.missing_bytes for group in groups) for groups in estimate.memory]
        worst = missing if any(missing) else loads
        return loads, max(range(len(worst)), key=worst.__getitem__)

    def state(self) -> TracePoint:
        """The present state, as the trace has it."""
        return self._state(self.evaluations, self.best_rank)

    def _state(self, evaluations: int, rank: tuple[bool, int, float] | None) -> TracePoint:
        estimator = self.estimator
        return TracePoint(
            evaluations,
            rank[2] if rank is not None and not rank[0] else None,
            estimator.operators_computed,
            max(0, estimator.operators_requested - estimator.operators_computed),
            self.seconds,
        )

    def record(self) -> None:
        """Append the present state to the trace."""
        self.trace.append(self.state())


class CompiledPrices:
    """The kernels' pricing of a space; operator latencies are counted on its estimator."""

    def __init__(self, space: Space) -> None:
        from haap_rl.cost import kernels  # numba is imported where it is used

        compile_kernels()
        self._kernels, self._tables, self._estimator = kernels, space.stage_tables, space.estimator
        self._work = kernels.scratch(self._tables)

    def __call__(self, codes: Codes, limit_s: float) -> Prices:
        n = len(codes)
        prices = Prices(np.empty(n), np.empty(n, np.int64), np.empty(n, np.int64))
        counts = np.zeros(3, np.int64)
        self._kernels.price_many(self._tables, codes, limit_s, self._work, *prices, counts)
        self._estimator.operators_requested += int(counts[1])
        self._estimator.operators_distinct += int(counts[2])
        return prices

    def explain(self, code: Code) -> Explained:
        """One plan, with what it is made of."""
        prices = Prices(np.empty(1), np.empty(1, np.int64), np.empty(1, np.int64))
        stages, whole, counts = np.empty((6, code[1])), np.empty(3), np.zeros(3, np.int64)
        self._kernels.explain(self._tables, code[None], self._work, *prices, counts, stages, whole)
        self._estimator.operators_requested += int(counts[1])
        self._estimator.operators_distinct += int(counts[2])
        return Explained(prices, *stages, *whole.tolist())

    def loads(self, code: Code) -> tuple[list[float], list[int]]:
        """(busy seconds over the iteration, bytes missing) of each stage."""
        p = int(code[1])
        loads, missing = np.zeros(p), np.zeros(p, np.int64)
        self._kernels.loads(self._tables, code, self._work, loads, missing)
        return loads.tolist(), missing.tolist()


def compile_kernels() -> None:
    """Have every kernel of pricing, draws and moves compiled, or loaded; once per process. Says so if it takes long."""
    from haap_rl.cost.compiling import ready

    ready("planning", _first_calls)


def _first_calls() -> None:
    """Call each of those kernels once, on a small problem."""
    from haap_rl.cost.kernels import scratch
    from haap_rl.problem.presets import load_problem
    from haap_rl.search import relief_kernels
    from haap_rl.space import construction, construction_kernels, kernels, move_feature_kernels, move_features, moves

    spec = SpaceSpec(num_microbatches=(16, 32), max_stages=2, max_tp=1, group_sizes=(4,), recompute=("full",))
    objective, rng = Objective(load_problem("gpt3_350m", "v100x4_t4x4"), space=spec), np.random.default_rng(0)
    space = objective.space
    codes, edits = space.draws(rng, 2), kernels.coded(moves.edits(space))
    objective.many(codes)
    objective.loads_s(codes[0])
    objective.explain(codes[0])
    neighbours = np.empty((kernels.most_relief(space) + len(space.options) + 1, codes.shape[1]), np.int64)
    relief_kernels.candidates(space.neighbourhood, codes[0], 0, neighbours)
    relief_kernels.regular(space.neighbourhood, relief_kernels.regular_options(space), rng, neighbours[:2])
    kernels.random_neighbours(space.neighbourhood, codes, edits, rng, np.empty_like(codes))
    kernels.legal_mask(space.neighbourhood, codes[0], edits, np.empty(len(edits) + 1, np.bool_))
    kernels.apply(space.neighbourhood, codes[0], 0, 0, 0, codes[1])
    tables, nb, ones = space.stage_tables, space.neighbourhood, np.ones(2)
    features = np.empty((2, len(edits) + 1, len(move_features.FEATURES)), np.float32)
    move_feature_kernels.observe(tables, nb, scratch(tables), codes, edits, ones, ones, features)
    numbers, legal = np.zeros(2, np.int64), np.empty(2, np.bool_)
    c, only = space.construction, np.zeros(1, np.int64)
    partials = construction_kernels.partials(1, c.max_stages, len(c.total))
    seen = np.empty((1, max(len(c.step) + 1, len(c.m)), len(construction.FEATURES)), np.float32)
    construction_kernels.begin_many(c, partials, only, only, seen)
    construction_kernels.step_many(c, partials, only, seen[:, :, 0].argmax(1), seen)
    move_feature_kernels.apply_each(nb, codes, edits, numbers, np.empty_like(codes), legal)


class Searcher(Protocol):
    """Proposes plans to `objective` until it returns or BudgetExhausted passes through it.

    All randomness comes from `rng`. What it proves on the way it tells `objective.prove`.
    A searcher may also have `prepare()`, called before the clock starts: it compiles kernels of its own. And it may
    have `artifacts() -> Mapping[str, bytes]`, file names and contents worth keeping: it is asked once after the search,
    however that ended, and the files are written beside the record. One that understands iteration times only has
    `no_scorer`, the line that refuses anything else.
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
    proven_s: float = 0.0,
    scorer: Scorer | None = None,
    incumbents: Sequence[Plan] = (),
) -> SearchResult:
    """Run one searcher on one problem; the seed enters here and nowhere else.

    on_start: called once before the clock starts, if any plan can fit. on_progress: called after every batch with the
    objective. on_log: called with (objective, figures) of the searcher's own. cached: the estimator's memo
    (idea 3 of the paper); results do not depend on it. profile: measured times, for plans, bound and counts alike.
    proven_s: what no plan of the space can beat, as an earlier exact search proved (`search.certificate`).
    scorer: what plans are ranked by; None: their iteration time. incumbents: plans priced first, so that the result is
    no worse.
    Ctrl-C ends the search with the best plan so far. Raises InputError where the searcher takes no scorer.
    """
    spec = space or SpaceSpec()
    refusal = str(getattr(searcher, "no_scorer", ""))
    if scorer is not None and refusal:
        raise InputError(refusal)
    compile_kernels()
    getattr(searcher, "prepare", compile_kernels)()
    curves = Estimator(problem, profile=profile)
    bounds = {part: bound_of_part(problem, part, curves).seconds for part in parts(problem, spec)}
    bound_s = min(bounds.values())
    pruning = pruning_report(problem, spec, profile)
    if on_start is not None and bound_s != np.inf:
        on_start()
    proven_s = max(bound_s, proven_s)
    first = min(bounds, key=bounds.__getitem__)
    allowed = sayable(problem, spec, curves)
    objective = Objective(problem, budget, first, cached, on_progress, proven_s, on_log, profile, scorer, allowed)
    stopped_by, reason = "finished", ""
    if bound_s == np.inf:
        stopped_by = "infeasible"
        reason = no_plan_fits(problem, spec, stage_options(problem, spec), objective.estimator)
    else:
        try:
            for plan in incumbents:
                objective(plan)
            rng = np.random.default_rng(seed)
            if len(bounds) == 1:
                searcher.search(problem, objective, rng)
            else:
                _search_parts(searcher, problem, objective, rng, bounds, budget)
        except BudgetExhausted:
            stopped_by = "budget"
        except KeyboardInterrupt:
            stopped_by = "interrupted"
    if len(bounds) > 1:
        objective.lower_bound_s = max(min(bounds.values()), proven_s)
    objective.record()
    best = objective.best
    if spec.target is not None and best is not None and best[1].fits:
        objective.note(_limit_note(problem, spec, profile, objective))
    if best is not None and not best[1].fits:
        reason = f"no plan that was tried fits; the closest misses {best[1].bytes_missing / GIB:.2f} GiB in all"
        best = None
    if best is None and not reason:
        reason = "the search ended before it tried a plan"
        if objective.evaluations and spec.target is not None:
            reason = f"no plan that was tried can be written for space.target={spec.target}"
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
        proven_optimal=(
            best is not None
            and objective.best_s <= objective.lower_bound_s * (1 + OPTIMAL_WITHIN)
            and any(not outside(Space(problem, part, estimator), best[0]) for part in bounds)
        ),
        stopped_by=stopped_by,
        reason=reason,
        seed=seed,
        pruning=pruning,
        # what a searcher made for one part says nothing of the others
        artifacts=_artifacts(searcher if len(bounds) == 1 else None, scorer) if stopped_by != "infeasible" else {},
        profile=profile,
        notes=(*objective.notes, *(scorer.lines(best[0]) if scorer is not None and best else ())),
        profile_gaps=estimator.gaps(best[0]) if best else (),
        score_s=objective.best_s if best else None,
        scored=scorer.facts(best[0]) if scorer is not None and best else None,
    )


def _search_parts(
    searcher: Searcher,
    problem: Problem,
    objective: Objective,
    rng: np.random.Generator,
    bounds: dict[SpaceSpec, float],
    budget: Budget,
) -> None:
    """Search the parts of a space, those with the lowest bounds first, until each is finished or can hold no better
    plan. Raises BudgetExhausted if the budget ends before.

    bounds: what no plan of each part can beat; raised in place to what the searches prove. Each search is given a share
    of what is left of the budget, so that the first ones get most of it.
    """
    waiting = [part for part in sorted(bounds, key=bounds.__getitem__) if bounds[part] < np.inf]
    while waiting:
        for part in list(waiting):
            if bounds[part] >= objective.best_s:
                waiting.remove(part)
                continue
            objective.enter(part, _share(budget, objective, min(PARTS_AT_ONCE, len(waiting))), bounds[part])
            try:
                searcher.search(problem, objective, rng)
                waiting.remove(part)
            except BudgetExhausted:
                pass
            finally:
                bounds[part] = max(bounds[part], objective.lower_bound_s)


def _share(budget: Budget, objective: Objective, among: int) -> Budget:
    """An equal share of what is left of `budget`. Raises BudgetExhausted if that is nothing."""
    evaluations, seconds = None, None
    if budget.evaluations is not None:
        evaluations = -(-(budget.evaluations - objective.evaluations) // among)
    if budget.seconds is not None:
        seconds = (budget.seconds - objective.seconds) / among
    if (evaluations is not None and evaluations <= 0) or (seconds is not None and seconds <= 0):
        raise BudgetExhausted
    return Budget(evaluations, seconds)


def _limit_note(problem: Problem, spec: SpaceSpec, profile: Profile | None, objective: Objective) -> str:
    """What the limit to one trainer costs, as far as bounds tell."""
    free_s = lower_bound(problem, replace(spec, target=None), profile).seconds
    return (
        f"limited to what {spec.target} can be told: no such plan is faster than {objective.lower_bound_s:.3f} s, and "
        f"without the limit none than {free_s:.3f} s (proven); the limit costs at most "
        f"{objective.best_s / free_s - 1:.1%}"
    )


def outside(space: Space, plan: Plan) -> str:
    """Why a plan lies outside the declared space, of which alone a bound speaks; empty if it does not."""
    if plan.num_microbatches not in space.num_microbatches:
        return f"num_microbatches={plan.num_microbatches} is none of {list(space.num_microbatches)}"
    if len(plan.stages) > space.max_stages:
        return f"it has {len(plan.stages)} stages, the space at most {space.max_stages}"
    try:
        genome = space.genome(plan)
    except InputError as error:
        return str(error).removeprefix("space: ")
    if space.plan(genome) != plan:
        return "it differs from the space's plan in sequence_parallel"
    if space.spec.survives and not fits_with_failures(space, genome):
        return f"a stage has no room for the work of {space.spec.survives} dead replicas (space.survives)"
    return ""


def fits_with_failures(space: Space, genome: Genome) -> bool:
    """Whether every stage keeps what `SpaceSpec.survives` asks for."""
    caps = space.tables(genome.num_microbatches).caps(genome.options)
    return all(layers <= cap for layers, cap in zip(genome.layers, caps, strict=True))


def _artifacts(*makers: Searcher | Scorer | None) -> dict[str, bytes]:
    """What searcher and scorer made besides plans. Raises ValueError for a name that is not a plain file name."""
    made: dict[str, bytes] = {}
    for maker in makers:
        own: Mapping[str, bytes] = getattr(maker, "artifacts", dict)()
        for name in own:
            if not name or name.startswith(".") or PurePath(name).name != name or "\\" in name:
                raise ValueError(f"{type(maker).__name__}.artifacts: {name!r} is not a plain file name")
        made.update(own)
    return made


def load_searcher(name: str, parameters: Mapping[str, Any] | None = None) -> Searcher:
    """The searcher called `name`, built with `parameters`; its module is imported only now.

    It is the class of the module `haap_rl.search.<name>` or `haap_rl.search.strategies.<name>`, or else what an
    installed package offers under that name in the entry point group `haap_rl.searchers`. Raises InputError for an
    unknown name or parameter, and for an entry point that does not lead to a searcher.
    """
    searcher_class = _own_class(name) or _installed_class(name)
    if parameters is not None:
        known = list(inspect.signature(searcher_class).parameters)
        check_keys(f"search={name}", parameters, (), known)
    searcher: Searcher = searcher_class(**(parameters or {}))
    return searcher


def _own_class(name: str) -> Any:
    """The one class with a search method in our module `name`; None where there is no such module."""
    if not name.isidentifier() or name in ("base", "strategies", "__init__"):
        return None
    places = [f"haap_rl.search.{name}", f"haap_rl.search.strategies.{name}"]
    place = next((place for place in places if importlib.util.find_spec(place) is not None), None)
    if place is None:
        return None
    module = importlib.import_module(place)
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
