"""Expected throughput of a plan under a failure model and a policy, in closed form.

Components fail and return by themselves, so the probability of a set D of them being down is a product, and every flow
between two sets equals the flow back. In a set that is left at rate L, a dead time t on entry leaves the share e^(-L t)
of a visit; sets are entered by failures as often as they are left by returns, and the other way round. So, with the
tokens per second r(D) of the policy and the share k(D) that checkpoints leave (Daly 2006),

    E = sum over D of P(D) r(D) k(D) [returns e^(-L failure_s) + failures e^(-L return_s or restart_s)] / L

exact for exponential times but for k(D) where several sets run (`markov` solves the chain itself; tests hold the two
equal). Times of another kind have the same P(D) and, here, the rates of their means.

Three ways to the sum, with bounds where it is cut off: `Counts` compiled, where the replicas of a stage are alike and
every cell has one cause of failure; `by_sets`, its readable twin, every set of few components; `by_draws` for the rest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from haap_rl.cost.estimator import StageKey
from haap_rl.faults.checkpoint import kept_share, youngs_interval_s
from haap_rl.faults.cost import Cell, FaultEstimator
from haap_rl.faults.model import Component
from haap_rl.faults.policy import Down, PartOfPlan, StagePolicy, Stopped, part_of
from haap_rl.faults.reactions import Reactions
from haap_rl.faults.response import Transitions
from haap_rl.problem.plan import Plan

MOST_SETS = 12  # elements, of which every set is enumerated
DRAWS, SEED = 256, 0  # of `by_draws`: the same numbers for every plan, so that plans differ by less than draws do
COUNT_DRAWS = 2048  # of numbers of failures, which are compiled
LEAST_PROBABILITY = 1e-5  # of a set of numbers of failures that is enumerated
LEAST_COVERED = 0.9  # of all probability that is counted; below it none is likely, and they are drawn


class Expected(NamedTuple):
    """What a plan is worth under failures.

    tokens_per_s        expected, transitions, restarts, checkpoints and lost work taken off
    lower, upper        tokens/s that it is not below or above: what is not enumerated makes nothing, or as much as the
                        healthy plan; a 95 % interval where sets are drawn
    failure_free        tokens/s of the healthy plan
    fidelity            share of attention gradients that are computed, weighted by tokens
    stopped             share of time in which training is stopped by what is down
    stops_per_s         how often it is stopped
    interval_s          between checkpoints
    states              numbers or sets of failures that were looked at
    method              counts, sets or draws
    """

    tokens_per_s: float
    lower: float
    upper: float
    failure_free: float
    fidelity: float
    stopped: float
    stops_per_s: float
    interval_s: float
    states: int
    method: str

    @property
    def share(self) -> float:
        """Expected over failure-free throughput."""
        return self.tokens_per_s / self.failure_free


@dataclass(frozen=True, slots=True)
class Element:
    """Components with one effect, as one: any of them down takes the cells and idle devices with it.

    fails, returns: per second, so that availability and frequency of failures are those of its components together.
    """

    cells: tuple[Cell, ...]
    idle: tuple[tuple[int, int], ...]  # (device group, devices)
    fails: float
    returns: float

    @property
    def unavailability(self) -> float:
        return self.fails / (self.fails + self.returns)


def elements(reactions: Reactions) -> list[Element]:
    """The components of `reactions` that matter to the plan, those of equal effect merged."""
    together: dict[tuple[Any, ...], list[Component]] = {}
    for component, cells, idle in zip(reactions.components, reactions.cells, reactions.idle, strict=True):
        # idle devices are alike, but each is its own; cells say which one it is
        key = (cells, idle if cells else (component.domain, component.group, component.first_device), idle)
        together.setdefault(key, []).append(component)
    found = []
    for (cells, _, idle), components in together.items():
        if not cells and not idle:
            continue
        fails = math.fsum(component.failure_rate for component in components)
        up = math.prod(1.0 - component.unavailability for component in components)
        found.append(Element(cells, idle, fails, fails * up / (1.0 - up)))
    return found


# ------------------------------------------------------------------------------------- the readable sum, set by set
def by_sets(reactions: Reactions, parts: Sequence[Element]) -> Expected:
    """Every set of the elements; exponential in their number."""
    sets = list(itertools.product((False, True), repeat=len(parts)))
    shares = [
        math.prod(e.unavailability if d else 1 - e.unavailability for e, d in zip(parts, s, strict=True)) for s in sets
    ]
    return _summed(reactions, parts, sets, shares, "sets")


def by_draws(reactions: Reactions, parts: Sequence[Element]) -> Expected:
    """Sets drawn at random, the same random numbers for every plan; a stop is looked for behind one failure of each."""
    uniform = np.random.default_rng(SEED).random((DRAWS, len(parts)))
    drawn = uniform < np.array([element.unavailability for element in parts])
    return _summed(reactions, parts, [tuple(row) for row in drawn.tolist()], [1.0 / DRAWS] * DRAWS, "draws")


def _summed(
    reactions: Reactions,
    parts: Sequence[Element],
    sets: Sequence[tuple[bool, ...]],
    shares: Sequence[float],
    method: str,
) -> Expected:
    """The sum over sets of elements that are down, each with its probability."""

    def respond(down: tuple[bool, ...]) -> Any:
        return reactions.of(down_of(reactions, [part for part, is_down in zip(parts, down, strict=True) if is_down]))

    picks = np.random.default_rng(SEED).random(len(sets))
    stops = [0.0] * len(sets)  # rate at which a set that runs is left for one that is stopped
    responses = [respond(down) for down in sets]
    for x, (down, response) in enumerate(zip(sets, responses, strict=True)):
        if not response.runs:
            continue
        up = [i for i, is_down in enumerate(down) if not is_down]
        if method == "draws" and up:
            total = math.fsum(parts[i].fails for i in up)
            steps = np.cumsum([parts[i].fails for i in up]) / total
            i = up[min(int(np.searchsorted(steps, picks[x])), len(up) - 1)]
            stops[x] = 0.0 if respond((*down[:i], True, *down[i + 1 :])).runs else total
        else:
            stops[x] = math.fsum(parts[i].fails for i in up if not respond((*down[:i], True, *down[i + 1 :])).runs)
    stops_per_s = math.fsum(share * rate for share, rate in zip(shares, stops, strict=True))
    transitions = _settled_transitions(reactions, stops_per_s)
    made, lost, stopped = [], 0.0, 0.0
    for down, response, share, rate in zip(sets, responses, shares, stops, strict=True):
        if not response.runs:
            stopped += share
            made.append(0.0)
            continue
        fails = math.fsum(part.fails for part, is_down in zip(parts, down, strict=True) if not is_down)
        returns = math.fsum(part.returns for part, is_down in zip(parts, down, strict=True) if is_down)
        tokens = response.tokens_per_s * productive(transitions, fails, returns, rate)
        made.append(tokens)
        lost += share * tokens * response.attention_lost
    total = math.fsum(share * tokens for share, tokens in zip(shares, made, strict=True))
    spread = 1.96 * float(np.std(made)) / math.sqrt(len(made)) if method == "draws" else 0.0
    healthy = reactions.estimator.healthy(reactions.plan).tokens_per_s
    return Expected(
        tokens_per_s=total,
        lower=max(0.0, total - spread),
        upper=min(healthy, total + spread),
        failure_free=healthy,
        fidelity=1.0 - lost / total if total else 1.0,
        stopped=stopped,
        stops_per_s=stops_per_s,
        interval_s=transitions.checkpoint_interval_s,
        states=len(sets),
        method=method,
    )


def productive(transitions: Transitions, fails: float, returns: float, stops: float) -> float:
    """Share of the time in a set that counts; rates per second: failures, returns, failures that stop training."""
    leaves = fails + returns
    made = 1.0
    if leaves:
        made = (
            returns * math.exp(-leaves * transitions.failure_s)
            + (fails - stops) * math.exp(-leaves * transitions.return_s)
            + stops * math.exp(-leaves * transitions.restart_s)
        ) / leaves
    return made * kept_share(
        transitions.checkpoint_interval_s, transitions.checkpoint_s, 1.0 / stops if stops else math.inf
    )


def _settled_transitions(reactions: Reactions, stops_per_s: float) -> Transitions:
    """The transitions with the checkpoint interval that is given, or Young's for that rate of stops."""
    given = reactions.policy.constants.checkpoint_interval_s
    if given is None:
        mtbf_s = 1.0 / stops_per_s if stops_per_s else math.inf
        given = youngs_interval_s(reactions.transitions.checkpoint_s, mtbf_s)
        if math.isnan(given):  # checkpoints that cost nothing, and nothing that stops training
            given = 0.0
    return reactions.transitions._replace(checkpoint_interval_s=given)


def down_of(reactions: Reactions, down: Sequence[Element]) -> Down:
    """What is down with those elements."""
    idle = list(reactions.spare)
    for element in down:
        for group, devices in element.idle:
            idle[group] -= devices
    return Down(frozenset(cell for element in down for cell in element.cells), tuple(idle))


# ------------------------------------------------------------------------------------------ compiled, count by count
class StageStates(NamedTuple):
    """What a stage does with each number of dead replicas of each of its replica groups; arrays (X,).

    lost: share of its attention gradients.
    """

    forward_s: npt.NDArray[np.float64]
    backward_s: npt.NDArray[np.float64]
    tail_s: npt.NDArray[np.float64]
    lost: npt.NDArray[np.float64]
    runs: npt.NDArray[np.int64]


class Counts:
    """Numbers of failures of many plans, compiled: what stages do is worked out once for all plans that have it.

    All numbers of a probability of at least `least`, or, where those are less than LEAST_COVERED of all probability,
    numbers drawn at random.
    """

    def __init__(self, estimator: FaultEstimator, policy: StagePolicy, least: float = LEAST_PROBABILITY) -> None:
        self.estimator, self.policy, self.least = estimator, policy, least
        self._stages: dict[tuple[StageKey, tuple[int, ...], int, tuple[int, ...]], StageStates] = {}
        self._drawn: npt.NDArray[np.float64] | None = None

    def __call__(self, reactions: Reactions, parts: Sequence[Element]) -> Expected:
        """The sum over numbers of failures of each class of elements that are alike."""
        from haap_rl.faults import kernels  # numba is imported where it is used

        estimator, plan = self.estimator, reactions.plan
        healthy, keys = estimator.healthy(plan), estimator.keys(plan)
        slots = [(i, g) for i, key in enumerate(keys) for g in range(len(key.replicas))]
        classes = _classes(plan, slots, parts)
        most = _most_dead(classes, [keys[i].replicas[g].dp for i, g in slots], self.least)
        tables = self._states(reactions, keys, slots, classes, most, healthy)
        p, num_classes = len(keys), len(classes)
        if not num_classes:
            return by_sets(reactions, [])
        work = (
            np.zeros((9, p)), np.zeros(num_classes, np.int64), np.zeros(p, np.int64), np.zeros(num_classes + 1),
            np.zeros(num_classes + 1), np.zeros(3),
        )  # fmt: skip
        sums, transitions = np.zeros(7), reactions.transitions
        fills = 1 if self.policy.fills_bubbles else 0
        seconds, produced = healthy.iteration_s, float(healthy.tokens_per_iteration)
        uniform = self._uniform(num_classes)

        def run(given: Transitions, priced: int, drawn: bool) -> None:
            numbers, m = tuple(map(float, given)), plan.num_microbatches
            if drawn:
                kernels.sample(tables, uniform, m, seconds, produced, fills, numbers, priced, work, sums)
            else:
                kernels.expect(tables, self.least, m, seconds, produced, fills, numbers, priced, work, sums)

        run(transitions, 0, False)
        drawn = bool(sums[kernels.COVERED] < LEAST_COVERED)
        if drawn:
            run(transitions, 0, True)
        transitions = _settled_transitions(reactions, float(sums[kernels.STOPS]))
        run(transitions, 1, drawn)
        covered, tokens, lost, stops, stopped, count, squares = sums.tolist()
        mean, rest = tokens / covered, max(0.0, 1.0 - covered)  # what is left out is taken to be like the rest
        low, high = tokens, tokens + rest * healthy.tokens_per_s
        if drawn:
            half = 1.96 * math.sqrt(max(0.0, squares / covered - mean**2) / count)
            low, high = max(0.0, mean - half), min(healthy.tokens_per_s, mean + half)
        return Expected(
            tokens_per_s=mean,
            lower=low,
            upper=high,
            failure_free=healthy.tokens_per_s,
            fidelity=1.0 - lost / tokens if tokens else 1.0,
            stopped=stopped / covered,
            stops_per_s=stops / covered,
            interval_s=transitions.checkpoint_interval_s,
            states=int(count),
            method="draws" if drawn else "counts",
        )

    def _uniform(self, num_classes: int) -> npt.NDArray[np.float64]:
        """The numbers that states are drawn by, the same for every plan: a class has its column."""
        if self._drawn is None or self._drawn.shape[1] < num_classes:
            columns = [np.random.default_rng([SEED, c]).random(COUNT_DRAWS) for c in range(num_classes)]
            self._drawn = np.ascontiguousarray(np.array(columns).T)
        return self._drawn

    def _states(
        self,
        reactions: Reactions,
        keys: Sequence[StageKey],
        slots: Sequence[tuple[int, int]],
        classes: dict[tuple[tuple[int, ...], float, float], int],
        most: Sequence[int],
        healthy: Any,
    ) -> Any:
        """`kernels.States` of a plan."""
        from haap_rl.faults import kernels

        plan, p = reactions.plan, len(keys)
        limits = [tuple(n for (i, _), n in zip(slots, most, strict=True) if i == stage) for stage in range(p)]
        stages = [self._stage(part_of(self.estimator, plan, i), limits[i]) for i in range(p)]
        width = max(len(stage.runs) for stage in stages)
        forward, backward, tail, lost = (np.zeros((p, width)) for _ in range(4))
        runs = np.zeros((p, width), np.int64)
        layers = np.array([key.num_layers for key in keys]) / sum(key.num_layers for key in keys)
        own = [self.estimator.stage_cost(key).gradient_sync_s for key in keys]
        for i, stage in enumerate(stages):
            n = len(stage.runs)
            blocked_s = healthy.stages[i].blocked_s / 2.0
            tied_s = healthy.stages[i].gradient_sync_s - own[i]
            forward[i, :n], backward[i, :n] = stage.forward_s + blocked_s, stage.backward_s + blocked_s
            tail[i, :n], lost[i, :n], runs[i, :n] = stage.tail_s + tied_s, stage.lost * layers[i], stage.runs
        strides = [math.prod(limits[i][h] + 1 for h in range(g)) for i, g in slots]
        sizes = np.array(list(classes.values()), np.int64)
        down = [fails / (fails + returns) for _, fails, returns in classes]
        longest = max((_most_of(n, u, self.least) for n, u in zip(sizes.tolist(), down, strict=True)), default=0)
        share = np.zeros((len(classes), longest + 1))
        for c, (n, u) in enumerate(zip(sizes.tolist(), down, strict=True)):
            share[c] = [_binomial(n, k, u) for k in range(longest + 1)]
        return kernels.States(
            size=sizes,
            share=share,
            mode=share.argmax(1) if len(share) else np.zeros(0, np.int64),
            fails=np.array([fails for _, fails, _ in classes]),
            returns=np.array([returns for _, _, returns in classes]),
            takes=np.array([takes for takes, _, _ in classes], np.int64).reshape(len(classes), len(slots)),
            stage=np.array([i for i, _ in slots], np.int64),
            stride=np.array(strides, np.int64),
            most=np.array(most, np.int64),
            forward_s=forward,
            backward_s=backward,
            tail_s=tail,
            lost=lost,
            runs=runs,
            delay_s=np.array([*healthy.delays_s, 0.0]),
        )

    def _stage(self, part: PartOfPlan, most: tuple[int, ...]) -> StageStates:
        """What one stage does with up to `most` dead replicas of each replica group."""
        key = part.keys[part.stage]
        known = (key, part.samples, part.held, most)
        if known not in self._stages:
            self._stages[known] = self._work_out(PartOfPlan((key,), 0, part.samples, part.held), most)
        return self._stages[known]

    def _work_out(self, part: PartOfPlan, most: tuple[int, ...]) -> StageStates:
        estimator, key = self.estimator, part.keys[0]
        width = math.prod(n + 1 for n in most)
        forward, backward, tail, lost = (np.zeros(width) for _ in range(4))
        runs = np.zeros(width, np.int64)
        first = np.cumsum([0, *(group.dp for group in key.replicas)])
        for x, reverse in enumerate(itertools.product(*(range(n + 1) for n in reversed(most)))):
            numbers = reverse[::-1]
            dead = [int(first[g]) + r for g, n in enumerate(numbers) for r in range(n)]
            if len(dead) == len(part.samples):
                continue
            if not dead:
                cost = estimator.stage_cost(key)
                forward[x], backward[x], runs[x] = cost.forward_s, cost.backward_s, 1
                tail[x] = cost.gradient_sync_s + cost.optimizer_s
                continue
            work = self.policy.stage_work(estimator, part, dead)
            if isinstance(work, Stopped):
                continue
            if any(cell.missing_bytes for cell in estimator.stage_memory(0, work, part.keys, part.held)):
                continue
            forward[x], backward[x], sync_s, step_s = estimator.stage(0, work, part.keys)
            tail[x], runs[x] = sync_s + step_s, 1
            skipped = [task for tasks in work for task in tasks if task.backward == "mecefo"]
            lost[x] = sum(task.share * task.samples for task in skipped) / sum(part.samples)
        return StageStates(forward, backward, tail, lost, runs)


def _classes(
    plan: Plan, slots: Sequence[tuple[int, int]], parts: Sequence[Element]
) -> dict[tuple[tuple[int, ...], float, float], int]:
    """(replicas taken of each slot, failures per second, returns per second) -> how many elements are so."""
    of_cell: dict[Cell, int] = {}
    for q, (i, g) in enumerate(slots):
        first = sum(group.dp for group in plan.stages[i].replicas[:g])
        for r in range(plan.stages[i].replicas[g].dp):
            of_cell[Cell(i, first + r)] = q
    classes: dict[tuple[tuple[int, ...], float, float], int] = {}
    for element in parts:
        if element.cells:
            takes = [0] * len(slots)
            for cell in element.cells:
                takes[of_cell[cell]] += 1
            key = (tuple(takes), element.fails, element.returns)
            classes[key] = classes.get(key, 0) + 1
    return classes


def _most_dead(
    classes: dict[tuple[tuple[int, ...], float, float], int], sizes: Sequence[int], least: float
) -> list[int]:
    """Dead replicas of each slot that need to be looked at: more are less likely than `least`, or are all."""
    most = [0] * len(sizes)
    for (takes, fails, returns), n in classes.items():
        likely = _most_of(n, fails / (fails + returns), least)
        most = [m + t * min(n, likely + 1) for m, t in zip(most, takes, strict=True)]
    return [min(m, n) for m, n in zip(most, sizes, strict=True)]


def _most_of(number: int, share: float, least: float) -> int:
    """The largest count of a binomial distribution whose probability reaches `least`."""
    k = number
    while k > 0 and _binomial(number, k, share) < least:
        k -= 1
    return k


def _binomial(number: int, k: int, share: float) -> float:
    if k > number or not 0.0 < share < 1.0:
        return float(k == (number if share == 1.0 else 0))
    ways = math.lgamma(number + 1) - math.lgamma(k + 1) - math.lgamma(number - k + 1)  # comb() overflows a float
    return math.exp(ways + k * math.log(share) + (number - k) * math.log1p(-share))


def with_best_interval(reactions: Reactions) -> Reactions:
    """The reactions with the checkpoint interval that their constants give, or Young's for how often they stop."""
    if reactions.policy.constants.checkpoint_interval_s is not None:
        return reactions
    return reactions.with_interval(expected_throughput(reactions).interval_s)


def expected_throughput(reactions: Reactions, counts: Counts | None = None) -> Expected:
    """What the plan of `reactions` is worth, by the fastest way that its policy allows.

    counts: where what stages do is remembered from plan to plan.
    """
    parts, policy = elements(reactions), reactions.policy
    apart = [cell for element in parts for cell in element.cells]
    one_cause = len(apart) == len(set(apart))  # else two that are down may take the same cell, and counts do not add up
    if isinstance(policy, StagePolicy) and policy.separable(reactions.plan) and one_cause:
        return (counts or Counts(reactions.estimator, policy))(reactions, parts)
    return by_sets(reactions, parts) if len(parts) <= MOST_SETS else by_draws(reactions, parts)
