"""Which cells of a data-parallel x pipeline grid are down when, and who runs their tasks.

A cell is one replica of one stage, a task one replica's samples passing one stage. Everything here is a function of
the schedule, so that every process knows it without asking.

Schedules go by a clock of wall steps, which is the training step until training has restarted from a checkpoint, and
ahead of it ever after: see Timeline.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from haap_rl.mecefo.options import MecefoOptions

PATIENCE = 10  # times what training takes without restarts, on the clock; it is given up where that is not enough


class Cell(NamedTuple):
    """One replica of one stage."""

    rank: int
    stage: int


class Restart(RuntimeError):
    """Failures that nobody can take over: training has to restart from a checkpoint, or, where it cannot, to end."""


@dataclass(frozen=True, slots=True)
class Grid:
    """`ranks` replicas of a pipeline of `stages` stages."""

    ranks: int
    stages: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.stages < 1:
            raise ValueError(f"mecefo: a grid of {self.ranks} x {self.stages} has no cell; give at least 1 of each")

    def cells(self) -> list[Cell]:
        """All cells, rank by rank."""
        return [Cell(rank, stage) for rank in range(self.ranks) for stage in range(self.stages)]

    def stage_of(self, layer: int, num_layers: int) -> int:
        """The stage of a layer; stages hold equally many layers, to within one."""
        return layer * self.stages // num_layers


class Restarted(NamedTuple):
    """Training step `failed`, due at `failed_clock`, could not be done; the next that was is `step`, at `clock`."""

    failed: int
    failed_clock: int
    step: int
    clock: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """When on the clock the training steps are done.

    The clock counts wall steps, each the time of one training step, be it spent on a step done for the first time, on
    one that is done again, or waiting for repair. Outages are by the clock. Samples, learning rate, projectors and
    checkpoints are by training step. After restarts the clock is ahead by the steps lost and waited. Ending processes,
    starting them and reading a checkpoint take no time.
    """

    restarts: tuple[Restarted, ...] = ()

    @property
    def since(self) -> tuple[int, int]:
        """Training step and clock of the last restart, or of the beginning."""
        return self.restarts[-1][2:] if self.restarts else (0, 0)

    def clock(self, step: int) -> int:
        """When a training step of those after the last restart is done."""
        begin, clock = self.since
        return clock + step - begin

    @property
    def lost(self) -> int:
        """Training steps that had to be done again."""
        return sum(restart.failed - restart.step for restart in self.restarts)

    @property
    def waited(self) -> int:
        """Wall steps without training."""
        return sum(restart.clock - restart.failed_clock for restart in self.restarts)


UNBROKEN = Timeline()


@dataclass(frozen=True, slots=True)
class Outage:
    """A cell that fails before `start` and is repaired before `end`, on the clock: equal numbers are never noticed."""

    cell: Cell
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """Outages by the clock: failures injected deterministically."""

    outages: tuple[Outage, ...] = ()

    def down(self, step: int, options: MecefoOptions, timeline: Timeline = UNBROKEN) -> frozenset[Cell]:
        """The cells that do not take part in training step `step`, which is one after the timeline's last restart.

        A repaired one waits as `return_rule` says, though not longer than to a restart.
        """
        boundary = options.refresh_steps if options.return_rule == "refresh_boundary" else 1
        begin, began = timeline.since
        clock = timeline.clock(step)

        def back(end: int) -> int:
            repaired = begin + end - began  # as a training step
            return repaired if repaired <= begin else -(-repaired // boundary) * boundary

        return frozenset(
            outage.cell
            for outage in self.outages
            if outage.start <= clock and outage.start < outage.end and step < back(outage.end)
        )

    def returns(self, cell: Cell, step: int, options: MecefoOptions, timeline: Timeline = UNBROKEN) -> int | None:
        """The training step before which a cell is back that is down in `step`; None for one that is not."""
        if cell not in self.down(step, options, timeline):
            return None
        while cell in self.down(step, options, timeline):
            step += 1
        return step


def restarted(
    timeline: Timeline,
    failed: int,
    step: int,
    steps: int,
    schedule: Schedule,
    options: MecefoOptions,
    live_with: Callable[[frozenset[Cell]], object],
    reason: Restart,
) -> Timeline:
    """The timeline after a restart from the checkpoint of `step`, as soon as enough is repaired for that step.

    failed      the training step that could not be done, for `reason`
    steps       that training has
    live_with   raises Restart for cells down that cannot be lived with
    Raises Restart where training would not be done by PATIENCE times its steps.
    """
    clock = timeline.clock(failed)
    for at in sorted({clock, *(outage.end for outage in schedule.outages if outage.end > clock)}):
        if at + steps - step > PATIENCE * steps:
            break
        found = Timeline((*timeline.restarts, Restarted(failed, clock, step, at)))
        try:
            live_with(schedule.down(step, options, found))
        except Restart:
            continue
        return found
    raise Restart(
        f"{reason}, and no repair lets training be done in the time of {PATIENCE * steps} steps, {PATIENCE} times its "
        f"own: {step} of {steps} are in the last checkpoint"
    )


def redrawn(grid: Grid, cells_down: int, every: int, steps: int, rng: np.random.Generator) -> Schedule:
    """`cells_down` cells always down, drawn anew every `every` steps among the sets that leave each stage a live cell.

    Raises ValueError where there is no such set.
    """
    if not 0 <= cells_down <= (grid.ranks - 1) * grid.stages:
        raise ValueError(
            f"mecefo: cells_down={cells_down} would leave a stage of the grid {grid.ranks} x {grid.stages} without a "
            f"live cell; give at most {(grid.ranks - 1) * grid.stages}"
        )
    cells, outages = grid.cells(), []
    for start in range(0, steps, every):
        while True:
            chosen = [cells[i] for i in rng.permutation(len(cells))[:cells_down]]
            if all(sum(cell.stage == stage for cell in chosen) < grid.ranks for stage in range(grid.stages)):
                break
        outages += [Outage(cell, start, start + every) for cell in sorted(chosen)]
    return Schedule(tuple(outages))


def arriving(grid: Grid, failure_steps: float, recovery: int, steps: int, rng: np.random.Generator) -> Schedule:
    """Failures that come every `failure_steps` steps on average (Poisson), each of a random live cell.

    Each is repaired after `recovery` steps, so that recovery / failure_steps cells are down on average (Little).
    """
    cells, outages = grid.cells(), list[Outage]()
    at = 0.0
    while True:
        at += float(rng.exponential(failure_steps))
        start = int(np.ceil(at))
        if start >= steps:
            return Schedule(tuple(outages))
        # ends ascend and no cell fails twice at a time, so that none before these goes on
        down = {outage.cell for outage in outages[-len(cells) :] if start < outage.end}
        live = [cell for cell in cells if cell not in down]
        if live:
            outages.append(Outage(live[int(rng.integers(len(live)))], start, start + recovery))


def takers(dead: Collection[int], ranks: int, options: MecefoOptions) -> dict[int, tuple[int, ...]]:
    """{dead rank of a stage: the live ranks that run its task}, more than one of them where its samples are divided.

    On the equal cells of a simulated grid the peer with the most slack is the one with the fewest tasks, so that
    `most_slack` differs from `ring` only where the next replica is dead or has a second task already.
    Raises Restart where nobody may take a task.
    """
    live = [rank for rank in range(ranks) if rank not in dead]
    if dead and not live:
        raise Restart("no live cell is left in a stage")
    if options.takeover == "spread":
        return {rank: tuple(live) for rank in sorted(dead)}
    found: dict[int, tuple[int, ...]] = {}
    load = dict.fromkeys(live, 1)

    def give(task: int, taker: int) -> None:
        found[task] = (taker,)
        load[taker] += 1

    waiting = sorted(dead)
    if options.takeover == "ring":
        for task in waiting:
            if (task + 1) % ranks in load:
                give(task, (task + 1) % ranks)
        waiting = [task for task in waiting if task not in found]
        if waiting and options.on_overload == "restart":
            raise Restart(f"cell {waiting[0]} of a stage and its neighbour {(waiting[0] + 1) % ranks} are both dead")
    for task in waiting:
        give(task, min(live, key=lambda rank: (load[rank], (rank - task) % ranks)))
    return found


def affected(down: Collection[Cell], grid: Grid, options: MecefoOptions) -> list[frozenset[int]]:
    """Per stage the ranks whose task runs in a taker's mode: those of dead cells and of their takers.

    Raises Restart where a stage cannot go on.
    """
    found = []
    for stage in range(grid.stages):
        dead = {cell.rank for cell in down if cell.stage == stage}
        try:
            who: Mapping[int, tuple[int, ...]] = takers(dead, grid.ranks, options)
        except Restart as error:
            raise Restart(f"stage {stage}: {error}") from None
        found.append(frozenset(dead.union(itertools.chain.from_iterable(who.values()))))
    return found
