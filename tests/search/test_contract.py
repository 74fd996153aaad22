"""Every searcher in conf/search/ keeps the same promises; a new one is found here by itself.

So do the one of docs/new_searcher.md, installed as a package of its own, and any named in HAAP_RL_SEARCHER_YAML.
"""

import dataclasses
import inspect
import itertools
import math
import random

import numpy as np
import pytest
import yaml

from haap_rl.cost.estimator import Estimator
from haap_rl.problem.errors import InputError
from haap_rl.problem.presets import load_problem, names, preset
from haap_rl.search.base import Budget, BudgetExhausted, Objective, load_searcher, run_search
from haap_rl.space.options import SpaceSpec
from haap_rl.space.space import Space
from tests import documented_searcher
from tests.builders import group, problem, room
from tests.space.enumerate_plans import every_plan

INSTALLED = {path.stem: path for path in documented_searcher.own_searchers_yaml()}
REPLAY = "replay"  # prices the one plan of a file and has none of its own: see test_replay.py
SEARCHERS = [name for name in dict.fromkeys([*names("search"), documented_searcher.NAME, *INSTALLED]) if name != REPLAY]
SPEC = SpaceSpec(num_microbatches=(2, 4), max_stages=3, max_tp=2, group_sizes=(1, 2), recompute=("none", "full"))
BUDGET = Budget(evaluations=200)


def small(usable_gb=2.4):
    groups = (
        group("fast", per_node=2, memory_gb=room(usable_gb)),
        group("slow", per_node=2, memory_gb=room(0.6 * usable_gb), tflops=40.0),
    )
    return problem(groups, {"num_layers": 4}, global_batch_size=8, seq_len=1024)


@pytest.fixture(scope="module")
def optimum():
    """Iteration time of the best plan of the small problem, by brute force."""
    space = Space(small(), SPEC, Estimator(small()))
    return min(estimate.iteration_s for _, estimate in every_plan(space) if estimate.fits)


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    """The documented searcher, installed, unless one of that name is installed already."""
    if documented_searcher.NAME in INSTALLED:
        yield
        return
    folder = tmp_path_factory.mktemp("documented")
    INSTALLED[documented_searcher.NAME] = documented_searcher.write_package(folder / "package")
    documented_searcher.install(folder / "package", folder / "site")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder / "site")
        yield


def settings(name):
    """The YAML of a searcher, ours or an installed one's."""
    return yaml.safe_load(INSTALLED[name].read_text()) if name in INSTALLED else preset("search", name)


def searcher(name):
    parameters = settings(name)
    assert parameters.pop("name") == name
    return load_searcher(name, parameters)


@pytest.fixture(scope="module", params=SEARCHERS)
def run(request):
    """(name, result) of one run of each searcher on the small problem."""
    return request.param, run_search(searcher(request.param), small(), BUDGET, seed=3, space=SPEC)


def test_there_are_the_searchers_of_the_paper():
    assert {"autohaap", "ga", "ppo", "random"} <= set(SEARCHERS)


@pytest.mark.parametrize("name", [*SEARCHERS, REPLAY])
def test_yaml_lists_every_parameter_with_its_default(name):
    constructor = inspect.signature(type(load_searcher(name))).parameters
    listed = {key: value for key, value in settings(name).items() if key != "name"}
    assert listed == {key: parameter.default for key, parameter in constructor.items()}


def test_budget_is_never_exceeded(run):
    _, result = run
    assert result.evaluations <= BUDGET.evaluations
    assert result.evaluations == BUDGET.evaluations or result.stopped_by == "finished"
    assert result.trace[-1].evaluations == result.evaluations


def test_best_is_monotone_and_the_trace_ends_with_it(run):
    _, result = run
    times = [point.best_iteration_time_s for point in result.trace]
    times = times[times.count(None) :]  # until a plan fits there is no time
    assert None not in times
    assert all(later <= earlier for earlier, later in itertools.pairwise(times))
    assert times[-1] == result.estimate.iteration_s
    for key in ("evaluations", "operator_evaluations", "operator_evaluations_avoided", "seconds"):
        values = [getattr(point, key) for point in result.trace]
        assert values == sorted(values)


def test_returned_plan_is_legal_and_estimates_to_the_reported_value(run):
    _, result = run
    small().validate(result.plan)
    assert Estimator(small())(result.plan) == result.estimate
    assert result.estimate.fits


def test_nobody_beats_the_optimum_and_the_optimum_not_the_bound(run, optimum):
    _, result = run
    assert result.estimate.iteration_s >= optimum * (1 - 1e-12)
    assert result.lower_bound_s <= optimum
    assert result.gap_to_lower_bound == result.estimate.iteration_s / result.lower_bound_s - 1
    assert not result.proven_optimal or result.estimate.iteration_s == optimum


def test_same_seed_same_run_and_another_seed_another(run):
    name, result = run
    assert run_search(searcher(name), small(), BUDGET, seed=3, space=SPEC) == result
    other = run_search(searcher(name), small(), BUDGET, seed=4, space=SPEC)
    assert other.trace != result.trace or other.stopped_by == result.stopped_by == "finished"


def test_cached_and_uncached_runs_are_equal_but_for_the_operator_columns(run):
    name, result = run
    plain = run_search(searcher(name), small(), BUDGET, seed=3, space=SPEC, cached=False)
    assert plain.plan == result.plan
    assert plain.estimate == result.estimate

    def without_operators(points):
        return [dataclasses.replace(point, operator_evaluations=0, operator_evaluations_avoided=0) for point in points]

    assert without_operators(plain.trace) == without_operators(result.trace)
    assert plain.operator_evaluations_avoided == 0
    # the tables cost as much as some ten plans, which a search of few plans hardly gets back
    many = result.evaluations >= 50
    assert plain.operator_evaluations > (10 if many else 1) * result.operator_evaluations
    avoided, per_plan = result.operator_evaluations_avoided, result.operator_evaluations_avoided_per_plan
    assert avoided > per_plan > 0 if many else avoided >= per_plan >= 0


def test_artifacts_are_plain_files_and_no_part_of_equality(run):
    _, result = run
    assert all(isinstance(content, bytes) for content in result.artifacts.values())
    assert not set(result.artifacts) & {"config.yaml", "plan.json", "result.json", "trace.csv", "report.html"}
    assert dataclasses.replace(result, artifacts={}) == result


@pytest.mark.parametrize("name", SEARCHERS)
def test_an_impossible_problem_gets_a_reason(name):
    result = run_search(searcher(name), small(0.05), BUDGET, seed=0, space=SPEC)
    assert result.plan is None
    assert result.estimate is None
    assert result.stopped_by == "infeasible"
    assert result.evaluations == 0
    assert result.lower_bound_s == math.inf
    assert all(word in result.reason for word in ("fast_device", "slow_device", "GiB"))


@pytest.mark.parametrize("name", SEARCHERS)
def test_global_generators_are_left_as_they_were(name):
    random.seed(1)
    np.random.seed(2)  # noqa: NPY002
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    run_search(searcher(name), small(), Budget(evaluations=60), seed=0, space=SPEC)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002


@pytest.mark.parametrize("name", SEARCHERS)
def test_without_the_ablated_ideas_a_search_still_ends_with_a_plan_or_a_reason(name):
    for off in ("memory_aware_init", "load_balance"):
        spec = dataclasses.replace(SPEC, **{off: False})
        result = run_search(searcher(name), small(), BUDGET, seed=0, space=spec)
        assert result.evaluations <= BUDGET.evaluations
        assert result.estimate.fits if result.plan is not None else "misses" in result.reason


@pytest.mark.parametrize("name", SEARCHERS)
def test_a_budget_of_one_and_a_budget_in_seconds(name):
    assert run_search(searcher(name), small(), Budget(evaluations=1), seed=0, space=SPEC).evaluations == 1
    assert run_search(searcher(name), small(), Budget(seconds=1e-9), seed=0, space=SPEC).stopped_by == "budget"


# ------------------------------------------------------------------------------- the objective
class Proposes:
    """A searcher that runs a function."""

    def __init__(self, function):
        self.function = function

    def search(self, problem, objective, rng):
        return self.function(problem, objective, rng)


def test_searches_that_do_not_run_to_the_budget():
    def one(problem, objective, rng):
        estimate = objective(objective.space.plan(objective.space.draw(rng)))
        objective.prove(0.001)  # weaker than what is known: changes nothing
        objective.prove(estimate.iteration_s)

    def interrupted(problem, objective, rng):
        objective(objective.space.plan(objective.space.draw(rng)))
        raise KeyboardInterrupt

    finished = run_search(Proposes(one), small(), BUDGET, space=SPEC)
    assert (finished.stopped_by, finished.proven_optimal, finished.evaluations) == ("finished", True, 1)
    assert finished.gap_to_lower_bound == 0
    stopped = run_search(Proposes(interrupted), small(), BUDGET, space=SPEC)
    assert (stopped.stopped_by, stopped.proven_optimal) == ("interrupted", False)
    assert stopped.plan == finished.plan
    nothing = run_search(Proposes(lambda *_: None), small(), BUDGET, space=SPEC)
    assert nothing.plan is None
    assert "before it tried a plan" in nothing.reason


def test_what_a_searcher_logs_and_makes_is_handed_on_however_it_ends():
    class Makes(Proposes):
        def artifacts(self):
            return {self.name: b"made"}

    def run(function, name="thing.bin", **settings):
        proposes = Makes(function)
        proposes.name = name
        return run_search(proposes, small(), Budget(evaluations=1), space=SPEC, **settings)

    def logs(problem, objective, rng):
        objective.log({"loss": 1.0})
        raise KeyboardInterrupt

    def spends(problem, objective, rng):
        while True:
            objective(objective.space.plan(objective.space.draw(rng)))

    heard = []
    assert run(logs, on_log=lambda objective, values: heard.append((objective.evaluations, values))).artifacts
    assert heard == [(0, {"loss": 1.0})]
    assert run(logs).stopped_by == "interrupted"
    assert run(spends).artifacts == {"thing.bin": b"made"}
    for name in ("../x", "a/b", "a\\b", ".hidden", ""):
        with pytest.raises(ValueError, match="plain file name"):
            run(spends, name)
    started = []
    run_search(Proposes(spends), small(), BUDGET, space=SPEC, on_start=lambda: started.append(1))
    run_search(Proposes(spends), small(0.05), BUDGET, space=SPEC, on_start=lambda: started.append(2))
    assert started == [1]


def test_objective_counts_what_ifs_and_progress_sees_each_batch():
    seen = []
    objective = Objective(
        small(),
        Budget(evaluations=4),
        SPEC,
        on_progress=lambda o: seen.append((o.evaluations, len(o.last.iteration_s))),
    )
    codes = np.repeat(objective.space.draws(np.random.default_rng(0), 1), 3, axis=0)
    plan = objective.space.plan(objective.space.genome_of(codes[0]))
    assert objective.remaining == 4
    prices = objective.many(codes[:2])
    assert prices.rank(0) == prices.rank(1) == objective.best[1].rank
    assert objective.remaining == 2
    assert objective(plan).rank == prices.rank(0)
    with pytest.raises(BudgetExhausted):  # after the one that the budget still gives
        objective.many(codes)
    with pytest.raises(BudgetExhausted):
        objective(plan)
    assert seen == [(2, 2), (3, 1), (4, 1)]
    assert Objective(small()).remaining is None


def test_a_limit_spares_the_end_of_plans_that_cannot_be_better_and_counts_them():
    objective = Objective(small(), space=SPEC)
    codes = objective.space.draws(np.random.default_rng(0), 50)
    exact = objective.many(codes).iteration_s
    limit_s = float(np.median(exact))
    limited = objective.many(codes, limit_s).iteration_s
    assert objective.evaluations == 100
    assert (limited <= exact).all()
    assert (limited[exact < limit_s] == exact[exact < limit_s]).all()
    assert (limited[limited != exact] >= limit_s).all()
    assert (limited != exact).any()


@pytest.mark.parametrize("values", [{}, {"evaluations": 0}, {"seconds": math.nan}, {"evaluations": 1.5}])
def test_a_bad_budget_is_refused(values):
    with pytest.raises(InputError, match="budget"):
        Budget(**values)


@pytest.mark.parametrize(("name", "parameters", "words"), [
    ("nope", {}, ["'nope'"]), ("base", {}, ["'base'"]), ("strategies", {}, ["'strategies'"]), ("../x", {}, ["../x"]),
    ("ga", {"populaton": 3}, ["'populaton'", "population"]),
])  # fmt: skip
def test_an_unknown_searcher_or_parameter_is_refused(name, parameters, words):
    with pytest.raises(InputError) as error:
        load_searcher(name, parameters)
    assert all(word in str(error.value) for word in words)


def test_pruning_and_space_are_those_of_the_default_case():
    result = run_search(load_searcher("random"), load_problem(), Budget(evaluations=5))
    assert result.pruning.factor > 100
    assert 0 < result.gap_to_lower_bound < 5
