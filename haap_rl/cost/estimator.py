"""The estimator: a plan in, its time and memory out, every part named; for reading, explaining and single plans.

Three levels, each a pure function of one frozen key bound to one problem, and each memoised unless `cached=False`:

    operator latency  <-  unit (embedding, layer, head)  <-  stage (a run of units on its replicas)

A plan is then a few look-ups, the transfers between neighbouring stages, and the exact 1F1B schedule. Without the
memo the same functions run for every unit of every stage of every plan; results are equal bit for bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

from haap_rl.cost import comm, compute, memory, schedule
from haap_rl.cost.calibration import DEFAULT, Calibration
from haap_rl.cost.estimate import Estimate, StageMemory, StageTime
from haap_rl.cost.profiles import Measured, Profile
from haap_rl.problem.model import Operator, Unit
from haap_rl.problem.placement import place
from haap_rl.problem.plan import Plan, Problem

Key = TypeVar("Key")
Value = TypeVar("Value")

VALUE_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
# Bytes per gradient that replicas exchange where it is not a value's own size: Megatron-LM accumulates and reduces in
# fp32 with bf16 (--accumulate-allreduce-grads-in-fp32, implied by --bf16).
GRADIENT_BYTES = {("megatron", "bf16"): 4}
# Collectives per layer that gather its sharded weights: PyTorch FSDP flattens a layer into one parameter; DeepSpeed
# gathers each of the four matrices, and keeps what is smaller than stage3_param_persistence_threshold everywhere.
SHARDED_MESSAGES = {"deepspeed": 4, "huggingface": 4}
BACKWARD_FLOPS = 2.0  # a backward pass computes two products, by input and by weight, for each forward one
# one all-reduce after attention and one after the MLP, in each direction (Shoeybi et al. 2019); the embedding needs one
# forward, a head one backward
ALL_REDUCES: dict[Unit, tuple[int, int]] = {"layer": (2, 2), "embedding": (1, 0), "head": (0, 1), "tied_head": (0, 1)}


# ------------------------------------------------------------------------------------------------ keys
FIRST, LAST = 1, 2  # position of a stage in its pipeline, as bits; both for a pipeline of one stage
POSITIONS = 4


class Kind(NamedTuple):
    """How a stage is run: its replica groups, as (group, tp, dp), and what it recomputes of all its layers."""

    parts: tuple[tuple[int, int, int], ...]
    recompute: str


class OperatorKey(NamedTuple):
    """All that an operator's latency depends on, within one problem. `group` is an index into the cluster's groups."""

    operator: Operator
    group: int
    tp: int
    microbatch_size: int
    sequence_parallel: bool


class UnitKey(NamedTuple):
    """A unit on one replica: tp devices of a group that touch `tp_nodes` nodes."""

    unit: Unit
    group: int
    tp: int
    tp_nodes: int
    microbatch_size: int
    sequence_parallel: bool


class ReplicaKey(NamedTuple):
    """A replica group with what placement decides: nodes touched by the whole group and by one replica."""

    group: int
    tp: int
    dp: int
    microbatch_size: int
    num_nodes: int
    tp_nodes: int


class StageKey(NamedTuple):
    """A run of units on its replicas. `chunks` > 1: interleaved; the layers are then those of all chunks."""

    first: bool
    last: bool
    num_layers: int
    replicas: tuple[ReplicaKey, ...]
    recompute: str
    num_recomputed: int
    zero_stage: int
    sequence_parallel: bool
    chunks: int = 1


class MemoryKey(NamedTuple):
    stage: StageKey
    in_flight: int


SideKey = tuple[tuple[int, int, int], ...]  # (group, devices, nodes) of each replica group of a stage


class BoundaryKey(NamedTuple):
    """Two stages that exchange a tensor."""

    sender: SideKey
    receiver: SideKey
    one_node: bool  # both sit in the same node


# ---------------------------------------------------------------------------------------------- values
class Network(NamedTuple):
    """What joins the data-parallel replicas of a stage, as `comm.gradient_sync_s` takes it after the bytes."""

    ranks_per_node: float
    num_nodes: float
    rings_per_node: float
    nics_per_node: float
    intra_latency_s: float
    intra_bytes_per_s: float
    inter_latency_s: float
    node_bytes_per_s: float


class UnitTime(NamedTuple):
    """Seconds of one micro-batch through one unit on one replica, tensor-parallel collectives included."""

    forward_s: float
    backward_s: float
    backward_selective_s: float  # with the attention core computed again
    backward_full_s: float  # with the whole forward computed again
    tensor_parallel_s: float  # of forward and backward together, when nothing is recomputed
    num_operators: int

    def backward(self, recompute: str) -> float:
        """Seconds of the backward pass with a mode of recomputation."""
        again = {"none": self.backward_s, "selective": self.backward_selective_s, "full": self.backward_full_s}
        return again[recompute]


class StageCost(NamedTuple):
    """Seconds of one stage, before the transfers to its neighbours; recomputation is inside `backward_s`."""

    forward_s: float
    backward_s: float
    recompute_s: float
    tensor_parallel_s: float
    sharding_s: float  # traffic of sharded weights and gradients that is not hidden, both directions; inside the above
    gradient_sync_s: float  # the part that is not hidden
    optimizer_s: float
    num_operators: int  # operator latencies behind this stage, every unit counted
    units: frozenset[UnitKey]


# ------------------------------------------------------------------------------------------- estimator
class Estimator:
    """Prices plans of one problem: `estimator(plan) -> Estimate`.

    cached: memoise operator latencies, units, stages and memory; False prices everything anew (same values).
    profile: measured times and bytes of units and collectives; where it has a cell, it beats the curves. Raises
    InputError if it was measured for another problem.
    Counters of operator latencies:
      operators_computed   really computed
      operators_requested  what an estimator with no memo computes for the same plans: every operator of every unit
      operators_distinct   what one computes that prices each distinct operator once per plan
    """

    def __init__(
        self,
        problem: Problem,
        cached: bool = True,
        calibration: Calibration = DEFAULT,
        profile: Profile | None = None,
    ) -> None:
        self.problem, self.cached, self.calibration, self.profile = problem, cached, calibration, profile
        self._measured = Measured(profile, problem) if profile is not None else None
        self._collectives_included = profile is not None and profile.measured_for.collectives_included
        self.operators_computed = self.operators_requested = self.operators_distinct = 0
        self._group_index = {group.name: index for index, group in enumerate(problem.cluster.groups)}
        self.value_bytes = VALUE_BYTES[problem.precision]
        self.framework = calibration.framework(problem.framework)
        self.logit_bytes = memory.FUSED_LOGIT_BYTES if problem.framework == "fsdp" else memory.LOGIT_BYTES
        self.gradient_bytes = GRADIENT_BYTES.get((problem.framework, problem.precision), self.value_bytes)
        units: tuple[Unit, ...] = ("embedding", "layer", "head", "tied_head")
        self._operators_per_unit = {unit: len(problem.model.operators(unit)) for unit in units}
        self._operator_s = self._memoise(self._price_operator)
        self.unit_time = self._memoise(self._price_unit)
        self.stage_cost = self._memoise(self._price_stage)
        self.boundary_rate = self._memoise(self._price_boundary)
        self._memory = self._memoise(self._price_memory)

    def _memoise(self, price: Callable[[Key], Value]) -> Callable[[Key], Value]:
        return cache(price) if self.cached else price

    # ------------------------------------------------------------------------------------------ a plan
    def __call__(self, plan: Plan) -> Estimate:
        """Time and memory of `plan`. Raises PlanError if it is not legal; a plan that does not fit is a value."""
        self.problem.validate(plan)
        keys, sides, nodes = self._keys(plan)
        costs = [self.stage_cost(key) for key in keys]
        p, m = len(keys), plan.num_microbatches

        blocking = self.framework.send_blocking
        sends = [0.0] * p  # seconds from stage i to i+1; 0 for the last
        samples = self.problem.global_batch_size // m
        num_bytes = float(samples * self.problem.seq_len * self.problem.model.hidden * self.value_bytes)
        for i in range(p - 1):
            one_node = nodes[i] is not None and nodes[i] == nodes[i + 1]
            sends[i] = self.send_s(BoundaryKey(sides[i], sides[i + 1], one_node), num_bytes)
        tied_s = self._tied_embeddings_s(keys, sides, nodes)

        chunks = [costs]
        if plan.virtual_stages > 1:
            chunks = [[self.stage_cost(_chunk(key, c)) for key in keys] for c in range(plan.virtual_stages)]
            # the last stage sends to the first between two chunks
            one_node = nodes[0] is not None and nodes[0] == nodes[-1]
            sends[-1] = self.send_s(BoundaryKey(sides[-1], sides[0], one_node), num_bytes)
        forward = [[cost.forward_s for cost in chunk] for chunk in chunks]
        backward = [[cost.backward_s for cost in chunk] for chunk in chunks]
        stages = []
        for i, (cost, side) in enumerate(zip(costs, sides, strict=True)):
            received = sends[i - 1] if i or len(chunks) > 1 else 0.0
            blocked = blocking * (sends[i] + received)  # per direction and chunk
            for c in range(len(chunks)):
                forward[c][i] += blocked
                backward[c][i] += blocked
            stages.append(
                StageTime(
                    sum(chunk[i] for chunk in forward),
                    sum(chunk[i] for chunk in backward),
                    cost.recompute_s,
                    cost.tensor_parallel_s,
                    cost.sharding_s,
                    2.0 * blocked * len(chunks),
                    sends[i],
                    cost.gradient_sync_s + (tied_s if i in (0, p - 1) else 0.0),
                    cost.optimizer_s,
                    sum(devices for _, devices, _ in side),
                )
            )
        delays = [(1.0 - blocking) * send for send in sends]
        if len(chunks) > 1:
            ends = schedule.interleaved_ends_s(forward, backward, delays, m)
            in_flight = [schedule.interleaved_in_flight(p, i, m, len(chunks)) for i in range(p)]
        else:
            ends = schedule.stage_ends_s(forward[0], backward[0], delays[:-1], delays[:-1], m)
            in_flight = [schedule.in_flight(p, i, m) for i in range(p)]
        memory = tuple(self._memory(MemoryKey(key, held)) for key, held in zip(keys, in_flight, strict=True))
        missing = sum(group.missing_bytes for groups in memory for group in groups)

        priced = costs if len(chunks) == 1 else [*costs, *(cost for chunk in chunks for cost in chunk)]
        self.operators_requested += sum(cost.num_operators for cost in priced)
        distinct = costs[0].units.union(*(cost.units for cost in costs[1:]))
        self.operators_distinct += sum(self._operators_per_unit[key.unit] for key in distinct)
        return Estimate(
            iteration_s=max(
                end + stage.gradient_sync_s + stage.optimizer_s for end, stage in zip(ends, stages, strict=True)
            ),
            fits=missing == 0,
            bytes_missing=missing,
            makespan_s=ends[0],
            stages=tuple(stages),
            memory=memory,
            delays_s=tuple(delays if len(chunks) > 1 else delays[:-1]),
            chunk_forward_s=tuple(map(tuple, forward)),
            chunk_backward_s=tuple(map(tuple, backward)),
            num_microbatches=m,
            tokens_per_iteration=self.problem.tokens_per_iteration,
            half_width=self.calibration.half_width(self.problem, plan) if self.calibration.intervals else None,
        )

    def _keys(self, plan: Plan) -> tuple[list[StageKey], list[SideKey], list[tuple[int, int] | None]]:
        """Per stage: its key, its side of a boundary, and (group, node) where one node holds the whole stage."""
        keys: list[StageKey] = []
        sides: list[SideKey] = []
        nodes: list[tuple[int, int] | None] = []
        last = len(plan.stages) - 1
        placements = place(self.problem.cluster, plan)
        for i, (stage, placed) in enumerate(zip(plan.stages, placements, strict=True)):
            replicas = tuple(
                ReplicaKey(self._group_index[r.group], r.tp, r.dp, r.microbatch_size, where.num_nodes, where.tp_nodes)
                for r, where in zip(stage.replicas, placed, strict=True)
            )
            layers = stage.num_units - (i == 0) - (i == last)
            mode, count = stage.recompute.mode, stage.recompute.num_layers
            keys.append(
                StageKey(
                    i == 0,
                    i == last,
                    layers,
                    replicas,
                    mode,
                    count,
                    plan.zero_stage,
                    plan.sequence_parallel,
                    plan.virtual_stages,
                )
            )
            sides.append(tuple((r.group, r.tp * r.dp, r.num_nodes) for r in replicas))
            alone = len(placed) == 1 and placed[0].num_nodes == 1
            nodes.append((replicas[0].group, placed[0].first_node) if alone else None)
        return keys, sides, nodes

    # ---------------------------------------------------------------------------- prices, one key each
    def _price_operator(self, key: OperatorKey) -> float:
        """Seconds of one operator's forward pass on one device."""
        self.operators_computed += 1
        operator, model, problem = key.operator, self.problem.model, self.problem
        device = problem.cluster.groups[key.group].device
        peak = device.peak(problem.precision)
        architecture, constants = self.calibration.architecture(device), self.calibration
        bytes_per_s = device.memory_bandwidth_bytes_per_s * architecture.memory_bandwidth_share
        unaligned = architecture.unaligned_share if self.value_bytes == 2 else 1.0
        tokens = float(key.microbatch_size * problem.seq_len)
        tp = float(key.tp)
        if operator.kind == "gemm":
            inputs = operator.inputs / (tp if operator.split == "row" else 1.0)
            outputs = operator.outputs / (tp if operator.split == "column" else 1.0)
            if operator.name == "head":
                outputs = float(model.vocab_per_rank(key.tp))
            return compute.gemm_s(
                tokens,
                inputs,
                outputs,
                peak,
                architecture.gemm_efficiency,
                constants.gemm_half_size,
                constants.gemm_half_tokens,
                unaligned,
                bytes_per_s,
                self.value_bytes,
            )
        if operator.kind == "attention":
            fused, separate = architecture.fused_attention_efficiency, architecture.attention_efficiency
            efficiency = fused if problem.fused_attention else separate
            return compute.attention_s(
                tokens,
                problem.seq_len,
                model.heads / tp,
                model.head_dim,
                problem.fused_attention,
                model.dropout,
                peak,
                efficiency,
                unaligned,
                self.framework.elementwise_passes,
                bytes_per_s,
                self.value_bytes,
            )
        divided = operator.split == "tensor" or key.sequence_parallel
        values = (operator.inputs + operator.outputs) / (tp if divided else 1.0)
        return compute.elementwise_s(tokens, values * self.framework.elementwise_passes, bytes_per_s, self.value_bytes)

    def _price_unit(self, key: UnitKey) -> UnitTime:
        """Seconds of one unit: its operators and its tensor-parallel collectives, or the host if that is slower."""
        forward_device_s, attention_s = self._operators_s(key)
        backward_device_s = BACKWARD_FLOPS * forward_device_s
        forward_host_s, backward_host_s = self._host_s(key)
        all_reduce_s = added_s = self._tensor_parallel_all_reduce_s(key)
        measured = self._measured_unit_s(key)
        if measured is not None:  # the host's time is in it; attention has its measured share, else that of the curve
            share = self._attention_share(key)
            attention_s = measured[0] * (attention_s / self._curve_s(key)[0] if share is None else share)
            forward_device_s, backward_device_s = measured
            forward_host_s = backward_host_s = 0.0
            if self._collectives_included:
                added_s = 0.0
        forward_reduces, backward_reduces = ALL_REDUCES[key.unit]
        forward_device_s += forward_reduces * added_s
        backward_device_s += backward_reduces * added_s
        forward_s = self._launched_s(forward_device_s, forward_host_s)
        backward_s = self._launched_s(backward_device_s, backward_host_s)
        return UnitTime(
            forward_s=forward_s,
            backward_s=backward_s,
            backward_selective_s=self._launched_s(backward_device_s + attention_s, backward_host_s),
            backward_full_s=backward_s + forward_s,
            tensor_parallel_s=(forward_reduces + backward_reduces) * all_reduce_s,
            num_operators=self._operators_per_unit[key.unit],
        )

    def _operators_s(self, key: UnitKey) -> tuple[float, float]:
        """Seconds of a unit's operators forward, and the part that is attention."""
        seconds = 0.0
        attention_s = 0.0
        for operator in self.problem.model.operators(key.unit):
            operator_s = self._operator_s(
                OperatorKey(operator, key.group, key.tp, key.microbatch_size, key.sequence_parallel)
            )
            seconds += operator_s
            if operator.kind == "attention":
                attention_s += operator_s
        return seconds, attention_s

    def _measured_unit_s(self, key: UnitKey) -> tuple[float, float] | None:
        """(forward, backward) seconds of a unit by the profile; None where it has none of this unit and device."""
        if self._measured is None:
            return None
        device, inside = self.problem.cluster.groups[key.group].device.name, key._replace(tp_nodes=1)

        def curve(tp: int, size: int) -> tuple[float, float]:
            return self._curve_s(inside._replace(tp=tp, microbatch_size=size))

        seconds = self._measured.unit_s(device, key.unit, key.tp, key.microbatch_size, curve)
        if seconds is None or key == inside or not self._collectives_included:
            return seconds
        # what was measured holds the collectives of one node: slower by as much as the curve is
        across, within = self._curve_s(key), self._curve_s(inside)
        return seconds[0] * (across[0] / within[0]), seconds[1] * (across[1] / within[1])

    def _attention_share(self, key: UnitKey) -> float | None:
        device = self.problem.cluster.groups[key.group].device.name
        if self._measured is None or key.unit != "layer":
            return None
        return self._measured.attention_share(device, key.tp, key.microbatch_size)

    def _curve_s(self, key: UnitKey) -> tuple[float, float]:
        """(forward, backward) seconds of a unit by the curves, with collectives if the profile's times hold them."""
        seconds, _ = self._operators_s(key)
        forward_host_s, backward_host_s = self._host_s(key)
        all_reduce_s = self._tensor_parallel_all_reduce_s(key) if self._collectives_included else 0.0
        forward_reduces, backward_reduces = ALL_REDUCES[key.unit]
        return (
            self._launched_s(seconds + forward_reduces * all_reduce_s, forward_host_s),
            self._launched_s(BACKWARD_FLOPS * seconds + backward_reduces * all_reduce_s, backward_host_s),
        )

    def _host_s(self, key: UnitKey) -> tuple[float, float]:
        """Host seconds to launch a unit's kernels and collectives, forward and backward."""
        launch_s = self.framework.host_layer_s if key.unit == "layer" else 0.0
        collective_s = self.calibration.collective_s if key.tp > 1 else 0.0
        forward_reduces, backward_reduces = ALL_REDUCES[key.unit]
        return launch_s + forward_reduces * collective_s, launch_s + backward_reduces * collective_s

    def _launched_s(self, device_s: float, host_s: float) -> float:
        if self.problem.launch_blocking:
            return compute.launched_one_by_one_s(device_s, host_s)
        return compute.launched_s(device_s, host_s)

    def _tensor_parallel_all_reduce_s(self, key: UnitKey) -> float:
        """Seconds of one all-reduce of a micro-batch's hidden states among the tp devices of a replica."""
        if key.tp == 1:
            return 0.0
        group = self.problem.cluster.groups[key.group]
        num_bytes = float(key.microbatch_size * self.problem.seq_len * self.problem.model.hidden * self.value_bytes)
        latency_s, bytes_per_s = self.calibration.inside(group.intra_node)
        inside_s = comm.ring_all_reduce_s(num_bytes, key.tp, latency_s, bytes_per_s)
        if self._measured is not None:
            measured_s = self._measured.collective_s(
                group.device.name,
                "all_reduce",
                key.tp,
                num_bytes,
                lambda ranks: comm.ring_all_reduce_s(num_bytes, ranks, latency_s, bytes_per_s),
            )
            inside_s = inside_s if measured_s is None else measured_s
        if key.tp_nodes == 1:
            return inside_s + self.calibration.collective_s
        # the other replicas that share these nodes run their collectives at the same time
        rings = max(1.0, group.devices_per_node * key.tp_nodes / key.tp)
        across_s = comm.gradient_sync_s(
            num_bytes,
            num_bytes,
            key.tp / key.tp_nodes,
            key.tp_nodes,
            rings,
            group.nics_per_node,
            latency_s,
            bytes_per_s,
            *self.calibration.between(group.inter_node, max(1.0, rings / group.nics_per_node)),
        )
        # a hierarchy takes fewer steps, which a node could take as well
        return max(inside_s, across_s) + self.calibration.collective_s

    def _price_stage(self, key: StageKey) -> StageCost:
        """Seconds of one stage; where replica groups differ, the slowest one sets the pace of each direction."""
        units = stage_units(key.first, key.last, key.num_layers, self.problem.model.tied_embeddings)
        ends: list[tuple[Unit, int]] = [(unit, 1) for unit in units if unit != "layer"]
        plain = key.num_layers - key.num_recomputed
        slowest_forward = slowest_backward = recompute_s = tensor_parallel_s = 0.0
        num_operators, seen = 0, set()
        for replica in key.replicas:
            forward_s = backward_s = plain_backward_s = tp_s = 0.0
            counted: list[tuple[Unit, int]] = [("layer", key.num_layers), *ends]
            for unit, count in counted:
                unit_key = UnitKey(
                    unit, replica.group, replica.tp, replica.tp_nodes, replica.microbatch_size, key.sequence_parallel
                )
                if count == 0:
                    continue
                for _ in range(count):  # all alike: one look-up would do, but without the memo each one is priced
                    time = self.unit_time(unit_key)
                seen.add(unit_key)
                num_operators += count * time.num_operators
                forward_s += count * time.forward_s
                plain_backward_s += count * time.backward_s
                tp_s += count * time.tensor_parallel_s
                if unit == "layer":
                    backward_s += plain * time.backward_s + key.num_recomputed * time.backward(key.recompute)
                else:
                    backward_s += time.backward_s
            if forward_s + backward_s > slowest_forward + slowest_backward:
                recompute_s, tensor_parallel_s = backward_s - plain_backward_s, tp_s
            slowest_forward, slowest_backward = max(slowest_forward, forward_s), max(slowest_backward, backward_s)
        network = self.data_parallel_network(key)
        parameters = [
            sum(memory.unit_parameters(self.problem.model, unit, replica.tp) for unit in units)
            for replica in key.replicas
        ]
        sharding_forward_s, sharding_backward_s = self._sharding_s(
            key, max(parameters), network, slowest_forward, slowest_backward
        )
        last_backward_s = slowest_backward + sharding_backward_s
        if key.chunks > 1:  # an interleaved stage ends with the backward pass of its first chunk
            first_chunk = self.stage_cost(_chunk(key, 0))
            last_backward_s = first_chunk.backward_s
            num_operators += first_chunk.num_operators
        sync_s = self.gradient_sync_s(key, max(parameters), network, last_backward_s)
        return StageCost(
            slowest_forward + sharding_forward_s + self.framework.host_microbatch_s,
            slowest_backward + sharding_backward_s,
            recompute_s,
            tensor_parallel_s,
            sharding_forward_s + sharding_backward_s,
            sync_s,
            self._optimizer_s(key, parameters),
            num_operators,
            frozenset(seen),
        )

    def data_parallel_network(self, key: StageKey) -> Network:
        """The ring of a stage's replicas.

        Replica groups of different kinds form one ring: the slowest link, and the rings and adapters of the group with
        the most rings per adapter.
        """
        groups = self.problem.cluster.groups
        dp = sum(replica.dp for replica in key.replicas)
        num_nodes = sum(replica.num_nodes for replica in key.replicas)
        inside = [self.calibration.inside(groups[replica.group].intra_node) for replica in key.replicas]
        indices = [replica.group for replica in key.replicas]
        shared = [
            (min(replica.tp, _devices_per_node(replica)), groups[replica.group].nics_per_node)
            for replica in key.replicas
        ]
        rings, nics = max(shared, key=lambda pair: pair[0] / pair[1])
        links = [self.problem.cluster.link(a, b) for a in indices for b in indices]
        between = [self.calibration.between(link, max(1.0, rings / nics)) for link in links]
        return Network(
            ranks_per_node=dp / num_nodes,
            num_nodes=num_nodes,
            rings_per_node=rings,
            nics_per_node=nics,
            intra_latency_s=max(latency_s for latency_s, _ in inside),
            intra_bytes_per_s=min(bytes_per_s for _, bytes_per_s in inside),
            inter_latency_s=max(latency_s for latency_s, _ in between),
            node_bytes_per_s=min(bytes_per_s for _, bytes_per_s in between),
        )

    def _sharding_s(
        self, key: StageKey, parameters: int, network: Network, forward_s: float, backward_s: float
    ) -> tuple[float, float]:
        """Exposed seconds per micro-batch, forward and backward, of gathering weights and scattering gradients.

        ZeRO-2 scatters the gradients of each micro-batch; ZeRO-3 also gathers the weights before the forward and the
        backward pass (Rajbhandari et al. 2020). Layers prefetch the next layer's weights while they compute.
        """
        if key.zero_stage < 2:
            return 0.0, 0.0
        hidden = self.calibration.sharded_hidden
        messages = SHARDED_MESSAGES.get(self.problem.framework, 1) * (key.num_layers + key.first + key.last)
        each = parameters / messages
        scatter_s = messages * comm.gradient_sync_s(each * self.gradient_bytes, 0.0, *network)
        gather_s = 0.0
        if key.zero_stage >= 3:
            gather_s = messages * comm.gradient_sync_s(0.0, each * self.value_bytes, *network)
        forward_s = comm.exposed_s(gather_s, forward_s, hidden)
        return forward_s, comm.exposed_s(gather_s + scatter_s, backward_s, hidden)

    def gradient_sync_s(self, key: StageKey, parameters: int, network: Network, last_backward_s: float) -> float:
        """Exposed seconds of the stage's gradient synchronisation per iteration.

        All-reduce with ZeRO-0; reduce-scatter of the gradients and all-gather of the new weights with ZeRO-1; only
        the latter with ZeRO-2; nothing left with ZeRO-3. Nodes wait for the slowest of them.
        """
        if key.zero_stage >= 3:
            return 0.0
        reduced = 0.0 if key.zero_stage == 2 else float(parameters * self.gradient_bytes)
        gathered = float(parameters * (self.gradient_bytes if key.zero_stage == 0 else self.value_bytes))
        # between ZeRO-1's two halves lies the optimiser step: no tree does both
        sync_s = comm.gradient_sync_s(reduced, gathered, *network, all_reduce=key.zero_stage == 0)
        if self._measured is not None and network.num_nodes == 1 and network.ranks_per_node > 1:
            name, ranks = self.problem.cluster.groups[key.replicas[0].group].device.name, int(network.ranks_per_node)
            link = network.intra_latency_s, network.intra_bytes_per_s
            measured_s = self._measured.gradient_sync_s(name, ranks, reduced, gathered, *link)
            sync_s = sync_s if measured_s is None else measured_s
        sync_s = sync_s * (1.0 + self.calibration.straggler_share * math.log2(network.num_nodes))
        return comm.exposed_s(sync_s, last_backward_s, self.framework.sync_hidden)

    def _optimizer_s(self, key: StageKey, parameters: Sequence[int]) -> float:
        """Seconds of the optimiser step on the slowest device of the stage."""
        dp = sum(replica.dp for replica in key.replicas)
        seconds = 0.0
        for replica, number in zip(key.replicas, parameters, strict=True):
            device = self.problem.cluster.groups[replica.group].device
            bytes_per_s = (
                device.memory_bandwidth_bytes_per_s * self.calibration.architecture(device).memory_bandwidth_share
            )
            number_here = number / dp if key.zero_stage >= 1 else float(number)
            step_s = compute.optimizer_step_s(number_here, self.framework.optimizer_bytes, bytes_per_s)
            seconds = max(seconds, step_s)
        return seconds + self.framework.host_iteration_s

    def _price_boundary(self, key: BoundaryKey) -> tuple[float, float]:
        """(latency in seconds, bytes per second) between two stages, through the narrower side's lanes.

        In one node each device of the narrower side has its own link; between nodes a side has the NICs of the nodes
        it touches, one for each device where there are as many, which its devices share.
        """
        cluster = self.problem.cluster
        if key.one_node:
            latency_s, bytes_per_s = self.calibration.inside(cluster.groups[key.sender[0][0]].intra_node)
            return latency_s, min(key.sender[0][1], key.receiver[0][1]) * bytes_per_s
        sides = []
        for side in (key.sender, key.receiver):
            nics = lanes = 0.0
            for index, devices, nodes in side:
                group = cluster.groups[index]
                reached = min(nodes, devices / group.nics_per_node)
                nics += reached * self.calibration.between(group.inter_node)[1]
                lanes += devices * self.calibration.inside(group.intra_node)[1]
            sides.append(min(nics, lanes))
        links = [self.calibration.between(cluster.link(a, b)) for a, _, _ in key.sender for b, _, _ in key.receiver]
        most_nodes = max(sum(nodes for _, _, nodes in side) for side in (key.sender, key.receiver))
        between = most_nodes * max(bytes_per_s for _, bytes_per_s in links)
        return max(latency_s for latency_s, _ in links), min(*sides, between)

    def send_s(self, key: BoundaryKey, num_bytes: float) -> float:
        """Seconds of one transfer between two stages; a small one over a network waits for acknowledgements."""
        latency_s, bytes_per_s = self.boundary_rate(key)
        lanes = min(sum(devices for _, devices, _ in side) for side in (key.sender, key.receiver))
        if not key.one_node and num_bytes / lanes < self.calibration.small_message_bytes:
            links = [self.problem.cluster.link(a, b) for a, _, _ in key.sender for b, _, _ in key.receiver]
            latency_s = latency_s + max(self.calibration.small_message_s(link) for link in links)
        return comm.transfer_s(num_bytes, latency_s, bytes_per_s)

    def _tied_embeddings_s(
        self, keys: list[StageKey], sides: list[SideKey], nodes: list[tuple[int, int] | None]
    ) -> float:
        """Seconds of the all-reduce of the tied embedding's gradient between the first and the last stage."""
        if not self.problem.model.tied_embeddings or len(sides) == 1:
            return 0.0
        one_node = nodes[0] is not None and nodes[0] == nodes[-1]
        latency_s, bytes_per_s = self.boundary_rate(BoundaryKey(sides[0], sides[-1], one_node))
        # every replica of the first stage exchanges it with one of the last, all at once
        pairs = min(sum(replica.dp for replica in key.replicas) for key in (keys[0], keys[-1]))
        num_bytes = float(pairs * self.problem.model.vocab * self.problem.model.hidden * self.gradient_bytes)
        return comm.ring_all_reduce_s(num_bytes, 2, latency_s, bytes_per_s)

    def _price_memory(self, key: MemoryKey) -> tuple[StageMemory, ...]:
        """Peak bytes on a device of each replica group of a stage with `in_flight` micro-batches."""
        stage = key.stage
        units = stage_units(stage.first, stage.last, stage.num_layers, self.problem.model.tied_embeddings)
        dp = sum(replica.dp for replica in stage.replicas)
        result = []
        for replica in stage.replicas:
            modes = [stage.recompute] * stage.num_recomputed + ["none"] * (stage.num_layers - stage.num_recomputed)
            parts = []
            for unit in units:
                mode = modes.pop() if unit == "layer" else "none"
                parts.append(
                    self.unit_memory(
                        unit,
                        replica.tp,
                        dp,
                        replica.microbatch_size,
                        mode,
                        stage.zero_stage,
                        stage.sequence_parallel,
                        replica.group,
                    )
                )
            capacity = self.problem.cluster.groups[replica.group].device.memory_bytes
            result.append(
                StageMemory(
                    group=self.problem.cluster.groups[replica.group].name,
                    weights_bytes=sum(part.weights for part in parts),
                    gradients_bytes=sum(part.gradients for part in parts),
                    optimizer_bytes=sum(part.optimizer for part in parts),
                    activations_bytes=key.in_flight * sum(part.activation for part in parts) // stage.chunks,
                    logits_bytes=parts[-1].working if stage.last else 0,
                    recompute_bytes=max(
                        (part.working for part, unit in zip(parts, units, strict=True) if unit == "layer"), default=0
                    ),
                    reserved_bytes=int(self.framework.reserve_bytes),
                    fragmentation=self.calibration.fragmentation,
                    capacity_bytes=capacity,
                )
            )
        return tuple(result)

    # ------------------------------------------------------------- what the space's tables are made of
    def unit_memory(
        self,
        unit: Unit,
        tp: int,
        dp: int,
        microbatch_size: int,
        recompute: str,
        zero_stage: int,
        sequence_parallel: bool,
        group: int | None = None,
    ) -> memory.UnitMemory:
        """Bytes of one unit on one device; see `cost.memory.unit_memory`. `group`: whose devices, if it is known."""
        problem = self.problem
        formula = memory.unit_memory(
            problem.model,
            unit,
            microbatch_size * problem.seq_len,
            problem.seq_len,
            tp,
            dp,
            zero_stage,
            sequence_parallel,
            problem.fused_attention,
            recompute,
            self.value_bytes,
            self.logit_bytes,
        )
        if self._measured is None or unit != "layer" or group is None:
            return formula
        device = problem.cluster.groups[group].device.name
        complete = self._measured.activation_bytes(
            device, tp, microbatch_size, sequence_parallel, self._complete_activation_bytes
        )
        if complete is None:
            return formula
        if recompute == "none" or (recompute == "selective" and problem.fused_attention):  # it keeps the same then
            return formula._replace(activation=complete)
        return formula._replace(working=max(0, complete - formula.activation))

    def _complete_activation_bytes(self, tp: int, microbatch_size: int, sequence_parallel: bool) -> int:
        """Bytes that a layer keeps by the formula when nothing is recomputed."""
        tokens, seq_len, fused = (
            microbatch_size * self.problem.seq_len,
            self.problem.seq_len,
            self.problem.fused_attention,
        )
        return memory.layer_activation_bytes(
            self.problem.model, tokens, seq_len, tp, sequence_parallel, fused, "none", self.value_bytes
        )

    def gaps(self, plan: Plan) -> tuple[str, ...]:
        """What this plan's price owes to no measurement although there is a profile, one line each; () without one."""
        return () if self._measured is None else self._measured.gaps(plan)

    def usable_bytes(self, group: int) -> int:
        """Bytes of a device of `group` (an index) that a plan may use."""
        return max(0, self.problem.cluster.groups[group].device.memory_bytes - int(self.framework.reserve_bytes))


def stage_units(first: bool, last: bool, num_layers: int, tied_embeddings: bool) -> list[Unit]:
    """Units of a stage in order; a head beside its own embedding shares the weight where embeddings are tied."""
    units: list[Unit] = ["layer"] * num_layers
    if first:
        units.insert(0, "embedding")
    if last:
        units.append("tied_head" if first and tied_embeddings else "head")
    return units


def _chunk(key: StageKey, c: int) -> StageKey:
    """The c-th of the runs of layers that an interleaved stage alternates between, as a stage of its own."""
    return key._replace(
        first=key.first and c == 0,
        last=key.last and c == key.chunks - 1,
        num_layers=key.num_layers // key.chunks,
        num_recomputed=key.num_recomputed // key.chunks,
        chunks=1,
    )


def _devices_per_node(replica: ReplicaKey) -> int:
    return -(-replica.tp * replica.dp // replica.num_nodes)


def fingerprint(calibration: Calibration = DEFAULT, profile: Profile | None = None) -> str:
    """Short hash of constants, profile and the code that turns a plan into seconds: equal = comparable figures."""
    digest = hashlib.sha256(repr(calibration).encode())
    digest.update(profile.checksum.encode() if profile is not None else b"")
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
