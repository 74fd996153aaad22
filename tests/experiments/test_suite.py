"""The suite of instances and the experiments that run on it: certificates, quick runs, restarts, refusals."""

import json

import pytest

from experiments import ablation, scale, search_quality, suite
from haap_rl.problem.errors import InputError
from haap_rl.problem.instances import load_instances
from haap_rl.problem.presets import preset


def stored():
    return json.loads(suite.FILE.read_text())


def test_every_instance_has_a_certificate_of_this_estimator():
    certified = suite.certified()
    assert len(certified) >= 24
    assert [entry.instance for entry in certified] == list(suite.INSTANCES)
    assert len({instance.model for instance in suite.INSTANCES}) >= 5
    assert {8, 64} <= {instance.num_devices for instance in suite.INSTANCES}
    assert any(len(instance.groups) == 3 for instance in suite.INSTANCES)
    for entry in certified:
        assert entry.lower_bound_s <= entry.iteration_time_s * (1 + 1e-9)
        assert entry.iteration_time_s <= entry.lower_bound_s * 1.01
        assert entry.proven_optimal or entry.instance.num_devices > 16


def test_instances_on_unseen_devices_are_proven_too():
    certified = suite.certified(suite.UNSEEN)
    assert len(certified) >= 12
    assert [entry.instance for entry in certified] == list(suite.UNSEEN)
    assert all(entry.lower_bound_s <= entry.iteration_time_s * (1 + 1e-9) for entry in certified)
    assert all(entry.iteration_time_s <= entry.lower_bound_s * 1.001 for entry in certified)
    assert {len(instance.groups) for instance in suite.UNSEEN} == {1, 2, 3}
    assert len({device for instance in suite.UNSEEN for device, _, _ in instance.groups}) >= 8
    assert len({instance.model for instance in suite.UNSEEN}) >= 5


def test_the_suite_lies_in_the_splits_that_no_policy_is_trained_on():
    instances = load_instances(preset("instances", "default"))
    assert set(suite.INSTANCES) <= set(instances.split("test"))
    assert {instance.groups for instance in suite.INSTANCES} == set(instances.splits["test"].clusters)
    assert {instance.model for instance in suite.INSTANCES} == set(instances.splits["test"].models)
    assert set(suite.UNSEEN) <= set(instances.split("unseen_devices"))
    trained = instances.splits["train"]
    assert not {instance.model for instance in suite.TUNING} & set(trained.models)
    compositions = {frozenset(device for device, _, _ in groups) for groups in trained.clusters}
    assert not {frozenset(device for device, _, _ in instance.groups) for instance in suite.TUNING} & compositions


def test_random_search_is_far_off_on_every_instance():
    entries = stored()["instances"]
    assert list(entries) == [instance.name for instance in suite.INSTANCES + suite.UNSEEN]
    for name, entry in entries.items():
        gaps = sorted(9.0 if gap is None else gap for gap in entry["random_gap_at_10000"])
        assert gaps[len(gaps) // 2] > 0.05, name


def test_nothing_is_tuned_on_what_is_reported():
    assert not set(suite.TUNING) & set(suite.INSTANCES + suite.UNSEEN)


@pytest.mark.parametrize(("change", "words"), [
    ({"schema": "other/1"}, "schema haap_rl.suite/1"),
    ({"estimator_fingerprint": "0" * 16}, "stale"),
    ({"instances": {}}, "is not in it"),
    ({"instances": []}, "schema"),
])  # fmt: skip
def test_a_foreign_or_stale_suite_is_refused_with_the_command_that_remakes_it(tmp_path, monkeypatch, change, words):
    path = tmp_path / "suite.json"
    path.write_text(json.dumps({**stored(), **change}))
    monkeypatch.setattr(suite, "FILE", path)
    with pytest.raises(InputError, match=words) as error:
        suite.certified()
    assert suite.COMMAND in str(error.value)


def test_a_certificate_is_remade_as_it_is_stored(tmp_path, capsys):
    assert suite.main(["only=1", f"out={tmp_path}"]) == 0
    (name, entry), *others = json.loads((tmp_path / "suite.json").read_text())["instances"].items()
    assert not others
    assert entry == stored()["instances"][name]
    assert "proven gap 0.00%" in capsys.readouterr().out


def test_search_quality_writes_every_file_and_goes_on_where_it_stopped(tmp_path, capsys):
    arguments = [f"out={tmp_path}", "quick=true", "searchers=random,autohaap,megatron"]
    assert search_quality.main(arguments) == 0
    first = (tmp_path / "summary.json").read_text()
    summary = json.loads(first)
    assert summary["instances"] == 2
    assert summary["proven"] == 2
    assert set(summary["iqm_gap_pct"]) == {"random", "autohaap", "megatron"}
    gaps = summary["iqm_gap_pct"]["autohaap"]
    assert set(gaps) == {"100", "1000"}  # a quick run has no more evaluations
    assert gaps["1000"] <= gaps["100"]
    low, high = summary["searchers"]["random"]["budgets"]["1000"]["interval_95_pct"]
    assert low <= summary["iqm_gap_pct"]["random"]["1000"] <= high
    for name in ("table.md", "instances.md", "runs.csv"):
        assert "autohaap" in (tmp_path / name).read_text()
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "runs" / "random-00-0.json").write_text("{")  # broken: run again, the others are not
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    assert search_quality.main(arguments) == 0
    again = json.loads((tmp_path / "summary.json").read_text())
    assert again["iqm_gap_pct"] == summary["iqm_gap_pct"]
    changed = {path.name for path, time in before.items() if path.stat().st_mtime_ns != time}
    assert changed == {"random-00-0.json"}
    assert search_quality.main([f"out={tmp_path}", "searchers=nope"]) == 2
    assert "'nope' is not one of" in capsys.readouterr().err


def test_ablation_writes_three_rows_with_the_keys_that_are_asked_for(tmp_path):
    assert ablation.main([f"out={tmp_path}", "quick=true"]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    for idea in ("memory_aware_init", "load_balance", "state_caching"):
        assert set(summary[idea]) >= {
            "gap_pct_on", "gap_pct_off", "evaluations_per_s_on", "evaluations_per_s_off",
            "operator_evaluations_avoided_share", "pruning_factor",
        }  # fmt: skip
    caching = summary["state_caching"]
    assert caching["runs_that_differ"] == 0
    assert caching["gap_pct_on"] == caching["gap_pct_off"]
    assert caching["operator_evaluations_avoided_share"] > 0.5  # what the seconds show too, on a machine at rest
    assert summary["memory_aware_init"]["pruning_factor"] > 1
    assert (tmp_path / "table.md").read_text().count("\n| ") == 4


def test_a_thousand_devices_are_planned_with_a_bound():
    row = scale.run_case("1024", "autohaap", 300)
    assert 0 < row["lower_bound_s"] <= row["iteration_time_s"]
    assert row["devices_used"] <= 1024
    assert "| autohaap | 1 |" in scale.table([row])
