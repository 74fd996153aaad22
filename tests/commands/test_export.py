"""`python -m haap_rl.export`: exact or not, what it prints and writes, bad input in one line and nothing written."""

import csv
import json

import pytest

from haap_rl.export.__main__ import main
from haap_rl.export.targets import TARGETS
from haap_rl.problem.plan import uniform_plan
from haap_rl.problem.presets import load_problem
from tests.builders import plan, stage


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def saved(here, one, **settings):
    """The plan as plan.json here."""
    (here / "plan.json").write_text(json.dumps(load_problem(**settings).plan_to_json(one)))


def asymmetric():
    """tp 2 on 8 A100, tp 4 on 16 V100, everything recomputed."""
    front = stage(15, "a100", 2, 4, 1, "full", 14)
    return plan(front, stage(19, "v100", 4, 4, 1, "full", 18), m=32)


def test_a_uniform_plan_is_exact_for_megatron_and_read_back_from_its_files(here, capsys):
    target = load_problem()
    one = uniform_plan(target, 2, 3, 4, 1, "full")
    saved(here, one)
    assert main(["plan=plan.json", "to=megatron", "out=run"]) == 0
    assert "megatron: exact, " in capsys.readouterr().out
    files = {path.name: path.read_text() for path in (here / "run").iterdir()}
    assert set(files) == {"run.sh", "hostfile", "ranks.csv", "plan.json", "export.json"}
    assert TARGETS["megatron"].read(target, files) == one
    facts = json.loads(files["export.json"])
    assert facts["exact"]
    assert facts["losses"] == []
    assert facts["iteration_time_s"] == facts["plan_iteration_time_s"]
    assert len(list(csv.DictReader(files["ranks.csv"].splitlines()))) == 24


def test_a_plan_with_tp_per_stage_is_exact_for_flagscale_only(here, capsys):
    saved(here, asymmetric())
    assert main(["plan=plan.json", "to=flagscale", "out=run"]) == 0
    assert "flagscale: exact" in capsys.readouterr().out
    assert main(["plan=plan.json", "to=megatron", "out=other"]) == 2
    refused = capsys.readouterr().err
    assert "megatron: without what it cannot say (stage 0 replicas, stage 1 replicas) the plan misses" in refused
    assert refused.count("\n") == 1
    assert not (here / "other").exists()


def test_losses_are_a_table_with_the_price_of_the_plan_as_written(here, capsys):
    front = stage(15, "a100", 2, 4, 1, "selective", 14)
    saved(here, plan(front, stage(19, "v100", 4, 4, 1, "full", 18), m=32))
    assert main(["plan=plan.json", "to=flagscale", "out=run"]) == 0
    printed = capsys.readouterr().out
    for words in ("what flagscale cannot say", "stage 0 recompute", "selective in 14 layers", "not exact; as written"):
        assert words in printed
    facts = json.loads((here / "run" / "export.json").read_text())
    assert [loss["field"] for loss in facts["losses"]] == ["stage 0 recompute"]
    assert facts["fits"]
    written = load_problem().load_plan(here / "run" / "plan.json")
    assert written.stages[0].recompute.mode != "selective"


def test_the_rank_table_of_any_plan(here, capsys):
    saved(here, asymmetric())
    assert main(["plan=plan.json", "to=ranks", "out=run"]) == 0
    assert "ranks: exact, " in capsys.readouterr().out
    assert {path.name for path in (here / "run").iterdir()} == {"hostfile", "ranks.csv", "plan.json", "export.json"}
    rows = list(csv.DictReader((here / "run" / "ranks.csv").open()))
    assert [(row["group"], row["stage"]) for row in rows] == 8 * [("a100", "0")] + 16 * [("v100", "1")]
    assert [row["tp_index"] for row in rows[8:]] == 4 * ["0", "1", "2", "3"]
    assert (here / "run" / "hostfile").read_text() == "a100-0 slots=8\nv100-0 slots=8\nv100-1 slots=8\n"


def test_without_out_nothing_is_written(here, capsys):
    saved(here, uniform_plan(load_problem(), 2, 3, 4, 1, "full"))
    assert main(["plan=plan.json", "to=megatron"]) == 0
    assert "written:" not in capsys.readouterr().out
    assert [path.name for path in here.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan=plan.json", "to=nemo"], "to='nemo' is not one of megatron, torchtitan, flagscale, ranks"),
        (["plan=plan.json"], "to has no value"),
        (["plan=plan.json", "to=torchtitan"], "problem.precision=fp16 cannot be written"),
        (["plan=plan.json", "to=megatron", "model=llama2_7b"], "it was made for model"),
        (["plan=none.json", "to=megatron"], "cannot be read"),
        (["plan=plan.json", "to=megatron", "outt=run"], "unknown key 'outt'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(here, capsys, arguments, message):
    saved(here, uniform_plan(load_problem(), 2, 3, 4, 1, "full"))
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
