"""`space.target`: searchers, bound, proof and counts speak of exactly the plans that a trainer can be told."""

import math
from dataclasses import asdict, replace

import gymnasium
import pytest

from haap_rl import train
from haap_rl.cost.estimator import Estimator
from haap_rl.estimate import best_single_change
from haap_rl.export.targets import TARGETS, export_plan
from haap_rl.problem.errors import InputError
from haap_rl.problem.presets import names, preset
from haap_rl.search.base import Budget, Objective, load_searcher, outside, run_search
from haap_rl.search.certificate import problem_key
from haap_rl.space.bound import lower_bound
from haap_rl.space.initial import pruning_report
from haap_rl.space.options import SpaceSpec
from haap_rl.space.space import Space
from haap_rl.space.target import home, parts, sayable
from haap_rl.tracking import read_record
from tests.builders import group, problem, room
from tests.export.plans import LLAMA, in_bf16
from tests.space.enumerate_plans import every_plan

SPEC = SpaceSpec(num_microbatches=(2, 4), max_stages=3, max_tp=2, group_sizes=(1, 2), recompute=("none", "full"))
SEARCHERS = [name for name in names("search") if name not in ("replay", "exact")]


def small(usable_gb=2.4):
    groups = (
        group("fast", per_node=2, memory_gb=room(usable_gb)),
        group("slow", per_node=2, memory_gb=room(0.6 * usable_gb), tflops=40.0),
    )
    return in_bf16(problem(groups, {"num_layers": 4, **LLAMA}, global_batch_size=8, seq_len=1024))


def spec_for(target):
    return replace(SPEC, target=target, zero_stage=0 if target == "torchtitan" else 1)


def sayable_plans(target):
    """(plan, estimate) of every plan of the unlimited space that the trainer is told exactly, by brute force."""
    estimator = Estimator(small())
    space = Space(small(), replace(spec_for(target), target=None), estimator)
    found = []
    for genome, estimate in every_plan(space):
        plan = space.plan(genome)
        try:
            exact = TARGETS[target].nearest(small(), plan, estimator) == plan
        except InputError:
            exact = False
        if exact:
            found.append((plan, estimate))
    return found


@pytest.fixture(scope="module")
def brute():
    return {target: sayable_plans(target) for target in TARGETS}


@pytest.mark.parametrize("target", ["megatron", "torchtitan"])
def test_the_parts_hold_every_plan_that_the_trainer_is_told_exactly_and_no_other(brute, target):
    estimator = Estimator(small())
    held = []
    for part in parts(small(), spec_for(target)):
        space = Space(small(), part, estimator)
        held += [space.plan(genome) for genome, _ in every_plan(space)]
    assert len(held) == len(set(held))
    assert set(held) == {plan for plan, _ in brute[target]}
    assert held


@pytest.mark.parametrize("target", ["megatron", "torchtitan"])
def test_counts_and_bound_are_those_of_the_union(brute, target):
    fitting = [estimate.iteration_s for _, estimate in brute[target] if estimate.fits]
    report = pruning_report(small(), spec_for(target))
    assert report.plans == len(brute[target])
    assert report.plans_that_fit == len(fitting)
    bound_s = lower_bound(small(), spec_for(target)).seconds
    free_s = lower_bound(small(), replace(spec_for(target), target=None)).seconds
    assert free_s <= bound_s * (1 + 1e-9)
    assert 0 < bound_s <= min(fitting)


@pytest.mark.parametrize("target", list(TARGETS))
def test_the_exact_search_proves_the_optimum_of_what_the_trainer_can_be_told(brute, target):
    result = run_search(load_searcher("exact"), small(), Budget(evaluations=100_000), 0, spec_for(target))
    optimum = min(estimate.iteration_s for _, estimate in brute[target] if estimate.fits)
    assert result.proven_optimal
    assert math.isclose(result.estimate.iteration_s, optimum, rel_tol=1e-9)
    assert result.lower_bound_s <= optimum * (1 + 1e-9)
    # a certificate of one part of several would say too much
    assert bool(result.artifacts) == (len(parts(small(), spec_for(target))) == 1)


@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("name", SEARCHERS)
def test_what_a_searcher_finds_can_be_written_without_loss(brute, name, target):
    parameters = preset("search", name)
    parameters.pop("name")
    result = run_search(load_searcher(name, parameters), small(), Budget(evaluations=200), 3, spec_for(target))
    assert result.evaluations <= 200
    optimum = min(estimate.iteration_s for _, estimate in brute[target] if estimate.fits)
    if result.plan is not None:
        assert export_plan(small(), result.plan, target, Estimator(small())).exact
        assert result.estimate.fits
        assert result.estimate.iteration_s >= optimum * (1 - 1e-9)
        assert result.lower_bound_s <= optimum * (1 + 1e-9)
        assert any(f"limited to what {target} can be told" in note for note in result.notes)
    else:
        assert result.reason


def test_equal_seeds_give_equal_traces_and_the_best_only_improves():
    runs = [run_search(load_searcher("autohaap"), small(), Budget(300), 5, spec_for("megatron")) for _ in range(2)]
    assert runs[0].trace == runs[1].trace
    times = [point.best_iteration_time_s for point in runs[0].trace if point.best_iteration_time_s is not None]
    assert times == sorted(times, reverse=True)
    assert runs[0].evaluations == 300 or runs[0].stopped_by == "finished"


def test_a_plan_that_cannot_be_written_is_priced_but_never_the_result(brute):
    space = Space(small(), SPEC, Estimator(small()))
    said = {plan for plan, _ in brute["megatron"]}
    other = next(space.plan(genome) for genome, e in every_plan(space) if e.fits and space.plan(genome) not in said)

    class OnlyThat:
        def search(self, problem, objective, rng):
            objective(other)

    result = run_search(OnlyThat(), small(), Budget(evaluations=50), 0, spec_for("megatron"))
    assert result.evaluations > 0
    assert result.plan is None
    assert "can be written for space.target=megatron" in result.reason


def test_a_union_is_no_space_for_an_objective_or_an_environment_of_its_own():
    with pytest.raises(InputError, match="is the union of several spaces"):
        Objective(small(), space=spec_for("megatron"))
    part = parts(small(), spec_for("megatron"))[0]
    objective = Objective(small(), space=part)
    env = gymnasium.make("haap_envs:haap_rl/Partition-v0", problem=small(), objective=objective)
    env.reset(seed=0)
    plan = objective.best[0] if objective.best else objective.space.plan(objective.space.draw(env.np_random))
    assert export_plan(small(), plan, "megatron", Estimator(small())).exact


def test_a_plan_is_at_home_in_one_part_and_single_changes_stay_there(brute):
    estimator = Estimator(small())
    for plan, _ in brute["torchtitan"][::50]:
        part = home(small(), spec_for("torchtitan"), plan)
        assert not outside(Space(small(), part, estimator), plan)
    slowest = max((e.iteration_s, k) for k, (_, e) in enumerate(brute["megatron"]) if e.fits)[1]
    advice = best_single_change(small(), spec_for("megatron"), estimator, brute["megatron"][slowest][0])
    assert advice.text.startswith("the single change that helps most")


def tied(hosts):
    """A problem in which the fastest plans cannot be told FlagScale: tied embeddings, and stages that share hosts."""
    groups = (
        group("fast", per_node=4, memory_gb=room(1.3)),
        group("slow", per_node=hosts, memory_gb=room(1.1), tflops=70.0),
    )
    model = {"num_layers": 4, **LLAMA, "tied_embeddings": True}
    return in_bf16(problem(groups, model, global_batch_size=8, seq_len=1024))


@pytest.mark.parametrize("recompute", [("none", "full"), ("none", "selective", "full")])
def test_flagscale_is_proven_about_where_the_fastest_plans_cannot_be_told(recompute):
    target = tied(4)
    spec = replace(SPEC, max_stages=4, recompute=recompute, target="flagscale")
    estimator = Estimator(target)
    space = Space(target, replace(spec, target=None), estimator)
    every = [(space.plan(genome), estimate) for genome, estimate in every_plan(space)]
    fitting = sorted(((e.iteration_s, k) for k, (_, e) in enumerate(every) if e.fits))
    says = sayable(target, spec, estimator)
    first = next(n for n, (_, k) in enumerate(fitting) if says(every[k][0]))
    assert first > 0  # there are faster ones
    result = run_search(load_searcher("exact"), target, Budget(evaluations=200_000), 0, spec)
    assert result.proven_optimal
    assert math.isclose(result.estimate.iteration_s, fitting[first][0], rel_tol=1e-9)
    assert export_plan(target, result.plan, "flagscale", estimator).exact
    modes = {stage.recompute.mode for part in parts(target, spec) for stage in result.plan.stages}
    assert len(parts(target, spec)) == len({m == "selective" for m in recompute})
    assert not {"none", "selective"} <= modes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "nemo"}, "target='nemo' is not null or one of megatron, torchtitan, flagscale"),
        ({"target": 3}, "target=3 is not null"),
        ({"target": "megatron", "mixed_stages": True}, "mixed_stages=true"),
        ({"target": "torchtitan"}, "zero_stage=1, which it has in pipelines only"),
        ({"target": "torchtitan", "zero_stage": 0, "recompute": ("selective",)}, "allow other recompute modes"),
    ],
)
def test_a_bad_target_is_refused_in_one_line(changes, message):
    with pytest.raises(InputError, match=message):
        parts(small(), replace(SPEC, **changes))
    with pytest.raises(InputError, match=r"problem.precision=fp16"):
        parts(replace(small(), precision="fp16"), spec_for("torchtitan"))


def test_records_and_certificates_of_before_stay_valid_and_a_target_is_another_space():
    plain = SpaceSpec()
    assert "target" not in repr(plain)
    assert "fixed_tp" not in repr(plain)
    config = {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(plain).items() if key != "fixed_tp"}
    assert SpaceSpec.from_config(config) == plain
    assert SpaceSpec.from_config({key: value for key, value in config.items() if key != "target"}) == plain
    with pytest.raises(InputError, match="unknown key 'fixed_tp'"):
        SpaceSpec.from_config({**config, "fixed_tp": 2})
    key = problem_key(small(), plain)
    assert key == problem_key(small(), replace(plain, target=None))
    keys = {problem_key(small(), spec) for spec in (plain, replace(plain, target="megatron"))}
    assert len(keys | {problem_key(small(), replace(plain, target="megatron", fixed_tp=2))}) == 3


def test_the_command_prints_what_the_limit_costs_and_its_record_is_read_again(tmp_path, monkeypatch, capsys):
    from haap_rl.report import page
    from haap_rl.report.what_if import WhatIf

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(page, "what_if", lambda *_: WhatIf(1.0, 1.0, (), ""))
    assert train.main(["search=autohaap", "space.target=megatron", "budget.evaluations=400", "out=run"]) == 0
    assert "the limit costs at most" in " ".join(capsys.readouterr().out.split())
    record = read_record(tmp_path / "run")
    assert record.space.target == "megatron"
    assert export_plan(record.problem, record.plan, "megatron", Estimator(record.problem)).exact
