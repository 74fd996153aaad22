"""The exact search against brute force, in its own objective and in the scored time; its proofs; its limits."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

from haap_rl.cost.estimator import Estimator
from haap_rl.problem.presets import load_problem
from haap_rl.search.base import Budget, Objective, load_searcher, run_search
from haap_rl.search.exact import Exact, Proof, build, path_bound_s
from haap_rl.space.bound import lower_bound
from haap_rl.space.initial import pruning_report
from haap_rl.space.options import SpaceSpec
from haap_rl.space.space import Space
from tests.builders import group, problem, room
from tests.space.enumerate_plans import every_plan


def random_problem(rng):
    """A small problem of one to three device types and at most 12 layers, and a space small enough to enumerate."""
    names = ("fast", "slow", "third")[: int(rng.integers(1, 4))]
    groups = tuple(
        group(
            name,
            nodes=int(rng.integers(1, 4)),
            per_node=int(rng.choice([1, 2, 3, 6])),
            memory_gb=room(float(rng.uniform(0.4, 6.0))),
            tflops=float(rng.uniform(10, 100)),
            intra_gb=float(rng.choice([1, 20, 100])),
            inter_gb=float(rng.choice([0.02, 0.2, 2, 20, 200])),
            latencies_us=((20, 50), (20, 20), (1000, 5), (1, 1e5))[int(rng.integers(4))],
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
        mixed_stages=len(names) > 1 and rng.random() < 0.5,
    )
    return target, spec


def check_cut_proofs(target, spec, best, rng):
    """A proof that is cut short, by steps or by evaluations, proves nothing that is not so."""
    cut = Exact(heuristic=1, nodes=int(rng.integers(1, 40)))
    result = run_search(cut, target, Budget(evaluations=int(rng.integers(1, 60))), seed=1, space=spec)
    assert result.lower_bound_s <= best * (1 + 1e-12)
    if result.proven_optimal:
        assert result.estimate.iteration_s == pytest.approx(best, rel=1e-9)


def test_exact_equals_brute_force_on_random_problems():
    """200 of them, up to three device types, a third with stages on two types; every bound holds for every plan."""
    rng = np.random.default_rng(0)
    solved = infeasible = three = mixed = equal = programs = leveled = 0
    while solved < 200:
        target, spec = random_problem(rng)
        if not 0 < pruning_report(target, spec).plans <= 400:  # brute force must end
            continue
        space = Space(target, spec, Estimator(target))
        plans = [(genome, estimate) for genome, estimate in every_plan(space) if estimate.fits]
        result = run_search(Exact(heuristic=20), target, Budget(evaluations=100_000), seed=0, space=spec)
        best = min((estimate.iteration_s for _, estimate in plans), default=math.inf)
        assert result.lower_bound_s <= best * (1 + 1e-12)
        assert lower_bound(target, spec).seconds <= best
        if not plans:
            infeasible += 1
            assert result.plan is None
            continue
        solved += 1
        three += len(target.cluster.groups) == 3
        mixed += any(len(stage.replicas) > 1 for genome, _ in plans for stage in space.plan(genome).stages)
        assert result.estimate.iteration_s == pytest.approx(best, rel=1e-9)
        assert result.proven_optimal
        assert result.stopped_by == "finished"
        if solved % 2:
            check_cut_proofs(target, spec, best, rng)
        for m in space.num_microbatches:
            program = build(space, m, False, math.inf)
            if program is None:
                continue
            here = [(genome, e.iteration_s) for genome, e in plans if genome.num_microbatches == m]
            bounds = [path_bound_s(program, genome.options, genome.layers) for genome, _ in here]
            for bound_s, (_, iteration_s) in zip(bounds, here, strict=True):
                assert bound_s <= iteration_s * (1 + 1e-12)
            proof = Proof(Objective(target, space=spec), 10**9, contiguous=False)  # one that knows no plan yet
            found_s = proof.least_bound(m).least_s
            assert found_s <= min(bounds, default=math.inf) * (1 + 1e-9)
            for factor in (1.0000001, 1.5, 4.0):  # a known time: slow boundaries and busy times beside them count
                proof = Proof(Objective(target, space=spec), 10**9, contiguous=False)
                proof.best_s = best * factor
                known = build(space, m, False, proof.best_s)
                leveled += len(known.levels) > 1
                best_here = min((iteration_s for _, iteration_s in here), default=math.inf)
                assert proof.least_bound(m).least_s <= min(best_here, best * factor) * (1 + 1e-9)
            if bounds:
                programs += 1
                equal += found_s == pytest.approx(min(bounds), rel=1e-9)
    assert infeasible < 100
    assert three >= 30
    assert mixed >= 20
    assert leveled >= 100
    assert equal >= 0.9 * programs  # the rest: a first stage with few options kept is bounded more loosely


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
    others = ("megatron", "alpa", "aceso", "amp", "metis", "sailor")
    for name in ("autohaap", "ga", "annealing", "random", *others):
        other = run_search(load_searcher(name), target, Budget(evaluations=1000), seed=1)
        assert other.estimate.iteration_s >= exact.estimate.iteration_s * (1 - 1e-12)


def test_a_small_budget_still_gives_a_plan_and_a_better_bound_than_the_linear_program():
    target = load_problem()
    exact = run_search(Exact(), target, Budget(evaluations=50), seed=0)
    random = run_search(load_searcher("random"), target, Budget(evaluations=50), seed=0)
    assert exact.lower_bound_s > random.lower_bound_s
    assert exact.estimate.iteration_s < random.estimate.iteration_s
    assert exact.estimate.iteration_s >= exact.lower_bound_s


def test_a_cluster_that_is_too_large_says_so_and_still_gives_a_plan_and_a_bound():
    groups = tuple(group(name, nodes=64, per_node=8, memory_gb=80.0) for name in ("a", "b"))
    target = problem(groups, {"num_layers": 48}, global_batch_size=512)
    spec = SpaceSpec(num_microbatches=(8,), max_stages=8)
    result = run_search(Exact(), target, Budget(evaluations=300), space=spec)
    assert result.plan is not None
    assert 0 < result.lower_bound_s <= result.estimate.iteration_s
    (note,) = result.notes
    assert "GiB" in note
    assert " s; with space.group_sizes=[" in note
    assert "\n" not in note


def test_contiguous_device_types_are_an_ablation_and_prove_nothing_about_the_space():
    target = load_problem("gpt3_350m", "v100x4_t4x4")
    spec = SpaceSpec(num_microbatches=(32, 64), max_stages=6, max_tp=1, group_sizes=(1, 2), recompute=("none", "full"))
    free = run_search(Exact(), target, Budget(evaluations=50_000), space=spec)
    search = Exact(type_contiguous=True)
    contiguous = run_search(search, target, Budget(evaluations=50_000), space=spec)
    assert free.proven_optimal
    assert contiguous.lower_bound_s == lower_bound(target, spec).seconds
    certificate = json.loads(contiguous.artifacts["certificate.json"])
    assert certificate["proven_optimal"]
    assert certificate["covers"] != json.loads(free.artifacts["certificate.json"])["covers"]
    runs = [stage.replicas[0].group for stage in contiguous.plan.stages]
    assert len([name for name, _ in itertools.groupby(runs)]) == len(set(runs))
    assert contiguous.estimate.iteration_s >= free.estimate.iteration_s


def test_a_budget_in_seconds_ends_work_between_evaluations_too():
    result = run_search(Exact(), load_problem("llama3_70b", "h100x32_a100x32"), Budget(seconds=0.05), seed=0)
    assert result.stopped_by == "budget"
    assert result.lower_bound_s > 0
