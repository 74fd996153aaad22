"""Memory-aware initialisation (idea 1 of the paper): draw only plans that fit, and count exactly what that prunes.

Stages are drawn from the last to the first, because the stage s-th from the end holds min(s, m) micro-batches in
flight: its memory is then known when it is chosen. A table of the most layers that the devices left could still hold
(`Room`) makes every partial plan completable, so a draw never fails.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from haap_rl.cost.estimator import FIRST, LAST, Estimator
from haap_rl.cost.profiles import Profile
from haap_rl.problem.cluster import GIB
from haap_rl.problem.plan import Problem
from haap_rl.space.options import (
    SEQUENCE_PARALLEL,
    Option,
    SpaceSpec,
    Tables,
    device_slices,
    stage_options,
)
from haap_rl.space.target import parts

MOST_STATES = 300_000  # of "devices left per group", beyond which devices are counted in coarser units
MOST_COUNTED = 2e9  # additions, beyond which plans are not counted: some seconds
IMPOSSIBLE = -(10**9)


class Room:
    """The most layers that stages s, s+1, ... (counted from the pipeline's end) can hold, by devices left.

    `exact`, unless the cluster is so large that devices are counted in coarser units; it is then pessimistic: a
    completable partial plan may be missed, a dead end never is.
    """

    def __init__(self, options: Sequence[Option], tables: Tables, num_devices: Sequence[int]) -> None:
        self.tables = tables
        unit = 1
        while np.prod([n // unit + 1.0 for n in num_devices]) > MOST_STATES:
            unit *= 2
        self.unit, self.exact = unit, unit == 1
        shape = tuple(n // unit + 1 for n in num_devices)
        self.strides = np.array([int(np.prod(shape[d + 1 :])) for d in range(len(shape))], np.int64)
        self.uses = np.array([option.uses(len(shape)) for option in options], np.int64)  # (K, G)
        self.units = -(-self.uses // unit)
        self.step = self.units @ self.strides
        self.num_devices = np.array(num_devices, np.int64)
        # room[s, devices left]; s = 0 is not used and S + 1 is "no stage left"
        most = tables.max_stages
        self._room = np.full((most + 2, *shape), IMPOSSIBLE, np.int64)
        shapes = np.unique(self.units, axis=0)
        for s in range(most, 0, -1):
            last = LAST if s == 1 else 0
            room, after = self._room[s], self._room[s + 1]
            for uses in shapes:
                mine = (self.units == uses).all(1)
                front = int(tables.max_layers[mine, FIRST | last, s].max())
                inner = int(tables.max_layers[mine, last, s].max())
                enough, left = device_slices([size - 1 for size in shape], uses.tolist())
                if front > 0:
                    room[enough] = np.maximum(room[enough], front)
                if inner > 0:
                    room[enough] = np.maximum(room[enough], inner + after[left])
        self.flat = self._room.reshape(most + 2, -1)

    @property
    def most_layers(self) -> int:
        """The most layers that any plan can hold on the whole cluster; negative if not even one stage fits."""
        return int(self._room[1].flat[-1])

    def min_stages(self, num_layers: int) -> int:
        """Least number of stages whose memory could hold the layers, devices aside: no plan has fewer."""
        held = 0
        for s in range(1, self.tables.max_stages + 1):
            last = LAST if s == 1 else 0
            if held + int(self.tables.max_layers[:, FIRST | last, s].max()) >= num_layers:
                return s
            held += int(self.tables.max_layers[:, last, s].max())
        return self.tables.max_stages

    def after(self, s: int, left: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """(K,) most layers of stages s+1, s+2, ... once each option was taken with `left` devices per group."""
        units_left = left // self.unit
        index = int(units_left @ self.strides) - self.step
        enough = (units_left >= self.units).all(1)
        room: npt.NDArray[np.int64] = np.where(enough, self.flat[s + 1][np.where(enough, index, 0)], IMPOSSIBLE)
        return room


def draw_options(room: Room, num_layers: int, numbers: npt.NDArray[np.float64]) -> tuple[int, ...]:
    """Options of a random plan that fits, front to back; `room` must allow one. Twin: `space.kernels.draw`.

    numbers: uniform random numbers, one for the number of stages and one for each stage that there may be.

    The number of stages aimed at is uniform between the least that memory allows and the most; then, from the last
    stage to the first, options are uniform among those with which the plan can still be completed.
    """
    tables = room.tables
    least = room.min_stages(num_layers)
    aim = least + int(numbers[0] * (tables.max_stages + 1 - least))
    left = room.num_devices.copy()
    held, chosen = 0, []
    for s in range(1, tables.max_stages + 1):
        last = LAST if s == 1 else 0
        inner, front = tables.max_layers[:, last, s], tables.max_layers[:, FIRST | last, s]
        has_devices = (left >= room.uses).all(1)
        ends = has_devices & (front > 0) & (held + front >= num_layers)
        goes_on = has_devices & (inner > 0) & (held + inner + room.after(s, left) >= num_layers) & (s < num_layers)
        wanted, other = (ends, goes_on) if s >= aim else (goes_on, ends)
        legal = wanted if wanted.any() else other
        choices = np.flatnonzero(legal)
        k = int(choices[int(numbers[s] * len(choices))])
        chosen.append(k)
        if legal is ends:
            break
        left -= room.uses[k]
        held += int(inner[k])
    return tuple(reversed(chosen))


# ------------------------------------------------------------------------ the pruning report
@dataclass(frozen=True, slots=True)
class PruningReport:
    """How much of the space memory-aware initialisation never looks at; counts are exact up to float64."""

    options: int  # option x micro-batch-count pairs that are legal
    options_that_fit: int  # of those, the ones that hold a layer with one micro-batch in flight
    plans: float | None  # legal plans of the space; None where there are too many states to count
    plans_that_fit: float | None

    @property
    def factor(self) -> float | None:
        """Legal plans per plan that fits."""
        return self.plans / self.plans_that_fit if self.plans and self.plans_that_fit else None


def pruning_report(problem: Problem, spec: SpaceSpec, profile: Profile | None = None) -> PruningReport:
    """Count the declared space and its memory-feasible part, whatever the ablation switches say."""
    estimator = Estimator(problem, profile=profile)
    every = parts(problem, spec)
    reports = [_count_part(problem, part, estimator, MOST_COUNTED / len(every)) for part in every]
    legal, fitting, plans, plans_that_fit = zip(
        *((r.options, r.options_that_fit, r.plans, r.plans_that_fit) for r in reports), strict=True
    )
    return PruningReport(sum(legal), sum(fitting), _sum(plans), _sum(plans_that_fit))


def _sum(counts: Sequence[float | None]) -> float | None:
    """The sum of counts, None where one is not known."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _count_part(problem: Problem, spec: SpaceSpec, estimator: Estimator, most_counted: float) -> PruningReport:
    options = stage_options(problem, spec)
    num_devices = tuple(group.num_devices for group in problem.cluster.groups)
    legal = fitting = 0
    plans: float | None = 0.0
    plans_that_fit: float | None = 0.0
    kinds = len({option.uses(len(num_devices)) for option in options})
    states = math.prod(n + 1 for n in num_devices) * (problem.model.num_layers + 1)
    if states * kinds * spec.max_stages * 2 * len(spec.num_microbatches) > most_counted:
        plans = plans_that_fit = None
    for m in spec.num_microbatches:
        if problem.global_batch_size % m:
            continue
        free = Tables(problem, spec, options, estimator, m, memory=False)
        free.max_layers[np.isinf(free.forward_s[:, 1])] = 0  # the micro-batch cannot be divided
        tight = Tables(problem, spec, options, estimator, m, memory=True)
        legal += int((free.max_layers[:, 0, 1] > 0).sum())
        fitting += int((tight.max_layers[:, 0, 1] > 0).sum())
        if plans is not None and plans_that_fit is not None:
            plans += count_plans(options, free, num_devices, problem.model.num_layers)
            plans_that_fit += count_plans(options, tight, num_devices, problem.model.num_layers)
    return PruningReport(legal, fitting, plans, plans_that_fit)


def count_plans(options: Sequence[Option], tables: Tables, num_devices: Sequence[int], num_layers: int) -> float:
    """Number of plans (options and layers of every stage) within `tables.max_layers`, by convolution.

    State: layers placed and devices used per group, stage after stage from the pipeline's end.
    """
    shape = tuple(n + 1 for n in num_devices)
    kinds: dict[tuple[int, ...], list[int]] = {}
    for k, option in enumerate(options):
        kinds.setdefault(option.uses(len(num_devices)), []).append(k)
    ways = np.zeros((num_layers + 1, *shape))  # unfinished plans of s - 1 stages
    ways[(0,) * ways.ndim] = 1.0
    total = 0.0
    for s in range(1, tables.max_stages + 1):
        last = LAST if s == 1 else 0
        longer = np.zeros_like(ways)
        # fewer[t] = plans with fewer than t layers: those an option with room for `cap` leads to t from are
        # fewer[t] - fewer[t - cap]
        fewer = np.concatenate([np.zeros((1, *shape)), np.cumsum(ways, axis=0)[:-1]])
        for uses, members in kinds.items():
            after, before = device_slices(num_devices, uses)
            room, into = fewer[(slice(None), *before)], longer[(slice(None), *after)]
            for cap, times in zip(*np.unique(tables.max_layers[members, last, s], return_counts=True), strict=True):
                if cap > 0:
                    into[1:] += times * room[1:]
                    into[cap:] -= times * room[: num_layers + 1 - cap]
            placed = ways[(slice(None), *before)].reshape(num_layers + 1, -1).sum(1)
            caps = tables.max_layers[members, FIRST | last, s]
            total += float(sum(placed[num_layers - cap : num_layers].sum() for cap in caps))  # the layers that are left
        ways = longer
    return total


# --------------------------------------------------------------------------- nothing fits
def no_plan_fits(problem: Problem, spec: SpaceSpec, options: Sequence[Option], estimator: Estimator) -> str:
    """One line: per device type the least a device must hold and what it has, and what would make a plan fit."""
    model = problem.model
    parts = []
    for index, group in enumerate(problem.cluster.groups):
        needed = [
            _least_bytes(spec, option, problem.global_batch_size // m, estimator)
            for m in spec.num_microbatches
            if problem.global_batch_size % m == 0
            for option in options
            if option.partner is None and option.group == index and problem.global_batch_size // m % option.dp == 0
        ]
        name, has = group.device.name, f"{estimator.usable_bytes(index) / GIB:.2f} GiB usable"
        if needed:
            parts.append(f"{name} must hold at least {min(needed) / GIB:.2f} GiB and has {has}")
        else:
            parts.append(f"{name} has {has}, but no group size of the space divides a micro-batch there")
    value = estimator.unit_memory("layer", 1, 1, 1, "none", spec.zero_stage, SEQUENCE_PARALLEL)
    state_per_parameter = (value.weights + value.gradients + value.optimizer) / value.parameters
    state = model.num_parameters * state_per_parameter
    cluster = sum(group.num_devices * estimator.usable_bytes(i) for i, group in enumerate(problem.cluster.groups))
    if state > cluster:
        way_out = f"add devices (at least {(state - cluster) / GIB:.1f} GiB more) or train a smaller model"
    else:
        way_out = (
            "add devices, shorten problem.seq_len, raise problem.global_batch_size / space.num_microbatches, "
            "space.max_tp or space.max_stages, or allow recompute 'full'"
        )
    if spec.survives:
        way_out += f"; or lower space.survives={spec.survives}, for which every stage keeps room and replicas"
    return (
        f"no plan of the space fits model {model.name!r} on cluster {problem.cluster.name!r}: for one layer, "
        f"{'; '.join(parts)}; weights, gradients and optimiser of the whole model take {state / GIB:.1f} GiB, the "
        f"cluster has {cluster / GIB:.1f} GiB usable; {way_out}"
    )


def _least_bytes(spec: SpaceSpec, option: Option, samples: int, estimator: Estimator) -> int:
    """Bytes of a stage of one layer with one micro-batch in flight."""
    size = samples // option.dp
    mode, zero_stage = option.recompute, spec.zero_stage
    part = estimator.unit_memory("layer", option.tp, option.dp, size, mode, zero_stage, SEQUENCE_PARALLEL, option.group)
    return part.weights + part.gradients + part.optimizer + part.activation + part.working
