"""The cluster and the plan on it: which layers a stage holds, on which devices it sits, and how it divides them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

from haap_rl.problem.cluster import GIB, DeviceGroup, Link
from haap_rl.problem.placement import place
from haap_rl.problem.plan import Plan, Problem
from haap_rl.report.markup import Markup, joined
from haap_rl.report.svg import CHARACTER, STAGE_COLOURS, WIDTH, cuts, legend, picture, rectangle, short, text

CELLS = ((64, 26.0), (160, 20.0), (640, 13.0), (4096, 9.0))  # most devices of the cluster, pixels of each
NUMBERED = 13.0  # pixels of a device from which on its stage is written in it
STRIP = 30.0  # height of the strip of layers


class Owner(NamedTuple):
    """Whose a device is: a replica of a stage."""

    stage: int
    replica_group: int
    replica: int
    tp: int


def plan_picture(problem: Problem, plan: Plan | None) -> Markup:
    """The model's layers as a strip cut into stages, and each device group with its nodes, devices and their stages.

    Devices of one tensor-parallel replica are drawn in one piece. Without a plan: the idle cluster.
    """
    parts, y = [], 16.0
    if plan is not None:
        strip, y = _layers(problem, plan, y)
        parts.append(strip)
    owners = _owners(problem, plan)
    for group in problem.cluster.groups:
        drawing, y = _group(problem, plan, group, owners[group.name], y)
        parts.append(drawing)
    label = f"{problem.model.name} on {problem.cluster.name}" + ("" if plan else ", no plan")
    return picture(label, _told(problem, plan), y - 24, *parts)


def stage_class(stage: int) -> str:
    return f"stage{stage % STAGE_COLOURS}"


def layer_runs(plan: Plan) -> Iterator[tuple[int, int, str]]:
    """(stage, units, name) of every run of consecutive units, from the embedding to the head.

    A stage is one run; where stages interleave, each has one per chunk.
    """
    last = len(plan.stages) - 1
    for chunk in range(plan.virtual_stages):
        for i, stage in enumerate(plan.stages):
            first, final = i == 0 and chunk == 0, i == last and chunk == plan.virtual_stages - 1
            layers = (stage.num_units - (i == 0) - (i == last)) // plan.virtual_stages
            yield i, layers + first + final, ("E+" if first else "") + str(layers) + ("+H" if final else "")


def _layers(problem: Problem, plan: Plan, y: float) -> tuple[Markup, float]:
    """The strip of the model's layers, and the y below it."""
    unit = WIDTH / problem.model.num_units
    parts: list[Markup | None] = [
        text(0, y, f"layers of {short(problem.model.name, 60)} (E: embedding, H: head)", class_="head")
    ]
    x, y = 0.0, y + 8
    for stage, units, name in layer_runs(plan):
        width = units * unit
        parts.append(rectangle(x, y, width, STRIP, stage_class(stage), f"stage {stage}: {name} layers"))
        if unit >= 5:
            parts.append(cuts((x + k * unit for k in range(1, units)), y, STRIP))
        names = (f"stage {stage}: {name} layers", f"{stage}: {name}", str(stage))
        written = next((long for long in names if CHARACTER * len(long) < width - 4), None)
        if written:
            parts.append(text(x + width / 2, y + STRIP / 2 + 4, written, "middle", "on"))
        x += width
        parts.append(rectangle(x - 1, y, 2, STRIP, "gap"))
    return joined(*parts), y + STRIP + 30


def _group(
    problem: Problem, plan: Plan | None, group: DeviceGroup, owners: Mapping[int, Owner], y: float
) -> tuple[Markup, float]:
    """One device group: what it is, which stages sit there, its devices; and the y below it."""
    nodes = f"{group.num_nodes:,} node{'s' * (group.num_nodes > 1)} of {group.devices_per_node}"
    device = f"{short(group.device.name, 40)}, {group.device.memory_bytes / GIB:.4g} GiB each"
    links = _rate(group.intra_node) + " inside a node"
    if problem.cluster.num_devices > group.devices_per_node:
        nics = f", {group.nics_per_node} adapters" if group.nics_per_node > 1 else ""
        links += f", {_rate(group.inter_node)} between nodes{nics}"
    parts = [
        text(0, y, f"{short(group.name, 60)}: {nodes} {device}", class_="head"),
        text(0, y + 18, links, class_="soft"),
    ]
    y += 38
    if plan is not None:
        entries = [
            (stage_class(i), f"stage {i}: tp {r.tp} × dp {r.dp}, micro-batch {r.microbatch_size}")
            for i, stage in enumerate(plan.stages)
            for r in stage.replicas
            if r.group == group.name
        ]
        idle = group.num_devices - len(owners)
        if idle:
            entries.append(("idle", f"{idle:,} idle" if entries else "not used"))
        names, y = legend(entries, 0, y)
        parts.append(names)
    devices, y = _devices(problem.cluster.num_devices, group, owners, y - 6)
    return joined(*parts, devices), y + 32


def _devices(devices_in_all: int, group: DeviceGroup, owners: Mapping[int, Owner], y: float) -> tuple[Markup, float]:
    """Nodes as frames that hold their devices, wrapped at the picture's width; one bar where there are too many."""
    cell = next((size for most, size in CELLS if devices_in_all <= most), None)
    if cell is None:
        return _proportions(group, owners, y), y + 30
    columns = min(group.devices_per_node, int((WIDTH - 10) // cell))
    rows = -(-group.devices_per_node // columns)
    node_width, node_height = columns * cell + 8, rows * cell + 8
    per_line = max(1, int((WIDTH + 8) // (node_width + 8)))
    parts: list[Markup] = []
    for node in range(group.num_nodes):
        left, top = node % per_line * (node_width + 8), y + node // per_line * (node_height + 8)
        parts.append(rectangle(left, top, node_width, node_height, "node", f"{group.name}, node {node}", 5))
        for row in range(rows):
            here = range(row * columns, min((row + 1) * columns, group.devices_per_node))
            owned = [(k, owners.get(node * group.devices_per_node + k)) for k in here]
            for owner, run in groupby(owned, lambda pair: pair[1]):
                columns_here = [k - row * columns for k, _ in run]
                x, count = left + 4 + columns_here[0] * cell, len(columns_here)
                parts.append(_replica(owner, x + 1, top + 5 + row * cell, count, cell))
    lines = -(-group.num_nodes // per_line)
    return joined(*parts), y + lines * (node_height + 8)


def _replica(owner: Owner | None, x: float, y: float, count: int, cell: float) -> Markup:
    """Neighbouring devices of one tensor-parallel replica, or idle ones."""
    size, corner = cell - 2, 4 if cell >= NUMBERED else 2
    if owner is None:
        return joined(*(rectangle(x + k * cell, y, size, size, "idle", "idle", corner) for k in range(count)))
    title = f"stage {owner.stage}, replica {owner.replica}: tp {owner.tp}"
    parts: list[Markup | None] = [rectangle(x, y, count * cell - 2, size, stage_class(owner.stage), title, corner)]
    parts.append(cuts((x + k * cell - 1 for k in range(1, count)), y, size))
    if cell >= NUMBERED:
        parts.append(text(x + (count * cell - 2) / 2, y + size / 2 + 4, owner.stage, "middle", "on"))
    return joined(*parts)


def _proportions(group: DeviceGroup, owners: Mapping[int, Owner], y: float) -> Markup:
    """A bar of the group's devices by stage."""
    parts, x, unit = [rectangle(0, y, WIDTH, 22, "idle")], 0.0, WIDTH / group.num_devices
    for stage, run in groupby(owner.stage for owner in owners.values()):
        width = len(list(run)) * unit
        parts.append(rectangle(x, y, width, 22, stage_class(stage), f"stage {stage}"))
        if width > 20:
            parts.append(text(x + width / 2, y + 15, stage, "middle", "on"))
        x += width
    return joined(*parts)


def _owners(problem: Problem, plan: Plan | None) -> dict[str, dict[int, Owner]]:
    """Per device group, the owner of each device that is used, in the devices' order."""
    owners: dict[str, dict[int, Owner]] = {group.name: {} for group in problem.cluster.groups}
    placed = place(problem.cluster, plan) if plan is not None else []
    for i, (stage, places) in enumerate(zip(plan.stages if plan is not None else (), placed, strict=True)):
        for j, (replicas, where) in enumerate(zip(stage.replicas, places, strict=True)):
            for k in range(replicas.num_devices):
                owners[replicas.group][where.first_device + k] = Owner(i, j, k // replicas.tp, replicas.tp)
    return {name: dict(sorted(devices.items())) for name, devices in owners.items()}


def _told(problem: Problem, plan: Plan | None) -> str:
    """The picture in words."""
    groups = "; ".join(
        f"{group.name} has {group.num_nodes} nodes of {group.devices_per_node} {group.device.name}"
        for group in problem.cluster.groups
    )
    if plan is None:
        return f"{groups}. No plan was found."
    stages = "; ".join(
        f"stage {i} holds {stage.num_units} of the {problem.model.num_units} units on "
        + " and ".join(f"{r.num_devices} {r.group} (tp {r.tp}, dp {r.dp})" for r in stage.replicas)
        for i, stage in enumerate(plan.stages)
    )
    return f"{groups}. {stages}."


def _rate(link: Link) -> str:
    return f"{link.bandwidth_bytes_per_s / 1e9:.4g} GB/s"
