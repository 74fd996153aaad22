"""What strategies look up of single stages and of their neighbours, and the one loop that two dynamic programs share.

Nothing here computes a plan's iteration time, so nothing here is an evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from haap_rl.cost.estimator import BoundaryKey, ReplicaKey, StageKey
from haap_rl.problem.plan import RECOMPUTE_MODES
from haap_rl.search.base import Objective
from haap_rl.space.options import SEQUENCE_PARALLEL
from haap_rl.space.space import Space

Choice = TypeVar("Choice")


class Solved(NamedTuple, Generic[Choice]):
    """What a dynamic program found: stage seconds summed, those of the slowest stage, and what says which plan."""

    total_s: float
    slowest_s: float
    choice: Choice


def squeeze(solve: Callable[[float], Solved[Choice] | None], m: int) -> tuple[Solved[Choice] | None, int]:
    """(the choice that makes total + (m-1) slowest least, how often `solve` was called); None if nothing is possible.

    solve: the choice of least total among those with no stage slower than a limit. The papers enumerate every limit
    t_max upwards; downwards few are left. With a slowest stage no faster than that of the choice found nothing has a
    smaller total, so the next limit is just below it, and at (best - total) / (m-1), above which nothing can be better.
    """
    best: Solved[Choice] | None = None
    best_s, limit_s, solves = math.inf, math.inf, 0
    while True:
        found = solve(limit_s)
        solves += 1
        if found is None:
            return best, solves
        time_s = found.total_s + (m - 1) * found.slowest_s
        if time_s < best_s:
            best, best_s = found, time_s
        if m == 1:
            return best, solves
        limit_s = min(math.nextafter(found.slowest_s, 0.0), (best_s - found.total_s) / (m - 1))


def note_if_nothing(objective: Objective, name: str) -> None:
    """Say why a strategy that gives work to every device has tried nothing, if so it is."""
    if not objective.evaluations:
        most = objective.space.max_stages
        objective.note(f"{name} uses every device it has a stage for, and no such plan here has at most {most} stages")


def modes(space: Space) -> list[str]:
    """The space's modes of recomputation, the lightest first."""
    return [mode for mode in RECOMPUTE_MODES if mode in space.spec.recompute]


def nodes_touched(space: Space, k: int) -> int:
    """Nodes of a stage on option k that sits as well as it can."""
    option = space.options[k]
    return -(-option.num_devices // space.problem.cluster.groups[option.group].devices_per_node)


def send_s(space: Space, m: int, sender: int, receiver: int) -> float:
    """Seconds of one transfer between stages on two options, which share a node where one has room for both."""
    problem, estimator = space.problem, space.estimator
    one, other = space.options[sender], space.options[receiver]
    per_node = problem.cluster.groups[one.group].devices_per_node
    one_node = one.group == other.group and one.num_devices + other.num_devices <= per_node
    sides = [((o.group, o.num_devices, nodes_touched(space, k)),) for o, k in ((one, sender), (other, receiver))]
    samples = problem.global_batch_size // m
    num_bytes = float(samples * problem.seq_len * problem.model.hidden * estimator.value_bytes)
    return estimator.send_s(BoundaryKey(sides[0], sides[1], one_node), num_bytes)


def sync_s(space: Space, m: int, k: int, layers: int, first: bool, last: bool) -> float:
    """Seconds of the gradient synchronisation of a stage on option k that is not hidden, once per iteration."""
    option, sizes = space.options[k], space.sizes(m, k)
    if sizes is None:
        raise AssertionError(f"option {option} cannot divide a micro-batch at {m} micro-batches")
    replica = ReplicaKey(option.group, option.tp, option.dp, sizes[0], nodes_touched(space, k), 1)
    key = StageKey(first, last, layers, (replica,), "none", 0, space.spec.zero_stage, SEQUENCE_PARALLEL)
    return space.estimator.stage_cost(key).gradient_sync_s
