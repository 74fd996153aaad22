"""Tables of everything that a stage can cost, for `cost/kernels.py`: what is compiled reads them, nothing else does.

`build` turns an estimator and a list of stage kinds into `StageTables`: seconds and bytes of every kind, at every
number of micro-batches, position and number of layers. They come from the estimator's own functions, in its own order
of operations, so that a kernel gives the bits that `cost.estimator.Estimator` gives (tests hold them equal).

What only validation needs (ZeRO-2 and 3, interleaved stages) is refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from haap_rl.cost import comm, compute, memory
from haap_rl.cost.compiling import jit_allotting, machine_code
from haap_rl.cost.estimator import (
    FIRST,
    LAST,
    POSITIONS,
    Estimator,
    Kind,
    ReplicaKey,
    StageKey,
    UnitKey,
    UnitTime,
    stage_units,
)
from haap_rl.problem.errors import InputError
from haap_rl.problem.model import Unit

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
VARIANTS = 4  # of a replica group's placement: one node more than needed (1), tensor parallelism across nodes (2)
MOST_BYTES = 2 * 2**30  # of the tables, beyond which they are refused
_formulas = machine_code(comm)
_gradient_sync_s, _exposed_s = _formulas["gradient_sync_s"], _formulas["exposed_s"]


class StageTables(NamedTuple):
    """Costs of every stage. M micro-batch counts, K kinds, R rows (kinds with their placement), L layers, P replica
    groups of a stage at most, G device groups, D sides of a boundary (devices and nodes of a stage).

    num_microbatches        (M,)
    forward_s, backward_s   (M, R, 4, L+1) per micro-batch, at a position with n layers; backward with recomputation;
                            inf where the micro-batch cannot be divided among the replicas
    sync_s, optimizer_s     (M, R, 4, L+1) per iteration
    parallel_s              (M, R, 4, L+1) tensor-parallel collectives, a part of forward and backward
    bytes                   (M, R, P, 4, 6) once, per layer, per micro-batch in flight, and that per layer, working,
                            available; of one device of each replica group
    capacity                (R,) bytes of one device of each replica group, summed
    send_s                  (M, D, D, 2) one transfer between two sides; last axis: both in one node
    tied_rate               (D, D, 2, 2) latency and bytes/s of a boundary, for tied embeddings; else empty
    operators               (3,) of an embedding, a layer, a head
    unit_key                (M, R, P) identity of the unit times of a replica group, within one M; -1: none
    row                     (K, VARIANTS^P) the row of a kind by the placement of its replica groups; -1: impossible
    group, devices, tp      (K, P) of each replica group; group -1 where a kind has fewer
    size_rank               (K, P) place of `devices` among all sizes of the cluster, largest first
    needed                  (K, P) nodes that the devices need at least
    aligned                 (G,) 1 where no placement touches more nodes than needed
    node                    (G, most devices + 1) node of each device, counted over the cluster
    """

    num_microbatches: Ints
    forward_s: Floats
    backward_s: Floats
    sync_s: Floats
    optimizer_s: Floats
    parallel_s: Floats
    bytes: Ints
    capacity: Ints
    side: Ints  # (R,)
    replicas: Ints  # (R,) dp in all
    send_s: Floats
    tied_rate: Floats
    operators: Ints
    unit_key: Ints
    row: Ints
    group: Ints
    devices: Ints
    tp: Ints
    size_rank: Ints
    num_sizes: int
    needed: Ints
    aligned: Ints
    node: Ints
    per_node: Ints  # (G,)
    blocking: float  # share of a send that blocks both stages
    tied_bytes: float  # gradient of a tied embedding, per pair of replicas; 0: not tied
    reserve_bytes: int  # of each device, that no plan may use
    max_stages: int
    num_layers: int


# ------------------------------------------------------------------------------------------------ building
def build(
    estimator: Estimator,
    num_microbatches: Sequence[int],
    kinds: Sequence[Kind],
    sizes: Callable[[Kind, int], tuple[int, ...] | None],
    max_stages: int,
    zero_stage: int,
    sequence_parallel: bool = True,
    virtual_stages: int = 1,
) -> StageTables:
    """StageTables of `kinds` for the estimator's problem.

    sizes(kind, m): the micro-batch size of each replica group; None where the micro-batch cannot be divided.
    Raises InputError for what the kernels do not price, and for tables that would not fit in memory.
    """
    if zero_stage > 1 or virtual_stages > 1:
        what = f"zero_stage={zero_stage}" if zero_stage > 1 else f"virtual_stages={virtual_stages}"
        raise InputError(
            f"kernels: {what} is priced by the readable estimator only; use zero_stage 0 or 1 and one run "
            "of layers per stage, or python -m haap_rl.estimate"
        )
    problem = estimator.problem
    num_layers, parts = problem.model.num_layers, max(len(kind.parts) for kind in kinds)
    rows: list[tuple[ReplicaKey, ...]] = []
    kind_of_row: list[int] = []
    row = np.full((len(kinds), VARIANTS**parts), -1, np.int64)
    for k, kind in enumerate(kinds):
        for code, replicas in _placements(estimator, kind, parts, kinds):
            row[k, code] = len(rows)
            rows.append(replicas)
            kind_of_row.append(k)
    cells = len(num_microbatches) * len(rows) * POSITIONS * (num_layers + 1)
    if cells * 5 * 8 > MOST_BYTES:
        raise InputError(
            f"kernels: tables of {len(rows)} stage kinds x {len(num_microbatches)} micro-batch counts would take "
            f"{cells * 40 / 2**30:.1f} GiB; use fewer space.group_sizes or space.num_microbatches"
        )
    shape = (len(num_microbatches), len(rows), POSITIONS, num_layers + 1)
    forward, backward, sync, optimizer, parallel = (np.full(shape, np.inf) for _ in range(5))
    sizes_bytes = np.zeros((*shape[:2], parts, POSITIONS, 6), np.int64)
    for j, m in enumerate(num_microbatches):
        for r, (k, replicas) in enumerate(zip(kind_of_row, rows, strict=True)):
            microbatch = sizes(kinds[k], m)
            if microbatch is None:
                continue
            placed = tuple(
                replica._replace(microbatch_size=size) for replica, size in zip(replicas, microbatch, strict=True)
            )
            tables = forward[j, r], backward[j, r], sync[j, r], optimizer[j, r], parallel[j, r]
            _fill_times(estimator, placed, kinds[k].recompute, zero_stage, sequence_parallel, tables)
            _fill_bytes(estimator, placed, kinds[k].recompute, zero_stage, sequence_parallel, sizes_bytes[j, r])
    sides: dict[tuple[tuple[int, int, int], ...], int] = {}
    side = np.array([sides.setdefault(_side(replicas), len(sides)) for replicas in rows], np.int64)
    send_s, rate = _boundaries(estimator, list(sides), num_microbatches)
    tied = problem.model.tied_embeddings
    ops, keys = _operators(
        estimator, rows, kind_of_row, [[sizes(kind, m) for kind in kinds] for m in num_microbatches], parts
    )
    groups = problem.cluster.groups
    all_sizes = sorted({tp * dp for kind in kinds for _, tp, dp in kind.parts}, reverse=True)

    def of_parts(value: Callable[[int, int, int], int], none: int) -> Ints:
        return np.array(
            [[value(*kind.parts[i]) if i < len(kind.parts) else none for i in range(parts)] for kind in kinds], np.int64
        )

    most = max(group.num_devices for group in groups)
    first_node = np.cumsum([0, *(group.num_nodes for group in groups)])
    return StageTables(
        num_microbatches=np.array(num_microbatches, np.int64),
        forward_s=forward,
        backward_s=backward,
        sync_s=sync,
        optimizer_s=optimizer,
        parallel_s=parallel,
        bytes=sizes_bytes,
        capacity=np.array([sum(groups[r.group].device.memory_bytes for r in replicas) for replicas in rows], np.int64),
        side=side,
        replicas=np.array([sum(replica.dp for replica in replicas) for replicas in rows], np.int64),
        send_s=send_s,
        tied_rate=rate if tied else np.zeros((0, 0, 2, 2)),
        operators=ops,
        unit_key=keys,
        row=row,
        group=of_parts(lambda g, tp, dp: g, -1),
        devices=of_parts(lambda g, tp, dp: tp * dp, 0),
        tp=of_parts(lambda g, tp, dp: tp, 1),
        size_rank=of_parts(lambda g, tp, dp: all_sizes.index(tp * dp), 0),
        num_sizes=len(all_sizes),
        needed=of_parts(lambda g, tp, dp: -(-tp * dp // groups[g].devices_per_node), 0),
        aligned=np.array([int(_aligned(estimator, g, kinds)) for g in range(len(groups))], np.int64),
        node=np.array(
            [[first_node[g] + d // group.devices_per_node for d in range(most + 1)] for g, group in enumerate(groups)],
            np.int64,
        ),
        per_node=np.array([group.devices_per_node for group in groups], np.int64),
        blocking=float(estimator.framework.send_blocking),
        tied_bytes=float(problem.model.vocab * problem.model.hidden * estimator.gradient_bytes) if tied else 0.0,
        reserve_bytes=int(estimator.framework.reserve_bytes),
        max_stages=max_stages,
        num_layers=num_layers,
    )


def _aligned(estimator: Estimator, group: int, kinds: Sequence[Kind]) -> bool:
    """Whether stages of a group always touch as few nodes as they can: placement keeps powers of two aligned."""
    sizes = {tp * dp for kind in kinds for g, tp, dp in kind.parts if g == group}
    per_node = estimator.problem.cluster.groups[group].devices_per_node
    return all(size & (size - 1) == 0 for size in (per_node, *sizes))


def _placements(
    estimator: Estimator, kind: Kind, parts: int, kinds: Sequence[Kind]
) -> list[tuple[int, tuple[ReplicaKey, ...]]]:
    """(code, replicas) of every way in which placement may spread a kind's replica groups over nodes."""
    ways: list[list[tuple[int, ReplicaKey]]] = []
    for group, tp, dp in kind.parts:
        where = estimator.problem.cluster.groups[group]
        needed = -(-tp * dp // where.devices_per_node)
        here = []
        for more in (0, 1):
            for across in (0, 1):
                if (more or across) and _aligned(estimator, group, kinds):
                    continue
                if needed + more > min(where.num_nodes, tp * dp) or (across and (tp == 1 or needed + more == 1)):
                    continue
                here.append((more + 2 * across, ReplicaKey(group, tp, dp, 0, needed + more, 1 + across)))
        ways.append(here)
    return [
        (sum(code * VARIANTS**i for i, (code, _) in enumerate(chosen)), tuple(replica for _, replica in chosen))
        for chosen in itertools.product(*ways)
    ]


def _side(replicas: tuple[ReplicaKey, ...]) -> tuple[tuple[int, int, int], ...]:
    return tuple((r.group, r.tp * r.dp, r.num_nodes) for r in replicas)


def _fill_times(
    estimator: Estimator,
    replicas: tuple[ReplicaKey, ...],
    recompute: str,
    zero_stage: int,
    sequence_parallel: bool,
    tables: tuple[Floats, Floats, Floats, Floats, Floats],
) -> None:
    """Fill (4, L+1) tables of one row; the order of additions is that of `Estimator._price_stage`."""
    num_layers = estimator.problem.model.num_layers
    layers = np.arange(1, num_layers + 1)
    forward, backward, sync, optimizer, parallel = tables
    for position in range(POSITIONS):
        first, last = bool(position & FIRST), bool(position & LAST)
        ends = stage_units(first, last, 0, estimator.problem.model.tied_embeddings)
        slowest = np.zeros((2, num_layers))
        shown = np.zeros(num_layers)
        for replica in replicas:
            time = [_unit_time(estimator, unit, replica, sequence_parallel) for unit in ("layer", *ends)]
            here = np.array([layers * time[0].forward_s, layers * time[0].backward(recompute)])
            tp_s = layers * time[0].tensor_parallel_s
            for end in time[1:]:
                here[0] += end.forward_s
                here[1] += end.backward_s
                tp_s = tp_s + end.tensor_parallel_s
            shown = np.where(here.sum(0) > slowest.sum(0), tp_s, shown)
            slowest = np.maximum(slowest, here)
        forward[position, 1:] = slowest[0] + estimator.framework.host_microbatch_s
        backward[position, 1:] = slowest[1]
        parallel[position, 1:] = shown
        sync[position, 1:], optimizer[position, 1:] = _tails(
            estimator, replicas, ends, recompute, zero_stage, sequence_parallel, slowest[1]
        )


def _tails(
    estimator: Estimator,
    replicas: tuple[ReplicaKey, ...],
    ends: Sequence[Unit],
    recompute: str,
    zero_stage: int,
    sequence_parallel: bool,
    backward_s: Floats,
) -> tuple[Floats, Floats]:
    """(gradient sync, optimiser step) in seconds of a stage with 1, 2, ... layers and that last backward pass."""
    problem, framework = estimator.problem, estimator.framework
    layers = np.arange(1, len(backward_s) + 1)
    dp = sum(replica.dp for replica in replicas)
    most, step_s = np.zeros(len(layers), np.int64), np.zeros(len(layers))
    for replica in replicas:
        each, *others = (memory.unit_parameters(problem.model, unit, replica.tp) for unit in ("layer", *ends))
        parameters = layers * each + sum(others)
        most = np.maximum(most, parameters)
        device = problem.cluster.groups[replica.group].device
        bytes_per_s = (
            device.memory_bandwidth_bytes_per_s * estimator.calibration.architecture(device).memory_bandwidth_share
        )
        here = parameters / dp if zero_stage >= 1 else parameters.astype(float)
        step_s = np.maximum(step_s, compute.optimizer_step_s(here, framework.optimizer_bytes, bytes_per_s))  # type: ignore[arg-type]
    key = StageKey(False, False, 1, replicas, recompute, 0, zero_stage, sequence_parallel)
    network = estimator.data_parallel_network(key)
    if estimator.profile is not None:
        sync = [estimator.gradient_sync_s(key, int(n), network, b) for n, b in zip(most, backward_s, strict=True)]
        return np.array(sync), step_s + framework.host_iteration_s
    reduced = (most * estimator.gradient_bytes).astype(float)
    gathered = (most * (estimator.gradient_bytes if zero_stage == 0 else estimator.value_bytes)).astype(float)
    slowed = 1.0 + estimator.calibration.straggler_share * math.log2(network.num_nodes)
    sync_s = _sync_s(reduced, gathered, backward_s, _floats(network), zero_stage == 0, slowed, framework.sync_hidden)
    return sync_s, step_s + framework.host_iteration_s


def _floats(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


@jit_allotting
def _sync_s(
    reduced: Floats,
    gathered: Floats,
    backward_s: Floats,
    network: tuple[float, ...],
    all_reduce: bool,
    slowed: float,
    hidden: float,
) -> Floats:
    """`Estimator.gradient_sync_s` for a stage with 1, 2, ... layers."""
    result = np.empty(len(reduced))
    for n in range(len(reduced)):
        sync_s = _gradient_sync_s(
            reduced[n],
            gathered[n],
            network[0],
            network[1],
            network[2],
            network[3],
            network[4],
            network[5],
            network[6],
            network[7],
            all_reduce,
        )
        result[n] = _exposed_s(sync_s * slowed, backward_s[n], hidden)
    return result


def _unit_time(estimator: Estimator, unit: Unit, replica: ReplicaKey, sequence_parallel: bool) -> UnitTime:
    return estimator.unit_time(
        UnitKey(unit, replica.group, replica.tp, replica.tp_nodes, replica.microbatch_size, sequence_parallel)
    )


def _fill_bytes(
    estimator: Estimator,
    replicas: tuple[ReplicaKey, ...],
    recompute: str,
    zero_stage: int,
    sequence_parallel: bool,
    table: Ints,
) -> None:
    """Fill the (P, 4, 6) bytes of one row, as `Estimator._price_memory` adds them up."""
    dp = sum(replica.dp for replica in replicas)
    for i, replica in enumerate(replicas):
        for position in range(POSITIONS):
            ends = stage_units(
                bool(position & FIRST), bool(position & LAST), 0, estimator.problem.model.tied_embeddings
            )
            parts = [
                estimator.unit_memory(
                    unit,
                    replica.tp,
                    dp,
                    replica.microbatch_size,
                    recompute if unit == "layer" else "none",
                    zero_stage,
                    sequence_parallel,
                    replica.group,
                )
                for unit in ("layer", *ends)
            ]
            state = [part.weights + part.gradients + part.optimizer for part in parts]
            logits = parts[-1].working if position & LAST else 0
            table[i, position] = (
                sum(state[1:]),
                state[0],
                sum(part.activation for part in parts[1:]),
                parts[0].activation,
                max(logits, parts[0].working),
                estimator.problem.cluster.groups[replica.group].device.memory_bytes
                - int(estimator.framework.reserve_bytes),
            )


def _boundaries(
    estimator: Estimator, sides: Sequence[tuple[tuple[int, int, int], ...]], num_microbatches: Sequence[int]
) -> tuple[Floats, Floats]:
    """(seconds of a transfer (M, D, D, 2), its latency and bytes/s (D, D, 2, 2)) between every two sides.

    `Estimator._price_boundary` and `send_s` for all pairs at once.
    """
    problem, calibration = estimator.problem, estimator.calibration
    groups = problem.cluster.groups
    nics, lanes, devices, nodes = (np.zeros(len(sides)) for _ in range(4))
    for d, side in enumerate(sides):
        for index, count, touched in side:
            group = groups[index]
            reached = min(touched, count / group.nics_per_node)
            nics[d] += reached * calibration.between(group.inter_node)[1]
            lanes[d] += count * calibration.inside(group.intra_node)[1]
            devices[d] += count
            nodes[d] += touched
    kinds = sorted({tuple(sorted({index for index, _, _ in side})) for side in sides})
    kind = np.array([kinds.index(tuple(sorted({index for index, _, _ in side}))) for side in sides])
    worst_latency, best_rate, small_s = (np.zeros((len(kinds), len(kinds))) for _ in range(3))
    for i, a in enumerate(kinds):
        for j, b in enumerate(kinds):
            links = [problem.cluster.link(g, h) for g in a for h in b]
            between = [calibration.between(link) for link in links]
            worst_latency[i, j] = max(latency_s for latency_s, _ in between)
            best_rate[i, j] = max(bytes_per_s for _, bytes_per_s in between)
            small_s[i, j] = max(calibration.small_message_s(link) for link in links)
    pair = kind[:, None], kind[None, :]
    narrower = np.minimum(np.minimum(nics, lanes)[:, None], np.minimum(nics, lanes)[None, :])
    rate = np.zeros((len(sides), len(sides), 2, 2))
    rate[:, :, 0, 0] = worst_latency[pair]
    rate[:, :, 0, 1] = np.minimum(narrower, np.maximum(nodes[:, None], nodes[None, :]) * best_rate[pair])
    fewer = np.minimum(devices[:, None], devices[None, :])
    for d, side in enumerate(sides):
        latency_s, bytes_per_s = calibration.inside(groups[side[0][0]].intra_node)
        rate[d, :, 1, 0], rate[d, :, 1, 1] = latency_s, fewer[d] * bytes_per_s
    send_s = np.zeros((len(num_microbatches), len(sides), len(sides), 2))
    for j, m in enumerate(num_microbatches):
        samples = problem.global_batch_size // m
        num_bytes = float(samples * problem.seq_len * problem.model.hidden * estimator.value_bytes)
        latency = rate[:, :, :, 0].copy()
        small = num_bytes / fewer < calibration.small_message_bytes
        latency[:, :, 0] = np.where(small, latency[:, :, 0] + small_s[pair], latency[:, :, 0])
        send_s[j] = comm.transfer_s(num_bytes, latency, rate[:, :, :, 1])  # type: ignore[arg-type]
    return send_s, rate


def _operators(
    estimator: Estimator, rows: Sequence[tuple[ReplicaKey, ...]], kind_of_row: Sequence[int],
    microbatches: Sequence[Sequence[tuple[int, ...] | None]], parts: int,
) -> tuple[Ints, Ints]:  # fmt: skip
    """((3,) operators of an embedding, a layer, a head; (M, R, P) identity of a replica group's unit times)."""
    model = estimator.problem.model
    count = np.array([len(model.operators(unit)) for unit in ("embedding", "layer", "head")], np.int64)
    known: dict[tuple[int, int, int, int], int] = {}
    keys = np.full((len(microbatches), len(rows), parts), -1, np.int64)
    for j, sizes in enumerate(microbatches):
        known.clear()
        for r, replicas in enumerate(rows):
            here = sizes[kind_of_row[r]]
            for i, (replica, size) in enumerate(zip(replicas, here or (), strict=False)):
                keys[j, r, i] = known.setdefault((replica.group, replica.tp, replica.tp_nodes, size), len(known))
    return count, keys
