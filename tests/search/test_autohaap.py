"""What is particular to AutoHAAP: regular starts, re-sharding, a limited descent, spaces with hardly a choice."""

import dataclasses

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

REAL = load_problem("gpt3_1_3b", "v100x4_t4x4")
SMALL = SpaceSpec(num_microbatches=(2, 4), max_stages=3, max_tp=2, group_sizes=(1, 2), recompute=("none", "full"))


def small(usable_gb=2.4, **cluster):
    groups = [group("fast", per_node=2, memory_gb=room(usable_gb), **cluster)]
    if not cluster:
        groups.append(group("slow", per_node=2, memory_gb=room(0.6 * usable_gb), tflops=40.0))
    return problem(tuple(groups), {"num_layers": 4}, global_batch_size=8, seq_len=1024)


@pytest.fixture(scope="module")
def optimum():
    """Iteration time of a proven optimum of the real problem."""
    result = run_search(Exact(), REAL, Budget(evaluations=200_000))
    assert result.proven_optimal
    return result.estimate.iteration_s


@pytest.mark.parametrize("seed", range(4))
def test_it_reaches_the_proven_optimum_of_a_real_problem_and_never_gets_worse(optimum, seed):
    result = run_search(AutoHAAP(), REAL, Budget(evaluations=30_000), seed)
    assert result.estimate.iteration_s == pytest.approx(optimum, rel=1e-9)
    times = [point.best_iteration_time_s for point in result.trace if point.best_iteration_time_s is not None]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("most", [1, 7, 250])
def test_a_descent_stops_at_the_evaluations_it_is_given(most):
    objective = Objective(REAL)
    AutoHAAP().descend(objective, np.random.default_rng(0), most)
    assert objective.evaluations == most


def test_a_descent_prices_no_plan_twice_and_ends_by_itself():
    objective = Objective(small(), space=SMALL)
    priced = []
    many = objective.many
    objective.many = lambda codes, *limit: (priced.extend(code.tobytes() for code in codes), many(codes, *limit))[1]
    AutoHAAP(starts=5).descend(objective, np.random.default_rng(1))
    assert len(priced) == len(set(priced)) == objective.evaluations


@pytest.mark.parametrize("change", [
    {"max_stages": 1}, {"group_sizes": (2,), "max_tp": 1, "recompute": ("full",), "num_microbatches": (4,)},
])  # fmt: skip
def test_one_stage_or_one_option_is_enough(change):
    spec = dataclasses.replace(SMALL, **change)
    fits = small(8.0, num_nodes=1) if "group_sizes" in change else small(8.0)
    result = run_search(AutoHAAP(), fits, Budget(evaluations=60), space=spec)
    assert result.estimate.fits
    assert result.evaluations == 60


def test_where_no_start_fits_memory_the_relief_leads_to_a_plan_that_does():
    spec = dataclasses.replace(SMALL, memory_aware_init=False)
    tight = small(1.3)
    objective = Objective(tight, space=spec)
    rng = np.random.default_rng(3)
    prices = objective.many(objective.space.draws(rng, 2))
    assert prices.bytes_missing.all()
    result = run_search(AutoHAAP(starts=1), tight, Budget(evaluations=3000), seed=3, space=spec)
    assert result.estimate.fits


@pytest.mark.parametrize("name", [("llama3_8b", "a100x8_v100x8_l40sx8"), ("gpt3_1_3b", "v100x4_t4x4")])
def test_regular_starts_and_resharded_plans_are_plans_of_the_space(name):
    space = Objective(load_problem(*name)).space
    options = relief_kernels.regular_options(space)
    rng = np.random.default_rng(0)
    codes = space.draws(rng, 40)
    relief_kernels.regular(space.neighbourhood, options, rng, codes)
    out = np.zeros((kernels.most_relief(space) + len(space.options) + 1, codes.shape[1]), np.int64)
    resharded = 0
    for code in codes:
        genome = space.genome_of(code)
        runs = [k for k, before in zip(genome.options, (-1, *genome.options), strict=False) if k != before]
        assert len({space.options[k].group for k in runs}) == len(runs)  # one run of equal stages of a device group
        assert space.holds(*genome[:2])
        assert space.decode(*genome[:2]) == genome
        for row in out[: relief_kernels.reshard(space.neighbourhood, code, 0, out, 0)]:
            other = space.genome_of(row)
            resharded += 1
            assert space.decode(*other[:2]) == other
            assert space.devices_left(other.options) == space.devices_left(genome.options)
    assert resharded > 20


@pytest.mark.parametrize("parameters", [{"starts": 0}, {"width": 0}, {"patience": -0.1}])
def test_senseless_parameters_are_refused(parameters):
    with pytest.raises(InputError, match=next(iter(parameters))):
        AutoHAAP(**parameters)
