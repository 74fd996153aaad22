"""The trainers there are, by name."""

from __future__ import annotations

from collections.abc import Mapping

from haap_rl.cost.estimator import Estimator
from haap_rl.export import flagscale, megatron, torchtitan
from haap_rl.export.base import Export, Target, export
from haap_rl.problem.errors import InputError, shown
from haap_rl.problem.plan import Plan, Problem

TARGETS: Mapping[str, Target] = {
    megatron.NAME: megatron.TARGET,
    torchtitan.NAME: torchtitan.TARGET,
    flagscale.NAME: flagscale.TARGET,
}


def target_named(name: object) -> Target:
    """The target called `name`. Raises InputError listing those there are."""
    if not isinstance(name, str) or name not in TARGETS:
        raise InputError(f"export: to={shown(name)} is not one of {', '.join(TARGETS)}")
    return TARGETS[name]


def export_plan(problem: Problem, plan: Plan, to: str, estimator: Estimator) -> Export:
    """Files of `plan` for the trainer called `to`. Raises InputError where it cannot be said, with field and rule."""
    return export(problem, plan, to, target_named(to), estimator)
