"""The benchmark of the pricing core writes its files, whatever the speeds; no claim here is about the clock."""

import csv
import json

import pytest

from experiments import bench_core

KEYS = {
    "incremental_per_s",
    "full_16_stages_per_s",
    "exact_16_64_per_s",
    "incremental_over_uncached",
    "incremental_over_cached",
}
FILES = {"summary.json", "table.md", "growth.csv", "growth.png"}


def test_a_quick_run_writes_every_file_over_those_of_an_earlier_one(tmp_path, capsys):
    for name in FILES:
        (tmp_path / name).write_text("of an earlier run")
    assert bench_core.main([f"out={tmp_path}", "quick=true"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == FILES
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary.keys() >= KEYS
    assert all(summary[key] > 0 for key in KEYS)
    for by in summary["what_ifs_decided_by"].values():
        assert sum(by.values()) == pytest.approx(1)
    assert (tmp_path / "table.md").read_text() in capsys.readouterr().out
    with (tmp_path / "growth.csv").open() as file:
        assert {row["axis"] for row in csv.DictReader(file)} == {"stages", "devices", "layers"}
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments", [["out=x", "quick=maybe"], ["out=x", "seeds=3"], ["quick=true"]])
def test_a_bad_option_gets_one_line(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert bench_core.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("haap_rl: ")
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())
