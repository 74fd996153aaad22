"""The estimator: a plan in, its time and memory out, every part named; for reading, explaining and single plans.

Three levels, each a pure function of one frozen key bound to one problem, and each memoised unless `cached=False`:

    operator latency  <-  unit (embedding, layer, head)  <-  stage (a run of units on its replicas)

A plan is then a few look-ups, the transfers between neighbouring stages, and the exact 1F1B schedule. Without the
memo the same functions run for every unit of every stage of every plan; results are equal bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

from haap_rl.cost import comm, compute, memory, schedule
from haap_rl.cost.calibration import DEFAULT, Calibration
from haap_rl.cost.estimate import Estimate, StageMemory, StageTime
from haap_rl.problem.model import Operator, Unit
from haap_rl.problem.placement import place
from haap_rl.problem.plan import Plan, Problem

Key = TypeVar("Key")
Value = TypeVar("Value")

VALUE_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
BACKWARD_FLOPS = 2.0  # a backward pass computes two products, by input and by weight, for each forward one


# ------------------------------------------------------------------------------------------------ keys
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
    first: bool
    last: bool
    num_layers: int
    replicas: tuple[ReplicaKey, ...]
    recompute: str
    num_recomputed: int
    zero_stage: int
    sequence_parallel: bool


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
class UnitTime(NamedTuple):
    """Seconds of one micro-batch through one unit on one replica, tensor-parallel collectives included."""

    forward_s: float
    backward_s: float
    backward_selective_s: float  # with the attention core computed again
    backward_full_s: float  # with the whole forward computed again
    tensor_parallel_s: float  # of forward and backward together, when nothing is recomputed
    num_operators: int


class StageCost(NamedTuple):
    """Seconds of one stage, before the transfers to its neighbours; recomputation is inside `backward_s`."""

    forward_s: float
    backward_s: float
    recompute_s: float
    tensor_parallel_s: float
    gradient_sync_s: float  # the part that is not hidden
    optimizer_s: float
    num_operators: int  # operator latencies behind this stage, every unit counted
    units: frozenset[UnitKey]


# ------------------------------------------------------------------------------------------- estimator
class Estimator:
    """Prices plans of one problem: `estimator(plan) -> Estimate`.

    cached: memoise operator latencies, units, stages and memory; False prices everything anew (same values).
    Counters of operator latencies:
      operators_computed   really computed
      operators_requested  what an estimator with no memo computes for the same plans: every operator of every unit
      operators_distinct   what one computes that prices each distinct operator once per plan
    """

    def __init__(self, problem: Problem, cached: bool = True, calibration: Calibration = DEFAULT) -> None:
        self.problem, self.cached, self.calibration = problem, cached, calibration
        self.operators_computed = self.operators_requested = self.operators_distinct = 0
        self._group_index = {group.name: index for index, group in enumerate(problem.cluster.groups)}
        self.value_bytes = VALUE_BYTES[problem.precision]
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

        blocking = self.calibration.send_blocking
        sends = [0.0] * p  # seconds from stage i to i+1; 0 for the last
        samples = self.problem.global_batch_size // m
        num_bytes = float(samples * self.problem.seq_len * self.problem.model.hidden * self.value_bytes)
        for i in range(p - 1):
            one_node = nodes[i] is not None and nodes[i] == nodes[i + 1]
            latency_s, bytes_per_s = self.boundary_rate(BoundaryKey(sides[i], sides[i + 1], one_node))
            sends[i] = comm.transfer_s(num_bytes, latency_s, bytes_per_s)
        tied_s = self._tied_embeddings_s(sides, nodes)

        stages = []
        for i, (cost, side) in enumerate(zip(costs, sides, strict=True)):
            blocked = blocking * (sends[i] + (sends[i - 1] if i else 0.0))  # per direction
            stages.append(
                StageTime(
                    cost.forward_s + blocked,
                    cost.backward_s + blocked,
                    cost.recompute_s,
                    cost.tensor_parallel_s,
                    2.0 * blocked,
                    sends[i],
                    cost.gradient_sync_s + (tied_s if i in (0, p - 1) else 0.0),
                    cost.optimizer_s,
                    sum(devices for _, devices, _ in side),
                )
            )
        delays = [(1.0 - blocking) * send for send in sends[:-1]]
        ends = schedule.stage_ends_s(
            [stage.forward_s for stage in stages], [stage.backward_s for stage in stages], delays, delays, m
        )
        memory = tuple(self._memory(MemoryKey(key, schedule.in_flight(p, i, m))) for i, key in enumerate(keys))
        missing = sum(group.missing_bytes for groups in memory for group in groups)

        self.operators_requested += sum(cost.num_operators for cost in costs)
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
            delays_s=tuple(delays),
            num_microbatches=m,
            tokens_per_iteration=self.problem.tokens_per_iteration,
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
                StageKey(i == 0, i == last, layers, replicas, mode, count, plan.zero_stage, plan.sequence_parallel)
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
        efficiency = self.calibration.efficiency_of(device.name)
        half = self.calibration.gemm_half_size
        bytes_per_s = device.memory_bandwidth_bytes_per_s * self.calibration.memory_bandwidth_share
        tokens = float(key.microbatch_size * problem.seq_len)
        tp = float(key.tp)
        if operator.kind == "gemm":
            inputs = operator.inputs / (tp if operator.split == "row" else 1.0)
            outputs = operator.outputs / (tp if operator.split == "column" else 1.0)
            return compute.gemm_s(tokens, inputs, outputs, peak, efficiency, half, bytes_per_s, self.value_bytes)
        if operator.kind == "attention":
            return compute.attention_s(
                tokens,
                problem.seq_len,
                model.heads / tp,
                model.head_dim,
                problem.fused_attention,
                model.dropout,
                peak,
                efficiency,
                half,
                bytes_per_s,
                self.value_bytes,
            )
        divided = operator.split == "tensor" or key.sequence_parallel
        values = (operator.inputs + operator.outputs) / (tp if divided else 1.0)
        return compute.elementwise_s(tokens, values, bytes_per_s, self.value_bytes)

    def _price_unit(self, key: UnitKey) -> UnitTime:
        """Seconds of one unit: its operators, its tensor-parallel collectives, or the host if that is slower."""
        operators = self.problem.model.operators(key.unit)
        seconds = 0.0
        attention_s = 0.0
        for operator in operators:
            operator_s = self._operator_s(
                OperatorKey(operator, key.group, key.tp, key.microbatch_size, key.sequence_parallel)
            )
            seconds += operator_s
            if operator.kind == "attention":
                attention_s += operator_s
        all_reduce_s = self._tensor_parallel_all_reduce_s(key)
        # one all-reduce after attention and one after the MLP, in each direction (Shoeybi et al. 2019); the embedding
        # needs one forward, the head one backward
        forward_reduces, backward_reduces = {"layer": (2, 2), "embedding": (1, 0)}.get(key.unit, (0, 1))
        forward_gpu_s = seconds + forward_reduces * all_reduce_s
        backward_gpu_s = BACKWARD_FLOPS * seconds + backward_reduces * all_reduce_s
        host_s = self.calibration.host_layer_s if key.unit == "layer" else 0.0
        forward_s = max(forward_gpu_s, host_s)
        return UnitTime(
            forward_s=forward_s,
            backward_s=max(backward_gpu_s, host_s),
            backward_selective_s=max(backward_gpu_s + attention_s, host_s),
            backward_full_s=max(backward_gpu_s, host_s) + forward_s,
            tensor_parallel_s=(forward_reduces + backward_reduces) * all_reduce_s,
            num_operators=len(operators),
        )

    def _tensor_parallel_all_reduce_s(self, key: UnitKey) -> float:
        """Seconds of one all-reduce of a micro-batch's hidden states among the tp devices of a replica."""
        if key.tp == 1:
            return 0.0
        group = self.problem.cluster.groups[key.group]
        num_bytes = float(key.microbatch_size * self.problem.seq_len * self.problem.model.hidden * self.value_bytes)
        share = self.calibration.link_efficiency
        latency_s, bytes_per_s = group.intra_node.latency_s, group.intra_node.bandwidth_bytes_per_s * share
        if key.tp_nodes > 1:
            latency_s = max(latency_s, group.inter_node.latency_s)
            bytes_per_s = min(bytes_per_s, group.inter_node.bandwidth_bytes_per_s * share)
        return comm.all_reduce_s(num_bytes, key.tp, latency_s, bytes_per_s)

    def _price_stage(self, key: StageKey) -> StageCost:
        """Seconds of one stage; where replica groups differ, the slowest one sets the pace of each direction."""
        units = stage_units(key.first, key.last, key.num_layers, self.problem.model.tied_embeddings)
        slowest_forward = slowest_backward = recompute_s = tensor_parallel_s = 0.0
        num_operators, seen = 0, set()
        for replica in key.replicas:
            forward_s = backward_s = plain_backward_s = tp_s = 0.0
            left = key.num_recomputed
            for unit in units:
                unit_key = UnitKey(
                    unit, replica.group, replica.tp, replica.tp_nodes, replica.microbatch_size, key.sequence_parallel
                )
                time = self.unit_time(unit_key)
                seen.add(unit_key)
                num_operators += time.num_operators
                forward_s += time.forward_s
                plain_backward_s += time.backward_s
                tp_s += time.tensor_parallel_s
                if unit == "layer" and left > 0:
                    left -= 1
                    backward_s += time.backward_full_s if key.recompute == "full" else time.backward_selective_s
                else:
                    backward_s += time.backward_s
            if forward_s + backward_s > slowest_forward + slowest_backward:
                recompute_s, tensor_parallel_s = backward_s - plain_backward_s, tp_s
            slowest_forward, slowest_backward = max(slowest_forward, forward_s), max(slowest_backward, backward_s)
        sync_s, optimizer_s = self._gradient_sync_and_optimizer_s(key, units)
        return StageCost(
            slowest_forward + self.calibration.host_microbatch_s,
            slowest_backward,
            recompute_s,
            tensor_parallel_s,
            sync_s,
            optimizer_s,
            num_operators,
            frozenset(seen),
        )

    def _gradient_sync_and_optimizer_s(self, key: StageKey, units: list[Unit]) -> tuple[float, float]:
        """Exposed seconds of the stage's gradient synchronisation, and of its optimiser step, per iteration.

        Replica groups of different kinds form one ring: the largest shard of a device, the slowest link, the most
        rings per NIC.
        """
        model, calibration = self.problem.model, self.calibration
        groups = self.problem.cluster.groups
        dp = sum(replica.dp for replica in key.replicas)
        optimizer_s = 0.0
        most_parameters = 0
        for replica in key.replicas:
            parameters = sum(memory.unit_parameters(model, unit, replica.tp) for unit in units)
            most_parameters = max(most_parameters, parameters)
            device = groups[replica.group].device
            step_s = compute.optimizer_step_s(
                parameters / (dp if key.zero_stage >= 1 else 1),
                calibration.optimizer_bytes_per_parameter,
                device.memory_bandwidth_bytes_per_s * calibration.memory_bandwidth_share,
            )
            optimizer_s = max(optimizer_s, step_s)
        intra = [groups[replica.group].intra_node for replica in key.replicas]
        indices = [replica.group for replica in key.replicas]
        inter = [self.problem.cluster.link(a, b) for a in indices for b in indices]
        num_nodes = sum(replica.num_nodes for replica in key.replicas)
        gradient_bytes = float(most_parameters * memory.GRADIENT_BYTES)
        gathered_bytes = float(most_parameters * (self.value_bytes if key.zero_stage >= 1 else memory.GRADIENT_BYTES))
        sync_s = comm.gradient_sync_s(
            gradient_bytes,
            gathered_bytes,
            dp / num_nodes,
            num_nodes,
            max(min(replica.tp, _devices_per_node(replica)) for replica in key.replicas),
            max(link.latency_s for link in intra),
            min(link.bandwidth_bytes_per_s for link in intra) * calibration.link_efficiency,
            max(link.latency_s for link in inter),
            min(link.bandwidth_bytes_per_s for link in inter) * calibration.link_efficiency,
        )
        return (1.0 - calibration.gradient_sync_hidden) * sync_s, optimizer_s

    def _price_boundary(self, key: BoundaryKey) -> tuple[float, float]:
        """(latency in seconds, bytes per second) between two stages, through the narrower side's lanes.

        In one node each device of the narrower side has its own link; between nodes a side has the NICs of the nodes
        it touches, which its devices share.
        """
        cluster, share = self.problem.cluster, self.calibration.link_efficiency
        if key.one_node:
            link = cluster.groups[key.sender[0][0]].intra_node
            lanes = min(key.sender[0][1], key.receiver[0][1])
            return link.latency_s, lanes * link.bandwidth_bytes_per_s * share
        sides = []
        for side in (key.sender, key.receiver):
            nic = sum(nodes * cluster.groups[group].inter_node.bandwidth_bytes_per_s for group, _, nodes in side)
            lanes_rate = sum(
                devices * cluster.groups[group].intra_node.bandwidth_bytes_per_s for group, devices, _ in side
            )
            sides.append(min(nic, lanes_rate))
        links = [cluster.link(a, b) for a, _, _ in key.sender for b, _, _ in key.receiver]
        most_nodes = max(sum(nodes for _, _, nodes in side) for side in (key.sender, key.receiver))
        between = most_nodes * max(link.bandwidth_bytes_per_s for link in links)
        return max(link.latency_s for link in links), min(*sides, between) * share

    def _tied_embeddings_s(self, sides: list[SideKey], nodes: list[tuple[int, int] | None]) -> float:
        """Seconds of the all-reduce of the tied embedding's gradient between the first and the last stage."""
        if not self.problem.model.tied_embeddings or len(sides) == 1:
            return 0.0
        one_node = nodes[0] is not None and nodes[0] == nodes[-1]
        latency_s, bytes_per_s = self.boundary_rate(BoundaryKey(sides[0], sides[-1], one_node))
        num_bytes = float(self.problem.model.vocab * self.problem.model.hidden * memory.GRADIENT_BYTES)
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
                        unit, replica.tp, dp, replica.microbatch_size, mode, stage.zero_stage, stage.sequence_parallel
                    )
                )
            capacity = self.problem.cluster.groups[replica.group].device.memory_bytes
            result.append(
                StageMemory(
                    group=self.problem.cluster.groups[replica.group].name,
                    weights_bytes=sum(part.weights for part in parts),
                    gradients_bytes=sum(part.gradients for part in parts),
                    optimizer_bytes=sum(part.optimizer for part in parts),
                    activations_bytes=key.in_flight * sum(part.activation for part in parts),
                    logits_bytes=parts[-1].working if stage.last else 0,
                    recompute_bytes=max(
                        (part.working for part, unit in zip(parts, units, strict=True) if unit == "layer"), default=0
                    ),
                    reserved_bytes=capacity - self.usable_bytes(replica.group),
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
    ) -> memory.UnitMemory:
        """Bytes of one unit on one device; see `cost.memory.unit_memory`."""
        problem = self.problem
        return memory.unit_memory(
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
        )

    def usable_bytes(self, group: int) -> int:
        """Bytes of a device of `group` (an index) that a plan may use."""
        device = self.problem.cluster.groups[group].device
        return memory.usable_bytes(device.memory_bytes, self.calibration.reserve_bytes, self.calibration.fragmentation)


def stage_units(first: bool, last: bool, num_layers: int, tied_embeddings: bool) -> list[Unit]:
    """Units of a stage in order; a head beside its own embedding shares the weight where embeddings are tied."""
    units: list[Unit] = ["layer"] * num_layers
    if first:
        units.insert(0, "embedding")
    if last:
        units.append("tied_head" if first and tied_embeddings else "head")
    return units


def _devices_per_node(replica: ReplicaKey) -> int:
    return -(-replica.tp * replica.dp // replica.num_nodes)


def fingerprint(calibration: Calibration = DEFAULT) -> str:
    """Short hash of the constants and of the code that turns a plan into seconds: equal = comparable figures."""
    digest = hashlib.sha256(repr(calibration).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
