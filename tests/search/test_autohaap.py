"""What is particular to the baseline heuristic: how good it is, its limits, its starts and its larger moves."""

import numpy as np
import pytest

from haap_rl.problem.errors import InputError
from haap_rl.problem.presets import load_problem
from haap_rl.search import relief_kernels
from haap_rl.search.autohaap import AutoHAAP
from haap_rl.search.base import Budget, Objective, run_search
from haap_rl.search.exact import Exact
from haap_rl.space import kernels
from haap_rl.space.options import SpaceSpec
from tests.builders import group, problem, room


def test_it_finds_the_proven_optimum_of_a_real_case_from_every_seed():
    target = load_problem("llama3_8b", "a100x8")
    best = run_search(Exact(), target, Budget(evaluations=100_000), seed=0)
    assert best.proven_optimal
    for seed in range(5):
        found = run_search(AutoHAAP(), target, Budget(evaluations=10_000), seed=seed)
        assert found.estimate.iteration_s == pytest.approx(best.estimate.iteration_s, rel=1e-9)


@pytest.mark.parametrize("most", [1, 37, 100, 1500])
def test_a_descent_ends_after_the_evaluations_it_is_given(most):
    objective = Objective(load_problem())
    AutoHAAP().descend(objective, np.random.default_rng(0), most)
    assert objective.evaluations <= most
    assert objective.evaluations >= min(most, 100)


def test_a_descent_ends_by_itself_where_all_plans_kept_are_local_optima():
    objective = Objective(load_problem("llama3_8b", "a100x8"))
    AutoHAAP(starts=10, width=3).descend(objective, np.random.default_rng(0))
    assert 10 < objective.evaluations < 100_000


def test_one_stage_and_one_option_are_enough():
    spec = SpaceSpec(num_microbatches=(2,), max_stages=1, max_tp=1, group_sizes=(4,), recompute=("none",))
    target = problem((group("only"),))
    result = run_search(AutoHAAP(), target, Budget(evaluations=50), space=spec)
    assert len(result.plan.stages) == 1


def test_it_finds_a_plan_that_fits_where_draws_mind_no_memory():
    groups = (group("fast", memory_gb=room(2.4)), group("slow", memory_gb=room(1.5), tflops=40.0))
    target = problem(groups, {"num_layers": 8}, seq_len=1024)
    spec = SpaceSpec(num_microbatches=(2, 4, 8), max_stages=4, group_sizes=(1, 2, 4), memory_aware_init=False)
    result = run_search(AutoHAAP(), target, Budget(evaluations=2000), seed=0, space=spec)
    assert result.estimate.fits


def test_regular_starts_have_each_device_group_as_one_run_of_equal_stages_and_fit():
    space = Objective(load_problem("llama3_8b", "a100x8_v100x8_l40sx8")).space
    rows = np.zeros((200, 2 + 2 * space.max_stages), np.int64)
    rng = np.random.default_rng(0)
    relief_kernels.regular(space.neighbourhood, relief_kernels.regular_options(space), rng, rows)
    made = rows[rows[:, 1] > 0]
    assert len(made) > 150
    for row in made:
        genome = space.genome_of(row)
        assert space.holds(genome.num_microbatches, genome.options)
        assert space.decode(genome.num_microbatches, genome.options) == genome
        runs = [space.options[k] for k in dict.fromkeys(genome.options)]
        assert len({option.group for option in runs}) == len(runs)


def test_reshaping_alike_stages_keeps_their_devices():
    space = Objective(load_problem()).space
    out = np.zeros((kernels.most_relief(space) + len(space.options) + 1, 2 + 2 * space.max_stages), np.int64)
    reshaped = 0
    for row in space.draws(np.random.default_rng(1), 30):
        genome = space.genome_of(row)
        for stage, k in enumerate(genome.options):
            count = relief_kernels.reshard(space.neighbourhood, row, stage, out, 0)
            for found in out[:count]:
                other = space.genome_of(found)
                reshaped += 1
                assert space.devices_left(other.options) == space.devices_left(genome.options)
                rest = iter(other.options)  # the other stages are there still, in their order
                assert all(o in rest for o in genome.options if o != k)
                assert space.decode(other.num_microbatches, other.options) == other
    assert reshaped > 30


@pytest.mark.parametrize("values", [{"width": 0}, {"patience": 0}, {"starts": 1.5}])
def test_bad_settings_are_refused(values):
    with pytest.raises(InputError, match="search=autohaap"):
        AutoHAAP(**values)
