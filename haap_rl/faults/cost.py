"""What a plan costs while some of its cells are down: FLOPs, time and memory of cells that do more than their own work.

A cell is one replica of one stage. A failure changes only the workload of some cells, so the estimator prices a
degraded plan from the healthy estimate: the stages that are hit are priced anew, all others are taken as they are, and
the operators behind them come from the same memo. Transfers between stages are those of the healthy plan.

FLOPs and the MeCeFO techniques: arXiv 2510.16415 (NeurIPS 2025) as far as public reading notes tell; what they leave
open is an option of `mecefo.options.MecefoOptions`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from haap_rl.cost import compute, memory, schedule
from haap_rl.cost.calibration import DEFAULT, Calibration
from haap_rl.cost.estimate import Estimate, StageMemory
from haap_rl.cost.estimator import BACKWARD_FLOPS, Estimator, OperatorKey, ReplicaKey, StageKey, UnitKey, stage_units
from haap_rl.cost.profiles import Profile
from haap_rl.mecefo.options import MecefoOptions
from haap_rl.problem.errors import InputError
from haap_rl.problem.model import Model, Unit
from haap_rl.problem.plan import Plan, Problem, Stage

# Share of a device's peak that a matrix decomposition reaches: our assumption, nothing is published for these devices.
DECOMPOSITION_SHARE = 0.02
OVERSAMPLING, POWER_ITERATIONS = 6, 2  # of the randomized decomposition (Halko, Martinsson, Tropp 2011)


# ------------------------------------------------------------------------------------------------ words
class Cell(NamedTuple):
    """One replica of one stage; replicas are counted through the stage's replica groups."""

    stage: int
    replica: int


class Task(NamedTuple):
    """Samples of every micro-batch that a cell takes through the units of a stage.

    share      passes per micro-batch: below 1 where several cells take a dead one's micro-batches in turn, above 1
               where pipelines share those of one that is out
    backward   `mecefo`: attention skipped, FFN recomputed, low-rank weight gradients; `none`: a redundant forward pass
    """

    stage: int
    samples: int
    share: float = 1.0
    backward: Literal["exact", "mecefo", "none"] = "exact"


Work = tuple[Task, ...]  # of one cell; empty: it is down


@dataclass(frozen=True, slots=True)
class Degraded:
    """Who does what while cells are down: work[stage][replica].

    samples_lost    of every micro-batch, that nobody takes
    fills_bubbles   what cells take on runs in the bubbles they have anyway: the iteration takes as long as the busiest
                    stage is busy, or as the healthy one
    """

    plan: Plan
    work: tuple[tuple[Work, ...], ...]
    samples_lost: int = 0
    fills_bubbles: bool = False


class Pipeline(NamedTuple):
    """A pipeline of its own, one cell per stage: where each stage of it sits, its layers, its micro-batches."""

    stages: tuple[int, ...]  # of the plan, whose cells it is made of
    layers: tuple[int, ...]
    num_microbatches: int


def replica_samples(stage: Stage) -> list[int]:
    """Samples of each micro-batch that each replica of a stage takes."""
    return [group.microbatch_size for group in stage.replicas for _ in range(group.dp)]


def replica_group(stage: Stage, replica: int) -> int:
    """Index of the replica group that a replica belongs to."""
    for index, group in enumerate(stage.replicas):
        if replica < group.dp:
            return index
        replica -= group.dp
    raise IndexError(f"the stage has no replica {replica}")


def healthy_work(plan: Plan) -> tuple[tuple[Work, ...], ...]:
    """Every cell its own samples."""
    return tuple(
        tuple((Task(i, samples),) for samples in replica_samples(stage)) for i, stage in enumerate(plan.stages)
    )


# ------------------------------------------------------------------------------------------------ FLOPs
def forward_flops(model: Model, seq_len: int) -> tuple[float, float]:
    """Forward FLOPs (attention, FFN) of one layer per token; causal attention: 8h^2 + 2hs and 6hf for a Llama."""
    projections = 2.0 * model.hidden * (2 * model.query_size + 2 * model.kv_size)
    matrices = 3 if model.gated_mlp else 2
    return projections + 2.0 * model.query_size * seq_len, 2.0 * matrices * model.hidden * model.ffn


def task_flops(
    model: Model,
    seq_len: int,
    skip_attention: bool = False,
    ffn_recompute: str | None = None,
    rank: int | None = None,
    recomputes: bool = False,
) -> float:
    """FLOPs of one task per token and layer, forward and backward; without any technique 3 (a + F).

    skip_attention   technique I: a + 3F
    ffn_recompute    technique II, `gate_up` (4hf) or `whole` (F) once more
    rank             technique III: F of weight gradients become 6r(h + f); the 6rhf per batch are left out
    recomputes       the plan recomputes whole layers: a + F once more, where no technique stores the FFN's input
    """
    attention, ffn = forward_flops(model, seq_len)
    matrices = 3 if model.gated_mlp else 2
    again = {None: 0.0, "whole": ffn, "gate_up": ffn * (matrices - 1) / matrices}[ffn_recompute]
    weights = ffn if rank is None else 2.0 * matrices * rank * (model.hidden + model.ffn)
    flops = attention * (1.0 if skip_attention else 3.0) + 2.0 * ffn + again + weights
    return flops + attention + ffn if recomputes and ffn_recompute is None else flops


def load(
    model: Model, seq_len: int, *, healthy_recomputes: bool = False, tasks: int = 2, **techniques: object
) -> float:
    """FLOPs of a cell that runs `tasks` tasks with `techniques` (of `task_flops`) over those of a healthy cell."""
    healthy = task_flops(model, seq_len, recomputes=healthy_recomputes)
    return tasks * task_flops(model, seq_len, recomputes=healthy_recomputes, **techniques) / healthy  # type: ignore[arg-type]


def weight_gradient_flops_ratio(tokens: int, outputs: int, inputs: int, rank: int) -> float:
    """FLOPs of a low-rank weight gradient over an exact one: (2brn + 2brm + 2rmn) / 2bmn."""
    low_rank = 2.0 * rank * (tokens * (inputs + outputs) + outputs * inputs)
    return low_rank / (2.0 * tokens * outputs * inputs)


def projector_flops(rows: int, columns: int, rank: int, method: str) -> float:
    """FLOPs to find `rank` right singular vectors of a (rows x columns) matrix.

    svd: 4mn^2 + 22n^3 with m >= n (Golub and Van Loan, Matrix Computations, costs of R-SVD); eigh: the Gram matrix
    2mn^2 and 9n^3; randomized: (2q + 2) products with r + p vectors (Halko, Martinsson, Tropp 2011).
    """
    long, short = max(rows, columns), min(rows, columns)
    if method == "svd":
        return 4.0 * long * short**2 + 22.0 * short**3
    if method == "eigh":
        return 2.0 * rows * columns**2 + 9.0 * columns**3
    return (2 * POWER_ITERATIONS + 2) * 2.0 * rows * columns * (rank + OVERSAMPLING)


# -------------------------------------------------------------------------------------------- estimator
class RunKey(NamedTuple):
    """A run of units on one replica with so many samples: all that the time and memory of a task depend on.

    dp   replicas that divide the optimiser state
    """

    first: bool
    last: bool
    num_layers: int
    recompute: str
    num_recomputed: int
    group: int
    tp: int
    tp_nodes: int
    dp: int
    samples: int
    zero_stage: int
    sequence_parallel: bool
    backward: str


class RunMemory(NamedTuple):
    """Bytes of a run of units on one device; `activations` per micro-batch in flight."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    working: int
    projectors: int


class DegradedStage(NamedTuple):
    """Seconds of a stage of which some cells are down; per micro-batch and, the last two, per iteration."""

    forward_s: float
    backward_s: float
    gradient_sync_s: float
    optimizer_s: float


class FaultEstimator(Estimator):
    """The estimator, for plans of which some cells are down as well.

    options   how MeCeFO's degraded cells work; return_rule, ffn_average and empty_set's freeze or zero concern training
              alone and change no price
    Attention's gradients are exchanged among all live replicas of a stage like the others', although MeCeFO leaves the
    takers out: an upper bound.
    """

    def __init__(
        self,
        problem: Problem,
        cached: bool = True,
        calibration: Calibration = DEFAULT,
        profile: Profile | None = None,
        options: MecefoOptions | None = None,
    ) -> None:
        super().__init__(problem, cached, calibration, profile)
        self.options = options or MecefoOptions()
        smallest = min(problem.model.hidden, problem.model.ffn)
        if self.options.rank > smallest:
            raise InputError(
                f"mecefo: rank={self.options.rank} is larger than the smallest side of an FFN matrix of model "
                f"{problem.model.name!r}, {smallest}; give a rank of at most {smallest}"
            )
        self.healthy = lru_cache(maxsize=64)(self._price_healthy) if cached else self._price_healthy
        self.keys = lru_cache(maxsize=64)(self._stage_keys) if cached else self._stage_keys
        self.deal_layers = lru_cache(maxsize=4096)(self._deal_layers) if cached else self._deal_layers
        self._layer_backward_s = self._memoise(self._price_degraded_layer)
        self._run_s = self._memoise(self._price_run)
        self._run_bytes = self._memoise(self._price_run_memory)

    # ------------------------------------------------------------------------------------------ a plan
    def _price_healthy(self, plan: Plan) -> Estimate:
        """The ordinary estimate. Raises InputError for plans that are not priced under failures."""
        if plan.virtual_stages > 1 or plan.zero_stage > 1:
            what = (
                f"virtual_stages={plan.virtual_stages}" if plan.virtual_stages > 1 else f"zero_stage={plan.zero_stage}"
            )
            raise InputError(
                f"faults: {what} is not priced under failures, where a peer must hold the whole weights; use one run "
                "of layers per stage and zero_stage 0 or 1"
            )
        return self(plan)

    def _stage_keys(self, plan: Plan) -> tuple[StageKey, ...]:
        """What each stage of the plan costs by."""
        return tuple(self._keys(plan)[0])

    def degraded(self, state: Degraded) -> Estimate:
        """Time and memory of a plan while `state` holds; the ordinary estimate where every cell does its own work.

        Memory has an entry per distinct cell of a stage that is hit. Raises InputError as `healthy` does.
        """
        plan, healthy = state.plan, self.healthy(state.plan)
        hit = [i for i, (cells, own) in enumerate(zip(state.work, healthy_work(plan), strict=True)) if cells != own]
        if not hit:
            return healthy
        keys, sides, nodes = self._keys(plan)
        tied_s, last, m = self._tied_embeddings_s(keys, sides, nodes), len(keys) - 1, plan.num_microbatches
        stages, cells_of = list(healthy.stages), list(healthy.memory)
        for i in hit:
            cost, blocked_s = self.stage(i, state.work[i], keys), stages[i].blocked_s / 2.0  # per direction
            stages[i] = stages[i]._replace(
                forward_s=cost.forward_s + blocked_s,
                backward_s=cost.backward_s + blocked_s,
                gradient_sync_s=cost.gradient_sync_s + (tied_s if i in (0, last) else 0.0),
                optimizer_s=cost.optimizer_s,
                num_devices=sum(replica_of(keys[i], r).tp for r, work in enumerate(state.work[i]) if work),
            )
            cells_of[i] = self.stage_memory(i, state.work[i], keys, schedule.in_flight(len(keys), i, m))
        forward, backward = [s.forward_s for s in stages], [s.backward_s for s in stages]
        ends = schedule.stage_ends_s(forward, backward, healthy.delays_s, healthy.delays_s, m)
        iteration_s = max(end + stage.tail_s for end, stage in zip(ends, stages, strict=True))
        if state.fills_bubbles:
            iteration_s = max(healthy.iteration_s, *(m * stage.busy_s + stage.tail_s for stage in stages))
        missing = sum(cell.missing_bytes for cells in cells_of for cell in cells)
        kept = 1.0 - state.samples_lost * m / self.problem.global_batch_size
        return replace(
            healthy,
            iteration_s=iteration_s,
            fits=missing == 0,
            bytes_missing=missing,
            makespan_s=ends[0],
            stages=tuple(stages),
            memory=tuple(cells_of),
            chunk_forward_s=(tuple(forward),),
            chunk_backward_s=(tuple(backward),),
            tokens_per_iteration=round(self.problem.tokens_per_iteration * kept),
        )

    # ------------------------------------------------------------------------------------------- stages
    def stage(self, index: int, work: Sequence[Work], keys: Sequence[StageKey]) -> DegradedStage:
        """Seconds of a stage whose replicas do `work`, those of its slowest live cell.

        Its forward and backward go together: a taker with a cheap backward pass is not held up by peers with a cheap
        forward pass, for they wait for each other once an iteration only.
        """
        key, slowest, refresh_s = keys[index], (0.0, 0.0), 0.0
        for replica, tasks in enumerate(work):
            slowest = max(slowest, self.cell_s(index, replica, tasks, keys), key=sum)
            if any(task.backward == "mecefo" for task in tasks):
                where = replica_of(key, replica)
                refresh_s = max(refresh_s, self.refresh_s(where.group, where.tp, key.num_layers))
        alive = [bool(tasks) for tasks in work]
        live = live_key(key, alive) if any(alive) else key  # cells of another stage hold all of it (Bamboo)
        units = stage_units(key.first, key.last, key.num_layers, self.problem.model.tied_embeddings)
        parameters = [
            sum(memory.unit_parameters(self.problem.model, unit, replica.tp) for unit in units)
            for replica in live.replicas
        ]
        network = self.data_parallel_network(live)
        sync_s = self.gradient_sync_s(live, max(parameters), network, slowest[1])
        step_s = self._optimizer_s(live, parameters) + refresh_s / self.options.refresh_steps
        return DegradedStage(*slowest, sync_s, step_s)

    def cell_s(self, index: int, replica: int, tasks: Work, keys: Sequence[StageKey]) -> tuple[float, float]:
        """(forward, backward) seconds per micro-batch of a replica of stage `index` that does `tasks` one by one."""
        where = replica_of(keys[index], replica)
        forward_s = backward_s = 0.0
        for task in tasks:
            once_forward_s, once_backward_s = self._run_s(_run_key(keys[task.stage], where, task))
            forward_s += task.share * (once_forward_s + self.framework.host_microbatch_s)
            backward_s += task.share * once_backward_s
        return forward_s, backward_s

    def stage_memory(
        self, index: int, work: Sequence[Work], keys: Sequence[StageKey], held: int
    ) -> tuple[StageMemory, ...]:
        """Peak bytes on a device of each distinct live cell of a stage whose replicas do `work`.

        held: micro-batches in flight.
        """
        dp = sum(1 for tasks in work if tasks)
        cells = {(replica_of(keys[index], r), tasks): r for r, tasks in enumerate(work) if tasks}
        return tuple(self.cell_memory(index, r, tasks, keys, dp, held) for (_, tasks), r in cells.items())

    def cell_memory(
        self,
        index: int,
        replica: int,
        tasks: Work,
        keys: Sequence[StageKey],
        dp: int,
        held: int,
        holds: tuple[int, ...] = (),
    ) -> StageMemory:
        """Peak bytes on a device of one cell: the state of every stage it works for, the activations of every task.

        dp: live replicas, which divide the optimiser state. held: micro-batches in flight. holds: further stages whose
        weights, gradients and optimiser state the cell keeps.
        """
        where = replica_of(keys[index], replica)
        runs = [(task, self._run_bytes(_run_key(keys[task.stage], where, task, dp))) for task in tasks]
        of_stage = {task.stage: run for task, run in runs}
        for stage in holds:
            if stage not in of_stage:
                of_stage[stage] = self._run_bytes(_run_key(keys[stage], where, Task(stage, 1), dp))
        projectors = {task.stage: run.projectors for task, run in runs if task.backward == "mecefo"}
        group = self.problem.cluster.groups[where.group]
        return StageMemory(
            group=group.name,
            weights_bytes=sum(run.weights for run in of_stage.values()) + sum(projectors.values()),
            gradients_bytes=sum(run.gradients for run in of_stage.values()),
            optimizer_bytes=sum(run.optimizer for run in of_stage.values()),
            activations_bytes=sum(math.ceil(held * min(1.0, task.share)) * run.activations for task, run in runs),
            logits_bytes=max((run.logits for _, run in runs), default=0),
            recompute_bytes=max((run.working for _, run in runs), default=0),
            reserved_bytes=int(self.framework.reserve_bytes),
            fragmentation=self.calibration.fragmentation,
            capacity_bytes=group.device.memory_bytes,
        )

    def state_bytes(self, key: StageKey, replica: ReplicaKey) -> int:
        """Weights and optimiser state on one device of a replica: what a returning cell must be given."""
        run = self._run_bytes(_run_key(key, replica, Task(0, 1), sum(r.dp for r in key.replicas)))
        return run.weights + run.optimizer

    def shard_bytes(self, key: StageKey, replica: ReplicaKey) -> int:
        """The part of the optimiser state that nobody but this device of a replica holds."""
        if key.zero_stage == 0:
            return 0
        return self._run_bytes(_run_key(key, replica, Task(0, 1), sum(r.dp for r in key.replicas))).optimizer

    def redundant_bytes_missing(self, state: Degraded) -> int:
        """Bytes that the cells lack, summed, where every cell keeps the state of the next stage too (Bamboo)."""
        keys = self.keys(state.plan)
        missing = 0
        for i, work in enumerate(state.work):
            held = schedule.in_flight(len(keys), i, state.plan.num_microbatches)
            dp = sum(1 for tasks in work if tasks)
            for r, tasks in enumerate(work):
                if tasks:
                    holds = ((i + 1) % len(keys),)
                    missing += self.cell_memory(i, r, tasks, keys, dp, held, holds).missing_bytes
        return missing

    # ------------------------------------------------------------------- pipelines made anew (Oobleck)
    def _deal_layers(self, plan: Plan, alive: tuple[int, ...]) -> tuple[int, ...] | None:
        """Layers for one cell of each stage in `alive`, a pipeline of its own, so that the slowest takes least.

        At least one each, then one after the other to whoever ends first with it, which is optimal as layers are alike;
        None where memory does not hold them all.
        """
        keys, num_layers = self.keys(plan), self.problem.model.num_layers
        most = [self._most_layers(plan, keys, alive, j) for j in range(len(alive))]
        if min(most) < 1 or sum(most) < num_layers:
            return None
        layers = [1] * len(alive)
        ends_s = [sum(self._pipeline_stage_s(plan, keys, alive, j, 2)) for j in range(len(alive))]  # with one more
        for _ in range(num_layers - len(alive)):
            j = min((j for j in range(len(alive)) if layers[j] < most[j]), key=lambda j: (ends_s[j], j))
            layers[j] += 1
            ends_s[j] = sum(self._pipeline_stage_s(plan, keys, alive, j, layers[j] + 1))
        return tuple(layers)

    def _most_layers(self, plan: Plan, keys: Sequence[StageKey], alive: Sequence[int], j: int) -> int:
        """Layers that fit on the j-th cell; more layers never take fewer bytes."""
        held = schedule.in_flight(len(alive), j, plan.num_microbatches)
        most, too_many = 0, self.problem.model.num_layers + 1
        while too_many - most > 1:
            n = (most + too_many) // 2
            if self._pipeline_cell(plan, keys, alive, j, n, held).missing_bytes:
                too_many = n
            else:
                most = n
        return most

    def _pipeline_cell(
        self, plan: Plan, keys: Sequence[StageKey], alive: Sequence[int], j: int, layers: int, held: int
    ) -> StageMemory:
        key = _pipeline_key(keys, alive, j, layers)
        samples = plan.stages[alive[j]].replicas[0].microbatch_size
        dp = plan.stages[alive[j]].replicas[0].dp
        return self.cell_memory(0, 0, (Task(0, samples),), [key], dp, held)

    def _pipeline_stage_s(
        self, plan: Plan, keys: Sequence[StageKey], alive: Sequence[int], j: int, layers: int
    ) -> tuple[float, float]:
        """(forward, backward) seconds of the j-th stage of a pipeline made anew, what sends block of it included."""
        key = _pipeline_key(keys, alive, j, layers)
        samples = plan.stages[alive[j]].replicas[0].microbatch_size
        forward_s, backward_s = self.cell_s(0, 0, (Task(0, samples),), [key])
        blocked_s = self.healthy(plan).stages[alive[j]].blocked_s / 2.0
        return forward_s + blocked_s, backward_s + blocked_s

    def pipeline_period_s(self, plan: Plan, alive: Sequence[int], layers: Sequence[int]) -> float:
        """Seconds per micro-batch of a pipeline made anew, in the long run: its slowest stage."""
        keys = self.keys(plan)
        return max(sum(self._pipeline_stage_s(plan, keys, alive, j, n)) for j, n in enumerate(layers))

    def pipelines_s(self, plan: Plan, pipelines: Sequence[Pipeline]) -> float:
        """Iteration seconds of pipelines made anew; all exchange gradients of all layers after the slowest of them."""
        keys, healthy, slowest_s = self.keys(plan), self.healthy(plan), 0.0
        for stages, layers, m in pipelines:
            times = [self._pipeline_stage_s(plan, keys, stages, j, n) for j, n in enumerate(layers)]
            delays = [healthy.delays_s[min(i, len(healthy.delays_s) - 1)] for i in stages[:-1]]
            ends = schedule.stage_ends_s([f for f, _ in times], [b for _, b in times], delays, delays, m)
            slowest_s = max(slowest_s, ends[0])
        return slowest_s + max(stage.tail_s for stage in healthy.stages)

    # ---------------------------------------------------------------------------- prices, one key each
    def _price_run(self, key: RunKey) -> tuple[float, float]:
        """(forward, backward) seconds of a run of units, in the order of additions of `Estimator._price_stage`."""
        forward_s = backward_s = 0.0
        plain = key.num_layers - key.num_recomputed
        ends = stage_units(key.first, key.last, 0, self.problem.model.tied_embeddings)
        for unit in ("layer", *ends):
            unit_key = UnitKey(unit, key.group, key.tp, key.tp_nodes, key.samples, key.sequence_parallel)
            time = self.unit_time(unit_key)
            if unit != "layer":
                forward_s += time.forward_s
                backward_s += time.backward_s
                continue
            forward_s += key.num_layers * time.forward_s
            if key.backward == "mecefo":
                backward_s += key.num_layers * self._layer_backward_s(unit_key)
            else:
                backward_s += plain * time.backward_s + key.num_recomputed * time.backward(key.recompute)
        return forward_s, 0.0 if key.backward == "none" else backward_s

    def _price_run_memory(self, key: RunKey) -> RunMemory:
        """Bytes of a run of units on one device, by the estimator's own functions of one unit."""

        def unit(name: Unit, mode: str) -> memory.UnitMemory:
            return self.unit_memory(
                name, key.tp, key.dp, key.samples, mode, key.zero_stage, key.sequence_parallel, key.group
            )

        ends = [unit(name, "none") for name in stage_units(key.first, key.last, 0, self.problem.model.tied_embeddings)]
        again = key.num_recomputed
        counted = [(unit("layer", key.recompute), again), (unit("layer", "none"), key.num_layers - again)]
        if key.backward == "mecefo":  # only the FFN's input is kept, as large as a layer's, and one FFN comes back
            counted = [(unit("layer", "full"), key.num_layers)]
        counted = [(part, count) for part, count in counted if count]
        all_parts = [*counted, *((end, 1) for end in ends)]
        return RunMemory(
            weights=sum(count * part.weights for part, count in all_parts),
            gradients=sum(count * part.gradients for part, count in all_parts),
            optimizer=sum(count * part.optimizer for part, count in all_parts),
            activations=0 if key.backward == "none" else sum(count * part.activation for part, count in all_parts),
            logits=ends[-1].working if key.last else 0,
            working=max((part.working for part, _ in counted), default=0),
            projectors=key.num_layers * self._projector_values(key.tp) * self.value_bytes,
        )

    def _price_degraded_layer(self, key: UnitKey) -> float:
        """Backward seconds of a layer without attention's backward, its FFN recomputed, some weight gradients low-rank.

        Every product is priced as the estimator prices it, thin ones at the efficiency of thin ones. Where the profile
        has measured layers, theirs is scaled by the ratio of the curves.
        """
        options, model = self.options, self.problem.model
        tokens = float(key.microbatch_size * self.problem.seq_len)
        again = ("mlp_norm", "mlp_in", "activation") if options.ffn_recompute == "gate_up" else (
            "mlp_norm", "mlp_in", "activation", "mlp_out", "mlp_residual"
        )  # fmt: skip
        seconds = 0.0
        for operator in model.operators("layer"):
            if not operator.name.startswith("mlp") and operator.name != "activation":
                continue
            forward_s = self._operator_s(
                OperatorKey(operator, key.group, key.tp, key.microbatch_size, key.sequence_parallel)
            )
            if operator.name in again:
                seconds += forward_s
            if operator.kind != "gemm":
                seconds += BACKWARD_FLOPS * forward_s
                continue
            matrices = self._matrices(operator.name)
            low_rank = [name for name in matrices if name in options.low_rank]
            seconds += forward_s * (1.0 + 1.0 - len(low_rank) / len(matrices))  # by input, and by weight where exact
            rows, columns = self._matrix(matrices[0], key.tp)
            products = [(tokens, columns, options.rank), (tokens, rows, options.rank), (options.rank, rows, columns)]
            seconds += len(low_rank) * sum(self._product_s(key.group, *product) for product in products)
        reduces = 1.0  # after the FFN's column-parallel products, on the way back
        if options.ffn_recompute == "whole":
            reduces += 1.0
        elif key.sequence_parallel:
            reduces += 0.5  # the FFN's input is gathered once more, half of an all-reduce
        seconds += reduces * self._tensor_parallel_all_reduce_s(key)
        _, host_s = self._host_s(key)
        degraded_s = self._launched_s(seconds, host_s)
        if self._measured_unit_s(key) is None:
            return degraded_s
        operators_s, _ = self._operators_s(key)
        exact_s = BACKWARD_FLOPS * operators_s + 2.0 * self._tensor_parallel_all_reduce_s(key)
        return self.unit_time(key).backward_s * (degraded_s / self._launched_s(exact_s, host_s))

    def refresh_s(self, group: int, tp: int, num_layers: int) -> float:
        """Seconds to find the projectors of a stage's FFN matrices anew, on one of its devices."""
        device = self.problem.cluster.groups[group].device
        flops = sum(
            projector_flops(*self._matrix(name, tp), self.options.rank, self.options.projector)
            for name in self._low_rank_matrices()
        )
        return num_layers * flops / (device.peak(self.problem.precision) * DECOMPOSITION_SHARE)

    def _matrices(self, operator: str) -> tuple[str, ...]:
        """The weight matrices behind an operator, by their names in `MecefoOptions.low_rank`."""
        if operator == "mlp_out":
            return ("down",)
        return ("gate", "up") if self.problem.model.gated_mlp else ("up",)

    def _low_rank_matrices(self) -> list[str]:
        there = (*self._matrices("mlp_in"), *self._matrices("mlp_out"))
        return [name for name in there if name in self.options.low_rank]

    def _matrix(self, name: str, tp: int) -> tuple[int, int]:
        """(rows, columns) = (outputs, inputs) of an FFN matrix on one of tp devices."""
        hidden, ffn = self.problem.model.hidden, self.problem.model.ffn // tp
        return (hidden, ffn) if name == "down" else (ffn, hidden)

    def _projector_values(self, tp: int) -> int:
        """Values of one layer's projectors on one of tp devices: r (2h + f) for a Llama."""
        return sum(self.options.rank * self._matrix(name, tp)[1] for name in self._low_rank_matrices())

    def _product_s(self, group: int, tokens: float, inputs: float, outputs: float) -> float:
        """Seconds of a matrix product on a device of `group`."""
        device = self.problem.cluster.groups[group].device
        architecture = self.calibration.architecture(device)
        return compute.gemm_s(
            float(tokens),
            float(inputs),
            float(outputs),
            device.peak(self.problem.precision),
            architecture.gemm_efficiency,
            self.calibration.gemm_half_size,
            self.calibration.gemm_half_tokens,
            architecture.unaligned_share if self.value_bytes == 2 else 1.0,
            device.memory_bandwidth_bytes_per_s * architecture.memory_bandwidth_share,
            self.value_bytes,
        )


def replica_of(key: StageKey, replica: int) -> ReplicaKey:
    """The replica group, as placed, of one replica of a stage."""
    for group in key.replicas:
        if replica < group.dp:
            return group
        replica -= group.dp
    raise IndexError(f"the stage has no replica {replica}")


def _run_key(key: StageKey, where: ReplicaKey, task: Task, dp: int = 1) -> RunKey:
    """`dp` matters to memory only."""
    return RunKey(
        key.first, key.last, key.num_layers, key.recompute, key.num_recomputed, where.group, where.tp, where.tp_nodes,
        dp, task.samples, key.zero_stage, key.sequence_parallel, task.backward,
    )  # fmt: skip


def _pipeline_key(keys: Sequence[StageKey], alive: Sequence[int], j: int, layers: int) -> StageKey:
    """The j-th stage of a pipeline of cells of the stages `alive`, with so many layers."""
    key = keys[alive[j]]
    recomputed = 0 if key.recompute == "none" else min(layers, key.num_recomputed)
    if key.num_recomputed == key.num_layers:
        recomputed = 0 if key.recompute == "none" else layers
    mode = key.recompute if recomputed else "none"
    return key._replace(
        first=j == 0, last=j == len(alive) - 1, num_layers=layers, recompute=mode, num_recomputed=recomputed
    )


def live_key(key: StageKey, alive: Sequence[bool]) -> StageKey:
    """The stage with its live replicas only: those that exchange gradients, and divide the optimiser state."""
    replicas, first = [], 0
    for replica in key.replicas:
        dp = sum(alive[first : first + replica.dp])
        first += replica.dp
        if dp:
            devices = replica.tp * dp
            replicas.append(replica._replace(dp=dp, num_nodes=min(replica.num_nodes, devices)))
    return key._replace(replicas=tuple(replicas))
