"""What training does when cells are down: eight policies, one class each.

`policy.apply(estimator, plan, down)` says who does what (`cost.Degraded`), how pipelines are made anew
(`cost.Pipeline`s), or that training stops until something is repaired (`Stopped`). `policy.transitions` are the seconds
in which nothing is trained. Constants come with their source; what no source gives is ours and an option.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

from haap_rl.cost.estimator import ReplicaKey, StageKey
from haap_rl.cost.schedule import in_flight
from haap_rl.faults.cost import (
    Cell,
    Degraded,
    FaultEstimator,
    Pipeline,
    Task,
    Work,
    healthy_work,
    replica_group,
    replica_samples,
)
from haap_rl.faults.response import Transitions
from haap_rl.mecefo.options import MecefoOptions
from haap_rl.problem.cluster import GIB
from haap_rl.problem.errors import InputError, check_keys, shown, yes_or_no
from haap_rl.problem.plan import Plan


class Down(NamedTuple):
    """What is down: cells of the plan; `idle`: live devices of each device group that the plan does not use."""

    cells: frozenset[Cell]
    idle: tuple[int, ...] = ()


class Stopped(NamedTuple):
    """Training waits for a repair."""

    reason: str
    out_of_memory: bool = False


Action = Degraded | tuple[Pipeline, ...] | Stopped


@dataclass(frozen=True, slots=True)
class Constants:
    """Seconds that recovering takes, whatever the plan.

    detect_s               until a dead rank is noticed: ours; collective time-outs are longer, heartbeats shorter
    regroup_s              new process groups around a dead rank: Bamboo's local rendezvous (uclasystem/bamboo), 20 s
    reconfigure_s          a new set of pipelines: Bamboo's global rendezvous, 30 s
    step_lost              share of an iteration that a failure wastes: Bamboo's simulator takes 1.5 times the step, 0.5
    checkpoint_s           to write a checkpoint, an input; ours
    restart_s              from repair to training: scheduling, start (Bamboo: 45 s), loading; an input, ours
    checkpoint_interval_s  of training; None: Young's (1974) for the rate at which the policy is stopped
    bamboo_forward_share   of the redundant forward passes of healthy Bamboo, what bubbles do not hide: ours
    recycle_fills_bubbles  what ReCycle's peers take on runs in bubbles wherever there are any, as its paper aims at
    """

    detect_s: float = 5.0
    regroup_s: float = 20.0
    reconfigure_s: float = 30.0
    step_lost: float = 0.5
    checkpoint_s: float = 30.0
    restart_s: float = 300.0
    checkpoint_interval_s: float | None = None
    bamboo_forward_share: float = 0.0
    recycle_fills_bubbles: bool = False

    def __post_init__(self) -> None:
        yes_or_no("faults", "constants.recycle_fills_bubbles", self.recycle_fills_bubbles)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "recycle_fills_bubbles":
                continue
            if value is None and field.name == "checkpoint_interval_s":
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value <= 1e9:
                raise InputError(
                    f"faults: constants.{field.name}={shown(value)} must be between 0 and 10^9; give for example "
                    f"faults.constants.{field.name}={field.default}"
                )
            if field.name in ("step_lost", "bamboo_forward_share") and value > 1:
                raise InputError(f"faults: constants.{field.name}={shown(value)} must be between 0 and 1")


DEFAULT_CONSTANTS, DEFAULT_OPTIONS = Constants(), MecefoOptions()


@dataclass(frozen=True, slots=True)
class Policy(abc.ABC):
    """How training survives.

    exact       gradients are those of the healthy run (of the samples that are left)
    uses_idle   devices that the plan leaves idle make a difference
    """

    name: ClassVar[str]
    exact: ClassVar[bool] = True
    uses_idle: ClassVar[bool] = False
    constants: Constants = DEFAULT_CONSTANTS
    options: MecefoOptions = DEFAULT_OPTIONS

    @abc.abstractmethod
    def apply(self, estimator: FaultEstimator, plan: Plan, down: Down) -> Action:
        """What happens while `down` is down. The plan must pass `check`."""

    def check(self, plan: Plan) -> None:
        """Raise InputError if the plan cannot make any use of the policy."""
        if len(stages_without_peer(plan)) == len(plan.stages):
            raise InputError(
                f"policy {self.name}: every stage of the plan has one replica (dp = 1), so no neighbour can take over; "
                "use a plan with dp of at least 2, or policy=restart"
            )

    def separable(self, plan: Plan) -> bool:
        """Whether what a stage does depends on nothing but how many replicas of each of its replica groups are down.

        Counts can be enumerated then instead of sets, stage by stage.
        """
        return False

    @property
    def fills_bubbles(self) -> bool:
        """Whether what live cells take on runs in bubbles (`cost.Degraded`)."""
        return False

    def transitions(self, estimator: FaultEstimator, plan: Plan) -> Transitions:
        """Seconds in which nothing is trained; those of a policy that goes on with whoever lives.

        checkpoint_interval_s is that of the constants, or 0 where it is to be found.
        """
        constants = self.constants
        lost_s = constants.step_lost * estimator.healthy(plan).iteration_s
        return Transitions(
            failure_s=constants.detect_s + constants.regroup_s + shard_s(estimator, plan) + lost_s,
            return_s=constants.regroup_s + copy_s(estimator, plan),
            restart_s=constants.restart_s,
            checkpoint_s=constants.checkpoint_s,
            checkpoint_interval_s=constants.checkpoint_interval_s or 0.0,
        )


# ------------------------------------------------------------------------------------------- what several share
def lost_stage(plan: Plan, down: Down) -> Stopped | None:
    """Why training stops if a stage has no live replica: nobody holds its weights."""
    for i, stage in enumerate(plan.stages):
        if all(Cell(i, r) in down.cells for r in range(len(replica_samples(stage)))):
            return Stopped(f"stage {i} has no live replica")
    return None


def stages_without_peer(plan: Plan) -> list[int]:
    """Stages with one replica, which no peer can take over."""
    return [i for i, stage in enumerate(plan.stages) if len(replica_samples(stage)) == 1]


def _check_pipelines(name: str, plan: Plan) -> None:
    shapes = {tuple((group.dp, group.microbatch_size) for group in stage.replicas) for stage in plan.stages}
    if len(shapes) > 1 or len(next(iter(shapes))) > 1:
        raise InputError(
            f"policy {name}: it needs whole pipelines, every stage with the same dp and micro-batch size and on one "
            "device group; use policy=mecefo, recycle or restart for this plan"
        )


def copy_s(estimator: FaultEstimator, plan: Plan) -> float:
    """Seconds to hand a returning cell its weights and optimiser state from a peer, the slowest cell of the plan."""
    pairs = [(key, replica) for key in estimator.keys(plan) for replica in key.replicas]
    return max(_moved_s(estimator, replica, estimator.state_bytes(key, replica)) for key, replica in pairs)


def shard_s(estimator: FaultEstimator, plan: Plan) -> float:
    """Seconds to fetch a dead replica's share of the optimiser state from its copy in a peer's memory (ZeRO-1).

    Without ZeRO every peer holds the whole state, and a take-over moves nothing.
    """
    if plan.zero_stage == 0:
        return 0.0
    pairs = [(key, replica) for key in estimator.keys(plan) for replica in key.replicas]
    return max(_moved_s(estimator, replica, estimator.shard_bytes(key, replica)) for key, replica in pairs)


def _moved_s(estimator: FaultEstimator, replica: ReplicaKey, num_bytes: int) -> float:
    """Seconds to send so many bytes to each device of one replica, all at once through their node's adapters."""
    group = estimator.problem.cluster.groups[replica.group]
    sharing = max(group.nics_per_node, min(replica.tp, group.devices_per_node))
    return num_bytes * sharing / group.inter_node.bandwidth_bytes_per_s


class PartOfPlan(NamedTuple):
    """One stage of a plan, as a policy that looks at stages one by one sees it.

    stage     its index in the plan, and in `keys`
    samples   of each micro-batch, of each of its replicas
    held      micro-batches in flight
    """

    keys: tuple[StageKey, ...]
    stage: int
    samples: tuple[int, ...]
    held: int


def part_of(estimator: FaultEstimator, plan: Plan, index: int) -> PartOfPlan:
    """A stage of a plan, as `StagePolicy` takes it."""
    held = in_flight(len(plan.stages), index, plan.num_microbatches)
    return PartOfPlan(estimator.keys(plan), index, tuple(replica_samples(plan.stages[index])), held)


@dataclass(frozen=True, slots=True)
class StagePolicy(Policy):
    """A policy by which every stage helps itself: its live replicas do what its dead ones did."""

    @abc.abstractmethod
    def stage_work(
        self, estimator: FaultEstimator, part: PartOfPlan, dead: Sequence[int]
    ) -> tuple[Work, ...] | Stopped:
        """Work of the replicas of a stage of which `dead`, some but not all, are down."""

    def separable(self, plan: Plan) -> bool:
        return True

    def apply(self, estimator: FaultEstimator, plan: Plan, down: Down) -> Action:
        stopped = lost_stage(plan, down)
        if stopped is not None:
            return stopped
        work = list(healthy_work(plan))
        for i, own in enumerate(work):
            dead = [r for r in range(len(own)) if Cell(i, r) in down.cells]
            if dead:
                taken = self.stage_work(estimator, part_of(estimator, plan, i), dead)
                if isinstance(taken, Stopped):
                    return taken
                work[i] = taken
        return Degraded(plan, tuple(work))


def take_over(
    estimator: FaultEstimator, part: PartOfPlan, dead: Sequence[int], options: MecefoOptions, degraded: bool
) -> tuple[Work, ...] | Stopped:
    """Work of the replicas of one stage when live peers do the dead ones' tasks whole.

    ring: the next replica; if that is down or has taken one already, the least loaded live peer, the nearest of those
    (`on_overload=chain`), or a restart. most_slack: the dead one with most samples first, to the peer that fits and
    then takes least time. spread: every live peer in turn, so that all of them do 1 / live of it.
    """
    index, samples = part.stage, part.samples
    live = [r for r in range(len(samples)) if r not in dead]
    taken: dict[int, list[Task]] = {r: [] for r in live}
    if options.takeover == "spread":
        for r in dead:
            for peer in live:
                taken[peer].append(Task(index, samples[r], 1.0 / len(live)))
    elif options.takeover == "ring":
        for r in dead:
            peer = (r + 1) % len(samples)
            if peer not in taken or taken[peer]:
                if options.on_overload == "restart":
                    return Stopped(f"stage {index}: the neighbour of replica {r} is down or busy")
                peer = min(live, key=lambda other: (len(taken[other]), (other - r) % len(samples)))
            taken[peer].append(Task(index, samples[r]))
    else:
        for r in sorted(dead, key=lambda r: (-samples[r], r)):
            task = Task(index, samples[r])
            strain = {peer: _strain(estimator, part, peer, [*taken[peer], task], degraded, len(live)) for peer in live}
            taken[min(live, key=lambda peer: (*strain[peer], peer))].append(task)
    work = tuple((Task(index, samples[r]), *_merged(taken[r])) if r in taken else () for r in range(len(samples)))
    if not degraded or (options.empty_set == "use_degraded" and all(taken[r] for r in live)):
        return work  # no attention is skipped then: priced as exact, above what a recomputed FFN of low rank leaves
    return tuple(
        tuple(task._replace(backward="mecefo") for task in tasks) if taken.get(r) else tasks
        for r, tasks in enumerate(work)
    )


def _merged(tasks: Sequence[Task]) -> Work:
    """Equal tasks as one with the sum of their shares where they are parts: one pass of many turns."""
    whole = [task for task in tasks if task.share == 1.0]
    parts: dict[int, float] = {}
    for task in tasks:
        if task.share != 1.0:
            parts[task.samples] = parts.get(task.samples, 0.0) + task.share
    return (*whole, *(Task(tasks[0].stage, samples, share) for samples, share in parts.items()))


def _strain(
    estimator: FaultEstimator, part: PartOfPlan, replica: int, tasks: Sequence[Task], degraded: bool, num_live: int
) -> tuple[int, float]:
    """(bytes missing, busy seconds) of one of `num_live` live replicas that does `tasks` besides its own work."""
    own = Task(part.stage, part.samples[replica])
    work = tuple(task._replace(backward="mecefo" if degraded else "exact") for task in (own, *tasks))
    cell = estimator.cell_memory(part.stage, replica, work, part.keys, num_live, part.held)
    return cell.missing_bytes, sum(estimator.cell_s(part.stage, replica, work, part.keys))


def _ring_is_separable(plan: Plan, options: MecefoOptions) -> bool:
    """Whether who is next in the ring makes no difference: equal replicas, and somebody takes every dead one."""
    equal = all(len(stage.replicas) == 1 for stage in plan.stages)
    return options.takeover != "ring" or (equal and options.on_overload == "chain")


# ---------------------------------------------------------------------------------------------- the eight policies
@dataclass(frozen=True, slots=True)
class Restart(StagePolicy):
    """All stop and wait for the repair, then load the checkpoint (torchrun with a fixed number of nodes).

    Checkpoints by Young (1974) and Daly (2006); nothing is reserved.
    """

    name: ClassVar[str] = "restart"

    def check(self, plan: Plan) -> None:
        """Every plan can be restarted."""

    def stage_work(
        self, estimator: FaultEstimator, part: PartOfPlan, dead: Sequence[int]
    ) -> tuple[Work, ...] | Stopped:
        return Stopped(f"stage {part.stage} has lost replica {dead[0]}, and all wait for it")


@dataclass(frozen=True, slots=True)
class DropReplica(Policy):
    """Samples that would pass through a dead cell are dropped; gradients are averaged over the others (torchft).

    Gradients are exact for the samples that are left. What replicas exchange and return is as for a take-over.
    """

    name: ClassVar[str] = "drop_replica"

    def apply(self, estimator: FaultEstimator, plan: Plan, down: Down) -> Action:
        stopped = lost_stage(plan, down)
        if stopped is not None:
            return stopped
        samples = estimator.problem.global_batch_size // plan.num_microbatches
        kept = [True] * samples
        slices: list[list[tuple[int, int]]] = []
        for i, stage in enumerate(plan.stages):
            slices.append([])
            first = 0
            for r, size in enumerate(replica_samples(stage)):
                slices[i].append((first, first + size))
                if Cell(i, r) in down.cells:
                    kept[first : first + size] = [False] * size
                first += size
        if not any(kept):
            return Stopped("every sample would pass through a dead cell")
        work = []
        for i, here in enumerate(slices):
            left = [sum(kept[first:end]) for first, end in here]
            work.append(
                tuple(
                    () if Cell(i, r) in down.cells else (Task(i, n),) if n else (Task(i, end - first, 0.0),)
                    for r, (n, (first, end)) in enumerate(zip(left, here, strict=True))
                )
            )
        return Degraded(plan, tuple(work), samples - sum(kept))


@dataclass(frozen=True, slots=True)
class Bamboo(Policy):
    """The cell before in the same pipeline holds the dead one's layers too, and does both (Bamboo, NSDI 2023).

    Every cell has room for the weights, gradients and optimiser state of the next stage, the last one for the first
    stage's. A pipeline that loses two stages of which one held the other's layers, or in which a cell has no memory
    for the activations of two, is out until they are back, and the others share its micro-batches (reconfigured, as
    Bamboo does after such a fatal failure); when all are out, training stops. Healthy, redundant forward passes fill
    bubbles (`constants.bamboo_forward_share` of them do not).
    """

    name: ClassVar[str] = "bamboo"

    def check(self, plan: Plan) -> None:
        _check_pipelines(self.name, plan)
        if len(plan.stages) == 1:
            raise InputError("policy bamboo: a plan of one stage has no stage before; use policy=recycle or restart")

    def apply(self, estimator: FaultEstimator, plan: Plan, down: Down) -> Action:
        p, samples = len(plan.stages), [replica_samples(stage)[0] for stage in plan.stages]
        replicas = range(len(replica_samples(plan.stages[0])))
        dead = {r: [i for i in range(p) if Cell(i, r) in down.cells] for r in replicas}
        keys = estimator.keys(plan)

        def holds(r: int, i: int) -> bool:
            """Whether the cell before stage i of pipeline r lives and has the memory to do that stage too."""
            before = (i - 1) % p
            if before in dead[r]:
                return False
            both = (Task(before, samples[before]), Task(i, samples[i]))
            held = in_flight(p, before, plan.num_microbatches)
            return not estimator.cell_memory(before, r, both, keys, len(replicas), held).missing_bytes

        whole = [r for r in replicas if all(holds(r, i) for i in dead[r])]
        if not whole:
            memory = any(all((i - 1) % p not in dead[r] for i in dead[r]) for r in replicas)  # is all that is lacking
            return Stopped("no pipeline is left in which the cell before each dead one can do both stages", memory)
        turns = len(replicas) / len(whole)  # of each pipeline that is left, per micro-batch
        redundant = self.constants.bamboo_forward_share
        work: list[list[Work]] = [[()] * len(replicas) for _ in range(p)]
        for r in replicas:
            for i in range(p):
                if i in dead[r]:
                    continue
                after = (i + 1) % p
                if r not in whole:
                    work[i][r] = (Task(i, samples[i], 0.0),)
                elif after in dead[r]:
                    work[i][r] = (Task(i, samples[i], turns), Task(after, samples[after], turns))
                elif redundant:
                    work[i][r] = (Task(i, samples[i], turns), Task(after, samples[after], turns * redundant, "none"))
                else:
                    work[i][r] = (Task(i, samples[i], turns),)
        state = Degraded(plan, tuple(tuple(cells) for cells in work))
        missing = estimator.redundant_bytes_missing(state)
        if missing:
            return Stopped(f"the redundant layers do not fit, {missing / GIB:.2f} GiB are missing", True)
        return state


@dataclass(frozen=True, slots=True)
class Oobleck(Policy):
    """A pipeline that loses cells is made anew from the rest; micro-batches are dealt again (Oobleck, SOSP 2023).

    Layers go to the live cells of each pipeline so that the slowest takes least, within memory; micro-batches B_i to
    the pipelines by least spread of B_i T_i with sum B_i = B. A pipeline that cannot hold the layers is left out.
    """

    name: ClassVar[str] = "oobleck"

    def check(self, plan: Plan) -> None:
        Policy.check(self, plan)
        _check_pipelines(self.name, plan)

    def apply(self, estimator: FaultEstimator, plan: Plan, down: Down) -> Action:
        if not down.cells:
            return Degraded(plan, healthy_work(plan))
        stopped = lost_stage(plan, down)
        if stopped is not None:
            return stopped
        pipelines = []
        dp = len(replica_samples(plan.stages[0]))
        for r in range(dp):
            alive = tuple(i for i in range(len(plan.stages)) if Cell(i, r) not in down.cells)
            layers = estimator.deal_layers(plan, alive) if alive else None
            if layers is not None:
                pipelines.append((alive, layers))
        if not pipelines:
            return Stopped("no pipeline that is left holds all layers", True)
        periods = [estimator.pipeline_period_s(plan, *pipeline) for pipeline in pipelines]
        total = dp * plan.num_microbatches
        counts = [0] * len(pipelines)
        for _ in range(total):
            k = min(range(len(counts)), key=lambda k: ((counts[k] + 1) * periods[k], k))
            counts[k] += 1
        return tuple(Pipeline(alive, layers, n) for (alive, layers), n in zip(pipelines, counts, strict=True) if n)

    def transitions(self, estimator: FaultEstimator, plan: Plan) -> Transitions:
        moved_s = copy_s(estimator, plan)  # layers that a cell did not hold come from another pipeline
        usual = Policy.transitions(self, estimator, plan)
        more_s = self.constants.reconfigure_s - self.constants.regroup_s
        return usual._replace(failure_s=usual.failure_s + more_s + moved_s, return_s=usual.return_s + more_s)


@dataclass(frozen=True, slots=True)
class ReCycle(StagePolicy):
    """The dead cell's micro-batches go to all live peers of its stage in turn (ReCycle, SOSP 2024, arXiv 2405.14009).

    Without `constants.recycle_fills_bubbles` our figure is pessimistic, with it optimistic.
    """

    name: ClassVar[str] = "recycle"

    @property
    def fills_bubbles(self) -> bool:
        return self.constants.recycle_fills_bubbles

    def stage_work(
        self, estimator: FaultEstimator, part: PartOfPlan, dead: Sequence[int]
    ) -> tuple[Work, ...] | Stopped:
        return take_over(estimator, part, dead, replace(self.options, takeover="spread"), degraded=False)

    def apply(self, estimator: FaultEstimator, plan: Plan, down: Down) -> Action:
        action = StagePolicy.apply(self, estimator, plan, down)
        return replace(action, fills_bubbles=self.fills_bubbles) if isinstance(action, Degraded) else action


@dataclass(frozen=True, slots=True)
class NaiveNeighbour(StagePolicy):
    """One peer does both tasks, exactly, if it has the memory; else training stops."""

    name: ClassVar[str] = "naive_neighbour"

    def separable(self, plan: Plan) -> bool:
        return _ring_is_separable(plan, self.options)

    def stage_work(
        self, estimator: FaultEstimator, part: PartOfPlan, dead: Sequence[int]
    ) -> tuple[Work, ...] | Stopped:
        return take_over(estimator, part, dead, self.options, degraded=False)


@dataclass(frozen=True, slots=True)
class Mecefo(StagePolicy):
    """One peer does both tasks with MeCeFO's cheap backward pass (arXiv 2510.16415, NeurIPS 2025).

    Attention gradients of takers are not computed; options say who takes over, and what the paper leaves open.
    """

    name: ClassVar[str] = "mecefo"
    exact: ClassVar[bool] = False

    def separable(self, plan: Plan) -> bool:
        return _ring_is_separable(plan, self.options)

    def stage_work(
        self, estimator: FaultEstimator, part: PartOfPlan, dead: Sequence[int]
    ) -> tuple[Work, ...] | Stopped:
        return take_over(estimator, part, dead, self.options, degraded=True)


@dataclass(frozen=True, slots=True)
class Spare(Policy):
    """An idle device of the same device group takes the dead cell's place; when none is left, training stops.

    What is given up is the throughput of idle devices while all is well. Weights and optimiser state are loaded from a
    peer first; where a stage has none, training stops.
    """

    name: ClassVar[str] = "spare"
    uses_idle: ClassVar[bool] = True

    def check(self, plan: Plan) -> None:
        """A plan that uses every device has no spares, and restarts."""

    def apply(self, estimator: FaultEstimator, plan: Plan, down: Down) -> Action:
        stopped = lost_stage(plan, down)
        if stopped is not None:
            return stopped
        idle = list(down.idle)
        for i, r in sorted(down.cells):
            group = plan.stages[i].replicas[replica_group(plan.stages[i], r)]
            index = estimator.problem.cluster.index(group.group)
            idle[index] -= group.tp
            if idle[index] < 0:
                return Stopped(f"no spare {group.group} is left for stage {i}")
        return Degraded(plan, healthy_work(plan))

    def transitions(self, estimator: FaultEstimator, plan: Plan) -> Transitions:
        usual = Policy.transitions(self, estimator, plan)
        # the plan goes back to the repaired device at leisure: a spare is as good
        return usual._replace(failure_s=usual.failure_s + copy_s(estimator, plan), return_s=0.0)


POLICIES: Mapping[str, type[Policy]] = {
    kind.name: kind for kind in (Restart, DropReplica, Bamboo, Oobleck, ReCycle, NaiveNeighbour, Mecefo, Spare)
}


def policy_named(name: object, options: MecefoOptions | None = None, constants: Constants | None = None) -> Policy:
    """The policy called `name`. Raises InputError listing the names."""
    if not isinstance(name, str) or name not in POLICIES:
        raise InputError(f"faults: policy={shown(name)} is not known; choose one of {', '.join(POLICIES)}")
    return POLICIES[name](constants or DEFAULT_CONSTANTS, options or DEFAULT_OPTIONS)


def mecefo_options(config: Mapping[str, Any]) -> MecefoOptions:
    """MecefoOptions from the mapping `faults.mecefo`. Raises InputError for what is unknown or impossible."""
    check_keys("faults.mecefo", config, (), [field.name for field in fields(MecefoOptions)])
    try:
        return MecefoOptions(**config)
    except ValueError as error:
        raise InputError(f"faults: {error}") from None


def constants_from_config(config: Mapping[str, Any]) -> Constants:
    """Constants from the mapping `faults.constants`."""
    check_keys("faults.constants", config, (), [field.name for field in fields(Constants)])
    return Constants(**config)
