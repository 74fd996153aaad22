"""The tables of the fit's accuracy are made from its files, and a broken file is one line."""

import json
from pathlib import Path

import pytest

from experiments import accuracy
from haap_rl.cost.calibration import LITERATURE, SCHEMA, parameters
from tests.problem.test_measured import table

HEADER = "row_id,predicted_iter_time_s,predicted_peak_mem_gib\n"
FITTED = {
    "schema": SCHEMA,
    "fitted": ["ampere.gemm_efficiency"],
    "constants": parameters(LITERATURE),
    "intervals": {},
}
SUMMARY = {"coverage": {"all": {"rows": 2, "covered": 0.5, "half_width": 0.2}}}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with two runs of 1.5 s, and a fit that predicts 1.2 s and 1.5 s."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/measured.csv").write_text(table({}, {}))
    Path("fit").mkdir()
    for column in accuracy.COLUMNS:
        Path(f"fit/predictions_{column}.csv").write_text(HEADER + "mine-1,1.2,10\nmine-2,1.5,10\n")
    Path("fit/fitted.json").write_text(json.dumps(FITTED))
    Path("fit/summary.json").write_text(json.dumps(SUMMARY))
    return tmp_path


def test_errors_are_those_of_the_predictions(here):
    assert accuracy.main(["data=data", "fit=fit", "out=out"]) == 0
    result = json.loads(Path("out/summary.json").read_text())
    assert result["time"]["left_out"]["mine"]["mape"] == pytest.approx(10.0)
    assert result["coverage"] == SUMMARY["coverage"]
    text = Path("out/table.md").read_text()
    assert "| mine | 2 | 10.0 / 10.0 / -10.0 |" in text
    assert "| ampere.gemm_efficiency |" in text


def test_a_run_that_one_column_does_not_price_is_in_no_column(here):
    Path("fit/predictions_fitted.csv").write_text(HEADER + "mine-1,,\nmine-2,1.5,\n")
    assert accuracy.main(["data=data", "fit=fit", "out=out"]) == 0
    time = json.loads(Path("out/summary.json").read_text())["time"]
    assert {time[column]["all"]["n"] for column in accuracy.COLUMNS} == {1}


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("fit/fitted.json", "{", "is not JSON"),
        ("fit/fitted.json", "[]", "not a JSON object"),
        ("fit/fitted.json", "{}", "fitted=None must be a list"),
        ("fit/fitted.json", json.dumps({"schema": SCHEMA, "fitted": []}), "must be JSON objects"),
        ("fit/summary.json", "", "is not JSON"),
        ("fit/summary.json", "{}", "coverage=None"),
        ("fit/summary.json", '{"coverage": {"all": {}}}', "all: rows=None"),
        ("fit/predictions_left_out.csv", None, "families=true"),
        ("fit/predictions_left_out.csv", HEADER.replace("row_id", "id") + "mine-1,1,1\n", "no column 'row_id'"),
        ("fit/predictions_fitted.csv", HEADER.replace("_s", "") + "mine-1,1,1\n", "no column 'predicted_iter_time_s'"),
        ("fit/predictions_fitted.csv", HEADER + "mine-1,1,1\n", "1 runs are not in it ('mine-2')"),
        ("fit/predictions_fitted.csv", HEADER + "mine-1,x,1\n", "predicted_iter_time_s='x'"),
        ("fit/predictions_fitted.csv", HEADER + "mine-1,,1\nmine-2,,1\n", "no usable run"),
        ("data/measured.csv", table({"quality": "C"}), "no usable run"),
    ],
)
def test_a_broken_file_is_one_line(here, capsys, file, text, words):
    if text is None:
        Path(file).unlink()
    else:
        Path(file).write_text(text)
    assert accuracy.main(["data=data", "fit=fit", "out=out"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert words in line
    assert not Path("out").exists()
