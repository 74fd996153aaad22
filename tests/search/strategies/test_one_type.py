"""How a mixed cluster looks to a strategy of one device type, and what becomes of its plan."""

import pytest

from haap_rl.cost.estimator import Estimator
from haap_rl.problem.cluster import Cluster
from haap_rl.problem.errors import InputError
from haap_rl.search.base import Budget, BudgetExhausted, Objective, load_searcher, run_search
from haap_rl.search.strategies import one_type
from haap_rl.space.options import Option, SpaceSpec
from haap_rl.space.space import Genome
from tests.builders import group, problem, room

SPEC = SpaceSpec(num_microbatches=(2, 4), max_stages=4, max_tp=2, group_sizes=(1, 2, 4), recompute=("none", "full"))
ONE_TYPE = ("megatron", "alpa", "aceso")


def mixed():
    groups = (
        group("fast", nodes=1, per_node=4, memory_gb=room(4.0), intra_gb=200.0, inter_gb=40.0, nics=4),
        group("slow", nodes=1, per_node=2, memory_gb=room(2.0), tflops=40.0, latencies_us=(30, 60), inter_gb=10.0),
    )
    return problem(groups, {"num_layers": 4}, global_batch_size=8, seq_len=1024)


def alike():
    return problem((group("fast", per_node=4, memory_gb=room(4.0)),), global_batch_size=8, seq_len=1024)


def seen(target, devices):
    return one_type.views(Objective(target, space=SPEC), devices)


def test_all_is_a_cluster_of_the_slowest_device_with_the_least_memory_and_the_slowest_links():
    (view,) = seen(mixed(), "all")
    (believed,) = view.space.problem.cluster.groups
    fast, slow = mixed().cluster.groups
    assert (believed.num_nodes, believed.devices_per_node) == (3, 2)  # 4 + 2 devices in nodes of gcd(4, 2)
    assert believed.device.peak_flops == slow.device.peak_flops
    assert believed.device.memory_bytes == min(fast.device.memory_bytes, slow.device.memory_bytes)
    assert believed.intra_node == slow.intra_node
    # half of a fast node has 20 GB/s, a slow node 10; between the two 10, of which a node of two gets half
    assert believed.inter_node.bandwidth_bytes_per_s == 5e9
    assert believed.inter_node.latency_s == slow.inter_node.latency_s
    assert believed.nics_per_node == 1
    assert not view.exact


def test_part_is_the_type_that_computes_most_altogether_and_not_the_one_with_most_devices():
    (view,) = seen(mixed(), "part")
    assert view.exact
    assert view.space.problem.cluster.groups == (mixed().cluster.groups[0],)
    many_slow = (group("fast", per_node=4), group("slow", nodes=4, per_node=4, tflops=10.0))
    assert seen(problem(many_slow), "part")[0].groups == (0,)
    more_slow = (group("fast", per_node=2), group("slow", nodes=4, per_node=4, tflops=60.0))
    assert seen(problem(more_slow), "part")[0].groups == (1,)


def test_nodes_of_two_sizes_are_one_type():
    groups = (group("eight", per_node=4), group("two", per_node=2, tflops=40.0), group("four", per_node=2))
    four = groups[2].__class__("four", groups[0].device, 1, 2, groups[2].intra_node, groups[2].inter_node)
    (view,) = seen(problem((*groups[:2], four)), "part")
    assert view.groups == (0, 2)
    (believed,) = view.space.problem.cluster.groups
    assert (believed.num_nodes, believed.devices_per_node) == (3, 2)


def test_stages_are_placed_in_the_clusters_order_or_else_in_the_reverse_one():
    (view,) = seen(mixed(), "all")
    real = view.objective.space

    def genome(*sizes):
        options = tuple(view.space.option_index[Option(0, 1, size, "none")] for size in sizes)
        return Genome(2, options, (1,) * len(sizes))

    def where(*sizes):
        placed = view.placed(genome(*sizes))
        return placed and [(real.options[k].group, real.options[k].dp) for k in placed.options]

    assert where(2, 2, 2) == [(0, 2), (0, 2), (1, 2)]
    assert where(2, 4) == [(1, 2), (0, 4)]  # the fast group has no room for four after two
    assert where(2, 1, 2) == [(0, 2), (0, 1), (1, 2)]  # one device stays idle
    assert where(4, 4) is None


def test_what_is_believed_counts_and_one_evaluation_is_kept_for_the_real_devices():
    objective = Objective(mixed(), Budget(evaluations=5), SPEC)
    (view,) = one_type.views(objective, "all")
    k = view.space.option_index[Option(0, 1, 2, "none")]
    plans = [Genome(2, (k, k), (n, 4 - n)) for n in (1, 2, 3)]
    prices = view.price(plans)
    assert objective.evaluations == 3
    assert prices.iteration_s.tolist() == [
        Estimator(view.space.problem)(view.space.plan(plan)).iteration_s for plan in plans
    ]
    assert objective.best_rank is None  # nothing real was priced
    assert objective.estimator.operators_computed > 0
    assert len(view.price(plans).iteration_s) == 1
    assert view.explain(plans[0]) is None
    assert view.run([Genome(2, (k,) * 4, (1,) * 4), plans[0]])  # the first has no place: no evaluation
    assert objective.evaluations == 5
    assert objective.best[0].stages[0].replicas[0].group == "fast"
    with pytest.raises(BudgetExhausted):
        view.run(plans)


def test_what_does_not_fit_on_the_real_devices_is_followed_by_the_next_best():
    objective = Objective(mixed(), space=SPEC)
    (view,) = one_type.views(objective, "part")
    k, lean = (view.space.option_index[Option(0, 1, 1, mode)] for mode in ("none", "full"))
    crowded = Genome(2, (k,), (4,))
    small = Genome(4, (lean,) * 4, (1,) * 4)
    assert not view.run([crowded] * (one_type.TRIES + 5) + [small])
    assert objective.evaluations == one_type.TRIES
    assert view.run([crowded, small, crowded])
    assert objective.evaluations == one_type.TRIES + 2


@pytest.mark.parametrize("name", ONE_TYPE)
def test_on_one_device_type_the_two_ways_are_one(name):
    results = [
        run_search(load_searcher(name, {"devices": devices}), alike(), Budget(evaluations=400), space=SPEC)
        for devices in ("all", "part", None)
    ]
    assert len({result.plan for result in results}) == 1
    assert len({result.evaluations for result in results}) == 1


@pytest.mark.parametrize("name", ONE_TYPE)
def test_on_a_mixed_cluster_they_differ_and_null_reports_the_better(name):
    groups = (group("fast", per_node=4, memory_gb=80.0), group("slow", per_node=4, tflops=70.0, memory_gb=40.0))
    target = problem(groups, {"num_layers": 8, "hidden": 2048, "ffn": 8192}, global_batch_size=32, seq_len=2048)
    every, part, both = (
        run_search(load_searcher(name, {"devices": devices}), target, Budget(evaluations=4000), space=SPEC)
        for devices in ("all", "part", None)
    )
    used = [{r.group for stage in result.plan.stages for r in stage.replicas} for result in (every, part)]
    assert used == [{"fast", "slow"}, {"fast"}]
    assert every.plan != part.plan
    assert both.estimate.iteration_s == min(every.estimate.iteration_s, part.estimate.iteration_s)
    times = f"on fast {part.estimate.iteration_s:.4f} s, on fast + slow {every.estimate.iteration_s:.4f} s"
    assert f"one device type at a time: {times}" in both.notes
    assert not [note for note in part.notes if "at a time" in note]


@pytest.mark.parametrize("name", ONE_TYPE)
def test_another_way_is_refused(name):
    with pytest.raises(InputError, match=rf"search={name}: devices='most' is not one of part, all; or null: both"):
        load_searcher(name, {"devices": "most"})


@pytest.mark.parametrize("name", ["alpa", "amp", "metis"])
def test_where_some_device_must_stay_idle_they_say_that_they_know_no_plan(name):
    spec = SpaceSpec(num_microbatches=(2, 4), max_stages=2, max_tp=1, group_sizes=(1,), recompute=("none",))
    result = run_search(load_searcher(name), mixed(), Budget(evaluations=100), space=spec)
    assert result.evaluations == 0
    assert any("uses every device" in note and "at most 2 stages" in note for note in result.notes)


def test_the_cluster_believed_in_keeps_its_name():
    assert isinstance(seen(mixed(), "all")[0].space.problem.cluster, Cluster)
    assert seen(mixed(), "all")[0].space.problem.cluster.name == "test"
