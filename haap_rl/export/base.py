"""What every export gives back: files, and each thing of the plan that they cannot say with what that costs.

The estimator prices the plan *as written*. A trainer that cannot say a plan is given the nearest one it can say: of the
candidates that its module names, the first in the estimator's order. One that does not fit is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple, NoReturn

from haap_rl.cost.estimate import Estimate
from haap_rl.cost.estimator import Estimator
from haap_rl.problem.cluster import GIB
from haap_rl.problem.errors import InputError, PlanError
from haap_rl.problem.plan import Plan, Problem, Recompute, ReplicaGroup, Stage

Files = Mapping[str, str]  # name -> text


class Loss(NamedTuple):
    """A field of the plan that the target cannot say, what stands there instead, and the price of the whole.

    iteration_s, fits: of the plan as written, all losses together.
    """

    field: str
    plan_value: str
    written_value: str
    iteration_s: float
    fits: bool


@dataclass(frozen=True, slots=True)
class Export:
    """Files for one target.

    written       the plan that the files say
    plan_s        seconds of an iteration of the plan that was to be exported
    iteration_s   of the one that is written
    fits          whether that one fits in memory; false only where the export is exact and the plan did not either
    """

    target: str
    files: Files
    written: Plan
    losses: tuple[Loss, ...]
    plan_s: float
    iteration_s: float
    fits: bool

    @property
    def exact(self) -> bool:
        return not self.losses


class Target(NamedTuple):
    """A stock trainer.

    serves    (problem) -> nothing; InputError if the trainer cannot train this problem whatever the plan
    nearest   (problem, plan, estimator) -> the plan that is written; InputError with field and rule if there is none
    files     (problem, plan) -> the files of a plan that the trainer can say
    read      (problem, files) -> the plan in them; InputError, with field and rule, for what the trainer would not take
    """

    serves: Callable[[Problem], None]
    nearest: Callable[[Problem, Plan, Estimator], Plan]
    files: Callable[[Problem, Plan], dict[str, str]]
    read: Callable[[Problem, Files], Plan]


def export(problem: Problem, plan: Plan, name: str, target: Target, estimator: Estimator) -> Export:
    """Files of `plan` for `target`. Raises InputError, with field and rule, where no plan near it fits the target.

    The files are read back before they are handed out, so that they say the plan that was priced.
    """
    asked = estimator(plan)
    written = target.nearest(problem, plan, estimator)
    estimate = estimator(written)
    lost = losses(plan, written, estimate)
    if lost and not estimate.fits:
        fields = ", ".join(loss.field for loss in lost)
        neither = "" if asked.fits else f" (and {asked.bytes_missing / GIB:.2f} GiB as it is)"
        raise InputError(
            f"{name}: without what it cannot say ({fields}) the plan misses {estimate.bytes_missing / GIB:.2f} GiB"
            f"{neither}; search for a plan with memory to spare, or export to another target"
        )
    files = target.files(problem, written)
    if target.read(problem, files) != written:
        raise AssertionError(f"{name}: the files say another plan than was written")
    return Export(name, files, written, lost, asked.iteration_s, estimate.iteration_s, estimate.fits)


def losses(plan: Plan, written: Plan, estimate: Estimate) -> tuple[Loss, ...]:
    """Every field in which the two differ. estimate: of the plan as written."""
    found: list[tuple[str, str, str]] = []
    for field in ("num_microbatches", "zero_stage", "sequence_parallel", "virtual_stages"):
        mine, theirs = getattr(plan, field), getattr(written, field)
        if mine != theirs:
            found.append((field, str(mine).lower(), str(theirs).lower()))
    for i, (mine, theirs) in enumerate(zip_longest(plan.stages, written.stages)):
        for field, say in (("units", _units), ("replicas", _replicas), ("recompute", _recompute)):
            if say(mine) != say(theirs):
                found.append((f"stage {i} {field}", say(mine), say(theirs)))
    return tuple(Loss(*difference, estimate.iteration_s, estimate.fits) for difference in found)


def _units(stage: Stage | None) -> str:
    return "none" if stage is None else str(stage.num_units)


def _replicas(stage: Stage | None) -> str:
    if stage is None:
        return "none"
    return " + ".join(f"{r.dp} of {r.tp} {r.group} x {r.microbatch_size} samples" for r in stage.replicas)


def _recompute(stage: Stage | None) -> str:
    if stage is None or stage.recompute.mode == "none":
        return "none"
    return f"{stage.recompute.mode} in {stage.recompute.num_layers} layers"


# --------------------------------------------------------------------------------- plans near a plan
def best(estimator: Estimator, candidates: Iterable[Plan]) -> Plan | None:
    """The first of the legal candidates in the estimator's order (`Estimate.rank`); None where none is legal."""
    ranked: list[tuple[tuple[bool, int, float], Plan]] = []
    for candidate in dict.fromkeys(candidates):
        try:
            ranked.append((estimator(candidate).rank, candidate))
        except PlanError:
            continue
    return min(ranked, key=lambda item: item[0])[1] if ranked else None


def layers_of(plan: Plan) -> list[int]:
    """Transformer layers of each stage."""
    last = len(plan.stages) - 1
    return [stage.num_units - (i == 0) - (i == last) for i, stage in enumerate(plan.stages)]


def recomputed(stage: Stage, mode: str, num_layers: int) -> Stage:
    """The stage with another recomputation; none where it has no layer to recompute."""
    again = Recompute(mode, num_layers) if num_layers else Recompute()  # type: ignore[arg-type]
    return Stage(stage.num_units, stage.replicas, again)


def on(stage: Stage, replicas: tuple[ReplicaGroup, ...]) -> Stage:
    """The stage on other devices."""
    return Stage(stage.num_units, replicas, stage.recompute)


def checked(problem: Problem, plan: Plan, where: str) -> Plan:
    """The plan, read from the file `where`. Raises InputError, naming it, if the plan is not legal."""
    try:
        problem.validate(plan)
    except PlanError as error:
        raise InputError(f"{where}: {error}") from None
    return plan


def printable(name: str) -> str:
    """A name for a comment of a file."""
    return re.sub(r"[^\w.+-]", "_", name)


def any_problem(_: Problem) -> None:
    """Nothing: the trainer has all that a problem of ours may ask for."""


def refused(target: str, field: str, value: object, rule: str) -> NoReturn:
    """Raise the one line of what a target cannot take."""
    raise InputError(f"{target}: {field}={value} cannot be written: {rule}")
