"""Unequal devices on one machine: how long what a rank does is made to last.

native   as long as it takes
imposed  as long as a table says, by sleeping after tiny real work: compute is given, and so is the least that a
         transfer or a collective takes; order, routes, waiting and overhead are real. Deterministic, fit for tests.
dilated  k times its own thread's CPU time, k by device group: compute is measured; it needs quiet cores

An operation (a pass of a micro-batch through a stage, an optimiser's step) whose own work took longer than it was to
last is an overrun. A run in which more than 2 % overran is no evidence of anything.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from haap_rl.cost.estimate import Estimate
from haap_rl.cost.estimator import ALL_REDUCES, Estimator, UnitKey, stage_units
from haap_rl.problem.model import Unit
from haap_rl.problem.placement import place
from haap_rl.problem.plan import Plan

Mode = Literal["native", "imposed", "dilated"]
MODES: tuple[Mode, ...] = ("native", "imposed", "dilated")
MOST_OVERRUN = 0.02


class Target(NamedTuple):
    """Seconds that one pass through a unit is to last: its compute, and the least of its collectives."""

    compute_s: float
    collective_s: float


class StageTable(NamedTuple):
    """What is imposed on the ranks of one replica group of a stage.

    forward, backward    per unit of the stage
    before_forward_s, before_backward_s  of a pass besides: its part of the transfers, and of a forward the host's time
    down_s, up_s         that activations from the stage before, gradients from the stage after, are on their way
    sync_s, optimizer_s  per step
    """

    forward: tuple[Target, ...]
    backward: tuple[Target, ...]
    before_forward_s: float
    before_backward_s: float
    down_s: float
    up_s: float
    sync_s: float
    optimizer_s: float


@dataclass(frozen=True, slots=True)
class Pacing:
    """How all ranks of a run are paced: a table per stage and replica group, or k per device group."""

    mode: Mode = "native"
    tables: tuple[tuple[StageTable, ...], ...] = ()
    dilation: Mapping[str, float] | None = None


NATIVE = Pacing()


def imposed(estimator: Estimator, plan: Plan, scale: float = 1.0) -> Pacing:
    """The seconds that `estimator` gives the parts of `plan`, times `scale`, imposed."""
    cost = estimator(plan)
    placements = place(estimator.problem.cluster, plan)
    last = len(plan.stages) - 1
    tables = []
    for i, (stage, placed) in enumerate(zip(plan.stages, placements, strict=True)):
        layers = stage.num_units - (i == 0) - (i == last)
        units = stage_units(i == 0, i == last, layers, estimator.problem.model.tied_embeddings)
        modes = ["none"] * len(units)
        modes[int(i == 0) : int(i == 0) + stage.recompute.num_layers] = [stage.recompute.mode] * (
            stage.recompute.num_layers
        )
        groups = []
        for replica, where in zip(stage.replicas, placed, strict=True):
            key = UnitKey(
                "layer",
                estimator.problem.cluster.index(replica.group),
                replica.tp,
                where.tp_nodes,
                replica.microbatch_size,
                plan.sequence_parallel,
            )
            pairs = [unit_targets(estimator, key, unit, mode, scale) for unit, mode in zip(units, modes, strict=True)]
            groups.append(_stage_table(estimator, cost, i, pairs, scale))
        tables.append(tuple(groups))
    return Pacing("imposed", tuple(tables))


def unit_targets(
    estimator: Estimator, key: UnitKey, unit: Unit, mode: str, scale: float = 1.0
) -> tuple[Target, Target]:
    """Forward and backward of one unit; what is recomputed repeats the forward's collectives."""
    seconds = estimator.unit_time(key._replace(unit=unit))
    forward_reduces, backward_reduces = ALL_REDUCES[unit]
    each_s = seconds.tensor_parallel_s / (forward_reduces + backward_reduces)
    if mode == "full":
        backward_reduces += forward_reduces

    def target(whole_s: float, reduces: int) -> Target:
        collective_s = min(whole_s, reduces * each_s)
        return Target(scale * (whole_s - collective_s), scale * collective_s)

    return target(seconds.forward_s, forward_reduces), target(seconds.backward(mode), backward_reduces)


def _stage_table(
    estimator: Estimator, cost: Estimate, i: int, pairs: list[tuple[Target, Target]], scale: float
) -> StageTable:
    stage = cost.stages[i]
    forward, backward = zip(*pairs, strict=True)
    return StageTable(
        forward=forward,
        backward=backward,
        before_forward_s=scale * (estimator.framework.host_microbatch_s + stage.blocked_s / 2),
        before_backward_s=scale * stage.blocked_s / 2,
        down_s=scale * cost.delays_s[i - 1] if i else 0.0,
        up_s=scale * cost.delays_s[i] if i < len(cost.stages) - 1 else 0.0,
        sync_s=scale * stage.gradient_sync_s,
        optimizer_s=scale * stage.optimizer_s,
    )


def longest_s(pacing: Pacing) -> float:
    """The longest that an imposed operation of one rank lasts; 0 where nothing is imposed."""
    found = [0.0]
    for table in (table for groups in pacing.tables for table in groups):
        forward, backward = (
            sum(t.compute_s + t.collective_s for t in unit) for unit in (table.forward, table.backward)
        )
        found += [table.before_forward_s + forward, table.before_backward_s + backward, table.down_s, table.up_s]
        found += [table.sync_s, table.optimizer_s]
    return max(found)


class Pacer:
    """Makes one rank's operations last; counts them and those that overran."""

    def __init__(self, mode: Mode, table: StageTable | None = None, dilation: float = 1.0) -> None:
        self.mode, self.table, self.dilation = mode, table, dilation
        self.paced = self.overran = 0
        self._until = 0.0
        self._spare_s = 0.0  # of the pass: what its compute was to last, less what its work took

    def begin(self, is_forward: bool = True) -> None:
        """A pass begins now, with the time that the table gives it besides its units."""
        before_s = 0.0
        if self.table is not None:
            before_s = self.table.before_forward_s if is_forward else self.table.before_backward_s
        self._until, self._spare_s = time.monotonic() + before_s, before_s

    def end(self) -> None:
        """The pass is over."""
        if self.mode != "native":
            self._count(self._spare_s)

    def unit(self, target: Target | None, elapsed_s: float, cpu_s: float, collective_s: float) -> None:
        """A unit took so long; wait until it has lasted. Waiting too long is made up for within a pass."""
        real_s = elapsed_s - collective_s
        if target is not None:
            compute_s, collective_s = target.compute_s, max(target.collective_s, collective_s)
        elif self.mode == "dilated":
            compute_s = self.dilation * cpu_s
        else:
            return
        self._spare_s += compute_s - real_s
        self._until += compute_s + collective_s
        sleep_until(self._until)

    def rest(self, begun: float, seconds: float, is_compute: bool = False) -> None:
        """Wait until what began at `begun` has lasted for `seconds`, where a table imposes it."""
        if self.table is not None:
            if is_compute:
                self._count(begun + seconds - time.monotonic())
            sleep_until(begun + seconds)

    def _count(self, spare_s: float) -> None:
        self.paced += 1
        self.overran += spare_s < 0


def pacer_of(pacing: Pacing, stage: int, replica_group: int, group: str) -> Pacer:
    """The Pacer of one rank."""
    table = pacing.tables[stage][replica_group] if pacing.mode == "imposed" else None
    return Pacer(pacing.mode, table, (pacing.dilation or {}).get(group, 1.0))


def sleep_until(moment: float) -> None:
    """Return at `moment` of `time.monotonic`, or at once if it is past."""
    left = moment - time.monotonic()
    if left > 0:
        time.sleep(left)
