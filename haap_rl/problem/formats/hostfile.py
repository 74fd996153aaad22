"""A DeepSpeed hostfile (`host slots=N`) -> the mapping of a `conf/cluster/*.yaml`.

Hosts with equally many slots are one device group. The file says nothing about devices and links: the device is named
on the command line and its links are those of the node it usually comes in, unless given.
"""

from __future__ import annotations

import re
from typing import Any

from haap_rl.problem.errors import InputError, shown
from haap_rl.problem.formats.files import read_text
from haap_rl.problem.formats.nodes import DeviceNamed, links, required_device, without_node

MOST_SLOTS = 1024  # devices of one host


def read(
    path: object, name: str, device: object, device_named: DeviceNamed, intra: object = None, inter: object = None
) -> dict[str, Any]:
    """The cluster in the hostfile at `path`. Raises InputError naming the line for anything but `host slots=N`."""
    hosts = slots_by_host(path)
    where = f"hostfile {str(path)!r}"
    known = required_device(where, device, device_named)
    sizes = list(dict.fromkeys(slots for _, slots in hosts))
    chosen = links(where, known, intra, inter)
    groups = [
        {
            "name": str(known["name"]) if len(sizes) == 1 else f"{known['name']}_x{size}",
            "device": without_node(known),
            "num_nodes": sum(slots == size for _, slots in hosts),
            "devices_per_node": size,
            **chosen,
        }
        for size in sizes
    ]
    return {"name": name, "groups": groups}


def slots_by_host(path: object, repeated: bool = False, bare: bool = False) -> list[tuple[str, int]]:
    """(host, slots) of each line of the hostfile at `path`; `#` starts a comment.

    repeated: a host may stand on several lines. bare: `host N` is taken too. Raises InputError naming the line.
    """
    where = f"hostfile {str(path)!r}"
    form = re.compile(r"(\S+)\s+(?:slots=)?([0-9]{1,9})" if bare else r"(\S+)\s+slots=([0-9]{1,9})", re.ASCII)
    first_line: dict[str, int] = {}
    hosts: list[tuple[str, int]] = []
    for number, text in enumerate(read_text(path, "hostfile").split("\n"), start=1):
        line = text.partition("#")[0].strip()
        if not line:
            continue
        found = form.fullmatch(line)
        if not found:
            raise InputError(
                f"{where}: line {number} {shown(line)} is not 'host slots=N'; write for example 'worker-1 slots=8'"
            )
        host, slots = found[1], int(found[2])
        if not 1 <= slots <= MOST_SLOTS:
            raise InputError(
                f"{where}: line {number}: slots={slots} must be from 1 to {MOST_SLOTS}; give the devices of that host"
            )
        if host in first_line and not repeated:
            raise InputError(
                f"{where}: line {number}: host {shown(host)} is already on line {first_line[host]}; keep one of them"
            )
        first_line.setdefault(host, number)
        hosts.append((host, slots))
    if not hosts:
        raise InputError(f"{where}: names no host; write lines like 'worker-1 slots=8'")
    return hosts
