"""The text that `nvidia-smi topo -m` prints -> the mapping of a `conf/cluster/*.yaml`: one node, or several like it.

The table says how each pair of GPUs is joined: NV# (a bond of # NVLinks), or over PCIe: PIX (one bridge), PXB
(several), PHB (the host bridge), NODE (several host bridges), SYS (between sockets). Columns of NICs and affinities,
colour codes, prompt lines before the table and the legend after it are skipped. MIG slices are refused: they share one
device.

The link of a node: if NVLinks join all GPUs, those of a GPU together (behind a switch every pair shows all of them, in
a mesh they add up), the worst GPU counting; otherwise the device's PCIe. Link speeds come from the device registry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from haap_rl.problem.errors import InputError, positive_int, shown
from haap_rl.problem.formats.files import read_text
from haap_rl.problem.formats.nodes import DeviceNamed, links, required_device, usual_node, without_node

PCIE = ("PIX", "PXB", "PHB", "NODE", "SYS", "SOC")  # SOC is what older drivers call SYS
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_GPU = re.compile(r"GPU[0-9]{1,4}", re.ASCII)
_NIC = re.compile(r"[A-Za-z][A-Za-z0-9_.:-]{0,40}", re.ASCII)  # NIC0, or mlx5_0 with older drivers
_NVLINK = re.compile(r"NV([0-9]{1,3})", re.ASCII)
MOST_GPUS = 1024


def read(
    path: object,
    name: str,
    device: object,
    device_named: DeviceNamed,
    num_nodes: object = 1,
    intra: object = None,
    inter: object = None,
) -> dict[str, Any]:
    """The cluster of `num_nodes` nodes like the one printed at `path`. Raises InputError naming the line."""
    where = f"topology file {str(path)!r}"
    matrix = pairs(where, read_text(path, "topology file"))
    known = required_device(where, device, device_named)
    if intra is None and len(matrix) > 1:
        intra = _intra_node(where, matrix, known)
    group = {
        "name": str(known["name"]),
        "device": without_node(known),
        "num_nodes": positive_int(where, "num_nodes", num_nodes),
        "devices_per_node": len(matrix),
        **links(where, known, intra, inter),
    }
    return {"name": name, "groups": [group]}


def pairs(where: str, text: str) -> list[list[int]]:
    """NVLinks between each pair of GPUs, 0 where they are joined over PCIe: a symmetric matrix of counts."""
    lines = _COLOUR.sub("", text).split("\n")
    header, columns = _header(where, lines)
    num_gpus = sum(1 for column in columns if _GPU.fullmatch(column))
    rows: dict[str, list[int]] = {}
    for number in range(header + 1, len(lines)):
        cells = lines[number].split()
        if not cells:
            continue
        if "legend" in lines[number].lower():
            break
        if cells[0] not in columns:
            raise InputError(
                f"{where}: line {number + 1}: row {shown(cells[0])} is none of the columns; "
                + ("switch MIG off, slices share a device" if "MIG" in cells[0] else "give the table alone")
            )
        if cells[0] in rows:
            raise InputError(f"{where}: line {number + 1}: row {shown(cells[0])} is there twice; give one table")
        rows[cells[0]] = _row(f"{where}: line {number + 1}", cells, columns)
    if missing := [column for column in columns[:num_gpus] if column not in rows]:
        raise InputError(f"{where}: row {missing[0]} is missing; give the whole table that nvidia-smi topo -m prints")
    matrix = [rows[column][:num_gpus] for column in columns[:num_gpus]]
    for i in range(num_gpus):
        for j in range(i):
            if matrix[i][j] != matrix[j][i]:
                raise InputError(
                    f"{where}: {columns[i]}-{columns[j]} and {columns[j]}-{columns[i]} differ; print the table again"
                )
    return matrix


def _header(where: str, lines: Sequence[str]) -> tuple[int, list[str]]:
    """(index of the header line, its columns of GPUs and NICs, the GPUs first)."""
    for index, line in enumerate(lines):
        cells = line.split()
        if len(cells) < 1 or cells[0] != "GPU0" or (len(cells) > 1 and cells[1] == "X"):
            continue
        end = next((i for i, cell in enumerate(cells) if cell in ("CPU", "NUMA", "GPU")), len(cells))
        columns = cells[:end]
        if any("MIG" in cell for cell in columns):
            raise InputError(f"{where}: line {index + 1} has MIG slices, which share a device; switch MIG off")
        num_gpus = sum(1 for column in columns if _GPU.fullmatch(column))
        expected = [f"GPU{i}" for i in range(num_gpus)]
        named = all(_NIC.fullmatch(column) for column in columns)
        if columns[:num_gpus] != expected or len(set(columns)) != len(columns) or num_gpus > MOST_GPUS or not named:
            raise InputError(
                f"{where}: line {index + 1}: the columns must be GPU0, GPU1, ... (at most {MOST_GPUS}) and then NICs, "
                "each once; print the table again"
            )
        return index, columns
    raise InputError(f"{where}: has no line that starts with GPU0; save what nvidia-smi topo -m prints")


def _row(where: str, cells: Sequence[str], columns: Sequence[str]) -> list[int]:
    """NVLinks of one row's cells; every cell must be a known symbol."""
    if len(cells) <= len(columns):
        raise InputError(
            f"{where}: row {cells[0]} has {len(cells) - 1} cells for {len(columns)} columns; is it cut off?"
        )
    counts = []
    for column, cell in zip(columns, cells[1 : len(columns) + 1], strict=True):
        nvlinks = _NVLINK.fullmatch(cell)
        if (cell == "X") != (column == cells[0]) or not (nvlinks or cell == "X" or cell in PCIE):
            way_out = "switch MIG off" if "MIG" in cell else "print the table again"
            raise InputError(
                f"{where}: {cells[0]}-{column} is {shown(cell)}, not one of NV#, {', '.join(PCIE)} (X for itself); "
                f"{way_out}"
            )
        counts.append(int(nvlinks[1]) if nvlinks else 0)
    return counts


def _intra_node(where: str, matrix: Sequence[Sequence[int]], device: Mapping[str, Any]) -> dict[str, Any]:
    """The link among the GPUs of the node: NVLink if it joins all of them, else PCIe."""
    node = usual_node(where, device)
    latency_us = node["intra_node"]["latency_us"]
    name = shown(device["name"])
    if any(any(row) for row in matrix) and "nvlink" not in node:
        raise InputError(f"{where}: shows NVLinks but device {name} has none; give the right cluster.device")
    if _joined(matrix):
        nvlink = node["nvlink"]
        most = nvlink["links"]
        if (widest := max(max(row) for row in matrix)) > most:
            raise InputError(
                f"{where}: shows NV{widest} but device {name} has {most} NVLinks; give the right cluster.device"
            )
        used = min(min(sum(row), most) for row in matrix)
        return {"latency_us": latency_us, "bandwidth_gb_per_s": used * nvlink["bandwidth_gb_per_s"]}
    if "pcie_gb_per_s" not in node:
        raise InputError(f"{where}: device {name} has no known PCIe speed; give cluster.intra_node")
    return {"latency_us": latency_us, "bandwidth_gb_per_s": node["pcie_gb_per_s"]}


def _joined(matrix: Sequence[Sequence[int]]) -> bool:
    """Whether NVLinks lead from each GPU to every other, possibly through others."""
    reached, frontier = {0}, [0]
    while frontier:
        row = matrix[frontier.pop()]
        new = [other for other, count in enumerate(row) if count and other not in reached]
        reached.update(new)
        frontier.extend(new)
    return len(reached) == len(matrix)
