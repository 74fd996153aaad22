"""Units timed as the runtime runs them: alone on this machine, or on tensor-parallel ranks under pacing.

Under pacing, collectives are measured in place: ranks that have slept wait for each other's jitter at every layer,
which an all-reduce between busy ranks does not show.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from haap_rl.problem.model import Unit as UnitName
from haap_rl.runtime.device import Pacer, Target
from haap_rl.runtime.job import Job
from haap_rl.runtime.layers import Masks, TensorParallel, build_unit
from haap_rl.runtime.routes import routes_of_replicas
from haap_rl.runtime.session import Member

LAYERS = 3  # that one pass goes through, so that waiting too long for one is made up for in the next, as in a run


class Cell(NamedTuple):
    """A unit at one tensor-parallel degree and micro-batch size."""

    unit: UnitName
    tp: int
    size: int


class Timed(NamedTuple):
    """Median seconds of one pass through a unit."""

    forward_s: float
    backward_s: float


class _Alone(TensorParallel):
    """A rank whose peers are not there: its shard's compute without any collective."""

    def _reduce(self, values: Tensor, operation: Any) -> Tensor:
        return values


def time_alone(member: Member, job: Job, cells: Sequence[Cell], repeats: int) -> list[Timed]:
    """Each cell's shard on rank 0 by itself, without collectives; nothing on other ranks."""
    if member.rank:
        return []
    return [_timed(job, cell, _Alone(0, cell.tp), None, None, repeats) for cell in cells]


def time_paced(member: Member, job: Job, cells: Sequence[tuple[Cell, Target, Target]], repeats: int) -> list[Timed]:
    """Each cell with forward and backward imposed, on as many groups of its tp ranks at once as the world has."""
    found = []
    for cell, forward, backward in cells:
        ways = routes_of_replicas(cell.tp, member.world_size // cell.tp)
        member.groups.prepare(ways)
        if member.rank < ways.num_ranks:
            place = ways.places[member.rank]
            group = member.groups.of(ways.stages[0][place.replica])
            ranks = TensorParallel(place.tp_index, cell.tp, group)
            found.append(_timed(job, cell, ranks, forward, backward, repeats))
        else:
            found.append(Timed(0.0, 0.0))
    return found


def _timed(
    job: Job, cell: Cell, ranks: TensorParallel, forward: Target | None, backward: Target | None, repeats: int
) -> Timed:
    numbers = {"embedding": [0], "layer": list(range(1, 1 + min(LAYERS, job.model.num_layers)))}
    units = [build_unit(job, ranks, number) for number in numbers.get(cell.unit, [job.model.num_layers + 1])]
    ids = job.batch(0)[: cell.size]
    pacer = Pacer("native" if forward is None else "imposed")
    masks, times = Masks(job), []
    for round_ in range(repeats + 1):  # the first is slower
        if ranks.group is not None:
            dist.barrier(group=ranks.group)
        hidden = torch.randn(cell.size, job.seq_len, job.model.hidden, dtype=job.torch_dtype)
        begun = time.perf_counter()
        pacer.begin()
        done: list[tuple[Tensor, Tensor]] = []
        for unit in units:
            with _Pass(pacer, forward, ranks):
                given = hidden.detach().requires_grad_()
                masks.begin(0, 0, range(cell.size))
                if cell.unit == "embedding":
                    hidden = unit(ids[:, :-1], masks)
                elif cell.unit == "layer":
                    hidden = unit(given, masks)
                else:
                    hidden = unit(given, ids[:, 1:])
                done.append((given, hidden))
        forward_s = (time.perf_counter() - begun) / len(units)
        if ranks.group is not None:
            dist.barrier(group=ranks.group)
        begun = time.perf_counter()
        pacer.begin()
        gradient = torch.ones_like(hidden)
        for given, output in reversed(done):
            with _Pass(pacer, backward, ranks):
                torch.autograd.backward(output, gradient)
            gradient = given.grad if given.grad is not None else gradient
        if round_:
            times.append((forward_s, (time.perf_counter() - begun) / len(units)))
    return Timed(*(statistics.median(column) for column in zip(*times, strict=True)))


class _Pass:
    """Around one pass through a unit: it lasts as long as the pacer says."""

    def __init__(self, pacer: Pacer, target: Target | None, ranks: TensorParallel) -> None:
        self.pacer, self.target, self.ranks = pacer, target, ranks

    def __enter__(self) -> None:
        self._start, self._collective = time.perf_counter(), self.ranks.collective_s

    def __exit__(self, *error: object) -> None:
        if self.target is not None and error[0] is None:
            waited = self.ranks.collective_s - self._collective
            self.pacer.unit(self.target, time.perf_counter() - self._start, 0.0, waited)
