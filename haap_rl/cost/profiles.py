"""Measured times and bytes of a model's units, and of collectives, as the estimator uses them.

A `Profile` holds what was measured, in a table per device, unit, tensor-parallel degree and micro-batch. `Measured`
binds one to a problem and answers for any cell: measured, interpolated in the micro-batch, or, in a gap, the
estimator's own curve scaled by the nearest measured cell of that device and unit. `Measured.gaps` says which. Every
answer is a pure function of the question, so it may be memoised. Files are `cost.profile_files`' matter.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from haap_rl.cost import comm
from haap_rl.problem.errors import InputError
from haap_rl.problem.model import Unit
from haap_rl.problem.placement import place
from haap_rl.problem.plan import Plan, Problem

Operation = Literal["all_reduce", "all_gather", "reduce_scatter"]
OPERATIONS: tuple[Operation, ...] = ("all_reduce", "all_gather", "reduce_scatter")
UNITS: tuple[Unit, ...] = ("embedding", "layer", "head")  # a tied head does the work of a head
# fields of Model that the time or the memory of a unit depends on
SIZES = ("hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")
DIMENSIONS = (*SIZES, "gated_mlp", "norm", "biases", "dropout")
Curve = Callable[[int, int], Sequence[float]]  # (tp, micro-batch size) -> forward and backward seconds
Formula = Callable[[int], float]  # number of ranks -> seconds
Points = Sequence[tuple[int, float]]


class UnitCell(NamedTuple):
    """One unit on one device of `tp`: seconds per micro-batch, bytes; None = not measured, which is never free.

    device               as clusters call it
    forward_s ...        medians; the *_iqr_s are their interquartile ranges
    update_s             of one optimiser step
    attention_s          the attention core's part of a layer's forward: what selective recompute does again
    activation_bytes     what one micro-batch keeps from forward to backward, nothing recomputed
    weights_bytes        of the unit's parameters; peak_bytes: most that was in use
    out_of_memory        the cell was tried and did not fit on the device
    """

    device: str
    unit: Unit
    tp: int
    microbatch_size: int
    forward_s: float | None = None
    backward_s: float | None = None
    update_s: float | None = None
    forward_iqr_s: float | None = None
    backward_iqr_s: float | None = None
    update_iqr_s: float | None = None
    attention_s: float | None = None
    activation_bytes: int | None = None
    weights_bytes: int | None = None
    peak_bytes: int | None = None
    out_of_memory: bool = False


class Timing(NamedTuple):
    """A collective of `num_bytes`: the whole buffer, which a rank gives to a reduce and gets from an all-gather."""

    num_bytes: int
    seconds: float
    iqr_s: float | None = None


class CollectiveCell(NamedTuple):
    device: str
    operation: Operation
    ranks: int
    inside_node: bool
    timings: tuple[Timing, ...]


class Grid(NamedTuple):
    """What a measurement set out to measure, so that an interrupted one can go on."""

    tp: tuple[int, ...]
    microbatch_size: tuple[int, ...]
    ranks: tuple[int, ...]
    sizes_bytes: tuple[int, ...]
    warmup: int
    repeats: int


@dataclass(frozen=True, slots=True)
class MeasuredFor:
    """The conditions of the measurement; None = the file does not say, then the problem's are assumed.

    dimensions             (field of Model, value) pairs, those that are known
    sequence_parallel      Megatron's, where tp > 1
    collectives_included   the units' times hold their tensor-parallel collectives
    """

    dimensions: tuple[tuple[str, int | str | bool], ...] = ()
    seq_len: int | None = None
    precision: str | None = None
    fused_attention: bool | None = None
    sequence_parallel: bool = False
    collectives_included: bool = False


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured, for what, by whom. `assumptions`: what the file did not say and its reader supposed."""

    name: str
    measured_for: MeasuredFor
    units: tuple[UnitCell, ...] = ()
    collectives: tuple[CollectiveCell, ...] = ()
    library: str = ""
    date: str = ""
    source: str = ""
    assumptions: tuple[str, ...] = ()
    grid: Grid | None = None
    file: str = field(default="", compare=False)  # where it was read, for messages

    @property
    def checksum(self) -> str:
        """Short hash of the content, wherever the file lies."""
        return hashlib.sha256(repr(dataclasses.replace(self, file="")).encode()).hexdigest()[:16]

    @property
    def where(self) -> str:
        return f"profile {self.file or self.name!r}"


def refuse_other_problem(profile: Profile, problem: Problem) -> None:
    """Raise InputError if `profile` says that it was measured for another model, length, precision or attention."""
    stated = profile.measured_for
    facts: list[tuple[str, object, object]] = [
        (name, value, getattr(problem.model, name)) for name, value in stated.dimensions
    ]
    facts += [
        (name, getattr(stated, name), getattr(problem, name)) for name in ("seq_len", "precision", "fused_attention")
    ]
    for name, measured, wanted in facts:
        if measured is not None and measured != wanted:
            raise InputError(
                f"{profile.where}: it was measured for {name}={_plain(measured)}, the problem has {_plain(wanted)}; "
                "measure this problem with python -m haap_rl.profile, or drop estimator.profile"
            )


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class Measured:
    """A profile bound to a problem. Raises InputError if it was measured for another one."""

    def __init__(self, profile: Profile, problem: Problem) -> None:
        refuse_other_problem(profile, problem)
        self.profile = profile
        self._cluster = problem.cluster
        known = {cell.device for cell in profile.units} | {cell.device for cell in profile.collectives}
        self._devices = {group.device.name: _same(group.device.name, known) for group in problem.cluster.groups}
        self._out_of_memory = {cell[:4] for cell in profile.units if cell.out_of_memory}
        # (device, unit, field) -> tp -> (micro-batch size, value) in order
        self._units: dict[tuple[str, Unit, str], dict[int, list[tuple[int, float]]]] = {}
        for cell in sorted(profile.units, key=lambda cell: cell[:4]):
            for name in ("forward_s", "backward_s", "attention_s", "activation_bytes"):
                value = getattr(cell, name)
                if value is not None:
                    table = self._units.setdefault((cell.device, cell.unit, name), {})
                    table.setdefault(cell.tp, []).append((cell.microbatch_size, float(value)))
        # (device, operation) -> ranks -> (bytes, seconds) in order
        self._collectives: dict[tuple[str, str], dict[int, list[tuple[int, float]]]] = {}
        for collective in profile.collectives:
            if collective.inside_node:
                ranks = self._collectives.setdefault((collective.device, collective.operation), {})
                ranks[collective.ranks] = _never_falling((t.num_bytes, t.seconds) for t in collective.timings)

    # ------------------------------------------------------------------------------------------ units
    def unit_s(self, device: str, unit: Unit, tp: int, size: int, curve: Curve) -> tuple[float, float] | None:
        """(forward, backward) seconds of one micro-batch; None where nothing of the unit was measured on the device.

        curve: the estimator's own seconds, which fill the gaps.
        """
        forward, backward = (self._units.get(key) for key in self._keys(device, unit))
        if forward is None and backward is None:
            return None
        seconds = []
        for index, (table, other) in enumerate(((forward, backward), (backward, forward))):
            value = None if table is None else _interpolated(table.get(tp, ()), size)
            if value is None:  # scaled by this direction's nearest cell, or else by the other direction's
                near_tp, near_size, measured = _nearest(table or other or {}, tp, size)
                there = curve(near_tp, near_size)
                value = curve(tp, size)[index] * (measured / there[index if table else 1 - index])
            seconds.append(value)
        return seconds[0], seconds[1]

    def _keys(self, device: str, unit: Unit) -> list[tuple[str, Unit, str]]:
        name, kind = self._devices[device], _work(unit)
        return [(name or "", kind, "forward_s"), (name or "", kind, "backward_s")]

    def attention_share(self, device: str, tp: int, size: int) -> float | None:
        """The attention core's part of a layer's forward seconds, by the nearest cell that has it; None without one."""
        name = self._devices[device] or ""
        attention, forward = (self._units.get((name, "layer", key)) for key in ("attention_s", "forward_s"))
        if attention is None or forward is None:
            return None
        near_tp, near_size, seconds = _nearest(attention, tp, size)
        whole = _interpolated(forward.get(near_tp, ()), near_size)
        return None if whole is None else min(1.0, seconds / whole)

    def activation_bytes(
        self, device: str, tp: int, size: int, sequence_parallel: bool, formula: Callable[[int, int, bool], int]
    ) -> int | None:
        """Bytes that one micro-batch keeps in a layer, nothing recomputed; None where that was not measured.

        formula: bytes for (tp, micro-batch size, sequence parallel); its ratio carries a measured cell into gaps, and
        from one setting of sequence parallelism to the other.
        """
        table = self._units.get((self._devices[device] or "", "layer", "activation_bytes"))
        if table is None:
            return None
        measured_with = self.profile.measured_for.sequence_parallel
        near_tp, near_size, value = tp, size, _interpolated(table.get(tp, ()), size)
        if value is None:
            near_tp, near_size, value = _nearest(table, tp, size)
        if (near_tp, near_size) == (tp, size) and (tp == 1 or sequence_parallel == measured_with):
            return math.ceil(value)
        base = formula(near_tp, near_size, measured_with)
        return -(-formula(tp, size, sequence_parallel) * math.ceil(value) // base)

    # ------------------------------------------------------------------------------------ collectives
    def collective_s(
        self, device: str, operation: Operation, ranks: int, num_bytes: float, formula: Formula
    ) -> float | None:
        """Seconds of a collective among `ranks` devices of one node; None where the device has no such measurement.

        formula: the alpha-beta seconds of the same bytes among any number of ranks, for numbers not measured.
        """
        table = self._collectives.get((self._devices[device] or "", operation))
        if table is None:
            return None
        if num_bytes <= 0.0:
            return 0.0
        near = min(table, key=lambda n: (abs(math.log2(n / ranks)), n))
        seconds = _of_size(table[near], num_bytes)
        return seconds if near == ranks else formula(ranks) * (seconds / formula(near))

    def gradient_sync_s(
        self, device: str, ranks: int, num_bytes: float, gather_bytes: float, latency_s: float, bytes_per_s: float
    ) -> float | None:
        """Seconds to reduce-scatter `num_bytes` and all-gather `gather_bytes` in one node; None where not measured.

        Equal sizes are an all-reduce if that is faster. latency_s, bytes_per_s: of the link, for the formulas.
        """

        def of(operation: Operation, size: float) -> float | None:
            formula = comm.ring_all_reduce_s if operation == "all_reduce" else comm.ring_pass_s
            return self.collective_s(device, operation, ranks, size, lambda n: formula(size, n, latency_s, bytes_per_s))

        scattered, gathered = of("reduce_scatter", num_bytes), of("all_gather", gather_bytes)
        if scattered is not None and gathered is not None:
            reduced = of("all_reduce", num_bytes) if num_bytes == gather_bytes else None
            return min(scattered + gathered, scattered + gathered if reduced is None else reduced)
        return of("all_reduce", max(num_bytes, gather_bytes))  # it does the work of both

    # ------------------------------------------------------------------------------ what was not measured
    def gaps(self, plan: Plan) -> tuple[str, ...]:
        """Every way in which the price of `plan` does not rest on a measured cell, one line each, in order."""
        cluster, lines = self._cluster, {}
        placements = place(cluster, plan)
        for i, (stage, placed) in enumerate(zip(plan.stages, placements, strict=True)):
            units: list[Unit] = ["layer"]
            units += ["embedding"] if i == 0 else []
            units += ["head"] if i == len(plan.stages) - 1 else []
            for replica, where in zip(stage.replicas, placed, strict=True):
                device, tp, size = (
                    cluster.groups[cluster.index(replica.group)].device.name,
                    replica.tp,
                    replica.microbatch_size,
                )
                found = [self.unit_gap(device, unit, tp, size) for unit in units]
                found.append(self.activation_gap(device, tp, size, plan.sequence_parallel))
                if tp > 1 and not self.profile.measured_for.collectives_included:
                    found.append(self.collective_gap(device, "all_reduce", tp))
                if where.tp_nodes > 1:
                    found.append(f"tensor parallelism across nodes on {device}: not measured, by the curve")
                if replica.dp > 1 and len(stage.replicas) == 1 and where.num_nodes == 1:
                    both = [
                        self.collective_gap(device, "reduce_scatter", replica.dp),
                        self.collective_gap(device, "all_gather", replica.dp),
                    ]
                    found += both
                lines.update(dict.fromkeys(line for line in found if line))
        return tuple(lines)

    def unit_gap(self, device: str, unit: Unit, tp: int, size: int) -> str:
        """How the times of a unit came about where they were not measured; empty where they were, or lie between."""
        name = self._devices[device]
        what = f"{_work(unit)} on {device}"
        tables = [self._units.get(key) for key in self._keys(device, unit)]
        if tables == [None, None]:
            return f"{what}: nothing measured, the estimator's curve"
        what += f" at tp {tp}, micro-batch {size}"
        notes = []
        for table, other, direction in zip(tables, tables[::-1], ("forward", "backward"), strict=True):
            points: Points = table.get(tp, ()) if table is not None else ()
            if _interpolated(points, size) is None:
                near_tp, near_size, _ = _nearest(table or other or {}, tp, size)
                notes.append(f"{direction} is the curve scaled by tp {near_tp}, micro-batch {near_size}")
            elif size > points[-1][0]:
                notes.append(f"{direction} extrapolated from micro-batches {points[-2][0]} and {points[-1][0]}")
        if notes and (name, _work(unit), tp, size) in self._out_of_memory:
            notes.insert(0, "out of memory when measured")
        return f"{what}: {', '.join(notes)}" if notes else ""

    def collective_gap(self, device: str, operation: Operation, ranks: int) -> str:
        """As `unit_gap`, of a collective inside a node."""
        table = self._collectives.get((self._devices[device] or "", operation))
        if table is None:
            return f"{operation} on {device}: nothing measured, the alpha-beta model"
        if ranks not in table:
            near = min(table, key=lambda n: (abs(math.log2(n / ranks)), n))
            return f"{operation} on {device} among {ranks}: the alpha-beta model scaled by {near} ranks"
        return ""

    def activation_gap(self, device: str, tp: int, size: int, sequence_parallel: bool) -> str:
        """As `unit_gap`, of the bytes that a layer keeps."""
        table = self._units.get((self._devices[device] or "", "layer", "activation_bytes"))
        if table is None:
            return f"activation bytes on {device}: not measured, the formula"
        if _interpolated(table.get(tp, ()), size) is None:
            near_tp, near_size, _ = _nearest(table, tp, size)
            return (
                f"activation bytes on {device} at tp {tp}, micro-batch {size}: the formula scaled by tp {near_tp}, "
                f"micro-batch {near_size}"
            )
        if tp > 1 and sequence_parallel != self.profile.measured_for.sequence_parallel:
            word = "without" if sequence_parallel else "with"
            return f"activation bytes on {device} at tp {tp}: measured {word} sequence parallelism, scaled by formula"
        return ""


def _work(unit: Unit) -> Unit:
    return "head" if unit == "tied_head" else unit


def _same(device: str, known: Iterable[str]) -> str | None:
    """The name under which a profile has `device`: its own, without a memory size of one's own (a100_40_16gib), or
    a bare family ("a100", as Metis writes it)."""
    plain = re.sub(r"_[\d.]+gib$", "", device)
    names = set(known)
    for name in (device, plain, plain.split("_")[0]):
        if name in names:
            return name
    return None


def _interpolated(points: Points, size: int) -> float | None:
    """Piecewise linear in the micro-batch; above the last point along the last two, never falling; else None."""
    if not points or size < points[0][0]:
        return None
    index = bisect.bisect_left(points, (size, -math.inf))
    if index < len(points) and points[index][0] == size:
        return points[index][1]
    if index == len(points):
        if len(points) == 1:
            return None
        (x, low), (y, high) = points[-2:]
        return high + max(0.0, (high - low) / (y - x)) * (size - y)
    (x, low), (y, high) = points[index - 1], points[index]
    return low + (high - low) * ((size - x) / (y - x))


def _nearest(table: Mapping[int, Points], tp: int, size: int) -> tuple[int, int, float]:
    """(tp, micro-batch size, value) of the nearest cell by ratio: first in tp, then in the micro-batch."""
    cells = ((t, s, value) for t, points in table.items() for s, value in points)
    return min(cells, key=lambda c: (abs(math.log2(c[0] / tp)), abs(math.log2(c[1] / size)), c[0], c[1]))


def _never_falling(points: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """The points in order, where times fall with size replaced by their mean: least squares among rising curves.

    Published tables saw-tooth by up to a factor of two between neighbours; a longer message takes no less.
    """
    blocks: list[tuple[float, list[int]]] = []  # mean and sizes
    for size, seconds in sorted(points):
        mean, sizes = seconds, [size]
        while blocks and blocks[-1][0] > mean:
            before, earlier = blocks.pop()
            mean = (before * len(earlier) + mean * len(sizes)) / (len(earlier) + len(sizes))
            sizes = earlier + sizes
        blocks.append((mean, sizes))
    return list(itertools.chain.from_iterable([(size, mean) for size in sizes] for mean, sizes in blocks))


def _of_size(points: Points, num_bytes: float) -> float:
    """Linear between sizes; below the smallest its time (latency), above the largest its rate."""
    (least, first), (most, last) = points[0], points[-1]
    if num_bytes <= least:
        return first
    if num_bytes >= most:
        return last * (num_bytes / most)
    index = bisect.bisect_left(points, (num_bytes, -math.inf))
    (x, low), (y, high) = points[index - 1], points[index]
    return low + (high - low) * ((num_bytes - x) / (y - x))
