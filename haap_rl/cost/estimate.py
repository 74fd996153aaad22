"""What a plan costs, every part named: the values that the estimator returns.

A plan that does not fit is a value like any other; `Estimate.rank` is the one order of plans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from haap_rl.cost import schedule


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on each device of one replica group of a stage, at its peak."""

    group: str
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int  # of all micro-batches in flight
    logits_bytes: int
    recompute_bytes: int  # working set of the layer that is being recomputed
    reserved_bytes: int  # CUDA context, communication buffers, library workspaces
    capacity_bytes: int  # all of the device's memory
    fragmentation: float  # share of the buffers that come and go which the allocator holds besides, while it can

    @property
    def needed_bytes(self) -> int:
        """What must be there at the peak; the logits are gone before a layer is recomputed, so the larger counts."""
        state = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        return state + self._buffers_bytes + self.reserved_bytes

    @property
    def cached_bytes(self) -> int:
        """What the caching allocator holds besides: it gives it back before it fails, so it never overflows."""
        return min(int(self._buffers_bytes * self.fragmentation), max(0, self.capacity_bytes - self.needed_bytes))

    @property
    def used_bytes(self) -> int:
        """Peak as the device shows it."""
        return self.needed_bytes + self.cached_bytes

    @property
    def missing_bytes(self) -> int:
        return max(0, self.needed_bytes - self.capacity_bytes)

    @property
    def _buffers_bytes(self) -> int:
        return self.activations_bytes + max(self.logits_bytes, self.recompute_bytes)


class StageTime(NamedTuple):
    """Seconds of one stage per micro-batch (gradient_sync_s and optimizer_s: per iteration).

    forward and backward are the stage's busy time; recompute, tensor_parallel, sharding and blocked are parts of them.
    """

    forward_s: float
    backward_s: float
    recompute_s: float
    tensor_parallel_s: float
    sharding_s: float  # gathering sharded weights and scattering gradients (ZeRO-2/3), as far as it is not hidden
    blocked_s: float  # waiting for its own transfers to the neighbouring stages, both directions
    send_s: float  # one transfer to the next stage; gradients take as long to come back
    gradient_sync_s: float  # the part not hidden behind the last backward passes
    optimizer_s: float
    num_devices: int

    @property
    def busy_s(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def tail_s(self) -> float:
        """Seconds between the end of the stage's last backward and the end of its iteration."""
        return self.gradient_sync_s + self.optimizer_s


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a plan costs. A plan that does not fit is a value: fits=False and the bytes that are missing."""

    iteration_s: float
    fits: bool
    bytes_missing: int  # of one device of each replica group, summed
    makespan_s: float  # end of the last backward of the whole pipeline
    stages: tuple[StageTime, ...]
    memory: tuple[tuple[StageMemory, ...], ...]  # per stage, per replica group
    delays_s: tuple[float, ...]  # per boundary, the part of a transfer that blocks neither stage
    chunk_forward_s: tuple[tuple[float, ...], ...]  # [chunk][stage]; one chunk where stages are not interleaved
    chunk_backward_s: tuple[tuple[float, ...], ...]
    num_microbatches: int
    tokens_per_iteration: int
    half_width: float | None = None  # of the 90 % interval of log iteration_s; None where nothing is known

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """Seconds between which the iteration takes in nine of ten clusters the constants were not fitted on."""
        if self.half_width is None:
            return None
        factor = math.exp(self.half_width)
        return self.iteration_s / factor, self.iteration_s * factor

    @property
    def rank(self) -> tuple[bool, int, float]:
        """The one order of plans: those that fit first, then fewer bytes missing, then less time."""
        return (not self.fits, self.bytes_missing, self.iteration_s)

    @property
    def energy(self) -> float:
        """log of the iteration time, plus 1 + missing bytes / capacity where the plan does not fit: `rank` as a number
        for what needs differences (rewards, temperatures)."""
        if self.fits:
            return math.log(self.iteration_s)
        capacity = sum(group.capacity_bytes for groups in self.memory for group in groups)
        return math.log(self.iteration_s) + 1.0 + self.bytes_missing / capacity

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_iteration / self.iteration_s

    @property
    def bubble(self) -> float:
        """Share of the devices' time in the pipeline that they wait, devices counted equally."""
        devices = sum(stage.num_devices for stage in self.stages)
        busy = sum(stage.num_devices * stage.busy_s for stage in self.stages) * self.num_microbatches
        return 1.0 - busy / (devices * self.makespan_s)

    @property
    def balance(self) -> float:
        """Mean busy time of a stage over the largest: 1 when all stages take equally long."""
        busy = [stage.busy_s for stage in self.stages]
        return sum(busy) / len(busy) / max(busy)

    @property
    def loads_s(self) -> list[float]:
        """Busy seconds of each stage over the whole iteration; the largest is the bottleneck."""
        return [self.num_microbatches * stage.busy_s + stage.tail_s for stage in self.stages]

    @property
    def bottleneck(self) -> tuple[int, str]:
        """(stage index, "memory", "comm" or "compute"): what to relieve first."""
        missing = [sum(group.missing_bytes for group in groups) for groups in self.memory]
        if not self.fits:
            return missing.index(max(missing)), "memory"
        loads = self.loads_s
        index = loads.index(max(loads))
        stage = self.stages[index]
        traffic_s = stage.tensor_parallel_s + stage.sharding_s + stage.blocked_s
        comm_s = self.num_microbatches * traffic_s + stage.gradient_sync_s
        return index, "comm" if comm_s > loads[index] / 2 else "compute"

    @property
    def bounds_s(self) -> tuple[float, float]:
        """(lower, upper) bound on `iteration_s` from closed forms that do not run the schedule."""
        tails = [stage.tail_s for stage in self.stages]
        m = self.num_microbatches
        if len(self.chunk_forward_s) > 1:  # no idle time at the busiest stage, or all stages one after another
            loads = [m * stage.busy_s for stage in self.stages]
            transfers = 2.0 * m * len(self.chunk_forward_s) * sum(self.delays_s)
            return max(map(sum, zip(loads, tails, strict=True))), sum(loads) + transfers + max(tails)
        times = (self.chunk_forward_s[0], self.chunk_backward_s[0], self.delays_s, self.delays_s, m)
        return schedule.lower_bound_s(*times, tails), schedule.upper_bound_s(*times) + max(tails)

    def timeline(self) -> list[schedule.Slot]:
        """Every forward and backward of the iteration, for drawing."""
        slots: list[schedule.Slot] = []
        forward, backward, m = self.chunk_forward_s, self.chunk_backward_s, self.num_microbatches
        if len(forward) > 1:
            schedule.interleaved_ends_s(forward, backward, self.delays_s, m, slots)
        else:
            schedule.stage_ends_s(forward[0], backward[0], self.delays_s, self.delays_s, m, slots)
        return slots
