"""Pictures and the comparison are made, complete, and say what is wrong with their input."""

import csv
import json

from experiments import compare
from haap_rl.cost.estimator import Estimator
from haap_rl.report import pipeline
from haap_rl.report.tables import plan_table, time_table
from haap_rl.train import main
from tests.builders import PLAIN, plan, problem, stage


def is_picture(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_a_recorded_plan_is_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["search=random", "budget.evaluations=5", "out=record"]) == 0
    assert pipeline.main(["record=record", "out=pictures/plan.png"]) == 0
    assert is_picture(tmp_path / "pictures" / "plan.png")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.yaml").write_text("model: [1]\ncluster: {}\nproblem: null\n")
    assert pipeline.main(["--help"]) == 0
    for arguments, word in (
        (["record=none"], "config.yaml"),
        (["record=record", "out=a.foo"], ".png"),
        (["record=broken"], "not a run"),
        (["recrd=x"], "'record'"),
        ([], "record has no value"),
    ):
        capsys.readouterr()
        assert pipeline.main(arguments) == 2
        assert word in capsys.readouterr().err


def test_an_interleaved_plan_with_sharded_state_is_drawn_and_tabled(tmp_path):
    target = problem()
    shown = plan(stage(3, "fast", 1, 2, 2), stage(3, "slow", 2, 2, 2), m=2, zero_stage=3, virtual_stages=2)
    estimate = Estimator(target, calibration=PLAIN)(shown)
    pipeline.draw_plan(target, shown, estimate, tmp_path / "plan.png")
    assert is_picture(tmp_path / "plan.png")
    assert {slot.chunk for slot in estimate.timeline()} == {0, 1}
    table = time_table(estimate)
    headers = [column.header for column in table.columns]
    cells = list(table.columns[headers.index("sharding")].cells)
    assert cells == [f"{1e3 * part.sharding_s:.2f}" for part in estimate.stages]
    assert "0.00" not in cells
    assert "2 interleaved chunks" in plan_table(target, shown, estimate).title


def test_compare_writes_every_file_and_goes_on_where_it_stopped(tmp_path, capsys):
    arguments = [f"out={tmp_path}", "evaluations=20", "seeds=2", "model=gpt3_350m", "cluster=v100x4_t4x4"]
    assert compare.main(arguments) == 0
    first = (tmp_path / "summary.json").read_text()
    rows = list(csv.DictReader((tmp_path / "runs.csv").open()))
    methods = {"random", "autohaap", "ga", "ppo", "legal_moves"}
    assert {row["searcher"] for row in rows} >= methods
    assert len(rows) == 2 * len({row["searcher"] for row in rows})
    summary = json.loads(first)
    assert set(summary["methods"]) >= methods
    for row in summary["methods"].values():
        assert row["seeds"] == 2
        if row["failures"] == 2:
            continue
        assert row["interval_95_s"][0] <= row["mean_iteration_time_s"] <= row["interval_95_s"][1]
        assert row["best_s"] >= summary["lower_bound_s"]
        assert 0 <= row["operator_latencies_avoided_against_once_per_plan"] < 1  # so few plans: tables cost more
        assert 0 < row["operator_latencies_avoided_against_no_memo"] < 1
    assert set(summary["welch_one_sided_p"]) == {
        "autohaap better than random", "ga better than random", "ppo better than legal_moves", "ppo better than random",
    }  # fmt: skip
    assert is_picture(tmp_path / "curves.png")
    assert "| autohaap | 2 (0) |" in (tmp_path / "table.md").read_text()

    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    assert compare.main(arguments) == 0
    assert stamps == {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    assert (tmp_path / "summary.json").read_text() == first


def test_compare_says_what_is_wrong(tmp_path, capsys):
    where = f"out={tmp_path}"
    for arguments, word in (
        ([where, "quick=maybe"], "quick='maybe'"), ([where, "evaluations=1"], "at least 4"), ([], "out has no value"),
        ([where, "quick=true", "model=llama3_70b", "cluster=v100x4_t4x4"], "no plan of the space fits"),
    ):  # fmt: skip
        assert compare.main(arguments) == 2
        assert word in capsys.readouterr().err


def test_a_broken_run_file_is_run_again(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "names", lambda _: ["random", "autohaap"])
    arguments = [f"out={tmp_path}", "evaluations=8", "seeds=1", "model=gpt3_350m", "cluster=v100x4_t4x4"]
    assert compare.main(arguments) == 0
    first = (tmp_path / "runs.csv").read_text().splitlines()[0]
    (tmp_path / "runs" / "random-10.json").write_text('{"settings"')
    assert compare.main(arguments) == 0
    assert (tmp_path / "runs.csv").read_text().splitlines()[0] == first
    assert json.loads((tmp_path / "runs" / "random-10.json").read_text())["run"]["seed"] == 10


def test_report_seeds_are_not_tuning_seeds(capsys, tmp_path):
    assert not set(compare.TUNING_SEEDS) & set(compare.REPORT_SEEDS)
    assert compare.main([f"out={tmp_path}", "seeds=101"]) == 2
    assert "tuning seeds" in capsys.readouterr().err
