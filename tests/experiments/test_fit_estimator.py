"""The fit finds the constants that made a table of runs, twice the same, and refuses what it cannot use."""

import csv
import json
import os
from pathlib import Path

import pytest

from experiments import fit_estimator
from haap_rl import validate
from haap_rl.cost.calibration import FITTED, LITERATURE, load, parameters, with_parameters
from haap_rl.cost.estimator import Estimator
from tests.problem.test_measured import table

TRUE = {"ampere.gemm_efficiency": 0.74, "ampere.memory_bandwidth_share": 0.75}
DEGREES = [(tp, pp, mbs) for tp in (1, 2, 4) for pp in (1, 2, 4) for mbs in (1, 2, 4)]


def runs(folder):
    """A folder with runs whose seconds are the estimator's own by the constants `TRUE`."""
    rows = [
        {"tp": str(tp), "pp": str(pp), "dp": str(16 // tp // pp), "mbs": str(mbs), "inter_node": "200 Gb/s per node"}
        for tp, pp, mbs in DEGREES
    ]
    folder.mkdir()
    file = folder / "measured.csv"
    file.write_text(table(*rows))
    found, faults = validate.read([str(file)])
    assert faults == []
    constants = with_parameters(LITERATURE, TRUE)
    seconds = [Estimator(run.problem, calibration=constants)(run.plan).iteration_s for run in found]
    file.write_text(table(*({**row, "iter_time_s": repr(s)} for row, s in zip(rows, seconds, strict=True))))
    return folder


@pytest.fixture
def data(tmp_path):
    return runs(tmp_path / "data")


def fitted(data, out):
    assert fit_estimator.main([f"data={data}", f"out={out}", "families=false", "jobs=1"]) == 0
    result = json.loads((out / "fitted.json").read_text())
    result.pop("date")
    return result


def test_constants_that_made_the_runs_are_recovered_and_twice_the_same(tmp_path, data, monkeypatch, capsys):
    monkeypatch.setattr(fit_estimator, "fitted_names", lambda: list(TRUE))
    monkeypatch.setattr(fit_estimator, "PRIOR_STRENGTH", 0.05)  # the data alone
    one = fitted(data, tmp_path / "one")
    assert fitted(data, tmp_path / "two") == one
    for name, value in TRUE.items():
        assert one["constants"][name] == pytest.approx(value, rel=0.05), name  # the prior pulls a little
    others = {name: value for name, value in parameters(LITERATURE).items() if name not in TRUE}
    assert {name: one["constants"][name] for name in others} == others  # nobody touched them
    assert one["mape_pct"]["fitted"]["all"] < 1.0 < 3.0 < one["mape_pct"]["literature"]["all"]
    assert one["rows_used"] == {"mine": len(DEGREES)}

    read = load(tmp_path / "one" / "fitted.json")
    assert parameters(read) == one["constants"]
    assert read.intervals == ()  # families were not left out, so nothing is known of the error elsewhere
    lines = list(csv.DictReader((tmp_path / "one" / "predictions_fitted.csv").open()))
    assert len(lines) == len(DEGREES)
    assert "on everything" in capsys.readouterr().out


def test_all_constants_together_explain_the_runs_and_stay_near_the_literature(tmp_path, data):
    result = fitted(data, tmp_path / "out")
    assert result["mape_pct"]["fitted"]["all"] < result["mape_pct"]["literature"]["all"] / 4
    assert set(result["fitted"]) == set(fit_estimator.fitted_names())
    for name, first in parameters(LITERATURE).items():
        now = result["constants"][name]
        if name in fit_estimator.FIXED or name.startswith(("volta", "turing", "hopper", "fsdp", "deepspeed")):
            assert now == pytest.approx(first, rel=1e-9), name  # nothing in the runs speaks of it
        else:
            assert first / 3 <= now <= first * 3, name


def test_every_constant_is_fitted_or_fixed_and_has_a_width():
    names = fit_estimator.fitted_names()
    assert set(fit_estimator.FIXED) <= set(parameters(LITERATURE))
    assert all(fit_estimator.width(name) > 0 for name in names)
    for name in names:
        value, slope = fit_estimator.constant(name, 0.0)
        assert value == pytest.approx(parameters(LITERATURE)[name])
        above, below = (fit_estimator.constant(name, x)[0] for x in (1e-5, -1e-5))
        assert slope == pytest.approx((above - below) / 2e-5, rel=1e-6)


def test_quantiles_are_conformal_and_count_families_not_rows():
    few = [("a", 0.1)] * 19
    assert fit_estimator.quantiles({"rdma": few}) == {}
    spread = [(str(i), i / 100) for i in range(1, 100)]
    assert fit_estimator.quantiles({"rdma": spread}) == {"rdma": 0.92}  # the 92nd smallest of 99
    # one family of a hundred equal rows weighs ten, beside twenty of one row each
    mixed = [("large", 0.01)] * 100 + [(str(i), 0.5) for i in range(20)]
    assert fit_estimator.quantiles({"rdma": mixed}) == {"rdma": 0.5}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["out=out"], "data has no value"),
        (["data={data}"], "out has no value"),
        (["data={data}/none", "out=out"], "holds no measured*.csv"),
        (["data={data}", "out=out", "jobs=0"], "jobs=0"),
        (["data={data}", "out=out", "families=maybe"], "families='maybe'"),
        (["data={data}", "out=out", "familes=true"], "'familes=true' is not an option"),
    ],
)
def test_bad_options_are_refused_in_one_line(tmp_path, monkeypatch, data, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert fit_estimator.main([argument.format(data=data) for argument in arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert words in lines[0]
    assert not (tmp_path / "out").exists()


@pytest.fixture
def no_fit(monkeypatch):
    """A minute of fitting that must not begin."""
    monkeypatch.setattr(fit_estimator.multiprocessing, "get_context", None)


def refused(capsys, *arguments):
    assert fit_estimator.main(arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_a_directory_that_cannot_be_written_is_refused_before_the_fit(tmp_path, data, no_fit, capsys):
    (tmp_path / "file").write_text("mine")
    line = refused(capsys, f"data={data}", f"out={tmp_path}/file", "families=false")
    assert "/file'" in line
    assert "choose another out=DIR" in line
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("rows", "families", "words"),
    [
        (({"quality": "C"}, {"notes": "SUSPECT"}), "false", "0 usable runs of 0 families"),
        (({"quality": "C"}, {"notes": "SUSPECT"}), "true", "0 usable runs of 0 families"),
        (({}, {"quality": "C", "source_id": "other"}), "true", "1 usable runs of 1 families"),
    ],
)
def test_too_few_runs_are_refused_before_the_fit(tmp_path, no_fit, capsys, rows, families, words):
    (tmp_path / "measured.csv").write_text(table(*rows))
    assert words in refused(capsys, f"data={tmp_path}", f"out={tmp_path}/out", f"families={families}")
    assert not (tmp_path / "out").exists()


def test_malformed_rows_are_counted_and_the_others_fitted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fit_estimator, "fitted_names", lambda: list(TRUE))
    (tmp_path / "measured.csv").write_text(table({}, {"gbs": "many"}, {}))
    assert fit_estimator.main([f"data={tmp_path}", f"out={tmp_path}/out", "families=false", "jobs=1"]) == 1
    assert "1 malformed rows skipped" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "fitted.json").read_text())["rows_used"] == {"mine": 2}


@pytest.mark.skipif(not os.environ.get("HAAP_RL_REFIT"), reason="two minutes: HAAP_RL_REFIT=1 and the published runs")
def test_the_shipped_constants_are_what_the_command_gives(tmp_path):
    data = Path(os.environ.get("HAAP_RL_DATA", Path(__file__).resolve().parents[2].parent / "shared" / "data"))
    if not data.is_dir():
        pytest.skip(f"no published runs in {data}")
    assert fit_estimator.main([f"data={data}", f"out={tmp_path}", "families=false", "jobs=1"]) == 0
    again = json.loads((tmp_path / "fitted.json").read_text())["constants"]
    shipped = json.loads(FITTED.read_text())["constants"]
    assert again == pytest.approx(shipped, rel=1e-6)
