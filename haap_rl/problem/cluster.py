"""Devices, links, device groups and the cluster they form: what there is, no time and no choice.

Bandwidths: within a node per device and direction; between nodes per node and direction, shared by the devices of
that node; between two groups the slower of their nodes' NICs unless the cluster says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from haap_rl.problem.errors import InputError, check_keys, label, positive_float, positive_int, shown

GIB = 2**30
PRECISIONS = ("fp16", "bf16", "fp32")


@dataclass(frozen=True, slots=True)
class DeviceType:
    """One kind of accelerator.

    peak_flops: (precision, FLOP/s) pairs, dense, per device. memory_bytes: all of the device's memory.
    memory_bandwidth_bytes_per_s: nominal.
    """

    name: str
    peak_flops: tuple[tuple[str, float], ...]
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        where = f"device {self.name!r}"
        if not self.peak_flops:
            raise InputError(f"{where}: no peak_flops given; name at least one of {', '.join(PRECISIONS)}")
        for precision, flops in self.peak_flops:
            if precision not in PRECISIONS:
                raise InputError(f"{where}: precision {precision!r} is not one of {', '.join(PRECISIONS)}")
            positive_float(where, f"peak_flops[{precision}]", flops)
        positive_int(where, "memory_bytes", self.memory_bytes)
        positive_float(where, "memory_bandwidth_bytes_per_s", self.memory_bandwidth_bytes_per_s)

    def peak(self, precision: str) -> float:
        """Peak FLOP/s at `precision`. Raises InputError if the device has no such unit (V100 has no bf16)."""
        for name, flops in self.peak_flops:
            if name == precision:
                return flops
        has = ", ".join(name for name, _ in self.peak_flops)
        raise InputError(
            f"device {self.name!r} has no {precision} (it has {has}); set problem.precision to one of them"
        )


@dataclass(frozen=True, slots=True)
class Link:
    """An alpha-beta link: seconds per message and bytes per second in one direction, nominal."""

    latency_s: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        positive_float("link", "latency_s", self.latency_s)
        positive_float("link", "bandwidth_bytes_per_s", self.bandwidth_bytes_per_s)


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Equal nodes of equal devices. Nodes of another size are another group.

    nics_per_node: network adapters that share inter_node's bandwidth equally; a device sends through one of them.
    """

    name: str
    device: DeviceType
    num_nodes: int
    devices_per_node: int
    intra_node: Link
    inter_node: Link
    nics_per_node: int = 1

    def __post_init__(self) -> None:
        where = f"device group {self.name!r}"
        positive_int(where, "num_nodes", self.num_nodes)
        positive_int(where, "devices_per_node", self.devices_per_node)
        positive_int(where, "nics_per_node", self.nics_per_node)

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node


@dataclass(frozen=True, slots=True)
class Cluster:
    """Device groups and, where they are not simply the slower NIC, the links between them.

    links: (group name, group name, Link) triples; the order of the two names does not matter.
    """

    name: str
    groups: tuple[DeviceGroup, ...]
    links: tuple[tuple[str, str, Link], ...] = ()

    def __post_init__(self) -> None:
        where = f"cluster {self.name!r}"
        if not self.groups:
            raise InputError(f"{where}: it has no device groups; give at least one under 'groups'")
        names = [group.name for group in self.groups]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"{where}: device group {name!r} is there twice; give each group its own name")
        seen = set()
        for a, b, _ in self.links:
            for name in (a, b):
                if name not in names:
                    raise InputError(f"{where}: a link names group {name!r}; the groups are {', '.join(names)}")
            if a == b:
                raise InputError(f"{where}: a link joins {a!r} to itself; set that group's inter_node instead")
            if frozenset((a, b)) in seen:
                raise InputError(f"{where}: the link {a}-{b} is given twice; keep one")
            seen.add(frozenset((a, b)))

    @property
    def num_devices(self) -> int:
        return sum(group.num_devices for group in self.groups)

    @property
    def memory_bytes(self) -> int:
        """Memory of all devices together."""
        return sum(group.num_devices * group.device.memory_bytes for group in self.groups)

    def index(self, name: str) -> int:
        """Position of the group called `name`. Raises InputError listing the groups."""
        for index, group in enumerate(self.groups):
            if group.name == name:
                return index
        has = ", ".join(group.name for group in self.groups)
        raise InputError(f"cluster {self.name!r} has no device group {name!r}; its groups are {has}")

    def link(self, a: int, b: int) -> Link:
        """The link between a node of group `a` and a node of group `b` (indices), per node and direction."""
        if a == b:
            return self.groups[a].inter_node
        names = {self.groups[a].name, self.groups[b].name}
        for first, second, link in self.links:
            if {first, second} == names:
                return link
        one, other = self.groups[a].inter_node, self.groups[b].inter_node
        return Link(max(one.latency_s, other.latency_s), min(one.bandwidth_bytes_per_s, other.bandwidth_bytes_per_s))


# -------------------------------------------------------------------- from files: human units end here
def device_from_config(config: Mapping[str, Any]) -> DeviceType:
    """DeviceType from a mapping in the units of `conf/device/*.yaml` (TFLOP/s, GiB, GB/s).

    The key `node`, the machine that a device usually comes in, is for readers of cluster files (`usual_node`).
    """
    where = f"device {shown(config.get('name', '?'))}"
    check_keys(where, config, ("name", "peak_tflops", "memory_gib", "memory_bandwidth_gb_per_s"), ("source", "node"))
    peaks = _mapping(where, "peak_tflops", config["peak_tflops"])
    check_keys(f"{where}: peak_tflops", peaks, (), PRECISIONS)
    return DeviceType(
        name=label(where, "name", config["name"]),
        peak_flops=tuple(
            (str(name), positive_float(where, f"peak_tflops.{name}", value) * 1e12) for name, value in peaks.items()
        ),
        memory_bytes=int(positive_float(where, "memory_gib", config["memory_gib"]) * GIB),
        memory_bandwidth_bytes_per_s=positive_float(
            where, "memory_bandwidth_gb_per_s", config["memory_bandwidth_gb_per_s"]
        )
        * 1e9,
    )


def cluster_from_config(config: Mapping[str, Any], device_named: Callable[[str], Mapping[str, Any]]) -> Cluster:
    """Cluster from a mapping in the units of `conf/cluster/*.yaml` (microseconds, GB/s).

    device_named: returns the mapping of a registered device, for groups that give `device` as a name.
    """
    where = f"cluster {shown(config.get('name', '?'))}"
    check_keys(where, config, ("name", "groups"), ("links", "source"))
    groups = []
    for position, entry in enumerate(_sequence(where, "groups", config["groups"])):
        entry = _mapping(where, f"groups.{position}", entry)
        place = f"{where}: groups.{position}"
        required = ("name", "device", "num_nodes", "devices_per_node", "intra_node", "inter_node")
        check_keys(place, entry, required, ("nics_per_node",))
        device = entry["device"]
        groups.append(
            DeviceGroup(
                name=label(place, "name", entry["name"]),
                device=device_from_config(
                    device if isinstance(device, Mapping) else device_named(label(place, "device", device))
                ),
                num_nodes=positive_int(place, "num_nodes", entry["num_nodes"]),
                devices_per_node=positive_int(place, "devices_per_node", entry["devices_per_node"]),
                intra_node=link_from_config(f"{place}.intra_node", entry["intra_node"]),
                inter_node=link_from_config(f"{place}.inter_node", entry["inter_node"]),
                nics_per_node=positive_int(place, "nics_per_node", entry.get("nics_per_node", 1)),
            )
        )
    links = []
    for position, entry in enumerate(_sequence(where, "links", config.get("links") or [])):
        place = f"{where}: links.{position}"
        entry = _mapping(where, f"links.{position}", entry)
        check_keys(place, entry, ("between", "latency_us", "bandwidth_gb_per_s"))
        between = _sequence(place, "between", entry["between"])
        if len(between) != 2:
            raise InputError(f"{place}: between={shown(list(between))} must name two device groups")
        link = {key: entry[key] for key in ("latency_us", "bandwidth_gb_per_s")}
        first, second = (label(place, "between", name) for name in between)
        links.append((first, second, link_from_config(place, link)))
    return Cluster(label(where, "name", config["name"]), tuple(groups), tuple(links))


def link_from_config(where: str, config: object) -> Link:
    """Link from a mapping of latency_us and bandwidth_gb_per_s. `where` names its place in messages."""
    config = _mapping(where, "", config)
    check_keys(where, config, ("latency_us", "bandwidth_gb_per_s"))
    return Link(
        latency_s=positive_float(where, "latency_us", config["latency_us"]) * 1e-6,
        bandwidth_bytes_per_s=positive_float(where, "bandwidth_gb_per_s", config["bandwidth_gb_per_s"]) * 1e9,
    )


def _mapping(where: str, key: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        given = f"{key}={shown(value)}" if key else shown(value)
        raise InputError(f"{where}: {given} must be a mapping of keys to values")
    return value


def _sequence(where: str, key: str, value: object) -> Sequence[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InputError(f"{where}: {key}={shown(value)} must be a list")
    return value
