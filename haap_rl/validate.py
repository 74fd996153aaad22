"""Hold the estimator against measured runs: `python -m haap_rl.validate data=FILE.csv out=DIR`.

data=[a.csv,b.csv] takes several files; calibration= is fitted (what every command uses), literature, or a file
of fitted constants; suspects=[ID,...] leaves more runs out of the figures. Writes predictions.csv, summary.json and
accuracy.png into DIR. Status: 0 good, 1 some rows were malformed or have no finite price (named, and the others
predicted), 2 bad input.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from haap_rl import configs

if TYPE_CHECKING:
    from haap_rl.cost.calibration import Calibration
    from haap_rl.problem.formats.measured import MeasuredRun
    from haap_rl.report.accuracy import Prediction

OPTIONS: dict[str, Any] = {"data": None, "out": None, "calibration": "fitted", "suspects": []}
PREDICTION_COLUMNS = ("row_id", "predicted_iter_time_s", "predicted_peak_mem_gib", "predicted_fits", "skipped_reason")
COLUMNS = (*PREDICTION_COLUMNS, "predicted_low_s", "predicted_high_s", "assumptions")
MOST_SHOWN = 20  # malformed rows on the terminal; summary.json has all


class Fault(NamedTuple):
    """A row of a file that is malformed, or that has no finite price."""

    file: str
    line: int
    row_id: str
    rule: str


def validate(options: dict[str, Any]) -> int:
    """Predict every run of the files, write what was found and print a table; the exit status."""
    from rich.console import Console

    from haap_rl.cost.estimator import fingerprint
    from haap_rl.report.accuracy import picture, skipped_table, source_table, summary
    from haap_rl.tracking.record import to_json_text, write_files

    out = _text("out", options["out"])
    suspects = _texts("suspects", options["suspects"])
    name = _text("calibration", options["calibration"])
    constants = calibration(name)
    files = _texts("data", options["data"])
    runs, faults = read(files)
    _check_suspects(suspects, [*(run.row_id for run in runs), *(fault.row_id for fault in faults)])
    runs = [replace(run, suspect=run.suspect or run.row_id in suspects) for run in runs]
    console = Console(width=None if sys.stdout.isatty() else 150)
    predictions = predict(runs, constants, console)
    faults += [Fault(p.run.file, p.run.line, p.run.row_id, p.fault) for p in predictions if p.fault]
    result = {
        "data": files,
        "calibration": name,
        "estimator_fingerprint": fingerprint(constants),
        **summary(predictions),
        "malformed": [fault._asdict() for fault in faults],
    }
    contents = {
        "predictions.csv": predictions_csv(predictions, faults).encode(),
        "summary.json": to_json_text(result).encode(),
        "accuracy.png": picture(predictions),
    }
    write_files(Path(out), contents)
    console.print(source_table(result), markup=False)
    if result["skipped"]:
        console.print(skipped_table(result), markup=False)
    if result["left_out"]:
        counts = ", ".join(f"{count} {why}" for why, count in result["left_out"].items())
        console.print(f"predicted, but left out of the figures: {counts}", highlight=False, soft_wrap=True)
    console.print(f"written: {out}", highlight=False, markup=False, soft_wrap=True)
    for fault in faults[:MOST_SHOWN]:
        row = f" ({fault.row_id[:60]})" if fault.row_id.isprintable() and fault.row_id else ""
        print(f"haap_rl: {fault.file}, line {fault.line}{row}: {fault.rule}; row skipped", file=sys.stderr)
    if len(faults) > MOST_SHOWN:
        print(f"haap_rl: {len(faults) - MOST_SHOWN} more malformed rows, see {out}/summary.json", file=sys.stderr)
    return 1 if faults else 0


def read(files: Sequence[str]) -> tuple[list[MeasuredRun], list[Fault]]:
    """The runs of all files and their malformed rows; a row_id counts once over all of them."""
    from haap_rl.problem.formats import measured
    from haap_rl.problem.presets import preset

    runs: list[MeasuredRun] = []
    faults: list[Fault] = []
    for file in files:
        taken = {run.row_id for run in runs} | {fault.row_id for fault in faults}
        some, malformed = measured.read(file, lambda name: preset("device", name), taken)
        runs += some
        faults += [Fault(file, *row) for row in malformed]
    return runs, faults


def predict(runs: Sequence[MeasuredRun], constants: Calibration, console: Any) -> list[Prediction]:
    """One prediction per run, in order, each from an ordinary Estimator of the run's own problem.

    A run whose price is not finite is skipped, and its prediction says so in `fault`.
    """
    from rich.progress import track

    from haap_rl.cost.calibration import parameters, with_parameters
    from haap_rl.cost.estimator import Estimator
    from haap_rl.problem.cluster import GIB
    from haap_rl.report.accuracy import Prediction

    # a requirement that somebody computed holds neither context nor allocator
    none = {name: 0.0 for name in parameters(constants) if name.endswith(("reserve_bytes", "fragmentation"))}
    bare = with_parameters(constants, none)
    predictions = []
    for run in track(runs, "predicting", console=console, transient=True, disable=not console.is_terminal):
        if run.problem is None or run.plan is None:
            predictions.append(Prediction(run))
            continue
        stated = bare if run.ran is None else constants
        estimate = Estimator(run.problem, calibration=stated)(run.plan)
        if not 0 < estimate.iteration_s < math.inf:
            fault = f"its prediction is {estimate.iteration_s} s; correct the row, or calibration=..."
            skipped = replace(run, problem=None, plan=None, skipped="no finite prediction")
            predictions.append(Prediction(skipped, fault=fault))
            continue
        used = max(group.used_bytes for groups in estimate.memory for group in groups)
        time_s = estimate.iteration_s if run.batch_stated else None
        between = estimate.interval_s if time_s is not None else None
        predictions.append(Prediction(run, time_s, used / GIB, estimate.fits, between))
    return predictions


def predictions_csv(predictions: Sequence[Prediction], faults: Sequence[Fault]) -> str:
    """One line per row_id: what is predicted, or why not."""
    import csv
    import io

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    written = set()
    for p in predictions:
        low, high = p.interval_s or (None, None)
        fits = None if p.fits is None else str(p.fits).lower()
        assumptions = "; ".join(p.run.assumptions)
        writer.writerow([p.run.row_id, p.time_s, p.memory_gib, fits, p.run.skipped, low, high, assumptions])
        written.add(p.run.row_id)
    for fault in faults:
        if fault.row_id and fault.row_id not in written:
            writer.writerow([fault.row_id, None, None, None, f"malformed: {fault.rule}", None, None, None])
            written.add(fault.row_id)
    return text.getvalue()


def calibration(name: str) -> Calibration:
    """The constants called `name`: fitted, literature, or those of a file that experiments.fit_estimator wrote."""
    from haap_rl.cost.calibration import DEFAULT, LITERATURE, load
    from haap_rl.problem.errors import InputError

    if name in ("fitted", "literature"):
        return DEFAULT if name == "fitted" else LITERATURE
    if not Path(name).suffix and not Path(name).exists():
        raise InputError(f"calibration={name!r} is not known; give fitted, literature or a file of fitted constants")
    return load(Path(name))


def _text(key: str, value: object) -> str:
    from haap_rl.problem.errors import InputError, shown

    if not isinstance(value, str) or not value:
        raise InputError(f"{key}={shown(value)} must be one name; quote it if it looks like a number")
    return value


def _texts(key: str, value: object) -> list[str]:
    """A name or a list of names as a list."""
    from haap_rl.problem.errors import InputError

    names = [_text(key, entry) for entry in (value if isinstance(value, list) else [value])]
    if key == "data" and len(set(names)) < max(1, len(names)):
        raise InputError(f"data={names} must name each file once, and at least one; give data=FILE.csv")
    return names


def _check_suspects(suspects: Sequence[str], row_ids: Sequence[str]) -> None:
    """Raise InputError for a suspect that is no row: left in the figures, it would be taken for left out."""
    import difflib

    from haap_rl.problem.errors import InputError, shown

    known = set(row_ids)
    for name in suspects:
        if name not in known:
            near = difflib.get_close_matches(name[:100], row_ids, n=1, cutoff=0.0)
            raise InputError(f"suspects: no row has row_id {shown(name)}; did you mean {shown(near[0])}?")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    return configs.run_with_options(validate, dict(OPTIONS), sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
