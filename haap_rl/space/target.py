"""The part of a declared space that a trainer can be told without loss (`space.target`).

Most trainers have one tp, dp and recomputation for all stages. That joins the choices of all stages, so it is
no property of an option: such a space is the union of parts, one for each (tp, dp, recomputation), in which stages
still choose their device group and layers. A part is an ordinary declared space, so draws, moves, tables, bounds,
counts, environments and proofs hold in it as they are; `run_search` goes through the parts (`search/base.py`), and
bound and counts are those of the union. FlagScale recomputes whole layers in any stages, or the attention core in all:
two parts. Its other limits are about where stages sit on hosts: plans of a part are asked about one by one before one
is kept (`sayable`), and bound and counts are those of the parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from haap_rl.cost.estimator import Estimator
from haap_rl.export.targets import target_named
from haap_rl.problem.errors import InputError
from haap_rl.problem.plan import Plan, Problem
from haap_rl.space.options import SpaceSpec, stage_options

# recomputation of whole spaces' stages that a trainer with one for all of them can be told
UNIFORM = {"megatron": ("none", "selective", "full"), "torchtitan": ("none", "full")}
TOGETHER = (("none", "full"), ("selective",))  # recomputation that stages of one FlagScale plan can have


def parts(problem: Problem, spec: SpaceSpec) -> tuple[SpaceSpec, ...]:
    """The declared spaces whose union is `spec`, itself if it has no target. Raises InputError if there is none."""
    if spec.target is None or spec.fixed_tp is not None:
        return (spec,)
    target_named(spec.target).serves(problem)
    if spec.mixed_stages:
        raise InputError(
            f"space: target={spec.target} with mixed_stages=true; stages on two device groups are not searched for a "
            "trainer; set mixed_stages=false"
        )
    if spec.target not in UNIFORM:
        modes = (tuple(mode for mode in spec.recompute if mode in some) for some in TOGETHER)
        return tuple(replace(spec, recompute=some) for some in modes if some)
    if spec.target == "torchtitan" and spec.zero_stage != 0:
        raise InputError(
            f"space: target=torchtitan with zero_stage={spec.zero_stage}, which it has in pipelines only; set "
            "zero_stage=0"
        )
    shapes = dict.fromkeys(
        (option.tp, option.dp, option.recompute)
        for option in stage_options(problem, spec)
        if option.recompute in UNIFORM[spec.target]
    )
    found = []
    for tp, dp, mode in shapes:
        part = replace(spec, max_tp=tp, fixed_tp=tp, group_sizes=(tp * dp,), recompute=(mode,))
        if spec.target == "megatron":
            found.append(part)
            continue
        for m in spec.num_microbatches:  # torchtitan's pipelines have no more stages than micro-batches
            if problem.global_batch_size % m == 0:
                found.append(replace(part, num_microbatches=(m,), max_stages=min(spec.max_stages, m)))
    if not found:
        raise InputError(f"space: no plan of it can be written for target={spec.target}; allow other recompute modes")
    return tuple(found)


def home(problem: Problem, spec: SpaceSpec, plan: Plan) -> SpaceSpec:
    """The part of `spec` that a plan lies in; the first one for a plan that lies in none."""
    every = parts(problem, spec)
    for part in every:
        alike = all(
            part.fixed_tp in (None, replica.tp)
            and replica.tp * replica.dp in part.group_sizes
            and stage.recompute.mode in part.recompute
            for stage in plan.stages
            for replica in stage.replicas
        )
        if alike and plan.num_microbatches in part.num_microbatches:
            return part
    return every[0]


def sayable(problem: Problem, spec: SpaceSpec, estimator: Estimator) -> Callable[[Plan], bool] | None:
    """Whether the target can be told a plan without loss; None where there is no target."""
    if spec.target is None:
        return None
    nearest = target_named(spec.target).nearest

    def says(plan: Plan) -> bool:
        try:
            return nearest(problem, plan, estimator) == plan
        except InputError:
            return False

    return says
