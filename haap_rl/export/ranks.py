"""Which process runs what: rank -> host, device, stage, replica, tensor-parallel index, in the order of placement.

Ranks run stage after stage, replica after replica, tensor-parallel index fastest: the order of Megatron-LM
("tp-dp-pp"), torchtitan (its mesh is pipeline outermost, tensor innermost) and FlagScale's meshes. torchrun numbers
processes launch after launch, so every maximal run of ranks on one host is a launch of its own, with its own devices
visible; a host of two launches runs torchrun twice. Hosts have the names of their device groups, `a100-0`; what counts
is their order.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import NamedTuple

from haap_rl.problem.cluster import Cluster
from haap_rl.problem.errors import InputError, shown
from haap_rl.problem.placement import place
from haap_rl.problem.plan import Plan

NAME = "ranks"
HOSTFILE, RANKS = "hostfile", "ranks.csv"

# lines of a shell script after LAUNCH, DEVICES and what else a trainer wants: what torchrun starts comes behind them
TORCHRUN = """\
export CUDA_VISIBLE_DEVICES=${DEVICES[LAUNCH]}
commas=${CUDA_VISIBLE_DEVICES//[^,]/}
exec torchrun --nnodes "${#DEVICES[@]}" --node-rank "$LAUNCH" --nproc-per-node "$(( ${#commas} + 1 ))" \\
  --master-addr "${MASTER_ADDR:?the host of the first line of hostfile}" --master-port "${MASTER_PORT:-29500}" \\
"""


class Rank(NamedTuple):
    """One process. `node` counts the nodes of its device group, `device` those of its node."""

    rank: int
    host: str
    group: str
    node: int
    device: int
    stage: int
    replica: int  # of its stage, replica groups one after another
    tp_index: int


class Launch(NamedTuple):
    """One torchrun: processes with consecutive ranks on devices of one host, in that order."""

    host: str
    devices: tuple[int, ...]


def rank_table(cluster: Cluster, plan: Plan) -> tuple[Rank, ...]:
    """Every process of a legal plan, in order, where `problem.placement` puts it."""
    table: list[Rank] = []
    per_node = {group.name: group.devices_per_node for group in cluster.groups}
    host = _host_names(cluster)
    for i, (stage, placed) in enumerate(zip(plan.stages, place(cluster, plan), strict=True)):
        replica = 0
        for group, where in zip(stage.replicas, placed, strict=True):
            for k in range(group.num_devices):
                node, device = divmod(where.first_device + k, per_node[group.group])
                name = f"{host[group.group]}-{node}"
                index = replica + k // group.tp
                table.append(Rank(len(table), name, group.group, node, device, i, index, k % group.tp))
            replica += group.dp
    return tuple(table)


def launches(table: Sequence[Rank]) -> tuple[Launch, ...]:
    """The torchruns that give every process its rank, in the order of their node ranks."""
    runs: list[Launch] = []
    for rank in table:
        if runs and runs[-1].host == rank.host:
            runs[-1] = Launch(rank.host, (*runs[-1].devices, rank.device))
        else:
            runs.append(Launch(rank.host, (rank.device,)))
    return tuple(runs)


def files(cluster: Cluster, plan: Plan) -> dict[str, str]:
    """ranks.csv and hostfile of any legal plan."""
    table = rank_table(cluster, plan)
    return {RANKS: ranks_csv(table), HOSTFILE: hostfile(launches(table))}


def ranks_csv(table: Sequence[Rank]) -> str:
    """The table as CSV with a header."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Rank._fields)
    writer.writerows(table)
    return text.getvalue()


def hostfile(runs: Sequence[Launch], types: Sequence[str] | None = None) -> str:
    """A line `host slots=N` for each launch, with its device type where the trainer wants one."""
    kinds = ["" for _ in runs] if types is None else [f" type={kind}" for kind in types]
    lines = [f"{run.host} slots={len(run.devices)}{kind}" for run, kind in zip(runs, kinds, strict=True)]
    return "\n".join(lines) + "\n"


def read_hosts(cluster: Cluster, text: str, where: str) -> list[str]:
    """Device group of each rank, from the lines of a hostfile. Raises InputError naming the line."""
    groups = {name: group for group, name in _host_names(cluster).items()}
    of_rank: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        found = re.fullmatch(r"(\S+)-([0-9]{1,16}) slots=([0-9]{1,9})(?: type=\S+)?", line, re.ASCII)
        if not found:
            raise InputError(f"{where}: line {number} {shown(line)} is not 'host slots=N'; write it as it was exported")
        name, node, slots = found[1], int(found[2]), int(found[3])
        group = groups.get(name)
        if group is None or node >= cluster.groups[cluster.index(group)].num_nodes:
            raise InputError(f"{where}: line {number}: cluster {cluster.name!r} has no host {shown(name)}-{node}")
        if not 1 <= slots <= cluster.groups[cluster.index(group)].devices_per_node:
            raise InputError(f"{where}: line {number}: slots={slots} is no number of devices of host {name}-{node}")
        of_rank += [group] * slots
    return of_rank


def visible(runs: Sequence[Launch]) -> str:
    """Devices of each launch as a shell array wants them: `0,1,2,3 0,1`."""
    return " ".join(",".join(map(str, run.devices)) for run in runs)


def check_places(cluster: Cluster, plan: Plan, where: str, hosts: str, devices: str) -> None:
    """Raise InputError unless hostfile and devices put every process where the plan does, on which its price rests."""
    runs = launches(rank_table(cluster, plan))
    wanted, given = hostfile(runs).splitlines(), hosts.splitlines()
    for number, line in enumerate(wanted, start=1):
        if len(given) < number or given[number - 1] != line:
            raise InputError(f"{where}: {HOSTFILE}: line {number} must be {line!r}, with which the plan was priced")
    if len(given) != len(wanted) or devices.split() != visible(runs).split():
        raise InputError(
            f"{where}: devices={shown(devices[:80])} of {len(given)} hosts must be {shown(visible(runs)[:80])} of "
            f"{len(wanted)}, with which the plan was priced"
        )


def _host_names(cluster: Cluster) -> dict[str, str]:
    """What the hosts of each device group are called before their number: no spaces, each its own."""
    names: dict[str, str] = {}
    for index, group in enumerate(cluster.groups):
        name = re.sub(r"[^A-Za-z0-9._-]", "-", group.name)
        while name in names.values():
            name += f"-g{index}"
        names[group.name] = name
    return names
