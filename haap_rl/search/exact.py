"""A proven optimum: dynamic programming on a lower bound of the schedule, then every plan that could beat the best.

The bound of a plan with m micro-batches, s counting its stages from the end, f and b its forward and backward seconds
with what transfers block of them, t = f + b (the paths of `cost.schedule.lower_bound_s`; the second trip holds for the
tail of any stage, since its path goes down to the end last and can come up to each):

    bound = P + max_s c_s    P    one micro-batch alone, from the first stage down to the end and up to the stage whose
                                  tail (gradient sync and optimiser step) then ends last
                             c_s  what a path stays at stage s for besides, the larger of, with w = min(s-1, m-1):
                                  (m-1-w) t + w f                  in the forward direction
                                  (m-1-s) t + trip_s, if m > s     taking the last micro-batch to the end and back,
                                                                   trip_s being the round trip from this stage

1. For each m a dynamic program over (stages so far, shape of the foremost, layers placed, devices used), from the last
   stage to the first so that in-flight counts and memory are exact, minimises P subject to c_s <= limit. A plan with a
   smaller max c has no smaller P, so the limit drops to just below a found plan's max c and to best - P until the two
   sides meet: the least bound of that m. What could not end before the best time known is not kept.
2. What lies between the bound and the best plan is walked through, by thresholds: every plan of the tables whose bound
   is below best / (1 + gap) is completed front to back, its prefix bounded also by cycles of two and more stages
   (`segments` below) and by the tails of all stages, and what is left is scored exactly. A finished threshold proves
   that gap; at threshold 0 the best plan is a proven optimum of the declared space.

Segments: a micro-batch that goes from stage i to j and back occupies trip_ij, while the 1F1B order lets stage i run
only q = j - i + 1 micro-batches ahead meanwhile, so c >= floor((m-1-w_j) / q) trip_ij + rest t_j + w_j max(f, b), and
c >= floor((m-1-s_i) / q) trip_ij + rest t_i + trip_i where the last micro-batch goes to the end and back. Beside slow
boundaries the tables know a neighbour's busy time by buckets, and the second form for pairs of stages with it.

Transfers, sync and step are priced as if stages sat as well as they could, so the bounds hold wherever placement puts
them. Devices are counted in units of the largest number that divides every size of their group; stages on two device
groups are options like any other. States are not plan evaluations: only completed plans count.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from haap_rl.cost import kernels
from haap_rl.cost.compiling import ready
from haap_rl.cost.estimator import FIRST, LAST, fingerprint
from haap_rl.cost.stage_tables import StageTables
from haap_rl.problem.errors import positive_int, yes_or_no
from haap_rl.problem.plan import Problem
from haap_rl.search import exact_kernels
from haap_rl.search.autohaap import AutoHAAP
from haap_rl.search.base import BudgetExhausted, Objective
from haap_rl.search.certificate import EVERY_PLAN, FILE, SCHEMA, problem_key
from haap_rl.search.exact_kernels import INF, Choices, Pass, Walk
from haap_rl.space.options import SpaceSpec, Tables
from haap_rl.space.space import Code, Space

Floats = npt.NDArray[np.float64]
GAPS = (0.1, 0.03, 0.01, 0.003, 0.001, 0.0)  # thresholds of the walk
SLIGHTLY = 1e-9  # relative: the rounding of sums
UNEXPLAINED = 1e-3  # share by which the limit on c drops where the tables' least values belong to no one plan
LEVELS = (0.02, 0.06, 0.15, 0.4)  # boundaries that the tables tell apart, by what they block, as shares of all c
LOWS = (0.0, 0.4, 0.55, 0.65, 0.75, 0.85, 0.93)  # and busy times beside such a boundary, as shares of the longest
MOST_BYTES = 4 * 2**30  # of one m's tables
NODES_PER_CALL = 5_000_000  # of a walk, between two looks at the budget: less than a second
STATES_PER_S = 3e7  # of table entries that one pass sees, for the estimate of what is refused


class Exact:
    """Proves the optimum, or the best bound that the budget and `nodes` allow.

    heuristic        evaluations that the baseline heuristic uses first, at most half of the budget: a good plan spares
                     most of the work
    nodes            steps of the walk through what lies between bound and best plan; about 5e7 take a second
    type_contiguous  only plans in which each device group is one run of stages: an ablation, no bound of the space
    """

    no_scorer = (
        "search=exact proves iteration times, not expected throughput; use objective=iteration_time, or another search "
        "such as search=autohaap"
    )

    def __init__(self, heuristic: int = 5000, nodes: int = 300_000_000, type_contiguous: bool = False) -> None:
        where = "search=exact"
        self.heuristic, self.nodes = positive_int(where, "heuristic", heuristic), positive_int(where, "nodes", nodes)
        self.type_contiguous = yes_or_no(where, "type_contiguous", type_contiguous)
        self.certificate: dict[str, Any] = {}

    def artifacts(self) -> Mapping[str, bytes]:
        """The certificate of the last search."""
        return {FILE: (json.dumps(self.certificate, indent=2) + "\n").encode()} if self.certificate else {}

    def prepare(self) -> None:
        """Have the kernels of the proof compiled, or loaded."""
        ready("exact search", warm_up)

    def search(self, problem: Problem, objective: Objective, rng: np.random.Generator) -> None:
        self.prepare()
        proof = Proof(objective, self.nodes, self.type_contiguous)
        try:
            self._search(proof, objective, rng)
        finally:
            self.certificate = proof.certificate()
            objective.note(proof.message)
            objective.note(proof.effort)

    def _search(self, proof: Proof, objective: Objective, rng: np.random.Generator) -> None:
        if not self.type_contiguous:
            allowed = self.heuristic if objective.remaining is None else min(self.heuristic, objective.remaining // 2)
            until = objective.evaluations + allowed
            heuristic = AutoHAAP()
            while objective.evaluations < until:
                heuristic.descend(objective, rng, until - objective.evaluations)
        if proof.too_large:
            while True:  # the best plan that the budget gives, beside the bound that every run has
                AutoHAAP().search(objective.problem, objective, rng)
        proof.bound()
        for gap in GAPS:
            if proof.best_s / max(proof.lower_s, 1e-300) - 1 > gap and not proof.close(gap):
                break


class Proof:
    """What is proven so far about one objective's space.

    lower_s      no plan (of those that the proof covers) takes less
    solves, states, nodes, plans   passes of the dynamic program, states they kept, steps of walks, plans completed
    """

    def __init__(self, objective: Objective, most_nodes: int, contiguous: bool) -> None:
        self.objective, self.space, self.contiguous = objective, objective.space, contiguous
        self.most_nodes = most_nodes
        self.lower_s, self.best_s = 0.0, INF
        self.solves = self.states = self.nodes = self.plans = 0
        self.message = self.too_large = _too_large(self.space)
        self._bounds: dict[int, Bounded] = {}
        self._found: list[Code] = []
        self._buffers: dict[tuple[int, ...], tuple[Pass, Choices]] = {}
        self._take_best()

    def _take_best(self) -> None:
        """The time to beat: the objective's best, unless the proof is about fewer plans."""
        if not self.contiguous:
            self.best_s = min(self.best_s, self.objective.best_s)

    def bound(self) -> None:
        """The least bound over all micro-batch counts; the plans that come closest to it are priced, then polished."""
        self._take_best()
        for m in self.space.num_microbatches:
            self._bounds[m] = self.least_bound(m)
        self._prove(min([self.best_s, *(bounded.least_s for bounded in self._bounds.values())]))
        for code in self._found:
            self._polish(code)

    def close(self, gap: float) -> bool:
        """Walk through every plan below best / (1 + gap); whether that ended, which proves the gap."""
        for m, bounded in sorted(self._bounds.items(), key=lambda item: item[1].least_s):
            if not self._walk(m, bounded, gap):
                return False
        self._prove(self.best_s / (1.0 + gap))
        return True

    def _prove(self, lower_s: float) -> None:
        self.lower_s = max(self.lower_s, lower_s if lower_s < INF else 0.0)
        if not self.contiguous:
            self.objective.prove(self.lower_s)

    def least_bound(self, m: int) -> Bounded:
        """Squeeze P and c of one micro-batch count until they meet."""
        program = build(self.space, m, self.contiguous, self.best_s)
        if program is None:
            return Bounded(self.best_s, self.best_s, 0.0)
        tables, choices = self._tables(program)
        code = np.zeros(2 + 2 * self.space.max_stages, np.int64)
        least_s, infeasible_c, alone_s = INF, 0.0, INF
        best_code: Code | None = None
        most_c = self.best_s if self.best_s < INF else INF / 10
        while most_c > 0:
            self.objective.check_seconds()
            found_s, states = exact_kernels.solve(program, most_c, 0.0, self.best_s, tables, choices)
            self.solves, self.states = self.solves + 1, self.states + states
            if found_s >= INF:
                infeasible_c = most_c
                break
            alone_s = min(alone_s, found_s)
            start = np.array(np.unravel_index(int(tables.closed_p.argmin()), tables.closed_p.shape))
            largest_c = min(exact_kernels.any_of_least_p(program, tables, most_c, start, code), most_c)
            if code[1] == 0:  # no one plan explains the least P: what has a c just below the limit is bounded by less
                largest_c = most_c * (1 - UNEXPLAINED)
            if found_s + largest_c < least_s:
                least_s = found_s + largest_c
                best_code = code.copy() if code[1] > 0 else best_code
            most_c = min(largest_c * (1 - SLIGHTLY), least_s - found_s, self.best_s - found_s)
        if best_code is not None:
            self._found.append(best_code)
            if self.objective.remaining != 0:
                self._offer(1, best_code)
        return Bounded(min(least_s, self.best_s), infeasible_c, alone_s)

    def _polish(self, code: Code) -> None:
        """Improve a plan by changes that keep every stage's devices: the program chose it by a bound, not its time."""
        remaining, t = self.objective.remaining, self.space.stage_tables
        state = kernels.state_of(t, code)
        if state.whole[3] > 0 or remaining == 0:  # it does not fit where placement could not be the best
            return
        row, decided = code.copy(), np.zeros(5, np.int64)
        most = 1_000_000 if remaining is None else remaining
        evaluations = kernels.polish(t, state, self._alike, most, row, decided)
        self._offer(evaluations, state.plan)

    @cached_property
    def _alike(self) -> npt.NDArray[np.int64]:
        return alike_options(self.space.stage_tables)

    def _walk(self, m: int, bounded: Bounded, gap: float) -> bool:
        limit_s = self.best_s / (1.0 + gap)
        most_c = limit_s - bounded.alone_s
        if bounded.least_s >= limit_s or most_c <= bounded.infeasible_c:
            return True
        space, t = self.space, self.space.stage_tables
        program = build(space, m, self.contiguous, self.best_s)
        if program is None:
            return True
        tables, choices = self._tables(program)
        _, states = exact_kernels.solve(program, most_c, bounded.infeasible_c, limit_s, tables, choices)
        self.solves, self.states = self.solves + 1, self.states + states
        starts = np.argwhere(tables.closed_p + bounded.infeasible_c < limit_s)
        starts = starts[np.argsort(tables.closed_p[tuple(starts.T)], kind="stable")]
        stages = space.max_stages
        walk = Walk(np.zeros((7, stages + 1), np.int64), np.zeros((12, stages + 1)), np.array([-1, 0, 0, 0]))
        code, best, work = np.zeros(2 + 2 * stages, np.int64), np.zeros(2 + 2 * stages, np.int64), kernels.scratch(t)
        while True:
            self.objective.checkpoint()
            remaining = self.objective.remaining
            before = walk.control.copy()
            seconds = exact_kernels.walk(
                program, tables, t, work, walk, starts, most_c, bounded.infeasible_c, limit_s, self.best_s,
                min(NODES_PER_CALL, self.most_nodes - self.nodes), 1_000_000 if remaining is None else remaining,
                self.objective.allowed is not None, code, best,
            )  # fmt: skip
            nodes, plans = (walk.control - before)[[exact_kernels.NODES, exact_kernels.EVALUATED]].tolist()
            self.nodes += nodes
            self._offer(plans, best if seconds < self.best_s else None)
            if walk.control[exact_kernels.DEPTH] < 0 and walk.control[exact_kernels.START] >= len(starts):
                return True
            if self.nodes >= self.most_nodes:
                self.message = (
                    f"the walk ended after search.nodes={self.most_nodes:,} steps before it could prove a gap of "
                    f"{gap:.1%}; give it more, or fewer space.group_sizes"
                )
                return False

    def _offer(self, plans: int, code: Code | None) -> None:
        """Count completed plans, and take the better one if there is one."""
        self.plans += plans
        objective = self.objective
        if objective.remaining is not None and plans > objective.remaining:
            raise BudgetExhausted
        objective.account(plans, None if code is None else code.copy())
        if code is not None and self.contiguous and objective.last.bytes_missing[0] == 0:
            self.best_s = min(self.best_s, float(objective.last.iteration_s[0]))
        self._take_best()

    def _tables(self, program: exact_kernels.Program) -> tuple[Pass, Choices]:
        """Tables of the program's size, used again where they were made."""
        shape = (
            program.max_stages + 1,
            len(program.type_shape),
            program.num_layers + 1,
            program.enough.shape[1],
            len(program.step),
            len(program.kind_level),
        )
        if shape not in self._buffers:
            self._buffers.clear()  # one at a time: they are large
            S, Y, L, U, C, V = shape
            Q = exact_kernels.CHOICES
            self._buffers[shape] = (
                Pass(
                    np.full((S, Y, L, U), INF),
                    np.full((S, Y, L, U), INF),
                    np.empty((S, C, U)),
                    np.zeros((S, L, U), np.bool_),
                    np.empty((S, L, U), np.int32),
                    np.zeros((S, L), np.int64),
                ),
                Choices(
                    np.empty((S, Y + C, V, L, Q)),
                    np.empty((S, Y + C, V, L, Q)),
                    np.empty((S, Y + C, V, L)),
                    np.zeros((S, Y + C, V), np.int64),
                    np.zeros((S + 1, U), np.int64),
                ),
            )
        return self._buffers[shape]

    @property
    def effort(self) -> str:
        """What the proof took, one line; empty before it began."""
        if not self.solves:
            return ""
        instead = ""
        if self.contiguous:  # the bound of the run is that of the whole space
            instead = (
                f"of the plans in which each device group is one run of stages the best takes {self.best_s:.3f} s, and "
                f"none less than {self.lower_s:.3f} s (proven); "
            )
        return (
            f"{instead}the proof took {self.solves:,} passes of the dynamic program ({self.states:,} states) and "
            f"{self.nodes:,} steps of the walk, which completed {self.plans:,} plans"
        )

    def certificate(self) -> dict[str, Any]:
        """What was proven, about what, and what it took, as plain JSON data."""
        self._take_best()
        space, objective = self.space, self.objective
        best_s, lower_s = self.best_s, max(self.lower_s, 0.0 if self.contiguous else objective.lower_bound_s)
        covers = EVERY_PLAN
        if self.contiguous:
            covers = "plans of the declared space in which each device group is one run of stages"
        return {
            "schema": SCHEMA,
            "model": space.problem.model.name,
            "cluster": space.problem.cluster.name,
            "problem": problem_key(space.problem, space.spec),
            "covers": covers,
            "iteration_time_s": best_s if best_s < INF else None,
            "lower_bound_s": lower_s if math.isfinite(lower_s) else None,
            "gap_to_lower_bound": best_s / lower_s - 1 if lower_s > 0 and best_s < INF else None,
            "proven_optimal": best_s <= lower_s * (1 + SLIGHTLY),
            "plan": None if objective.best is None or best_s == INF else space.problem.plan_to_json(objective.best[0]),
            "device_units": device_units(space),
            "solves": self.solves,
            "states": self.states,
            "nodes": self.nodes,
            "plans_completed": self.plans,
            "seconds": objective.seconds,
            "message": self.message,
            "estimator_fingerprint": fingerprint(profile=space.estimator.profile),
        }


class Bounded(NamedTuple):
    """What the dynamic program proved about one m: least bound; a c and an S that no plan below the best time has."""

    least_s: float
    infeasible_c: float
    alone_s: float


# -------------------------------------------------------------------------------- the program of one m
def build(space: Space, m: int, contiguous: bool, best_s: float) -> exact_kernels.Program | None:
    """The dynamic program of one micro-batch count; None where no option divides the micro-batch.

    Memory counts whatever the ablation switches say. `best_s` scales the levels of blocking.
    """
    t, j, L = space.stage_tables, space.num_microbatches.index(m), space.num_layers
    groups = space.problem.cluster.groups

    def best_placed(table: Floats) -> Floats:
        """(K, 4, L+1) the least over the ways in which placement may spread an option over nodes."""
        least = np.array([table[j, rows[rows >= 0]].min(0) for rows in t.row])
        return np.where(np.isfinite(least), least, INF)

    forward_s, backward_s = best_placed(t.forward_s), best_placed(t.backward_s)
    tail_s = best_placed(t.sync_s + t.optimizer_s)
    if t.tied_bytes > 0.0:  # in a pipeline of several stages, first and last reduce the tied embedding's gradient
        tail_s[:, [FIRST, LAST]] += _least_tied_s(space)
    usable = [k for k in range(len(space.options)) if forward_s[k, 0, 1] < INF]
    if not usable:
        return None
    shapes: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for k in usable:
        shapes.setdefault(tuple((g, tp * dp) for g, tp, dp in space.options[k].parts), []).append(k)
    keys, C = list(shapes), len(shapes)
    member = np.full((C, max(map(len, shapes.values()))), -1, np.int64)
    for c, key in enumerate(keys):
        member[c, : len(shapes[key])] = shapes[key]
    send_s = _least_send_s(space, j, keys, member)
    blocked_s = t.blocking * send_s

    units = device_units(space)
    counts = [group.num_devices // unit for group, unit in zip(groups, units, strict=True)]
    strides = np.array([math.prod(n + 1 for n in counts[:g]) for g in range(len(groups))], np.int64)
    used = np.arange(math.prod(n + 1 for n in counts))[:, None] // strides % (np.array(counts) + 1)  # (U, G)
    uses = np.zeros((C, len(groups)), np.int64)
    for c, key in enumerate(keys):
        for g, devices in key:
            uses[c, g] += devices // units[g]
    bits = 1 << np.arange(len(groups))

    levels = np.zeros(1)
    if m > 1 and best_s < INF:
        wanted = [0.0, *(share * best_s / (2 * (m - 1)) for share in LEVELS)]
        index = np.searchsorted(wanted, np.unique(blocked_s), side="right") - 1
        steps = [np.unique(blocked_s)[index == i].min() for i in range(1, len(wanted)) if (index == i).any()]
        levels = np.array([0.0, *steps])
        kinds_of_boundary = 1 + len(steps) * len(LOWS)
        if _table_bytes(space, C * kinds_of_boundary, C, kinds_of_boundary, len(used)) > MOST_BYTES:
            levels = np.zeros(1)
    level = np.searchsorted(levels, blocked_s, side="right") - 1
    buckets = len(LOWS)
    pairs = sorted({(behind, int(level[c, behind])) for c in range(C) for behind in range(C)})
    types = [(shape, step, bucket) for shape, step in pairs for bucket in range(buckets if step else 1)]
    place = {key: y for y, key in enumerate(types)}
    kinds = [(step, bucket) for step in range(len(levels)) for bucket in range(buckets if step else 1)]
    type_of = np.full((C, C, buckets), -1, np.int64)
    kind_of = np.full((len(levels), buckets), -1, np.int64)
    for c, behind, bucket in itertools.product(range(C), range(C), range(buckets)):
        type_of[c, behind, bucket] = place.get((behind, int(level[c, behind]), bucket), -1)
    for v, (step, bucket) in enumerate(kinds):
        kind_of[step, bucket] = v
    shape_of = np.array([shape for shape, _, _ in types], np.int64)
    busy_s = (forward_s + backward_s)[usable, 0, L]
    return exact_kernels.Program(
        m=m,
        count_index=j,
        num_layers=L,
        max_stages=space.max_stages,
        forward_s=forward_s,
        backward_s=backward_s,
        tail_s=tail_s,
        fits=_memory(space, m),
        member=member,
        link_s=2.0 * (1.0 + t.blocking) * send_s,  # both directions, and what they block of both stages
        blocked_s=blocked_s,
        delay_s=2.0 * (1.0 - t.blocking) * send_s,
        level=level.astype(np.int64),
        levels=levels,
        delays=levels * ((1.0 - t.blocking) / t.blocking if t.blocking > 0.0 else 0.0),
        type_of=type_of,
        type_shape=shape_of,
        type_level=np.array([step for _, step, _ in types], np.int64),
        type_bucket=np.array([bucket for _, _, bucket in types], np.int64),
        first_type=np.searchsorted(shape_of, np.arange(C + 1)),
        kind_of=kind_of,
        kind_level=np.array([step for step, _ in kinds], np.int64),
        kind_bucket=np.array([bucket for _, bucket in kinds], np.int64),
        lows=np.array(LOWS),
        step=uses @ strides,
        enough=(used[None] + uses[:, None] <= np.array(counts)).all(2),
        groups=(uses > 0) @ bits,
        used_groups=(used > 0) @ bits,
        contiguous=contiguous,
        # a stage of n layers takes n times a layer's seconds and some more: per layer, least where it has them all
        layer_s=float(busy_s.min()) / L * (1 - SLIGHTLY),
        down_s=float(forward_s[usable, 0, L].min()) / L * (1 - SLIGHTLY),
    )


def path_bound_s(program: exact_kernels.Program, options: Sequence[int], layers: Sequence[int]) -> float:
    """P + max c of one plan straight from the definition: the slow twin of the program, for reading and tests."""
    p, m = len(options), program.m
    shape = [int(np.argwhere((program.member == k).any(1))[0, 0]) for k in options]
    position = [(FIRST if i == 0 else 0) | (LAST if i == p - 1 else 0) for i in range(p)]
    rows = list(zip(options, position, layers, strict=True))
    forward, backward, tail = (
        [float(table[row]) for row in rows] for table in (program.forward_s, program.backward_s, program.tail_s)
    )
    half_s = [float(program.link_s[a, b]) / 2 for a, b in itertools.pairwise(shape)]
    blocked_s = [float(program.levels[program.level[a, b]]) for a, b in itertools.pairwise(shape)]
    longest_p = largest_c = 0.0
    for i in range(p):
        s = p - i
        up_s = sum(backward[i:]) + sum(half_s[i:])
        longest_p = max(longest_p, sum(forward) + sum(half_s) + up_s + tail[i])
        blocked = sum(blocked_s[max(0, i - 1) : i + 1])
        f, b = forward[i] + blocked, backward[i] + blocked
        ahead = min(s - 1, m - 1)
        largest_c = max(largest_c, (m - 1 - ahead) * (f + b) + ahead * f)
        if m > s:
            trip_s = sum(forward[i:]) + sum(half_s[i:]) + up_s
            largest_c = max(largest_c, (m - 1 - s) * (f + b) + trip_s)
    return longest_p + largest_c


def alike_options(t: StageTables) -> npt.NDArray[np.int64]:
    """(K, X) per option the others on the same devices, in order, -1 beyond: what `polish` tries for a stage.

    As `kernels.stays_put`: none where placement may spread a group's stages over more nodes than needed.
    """
    members: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for k, (groups, devices) in enumerate(zip(t.group.tolist(), t.devices.tolist(), strict=True)):
        parts = tuple((g, n) for g, n in zip(groups, devices, strict=True) if g >= 0)
        if all(t.aligned[g] for g, _ in parts):
            members.setdefault(parts, []).append(k)
    table = np.full((len(t.group), max(1, *map(len, members.values()), 1)), -1, np.int64)
    for alike in members.values():
        for k in alike:
            table[k, : len(alike) - 1] = [other for other in alike if other != k]
    return table


def _memory(space: Space, m: int) -> npt.NDArray[np.int64]:
    spec = space.spec
    return Tables(space.problem, spec, space.options, space.estimator, m, memory=True).max_layers


def _sides(space: Space, k: int) -> npt.NDArray[np.int64]:
    rows = space.stage_tables.row[k]
    return np.unique(space.stage_tables.side[rows[rows >= 0]])


def _least_send_s(
    space: Space, j: int, keys: list[tuple[tuple[int, int], ...]], member: npt.NDArray[np.int64]
) -> Floats:
    """(C, C) least seconds of one transfer from the row's shape to the column's behind it, wherever they sit."""
    t = space.stage_tables
    sides = [_sides(space, int(members[0])) for members in member]
    send_s = np.zeros((len(keys), len(keys)))
    for c, front in enumerate(keys):
        for d, behind in enumerate(keys):
            rates = t.send_s[j][np.ix_(sides[c], sides[d])]
            (g, n), (h, o) = front[0], behind[0]
            per_node = space.problem.cluster.groups[g].devices_per_node
            near = len(front) == len(behind) == 1 and g == h and n + o <= per_node
            send_s[c, d] = rates.min() if near else rates[:, :, 0].min()
    return send_s


def _least_tied_s(space: Space) -> float:
    """Least seconds that the tied embedding's all-reduce takes between any two stages; 0 beside a single stage."""
    t = space.stage_tables
    pairs = np.minimum(t.replicas[:, None], t.replicas[None, :]) * t.tied_bytes
    rate = t.tied_rate[t.side[:, None], t.side[None, :]]
    return float((2.0 * (rate[..., 0] + pairs[..., None] / 2.0 / rate[..., 1])).min()) * (1 - SLIGHTLY)


def device_units(space: Space) -> list[int]:
    """Per device group, the devices that are never told apart: the largest number that divides every size there."""
    sizes: list[list[int]] = [[] for _ in space.num_devices]
    for option in space.options:
        for g, tp, dp in option.parts:
            sizes[g].append(tp * dp)
    return [math.gcd(*some) if some else n for some, n in zip(sizes, space.num_devices, strict=True)]


def _table_bytes(space: Space, types: int, shapes: int, kinds_of_boundary: int, device_states: int) -> int:
    """Bytes of a pass's tables and of its choices."""
    per_layer = (types * 16 + 5) * device_states
    per_layer += (types + shapes) * kinds_of_boundary * 8 * (2 * exact_kernels.CHOICES + 1)
    return (space.max_stages + 1) * (space.num_layers + 1) * per_layer


def _too_large(space: Space) -> str:
    """One line where the tables would not fit: their size, the time, and device units that would do; else empty."""

    def needs(units: list[int]) -> tuple[int, int]:
        """(bytes, states) with devices counted in such units."""
        counts = [n // unit for n, unit in zip(space.num_devices, units, strict=True)]
        shapes = {tuple((g, tp * dp) for g, tp, dp in option.parts) for option in space.options}
        shapes = {shape for shape in shapes if all(n % units[g] == 0 for g, n in shape)}
        states = math.prod(n + 1 for n in counts)
        return _table_bytes(space, len(shapes), len(shapes), 1, states), len(
            shapes
        ) * states * space.num_layers * space.max_stages

    units = device_units(space)
    memory, work = needs(units)
    if memory <= MOST_BYTES:
        return ""
    unit = 1
    while unit <= max(space.num_devices) and needs([max(unit, own) for own in units])[0] > MOST_BYTES:
        unit *= 2
    sizes = [size for size in space.spec.group_sizes if size % unit == 0 and size <= max(space.num_devices)]
    fewer = "with space.group_sizes=" + str(sizes).replace(" ", "") if sizes else "with larger space.group_sizes"
    return (
        f"search=exact: tables for {sum(space.num_devices)} devices would take {memory / 2**30:,.0f} GiB and one of "
        f"some 20 passes about {work / STATES_PER_S:,.0f} s; {fewer} (device units of {unit}) they take "
        f"{needs([max(unit, own) for own in units])[0] / 2**30:.1f} GiB. The plan is the baseline heuristic's, the "
        "bound that of the linear program"
    )


def warm_up() -> None:
    """Call every kernel of this module once, on a problem of no size."""
    from haap_rl.problem.presets import load_problem
    from haap_rl.search.base import Budget

    problem = load_problem("gpt3_350m", "v100x4_t4x4")
    spec = SpaceSpec(num_microbatches=(4,), max_stages=2, max_tp=1, group_sizes=(4,), recompute=("none",))
    objective = Objective(problem, Budget(evaluations=10), spec)
    proof = Proof(objective, 1000, contiguous=False)
    proof.bound()
    proof.close(0.0)
