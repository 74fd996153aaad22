"""Where a plan's replicas sit. Placement is a function of the plan, never a choice of its own."""

from __future__ import annotations

from typing import NamedTuple

from haap_rl.problem.cluster import Cluster
from haap_rl.problem.plan import Plan


class Placement(NamedTuple):
    """Consecutive devices of one device group, counted node after node."""

    first_device: int
    first_node: int
    num_nodes: int  # nodes that the replica group touches
    tp_nodes: int  # nodes that its widest-spread tensor-parallel replica touches


def place(cluster: Cluster, plan: Plan) -> list[list[Placement]]:
    """Placement of each replica group of each stage, in the plan's order.

    Per device group, larger replica groups come first and equal ones in pipeline order: groups whose sizes are powers
    of two then never straddle a node needlessly, and no device is wasted. The plan must be legal.
    """
    placed = [[Placement(0, 0, 1, 1)] * len(stage.replicas) for stage in plan.stages]
    waiting: dict[str, list[tuple[int, int, int, int]]] = {}
    for i, stage in enumerate(plan.stages):
        for j, replica in enumerate(stage.replicas):
            waiting.setdefault(replica.group, []).append((-replica.tp * replica.dp, i, j, replica.tp))
    for group in cluster.groups:
        offset, per_node = 0, group.devices_per_node
        for minus_devices, i, j, tp in sorted(waiting.get(group.name, ())):
            end = offset - minus_devices
            node, last_node = offset // per_node, (end - 1) // per_node
            tp_nodes = 1
            if node != last_node and (offset % tp or per_node % tp):
                tp_nodes = max((k + tp - 1) // per_node - k // per_node + 1 for k in range(offset, end, tp))
            placed[i][j] = Placement(offset, node, last_node - node + 1, tp_nodes)
            offset = end
    return placed
