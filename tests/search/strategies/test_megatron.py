"""The uniform grid, counted by hand."""

import numpy as np

from haap_rl.search.base import Budget, Objective, run_search
from haap_rl.search.strategies.megatron import Megatron, uniform_genomes
from haap_rl.space.options import Option, SpaceSpec
from tests.builders import group, problem

SPEC = SpaceSpec(num_microbatches=(2,), max_stages=3, max_tp=1, group_sizes=(1, 2), recompute=("none",))


def two_and_two():
    return problem((group("fast", per_node=2), group("slow", per_node=2, tflops=40.0)), global_batch_size=4)


def test_the_grid_of_two_and_two_devices_by_hand():
    space = Objective(two_and_two(), space=SPEC).space
    fast, slow, fast2, slow2 = (space.option_index[Option(g, 1, dp, "none")] for dp in (1, 2) for g in (0, 1))
    # one device per stage: four stages are too many; two per stage: both, in either order
    assert {genome.options: genome.layers for genome in uniform_genomes(space, 2, (0, 1), fewer=False)} == {
        (fast2, slow2): (2, 2),
        (slow2, fast2): (2, 2),
    }
    assert {genome.options: genome.layers for genome in uniform_genomes(space, 2, (0,), fewer=True)} == {
        (fast,): (4,),
        (fast, fast): (2, 2),
        (fast2,): (4,),
    }
    assert {genome.options for genome in uniform_genomes(space, 2, (1,), fewer=False)} == {(slow, slow), (slow2,)}


def test_it_keeps_the_best_of_the_grid():
    target = two_and_two()
    result = run_search(Megatron(), target, Budget(evaluations=100), space=SPEC)
    space = Objective(target, space=SPEC).space
    grid = [*uniform_genomes(space, 2, (0, 1), fewer=False), *uniform_genomes(space, 2, (0,), fewer=True)]
    times = [space.estimator(space.plan(genome)).rank for genome in grid]
    assert result.estimate.rank == min(times)
    assert result.evaluations == len(times) == 5
    assert result.stopped_by == "finished"


def test_layers_that_do_not_divide_go_to_the_middle():
    target = problem((group("fast", per_node=3),), {"num_layers": 7}, global_batch_size=4)
    space = Objective(target, space=SPEC).space
    assert (2, 3, 2) in {genome.layers for genome in uniform_genomes(space, 2, (0,), fewer=True)}


def test_a_grid_that_is_empty_ends_with_a_reason():
    target = two_and_two()  # four stages of one device each, of which the space has at most three
    spec = SpaceSpec(num_microbatches=(2,), max_stages=3, max_tp=1, group_sizes=(1,), recompute=("none",))
    result = run_search(Megatron(devices="all"), target, Budget(evaluations=10), space=spec)
    assert np.isfinite(result.lower_bound_s)
    assert result.plan is None
    assert "before it tried a plan" in result.reason
