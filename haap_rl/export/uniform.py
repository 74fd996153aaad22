"""Plans with one tensor and one data parallelism in all stages, which is all that most trainers can say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from haap_rl.cost.estimator import Estimator
from haap_rl.export.base import best, on, refused
from haap_rl.problem.errors import InputError
from haap_rl.problem.plan import Plan, Problem, ReplicaGroup, Stage


class Degrees(NamedTuple):
    """dp replicas of tp devices each in every stage, each taking microbatch_size samples of a micro-batch."""

    tp: int
    dp: int
    microbatch_size: int


def degrees(plan: Plan) -> Degrees | None:
    """The degrees that all stages have; None where two stages differ, or two replicas of one."""
    found = {
        Degrees(replica.tp, sum(other.dp for other in stage.replicas), replica.microbatch_size)
        for stage in plan.stages
        for replica in stage.replicas
    }
    return found.pop() if len(found) == 1 else None


def with_degrees(problem: Problem, plan: Plan, wanted: Degrees) -> Plan | None:
    """The plan with `wanted` in every stage; None where the cluster has no room.

    A stage stays on the device group where it has most devices, or else goes to the first that has room.
    """
    left = {group.name: group.num_devices for group in problem.cluster.groups}
    devices = wanted.tp * wanted.dp
    stages: list[Stage] = []
    for stage in plan.stages:
        own = sorted(stage.replicas, key=lambda replica: -replica.num_devices)
        homes = dict.fromkeys([*(replica.group for replica in own), *left])
        home = next((name for name in homes if left[name] >= devices), None)
        if home is None:
            return None
        left[home] -= devices
        stages.append(on(stage, (ReplicaGroup(home, *wanted),)))
    return replace(plan, stages=tuple(stages))


def uniform_plans(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """The plan with every tp that one of its stages has, and every dp that divides its micro-batch."""
    samples = problem.global_batch_size // plan.num_microbatches
    most = problem.cluster.num_devices // len(plan.stages)
    for tp in sorted({replica.tp for stage in plan.stages for replica in stage.replicas}):
        for dp in range(1, min(samples, most // tp) + 1):
            if samples % dp == 0:
                candidate = with_degrees(problem, plan, Degrees(tp, dp, samples // dp))
                if candidate is not None:
                    yield candidate


def nearest_uniform(
    target: str, problem: Problem, plan: Plan, estimator: Estimator, settings: Callable[[Plan, bool], Sequence[Plan]]
) -> Plan:
    """The best plan of one tp and dp, and of the `settings` that the target can say of each such plan.

    settings: a plan -> itself if the target can say what is not tp or dp of it, else the plans nearest to it; with True
    all plans that differ from it in recomputation alone, which are tried where nothing nearer fits.
    """
    shapes = [plan] if degrees(plan) is not None else list(uniform_plans(problem, plan))
    found = best(estimator, (written for shape in shapes for written in settings(shape, False)))
    if found is not None and found != plan and not estimator(found).fits:
        found = best(estimator, [found, *(written for shape in shapes for written in settings(shape, True))])
    if found is None:
        kinds = sorted({(r.tp, r.dp, r.microbatch_size) for stage in plan.stages for r in stage.replicas})
        refused(
            target,
            "stages: (tp, dp, microbatch_size)",
            kinds,
            f"one tp and one dp hold for all {len(plan.stages)} stages, and no such plan is legal on cluster "
            f"{problem.cluster.name!r}",
        )
    return found


def merged(stage: Stage) -> Stage:
    """The stage with neighbouring replica groups that are alike as one, as files without replica groups say it."""
    groups: list[ReplicaGroup] = []
    for replica in stage.replicas:
        if groups and (groups[-1].group, groups[-1].tp, groups[-1].microbatch_size) == (
            replica.group,
            replica.tp,
            replica.microbatch_size,
        ):
            groups[-1] = replace(groups[-1], dp=groups[-1].dp + replica.dp)
        else:
            groups.append(replica)
    return on(stage, tuple(groups))


def stages_of(where: str, of_rank: Sequence[str], shape: Degrees, layers: Sequence[int]) -> tuple[Stage, ...]:
    """Stages of so many layers on the device group of every rank. Raises InputError where a replica is on two."""
    stages: list[Stage] = []
    per_stage = shape.tp * shape.dp
    for i, count in enumerate(layers):
        groups = []
        for k in range(i * per_stage, (i + 1) * per_stage, shape.tp):
            names = set(of_rank[k : k + shape.tp])
            if len(names) != 1:
                raise InputError(f"{where}: ranks {k} to {k + shape.tp - 1} are one replica on several device groups")
            groups.append(ReplicaGroup(of_rank[k], shape.tp, 1, shape.microbatch_size))
        stages.append(merged(Stage(count + (i == 0) + (i == len(layers) - 1), tuple(groups))))
    return tuple(stages)
