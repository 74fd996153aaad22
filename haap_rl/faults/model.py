"""What fails, how often, and for how long: hazards as people write them, and the components of a cluster they make.

No time passes here: traces are drawn in `traces.py`. Every component fails by itself; losses that come together are
components of a larger domain, a node or a whole device group. Hours end in `failure_model_from_config`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from haap_rl.problem.cluster import Cluster, DeviceGroup
from haap_rl.problem.errors import InputError, check_keys, label, positive_float, shown

DOMAINS = ("device", "node", "group")
RECOVERIES = ("exponential", "fixed")
RATES = ("mtbf_h", "cluster_interval_h", "per_1000_node_days")
HOUR_S = 3600.0
LEAST_H, MOST_H = 1e-3, 1e9  # hours of a rate or a recovery; beyond them it is a slip of a unit
MOST_THINGS = 1_000_000  # as many devices of a group as plans are searched for
LEAST_SHAPE, MOST_SHAPE = 0.1, 10.0  # published fits of times to failure lie between 0.5 and 2
# keys of conf/faults/*.yaml that others read: the policy and what it costs
OTHERS = ("policy", "mecefo", "constants", "least_probability")


@dataclass(frozen=True, slots=True)
class Component:
    """What fails and returns as a whole: consecutive devices of one device group, counted node after node.

    mtbf_s: mean time in service until it fails (Weibull with `shape`; 1 = exponential). recovery_s: mean time until it
    returns, exponential unless `fixed_recovery`.
    """

    domain: str
    group: int
    first_device: int
    num_devices: int
    mtbf_s: float
    recovery_s: float
    shape: float = 1.0
    fixed_recovery: bool = False

    @property
    def unavailability(self) -> float:
        """Share of time, in the long run, in which it is down; whatever the two distributions."""
        return self.recovery_s / (self.mtbf_s + self.recovery_s)

    @property
    def failure_rate(self) -> float:
        """Failures per second in service."""
        return 1.0 / self.mtbf_s

    @property
    def repair_rate(self) -> float:
        """Returns per second of being down."""
        return 1.0 / self.recovery_s if self.recovery_s else math.inf


@dataclass(frozen=True, slots=True)
class Hazard:
    """One way in which a cluster loses devices, its rate given as exactly one of three.

    mtbf_s                mean time in service of one device, node or group until it fails
    cluster_interval_s    one failure somewhere among all of them per so many seconds, in the long run
    per_1000_node_days    failures per 1,000 node-days; a device has its share of its node's, a group its nodes' sum

    recovery_s: mean seconds until what failed returns. device: only things of this device type; None: all.
    """

    domain: str
    recovery_s: float
    mtbf_s: float | None = None
    cluster_interval_s: float | None = None
    per_1000_node_days: float | None = None
    device: str | None = None
    shape: float = 1.0
    recovery: str = "exponential"

    def components(self, cluster: Cluster, where: str) -> list[Component]:
        """Its components on `cluster`. Raises InputError, naming `where`, if this cluster cannot have it."""
        groups = [i for i, group in enumerate(cluster.groups) if self.device in (None, group.device.name)]
        if not groups:
            has = ", ".join(dict.fromkeys(group.device.name for group in cluster.groups))
            raise InputError(
                f"{where}: device={shown(self.device)} is not in cluster {cluster.name!r}, which has {has}; "
                "name one of them, or device=null for all"
            )
        check_number(where, self.domain, sum(things_of(cluster.groups[i], self.domain) for i in groups))
        things = [(i, first, size) for i in groups for first, size in self._things(cluster, i)]
        return [
            Component(
                self.domain,
                group,
                first,
                size,
                mtbf_s=self._mtbf_s(cluster, group, len(things), where),
                recovery_s=self.recovery_s,
                shape=self.shape,
                fixed_recovery=self.recovery == "fixed",
            )
            for group, first, size in things
        ]

    def _things(self, cluster: Cluster, index: int) -> list[tuple[int, int]]:
        """(first device, number of devices) of each thing of its domain in a device group."""
        group = cluster.groups[index]
        size = group.num_devices // things_of(group, self.domain)
        return [(first, size) for first in range(0, group.num_devices, size)]

    def _mtbf_s(self, cluster: Cluster, index: int, num_things: int, where: str) -> float:
        group = cluster.groups[index]
        if self.mtbf_s is not None:
            return self.mtbf_s
        if self.per_1000_node_days is not None:
            nodes = {"device": 1 / group.devices_per_node, "node": 1.0, "group": float(group.num_nodes)}[self.domain]
            return HOUR_S * mttf_h(nodes, self.per_1000_node_days)
        assert self.cluster_interval_s is not None
        # each fails once in `cycle_s` of wall time, and for the recovery in it it is not in service
        cycle_s = num_things * self.cluster_interval_s
        if cycle_s <= self.recovery_s:
            down = mean_number_down(self.cluster_interval_s, self.recovery_s)
            raise InputError(
                f"{where}: cluster_interval_h={self.cluster_interval_s / HOUR_S:g} with recovery_h="
                f"{self.recovery_s / HOUR_S:g} means {down:g} down on average, but cluster {cluster.name!r} has "
                f"{num_things} such {self.domain}s; raise cluster_interval_h or lower recovery_h"
            )
        return cycle_s - self.recovery_s


@dataclass(frozen=True, slots=True)
class FailureModel:
    """How a cluster fails: by its hazards at random, or as the trace in a file says (`traces.read_trace`)."""

    name: str
    hazards: tuple[Hazard, ...] = ()
    trace: str | None = None

    def components(self, cluster: Cluster) -> tuple[Component, ...]:
        """What fails on `cluster` by the hazards, in their order. Raises InputError if they do not suit it."""
        return tuple(
            component
            for position, hazard in enumerate(self.hazards)
            for component in hazard.components(cluster, _place(self.name, position))
        )


def things_of(group: DeviceGroup, domain: str) -> int:
    """How many devices, nodes or groups a device group is."""
    return {"device": group.num_devices, "node": group.num_nodes, "group": 1}[domain]


def check_number(where: str, domain: str, number: int) -> None:
    """Raise InputError, naming `where`, for more things than failures are followed of."""
    if number > MOST_THINGS:
        raise InputError(
            f"{where}: there are {number:,} such {domain}s, and failures are followed one by one for at most "
            f"{MOST_THINGS:,}; use domain=node or group, or a smaller cluster"
        )


# ----------------------------------------------------------------------------------------- arithmetic
def mttf_h(nodes: float, failures_per_1000_node_days: float) -> float:
    """Hours until the first of `nodes` nodes fails: 24000 / (nodes r_f).

    Source: Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters"
    (arXiv 2410.21680): with r_f = 6.50, 1.80 h on 16,384 GPUs (2,048 nodes) and 0.23 h on 131,072.
    """
    return 24_000 / (nodes * failures_per_1000_node_days)


def mean_number_down(interval_s: float, recovery_s: float) -> float:
    """How many things are down on average, if one fails every `interval_s` for `recovery_s`.

    Little's law (Little 1961): L = arrival rate x time in the system.
    """
    return recovery_s / interval_s


def mean_down(components: Iterable[Component]) -> float:
    """How many of the components are down on average, in the long run."""
    return math.fsum(component.unavailability for component in components)


def probability_any_down(components: Iterable[Component]) -> float:
    """Probability that at least one component is down, in the long run: 1 - prod (1 - u), each by itself."""
    return 1.0 - math.exp(math.fsum(math.log1p(-component.unavailability) for component in components))


def probability_any_down_poisson(mean: float) -> float:
    """The same where failures come as a Poisson process from endlessly many things: 1 - exp(-mean)."""
    return -math.expm1(-mean)


# ----------------------------------------------------------------------------------------- from files
def failure_model_from_config(config: Mapping[str, Any]) -> FailureModel:
    """FailureModel from a mapping in the units of `conf/faults/*.yaml` (hours). Raises InputError.

    `recovery_h` beside the hazards is given instead of their own, where it is not null.
    """
    where = f"faults {shown(config.get('name', '?'))}"
    check_keys(where, config, ("name", "hazards"), ("recovery_h", "trace", "source", *OTHERS))
    name = label(where, "name", config["name"])
    entries = config["hazards"]
    if isinstance(entries, str | bytes) or not isinstance(entries, Sequence):
        raise InputError(f"{where}: hazards={shown(entries)} must be a list; give [] for none")
    recovery_h = config.get("recovery_h")
    if recovery_h is not None:
        _hours("faults", "recovery_h", recovery_h)
    trace = config.get("trace")
    if trace is not None and (not isinstance(trace, str) or not trace):
        raise InputError(f"{where}: trace={shown(trace)} must be the name of a file, or null")
    hazards = tuple(_hazard(_place(name, i), entry, recovery_h) for i, entry in enumerate(entries))
    return FailureModel(name, hazards, trace)


def _hazard(where: str, entry: object, recovery_h: object) -> Hazard:
    if not isinstance(entry, Mapping):
        raise InputError(f"{where}: {shown(entry)} must be a mapping, for example {{domain: node, mtbf_h: 1000}}")
    check_keys(where, entry, ("domain",), (*RATES, "recovery_h", "device", "shape", "recovery"))
    _one_of(where, "domain", entry["domain"], DOMAINS)
    recovery = entry.get("recovery", "exponential")
    _one_of(where, "recovery", recovery, RECOVERIES)
    given = [key for key in RATES if entry.get(key) is not None]
    if len(given) != 1:
        said = " and ".join(given) or "no rate"
        raise InputError(f"{where}: {said} given; give exactly one of {', '.join(RATES)}")
    shape = positive_float(where, "shape", entry.get("shape", 1.0))
    if not LEAST_SHAPE <= shape <= MOST_SHAPE:
        raise InputError(
            f"{where}: shape={shape:g} must be between {LEAST_SHAPE:g} and {MOST_SHAPE:g}; 1 is exponential"
        )
    recovery_h = entry.get("recovery_h") if recovery_h is None else recovery_h
    if recovery_h is None:
        raise InputError(
            f"{where}: recovery_h is not given, and nothing that failed would return; give faults.recovery_h=2"
        )
    device = entry.get("device")
    rate = given[0]
    if rate == "per_1000_node_days":
        per_1000 = positive_float(where, rate, entry[rate])
        if not LEAST_H <= mttf_h(1, per_1000) <= MOST_H:
            raise InputError(f"{where}: {rate}={shown(entry[rate])} is out of range; published values are 1 to 10")
    else:
        per_1000 = None
    return Hazard(
        domain=entry["domain"],
        recovery_s=_hours(where, "recovery_h", recovery_h),
        mtbf_s=_hours(where, rate, entry[rate]) if rate == "mtbf_h" else None,
        cluster_interval_s=_hours(where, rate, entry[rate]) if rate == "cluster_interval_h" else None,
        per_1000_node_days=per_1000,
        device=None if device is None else label(where, "device", device),
        shape=shape,
        recovery=recovery,
    )


def _hours(where: str, key: str, value: object) -> float:
    """Seconds of a number of hours in range."""
    hours = positive_float(where, key, value)
    if not LEAST_H <= hours <= MOST_H:
        raise InputError(f"{where}: {key}={shown(value)} must be between {LEAST_H:g} and {MOST_H:g} hours")
    return HOUR_S * hours


def _one_of(where: str, key: str, value: object, known: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in known:
        raise InputError(f"{where}: {key}={shown(value)} is not known; choose one of {', '.join(known)}")


def _place(name: str, position: int) -> str:
    return f"faults {name!r}: hazards.{position}"
