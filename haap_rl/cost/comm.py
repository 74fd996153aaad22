"""Seconds of collectives and transfers in the alpha-beta model: plain scalar functions.

A link has a latency alpha and a reachable bandwidth. Three tiers: inside a node (per device), between nodes (the NIC
is shared by the devices of the node), between device groups. A group of ranks that straddles nodes pays the slow one.
"""

from __future__ import annotations

import math


def ring_pass_s(num_bytes: float, num_ranks: float, latency_s: float, bytes_per_s: float) -> float:
    """Seconds of a ring reduce-scatter, or of a ring all-gather, of `num_bytes` per rank.

    (n-1) alpha + (n-1)/n * bytes / bandwidth; nothing for nothing
    Source: Thakur, Rabenseifner, Gropp 2005.
    """
    if num_ranks <= 1 or num_bytes <= 0.0:
        return 0.0
    return (num_ranks - 1) * latency_s + (num_ranks - 1) / num_ranks * num_bytes / bytes_per_s


def ring_all_reduce_s(num_bytes: float, num_ranks: float, latency_s: float, bytes_per_s: float) -> float:
    """Seconds of a ring all-reduce of `num_bytes` per rank: a reduce-scatter, then an all-gather."""
    return 2.0 * ring_pass_s(num_bytes, num_ranks, latency_s, bytes_per_s)


def tree_all_reduce_s(num_bytes: float, num_ranks: float, latency_s: float, bytes_per_s: float) -> float:
    """Seconds of a double binary tree all-reduce of `num_bytes` per rank.

    2 ceil(log2 n) alpha + 2 bytes / bandwidth
    Source: Sanders, Speck, Traeff 2009 (two complementary trees, as in NCCL since 2.4).
    """
    if num_ranks <= 1:
        return 0.0
    return 2.0 * math.ceil(math.log2(num_ranks)) * latency_s + 2.0 * num_bytes / bytes_per_s


def gradient_sync_s(
    num_bytes: float,
    gather_bytes: float,
    ranks_per_node: float,
    num_nodes: float,
    rings_per_node: float,
    nics_per_node: float,
    intra_latency_s: float,
    intra_bytes_per_s: float,
    inter_latency_s: float,
    node_bytes_per_s: float,
    all_reduce: bool = True,
) -> float:
    """Seconds to reduce-scatter `num_bytes` and all-gather `gather_bytes` per rank over dp replicas on some nodes.

    ranks_per_node  replicas of one ring in each node (dp / num_nodes)
    rings_per_node  rings that run at once in a node, one per tensor-parallel rank: they share the node's NICs, whose
                    bandwidth together is `node_bytes_per_s`; a rank reaches one of `nics_per_node`

    Inside one node: a ring over the node's links (NCCL's trees are chains there). Across nodes the faster of
      flat          one ring over all ranks; it enters and leaves each node once, so a ring has NIC / rings_per_node;
                    where the two of equal size are one all-reduce, a double tree is tried too
      hierarchical  reduce-scatter in the node, rings of the shards between nodes (all of a node's shards share the
                    NIC), all-gather in the node
    """
    ranks = ranks_per_node * num_nodes
    if ranks <= 1:
        return 0.0
    if num_nodes <= 1:
        rings = ring_pass_s(num_bytes, ranks, intra_latency_s, intra_bytes_per_s)
        rings += ring_pass_s(gather_bytes, ranks, intra_latency_s, intra_bytes_per_s)
        return rings
    inter_latency_s = max(intra_latency_s, inter_latency_s)  # what leaves a node passes its links first
    ring_bytes_per_s = node_bytes_per_s / max(rings_per_node, nics_per_node / max(ranks_per_node, 1.0))
    bytes_per_s = min(intra_bytes_per_s, ring_bytes_per_s)
    flat = ring_pass_s(num_bytes, ranks, inter_latency_s, bytes_per_s)
    flat += ring_pass_s(gather_bytes, ranks, inter_latency_s, bytes_per_s)
    if all_reduce and gather_bytes == num_bytes:
        flat = min(flat, tree_all_reduce_s(num_bytes, ranks, inter_latency_s, bytes_per_s))
    shards = max(ranks_per_node, 1.0)
    shard_bytes_per_s = min(intra_bytes_per_s, node_bytes_per_s / max(rings_per_node * shards, nics_per_node))
    hierarchical = ring_pass_s(num_bytes, ranks_per_node, intra_latency_s, intra_bytes_per_s)
    hierarchical += ring_pass_s(num_bytes / shards, num_nodes, inter_latency_s, shard_bytes_per_s)
    hierarchical += ring_pass_s(gather_bytes / shards, num_nodes, inter_latency_s, shard_bytes_per_s)
    hierarchical += ring_pass_s(gather_bytes, ranks_per_node, intra_latency_s, intra_bytes_per_s)
    return min(flat, hierarchical)


def exposed_s(comm_s: float, compute_s: float, hidden: float) -> float:
    """Seconds of `comm_s` of traffic that are not hidden behind `compute_s` of compute that it may overlap.

    The share `hidden` of it can be hidden at best, and never more than there is compute to hide behind.
    """
    return max(comm_s - compute_s, (1.0 - hidden) * comm_s)


def transfer_s(num_bytes: float, latency_s: float, bytes_per_s: float) -> float:
    """Seconds to move `num_bytes` over one link."""
    return latency_s + num_bytes / bytes_per_s
