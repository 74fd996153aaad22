"""A Metis cluster file (JSON) and its hostfile -> the mapping of a `conf/cluster/*.yaml`.

Format: README.md, utils.py and the sample files of SamsungLabs/Metis (Um et al., USENIX ATC 2024). The cluster file
gives instance_type, inter_bandwidth, intra_bandwidth and memory (GiB of a device) per address; the hostfile gives the
devices of each node, `address slots=N` or `address N`, and may repeat an address for several equal nodes. Bandwidths
appear in two units: bytes/s (the README's 312500000.0) and about GB/s (the sample's 10: its cost model takes 2^20
bytes per millisecond). What the file does not say, peaks and latencies, comes from the device registry; its bandwidth
between nodes is taken for one adapter's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from haap_rl.problem.errors import InputError, check_keys, positive_float, shown
from haap_rl.problem.formats.files import read_json_object
from haap_rl.problem.formats.hostfile import slots_by_host
from haap_rl.problem.formats.nodes import DeviceNamed, usual_node, without_node

KEYS = ("instance_type", "inter_bandwidth", "intra_bandwidth", "memory")
LARGEST_GB_PER_S = 1e4  # above any link in GB/s
SMALLEST_BYTES_PER_S = 1e6  # below any link in bytes/s
LARGEST_MEMORY_GIB = 1e4


def read(
    path: object, name: str, hostfile: object, device: object, device_named: DeviceNamed, devices: Sequence[str]
) -> dict[str, Any]:
    """The cluster in the cluster file at `path` and the hostfile (default: the file "hostfile" beside it).

    device: registered device for an instance_type that is none of `devices`. Raises InputError naming file and key.
    """
    entries = read_json_object(path, "Metis cluster file")
    where = f"Metis cluster file {str(path)!r}"
    nodes = slots_by_host(hostfile or Path(str(path)).with_name("hostfile"), repeated=True, bare=True)
    counts: dict[tuple[Any, ...], int] = {}
    for host, slots in nodes:
        if host not in entries:
            raise InputError(
                f"{where}: has no entry for host {shown(host)} of the hostfile; add it, or drop the host there"
            )
        key = (*_entry(f"{where}: {shown(host)}", entries[host]), slots)
        counts[key] = counts.get(key, 0) + 1
    _refuse_ambiguous(where, {str(key[0]) for key in counts}, device, devices)
    groups = [
        _group(where, key, num_nodes, _registered(where, key[0], key[3], device, device_named, devices))
        for key, num_nodes in counts.items()
    ]
    names = [group["name"] for group in groups]
    for index, group in enumerate(groups):
        if names.count(group["name"]) > 1:
            group["name"] = f"{group['name']}_{index}"
    return {"name": name, "groups": groups}


def _entry(where: str, entry: object) -> tuple[str, float, float, float]:
    """(instance type, GB/s between nodes, GB/s within a node, GiB of a device) of one address."""
    if not isinstance(entry, Mapping):
        raise InputError(f"{where}: {shown(entry)} must be an object with the keys {', '.join(KEYS)}")
    check_keys(where, entry, KEYS)
    kind, memory = entry["instance_type"], positive_float(where, "memory", entry["memory"])
    if not isinstance(kind, str) or not kind.isprintable() or not 1 <= len(kind) <= 50:
        raise InputError(f"{where}: instance_type={shown(kind)} must name a device, for example 'A100'")
    if memory > LARGEST_MEMORY_GIB:
        raise InputError(f"{where}: memory={shown(entry['memory'])} must be in GiB, for example 80")
    inter, intra = (_gb_per_s(where, key, entry[key]) for key in ("inter_bandwidth", "intra_bandwidth"))
    return kind, inter, intra, memory


def _gb_per_s(where: str, key: str, value: object) -> float:
    """GB/s of a bandwidth in GB/s or bytes/s, told apart by its size."""
    number = positive_float(where, key, value)
    if LARGEST_GB_PER_S < number < SMALLEST_BYTES_PER_S:
        raise InputError(
            f"{where}: {key}={shown(value)} is neither GB/s (up to {LARGEST_GB_PER_S:.0f}) nor bytes/s (from "
            f"{SMALLEST_BYTES_PER_S:.0f}); give it in one of them"
        )
    return number if number <= LARGEST_GB_PER_S else number / 1e9


def _refuse_ambiguous(where: str, kinds: set[str], device: object, devices: Sequence[str]) -> None:
    unknown = sorted(kind for kind in kinds if not _candidates(kind, devices))
    if unknown and (device is None or len(unknown) > 1):
        raise InputError(
            f"{where}: instance_type {', '.join(map(shown, unknown))} is no registered device; give its peak with "
            f"cluster.device=NAME (for one unknown type), or use one of {', '.join(devices)}"
        )


def _candidates(kind: str, devices: Sequence[str]) -> list[str]:
    """Registered devices of the family that an instance type names: "A100" -> a100_40, a100_80, ..."""
    wanted = kind.lower().replace("-", "_").replace(" ", "_")
    exact = [name for name in devices if name == wanted]
    return exact or [name for name in devices if name.startswith(f"{wanted}_")]


def _registered(
    where: str, kind: str, memory_gib: float, device: object, device_named: DeviceNamed, devices: Sequence[str]
) -> Mapping[str, Any]:
    """The registered device of an instance type: of several, the one whose memory is nearest, SXM before PCIe."""
    names = _candidates(kind, devices)
    if not names:
        return device_named(str(device))
    found = [device_named(name) for name in names]
    return min(found, key=lambda one: (abs(one["memory_gib"] - memory_gib), len(one["name"])))


def _group(where: str, key: tuple[Any, ...], num_nodes: int, known: Mapping[str, Any]) -> dict[str, Any]:
    _, inter, intra, memory_gib, slots = key
    node = usual_node(where, known)
    device = {**without_node(known), "memory_gib": memory_gib}
    if memory_gib != known["memory_gib"]:
        device["name"] = f"{known['name']}_{memory_gib:g}gib"
    return {
        "name": device["name"],
        "device": device,
        "num_nodes": num_nodes,
        "devices_per_node": slots,
        "intra_node": {"latency_us": node["intra_node"]["latency_us"], "bandwidth_gb_per_s": intra},
        "inter_node": {"latency_us": node["inter_node"]["latency_us"], "bandwidth_gb_per_s": inter},
    }
