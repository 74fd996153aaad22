"""A plan found elsewhere, replayed from a file: its price, its record, and what is said of it."""

import json

import pytest

from haap_rl.cost.estimator import Estimator
from haap_rl.problem.presets import load_problem
from haap_rl.search.base import Budget, Objective, load_searcher, run_search
from haap_rl.search.replay import Replay
from haap_rl.train import main
from tests import builders

SMALL = ["model=gpt3_350m", "cluster=v100x4_t4x4"]


def write(path, problem, plan):
    path.write_text(json.dumps(problem.plan_to_json(plan)))
    return str(path)


def test_a_plan_of_the_space_is_priced_once_as_it_is(tmp_path):
    problem = load_problem("gpt3_350m", "v100x4_t4x4")
    found = run_search(load_searcher("random"), problem, Budget(evaluations=20))
    again = run_search(Replay(write(tmp_path / "plan.json", problem, found.plan)), problem, Budget(evaluations=20))
    assert again.plan == found.plan
    assert again.estimate == found.estimate
    assert again.lower_bound_s == found.lower_bound_s
    assert (again.evaluations, again.stopped_by, again.notes) == (1, "finished", ())


def test_a_plan_outside_the_space_is_priced_and_the_bound_is_said_not_to_speak_of_it(tmp_path):
    problem = load_problem("gpt3_350m", "v100x4_t4x4")
    inside = run_search(load_searcher("random"), problem, Budget(evaluations=20)).plan
    for changes, words in (({"zero_stage": 0}, "zero_stage=0"), ({"sequence_parallel": False}, "sequence_parallel")):
        plan = type(inside)(**{**{f: getattr(inside, f) for f in inside.__dataclass_fields__}, **changes})
        result = run_search(Replay(write(tmp_path / "plan.json", problem, plan)), problem, Budget(evaluations=1))
        assert result.estimate == Estimator(problem)(plan)
        (note,) = result.notes
        assert "outside the declared space" in note
        assert words in note
        assert not result.proven_optimal


def test_what_beats_the_bound_from_outside_is_no_proven_optimum(tmp_path):
    problem = builders.problem(global_batch_size=8)
    plan = builders.plan(builders.stage(6, "fast", dp=4, size=2), m=1)
    objective = Objective(problem)  # a space whose micro-batch counts do not hold m = 1
    result = run_search(Replay(write(tmp_path / "plan.json", problem, plan)), problem, Budget(evaluations=1))
    objective.prove(2 * result.estimate.iteration_s)
    assert 1 not in objective.space.num_microbatches
    proven = run_search(
        Replay(str(tmp_path / "plan.json")),
        problem,
        Budget(evaluations=1),
        proven_s=2 * result.estimate.iteration_s,
    )
    assert proven.gap_to_lower_bound < 0
    assert not proven.proven_optimal


def test_the_command_leaves_a_record_of_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["+search=random", *SMALL, "budget.evaluations=20", "out=found"]) == 0
    assert main(["+search=replay", "search.plan=found/plan.json", *SMALL, "out=again"]) == 0
    found, again = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("found", "again"))
    assert again["iteration_time_s"] == found["iteration_time_s"]
    assert again["lower_bound_s"] == found["lower_bound_s"]
    assert (again["searcher"], again["evaluations"]) == ("replay", 1)
    plans = [(tmp_path / name / "plan.json").read_text() for name in ("found", "again")]
    assert plans[0] == plans[1]
    assert "no plan of this space is faster" in capsys.readouterr().out


@pytest.mark.parametrize(("plan", "text", "words"), [
    (None, None, ["plan=None", "search.plan=plan.json"]),
    ("none.json", None, ["none.json", "No such file"]),
    ("plan.json", "{", ["plan.json"]),
    ("plan.json", "{}", ["plan.json", "schema"]),
    ("7", None, ["plan=7"]),
])  # fmt: skip
def test_a_missing_or_broken_file_is_one_line_and_nothing_is_written(tmp_path, monkeypatch, capfd, plan, text, words):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / plan).write_text(text)
    given = [] if plan is None else [f"search.plan={plan}"]
    assert main(["+search=replay", *given, *SMALL, "out=record"]) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("haap_rl: ")]
    assert len(lines) == 1, lines
    assert all(word in lines[0] for word in words), lines[0]
    assert not (tmp_path / "record").exists()
