"""Device groups as readers write them: what the file says of a node, and the rest from what its device usually has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from haap_rl.problem.cluster import link_from_config
from haap_rl.problem.errors import InputError, check_keys, positive_float, positive_int, shown

DeviceNamed = Callable[[str], Mapping[str, Any]]  # a registered device's mapping; InputError for an unknown name


def required_device(where: str, device: object, device_named: DeviceNamed) -> Mapping[str, Any]:
    """The mapping of the device that the command line names, for files that do not say what their devices are."""
    if not isinstance(device, str):
        raise InputError(
            f"{where}: the file does not say which devices it has; give one of conf/device, for example "
            "cluster.device=a100_80"
        )
    return device_named(device)


def usual_node(where: str, device: Mapping[str, Any]) -> Mapping[str, Any]:
    """The checked `node` block of a device: devices_per_node, intra_node, inter_node and, where it has them,
    nvlink (links of a device and GB/s of one link per direction) and pcie_gb_per_s."""
    name = device.get("name")
    node = device.get("node")
    if not isinstance(node, Mapping):
        raise InputError(
            f"{where}: device {shown(name)} does not say in which node it usually comes; give "
            "cluster.intra_node and cluster.inter_node, or write the cluster as YAML"
        )
    place = f"device {shown(name)}: node"
    check_keys(
        place, node, ("devices_per_node", "intra_node", "inter_node"), ("nics_per_node", "nvlink", "pcie_gb_per_s")
    )
    positive_int(place, "devices_per_node", node["devices_per_node"])
    positive_int(place, "nics_per_node", node.get("nics_per_node", 1))
    for key in ("intra_node", "inter_node"):
        link_from_config(f"{place}.{key}", node[key])
    if "pcie_gb_per_s" in node:
        positive_float(place, "pcie_gb_per_s", node["pcie_gb_per_s"])
    if "nvlink" in node:
        check_keys(f"{place}.nvlink", node["nvlink"], ("links", "bandwidth_gb_per_s"))
        positive_int(f"{place}.nvlink", "links", node["nvlink"]["links"])
        positive_float(f"{place}.nvlink", "bandwidth_gb_per_s", node["nvlink"]["bandwidth_gb_per_s"])
    return node


def links(where: str, device: Mapping[str, Any], intra: object, inter: object) -> dict[str, Any]:
    """intra_node and inter_node of a group of `device`: those given on the command line, else the usual ones.

    nics_per_node comes with the usual network; a network that is given is one adapter.
    """
    chosen: dict[str, Any] = {}
    for key, given in (("intra_node", intra), ("inter_node", inter)):
        link: Any = usual_node(where, device)[key] if given is None else given
        link_from_config(f"{where}: cluster.{key}", link)
        chosen[key] = dict(link)
    if inter is None and "nics_per_node" in (node := usual_node(where, device)):
        chosen["nics_per_node"] = node["nics_per_node"]
    return chosen


def without_node(device: Mapping[str, Any]) -> dict[str, Any]:
    """A device's mapping as a cluster writes it down: what it is, not where it usually sits."""
    return {key: value for key, value in device.items() if key not in ("node", "source")}
