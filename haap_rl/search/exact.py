"""A proven optimum for moderate sizes: dynamic programming on a lower bound, then every plan that could beat the best.

The path bound of a plan with m micro-batches, s counting stages from the end (see `cost.schedule.lower_bound_s`):

    bound = S + max_s c_s     S    one micro-batch alone, transfers included, plus the first stage's sync and step
                              c_s  (m-1-w) (f+b) + w max(f, b) of stage s, w = min(s-1, m-1); f and b include the
                                   blocking part of the transfers to the stage behind

1. For each m a dynamic program finds the plan of least bound: it minimises S subject to c_s <= limit, from the last
   stage to the first, so that in-flight counts and memory are exact; the limit then drops to just below the plan's own
   max c and to best - S, and the two sides meet (a plan with a smaller max c cannot have a smaller S). The least bound
   over all m is a proven lower bound on the scored time, and its plans are good ones.
2. Every plan whose bound is below the best scored time is enumerated by walking back through the program's tables, and
   scored. When none is left the best plan is a proven optimum of the declared space.

Transfers and the first stage's sync are priced as if stages sat as well as they could, so the bound holds wherever
placement puts them. The walk
of step 2 knows both neighbours of a stage and counts both transfers in c_s. The tables have (stages x stage shapes x
layers x devices used) entries; a cluster for which that is too many is refused. States are not plan evaluations: only
scored plans count.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from haap_rl.cost.estimator import BoundaryKey, ReplicaKey, SideKey, StageKey
from haap_rl.problem.errors import InputError, positive_int
from haap_rl.problem.plan import Problem
from haap_rl.search.autohaap import AutoHAAP
from haap_rl.search.base import Objective
from haap_rl.space.options import FIRST, LAST, SEQUENCE_PARALLEL, Tables, device_slices, possible_nodes
from haap_rl.space.space import Genome, Space

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
LARGEST = 1e300  # seconds; finite, so that "does not fit" is larger
MOST_ENTRIES = 50_000_000  # of the tables, 8 bytes each
SLIGHTLY = 1e-9  # relative: bounds this close to the best are not worth a walk


class Exact:
    """Proves the optimum, or the best bound that the budget allows.

    heuristic: evaluations that the baseline heuristic uses between the two steps, at most half of the budget; a good
    plan spares most of the second one.
    """

    def __init__(self, heuristic: int = 2000) -> None:
        self.heuristic = positive_int("search=exact", "heuristic", heuristic)

    def search(self, problem: Problem, objective: Objective, rng: np.random.Generator) -> None:
        space = objective.space
        programs = [Program(space, m, objective.checkpoint) for m in space.num_microbatches]
        bounds: list[float] = []
        for program in programs:
            bound_s, genome = program.least_bound(best_s(objective))
            bounds.append(bound_s)
            if genome is not None:
                objective(space.plan(genome))
        objective.prove(min(*bounds, best_s(objective)))

        allowed = self.heuristic if objective.remaining is None else min(self.heuristic, objective.remaining // 2)
        until = objective.evaluations + allowed
        while objective.evaluations < until and best_s(objective) > objective.lower_bound_s * (1 + SLIGHTLY):
            AutoHAAP().descend(objective, rng)

        order = sorted(range(len(programs)), key=lambda i: bounds[i])
        for position, i in enumerate(order):
            for genome in programs[i].below(lambda: best_s(objective)):
                objective(space.plan(genome))
            objective.prove(min([best_s(objective), *(bounds[j] for j in order[position + 1 :])]))


def best_s(objective: Objective) -> float:
    """Iteration time of the best plan so far that fits, or infinity."""
    return objective.best[1].iteration_s if objective.best is not None and objective.best[1].fits else math.inf


class Shape(NamedTuple):
    """Stages that look alike from outside: a device group, a number of devices, and the options that give it."""

    group: int
    devices: int
    members: IntArray


class Solution(NamedTuple):
    """Tables of one pass: least S of the last s stages, by shape of the foremost, layers placed, devices used.

    most_c      no stage has a larger c_s
    open[s]     (shapes, L+1, devices...) where more stages follow in front
    closed[s]   (shapes, devices...) where the foremost is the pipeline's first; inf where there is no such plan
    """

    most_c: float
    least_s: float
    open: list[FloatArray]
    closed: list[FloatArray]


class Partial(NamedTuple):
    """A plan's front part on the way back through the tables: its s-th stage from the end is to be chosen next."""

    s: int
    shape: int  # of that stage
    layers: int  # that it and the stages behind it hold
    used: tuple[int, ...]  # devices that they use, per group
    alone_s: float  # S of the front part, with the link to the stage to be chosen
    largest_c: float  # of the front part
    blocked_s: float  # of the stage to be chosen, by its transfers to the stage in front
    stages: tuple[tuple[int, int], ...]  # (option, layers), front to back


class Program:
    """The dynamic program of one number of micro-batches; memory counts whatever the ablation switches say.

    checkpoint: called again and again during long work; it may raise to end it.
    """

    def __init__(self, space: Space, m: int, checkpoint: Callable[[], None] = lambda: None) -> None:
        self.space, self.m, self._checkpoint = space, m, checkpoint
        estimator = space.estimator
        tables = Tables(space.problem, space.spec, space.options, estimator, m, memory=True)
        self.num_layers, self.max_stages = space.num_layers, tables.max_stages
        self.max_layers = tables.max_layers
        usable = [k for k in range(len(space.options)) if np.isfinite(tables.forward_s[k, 1])]
        keys = sorted({(space.options[k].group, space.options[k].num_devices) for k in usable})
        self.shapes = [
            Shape(*key, np.array([k for k in usable if (space.options[k].group, space.options[k].num_devices) == key]))
            for key in keys
        ]
        entries = len(keys) * (self.num_layers + 1) * math.prod(n + 1 for n in space.num_devices) * self.max_stages
        if entries > MOST_ENTRIES:
            raise InputError(
                f"search=exact: {entries:,} table entries for {sum(space.num_devices)} devices are more than "
                f"{MOST_ENTRIES:,}; use fewer space.group_sizes, a smaller space.max_stages, or +search=autohaap"
            )
        self.send_s = self._links()
        blocking = estimator.framework.send_blocking
        self.link = 2.0 * (1.0 + blocking) * self.send_s  # in S: both directions, and what they block of both stages
        self.blocked_s = blocking * self.send_s  # of each of the two stages, per direction
        self._stage_times(tables)

    def _stage_times(self, tables: Tables) -> None:
        """alone[position] (K, L+1): a stage's part of S; and what its c_s is made of."""
        layers = np.arange(self.num_layers + 1)
        host = self.space.estimator.framework.host_microbatch_s
        self.alone: list[FloatArray] = []
        self.longer: list[FloatArray] = []  # the longer of forward and backward
        for position in range(4):
            first, last = bool(position & FIRST), bool(position & LAST)
            with np.errstate(invalid="ignore"):
                times = [
                    table[:, 1:2] * layers + first * table[:, 0:1] + last * table[:, 2:3]
                    for table in (tables.forward_s, tables.backward_s)
                ]
            self.alone.append(times[0] + host + times[1])
            self.longer.append(np.maximum(times[0] + host, times[1]))
        self._weights: dict[tuple[int, int], FloatArray] = {}
        self.tail = np.zeros((2, len(self.space.options), self.num_layers + 1))  # 1: the only stage, with the head
        for shape in self.shapes:
            for k in shape.members:
                for only in (0, 1):
                    for n in range(1, int(self.max_layers[k, FIRST | only * LAST].max()) + 1):
                        self.tail[only, k, n] = self._first_stage_tail_s(int(k), n, bool(only))

    def _first_stage_tail_s(self, k: int, layers: int, only: bool) -> float:
        """Least seconds of gradient sync and optimiser step of a first stage on option k, wherever it is placed.

        With the option's own recomputation: a longer last backward pass hides more of the synchronisation.
        """
        option, space = self.space.options[k], self.space
        tails = []
        for nodes in possible_nodes(space.problem, space.options, option):
            replica = ReplicaKey(option.group, option.tp, option.dp, self._samples // option.dp, nodes, 1)
            again = 0 if option.recompute == "none" else layers
            zero = space.spec.zero_stage
            key = StageKey(True, only, layers, (replica,), option.recompute, again, zero, SEQUENCE_PARALLEL)
            cost = space.estimator.stage_cost(key)
            tails.append(cost.gradient_sync_s + cost.optimizer_s)
        return min(tails)

    @property
    def _samples(self) -> int:
        return self.space.problem.global_batch_size // self.m

    def _links(self) -> FloatArray:
        """(shapes, shapes) least seconds of one transfer from the row's shape to the column's behind it."""
        problem, estimator = self.space.problem, self.space.estimator
        num_bytes = float(self._samples * problem.seq_len * problem.model.hidden * estimator.value_bytes)
        links = np.zeros((len(self.shapes), len(self.shapes)))
        for i, front in enumerate(self.shapes):
            for j, behind in enumerate(self.shapes):
                sender, receiver = self._side(front), self._side(behind)
                per_node = problem.cluster.groups[front.group].devices_per_node
                near = front.group == behind.group and front.devices + behind.devices <= per_node
                keys = [BoundaryKey(sender, receiver, one_node) for one_node in {False, near}]
                links[i, j] = min(estimator.send_s(key, num_bytes) for key in keys)
        return links

    def _side(self, shape: Shape) -> SideKey:
        """A stage of this shape as one side of a boundary, with all the NICs that it may touch."""
        option = self.space.options[int(shape.members[0])]
        most_nodes = possible_nodes(self.space.problem, self.space.options, option)[-1]
        return ((shape.group, shape.devices, most_nodes),)

    def _leaves_once(self, s: int, position: int) -> FloatArray:
        """(K, L+1) c_s of a stage at place s without its transfers; inf where it does not fit. Kept once computed."""
        kept = self._weights.get((s, position))
        if kept is None:
            ahead = min(s - 1, self.m - 1)
            with np.errstate(invalid="ignore"):  # inf x 0 where a micro-batch cannot be divided; not a fit below
                weight = (self.m - 1 - ahead) * self.alone[position] + ahead * self.longer[position]
            fits = np.arange(self.num_layers + 1) <= self.max_layers[:, position, s][:, None]
            kept = self._weights[s, position] = np.where(fits, weight, np.inf)
        return kept

    def _blocked_c(self, s: int) -> float:
        """What one second of blocking, in each direction, adds to c_s at place s."""
        ahead = min(s - 1, self.m - 1)
        return 2.0 * (self.m - 1 - ahead) + ahead

    # ------------------------------------------------------------------------ one pass
    def solve(self, most_c: float) -> Solution:
        """Least S over the plans whose every c_s is at most `most_c`."""
        devices = tuple(n + 1 for n in self.space.num_devices)
        layers = self.num_layers
        before = np.zeros((0, layers + 1, *devices))
        opened, closed, least = [before], [np.zeros((0, *devices))], math.inf
        for s in range(1, self.max_stages + 1):
            self._checkpoint()
            after = np.full((len(self.shapes), layers + 1, *devices), np.inf)
            ends = np.full((len(self.shapes), *devices), np.inf)
            last = LAST if s == 1 else 0
            inner_c, front_c = self._leaves_once(s, last), self._leaves_once(s, FIRST | last)
            for c, shape in enumerate(self.shapes):
                into, origin = device_slices(self.space.num_devices, shape.group, shape.devices)
                inside, first = after[c][(slice(None), *into)], ends[c][into]
                for reach, blocked_s in self._reaches(s, c, before):
                    source = reach[(slice(None), *origin)]
                    if not np.isfinite(source).any():
                        continue
                    spare_c = most_c - self._blocked_c(s) * blocked_s
                    inner, front = self._cheapest(shape, last, inner_c, front_c, spare_c)
                    for n in np.flatnonzero(np.isfinite(inner)).tolist():  # never all layers: a stage follows in front
                        np.minimum(inside[n:layers], source[: layers - n] + inner[n], out=inside[n:layers])
                    for n in np.flatnonzero(np.isfinite(front)).tolist():
                        np.minimum(first, source[layers - n] + front[n], out=first)
            opened.append(after)
            closed.append(ends)
            least = min(least, float(ends.min(initial=math.inf)))
            before = after
        return Solution(most_c, least, opened, closed)

    def _reaches(self, s: int, c: int, before: FloatArray) -> Iterator[tuple[FloatArray, float]]:
        """(least S behind a stage of shape c at place s by layers and devices, blocking seconds of their boundary)."""
        if s == 1:
            nothing = np.full(before.shape[1:], np.inf)
            nothing[(0,) * nothing.ndim] = 0.0
            yield nothing, 0.0
            return
        for blocked_s in np.unique(self.blocked_s[c]).tolist():
            alike = np.flatnonzero(self.blocked_s[c] == blocked_s)
            yield before[alike].min(0) + self.link[c, alike[0]], blocked_s

    def _cheapest(
        self, shape: Shape, last: int, inner_c: FloatArray, front_c: FloatArray, most_c: float
    ) -> tuple[FloatArray, FloatArray]:
        """(L+1,) least part of S of a stage of this shape with n layers, inside the pipeline and at its front."""
        k = shape.members
        alone_first = self.alone[FIRST | last] + self.tail[int(last > 0)]
        inner: FloatArray = np.where(inner_c[k] <= most_c, self.alone[last][k], np.inf).min(0)
        front: FloatArray = np.where(front_c[k] <= most_c, alone_first[k], np.inf).min(0)
        inner[0] = front[0] = np.inf  # a stage of no layers is none
        return inner, front

    # --------------------------------------------------------------------- both searches
    def least_bound(self, best_s: float) -> tuple[float, Genome | None]:
        """(least path bound in seconds, its genome) over the plans whose bound is below `best_s`, else (inf, None)."""
        least, genome, most_c = math.inf, None, LARGEST
        self.infeasible_c = 0.0  # every plan has a stage with a larger c_s than this
        self.least_alone_s = math.inf
        while most_c > 0:
            solution = self.solve(most_c)
            if not math.isfinite(solution.least_s):
                self.infeasible_c = most_c
                break
            self.least_alone_s = min(self.least_alone_s, solution.least_s)
            found, alone_s, largest_c = self._any_of_least_s(solution)
            if alone_s + largest_c < least:
                least, genome = alone_s + largest_c, found
            most_c = min(largest_c * (1 - SLIGHTLY), least - solution.least_s, best_s - solution.least_s)
        return (least, genome) if least < best_s else (math.inf, None)

    def below(self, best_s: Callable[[], float]) -> Iterator[Genome]:
        """Every genome whose path bound is below `best_s()`, which may fall meanwhile."""
        most_c = best_s() - self.least_alone_s
        if most_c > self.infeasible_c:
            for genome, _, _ in self._walk(self.solve(most_c), lambda: best_s() * (1 - SLIGHTLY)):
                yield genome

    def _any_of_least_s(self, solution: Solution) -> tuple[Genome, float, float]:
        """(genome, S, largest c_s) of one plan with the least S of the tables."""
        ceiling = solution.least_s * (1 + SLIGHTLY)
        return next(self._walk(solution, lambda: ceiling, c_counts=False))

    def _walk(
        self, solution: Solution, limit_s: Callable[[], float], c_counts: bool = True
    ) -> Iterator[tuple[Genome, float, float]]:
        """(genome, S, largest c_s) of every plan of the tables with S + largest c_s below `limit_s()`, best ends first.

        c_counts False: with S alone below it.
        """
        least_c = self.infeasible_c if c_counts else 0.0
        ends = []
        for s in range(1, self.max_stages + 1):
            table = solution.closed[s]
            for index in np.argwhere(table + least_c < limit_s()).tolist():
                ends.append(
                    (
                        float(table[tuple(index)]),
                        Partial(s, index[0], self.num_layers, tuple(index[1:]), 0.0, least_c, 0.0, ()),
                    )
                )
        for least_s, end in sorted(ends):
            if least_s + least_c < limit_s():
                yield from self._expand(solution, limit_s, c_counts, end)

    def _expand(
        self, solution: Solution, limit_s: Callable[[], float], c_counts: bool, partial: Partial
    ) -> Iterator[tuple[Genome, float, float]]:
        """Every completion of `partial` below the limit, the most promising stage first."""
        self._checkpoint()
        s, layers, shape = partial.s, partial.layers, self.shapes[partial.shape]
        position = (0 if partial.stages else FIRST) | (LAST if s == 1 else 0)
        rest = tuple(u - (shape.devices if d == shape.group else 0) for d, u in enumerate(partial.used))
        if s == 1 and any(rest):
            return
        weights = self._leaves_once(s, position)
        shares = np.arange(layers if s == 1 else 1, layers - (s - 1) + 1)  # layers that the stage may take
        choices: list[tuple[float, Partial]] = []
        for k in shape.members.tolist():
            own_c = weights[k, shares] + self._blocked_c(s) * partial.blocked_s
            own_s = partial.alone_s + self.alone[position][k, shares]
            if position & FIRST:
                own_s = own_s + self.tail[int(s == 1), k, shares]
            if s == 1:
                totals, heaviest = own_s[None], np.maximum(own_c, partial.largest_c)[None]
            else:
                placed = solution.open[s - 1].reshape(len(self.shapes), self.num_layers + 1, -1)
                behind_s = placed[:, layers - shares, np.ravel_multi_index(rest, solution.open[s - 1].shape[2:])]
                totals = own_s + self.link[partial.shape][:, None] + behind_s
                blocked_c = self._blocked_c(s) * self.blocked_s[partial.shape][:, None]
                heaviest = np.maximum(own_c + blocked_c, partial.largest_c)
            within = heaviest <= solution.most_c
            promising = within & (totals + (heaviest if c_counts else 0.0) < limit_s())
            for j, i in np.argwhere(promising).tolist():
                stages = (*partial.stages, (k, int(shares[i])))
                largest_c = float(heaviest[j, i])
                if s == 1:
                    longer = Partial(0, 0, 0, rest, float(own_s[i]), largest_c, 0.0, stages)
                else:
                    alone_s = float(own_s[i] + self.link[partial.shape, j])
                    front_s = float(self.blocked_s[partial.shape, j]) if c_counts else 0.0
                    longer = Partial(s - 1, j, layers - int(shares[i]), rest, alone_s, largest_c, front_s, stages)
                choices.append((float(totals[j, i]), longer))
        scored = [(least_s + (longer.largest_c if c_counts else 0.0), longer) for least_s, longer in choices]
        for bound_s, longer in sorted(scored):
            if bound_s >= limit_s():
                return
            if longer.s == 0:
                options, counts = zip(*longer.stages, strict=True)
                yield Genome(self.m, options, counts), longer.alone_s, longer.largest_c
            else:
                yield from self._expand(solution, limit_s, c_counts, longer)


def path_bound_s(program: Program, genome: Genome) -> float:
    """The path bound of one plan straight from its definition: the slow twin of the program, for reading and tests."""
    space = program.space
    shapes = [(shape.group, shape.devices) for shape in program.shapes]
    options = [space.options[k] for k in genome.options]
    where = [shapes.index((option.group, option.num_devices)) for option in options]
    p, m = len(options), genome.num_microbatches
    alone_s = (
        sum(program.link[a, b] for a, b in itertools.pairwise(where))
        + program.tail[int(p == 1), genome.options[0], genome.layers[0]]
    )
    largest_c = 0.0
    for i, (k, n) in enumerate(zip(genome.options, genome.layers, strict=True)):
        position = (FIRST if i == 0 else 0) | (LAST if i == p - 1 else 0)
        ahead = min(p - 1 - i, m - 1)
        busy_s, longer_s = float(program.alone[position][k, n]), float(program.longer[position][k, n])
        blocked_s = float(program.blocked_s[where[i], where[i + 1]]) if i < p - 1 else 0.0
        alone_s += busy_s
        largest_c = max(largest_c, (m - 1 - ahead) * (busy_s + 2 * blocked_s) + ahead * (longer_s + blocked_s))
    return float(alone_s + largest_c)
