"""Who does what while cells are down, by hand for each policy; what is lost, what stops, and what is refused."""

import dataclasses
import itertools
import math

import pytest

from haap_rl.faults.cost import Cell, Degraded, FaultEstimator, Pipeline, Task, healthy_work
from haap_rl.faults.policy import (
    POLICIES,
    Constants,
    Down,
    Stopped,
    constants_from_config,
    copy_s,
    mecefo_options,
    policy_named,
    stages_without_peer,
)
from haap_rl.faults.reactions import Reactions, cell_devices
from haap_rl.mecefo.options import MecefoOptions
from haap_rl.problem.errors import InputError
from haap_rl.problem.plan import Recompute, ReplicaGroup, Stage
from tests.builders import GB, group, plan, problem, stage

RING = MecefoOptions(rank=8, takeover="ring")


def pipelines(dp=3, p=2, per_node=None, **settings):
    """(estimator, plan) of p equal stages of dp replicas of one device."""
    kind = {key: settings.pop(key) for key in ("memory_gb",) if key in settings}
    groups = (group("fast", per_node=per_node or p * dp, **kind),)
    target = problem(groups, {"num_layers": 6 if p == 3 else 4}, global_batch_size=4 * dp, **settings)
    cut = target.model.num_units // p
    return FaultEstimator(target, options=RING), plan(
        *[stage(cut, "fast", dp=dp) for _ in range(p - 1)],
        stage(target.model.num_units - cut * (p - 1), "fast", dp=dp),
        m=4,
    )


def action(policy, estimator, healthy, *cells, idle=(9, 9), constants=None, **options):
    """What the policy does while those cells, (stage, replica), are down."""
    chosen = policy_named(policy, dataclasses.replace(RING, **options), constants or Constants())
    return chosen.apply(estimator, healthy, Down(frozenset(Cell(*cell) for cell in cells), idle))


def takes(found, i):
    """Of each replica of stage i: how many tasks of others it does, weighted by their share; None: it is down."""
    return [sum(task.share for task in tasks[1:]) if tasks else None for tasks in found.work[i]]


def one_line(error):
    return "\n" not in str(error.value)


# ----------------------------------------------------------------------------------------- every policy
@pytest.mark.parametrize("policy", POLICIES)
def test_every_sample_is_taken_through_every_stage_unless_replicas_are_dropped(policy):
    estimator, healthy = pipelines()
    cells = [(i, r) for i in range(2) for r in range(3)]
    for n in range(4):
        for down in itertools.combinations(cells, n):
            found = action(policy, estimator, healthy, *down)
            if isinstance(found, Stopped):
                continue
            if not isinstance(found, Degraded):
                assert sum(pipeline.num_microbatches for pipeline in found) == 3 * healthy.num_microbatches
                assert all(sum(pipeline.layers) == 4 for pipeline in found)
                continue
            kept = 3 - found.samples_lost
            for i in range(2):
                tasks = [task for cells in found.work for work in cells for task in work if task.stage == i]
                taken = sum(task.share * task.samples for task in tasks if task.backward != "none")
                assert taken == pytest.approx(kept)
            assert policy == "drop_replica" or found.samples_lost == 0
            tokens = estimator.degraded(found).tokens_per_iteration
            assert tokens == estimator.problem.tokens_per_iteration * kept // 3
            if policy != "spare":
                assert all((found.work[i][r] == ()) == ((i, r) in down) for i, r in cells)


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "bamboo"])
def test_a_stage_without_live_cells_always_stops(policy):
    estimator, healthy = pipelines()
    for more in ((), ((0, 1),), ((0, 0), (0, 2))):
        found = action(policy, estimator, healthy, (1, 0), (1, 1), (1, 2), *more)
        assert isinstance(found, Stopped)
        assert found.reason
        assert not found.out_of_memory
    # the stage before holds Bamboo's layers
    assert isinstance(action("bamboo", estimator, healthy, (1, 0), (1, 1), (1, 2)), Degraded)


@pytest.mark.parametrize("policy", POLICIES)
def test_with_nothing_down_everybody_does_its_own_work(policy):
    estimator, healthy = pipelines()
    found = action(policy, estimator, healthy)
    assert found.work == healthy_work(healthy)
    assert estimator.degraded(found) is estimator.healthy(healthy)


def test_the_registry_knows_them_by_name_and_says_which_gradients_are_exact():
    assert list(POLICIES) == [
        "restart", "drop_replica", "bamboo", "oobleck", "recycle", "naive_neighbour", "mecefo", "spare",
    ]  # fmt: skip
    assert [name for name, kind in POLICIES.items() if not kind.exact] == ["mecefo"]
    with pytest.raises(InputError, match="policy='megatron' is not known; choose one of restart,") as error:
        policy_named("megatron")
    assert one_line(error)


# ---------------------------------------------------------------------------------------------- by hand
def test_restart_stops_at_the_first_failure():
    estimator, healthy = pipelines()
    found = action("restart", estimator, healthy, (1, 2))
    assert found == Stopped("stage 1 has lost replica 2, and all wait for it")


def test_dropping_replicas_loses_the_samples_that_pass_through_dead_cells():
    estimator, healthy = pipelines()
    found = action("drop_replica", estimator, healthy, (0, 1), (1, 1))
    assert found.samples_lost == 1  # of three: the same pipeline
    found = action("drop_replica", estimator, healthy, (0, 1), (1, 2))
    assert found.samples_lost == 2
    idle = [Task(i, 1, 0.0) for i in range(2)]  # alive, with nothing to do
    assert found.work == (((Task(0, 1),), (), (idle[0],)), ((Task(1, 1),), (idle[1],), ()))
    stopped = action("drop_replica", estimator, healthy, (0, 0), (0, 1), (1, 2))
    assert stopped == Stopped("every sample would pass through a dead cell")


def test_dropping_replicas_of_unequal_stages_follows_the_samples():
    # six samples: two replicas of three in the first stage, three of two in the second
    target = problem((group("fast", per_node=5),), global_batch_size=12)
    healthy = plan(stage(3, "fast", dp=2, size=3), stage(3, "fast", dp=3, size=2), m=2)
    estimator = FaultEstimator(target, options=RING)
    found = action("drop_replica", estimator, healthy, (0, 0))  # samples 0, 1, 2
    assert found.samples_lost == 3
    assert found.work == (((), (Task(0, 3),)), ((Task(1, 2, 0.0),), (Task(1, 1),), (Task(1, 2),)))
    assert estimator.degraded(found).tokens_per_iteration == target.tokens_per_iteration / 2
    found = action("drop_replica", estimator, healthy, (1, 1))  # samples 2, 3
    assert found.samples_lost == 2
    assert found.work == (((Task(0, 2),), (Task(0, 2),)), ((Task(1, 2),), (), (Task(1, 2),)))
    chosen = policy_named("drop_replica", RING)
    response = Reactions(estimator, healthy, chosen, ()).of(Down(frozenset({Cell(1, 1)})))
    assert response.samples_lost == pytest.approx(2 / 6)
    assert response.attention_lost == 0


def test_recycle_deals_the_dead_one_s_micro_batches_to_all_peers():
    estimator, healthy = pipelines(dp=4)
    own = Task(0, 1)
    found = action("recycle", estimator, healthy, (0, 1))
    third = Task(0, 1, 1 / 3)
    assert found.work[0] == ((own, third), (), (own, third), (own, third))
    assert found.work[1] == healthy_work(healthy)[1]
    found = action("recycle", estimator, healthy, (0, 1), (0, 2))
    assert takes(found, 0) == [1, None, None, 1]
    found = action("recycle", estimator, healthy, (0, 0), (0, 1), (0, 2))
    assert takes(found, 0) == [None, None, None, 3]
    assert not found.fills_bubbles
    assert action("recycle", estimator, healthy, (0, 0), constants=Constants(recycle_fills_bubbles=True)).fills_bubbles


def test_the_ring_neighbour_takes_over_and_the_least_loaded_one_after_it():
    estimator, healthy = pipelines(dp=4)
    for policy in ("naive_neighbour", "mecefo"):
        for down, expected in (
            ([1], [0, None, 1, 0]),
            ([3], [1, 0, 0, None]),
            ([1, 3], [1, None, 1, None]),
            ([1, 2], [1, None, None, 1]),  # 2 is down, so 3 takes 1; 3 is busy then, so 0 takes 2
            ([0, 1, 2], [None, None, None, 3]),
        ):
            found = action(policy, estimator, healthy, *[(0, r) for r in down])
            assert takes(found, 0) == expected, down
            backward = "exact" if policy == "naive_neighbour" else "mecefo"
            for tasks, load in zip(found.work[0], expected, strict=True):
                assert {task.backward for task in tasks} <= {backward if load else "exact"}  # own task and taken ones


def test_a_busy_or_dead_neighbour_restarts_where_that_is_asked_for():
    estimator, healthy = pipelines(dp=4)
    for down, stops in (([1], False), ([1, 3], False), ([1, 2], True), ([0, 1, 2], True)):
        found = action("mecefo", estimator, healthy, *[(0, r) for r in down], on_overload="restart")
        assert isinstance(found, Stopped) == stops
    assert found.reason == "stage 0: the neighbour of replica 0 is down or busy"


def test_spreading_puts_every_peer_into_mecefo_mode():
    estimator, healthy = pipelines(dp=4)
    found = action("mecefo", estimator, healthy, (1, 2), takeover="spread")
    assert takes(found, 1) == pytest.approx([1 / 3, 1 / 3, None, 1 / 3], nan_ok=True)
    assert all(task.backward == "mecefo" for tasks in found.work[1] for task in tasks)


def unequal(fast_gb=40.0, **settings):
    """A stage of two slow replicas and a fast one, and a stage of slow ones: the fast one has time to spare."""
    groups = (group("slow", per_node=5, tflops=25.0), group("fast", per_node=1, memory_gb=fast_gb))
    target = problem(groups, global_batch_size=12, **settings)
    mixed = Stage(3, (ReplicaGroup("slow", 1, 2, 1), ReplicaGroup("fast", 1, 1, 1)))
    return FaultEstimator(target, options=RING), plan(mixed, stage(3, "slow", dp=3), m=4)


@pytest.mark.parametrize("policy", ["mecefo", "naive_neighbour"])
def test_the_peer_with_most_slack_takes_over_and_not_the_next_one(policy):
    estimator, healthy = unequal()
    assert takes(action(policy, estimator, healthy, (0, 0)), 0) == [None, 1, 0]
    assert takes(action(policy, estimator, healthy, (0, 0), takeover="most_slack"), 0) == [None, 0, 1]
    # among equals the first
    assert takes(action(policy, estimator, healthy, (1, 2), takeover="most_slack"), 1) == [1, 0, None]
    # two dead: the fast one four times as fast, so that both go to it
    assert takes(action(policy, estimator, healthy, (0, 0), (0, 1), takeover="most_slack"), 0) == [None, None, 2]


@pytest.mark.parametrize("policy", ["mecefo", "naive_neighbour"])
def test_a_peer_that_has_no_room_does_not_take_over_however_fast_it_is(policy):
    estimator, healthy = unequal()
    work = action(policy, estimator, healthy, (0, 0), takeover="most_slack").work
    (*_, both) = estimator.stage_memory(0, work[0], estimator.keys(healthy), held=2)
    own = estimator.healthy(healthy).memory[0][-1]
    assert own.needed_bytes < both.needed_bytes
    between = (own.needed_bytes + both.needed_bytes) / 2 / GB
    estimator, healthy = unequal(fast_gb=between)
    assert estimator.healthy(healthy).fits
    assert takes(action(policy, estimator, healthy, (0, 0), takeover="most_slack"), 0) == [None, 1, 0]


def test_where_no_rank_is_unaffected_degraded_gradients_are_used_only_if_asked_for():
    estimator, healthy = pipelines(dp=2)
    for empty_set, backward in (("freeze", "mecefo"), ("zero", "mecefo"), ("use_degraded", "exact")):
        found = action("mecefo", estimator, healthy, (0, 1), empty_set=empty_set)
        assert {task.backward for task in found.work[0][0]} == {backward}
    estimator, healthy = pipelines(dp=3)  # the third one is unaffected
    found = action("mecefo", estimator, healthy, (0, 1), empty_set="use_degraded")
    assert {task.backward for task in found.work[0][2]} == {"mecefo"}


def test_bamboo_on_a_sequence_of_failures_by_hand():
    estimator, healthy = pipelines(dp=2, p=3)
    own = [(Task(i, 1),) for i in range(3)]

    def now(*cells):
        found = action("bamboo", estimator, healthy, *cells)
        return found if isinstance(found, Stopped) else [[found.work[i][r] for i in range(3)] for r in range(2)]

    # the first pipeline loses its middle stage: the one before does both
    assert now((1, 0)) == [[(Task(0, 1), Task(1, 1)), (), (Task(2, 1),)], own]
    # the second one its first stage: the last does both
    assert now((1, 0), (0, 1)) == [
        [(Task(0, 1), Task(1, 1)), (), (Task(2, 1),)],
        [(), (Task(1, 1),), (Task(2, 1), Task(0, 1))],
    ]
    # now the cell that does two stages dies: that pipeline is out, and the other does twice as many micro-batches
    assert now((1, 0), (0, 0), (0, 1)) == [
        [(), (), (Task(2, 1, 0.0),)],
        [(), (Task(1, 1, 2.0),), (Task(2, 1, 2.0), Task(0, 1, 2.0))],
    ]
    # the second one loses two neighbours as well: nothing is left
    assert now((1, 0), (0, 0), (0, 1), (1, 1)) == Stopped(
        "no pipeline is left in which the cell before each dead one can do both stages"
    )
    # the middle stage of the first pipeline is back, beside its dead neighbour
    assert now((0, 0), (0, 1), (1, 1)) == [
        [(), (Task(1, 1, 2.0),), (Task(2, 1, 2.0), Task(0, 1, 2.0))],
        [(), (), (Task(2, 1, 0.0),)],
    ]
    assert now() == [own, own]


def test_bamboo_keeps_room_for_the_next_stage_even_while_nothing_fails():
    estimator, healthy = pipelines(dp=2)
    needed = max(
        estimator.cell_memory(i, 0, (Task(i, 1),), estimator.keys(healthy), 2, 2 - i, holds=(1 - i,)).needed_bytes
        for i in range(2)
    )
    for gigabytes, fits in (((needed + 10**6) / GB, True), ((needed - 10**6) / GB, False)):
        estimator, healthy = pipelines(dp=2, memory_gb=gigabytes)
        assert estimator.healthy(healthy).fits
        found = action("bamboo", estimator, healthy)
        assert isinstance(found, Degraded) == fits
    assert found.out_of_memory
    assert "the redundant layers do not fit" in found.reason


def test_a_pipeline_of_bamboo_without_memory_for_two_stages_is_out_until_all_are():
    def case(**settings):
        estimator, healthy = pipelines(dp=2, seq_len=2048, **settings)
        return estimator, dataclasses.replace(healthy, zero_stage=0)

    estimator, healthy = case()
    keys = estimator.keys(healthy)
    first = estimator.cell_memory(0, 0, (Task(0, 1),), keys, 2, 2, holds=(1,)).needed_bytes
    last = estimator.cell_memory(1, 0, (Task(1, 1),), keys, 2, 1, holds=(0,)).needed_bytes
    both = estimator.cell_memory(0, 0, (Task(0, 1), Task(1, 1)), keys, 2, 2).needed_bytes
    assert max(first, last) < both
    tight, healthy = case(memory_gb=(max(first, last) + both) / 2 / GB)
    found = action("bamboo", tight, healthy, (1, 0))
    assert found.work == (((Task(0, 1, 0.0),), (Task(0, 1, 2.0),)), ((), (Task(1, 1, 2.0),)))
    assert tight.degraded(found).fits
    assert action("bamboo", tight, healthy, (1, 0), (1, 1)).out_of_memory


def test_redundant_forward_passes_of_bamboo_cost_what_bubbles_do_not_hide():
    estimator, healthy = pipelines(dp=2)
    free, half = (
        estimator.degraded(action("bamboo", estimator, healthy, constants=Constants(bamboo_forward_share=share)))
        for share in (0.0, 0.5)
    )
    keys = estimator.keys(healthy)
    more = half.stages[0].forward_s - free.stages[0].forward_s
    assert more == pytest.approx(0.5 * estimator.cell_s(0, 0, (Task(1, 1),), keys)[0])
    assert half.stages[0].backward_s == free.stages[0].backward_s


def oobleck_case():
    """Two pipelines of three stages, the last one on slower devices."""
    groups = (group("fast", per_node=4), group("slow", per_node=2, tflops=40.0))
    target = problem(groups, {"num_layers": 7}, global_batch_size=16)
    healthy = plan(stage(3, "fast", dp=2), stage(3, "fast", dp=2), stage(3, "slow", dp=2), m=8)
    return FaultEstimator(target, options=RING), healthy


def test_oobleck_deals_layers_so_that_the_slowest_stage_takes_least():
    estimator, healthy = oobleck_case()
    for alive in ((0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (2,)):
        dealt = estimator.deal_layers(healthy, alive)
        every = [c for c in itertools.product(range(1, 8), repeat=len(alive)) if sum(c) == 7]
        best = min(estimator.pipeline_period_s(healthy, alive, layers) for layers in every)
        assert sum(dealt) == 7
        assert estimator.pipeline_period_s(healthy, alive, dealt) == best
    first, second = estimator.deal_layers(healthy, (0, 2))
    assert first > second  # the faster device takes more


def test_oobleck_deals_micro_batches_by_least_spread():
    estimator, healthy = oobleck_case()
    for down in ([(1, 0)], [(0, 0), (1, 0)], [(2, 0), (0, 1)]):
        found = action("oobleck", estimator, healthy, *down)
        assert all(isinstance(pipeline, Pipeline) for pipeline in found)
        assert sum(pipeline.num_microbatches for pipeline in found) == 16
        a, b = (estimator.pipeline_period_s(healthy, pipeline.stages, pipeline.layers) for pipeline in found)
        longest = max(found[0].num_microbatches * a, found[1].num_microbatches * b)
        assert longest == min(max(n * a, (16 - n) * b) for n in range(17))
    assert found[0].stages == (0, 1)
    assert found[1].stages == (1, 2)


def test_oobleck_leaves_out_a_pipeline_that_cannot_hold_the_layers_and_stops_with_none():
    estimator, healthy = pipelines(dp=2)
    whole = estimator.cell_memory(
        0, 0, (Task(0, 1),), [estimator.keys(healthy)[0]._replace(last=True, num_layers=4)], 2, held=1
    ).needed_bytes
    estimator, healthy = pipelines(dp=2, memory_gb=0.95 * whole / GB)
    assert estimator.healthy(healthy).fits
    (left,) = action("oobleck", estimator, healthy, (0, 0))
    assert (left.stages, sum(left.layers), left.num_microbatches) == ((0, 1), 4, 8)
    found = action("oobleck", estimator, healthy, (0, 0), (1, 1))
    assert found.out_of_memory


def test_memory_bounds_the_layers_that_oobleck_deals():
    estimator, healthy = pipelines(dp=2)
    keys = estimator.keys(healthy)
    for j, held in ((0, 2), (1, 1)):
        most = estimator._most_layers(healthy, keys, (0, 1), j)
        assert most == 4  # all of them
        needed = [estimator._pipeline_cell(healthy, keys, (0, 1), j, n, held).needed_bytes for n in range(1, 5)]
        assert needed == sorted(needed)
        for n in range(1, 5):  # room for exactly n
            tight, _ = pipelines(dp=2, memory_gb=(needed[n - 1] + 1000) / GB)
            assert tight._most_layers(healthy, tight.keys(healthy), (0, 1), j) == n


def test_spares_are_idle_devices_of_the_same_group():
    estimator, healthy = pipelines(dp=2, per_node=6)
    assert action("spare", estimator, healthy, (0, 0), (1, 1), idle=(2,)).work == healthy_work(healthy)
    found = action("spare", estimator, healthy, (0, 0), (1, 1), idle=(1,))
    assert found == Stopped("no spare fast is left for stage 1")
    reactions = Reactions(estimator, healthy, policy_named("spare", RING), ())
    assert reactions.spare == (2,)
    assert reactions(frozenset()).tokens_per_s == estimator.healthy(healthy).tokens_per_s


def test_a_spare_replica_needs_as_many_idle_devices_as_it_has():
    target = problem((group("fast", per_node=10),), global_batch_size=8)
    healthy = plan(stage(3, "fast", tp=2, dp=2), stage(3, "fast", tp=2, dp=2), m=4)
    estimator = FaultEstimator(target, options=RING)
    assert isinstance(action("spare", estimator, healthy, (0, 0), idle=(2,)), Degraded)
    assert isinstance(action("spare", estimator, healthy, (0, 0), idle=(1,)), Stopped)
    assert isinstance(action("spare", estimator, healthy, (0, 0), (1, 0), idle=(3,)), Stopped)


# -------------------------------------------------------------------------------- what comes of it
def test_running_out_of_memory_is_a_value():
    estimator, healthy = pipelines(dp=2, seq_len=2048)
    needed = {}
    for policy in ("naive_neighbour", "mecefo"):
        work = action(policy, estimator, healthy, (0, 0)).work
        (cell,) = estimator.stage_memory(0, work[0], estimator.keys(healthy), held=2)
        needed[policy] = cell.needed_bytes
    assert needed["mecefo"] < needed["naive_neighbour"]
    tight, healthy = pipelines(dp=2, seq_len=2048, memory_gb=sum(needed.values()) / 2 / GB)
    assert tight.healthy(healthy).fits
    down = Down(frozenset({Cell(0, 0)}))
    naive = Reactions(tight, healthy, policy_named("naive_neighbour", RING), ()).of(down)
    assert (naive.tokens_per_s, naive.out_of_memory, naive.runs) == (0, True, False)
    assert naive.reason == "the take-over does not fit in memory"
    assert Reactions(tight, healthy, policy_named("mecefo", RING), ()).of(down).runs


def test_attention_gradients_lost_are_the_share_of_layers_and_samples_in_mecefo_mode():
    estimator, healthy = pipelines(dp=3)  # of four layers two in each stage
    reactions = Reactions(estimator, healthy, policy_named("mecefo", RING), ())
    lost = [
        reactions.of(Down(frozenset(Cell(*cell) for cell in cells))).attention_lost
        for cells in ((), ((0, 0),), ((0, 0), (1, 2)), ((0, 0), (0, 1)))
    ]
    # a taker's own task and what it takes: two of the three tasks of half of the layers
    assert lost == pytest.approx([0, 2 / 3 / 2, 2 / 3, 1 / 2])
    exact = Reactions(estimator, healthy, policy_named("naive_neighbour", RING), ())
    assert exact.of(Down(frozenset({Cell(0, 0)}))).attention_lost == 0


def test_devices_of_one_replica_take_it_with_them_and_no_other():
    target = problem((group("fast", per_node=6),), global_batch_size=8)
    healthy = plan(stage(3, "fast", tp=2, dp=2), stage(3, "fast", dp=1, size=2), m=4)
    assert cell_devices(target, healthy) == {
        (0, 0): Cell(0, 0), (0, 1): Cell(0, 0), (0, 2): Cell(0, 1), (0, 3): Cell(0, 1), (0, 4): Cell(1, 0),
    }  # fmt: skip
    assert stages_without_peer(healthy) == [1]


@pytest.mark.parametrize("policy", POLICIES)
def test_less_is_never_done_faster_than_by_the_healthy_plan(policy):
    estimator, healthy = pipelines(dp=3)
    reactions = Reactions(estimator, healthy, policy_named(policy, RING), ())
    free = estimator.healthy(healthy).tokens_per_s
    for n in range(1, 4):
        for down in itertools.combinations([Cell(i, r) for i in range(2) for r in range(3)], n):
            assert reactions.of(Down(frozenset(down), (1, 1))).tokens_per_s <= free


# ------------------------------------------------------------------------------------------ transitions
def test_transitions_by_hand():
    estimator, healthy = pipelines(dp=2)
    constants = Constants(detect_s=1.0, regroup_s=10.0, reconfigure_s=100.0, step_lost=0.5, restart_s=1000.0)
    step_s = estimator.healthy(healthy).iteration_s / 2

    def of(policy, target=healthy):
        return policy_named(policy, RING, constants).transitions(estimator, target)

    plain = dataclasses.replace(healthy, zero_stage=0)
    key = estimator.keys(plain)[0]
    state = max(estimator.state_bytes(k, k.replicas[0]) for k in estimator.keys(plain))
    assert key.replicas[0].tp == 1
    copied = state / 10e9  # the builders' link between nodes
    assert copy_s(estimator, plain) == pytest.approx(copied)
    plain_step_s = estimator.healthy(plain).iteration_s / 2
    for policy in ("mecefo", "naive_neighbour", "recycle", "drop_replica", "bamboo"):
        found = of(policy, plain)
        assert found.failure_s == pytest.approx(11 + plain_step_s)  # every peer holds the weights: nothing moves
        assert found.return_s == pytest.approx(10 + copied)
        assert found.restart_s == 1000
    # with ZeRO-1 the dead one's share of the optimiser state comes from its copy
    assert of("mecefo").failure_s > 11 + step_s
    assert of("oobleck", plain).failure_s == pytest.approx(101 + plain_step_s + copied)
    assert of("oobleck", plain).return_s == pytest.approx(100 + copied)
    assert of("spare", plain).failure_s == pytest.approx(11 + plain_step_s + copied)
    assert of("spare", plain).return_s == 0


# --------------------------------------------------------------------------------------- what is refused
def test_plans_that_a_policy_cannot_use_are_refused_in_one_line():
    target = problem((group("fast", per_node=4), group("slow", per_node=2)), global_batch_size=8)
    alone = plan(stage(3, "fast", size=2), stage(3, "slow", size=2), m=4)
    for policy in ("drop_replica", "oobleck", "recycle", "naive_neighbour", "mecefo"):
        with pytest.raises(InputError, match=r"every stage of the plan has one replica \(dp = 1\)") as error:
            policy_named(policy, RING).check(alone)
        assert one_line(error)
    for policy in ("restart", "spare", "bamboo"):
        policy_named(policy, RING).check(alone)
    wide = plan(stage(3, "fast", dp=2), stage(3, "slow", dp=1, size=2), m=4)
    mixed = Stage(6, (ReplicaGroup("fast", 1, 1, 1), ReplicaGroup("slow", 1, 1, 1)))
    target.validate(wide)
    for policy in ("bamboo", "oobleck"):
        for refused in (wide, plan(mixed, m=4)):
            with pytest.raises(InputError, match=f"policy {policy}: it needs whole pipelines") as error:
                policy_named(policy, RING).check(refused)
            assert one_line(error)
    with pytest.raises(InputError, match="a plan of one stage has no stage before"):
        policy_named("bamboo", RING).check(plan(stage(6, "fast", dp=2), m=4))
    policy_named("mecefo", RING).check(wide)  # one stage has a peer


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"detect_s": -1}, "constants.detect_s=-1 must be between 0 and 10^9"),
        ({"restart_s": float("nan")}, "constants.restart_s=nan must be"),
        ({"restart_s": float("inf")}, "constants.restart_s=inf must be"),
        ({"checkpoint_s": "soon"}, "constants.checkpoint_s='soon'"),
        ({"checkpoint_s": True}, "constants.checkpoint_s=True"),
        ({"step_lost": 2}, "constants.step_lost=2 must be between 0 and 1"),
        ({"bamboo_forward_share": 1.5}, "constants.bamboo_forward_share=1.5"),
        ({"recycle_fills_bubbles": 1}, "constants.recycle_fills_bubbles=1"),
        ({"regroup": 3}, "regroup"),
    ],
)
def test_constants_that_are_impossible_are_refused_in_one_line(changes, words):
    with pytest.raises(InputError) as error:
        constants_from_config(changes)
    assert words in str(error.value)
    assert "faults" in str(error.value)
    assert one_line(error)


def test_constants_and_options_that_are_possible_are_taken():
    assert constants_from_config({}) == Constants()
    assert constants_from_config({"checkpoint_interval_s": None, "detect_s": 0}).detect_s == 0
    assert mecefo_options({"low_rank": ["down", "gate"]}).low_rank == ("gate", "down")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rank": 0}, "rank=0"),
        ({"rank": 2.5}, "rank=2.5"),
        ({"refresh_steps": True}, "refresh_steps=True"),
        ({"takeover": "nearest"}, "takeover='nearest'"),
        ({"low_rank": "gate"}, "low_rank='gate'"),
        ({"low_rank": ["query"]}, "low_rank=['query']"),
        ({"ffn": 3}, "ffn"),
    ],
)
def test_options_that_are_impossible_are_refused_in_one_line(changes, words):
    with pytest.raises(InputError) as error:
        mecefo_options(changes)
    assert words in str(error.value)
    assert one_line(error)


def test_recomputing_plans_deal_recomputing_layers():
    estimator, healthy = pipelines(dp=2)
    again = dataclasses.replace(
        healthy, stages=tuple(dataclasses.replace(s, recompute=Recompute("full", 2)) for s in healthy.stages)
    )
    found = action("oobleck", estimator, again, (0, 0))
    assert sum(pipeline.num_microbatches for pipeline in found) == 8
    slow, fast = (estimator.pipeline_period_s(target, (0,), (4,)) for target in (again, healthy))
    assert slow > fast
    assert math.isfinite(estimator.pipelines_s(again, found))
