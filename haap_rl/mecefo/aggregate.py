"""The average gradient of replicas of which some had failures: who counts for which weights.

    Gbar[l,#] = (1/|N[l,#]|) * sum over i in N[l,#] of G[i,l,#]

N: the ranks whose task at the layer's stage is unaffected, for weights of the branch that takers skip; all ranks, dead
ones with what their taker computed for them, for other weights (arXiv 2510.16415; `ffn_average` and `empty_set`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from haap_rl.mecefo.options import EmptySet, MecefoOptions

Gradients = Mapping[str, Tensor | None]


class Part(NamedTuple):
    """A mean gradient over some tasks; `affected`: whether they ran in a taker's mode at the weights' stage."""

    gradient: Tensor | None
    tasks: float
    affected: bool


def counts(part_affected: bool, skipped: bool, any_unaffected: bool, options: MecefoOptions) -> bool:
    """Whether a task's gradient is among those averaged.

    skipped         whether the weights are of the branch that takers skip
    any_unaffected  whether N is not empty
    """
    if not skipped and options.ffn_average == "all_ranks":
        return True
    if not any_unaffected:
        return options.empty_set == "use_degraded"
    return not part_affected


def average(total: Tensor | None, tasks: float, weight: Tensor, empty_set: EmptySet) -> Tensor | None:
    """A sum over `tasks` tasks as their mean; what `empty_set` says where there is none."""
    if tasks:
        return None if total is None else total / tasks
    return torch.zeros_like(weight) if empty_set == "zero" else None


def aggregate(parts: Sequence[Part], weight: Tensor, skipped: bool, options: MecefoOptions) -> Tensor | None:
    """The averaged gradient of one weight; None where it is to stay as it is."""
    any_unaffected = any(not part.affected for part in parts)
    counted = [part for part in parts if counts(part.affected, skipped, any_unaffected, options)]
    if len(counted) == 1:
        return counted[0].gradient  # not a bit is changed by weighing it
    given = [part.gradient * part.tasks for part in counted if part.gradient is not None]
    total = torch.stack(given).sum(0) if given else None
    return average(total, sum(part.tasks for part in counted), weight, options.empty_set)


def relative_error(approximate: Gradients, exact: Gradients, names: Collection[str] | None = None) -> float:
    """||approximate - exact|| / ||exact|| over all weights, or those named; no gradient counts as zero.

    The norm ratio, not its square: the paper's Assumption 3 bounds the error relative to the failure-free gradient.
    """
    error = size = 0.0
    for name in exact if names is None else names:
        right, got = exact[name], approximate[name]
        if right is None:
            continue
        size += float(right.double().square().sum())
        error += float((right if got is None else got - right).double().square().sum())
    return math.sqrt(error / size) if size else 0.0
