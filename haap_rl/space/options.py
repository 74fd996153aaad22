"""What the space allows for one stage (options), and how long and how large each option is (tables).

A stage of the space sits on one device group and recomputes all of its layers or none. Tables assume that no replica
straddles nodes, as placement keeps it for sizes that are powers of two. One that does is never faster (its collectives
see the slower of both links), so bounds made from the tables hold; the estimator prices it as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from haap_rl.cost.estimator import FIRST, LAST, POSITIONS, Estimator, Kind, UnitKey, stage_units
from haap_rl.problem.errors import InputError, check_keys, positive_int, shown
from haap_rl.problem.model import Unit
from haap_rl.problem.plan import RECOMPUTE_MODES, Problem

TRAINERS = ("megatron", "torchtitan", "flagscale")  # names of `export.targets`
TAKE_OVERS = ("exact", "mecefo")
MOST_SURVIVED = 1000
PROJECTOR_RANK = 64  # values per FFN matrix and column that a MeCeFO taker keeps (default of `mecefo.options`)
SEQUENCE_PARALLEL = True  # dominates in memory at equal time, so the space always uses it


@dataclass(frozen=True, slots=True)
class SpaceSpec:
    """The declared space (`conf/space/`): searchers propose, bounds bound and counts count exactly this.

    mixed_stages: whether a stage's replicas may sit on two device groups.
    survives: dead replicas that a stage can lose while a live one does their work besides its own: it has more replicas
    than that, and each of its devices the memory. take_over: whether that work is done as it is (`exact`) or with
    MeCeFO's backward pass (`mecefo`), which keeps less.
    target: only plans that this trainer can be told without loss (`space/target.py`); None: all. fixed_tp: the tp of
    every stage; set for the parts of such a space, never by a person.
    The last two switches ablate ideas of the paper and change where searchers look, never what is legal or proven.
    """

    num_microbatches: tuple[int, ...] = (4, 8, 16, 32, 64, 128)
    max_stages: int = 12
    max_tp: int = 8
    group_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    recompute: tuple[str, ...] = RECOMPUTE_MODES
    zero_stage: int = 1
    mixed_stages: bool = False
    memory_aware_init: bool = True
    load_balance: bool = True
    # not in the repr, by which certificates know a space that reserves nothing
    survives: int = field(default=0, repr=False)
    take_over: str = field(default="exact", repr=False)
    target: str | None = field(default=None, repr=False)
    fixed_tp: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("num_microbatches", "group_sizes"):
            for value in getattr(self, name):
                positive_int("space", name, value)
        for mode in self.recompute:
            if mode not in RECOMPUTE_MODES:
                raise InputError(f"space: recompute mode {mode!r} is not one of {', '.join(RECOMPUTE_MODES)}")
        for name in ("num_microbatches", "group_sizes", "recompute"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise InputError(f"space: {name}={list(values)} must be a list of different values; give at least one")
        positive_int("space", "max_stages", self.max_stages)
        positive_int("space", "max_tp", self.max_tp)
        if type(self.zero_stage) is not int or self.zero_stage not in (0, 1):
            raise InputError(f"space: zero_stage={self.zero_stage!r} is not searched; use 0 or 1")
        if type(self.survives) is not int or not 0 <= self.survives < MOST_SURVIVED:
            raise InputError(
                f"space: survives={shown(self.survives)} must be a whole number from 0 to {MOST_SURVIVED - 1}, the "
                "replicas that every stage can lose; 0 reserves nothing"
            )
        if self.take_over not in TAKE_OVERS:
            raise InputError(f"space: take_over={shown(self.take_over)} is not one of {', '.join(TAKE_OVERS)}")
        if self.target is not None and (not isinstance(self.target, str) or self.target not in TRAINERS):
            raise InputError(f"space: target={shown(self.target)} is not null or one of {', '.join(TRAINERS)}")
        if self.survives and not self.memory_aware_init:
            raise InputError(
                f"space: survives={self.survives} is room in memory, which memory_aware_init=false does not look at; "
                "set one of them to its default"
            )
        for name in ("mixed_stages", "memory_aware_init", "load_balance"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"space: {name}={getattr(self, name)!r} must be true or false")

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SpaceSpec:
        """SpaceSpec from the mapping of a `conf/space/*.yaml`."""
        younger = ("survives", "take_over", "target")  # records of before have none of them
        check_keys("space", config, [f.name for f in fields(cls) if f.name not in (*younger, "fixed_tp")], younger)
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in config.items()
        }
        for key in ("num_microbatches", "group_sizes", "recompute"):
            if not isinstance(values[key], tuple):
                raise InputError(f"space: {key}={values[key]!r} must be a list")
        return cls(**values)


class Partner(NamedTuple):
    """The second replica group of a stage on two device groups: dp replicas of tp devices each of `group`."""

    group: int
    tp: int
    dp: int


class Option(NamedTuple):
    """How one stage is run: dp replicas of tp devices each of one device group (an index).

    partner: further replicas on a second, later device group; the samples of a micro-batch go to the two so that
    they take as equally long as whole samples allow (`replica_sizes`).
    """

    group: int
    tp: int
    dp: int
    recompute: str
    partner: Partner | None = None

    @property
    def num_devices(self) -> int:
        return self.tp * self.dp + (self.partner.tp * self.partner.dp if self.partner else 0)

    @property
    def parts(self) -> tuple[tuple[int, int, int], ...]:
        """(group, tp, dp) of each replica group."""
        own = (self.group, self.tp, self.dp)
        return (own,) if self.partner is None else (own, tuple(self.partner))  # type: ignore[return-value]

    def uses(self, num_groups: int) -> tuple[int, ...]:
        """Devices of each device group."""
        uses = [0] * num_groups
        for group, tp, dp in self.parts:
            uses[group] += tp * dp
        return tuple(uses)

    @property
    def kind(self) -> Kind:
        """What the compiled tables know the option by."""
        return Kind(self.parts, self.recompute)


def stage_options(problem: Problem, spec: SpaceSpec) -> tuple[Option, ...]:
    """Every option of the space that is legal for the problem, whatever its memory, in a fixed order."""
    shapes = []
    for index, group in enumerate(problem.cluster.groups):
        for size in sorted(spec.group_sizes):
            for tp in range(1, min(size, spec.max_tp, group.devices_per_node) + 1):
                if spec.fixed_tp not in (None, tp):
                    continue
                if size > group.num_devices or size % tp or problem.seq_len % tp or not problem.model.allows_tp(tp):
                    continue
                shapes.append((index, tp, size // tp))
    modes = [mode for mode in RECOMPUTE_MODES if mode in spec.recompute]
    options = [Option(*shape, mode) for shape in shapes for mode in modes]
    if spec.mixed_stages:
        options += [
            Option(*own, mode, Partner(*other))
            for own in shapes
            for other in shapes
            if own[0] < other[0]
            for mode in modes
        ]
    return tuple(options)


def replica_sizes(
    problem: Problem, spec: SpaceSpec, estimator: Estimator, option: Option, m: int
) -> tuple[int, ...] | None:
    """Micro-batch size of each replica group of an option at m micro-batches; None where none divides it.

    On two device groups: of the whole sizes that add up, those with which the slower replica ends a layer first, one
    micro-batch in flight fitting if it can.
    """
    samples = problem.global_batch_size // m
    if option.partner is None:
        return None if samples % option.dp else (samples // option.dp,)
    best = None
    for size in range(1, samples // option.dp + 1):
        rest = samples - size * option.dp
        if rest <= 0 or rest % option.partner.dp:
            continue
        sizes = (size, rest // option.partner.dp)
        slowest_s, missing, dp = 0.0, 0, option.dp + option.partner.dp
        for (group, tp, _), mine in zip(option.parts, sizes, strict=True):
            time = estimator.unit_time(UnitKey("layer", group, tp, 1, mine, SEQUENCE_PARALLEL))
            slowest_s = max(slowest_s, time.forward_s + time.backward(option.recompute))
            mode, zero = option.recompute, spec.zero_stage
            part = estimator.unit_memory("layer", tp, dp, mine, mode, zero, SEQUENCE_PARALLEL, group)
            needed = part.weights + part.gradients + part.optimizer + part.activation + part.working
            missing += max(0, needed - estimator.usable_bytes(group))
        if best is None or (missing, slowest_s) < best[0]:
            best = (missing, slowest_s), sizes
    return None if best is None else best[1]


def device_slices(sizes: Sequence[int], uses: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Index ranges (with more, with fewer) of a table whose axes count devices per group, 0 to `sizes`.

    table[with more] and table[with fewer] line up entries that differ by `uses`; empty where a group has fewer.
    """
    with_more = tuple(slice(devices, None) for devices in uses)
    with_fewer = tuple(slice(max(0, n + 1 - devices)) for n, devices in zip(sizes, uses, strict=True))
    return with_more, with_fewer


class Tables:
    """Time and memory of every option at one number of micro-batches m; K options, S = most stages, L layers.

    forward_s, backward_s   (K, 3) seconds per micro-batch of one embedding, layer, head; inf where the micro-batch
                            cannot be divided among the option's replicas. Of two replica groups, those of the one
                            whose layers are slower: a stage takes at least as long
    max_layers              (K, 4, S+1) most layers that fit at a position (FIRST and LAST bits) when the stage is
                            s-th from the end, which holds min(s, m) micro-batches in flight; 0 = does not fit
    """

    def __init__(
        self, problem: Problem, spec: SpaceSpec, options: Sequence[Option], estimator: Estimator, m: int, memory: bool
    ) -> None:
        self.num_microbatches = m
        self.max_stages = min(spec.max_stages, problem.model.num_layers)
        self.forward_s = np.full((len(options), 3), np.inf)
        self.backward_s = np.full((len(options), 3), np.inf)
        self.max_layers: npt.NDArray[np.int64] = np.zeros((len(options), POSITIONS, self.max_stages + 1), np.int64)
        in_flight = np.minimum(np.arange(1, self.max_stages + 1), m)
        for k, option in enumerate(options):
            sizes = replica_sizes(problem, spec, estimator, option, m)
            if sizes is None:
                continue
            most = np.full((POSITIONS, self.max_stages), problem.model.num_layers)
            slowest_s = 0.0
            for (group, tp, _), size in zip(option.parts, sizes, strict=True):
                times = []
                for unit in _UNITS:
                    time = estimator.unit_time(UnitKey(unit, group, tp, 1, size, SEQUENCE_PARALLEL))
                    times.append((time.forward_s, time.backward(option.recompute if unit == "layer" else "none")))
                if sum(times[1]) > slowest_s:
                    slowest_s = sum(times[1])
                    self.forward_s[k], self.backward_s[k] = np.array(times).T
                if memory:
                    replica, largest = (group, tp, size), max(sizes)
                    fitting = _max_layers(problem, spec, option, replica, largest, estimator, in_flight)
                    most = np.minimum(most, fitting)
            self.max_layers[k, :, 1:] = most
        self.layer_s: list[float] = (self.forward_s + self.backward_s)[:, 1].tolist()
        self.embedding_s: list[float] = (self.forward_s + self.backward_s)[:, 0].tolist()
        self.head_s: list[float] = (self.forward_s + self.backward_s)[:, 2].tolist()
        self._caps: list[list[list[int]]] = self.max_layers.tolist()

    def caps(self, options: Sequence[int]) -> list[int]:
        """Most layers that each stage can hold, front to back."""
        p = len(options)
        if p > self.max_stages:
            return [0] * p
        caps = [self._caps[k][0][p - i] for i, k in enumerate(options)]
        caps[0] = self._caps[options[0]][FIRST | (LAST if p == 1 else 0)][p]
        if p > 1:
            caps[-1] = self._caps[options[-1]][LAST][1]
        return caps


_UNITS: tuple[Unit, ...] = ("embedding", "layer", "head")


def _max_layers(
    problem: Problem,
    spec: SpaceSpec,
    option: Option,
    replica: tuple[int, int, int],
    largest: int,
    estimator: Estimator,
    in_flight: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """(4, S) most layers that fit on a replica (group, tp, samples) by position and place, between 0 and all.

    largest: samples of the option's largest replica, which a peer may have to take over (`SpaceSpec.survives`).
    """
    dp = sum(part[2] for part in option.parts)
    most = _layers_that_fit(problem, spec, replica, [replica[2]], option.recompute, dp, 0, estimator, in_flight)
    if not spec.survives:
        return most
    if dp <= spec.survives:
        return np.zeros_like(most)
    mode, projectors = option.recompute, 0
    if spec.take_over == "mecefo":  # only the FFN's input is kept, as large as a layer's, and projectors
        model, tp = problem.model, replica[1]
        columns = (2 if model.gated_mlp else 1) * model.hidden + model.ffn // tp
        mode, projectors = "full", PROJECTOR_RANK * columns * estimator.value_bytes
    tasks = [replica[2], *[largest] * spec.survives]
    left = dp - spec.survives  # they divide the optimiser state
    taker = _layers_that_fit(problem, spec, replica, tasks, mode, left, projectors, estimator, in_flight)
    # whoever takes nothing keeps its own activations, which may be more, and a larger part of the optimiser state too
    own, others = [replica[2]], max(2, left)
    other = _layers_that_fit(problem, spec, replica, own, option.recompute, others, 0, estimator, in_flight)
    return np.minimum(most, np.minimum(taker, other))


def _layers_that_fit(
    problem: Problem,
    spec: SpaceSpec,
    replica: tuple[int, int, int],
    tasks: Sequence[int],
    recompute: str,
    dp: int,
    more: int,
    estimator: Estimator,
    in_flight: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """(4, S) most layers that fit on a replica which takes the samples of each of `tasks`, and `more` bytes a layer."""
    group, tp, _ = replica

    def unit(name: Unit) -> tuple[int, int, int]:
        """(bytes once, bytes per micro-batch in flight of all tasks, working bytes) of one unit."""
        mode = recompute if name == "layer" else "none"
        parts = [
            estimator.unit_memory(name, tp, dp, size, mode, spec.zero_stage, SEQUENCE_PARALLEL, group) for size in tasks
        ]
        once = parts[0].weights + parts[0].gradients + parts[0].optimizer
        return once, sum(part.activation for part in parts), max(part.working for part in parts)

    state, activation, layer_working = unit("layer")
    usable = estimator.usable_bytes(group)
    most = np.zeros((POSITIONS, len(in_flight)), np.int64)
    for position in range(POSITIONS):
        ends = stage_units(bool(position & FIRST), bool(position & LAST), 0, problem.model.tied_embeddings)
        others = [unit(name) for name in ends]
        once = sum(other[0] for other in others)
        per_microbatch = sum(other[1] for other in others)
        logits = others[-1][2] if position & LAST else 0
        free = usable - once - in_flight * per_microbatch - max(layer_working, logits)
        most[position] = np.clip(free // (state + more + in_flight * activation), 0, problem.model.num_layers)
    return most
