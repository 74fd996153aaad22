"""The tuning of searchers: what is tried, on which instances, how it is scored, and that it can be resumed."""

import json
from pathlib import Path

import pytest

from experiments import search_quality, tuning
from haap_rl.problem.presets import names, preset


def test_trials_are_different_settings_of_the_searcher_and_the_first_is_the_present_one():
    for searcher in tuning.SPACES:
        default = preset("search", searcher)
        found = tuning.trials(searcher, 24)
        assert found[0] == {key: value for key, value in default.items() if key != "name"}
        assert len({json.dumps(settings) for settings in found}) == 24
        assert found[:5] == tuning.trials(searcher, 5)
        for settings in found[1:]:
            assert all(settings[key] in values for key, values in tuning.SPACES[searcher].items())


def test_every_searcher_that_is_compared_is_tuned_if_it_has_settings():
    assert set(tuning.SPACES) <= set(names("search"))
    for searcher in set(search_quality.SEARCHERS) - set(tuning.SPACES) - {"ppo"}:
        assert set(preset("search", searcher)) <= {"name", "devices"}  # how a mixed cluster is seen: null tries both


def test_the_score_is_the_geometric_mean_over_budgets_of_the_gap_to_the_best_known():
    (instance,) = tuning.pool(1)
    runs = [tuning.Run("ga", {"a": a}, instance, seed, Path("-")) for a in (1, 2, 3) for seed in (0, 1)]
    times = [[1.08, 1.02], [1.08, 1.02], [2.0, 1.0], [2.0, 1.0], [None, 1.02], [None, 1.02]]
    known = tuning.best_known(runs, times, {instance.name: 1.5})
    assert known == {instance.name: 1.0}
    first, second, third = tuning.scored(runs, times, known)["ga"]
    assert first["iqm_gap_pct"] == pytest.approx([8.0, 2.0])
    assert first["score"] == pytest.approx(4.0)
    assert second["score"] == pytest.approx((100 * tuning.FLOOR) ** 0.5)
    assert third["iqm_gap_pct"][0] == tuning.NO_PLAN
    assert tuning.best_two([third, first, second]) == [{"a": 3}, {"a": 2}]
    assert tuning.best_two([second, first]) == [{"a": 2}]
    assert tuning.finalists([third, first, second]) == [{"a": 3}, {"a": 2}, {"a": 1}]


def test_settings_are_chosen_only_if_they_are_better_on_the_check_too():
    def entries(*scores):
        return [{"settings": {"a": a}, "score": score, "iqm_gap_pct": [score]} for a, score in enumerate(scores)]

    def chosen(*checked):
        found = {"ga": entries(3.0, 2.0, 4.0)}
        return tuning.chosen(found, found, {"ga": entries(*checked)})["ga"]["chosen"]

    assert chosen(5.0, 4.0) == {"a": 1}
    assert chosen(4.0, 5.0) == {"a": 0}
    assert chosen(4.0) == {"a": 0}  # the default was the best trial


def test_a_tuning_writes_its_files_and_goes_on_where_it_stopped(tmp_path, capsys):
    arguments = [f"out={tmp_path}", "trials=2", "instances=1", "searchers=annealing", "workers=1"]
    assert tuning.main(arguments) == 0
    first = {name: (tmp_path / name).read_bytes() for name in ("trials.csv", "table.md", "best.json")}
    data = json.loads(first["best.json"])
    assert len(set(data["instances"])) == 3
    row = data["searchers"]["annealing"]
    assert row["chosen"] in (row["default"], row["best"])
    assert row["final_score"]["best"] <= row["final_score"]["default"]
    assert first["trials.csv"].count(b"\ntuning,annealing,") == 2
    assert b"| annealing | 2 |" in first["table.md"]
    (tmp_path / "runs" / "tuning-annealing-01-00-1000.json").write_text("{")  # broken: run again, the others are not
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    assert tuning.main(arguments) == 0
    assert first == {name: (tmp_path / name).read_bytes() for name in first}
    changed = {path.name for path, time in before.items() if path.stat().st_mtime_ns != time}
    assert changed == {"tuning-annealing-01-00-1000.json"}
    assert tuning.main([f"out={tmp_path}", "searchers=nope"]) == 2
    assert "'nope' is not one of" in capsys.readouterr().err
