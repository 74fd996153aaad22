"""How a strategy that knows one type of device sees a mixed cluster, and what becomes of its plan on the real devices.

Megatron-LM, Alpa and Aceso know one type. On a mixed cluster their users do one of two things (`devices`):

    all    take every device for one like the slowest, with the least memory and the slowest links of all: what is
           planned so runs everywhere, and the faster devices wait
    part   take the largest part of one device type alone and leave the rest idle; the largest by speed, layers per
           second of all its devices, for that is why one would leave devices idle

null tries both: the better is the result, and a note says what either takes. On one device type the two are the same
and are tried once. A plan made for the cluster believed in is then put on the real devices in the order of the
cluster's groups, and priced there.

Deviations that hold for all three: a stage stays on one device group, as the declared space has it, so devices that a
group has beyond a multiple of the stage's are idle; nodes believed in are as large as all nodes can be (the greatest
common divisor of their sizes), since a device group has equal ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from haap_rl.cost.estimator import UnitKey
from haap_rl.problem.cluster import Cluster, DeviceGroup, Link
from haap_rl.problem.errors import InputError, shown
from haap_rl.problem.plan import Problem
from haap_rl.search.base import Explained, Objective, Prices
from haap_rl.space.options import SEQUENCE_PARALLEL
from haap_rl.space.space import Genome, Space

DEVICES = ("part", "all")
TRIES = 20  # plans that a user runs out of memory with, one after the other, before giving up


def one_of(where: str, devices: object) -> str | None:
    """`devices` as one of DEVICES or None (both). Raises InputError naming `where`."""
    if devices is not None and devices not in DEVICES:
        raise InputError(f"{where}: devices={shown(devices)} is not one of {', '.join(DEVICES)}; or null: both")
    return devices


def parts(space: Space, devices: str | None) -> list[tuple[int, ...]]:
    """The device groups (indices) to plan for: one such part, or both where `devices` is None and they differ."""
    chosen = {"part": largest_part(space), "all": tuple(range(len(space.num_devices)))}
    return list(dict.fromkeys(chosen[name] for name in (DEVICES if devices is None else (devices,))))


def views(objective: Objective, devices: str | None) -> list[View]:
    """The clusters to plan for, as a strategy of one device type sees them."""
    return [View(objective, groups) for groups in parts(objective.space, devices)]


def note_best(objective: Objective, best_s: Mapping[tuple[int, ...], float]) -> None:
    """Say what the best plan takes on each part of the cluster (device groups), if several were tried."""
    groups = objective.space.problem.cluster.groups
    found = [
        f"on {' + '.join(groups[g].name for g in part)} {f'{seconds:.4f} s' if seconds < math.inf else 'no plan fits'}"
        for part, seconds in best_s.items()
    ]
    if len(found) > 1:
        objective.note(f"one device type at a time: {', '.join(found)}")


def largest_part(space: Space) -> tuple[int, ...]:
    """The device groups (indices) of the device type that computes most layers per second altogether."""
    parts: dict[str, list[int]] = {}
    for index, group in enumerate(space.problem.cluster.groups):
        parts.setdefault(group.device.name, []).append(index)

    def layers_per_s(groups: Sequence[int]) -> float:
        return sum(space.num_devices[g] for g in groups) / layer_s(space, groups[0])

    return max(map(tuple, parts.values()), key=layers_per_s)


def layer_s(space: Space, group: int) -> float:
    """Seconds of one layer, forward and backward, with one sample on one device of a group (an index)."""
    time = space.estimator.unit_time(UnitKey("layer", group, 1, 1, 1, SEQUENCE_PARALLEL))
    return time.forward_s + time.backward_s


def believed(space: Space, groups: Sequence[int]) -> Problem:
    """The problem on some device groups (indices) as if all their devices were like the slowest of them."""
    cluster = space.problem.cluster
    members = [cluster.groups[g] for g in groups]
    if len(members) == 1:  # that is how it is
        return replace(space.problem, cluster=Cluster(cluster.name, (members[0],)))
    slowest = cluster.groups[max(groups, key=lambda g: layer_s(space, g))].device
    per_node = math.gcd(*(member.devices_per_node for member in members))

    def between(a: int, b: int) -> Link:
        """The link of a node of the size believed in: its share of a real node's."""
        link, larger = cluster.link(a, b), max(cluster.groups[g].devices_per_node for g in (a, b))
        return Link(link.latency_s, link.bandwidth_bytes_per_s * per_node / larger)

    alike = DeviceGroup(
        name="all",
        device=replace(slowest, memory_bytes=min(member.device.memory_bytes for member in members)),
        num_nodes=sum(member.num_devices for member in members) // per_node,
        devices_per_node=per_node,
        intra_node=_slowest([member.intra_node for member in members]),
        inter_node=_slowest([between(a, b) for a in groups for b in groups]),
        nics_per_node=max(1, min(member.nics_per_node * per_node // member.devices_per_node for member in members)),
    )
    return replace(space.problem, cluster=Cluster(cluster.name, (alike,)))


def _slowest(links: Iterable[Link]) -> Link:
    links = list(links)
    return Link(max(link.latency_s for link in links), min(link.bandwidth_bytes_per_s for link in links))


class View:
    """Some device groups as a strategy of one device type sees them.

    space   the declared space on the cluster believed in; plans of a strategy are genomes of it
    exact   whether it is as believed: one device group alone
    best_s  seconds of the best plan that was priced on the real devices and fits; infinity before there is one
    """

    def __init__(self, objective: Objective, groups: tuple[int, ...]) -> None:
        self.objective, self.groups = objective, groups
        self.exact, self.best_s = len(groups) == 1, math.inf
        self._belief = Objective(
            believed(objective.space, groups),
            space=objective.space.spec,
            cached=objective.cached,
            profile=objective.estimator.profile,
        )
        self.space = self._belief.space

    def placed(self, genome: Genome) -> Genome | None:
        """The stages on the real devices, group after group in the cluster's order or else in the reverse one.

        None where neither has room for them all, since a stage stays on one group.
        """
        for order in (self.groups, self.groups[::-1]):
            options = self._in_order(genome.options, order)
            if options is not None:
                return genome._replace(options=options)
        return None

    def _in_order(self, options: Sequence[int], order: Sequence[int]) -> tuple[int, ...] | None:
        real = self.objective.space
        placed, at, left = [], 0, real.num_devices[order[0]]
        for k in options:
            option = self.space.options[k]
            while left < option.num_devices:
                at += 1
                if at == len(order):
                    return None
                left = real.num_devices[order[at]]
            left -= option.num_devices
            placed.append(real.option_index[option._replace(group=order[at])])
        return tuple(placed)

    def run(self, genomes: Iterable[Genome]) -> bool:
        """Try plans on the real devices until one fits, at most TRIES; whether one did."""
        self._hand_over_operators()  # those of the tables that the strategy looked at
        tries = 0
        for genome in genomes:
            placed = self.placed(genome)
            if placed is None:
                continue
            tries += 1
            if not self._real([placed]).bytes_missing[0]:
                return True
            if tries == TRIES:
                break
        return False

    def price(self, genomes: Sequence[Genome]) -> Prices:
        """Prices as believed, counted; where the view is not exact, of so many as leave one evaluation to `run`."""
        if self.exact:
            return self._real([self._surely(genome) for genome in genomes])
        self.objective.check_seconds()
        allowed = len(genomes) if self.objective.remaining is None else min(len(genomes), self.objective.remaining - 1)
        prices = self._belief.many(self.space.encode(genomes[: max(0, allowed)]))
        self._account(max(0, allowed))
        return prices

    def explain(self, genome: Genome) -> Explained | None:
        """The price of one plan as believed with what it is made of, counted; None where only `run` may count yet."""
        if self.exact:  # it was priced before
            return self.objective.explain(self.objective.space.encode([self._surely(genome)])[0])
        self.objective.check_seconds()
        if self.objective.remaining is not None and self.objective.remaining <= 1:
            return None
        explained = self._belief.explain(self.space.encode([genome])[0])
        self._account(1)
        return explained

    def _real(self, genomes: Sequence[Genome]) -> Prices:
        """Prices of plans of the real space."""
        prices = self.objective.many(self.objective.space.encode(genomes))
        fitting = prices.iteration_s[prices.bytes_missing == 0]
        self.best_s = min(self.best_s, float(fitting.min(initial=math.inf)))
        return prices

    def _surely(self, genome: Genome) -> Genome:
        placed = self.placed(genome)
        if placed is None:
            raise AssertionError(f"{genome} uses more devices than there are")
        return placed

    def _account(self, evaluations: int) -> None:
        """Hand the evaluations of the belief, and the operator latencies behind them, to the objective."""
        self._hand_over_operators()
        self.objective.account(evaluations)

    def _hand_over_operators(self) -> None:
        mine, its = self._belief.estimator, self.objective.estimator
        for name in ("operators_computed", "operators_requested", "operators_distinct"):
            setattr(its, name, getattr(its, name) + getattr(mine, name))
            setattr(mine, name, 0)
