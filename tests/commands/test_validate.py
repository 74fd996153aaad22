"""`python -m haap_rl.validate`: predictions that the scorer takes, figures worked out by hand, errors in one line."""

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from haap_rl import validate
from haap_rl.cost.calibration import DEFAULT, SCHEMA, parameters
from haap_rl.cost.estimator import Estimator
from haap_rl.report.accuracy import errors, in_percent
from tests.problem.test_measured import table

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("HAAP_RL_DATA", ROOT.parent / "shared" / "data"))
SCORER = DATA.parent / "tools" / "score_estimator.py"
SECONDS = 60.0  # for all runs of the data folder; it takes about four on one core

ROWS = (
    {},
    {"dp": "4", "pp": "2", "source_id": "other"},
    {"iter_time_s": "", "derived_iter_time_s": "2"},
    {"gbs": "", "iter_time_s": "", "mem_gib": "20", "status": "memory_only"},
    {"layers": ""},
    {"notes": "SUSPECT"},
    {"quality": "C"},
    {"iter_time_s": "", "status": "oom", "mbs": "32"},
)


def files(folder, *contents):
    paths = []
    for i, content in enumerate(contents):
        paths.append(folder / f"runs{i}.csv")
        paths[-1].write_text(content)
    return [str(path) for path in paths]


def run(folder, *contents, **options):
    """(status, predictions by row_id, summary) of the command on some files."""
    data = ",".join(files(folder, *contents))
    arguments = [f"data=[{data}]", f"out={folder / 'out'}", *(f"{key}={value}" for key, value in options.items())]
    status = validate.main(arguments)
    with open(folder / "out" / "predictions.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    predictions = {line["row_id"]: line for line in lines}
    assert len(predictions) == len(lines)
    return status, predictions, json.loads((folder / "out" / "summary.json").read_text())


def test_every_row_is_predicted_or_skipped_with_its_reason(tmp_path, capsys):
    status, predictions, summary = run(tmp_path, table(*ROWS))
    assert status == 0
    assert list(predictions) == [f"mine-{i}" for i in range(1, len(ROWS) + 1)]
    for line in predictions.values():
        told = [line[column] for column in validate.PREDICTION_COLUMNS[1:4]]
        assert bool(line["skipped_reason"]) != any(told)
    assert predictions["mine-5"]["skipped_reason"] == "blank: layers"
    assert predictions["mine-4"]["predicted_iter_time_s"] == ""  # its batch is not stated
    assert float(predictions["mine-4"]["predicted_peak_mem_gib"]) > 0
    assert predictions["mine-1"]["assumptions"].startswith("kv_heads=16 (as many as heads)")
    assert summary["skipped"] == [{"row_id": "mine-5", "reason": "blank: layers"}]
    assert summary["skipped_by_reason"] == {"blank: layers": 1}
    assert summary["left_out"] == {"suspect": 1, "quality C": 1}
    assert (tmp_path / "out" / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "blank: layers" in printed
    assert "left out of the figures: 1 suspect, 1 quality C" in printed


def test_a_prediction_is_the_ordinary_estimator_s(tmp_path):
    _, predictions, _ = run(tmp_path, table(*ROWS))
    (first, *_), _ = validate.read([str(tmp_path / "runs0.csv")])
    estimate = Estimator(first.problem)(first.plan)
    line = predictions["mine-1"]
    assert float(line["predicted_iter_time_s"]) == estimate.iteration_s
    used = max(group.used_bytes for groups in estimate.memory for group in groups)
    assert float(line["predicted_peak_mem_gib"]) == used / 2**30
    assert line["predicted_fits"] == str(estimate.fits).lower()


def test_figures_are_those_of_the_predictions(tmp_path):
    _, predictions, summary = run(tmp_path, table(*ROWS))
    times = {row_id: float(line["predicted_iter_time_s"] or "nan") for row_id, line in predictions.items()}
    error = {
        "mine-1": times["mine-1"] / 1.5 - 1,
        "mine-2": times["mine-2"] / 1.5 - 1,
        "mine-3": times["mine-3"] / 2 - 1,
    }
    whole, mine = summary["all"], summary["sources"]["mine"]
    assert whole["time_printed"]["n"] == 2
    assert whole["time_printed"]["mape"] == pytest.approx((abs(error["mine-1"]) + abs(error["mine-2"])) / 2)
    assert whole["time_printed"]["signed"] == pytest.approx((error["mine-1"] + error["mine-2"]) / 2)
    assert mine["time_printed"] == {
        "n": 1,
        "mape": pytest.approx(abs(error["mine-1"])),
        "median": pytest.approx(abs(error["mine-1"])),
        "signed": pytest.approx(error["mine-1"]),
    }
    assert whole["time_derived"]["signed"] == pytest.approx(error["mine-3"])
    assert whole["memory"]["n"] == 1
    assert (whole["rows"], whole["skipped"], whole["left_out"]) == (8, 1, 2)
    assert whole["fits"]["ran"]["judged"] == 4
    assert whole["fits"]["oom"] == {"right": int(predictions["mine-8"]["predicted_fits"] == "false"), "judged": 1}
    assert summary["mean_of_sources"]["time_printed"]["mape"] == pytest.approx(
        (abs(error["mine-1"]) + abs(error["mine-2"])) / 2
    )


def test_errors_of_hand_made_pairs():
    assert errors([(1.1, 1.0), (0.5, 1.0), (2.0, 2.0)]) == {
        "n": 3,
        "mape": pytest.approx(0.2),
        "median": pytest.approx(0.1),
        "signed": pytest.approx(-0.4 / 3),
    }
    assert errors([]) == {"n": 0, "mape": None, "median": None, "signed": None}


def test_one_absurd_error_does_not_widen_the_table(tmp_path, capsys):
    cells = {99.94: "9994.0", 100.0: ">9999", 1e19: ">9999", math.inf: ">9999", -0.25: "-25.0"}
    assert {error: in_percent(error) for error in cells} == cells
    run(tmp_path, table({"iter_time_s": "1e-17"}, {}))
    printed = capsys.readouterr().out
    assert ">9999" in printed
    assert max(len(line) for line in printed.splitlines() if "│" in line) < 150


def fitted_json(constants, intervals):
    """A file of constants: the usual ones but for those given."""
    return json.dumps({"schema": SCHEMA, "constants": {**parameters(DEFAULT), **constants}, "intervals": intervals})


def test_intervals_are_written_and_counted(tmp_path):
    file = tmp_path / "fitted.json"
    file.write_text(fitted_json({}, {}))
    _, plain, _ = run(tmp_path, table(*ROWS), calibration=file)
    assert {line["predicted_low_s"] for line in plain.values()} == {""}  # nothing is known of these constants
    times = {row_id: float(line["predicted_iter_time_s"] or "nan") for row_id, line in plain.items()}
    # wide enough for the 1.5 s that the first row measured, too narrow for the second's
    errors = sorted(abs(math.log(times[row] / 1.5)) for row in ("mine-1", "mine-2"))
    width = sum(errors) / 2
    inside = sum(abs(math.log(times[row] / s)) <= width for row, s in (("mine-1", 1.5), ("mine-2", 1.5), ("mine-3", 2)))
    file.write_text(fitted_json({}, {"all": width}))
    _, predictions, summary = run(tmp_path, table(*ROWS), calibration=file)
    for row in ("mine-1", "mine-2", "mine-3"):
        low, high = (float(predictions[row][f"predicted_{end}_s"]) for end in ("low", "high"))
        assert (low, high) == pytest.approx((times[row] / math.exp(width), times[row] * math.exp(width)))
    assert predictions["mine-4"]["predicted_high_s"] == predictions["mine-5"]["predicted_high_s"] == ""
    assert summary["all"]["interval"] == {"inside": inside, "of": 3}
    assert 0 < inside < 3


def test_suspects_named_on_the_command_line_are_left_out_too(tmp_path):
    _, predictions, summary = run(tmp_path, table(*ROWS), suspects="[mine-1]")
    assert predictions["mine-1"]["predicted_iter_time_s"]
    assert summary["left_out"]["suspect"] == 2
    assert summary["sources"]["mine"]["time_printed"]["n"] == 0


def test_constants_can_be_literature_or_a_file(tmp_path):
    changed = tmp_path / "constants.json"
    changed.write_text(fitted_json({"gemm_half_size": 2 * parameters(DEFAULT)["gemm_half_size"]}, {}))
    _, fitted, first = run(tmp_path, table({}))
    _, slower, second = run(tmp_path, table({}), calibration=changed)
    _, _, third = run(tmp_path, table({}), calibration="literature")
    assert float(slower["mine-1"]["predicted_iter_time_s"]) > float(fitted["mine-1"]["predicted_iter_time_s"])
    assert first["estimator_fingerprint"] != second["estimator_fingerprint"]
    assert [first["calibration"], third["calibration"]] == ["fitted", "literature"]


def test_malformed_rows_are_named_and_the_others_predicted(tmp_path, capsys):
    status, predictions, summary = run(tmp_path, table({}, {"gbs": "many"}, {}), table({}, {"row_id": "x"}))
    assert status == 1
    assert predictions["mine-2"]["skipped_reason"].startswith("malformed: gbs='many'")
    assert [line for line in predictions if predictions[line]["predicted_fits"]] == ["mine-1", "mine-3", "x"]
    first, second = summary["malformed"]
    assert (first["line"], first["row_id"]) == (3, "mine-2")
    assert first["file"].endswith("runs0.csv")
    assert (second["line"], second["row_id"], second["rule"]) == (2, "mine-1", "row_id 'mine-1' is there twice")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "runs0.csv, line 3 (mine-2): gbs='many' must be a whole number" in lines[0]


def test_a_row_without_a_finite_price_is_its_own_fault(tmp_path, capsys):
    constants = tmp_path / "constants.json"
    constants.write_text(fitted_json({"volta.memory_bandwidth_share": 1e-320}, {}))
    rows = table({}, {"gpu": "V100-32"}, {})
    status, predictions, summary = run(tmp_path, rows, calibration=constants)
    assert status == 1
    assert predictions["mine-2"]["skipped_reason"] == "no finite prediction"
    assert predictions["mine-2"]["predicted_iter_time_s"] == ""
    assert all(float(predictions[row]["predicted_iter_time_s"]) > 0 for row in ("mine-1", "mine-3"))
    assert summary["all"]["time_printed"]["n"] == 2
    (fault,) = summary["malformed"]
    assert (fault["line"], fault["row_id"]) == (3, "mine-2")
    assert "runs0.csv, line 3 (mine-2): its prediction is inf s" in capsys.readouterr().err


def test_names_are_printed_as_they_are(tmp_path, capsys):
    status, _, _ = run(tmp_path, table({"source_id": "[/red]"}, {"source_id": "b", "gpu": "[/red]"}))
    assert status == 0
    assert capsys.readouterr().out.count("[/red]") == 2


def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, capsys):
    (good,) = files(tmp_path, table({}))
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "binary.csv").write_bytes(b"\x89PNG\xff\x00")
    for name, text in (
        ("list", "[]"),
        ("old", '{"gemm_half_size": 1.0}'),
        ("none_of_it", json.dumps({"schema": SCHEMA})),
        ("word", fitted_json({"gemm_half_size": "x"}, {})),
        ("negative", fitted_json({"gemm_half_size": -1.0}, {})),
        ("key", fitted_json({"gem_half_size": 1}, {})),
        ("few", json.dumps({"schema": SCHEMA, "constants": {"gemm_half_size": 1.0}, "intervals": {}})),
        ("narrow", fitted_json({}, {"rdma": 0})),
    ):
        (tmp_path / f"{name}.json").write_text(text)
    out = tmp_path / "out"
    for arguments, word in (
        ([], "data has no value"),
        ([f"data={good}"], "out has no value"),
        ([f"data={tmp_path}/none.csv", f"out={out}"], "none.csv"),
        ([f"data={tmp_path}/empty.csv", f"out={out}"], "no column"),
        ([f"data={tmp_path}/binary.csv", f"out={out}"], "UTF-8"),
        ([f"data=[{good},{good}]", f"out={out}"], "once"),
        (["data=[]", f"out={out}"], "at least one"),
        ([f"data={good}", "out=7"], "out=7"),
        ([f"data={good}", f"out={out}", "calibration=fited"], "fited"),
        ([f"data={good}", f"out={out}", f"calibration={tmp_path}/none.json"], "none.json"),
        ([f"data={good}", f"out={out}", f"calibration={tmp_path}/list.json"], "not a JSON object"),
        ([f"data={good}", f"out={out}", f"calibration={tmp_path}/word.json"], "gemm_half_size='x'"),
        ([f"data={good}", f"out={out}", f"calibration={tmp_path}/old.json"], "is not 'haap_rl.calibration/1'"),
        ([f"data={good}", f"out={out}", f"calibration={tmp_path}/none_of_it.json"], "must be JSON objects"),
        ([f"data={good}", f"out={out}", f"calibration={tmp_path}/negative.json"], "gemm_half_size=-1.0"),
        ([f"data={good}", f"out={out}", f"calibration={tmp_path}/few.json"], "constants lack"),
        ([f"data={good}", f"out={out}", f"calibration={tmp_path}/narrow.json"], "intervals.rdma=0"),
        ([f"data={good}", f"out={out}", f"calibration={tmp_path}/key.json"], "did you mean 'gemm_half_size'"),
        ([f"data={good}", f"out={out}", "suspects=[nope]"], "row_id 'nope'; did you mean 'mine-1'"),
        ([f"data={good}", f"out={out}", "suspects=[mine-1,mine-l]"], "row_id 'mine-l'; did you mean 'mine-1'"),
        ([f"data={good}", f"out={out}", "dat=x"], "did you mean 'data'"),
        ([f"data={good}", f"out={good}"], "out="),
    ):
        capsys.readouterr()
        assert validate.main(arguments) == 2, arguments
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert word in lines[0], (arguments, lines)
        assert not out.exists()


def test_help_needs_neither_pictures_nor_numbers():
    code = "import sys; from haap_rl.validate import main; assert main(['--help']) == 0; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "data=... out=... calibration=fitted" in done.stdout
    assert not any(f"'{module}'" in done.stdout for module in ("matplotlib", "numpy", "torch"))


@pytest.mark.skipif(not SCORER.is_file(), reason=f"no measured runs at {DATA}; set HAAP_RL_DATA to their folder")
def test_the_scorer_takes_the_predictions_of_all_measured_runs(tmp_path):
    data = [str(DATA / name) for name in ("measured.csv", "measured_vtrain_single.csv")]
    arguments = [f"data=[{','.join(data)}]", f"out={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "haap_rl.validate", *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    command = [sys.executable, str(SCORER), "--measured", *data, "--predictions", str(tmp_path / "predictions.csv")]
    scored = subprocess.run(
        [*command, "--derived", "--include-c", "--include-suspect", "--json", str(tmp_path / "score.json")],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert scored.returncode == 0, scored.stderr
    score = json.loads((tmp_path / "score.json").read_text())
    assert score["first_scope"]["skipped"] == 0
    assert score["first_scope"]["rows"] >= 1600
    ours = json.loads((tmp_path / "summary.json").read_text())
    named = [row["reason"] for row in ours["skipped"]]
    reasons = {reason for reason in score["skipped"] if not reason.startswith("(no time")}
    assert reasons <= set(named)
    compared = 0
    for name, part in ours["sources"].items():  # the figures are the scorer's, where both count the same rows
        mine, theirs = part["time_printed"], score["parts"].get(name, {}).get("time", {"n": 0})
        if mine["n"] and mine["n"] == theirs["n"] and not part["left_out"]:
            assert 100 * mine["mape"] == pytest.approx(theirs["mape_pct"])
            assert 100 * mine["signed"] == pytest.approx(theirs["signed_pct"])
            compared += 1
    assert compared >= 5
