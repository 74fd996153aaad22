"""The exact search against brute force, in its own objective and in the scored time; its proofs; its limits."""

import dataclasses
import math

import numpy as np
import pytest

from haap_rl.cost.estimator import Estimator
from haap_rl.problem.errors import InputError
from haap_rl.problem.presets import load_problem
from haap_rl.search.base import Budget, load_searcher, run_search
from haap_rl.search.exact import Exact, Program, path_bound_s
from haap_rl.space.bound import lower_bound
from haap_rl.space.initial import pruning_report
from haap_rl.space.options import SpaceSpec
from haap_rl.space.space import Space
from tests.builders import group, problem, room
from tests.space.enumerate_plans import every_plan


def random_problem(rng):
    """A small problem of one or two device types and at most 12 layers, and a space small enough to enumerate."""
    names = ("fast", "slow")[: int(rng.integers(1, 3))]
    groups = tuple(
        group(
            name,
            nodes=int(rng.integers(1, 4)),
            per_node=int(rng.choice([1, 2, 3, 6])),
            memory_gb=room(float(rng.uniform(0.4, 6.0))),
            tflops=float(rng.uniform(10, 100)),
            intra_gb=float(rng.choice([1, 20, 100])),
            inter_gb=float(rng.choice([0.2, 2, 20, 200])),
            latencies_us=((20, 50), (20, 20), (1000, 5))[int(rng.integers(3))],
            nics=int(rng.choice([1, 2, 4])),
        )
        for name in names
    )
    changes = {
        "num_layers": int(rng.integers(2, 13)),
        "tied_embeddings": bool(rng.integers(2)),
        "dropout": bool(rng.integers(2)),
    }
    framework = ("megatron", "deepspeed")[int(rng.integers(2))]
    target = problem(groups, changes, global_batch_size=8, seq_len=512, framework=framework)
    sizes = [(1,), (2,), (3,), (4,), (1, 2), (2, 3), (2, 4)][int(rng.integers(7))]
    spec = SpaceSpec(
        num_microbatches=((2,), (4,), (2, 8), (8,))[int(rng.integers(4))],
        max_stages=int(rng.integers(1, 4)),
        max_tp=int(rng.choice([1, 2, 4])),
        group_sizes=sizes,
        recompute=("none", "full")[: int(rng.integers(1, 3))],
    )
    return target, spec


def test_exact_equals_brute_force_in_both_senses_on_random_problems():
    rng = np.random.default_rng(0)
    solved = infeasible = 0
    while solved < 50:
        target, spec = random_problem(rng)
        if not 0 < pruning_report(target, spec).plans <= 1500:  # brute force must end
            continue
        space = Space(target, spec, Estimator(target))
        plans = [(genome, estimate) for genome, estimate in every_plan(space) if estimate.fits]
        result = run_search(Exact(), target, Budget(evaluations=100_000), seed=0, space=spec)
        assert result.lower_bound_s <= min((e.iteration_s for _, e in plans), default=math.inf) * (1 + 1e-12)
        assert lower_bound(target, spec).seconds <= min((e.iteration_s for _, e in plans), default=math.inf)
        if not plans:
            infeasible += 1
            assert result.plan is None
            continue
        solved += 1
        bounds = {}
        programs = {m: Program(space, m) for m in space.num_microbatches}
        for genome, estimate in plans:
            m = genome.num_microbatches
            bound_s = path_bound_s(programs[m], genome)
            assert bound_s <= estimate.iteration_s * (1 + 1e-12)
            bounds[m] = min(bounds.get(m, math.inf), bound_s)
        for m, least in bounds.items():
            found_s, genome = programs[m].least_bound(math.inf)
            assert found_s == pytest.approx(least, rel=1e-9)
            assert path_bound_s(programs[m], genome) == pytest.approx(found_s, rel=1e-12)
        best = min(estimate.iteration_s for _, estimate in plans)
        assert result.estimate.iteration_s == pytest.approx(best, rel=1e-9)
        assert result.proven_optimal
        assert result.lower_bound_s <= best
        assert result.stopped_by == "finished"
    assert infeasible < 20


def test_switches_that_ablate_the_search_do_not_touch_the_proof():
    rng = np.random.default_rng(5)
    target, spec = random_problem(rng)
    results = [
        run_search(Exact(), target, Budget(evaluations=50_000), seed=0, space=dataclasses.replace(spec, **changes))
        for changes in ({}, {"memory_aware_init": False}, {"load_balance": False})
    ]
    assert len({result.estimate.iteration_s for result in results if result.estimate}) <= 1
    assert all(result.proven_optimal for result in results if result.estimate)


def test_exact_proves_the_optimum_of_a_real_case_and_nobody_beats_it():
    target = load_problem("llama3_8b", "a100x8")
    exact = run_search(Exact(), target, Budget(evaluations=5000), seed=0)
    assert exact.proven_optimal
    assert exact.gap_to_lower_bound == pytest.approx(0, abs=1e-9)
    for name in ("autohaap", "ga", "annealing", "random", "megatron"):
        other = run_search(load_searcher(name), target, Budget(evaluations=1000), seed=1)
        assert other.estimate.iteration_s >= exact.estimate.iteration_s * (1 - 1e-12)


def test_a_small_budget_still_gives_a_plan_and_a_better_bound_than_the_linear_program():
    target = load_problem()
    exact = run_search(Exact(), target, Budget(evaluations=50), seed=0)
    random = run_search(load_searcher("random"), target, Budget(evaluations=50), seed=0)
    assert exact.lower_bound_s > random.lower_bound_s
    assert exact.estimate.iteration_s < random.estimate.iteration_s
    assert exact.estimate.iteration_s >= exact.lower_bound_s


def test_a_cluster_that_is_too_large_is_refused_in_one_line():
    groups = tuple(group(name, nodes=64, per_node=8) for name in ("a", "b"))
    with pytest.raises(InputError, match="table entries") as error:
        run_search(Exact(), problem(groups, {"num_layers": 48}), Budget(evaluations=10))
    assert "\n" not in str(error.value)
    assert "space.max_stages" in str(error.value)


def test_a_budget_in_seconds_ends_work_between_evaluations_too():
    calls = []
    space = Space(load_problem(), SpaceSpec(), Estimator(load_problem()))
    program = Program(space, 32, lambda: calls.append(1))
    program.solve(1e300)
    assert len(calls) == space.max_stages
    result = run_search(Exact(), load_problem(), Budget(seconds=0.05), seed=0)
    assert result.stopped_by == "budget"
    assert result.evaluations < 50
