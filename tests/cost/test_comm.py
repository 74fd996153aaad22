"""Collectives and transfers by hand: whole seconds from round numbers."""

import pytest

from haap_rl.cost import comm


def test_ring_all_reduce_inside_a_node():
    # 4 ranks, 8 bytes each, 1 s latency, 2 bytes/s: 2 x (3 steps x 1 s + 3/4 x 8 / 2) = 2 x (3 + 3) = 12
    assert comm.ring_all_reduce_s(8, 4, 1.0, 2.0) == 12


def test_tree_wins_for_small_messages_and_many_nodes():
    # 16 ranks, 1 byte at 1 byte/s, 1 s latency: ring 2 x (15 + 15/16), tree 2 x 4 x 1 + 2 x 1
    assert comm.tree_all_reduce_s(1, 16, 1.0, 1.0) == 10
    # 16 nodes of one rank each: an all-reduce takes the faster of the two
    assert comm.gradient_sync_s(1, 1, 1, 16, 1, 1, 1.0, 1.0, 1.0, 1.0) == 10
    large = comm.gradient_sync_s(1e6, 1e6, 1, 16, 1, 1, 1.0, 1.0, 1.0, 1.0)
    assert large == comm.ring_all_reduce_s(1e6, 16, 1.0, 1.0) < comm.tree_all_reduce_s(1e6, 16, 1.0, 1.0)


def test_there_is_no_tree_inside_a_node():
    # 16 ranks, 1 byte at 1 byte/s, 1 s latency: the ring, although a tree would take 10 s
    assert comm.gradient_sync_s(1, 1, 16, 1, 1, 1, 1.0, 1.0, 1.0, 1.0) == 2 * (15 + 15 / 16)


def test_gradient_sync_inside_a_node_uses_the_node_link():
    # 4 ranks, reduce-scatter of 8 bytes and all-gather of 4: (3 + 3/4 x 8 / 2) + (3 + 3/4 x 4 / 2) = 6 + 4.5
    assert comm.gradient_sync_s(8, 4, 4, 1, 1, 1, 1.0, 2.0, 100.0, 0.01) == pytest.approx(10.5)


def test_gradient_sync_across_nodes_shares_the_nic():
    # 2 nodes of one rank each, no latency: reduce-scatter of 8 bytes, 1/2 x 8 / NIC, and the same again for the gather
    alone = comm.gradient_sync_s(8, 8, 1, 2, 1, 1, 0.0, 100.0, 0.0, 2.0)
    assert alone == pytest.approx(2 * 0.5 * 8 / 2.0)
    # four rings per node (tp 4) share it: each has a quarter
    shared = comm.gradient_sync_s(8, 8, 1, 2, 4, 1, 0.0, 100.0, 0.0, 2.0)
    assert shared == pytest.approx(4 * alone)


def test_hierarchical_sync_sends_each_byte_once_over_the_nic():
    # 2 nodes of 4 ranks, no latency, node links 1000 times the NIC: intra 2 x 3/4 x 8 / 2000, then 4 shards of 2 bytes
    # that share the NIC: 2 x 1/2 x 2 / (2/4)
    seconds = comm.gradient_sync_s(8, 8, 4, 2, 1, 1, 0.0, 2000.0, 0.0, 2.0)
    assert seconds == pytest.approx(2 * 0.75 * 8 / 2000 + 2 * 0.5 * 2 / 0.5, rel=1e-12)
    flat = comm.ring_all_reduce_s(8, 8, 0.0, 2.0)
    assert seconds < flat


@pytest.mark.parametrize("ranks", [1, 0])
def test_one_rank_needs_no_collective(ranks):
    assert comm.ring_all_reduce_s(1e9, ranks, 1.0, 1.0) == 0
    assert comm.tree_all_reduce_s(1e9, ranks, 1.0, 1.0) == 0
    assert comm.gradient_sync_s(1e9, 1e9, ranks, 1, 1, 1, 1.0, 1.0, 1.0, 1.0) == 0


def test_more_bandwidth_is_never_slower():
    for nodes in (1, 2, 4):
        for nics in (1, 2, 16):
            slow = comm.gradient_sync_s(1e9, 5e8, 4, nodes, 2, nics, 2e-5, 1e11, 5e-5, 1e10)
            assert comm.gradient_sync_s(1e9, 5e8, 4, nodes, 2, nics, 2e-5, 2e11, 5e-5, 1e10) <= slow
            assert comm.gradient_sync_s(1e9, 5e8, 4, nodes, 2, nics, 2e-5, 1e11, 5e-5, 2e10) <= slow


def test_one_device_per_node_reaches_one_of_its_adapters_and_all_devices_reach_all():
    # 2 nodes, 8 bytes, no latency, a network of 4 bytes/s in four adapters of 1: one ring of one rank per node
    one = comm.gradient_sync_s(8, 8, 1, 2, 1, 4, 0.0, 1e9, 0.0, 4.0)
    assert one == pytest.approx(2 * 0.5 * 8 / 1.0)
    # two rings reach two adapters, each its own; four reach all; eight share them in pairs
    assert comm.gradient_sync_s(8, 8, 1, 2, 2, 4, 0.0, 1e9, 0.0, 4.0) == one
    assert comm.gradient_sync_s(8, 8, 1, 2, 4, 4, 0.0, 1e9, 0.0, 4.0) == one
    assert comm.gradient_sync_s(8, 8, 1, 2, 8, 4, 0.0, 1e9, 0.0, 4.0) == 2 * one
    # four ranks of one ring reach all four: hierarchical, 8/4 bytes per shard at 1 byte/s each
    assert comm.gradient_sync_s(8, 8, 4, 2, 1, 4, 0.0, 1e9, 0.0, 4.0) == pytest.approx(2 * 0.5 * 2 / 1.0)
    # with every adapter reached, how many there are does not matter
    assert comm.gradient_sync_s(8, 8, 4, 2, 2, 8, 0.0, 1e9, 0.0, 4.0) == comm.gradient_sync_s(
        8, 8, 4, 2, 2, 1, 0.0, 1e9, 0.0, 4.0
    )


def test_a_gather_alone_is_half_an_all_reduce_and_never_free():
    both = comm.gradient_sync_s(8, 8, 4, 1, 1, 1, 1.0, 1e9, 0.0, 1.0)
    assert both == pytest.approx(6.0)  # a ring: 2 x 3 steps of 1 s
    gather = comm.gradient_sync_s(0, 8e9, 4, 1, 1, 1, 0.0, 1e9, 0.0, 1.0)
    assert gather == pytest.approx(0.75 * 8)


def test_exposed_traffic_is_what_compute_and_overlap_leave():
    assert comm.exposed_s(10.0, 100.0, 0.0) == 10  # nothing may be hidden
    assert comm.exposed_s(10.0, 100.0, 0.75) == 2.5
    assert comm.exposed_s(10.0, 4.0, 0.75) == 6  # no more than there is compute to hide it behind
    assert comm.exposed_s(10.0, 100.0, 1.0) == 0
    assert comm.exposed_s(0.0, 5.0, 0.5) == 0


def test_transfer():
    assert comm.transfer_s(10, 1.0, 5.0) == 3
