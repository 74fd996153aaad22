"""Tables and pictures of the estimator's accuracy from what `experiments.fit_estimator` wrote.

    python -m experiments.accuracy data=DIR fit=DIR out=DIR      a few seconds

data: the folder of the runs that were fitted; fit: the folder that the fit wrote. Written into out: table.md (errors of
time per source in three columns, memory, intervals, constants), worst.md (the ten worst runs of the fit), accuracy.png
(predicted against measured with each family left out) and summary.json. Figures and rows are those of
`fit_estimator.usable`, priced, timed, not of doubtful quality, as far as all three columns predict them.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.fit_estimator import usable
from haap_rl import configs, validate
from haap_rl.cost.calibration import LITERATURE, load, parameters
from haap_rl.problem.errors import InputError, positive_float, positive_int, share, shown
from haap_rl.problem.formats.files import MIB, read_json_object, read_text
from haap_rl.problem.formats.measured import MeasuredRun
from haap_rl.report.accuracy import Prediction, picture
from haap_rl.tracking.record import to_json_text, write_files

OPTIONS = {"data": None, "fit": None, "out": None}
COLUMNS = ("literature", "left_out", "fitted")
TITLES = {"literature": "no fit", "left_out": "family left out", "fitted": "fitted"}
CELL_COLUMNS = ("predicted_iter_time_s", "predicted_peak_mem_gib")
LARGEST_BYTES = 64 * MIB  # of a file of predictions
AGAIN = "run experiments.fit_estimator on this data again"
WORST = 10
UNLICENSED = ("amp_", "ds3lab_")  # no licence stated: figures over their rows only


class Cell(NamedTuple):
    """What a column predicts of a run."""

    time_s: float | None
    memory_gib: float | None


def accuracy(options: dict[str, Any]) -> int:
    data, fit, out = (Path(str(options[key])) for key in ("data", "fit", "out"))
    files = sorted(data.glob("measured*.csv"))
    if not files:
        raise InputError(f"data={str(data)!r} holds no measured*.csv; give the folder of the published runs")
    runs, _ = validate.read([str(file) for file in files])
    timed = [run for run in runs if usable(run)]
    predicted = {column: _predictions(fit / f"predictions_{column}.csv", timed) for column in COLUMNS}
    timed = [run for run in timed if all(cells[run.row_id].time_s is not None for cells in predicted.values())]
    if not timed:
        raise InputError(f"data={str(data)!r} holds no usable run that all columns predict; give the runs of the fit")
    constants = _constants(_there(fit / "fitted.json"))
    coverage = _coverage(_there(fit / "summary.json"))
    times = {column: _errors(timed, predicted[column]) for column in COLUMNS}
    result: dict[str, Any] = {
        "time": {column: {key: figures(values) for key, values in times[column].items()} for column in COLUMNS},
        "within_10_pct": {
            column: float(np.mean([abs(e) <= 0.1 for e in times[column]["all"].values()])) for column in COLUMNS
        },
        "memory": {key: figures(values) for key, values in _memory_errors(runs, predicted["fitted"]).items()},
        "coverage": coverage,
    }
    sections = [
        "| source | runs | " + " | ".join(f"{TITLES[c]}: MAPE / median / signed %" for c in COLUMNS) + " |",
        "|---|---|---|---|---|",
        *(_row(key, result["time"]) for key in result["time"]["fitted"]),
        "",
        "| memory | runs | MAPE / median / signed % | worst under | worst over |",
        "|---|---|---|---|---|",
        *(
            f"| {key} | {f['n']} | {f['mape']:.1f} / {f['median']:.1f} / {f['signed']:+.1f} | {f['least']:+.1f} | "
            f"{f['most']:+.1f} |"
            for key, f in result["memory"].items()
        ),
        "",
        "| family | runs | inside the 90 % interval | median half-width |",
        "|---|---|---|---|",
        *(
            f"| {key} | {c['rows']} | {100 * c['covered']:.1f} % | {100 * c['half_width']:.1f} % |"
            for key, c in coverage.items()
        ),
        "",
        *constants,
    ]
    contents = {
        "table.md": ("\n".join(sections) + "\n").encode(),
        "worst.md": ("\n".join(_worst(times)) + "\n").encode(),
        "summary.json": to_json_text(result).encode(),
        "accuracy.png": picture(
            [Prediction(run, predicted["left_out"][run.row_id].time_s) for run in timed if drawn(run)]
        ),
    }
    write_files(out, contents)
    print("\n".join(sections[: len(result["time"]["fitted"]) + 2]))
    print(f"written: {out}")
    return 0


def drawn(run: MeasuredRun) -> bool:
    """Whether a run may be drawn: not of sources that state no licence."""
    return not run.source_id.startswith(UNLICENSED)


def _predictions(path: Path, timed: Sequence[MeasuredRun]) -> dict[str, Cell]:
    """What a file of predictions says of each row; InputError where it lacks a column or one of the runs `timed`."""
    rows = csv.DictReader(io.StringIO(read_text(_there(path), "predictions", LARGEST_BYTES), newline=""))
    try:
        cells = {row["row_id"]: Cell(*(_number(path, row, name) for name in CELL_COLUMNS)) for row in rows}
    except KeyError as error:
        raise InputError(f"predictions {str(path)!r}: it has no column {error}; {AGAIN}") from None
    except csv.Error as error:
        raise InputError(f"predictions {str(path)!r}: it is not CSV ({error}); {AGAIN}") from None
    lacking = [run.row_id for run in timed if run.row_id not in cells]
    if lacking:
        raise InputError(f"predictions {str(path)!r}: {len(lacking)} runs are not in it ({shown(lacking[0])}); {AGAIN}")
    return cells


def _number(path: Path, row: Mapping[str, str | None], name: str) -> float | None:
    text = row[name] or ""  # a short row has None
    try:
        return positive_float(f"predictions {str(path)!r}", name, float(text)) if text else None
    except ValueError:
        raise InputError(f"predictions {str(path)!r}: {name}={shown(text)} is not a number above 0; {AGAIN}") from None


def _there(path: Path) -> Path:
    if not path.exists():
        raise InputError(f"{path}: is not there; run experiments.fit_estimator with families=true first")
    return path


def _coverage(path: Path) -> dict[str, dict[str, float]]:
    """The intervals' coverage by family."""
    coverage = read_json_object(path, "summary").get("coverage")
    where = f"summary {str(path)!r}"
    if not isinstance(coverage, dict) or not all(isinstance(part, dict) for part in coverage.values()):
        raise InputError(f"{where}: coverage={shown(coverage)} must be an object of objects; {AGAIN}")
    return {
        key: {
            "rows": positive_int(f"{where}: {key}", "rows", part.get("rows")),
            "covered": share(f"{where}: {key}", "covered", part.get("covered")),
            "half_width": positive_float(f"{where}: {key}", "half_width", part.get("half_width")),
        }
        for key, part in coverage.items()
    }


def _errors(runs: Sequence[MeasuredRun], cells: Mapping[str, Cell]) -> dict[str, dict[str, float]]:
    """(predicted - measured) / measured by source, then by row; "all" last."""
    errors: dict[str, dict[str, float]] = {}
    every: dict[str, float] = {}
    for run in runs:
        time_s = cells[run.row_id].time_s if run.row_id in cells else None
        if usable(run) and time_s is not None and run.time_s is not None:
            every[run.row_id] = errors.setdefault(run.source_id, {})[run.row_id] = time_s / run.time_s - 1.0
    return {**dict(sorted(errors.items())), "all": every}


def _memory_errors(runs: Sequence[MeasuredRun], cells: Mapping[str, Cell]) -> dict[str, dict[str, float]]:
    errors: dict[str, dict[str, float]] = {}
    for run in runs:
        memory_gib = cells[run.row_id].memory_gib if run.row_id in cells else None
        judged = run.problem is not None and run.quality != "C" and not run.suspect
        if judged and memory_gib is not None and run.memory_gib is not None:
            errors.setdefault(run.source_id, {})[run.row_id] = memory_gib / run.memory_gib - 1.0
    return dict(sorted(errors.items()))


def figures(errors: Mapping[str, float]) -> dict[str, float]:
    """Number of runs, and mean absolute, median absolute, mean, least and largest error in percent."""
    values = 100.0 * np.array(list(errors.values()))
    return {
        "n": len(values),
        "mape": float(np.mean(np.abs(values))),
        "median": float(np.median(np.abs(values))),
        "signed": float(np.mean(values)),
        "least": float(np.min(values)),
        "most": float(np.max(values)),
    }


def _row(key: str, times: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    cells = [f"{t['mape']:.1f} / {t['median']:.1f} / {t['signed']:+.1f}" for t in (times[c][key] for c in COLUMNS)]
    return f"| {key} | {times['fitted'][key]['n']} | " + " | ".join(cells) + " |"


def _worst(times: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    order = sorted(times["fitted"]["all"].items(), key=lambda item: -abs(item[1]))[:WORST]
    lines = ["| run | no fit | family left out | fitted |", "|---|---|---|---|"]
    for row_id, _ in order:
        errors = " | ".join(f"{100 * times[column]['all'][row_id]:+.0f} %" for column in COLUMNS)
        lines.append(f"| {row_id} | {errors} |")
    return lines


def _constants(path: Path) -> list[str]:
    """The table of the constants that the file says were fitted."""
    fitted = read_json_object(path, "fitted constants").get("fitted")
    if not isinstance(fitted, list):
        raise InputError(f"fitted constants {str(path)!r}: fitted={shown(fitted)} must be a list of names; {AGAIN}")
    first, now = parameters(LITERATURE), parameters(load(path))
    lines = ["| constant | literature | fitted |", "|---|---|---|"]
    return lines + [f"| {name} | {first[name]:.4g} | {now[name]:.4g} |" for name in first if name in fitted]


def main(arguments: Sequence[str] | None = None) -> int:
    return configs.run_with_options(accuracy, OPTIONS, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
