"""Metis: device groups by hand, tp raised where memory is short, and both stages of two priced."""

import itertools

import numpy as np
import pytest

from haap_rl.problem.errors import InputError
from haap_rl.search.base import Budget, Objective, load_searcher, run_search
from haap_rl.search.strategies import metis
from haap_rl.search.strategies.metis import Metis
from haap_rl.space.options import Option, SpaceSpec
from tests.builders import group, problem, set_tables

SPEC = SpaceSpec(num_microbatches=(4,), max_stages=4, max_tp=4, group_sizes=(1, 2, 4), recompute=("none", "full"))


def four_and_two():
    groups = (group("fast", per_node=4), group("slow", per_node=2, tflops=40.0))
    return problem(groups, {"num_layers": 6}, global_batch_size=16)


def space_of(target=None, spec=SPEC):
    return Objective(target or four_and_two(), space=spec).space


class Watched(Objective):
    """Keeps the genomes of the space that were priced."""

    priced: list

    def many(self, codes, limit_s=np.inf):
        self.priced += [self.space.genome_of(code) for code in codes]
        return super().many(codes, limit_s)


def watched(target, spec=SPEC, **settings):
    objective = Watched(target, space=spec)
    objective.priced = []
    Metis(**settings).search(target, objective, np.random.default_rng(0))
    return objective


def test_device_groups_that_sum_to_all_devices_by_hand():
    assert list(metis.partitions(8, 3, (1, 2, 4))) == [(2, 2, 4)]
    assert list(metis.partitions(4, 2, (1, 2, 4))) == [(2, 2)]
    assert list(metis.partitions(5, 3, (1, 2, 4))) == [(1, 2, 2)]
    assert list(metis.partitions(4, 1, (2,))) == []


def test_the_device_groups_of_four_and_two_devices_by_hand():
    space = space_of()

    def found(order, p, variance):
        return set(metis.device_groups(space, order, p, variance))

    assert found((0, 1), 1, 0.5) == set()  # one stage would mix the two
    assert found((0, 1), 2, 0.5) == {((0, 4), (1, 2))}
    assert found((1, 0), 2, 0.5) == {((1, 2), (0, 4))}
    # three stages, each of at least 0.5 x 6 / 3 = 1 device
    assert found((0, 1), 3, 0.5) == {((0, 2), (0, 2), (1, 2)), ((0, 4), (1, 1), (1, 1))}
    # at least 0.6 x 2 = 1.2: two of one device are too small
    assert found((0, 1), 3, 0.6) == {((0, 2), (0, 2), (1, 2))}
    assert found((0, 1), 4, 0.5) == {
        ((0, 2), (0, 2), (1, 1), (1, 1)), ((0, 1), (0, 1), (0, 2), (1, 2)), ((0, 2), (0, 1), (0, 1), (1, 2)),
    }  # fmt: skip


def test_both_device_orders_have_every_number_of_stages():
    objective = watched(four_and_two())
    orders = {}
    for genome in objective.priced:
        groups = tuple(dict.fromkeys(objective.space.options[k].group for k in genome.options))
        orders.setdefault(groups, set()).add(len(genome.options))
    assert orders == {(0, 1): {2, 3, 4}, (1, 0): {2, 3, 4}}


def test_of_a_plan_of_two_stages_both_are_priced():
    objective = watched(four_and_two())
    for order in ((0, 1), (1, 0)):
        two = [
            genome
            for genome in objective.priced
            if tuple(objective.space.options[k].group for k in genome.options) == order
        ]
        assert two
        for genome in two:
            estimate = objective.estimator(objective.space.plan(genome))
            assert len(estimate.stages) == 2
            assert sum(genome.layers) == 6
            # neither stage's work is left out: the iteration is no shorter than either takes for all micro-batches
            assert estimate.iteration_s >= max(estimate.loads_s) * (1 - 1e-12)
            assert min(estimate.loads_s) > 0
            # and the pipeline's first micro-batch goes through both
            assert estimate.makespan_s >= sum(stage.busy_s for stage in estimate.stages)
            assert objective.many(objective.space.encode([genome])).iteration_s[0] == estimate.iteration_s


def test_the_stage_with_least_room_halves_dp_and_doubles_tp_by_hand():
    space = space_of()
    fast, slow = ((0, 4), (1, 2))
    # equal speeds: 3 + 3 layers. With tp 1 two layers fit, with tp 2 four: the fast stage is relieved first (equal
    # room, foremost first), then the slow one; then all layers go where speed wants them, and the way ends
    set_tables(space, 4, lambda _: 1, most=lambda option, _: 2 * option.tp)
    way = [
        ([(space.options[k].tp, space.options[k].dp) for k in genome.options], genome.layers)
        for genome in metis.plans(space, 4, (fast, slow))
    ]
    assert way == [([(2, 2), (1, 2)], (4, 2)), ([(2, 2), (2, 1)], (3, 3))]
    # with room everywhere nothing is relieved, and data parallelism stays
    set_tables(space, 4, lambda _: 1)
    (genome,) = metis.plans(space, 4, (fast, slow))
    assert [(space.options[k].tp, space.options[k].recompute) for k in genome.options] == [(1, "none"), (1, "none")]


def test_where_tp_does_not_help_recomputation_does():
    space = space_of()
    set_tables(space, 4, lambda _: 1, most=lambda option, _: 1 if option.recompute == "none" else 6)
    (genome,) = metis.plans(space, 4, ((0, 4), (1, 2)))
    assert {space.options[k].recompute for k in genome.options} == {"full"}


def test_layers_follow_speed_by_hand():
    space = space_of()
    set_tables(space, 4, lambda option: 1 if option.group == 0 else 2)
    (genome,) = metis.plans(space, 4, ((0, 4), (1, 2)))
    assert genome.layers == (4, 2)


def test_a_dp_that_does_not_divide_a_microbatch_starts_with_more_tp():
    space = space_of(problem((group("only", per_node=4),), global_batch_size=8))  # 2 samples per micro-batch
    assert [space.options[k] for k in metis.data_parallel(space, 4, ((0, 4),), "none")] == [Option(0, 2, 2, "none")]


def test_it_is_finite_and_a_smaller_variance_sees_more():
    few, many = (watched(four_and_two(), variance=variance).evaluations for variance in (1.0, 0.1))
    assert few < many
    result = run_search(Metis(), four_and_two(), Budget(evaluations=5000), space=SPEC)
    assert result.stopped_by == "finished"
    with pytest.raises(InputError, match="variance=0"):
        load_searcher("metis", {"variance": 0})


def test_all_device_types_can_come_first():
    groups = [group(name, per_node=1, tflops=t) for name, t in (("a", 100.0), ("b", 50.0), ("c", 25.0))]
    objective = watched(problem(groups, global_batch_size=8))
    orders = {tuple(objective.space.options[k].group for k in genome.options) for genome in objective.priced}
    assert orders == set(itertools.permutations(range(3)))
