"""`python -m haap_rl.estimate`: a plan file and uniform degrees, what it prints, bad input in one line."""

import json

import pytest

from haap_rl import train
from haap_rl.cost.estimator import Estimator
from haap_rl.estimate import best_single_change, main
from haap_rl.problem.plan import PlanError, even_layers, uniform_plan
from haap_rl.problem.presets import load_problem
from haap_rl.space.options import SpaceSpec
from tests.builders import group, problem

UNIFORM = ["tp=2", "pp=3", "dp=4", "microbatch=1", "recompute=full"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_uniform_plan_and_the_same_plan_as_a_file_cost_the_same(here, capsys):
    assert main([*UNIFORM, "out=first"]) == 0
    printed = capsys.readouterr().out
    for words in ("time of each stage", "memory of one device", "bottleneck stage", "(proven): gap", "single change"):
        assert words in printed
    assert main(["plan=first/plan.json", "out=second"]) == 0
    first, second = (json.loads((here / name / "estimate.json").read_text()) for name in ("first", "second"))
    assert first == second
    target = load_problem()
    plan = uniform_plan(target, 2, 3, 4, 1, "full")
    assert Estimator(target)(plan).iteration_s == first["iteration_time_s"]
    assert first["best_single_change_iteration_time_s"] < first["iteration_time_s"]


def test_whole_floats_are_taken_and_a_huge_cluster_is_no_matter(here):
    assert main(["tp=2e0", "pp=3e0", "dp=4.0", "microbatch=1.0", "recompute=full", "out=floats"]) == 0
    assert main([*UNIFORM, "out=whole"]) == 0
    floats, whole = (json.loads((here / name / "plan.json").read_text()) for name in ("floats", "whole"))
    assert floats == whole
    assert main([*UNIFORM, "cluster.groups.0.num_nodes=1e12"]) == 0


def test_the_plan_of_a_run_priced_again_gives_the_same_seconds(here):
    assert train.main(["search=random", "budget.evaluations=20", "out=run"]) == 0
    assert main(["plan=run/plan.json", "out=again"]) == 0
    run, again = (json.loads((here / name).read_text()) for name in ("run/result.json", "again/estimate.json"))
    for key in ("iteration_time_s", "tokens_per_s", "lower_bound_s", "estimator_fingerprint"):
        assert run[key] == again[key]


def test_a_plan_that_does_not_fit_is_priced_and_said_so(capsys):
    assert main(["tp=1", "pp=2", "dp=8", "microbatch=2"]) == 0
    printed = capsys.readouterr().out
    assert "it does not fit" in printed
    assert "(memory)" in printed


def test_the_single_change_is_the_best_move_of_the_space():
    target, spec = load_problem(), SpaceSpec()
    estimator = Estimator(target)
    plan = uniform_plan(target, 2, 3, 4, 1, "full")
    advice = best_single_change(target, spec, estimator, plan)
    assert advice.iteration_s < estimator(plan).iteration_s
    assert advice.text.startswith("the single change that helps most: ")


def test_outside_the_space_no_change_is_tried():
    target = problem((group("fast", per_node=3), group("slow", per_node=5)))
    mixed = uniform_plan(target, 1, 2, 4, 1)
    assert [replica.group for replica in mixed.stages[0].replicas] == ["fast", "slow"]
    advice = best_single_change(target, SpaceSpec(num_microbatches=(2,)), Estimator(target), mixed)
    assert "mixes device groups" in advice.text


def test_frameworks_and_sharded_weights_are_priced(here, capsys):
    priced = {}
    for name, arguments in (("megatron", ["zero_stage=1"]), ("fsdp", ["zero_stage=3", "problem.framework=fsdp"])):
        assert main([*UNIFORM, *arguments, f"out={name}"]) == 0
        priced[name] = json.loads((here / name / "estimate.json").read_text())
        assert json.loads((here / name / "plan.json").read_text())["zero_stage"] == int(arguments[0][-1])
    assert priced["megatron"]["iteration_time_s"] != priced["fsdp"]["iteration_time_s"]
    assert "zero_stage=3 of the plan is not that of this space" in capsys.readouterr().out


def test_even_layers_put_the_remainder_in_the_middle():
    assert even_layers(10, 4) == (2, 3, 3, 2)
    assert even_layers(8, 4) == (2, 2, 2, 2)
    assert sum(even_layers(61, 8)) == 61


@pytest.mark.parametrize(("degrees", "words"), [
    ((3, 1, 1, 1), "tp=3"), ((1, 5, 1, 1), "5 stages"), ((1, 9, 1, 1), "room for 8"), ((1, 1, 3, 1), "does not divide"),
    ((0, 1, 1, 1), "tp=0"), ((1, 1, 1, -2), "microbatch=-2"),
])  # fmt: skip
def test_an_impossible_uniform_plan_is_refused(degrees, words):
    with pytest.raises((PlanError, ValueError), match=words):
        uniform_plan(problem(), *degrees)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["tp is not given", "plan=FILE"]),
        (["tp=2"], ["pp is not given"]),
        (["plan=none.json"], ["none.json", "cannot be read"]),
        (["plan=none.json", "tp=2"], ["one or the other"]),
        ([*UNIFORM[:4], "recompute=ful"], ["'ful'", "selective"]),
        ([*UNIFORM, "zero_stage=4"], ["zero_stage=4", "0, 1, 2 or 3"]),
        ([*UNIFORM, "zero_stage=true"], ["zero_stage=True", "0, 1, 2 or 3"]),
        ([*UNIFORM, "problem.framework=horovod"], ["framework='horovod'"]),
        ([*UNIFORM, "sequence_parallel=3"], ["sequence_parallel=3"]),
        (["pln=x"], ["'pln'", "'plan'"]),
        (["modl=x"], ["'modl'", "'model'"]),
        (["budget.evaluations=3"], ["budget.evaluations"]),
        ([*UNIFORM, "cluster=a100x8"], ["room for 4"]),
    ],
)
def test_bad_input_is_one_line_with_status_2(here, capfd, arguments, words):
    assert main([*arguments, "out=record"]) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert all(word in lines[0] for word in words), lines[0]
    assert list(here.iterdir()) == []
