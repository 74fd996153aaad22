"""What one change of the cluster would buy: the changed problem planned anew, and priced by the same estimator.

Present and changed problem are searched alike: bottleneck relief from the plans known so far, then AutoHAAP from fresh
starts, with the same budget and seed. Plans known for the present cluster are priced on the changed one too, and plans
found for a changed one on the present one, where they are legal. So no gain is negative by chance of a search, none is
what a longer search would have found anyway, and each is over the best plan known for the cluster as it is.

Most of the time goes into the tables of a problem, one for each number of micro-batches. So only that of the best plan
known is looked at, and the next smaller and larger one where a change makes room. A gain may be larger than shown.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from haap_rl.cost.estimator import Estimator
from haap_rl.cost.profiles import Profile
from haap_rl.problem.cluster import GIB, Cluster, DeviceGroup, DeviceType, Link
from haap_rl.problem.errors import InputError, PlanError
from haap_rl.problem.plan import Plan, Problem
from haap_rl.search.autohaap import AutoHAAP, Kept
from haap_rl.search.base import Budget, BudgetExhausted, Objective
from haap_rl.space.options import SpaceSpec
from haap_rl.space.space import Code, Space
from haap_rl.space.target import home, sayable

EVALUATIONS, SEED = 2000, 0  # of each search
MOST_DEVICE_TYPES = 3  # that are asked about, those with most devices in the plan
MORE_MEMORY_BYTES, MORE_MEMORY_SHARE = 4 * GIB, 0.25
FASTER = 1.25  # times the FLOP/s and the memory bandwidth


class Change(NamedTuple):
    """A cluster that one could have instead.

    makes_room: it has more memory or more devices, so that other numbers of micro-batches may do better.
    """

    text: str
    cluster: Cluster
    makes_room: bool


class Gain(NamedTuple):
    """What a change buys: seconds of the present plan on the changed cluster, and of the best plan found for it."""

    text: str
    present_plan_s: float
    best_s: float


@dataclass(frozen=True, slots=True)
class WhatIf:
    """present_s: seconds of the plan; searched_s: of the best plan known for the cluster as it is, found on the way."""

    present_s: float
    searched_s: float
    gains: tuple[Gain, ...]  # the largest first
    not_asked: str  # what was left out, and why

    def speedup(self, gain: Gain) -> float:
        """Tokens per second more, as a fraction, than the best plan known for the cluster as it is; never negative."""
        return max(0.0, self.searched_s / gain.best_s - 1.0)


def what_if(problem: Problem, spec: SpaceSpec, plan: Plan, profile: Profile | None = None) -> WhatIf:
    """What every change of `changes` would buy; the same answer every time."""
    spec = home(problem, spec, plan)  # where the target of the space has parts, the one that the plan is in
    price = Estimator(problem, profile=profile)
    near = _near(spec.num_microbatches, plan.num_microbatches)
    best = _planned(problem, replace(spec, num_microbatches=near), [plan], profile)
    asked, not_asked = changes(problem, plan, profile)
    changed = [replace(problem, cluster=change.cluster) for change in asked]
    found = []
    for change, other in zip(asked, changed, strict=True):
        here = replace(spec, num_microbatches=near if change.makes_room else (best.num_microbatches,))
        found.append(_planned(other, here, [plan, best], profile))
    # one of those plans may do for the cluster as it is, too: then it is no gain of the change
    best = min([best, *(other for other in found if _legal(problem, other))], key=lambda other: price(other).rank)
    gains = []
    for change, other, its_plan in zip(asked, changed, found, strict=True):
        there = Estimator(other, profile=profile)
        best_s = min(there(best).iteration_s, there(its_plan).iteration_s)
        gains.append(Gain(change.text, there(plan).iteration_s, best_s))
    gains.sort(key=lambda gain: gain.best_s)
    return WhatIf(price(plan).iteration_s, price(best).iteration_s, tuple(gains), not_asked)


def _near(counts: Sequence[int], m: int) -> tuple[int, ...]:
    """`m` with the next smaller and larger one of `counts`."""
    ordered = sorted({*counts, m})
    k = ordered.index(m)
    return tuple(ordered[max(0, k - 1) : k + 2])


def changes(problem: Problem, plan: Plan, profile: Profile | None = None) -> tuple[list[Change], str]:
    """The changes worth asking about, type by type of the plan's devices, and what was left out."""
    cluster, used = problem.cluster, dict[str, int]()
    device_of = {group.name: group.device for group in cluster.groups}
    for replicas in (replicas for stage in plan.stages for replicas in stage.replicas):
        name = device_of[replicas.group].name
        used[name] = used.get(name, 0) + replicas.num_devices
    names = sorted(used, key=lambda name: -used[name])
    asked = [change for name in names[:MOST_DEVICE_TYPES] for change in _of_type(cluster, name, profile)]
    left_out = []
    if names[MOST_DEVICE_TYPES:]:
        left_out.append(f"changes of {', '.join(names[MOST_DEVICE_TYPES:])}, of which the plan uses fewer devices")
    if profile is not None:
        left_out.append("faster devices and faster links inside nodes, of which the profile measured the present ones")
    return asked, "; ".join(left_out)


def _of_type(cluster: Cluster, name: str, profile: Profile | None) -> Iterator[Change]:
    """Changes of the device type `name`, of its nodes and of what joins them."""
    groups = [group for group in cluster.groups if group.device.name == name]
    device = groups[0].device
    more = [MORE_MEMORY_BYTES, int(MORE_MEMORY_SHARE * device.memory_bytes)]
    for num_bytes in more if max(more) > 1.5 * min(more) else more[:1]:  # about the same is asked once
        yield Change(
            f"{num_bytes / GIB:.4g} GiB more memory on every {name}",
            _with_devices(cluster, name, partial(_with_memory, num_bytes)),
            makes_room=True,
        )
    if profile is None:
        yield Change(
            f"{name} {FASTER - 1:.0%} faster, in FLOP/s and memory bandwidth",
            _with_devices(cluster, name, _faster),
            makes_room=False,
        )
        if any(group.devices_per_node > 1 for group in groups):
            yield Change(
                f"links inside the nodes of {name} twice as fast",
                _with_groups(cluster, name, lambda group: replace(group, intra_node=_doubled(group.intra_node))),
                makes_room=False,
            )
    if any(group.num_devices < cluster.num_devices or group.num_nodes > 1 for group in groups):
        yield Change(
            f"the network of the nodes of {name} twice as fast", _with_network(cluster, name), makes_room=False
        )
    for group in groups:
        yield Change(
            f"one more node of {group.name}, {group.devices_per_node} {name}",
            replace(cluster, groups=tuple(_one_more_node(g) if g is group else g for g in cluster.groups)),
            makes_room=True,
        )


def _with_groups(cluster: Cluster, name: str, changed: Callable[[DeviceGroup], DeviceGroup]) -> Cluster:
    groups = tuple(changed(group) if group.device.name == name else group for group in cluster.groups)
    return replace(cluster, groups=groups)


def _with_devices(cluster: Cluster, name: str, changed: Callable[[DeviceType], DeviceType]) -> Cluster:
    return _with_groups(cluster, name, lambda group: replace(group, device=changed(group.device)))


def _with_network(cluster: Cluster, name: str) -> Cluster:
    """Twice the bandwidth of the nodes' adapters and of links between groups that one of these nodes is an end of."""
    theirs = {group.name for group in cluster.groups if group.device.name == name}
    links = tuple((a, b, _doubled(link) if {a, b} & theirs else link) for a, b, link in cluster.links)
    faster = _with_groups(cluster, name, lambda group: replace(group, inter_node=_doubled(group.inter_node)))
    return replace(faster, links=links)


def _with_memory(more_bytes: int, device: DeviceType) -> DeviceType:
    return replace(device, memory_bytes=device.memory_bytes + more_bytes)


def _faster(device: DeviceType) -> DeviceType:
    return replace(
        device,
        peak_flops=tuple((precision, FASTER * flops) for precision, flops in device.peak_flops),
        memory_bandwidth_bytes_per_s=FASTER * device.memory_bandwidth_bytes_per_s,
    )


def _doubled(link: Link) -> Link:
    return replace(link, bandwidth_bytes_per_s=2.0 * link.bandwidth_bytes_per_s)


def _one_more_node(group: DeviceGroup) -> DeviceGroup:
    return replace(group, num_nodes=group.num_nodes + 1)


def _planned(problem: Problem, spec: SpaceSpec, known: Sequence[Plan], profile: Profile | None) -> Plan:
    """The best plan found, from those known, which fit, and from fresh starts.

    An objective rather than `run_search`: neither the bound nor the pruning count is needed, which take longer.
    """
    allowed = sayable(problem, spec, Estimator(problem, profile=profile))
    objective = Objective(problem, Budget(EVALUATIONS + len(known)), spec, profile=profile, allowed=allowed)
    ranks = [objective(plan).rank for plan in known]
    codes = [_code(objective.space, plan) for plan in known]
    starts = [Kept(rank, code) for rank, code in zip(ranks, codes, strict=True) if code is not None]
    searcher, rng = AutoHAAP(), np.random.default_rng(SEED)
    with contextlib.suppress(BudgetExhausted):
        if starts:
            searcher.descend(objective, rng, kept=starts)
        if objective.space.feasible_microbatches:
            searcher.search(problem, objective, rng)
    if objective.best is None and allowed is None:
        raise AssertionError("plans were priced, and none was the best")
    return known[0] if objective.best is None else objective.best[0]


def _legal(problem: Problem, plan: Plan) -> bool:
    try:
        problem.validate(plan)
    except PlanError:
        return False
    return True


def _code(space: Space, plan: Plan) -> Code | None:
    """The row of a plan of the space; None for another one, which can be priced but not relieved."""
    if len(plan.stages) > space.max_stages or plan.num_microbatches not in space.num_microbatches:
        return None
    try:
        code: Code = space.encode([space.genome(plan)])[0]
    except InputError:
        return None
    return code
