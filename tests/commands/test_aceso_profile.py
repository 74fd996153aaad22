"""The experiment on Aceso's case: with made-up tables it writes its files; with the published ones its claim holds."""

import csv
import json

import pytest

from experiments import aceso_profile
from haap_rl.cost.estimator import Estimator
from tests.builders import plan, problem, stage
from tests.cost.test_profile_files import DATA, aceso_table, collectives_table, needs_data

LIKE_FOR_LIKE = next(v for v in aceso_profile.VARIANTS if v.name == "limit is usable, ZeRO-1")


@pytest.fixture
def one_variant(monkeypatch):
    monkeypatch.setattr(aceso_profile, "VARIANTS", aceso_profile.VARIANTS[2:3])
    monkeypatch.setattr(aceso_profile, "MICROBATCHES", (128, 256))


def test_it_writes_every_file_from_tables_in_the_published_form(tmp_path, one_variant, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / aceso_profile.OPERATORS).write_text(aceso_table())
    (tmp_path / "data" / aceso_profile.COLLECTIVES).write_text(collectives_table())
    arguments = [f"data={tmp_path / 'data'}", f"out={tmp_path / 'out'}", "evaluations=60", "proof=2000"]
    assert aceso_profile.main(arguments) == 0
    assert "| subject | Aceso's cost model | here |" in capsys.readouterr().out
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    (run,) = summary["runs"]
    assert run["evaluations"] == 60
    assert run["lower_bound_s"] <= run["exact_s"] <= run["predicted_s"]
    assert all(isinstance(line, str) and line for line in run["not_measured"])
    (row,) = csv.DictReader((tmp_path / "out" / "runs.csv").open())
    assert float(row["predicted_s"]) == run["predicted_s"]
    seconds = [part["seconds"] for part in summary["parts_of_the_first"]]
    assert seconds[0] == run["predicted_s"]
    assert seconds[0] >= seconds[1] >= seconds[2] > 0
    assert (tmp_path / "out" / "table.md").read_text().startswith("| variant |")


def test_a_folder_without_the_tables_is_said_in_one_line(tmp_path, capsys):
    assert aceso_profile.main([f"data={tmp_path}", f"out={tmp_path / 'out'}"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert aceso_profile.OPERATORS in lines[0]
    assert not (tmp_path / "out").exists()


def test_acesos_formula_is_the_sum_and_the_slowest_for_the_rest():
    estimate = Estimator(problem())(plan(stage(3, "fast"), stage(3, "slow"), m=8))
    busy = [one.busy_s for one in estimate.stages]
    assert aceso_profile.by_aceso_formula(estimate) == pytest.approx(busy[0] + busy[1] + 7 * max(busy))


def test_recompute_by_layer_fits_and_no_layer_less_would():
    target = aceso_profile.problem(aceso_profile.memory_bytes(aceso_profile.VARIANTS[2]))
    estimator = Estimator(target)
    replicas = aceso_profile.ReplicaGroup("v100", 1, 1, 1)
    found = aceso_profile.least_recompute(estimator, (6, 6, 6, 6), replicas, 512, 1)
    estimate = estimator(found)
    assert estimate.fits
    counts = [one.recompute.num_layers for one in found.stages]
    assert max(counts) > 0
    for i, one in enumerate(found.stages):
        if one.recompute.num_layers:
            fewer = aceso_profile.Recompute(one.recompute.mode, one.recompute.num_layers - 1)
            stages = [*found.stages[:i], aceso_profile.replace(one, recompute=fewer), *found.stages[i + 1 :]]
            assert not estimator(aceso_profile.replace(found, stages=tuple(stages))).fits


@needs_data
def test_the_published_case_is_planned_to_the_proven_optimum_near_acesos_own_figure(tmp_path):
    row, _, found = aceso_profile.run(LIKE_FOR_LIKE, DATA, 1000, 20_000)
    assert row["exact_is_proven"]
    assert row["predicted_s"] == pytest.approx(row["exact_s"], rel=0.02)
    assert row["predicted_s"] == pytest.approx(aceso_profile.ACESO_PREDICTED_S, rel=0.15)
    assert row["search_s"] < aceso_profile.ACESO_SEARCH_S / 10
    assert found.profile_gaps == ()  # every cell of the plan was measured
