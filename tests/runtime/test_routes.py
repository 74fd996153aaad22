"""Routes are pure: what is sent, by whom, and that no order of it can deadlock."""

import itertools
from collections import defaultdict, deque

import pytest

from haap_rl.cost.schedule import in_flight, stage_ends_s
from haap_rl.runtime.routes import incoming, outgoing, routes, transfers
from haap_rl.runtime.schedule import operations
from tests.builders import random_plans, three_groups
from tests.runtime.plans import PLANS, plan, problem, stage

ALL = [routes(p, 12 // p.num_microbatches) for p in PLANS.values()]


def random_routes(count):
    target = three_groups({"num_layers": 7})
    for p in random_plans(target, count, seed=3):
        yield routes(p, target.global_batch_size // p.num_microbatches)


def test_every_plan_is_legal():
    for p in PLANS.values():
        problem().validate(p)


@pytest.mark.parametrize("stages", range(1, 6))
@pytest.mark.parametrize("m", range(1, 8))
def test_the_order_of_a_stage_is_that_of_the_cost_model(stages, m):
    slots = []
    stage_ends_s([1.0] * stages, [2.0] * stages, [0.1] * stages, [0.1] * stages, m, slots)
    for i in range(stages):
        priced = [(slot.is_forward, slot.microbatch) for slot in slots if slot.stage == i]
        assert [tuple(op) for op in operations(stages, i, m)] == priced
        held = itertools.accumulate(1 if op.is_forward else -1 for op in operations(stages, i, m))
        assert max(held) == in_flight(stages, i, m)


def test_a_hand_made_boundary():
    """tp 2 with all 6 samples -> replicas of 2 + 3 samples at tp 1 and of 1 sample at tp 2."""
    found = routes(plan(stage(3, ("a", 2, 1, 6)), stage(3, ("b", 1, 1, 2), ("b", 1, 1, 3), ("b", 2, 1, 1))), 6)
    assert found.stages == (((0, 1),), ((2,), (3,), (4, 5)))
    assert found.down[0] == ((0, 2, 0, 2), (0, 3, 2, 5), (0, 4, 5, 6), (1, 5, 5, 6))
    assert found.up[0] == (
        (2, 0, 0, 2), (2, 1, 0, 2), (3, 0, 2, 5), (3, 1, 2, 5), (4, 0, 5, 6), (5, 1, 5, 6),
    )  # fmt: skip


@pytest.mark.parametrize("found", [*ALL, *random_routes(40)])
def test_every_rank_receives_every_sample_of_its_own_once(found):
    for place in found.places:
        for direction, has in (("down", place.stage > 0), ("up", place.stage < len(found.stages) - 1)):
            got = [k for m in incoming(found, place, direction) for k in range(m.first, m.end)]
            assert sorted(got) == (list(range(place.first, place.end)) if has else [])
            for message in outgoing(found, place, direction):
                assert place.first <= message.first < message.end <= place.end


@pytest.mark.parametrize("found", [*ALL, *random_routes(40)])
def test_two_ranks_agree_on_the_order_of_what_they_exchange(found):
    """Per pair and direction, sends and receives are in the same order: else a communicator would mix them up."""
    sends, receives = defaultdict(list), defaultdict(list)
    for place in found.places:
        for t in transfers(found, place):
            pair = (place.rank, t.peer) if t.is_send else (t.peer, place.rank)
            (sends if t.is_send else receives)[pair, t.direction].append(t.microbatch)
    assert sends == receives
    assert all(order == sorted(order) for order in sends.values())


@pytest.mark.parametrize("found", [*ALL, *random_routes(40)])
def test_no_order_deadlocks(found):
    """Ranks that wait for each receive, with sends that wait for nobody, all come to the end of their lists."""
    lists = {place.rank: deque(transfers(found, place)) for place in found.places}
    under_way = defaultdict(int)
    going = True
    while going:
        going = False
        for rank, todo in lists.items():
            while todo:
                t = todo[0]
                key = (
                    (rank, t.peer, t.direction, t.microbatch)
                    if t.is_send
                    else (t.peer, rank, t.direction, t.microbatch)
                )
                if not t.is_send and not under_way[key]:
                    break
                under_way[key] += 1 if t.is_send else -1
                todo.popleft()
                going = True
    assert not any(lists.values())


@pytest.mark.parametrize("found", [*ALL, *random_routes(40)])
def test_every_piece_of_a_stage_has_one_holder_in_each_replica(found):
    for i, replicas in enumerate(found.stages):
        held = defaultdict(int)
        for piece in range(found.pieces(i)):
            holders = found.holders(i, piece)
            assert [found.places[rank].replica for rank in holders] == list(range(len(replicas)))
            for rank in holders:
                held[rank] += 1
        assert all(held[place.rank] == found.pieces(i) // place.tp for place in found.places if place.stage == i)
