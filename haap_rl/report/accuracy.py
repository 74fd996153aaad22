"""How far predictions are from measured runs: the figures, a table per source, and the picture.

Errors are relative to the measurement, (predicted - measured) / measured, as fractions. Printed times and times
derived from a printed rate are never mixed.
"""

from __future__ import annotations

import io
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from haap_rl.problem.formats.measured import MeasuredRun

MARKERS = "os^Dv<>PXp*"  # one more than there are colours, so that no two sources share both
BANDS = (0.1, 0.3)
MOST_SHOWN_PCT = 10_000


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the estimator says of a measured run; all None where the run is skipped.

    time_s is None too where the run does not state its batch. interval_s: (low, high) where the estimator gives one.
    fault: what is wrong with a run that could not be priced although its row is well-formed; it is skipped then.
    """

    run: MeasuredRun
    time_s: float | None = None
    memory_gib: float | None = None
    fits: bool | None = None
    interval_s: tuple[float, float] | None = None
    fault: str = ""

    @property
    def left_out(self) -> str:
        """Why the figures do not count this run although it is predicted; "" where they do."""
        return "suspect" if self.run.suspect else "quality C" if self.run.quality == "C" else ""

    @property
    def timed(self) -> tuple[float, float] | None:
        """(predicted, measured) seconds, where there are both."""
        if self.time_s is None or self.run.time_s is None or self.run.status != "ok":
            return None
        return self.time_s, self.run.time_s


def errors(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Figures of (predicted, measured) pairs: n, and the mean and median absolute and the mean signed error."""
    relative = [predicted / measured - 1 for predicted, measured in pairs]
    sizes = [abs(error) for error in relative]
    return {
        "n": len(pairs),
        "mape": statistics.fmean(sizes) if sizes else None,
        "median": statistics.median(sizes) if sizes else None,
        "signed": statistics.fmean(relative) if relative else None,
    }


def figures(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """All figures of some predictions, the skipped and the left out not among them."""
    kept = [p for p in predictions if not p.run.skipped and not p.left_out]
    timed = [(pair, p) for p in kept if (pair := p.timed) is not None]
    memory = [(p.memory_gib, p.run.memory_gib) for p in kept]
    inside = [low <= pair[1] <= high for pair, p in timed if p.interval_s for low, high in [p.interval_s]]
    verdicts: dict[str, list[bool]] = {
        "ran": [p.fits is True for p in kept if p.run.ran is True],
        "oom": [p.fits is False for p in kept if p.run.status == "oom"],
        "failed_or_oom": [p.fits is False for p in kept if p.run.status == "failed_or_oom"],
    }
    return {
        "rows": len(predictions),
        "skipped": sum(bool(p.run.skipped) for p in predictions),
        "left_out": sum(bool(p.left_out) and not p.run.skipped for p in predictions),
        "time_printed": errors([pair for pair, p in timed if not p.run.derived]),
        "time_derived": errors([pair for pair, p in timed if p.run.derived]),
        "memory": errors([(a, b) for a, b in memory if a is not None and b is not None]),
        "fits": {name: {"right": sum(told), "judged": len(told)} for name, told in verdicts.items()},
        "interval": {"inside": sum(inside), "of": len(inside)},
    }


def summary(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Figures of every source, of all runs, and the plain mean over the sources, with what is not in them and why."""
    by_source: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        by_source.setdefault(prediction.run.source_id, []).append(prediction)
    sources = {name: figures(part) for name, part in sorted(by_source.items())}
    skipped = [p.run for p in predictions if p.run.skipped]
    left_out = Counter(p.left_out for p in predictions if p.left_out and not p.run.skipped)
    return {
        "note": "errors are fractions of the measurement; runs of quality C and suspect ones are predicted but not in "
        "any figure; derived times are apart from printed ones",
        "all": figures(predictions),
        "mean_of_sources": {
            kind: {key: _mean(part[kind][key] for part in sources.values()) for key in ("mape", "median", "signed")}
            for kind in ("time_printed", "time_derived", "memory")
        },
        "sources": sources,
        "left_out": dict(left_out.most_common()),
        "skipped_by_reason": dict(Counter(run.skipped for run in skipped).most_common()),
        "skipped": [{"row_id": run.row_id, "reason": run.skipped} for run in skipped],
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def in_percent(error: float) -> str:
    """A fraction in percent, in a cell's width whatever it is: one absurd row must not widen a whole table."""
    if abs(error) >= MOST_SHOWN_PCT / 100:
        return f">{MOST_SHOWN_PCT - 1}" if error > 0 else f"<-{MOST_SHOWN_PCT - 1}"
    return f"{100 * error:.1f}"


def source_table(result: Mapping[str, Any]) -> Table:
    """Rows of a `summary`, per source that has a prediction and then all runs: printed times, derived ones beneath."""
    table = Table(title="predicted against measured: errors in % of the measurement, right/judged verdicts")
    table.add_column("source", no_wrap=True)
    for name in ("runs", "skipped", "times", "mean", "median", "signed", "memory", "mean", "signed"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("fits: ran", "failed", "in interval"):
        table.add_column(name, justify="right")

    def percent(block: Mapping[str, Any], *keys: str) -> list[str]:
        count = str(block["n"]) if block.get("n") else "-"
        values = [block[key] for key in keys]
        return [count, *("-" if value is None else in_percent(value) for value in values)]

    means = {**result["mean_of_sources"], "rows": "", "skipped": ""}
    for name, part in [*result["sources"].items(), ("all", result["all"]), ("mean of sources", means)]:
        if part["rows"] == part["skipped"] != "":  # its reasons are in the table beneath
            continue
        if name == "all":
            table.add_section()
        printed = percent(part["time_printed"], "mape", "median", "signed")
        derived = percent(part["time_derived"], "mape", "median", "signed")
        memory = percent(part["memory"], "mape", "signed")
        rows = [[name, str(part["rows"]), str(part["skipped"]), *printed, *memory, *_verdicts(part)]]
        if part["time_derived"]["mape"] is not None:
            beneath = ["", "", "", f"{derived[0]} derived".removeprefix("- "), *derived[1:], "", "", "", "", "", ""]
            rows.append(beneath)
            if part["time_printed"]["mape"] is None:  # derived times only: one row says it all
                rows = [[*rows[0][:3], *beneath[3:7], *rows[0][7:]]]
        for row in rows:
            table.add_row(*row)
    return table


def _verdicts(part: Mapping[str, Any]) -> list[str]:
    """Right/judged of what ran and of what failed, and times inside their interval/with one."""
    if "fits" not in part:
        return ["", "", ""]
    fits, inside = part["fits"], part["interval"]
    failed = [fits["oom"], fits["failed_or_oom"]]
    pairs = [
        (fits["ran"]["right"], fits["ran"]["judged"]),
        (sum(verdict["right"] for verdict in failed), sum(verdict["judged"] for verdict in failed)),
        (inside["inside"], inside["of"]),
    ]
    return [f"{right}/{judged}" if judged else "-" for right, judged in pairs]


def skipped_table(result: Mapping[str, Any]) -> Table:
    """The reasons of a `summary` for skipping a run, the most frequent first."""
    table = Table(title="skipped runs by reason", min_width=30)
    table.add_column("runs", justify="right")
    table.add_column("reason")
    for reason, count in result["skipped_by_reason"].items():
        table.add_row(str(count), reason)
    return table


def picture(predictions: Sequence[Prediction]) -> bytes:
    """PNG: predicted against measured seconds of every run that the figures count, one colour and marker per source."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points: dict[str, list[tuple[float, float]]] = {}
    for p in predictions:
        if (pair := p.timed) is not None and not p.left_out:
            points.setdefault(f"{p.run.source_id}{' (derived)' if p.run.derived else ''}", []).append(pair)
    figure = Figure(figsize=(6.4, 6.4))
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    every = [value for pairs in points.values() for pair in pairs for value in pair] or [1.0]
    ends = [min(every) / 1.5, max(every) * 1.5]
    for band, color, layer in zip(BANDS, ("#d4d4d4", "#ebebeb"), (0.5, 0), strict=True):
        below, above = ([(1 + sign * band) * end for end in ends] for sign in (-1, 1))
        axes.fill_between(ends, below, above, color=color, linewidth=0, zorder=layer, label=f"within {band:.0%}")
    axes.plot(ends, ends, color="#606060", linewidth=0.8, zorder=1)
    # large sources first, so that they do not cover the small ones
    for i, (name, pairs) in enumerate(sorted(points.items(), key=lambda item: (-len(item[1]), item[0]))):
        measured, predicted = [b for _, b in pairs], [a for a, _ in pairs]
        many = len(pairs) > 100
        axes.scatter(
            measured, predicted, s=14 if many else 26, alpha=0.55 if many else 0.85, color=f"C{i % 10}", linewidths=0,
            marker=MARKERS[i % len(MARKERS)], label=f"{name}, {len(pairs)}", zorder=2 + i,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    axes.set_aspect("equal")
    axes.set_xlabel("measured, seconds per iteration")
    axes.set_ylabel("predicted, seconds per iteration")
    axes.set_title(f"{sum(map(len, points.values())):,} runs, one point each", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    columns = 1 if len(points) <= 24 else 2
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8, frameon=False, ncols=columns)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120, bbox_inches="tight")
    return content.getvalue()
