"""What the space allows for one stage (options), and how long and how large each option is (tables).

A stage of the space sits on one device group and recomputes all of its layers or none. Tables assume that no replica
straddles nodes, as placement keeps it for sizes that are powers of two. One that does is never faster (its collectives
see the slower of both links), so bounds made from the tables hold; the estimator prices it as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from haap_rl.cost.estimator import Estimator, UnitKey, stage_units
from haap_rl.problem.errors import InputError, check_keys, positive_int
from haap_rl.problem.model import Unit
from haap_rl.problem.plan import RECOMPUTE_MODES, Problem

FIRST, LAST = 1, 2  # position of a stage in its pipeline, as bits; both for a pipeline of one stage
POSITIONS = 4
SEQUENCE_PARALLEL = True  # dominates in memory at equal time, so the space always uses it


@dataclass(frozen=True, slots=True)
class SpaceSpec:
    """The declared space (`conf/space/`): searchers propose, bounds bound and counts count exactly this.

    The last two switches ablate ideas of the paper and change where searchers look, never what is legal or proven.
    """

    num_microbatches: tuple[int, ...] = (4, 8, 16, 32, 64, 128)
    max_stages: int = 12
    max_tp: int = 8
    group_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    recompute: tuple[str, ...] = RECOMPUTE_MODES
    zero_stage: int = 1
    memory_aware_init: bool = True
    load_balance: bool = True

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
        for name in ("memory_aware_init", "load_balance"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"space: {name}={getattr(self, name)!r} must be true or false")

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SpaceSpec:
        """SpaceSpec from the mapping of a `conf/space/*.yaml`."""
        check_keys("space", config, [field.name for field in fields(cls)])
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in config.items()
        }
        for key in ("num_microbatches", "group_sizes", "recompute"):
            if not isinstance(values[key], tuple):
                raise InputError(f"space: {key}={values[key]!r} must be a list")
        return cls(**values)


class Option(NamedTuple):
    """How one stage is run: dp replicas of tp devices each of one device group (an index)."""

    group: int
    tp: int
    dp: int
    recompute: str

    @property
    def num_devices(self) -> int:
        return self.tp * self.dp


def stage_options(problem: Problem, spec: SpaceSpec) -> tuple[Option, ...]:
    """Every option of the space that is legal for the problem, whatever its memory, in a fixed order."""
    options = []
    for index, group in enumerate(problem.cluster.groups):
        for size in sorted(spec.group_sizes):
            for tp in range(1, min(size, spec.max_tp, group.devices_per_node) + 1):
                if size > group.num_devices or size % tp or problem.seq_len % tp or not problem.model.allows_tp(tp):
                    continue
                options += [Option(index, tp, size // tp, mode) for mode in RECOMPUTE_MODES if mode in spec.recompute]
    return tuple(options)


def possible_nodes(problem: Problem, options: Sequence[Option], option: Option) -> range:
    """How many nodes the devices of a stage on `option` may touch, whatever the other stages are.

    As few as they need where all sizes are powers of two, for placement then keeps them aligned; else one more.
    """
    group = problem.cluster.groups[option.group]
    needed = -(-option.num_devices // group.devices_per_node)
    sizes = [group.devices_per_node, *(other.num_devices for other in options if other.group == option.group)]
    if all(size & (size - 1) == 0 for size in sizes):
        return range(needed, needed + 1)
    return range(needed, min(group.num_nodes, option.num_devices, needed + 1) + 1)


def device_slices(sizes: Sequence[int], group: int, devices: int) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Index ranges (with more, with fewer) of a table whose axes count devices per group, 0 to `sizes`.

    table[with more] and table[with fewer] line up entries that differ by `devices` of `group`; empty where the group
    has fewer.
    """
    with_more = tuple(slice(devices if d == group else 0, None) for d in range(len(sizes)))
    with_fewer = tuple(slice(max(0, n + 1 - devices) if d == group else None) for d, n in enumerate(sizes))
    return with_more, with_fewer


class Tables:
    """Time and memory of every option at one number of micro-batches m; K options, S = most stages, L layers.

    forward_s, backward_s   (K, 3) seconds per micro-batch of one embedding, layer, head; inf where the micro-batch
                            cannot be divided among the option's replicas
    max_layers              (K, 4, S+1) most layers that fit at a position (FIRST and LAST bits) when the stage is
                            s-th from the end, which holds min(s, m) micro-batches in flight; 0 = does not fit
    """

    def __init__(
        self, problem: Problem, spec: SpaceSpec, options: Sequence[Option], estimator: Estimator, m: int, memory: bool
    ) -> None:
        self.num_microbatches = m
        self.samples = problem.global_batch_size // m
        self.max_stages = min(spec.max_stages, problem.model.num_layers)
        num_layers = problem.model.num_layers
        self.forward_s = np.full((len(options), 3), np.inf)
        self.backward_s = np.full((len(options), 3), np.inf)
        self.max_layers: npt.NDArray[np.int64] = np.zeros((len(options), POSITIONS, self.max_stages + 1), np.int64)
        for k, option in enumerate(options):
            if self.samples % option.dp:
                continue
            for column, unit in enumerate(_UNITS):
                key = UnitKey(unit, option.group, option.tp, 1, self.samples // option.dp, SEQUENCE_PARALLEL)
                time = estimator.unit_time(key)
                again = {"none": time.backward_s, "selective": time.backward_selective_s}
                self.forward_s[k, column] = time.forward_s
                self.backward_s[k, column] = time.backward_s
                if unit == "layer":
                    self.backward_s[k, column] = again.get(option.recompute, time.backward_full_s)
            self.max_layers[k, :, 1:] = (
                _max_layers(problem, spec, option, self.samples, estimator, self.max_stages, m)
                if memory
                else num_layers
            )
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
    problem: Problem, spec: SpaceSpec, option: Option, samples: int, estimator: Estimator, max_stages: int, m: int
) -> list[list[int]]:
    """[position][s - 1] most layers that fit in the stage s-th from the end, between 0 and all of them."""

    def unit(name: Unit) -> tuple[int, int, int]:
        """(bytes once, bytes per micro-batch in flight, working bytes) of one unit."""
        mode = option.recompute if name == "layer" else "none"
        size = samples // option.dp
        zero, group = spec.zero_stage, option.group
        part = estimator.unit_memory(name, option.tp, option.dp, size, mode, zero, SEQUENCE_PARALLEL, group)
        return part.weights + part.gradients + part.optimizer, part.activation, part.working

    state, activation, layer_working = unit("layer")
    usable = estimator.usable_bytes(option.group)
    most = []
    for position in range(POSITIONS):
        ends = stage_units(bool(position & FIRST), bool(position & LAST), 0, problem.model.tied_embeddings)
        others = [unit(name) for name in ends]
        once = sum(other[0] for other in others)
        per_microbatch = sum(other[1] for other in others)
        working = max([layer_working, *(other[2] for other in others)])
        here = []
        for s in range(1, max_stages + 1):
            in_flight = min(s, m)
            free = usable - once - in_flight * per_microbatch - working
            here.append(min(max(0, free // (state + in_flight * activation)), problem.model.num_layers))
        most.append(here)
    return most
