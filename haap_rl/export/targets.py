"""The trainers there are, by name; and the rank table alone, which says any plan's placement and no trainer's files."""

from __future__ import annotations

from collections.abc import Mapping

from haap_rl.cost.estimator import Estimator
from haap_rl.export import flagscale, megatron, ranks, torchtitan
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
        raise InputError(f"export: to={shown(name)} is not one of {', '.join((*TARGETS, ranks.NAME))}")
    return TARGETS[name]


def export_plan(problem: Problem, plan: Plan, to: str, estimator: Estimator) -> Export:
    """Files of `plan` for the trainer called `to`, or its rank table.

    Raises InputError where it cannot be said, with field and rule.
    """
    if to == ranks.NAME:
        cost = estimator(plan)
        files = ranks.files(problem.cluster, plan)
        return Export(to, files, plan, (), cost.iteration_s, cost.iteration_s, cost.fits)
    return export(problem, plan, to, target_named(to), estimator)
