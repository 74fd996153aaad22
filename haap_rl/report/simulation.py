"""What a simulation of failures showed: figures over its traces, a table of policies, and the picture of one trace."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from haap_rl.faults.simulate import DEGRADED, RUNNING, STOPPED, TRANSITION, Run
from haap_rl.report.intervals import half_width

COLORS = {RUNNING: "#4f9d69", DEGRADED: "#e1974c", TRANSITION: "#5b4b8a", STOPPED: "#d9d9d9"}
LABELS = {
    RUNNING: "as planned",
    DEGRADED: "degraded",
    TRANSITION: "transition or restart",
    STOPPED: "stopped",
}
MOST_CHANGES_DRAWN = 60  # a longer trace is drawn up to there


def figures(run: Run) -> dict[str, float]:
    """Every figure of a run, by name; those ending in `_share` are shares of its time."""
    return {
        "tokens_per_s": run.tokens_per_s,
        "failure_free_tokens_per_s": run.failure_free_tokens_per_s,
        "of_failure_free": run.relative,
        "effective_training_time_ratio": run.effective_training_time_ratio,
        **{f"{cause}_share": seconds / run.horizon_s for cause, seconds in run.seconds._asdict().items()},
        "components_down": run.mean_down,
        "some_down": run.some_down,
        "failures": run.num_failures,
        "stops": run.num_stops,
        "out_of_memory_events": run.num_out_of_memory,
        "attention_lost": run.attention_lost,
        "samples_lost": run.samples_lost,
    }


def summary(runs: Sequence[Run]) -> dict[str, dict[str, float | None]]:
    """Mean of each figure over the traces, with its 95 % interval; the interval is None for a single trace."""
    rows = [figures(run) for run in runs]
    found: dict[str, dict[str, float | None]] = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        mean, half = statistics.fmean(values), half_width(values)
        low, high = (None, None) if half is None else (mean - half, mean + half)
        found[name] = {"mean": mean, "low": low, "high": high}
    return found


# rows of the table: figure, its name there, how it is written
ROWS = (
    ("tokens_per_s", "goodput, tokens/s", ",.0f"),
    ("of_failure_free", "of failure-free", ".1%"),
    ("effective_training_time_ratio", "time: training that counts", ".1%"),
    ("transitions_share", "  transitions", ".1%"),
    ("restarts_share", "  restarts", ".1%"),
    ("checkpoints_share", "  checkpoints", ".1%"),
    ("lost_share", "  training lost by stops", ".1%"),
    ("stopped_share", "  stopped", ".1%"),
    ("stops", "stops", ".1f"),
    ("out_of_memory_events", "out-of-memory events", ".1f"),
    ("attention_lost", "attention gradients lost", ".1%"),
    ("samples_lost", "samples lost", ".1%"),
)


def simulation_table(runs: Mapping[str, Sequence[Run]]) -> Table:
    """A column per policy: means over the traces, and half of the 95 % interval where there are several."""
    table = Table()
    table.add_column("", no_wrap=True)
    for policy in runs:
        table.add_column(policy, justify="right")
    every = [[figures(run) for run in some] for some in runs.values()]
    for name, words, form in ROWS:
        cells = []
        for rows in every:
            values = [row[name] for row in rows]
            half = half_width(values) if name == "of_failure_free" else None
            mean = format(statistics.fmean(values), form)
            cells.append(mean if half is None else f"{mean} ± {format(half, form).rstrip('%')}")
        table.add_row(words, *cells)
    return table


def traces_line(num_components: int, runs: Sequence[Run]) -> str:
    """What failed on the traces, which is the same for every policy."""
    down, some = (statistics.fmean(values) for values in zip(*((r.mean_down, r.some_down) for r in runs), strict=True))
    failures = statistics.fmean(run.num_failures for run in runs)
    failed = f"{num_components} components: {failures:.1f} failures a trace"
    return f"{failed}, {down:.2f} down on average, some {some:.1%} of the time"


def runs_csv(runs: Mapping[str, Sequence[Run]]) -> str:
    """One line per policy and trace, with every figure."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    first = next(iter(runs.values()))[0]
    writer.writerow(["policy", "trace", *figures(first)])
    for policy, some in runs.items():
        for number, run in enumerate(some):
            writer.writerow([policy, number, *figures(run).values()])
    return text.getvalue()


def picture(title: str, runs: Mapping[str, Run]) -> bytes:
    """PNG of one trace: what is down, and per policy its throughput by what was going on, with the goodput so far."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    first = next(iter(runs.values()))
    end_s = _end_s(first)
    figure = Figure(figsize=(12, 2.2 + 1.3 * len(runs)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(runs) + 1, 1, sharex=True, height_ratios=[0.8] + [1.0] * len(runs))
    down, panels = rows[0], rows[1:]

    spans = [span for span in first.spans if span.start_s < end_s]
    edges = [span.start_s / 3600 for span in spans] + [min(spans[-1].end_s, end_s) / 3600]
    down.stairs([span.num_down for span in spans], edges, fill=True, color="#8c8c8c")
    down.set_ylabel("down", rotation=0, ha="right", va="center")
    down.yaxis.get_major_locator().set_params(integer=True)
    down.set_ylim(0, max(1.0, 1.15 * max(span.num_down for span in spans)))
    part = "" if end_s == first.horizon_s else f", its first {end_s / 3600:.3g} h"
    figure.suptitle(f"{title} (the first trace{part})", fontsize=10)

    best = max(run.failure_free_tokens_per_s for run in runs.values()) or 1.0
    for axes, (policy, run) in zip(panels, runs.items(), strict=True):
        for span in run.spans:
            if span.start_s < end_s:
                height = span.tokens_per_s / best if span.kind in (RUNNING, DEGRADED) else 1.0
                width_h = (min(span.end_s, end_s) - span.start_s) / 3600
                axes.bar(span.start_s / 3600, height, width_h, align="edge", color=COLORS[span.kind], linewidth=0)
        times_s = np.linspace(0, end_s, 600)[1:]
        axes.plot(times_s / 3600, _made(run, times_s) / times_s / best, color="black", linewidth=1.2)
        axes.set_ylim(0, 1.05)
        axes.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])
        axes.set_ylabel(policy, rotation=0, ha="right", va="center")
        whole = f"{run.relative:.1%} of\nfailure-free\nover {run.horizon_s / 3600:g} h"
        axes.text(1.005, 0.5, whole, transform=axes.transAxes, va="center", fontsize=8)
    for axes in rows:
        axes.spines[["top", "right"]].set_visible(False)
    rows[-1].set_xlim(0, end_s / 3600)
    rows[-1].set_xlabel("hours")
    handles = [
        *(Patch(color=color, label=LABELS[kind]) for kind, color in COLORS.items()),
        Line2D([], [], color="black", label="goodput so far"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=110)
    return target.getvalue()


def _made(run: Run, times_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Tokens made until each of the times, less what stops lost by then."""
    edges_s, tokens = [0.0], [0.0]
    for span in run.spans:
        if span.tokens < 0:  # lost at once
            edges_s.append(span.start_s)
            tokens.append(tokens[-1] + span.tokens)
        edges_s.append(span.end_s)
        tokens.append(tokens[-1] + max(0.0, span.tokens))
    return np.interp(times_s, edges_s, tokens)


def _end_s(run: Run) -> float:
    """Where the picture ends: with the trace, or after its first changes, where more could not be told apart."""
    changes = [span.start_s for span in run.spans if span.kind != TRANSITION]
    return changes[MOST_CHANGES_DRAWN] if len(changes) > MOST_CHANGES_DRAWN else run.horizon_s
