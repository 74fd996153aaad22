"""Throughput of AutoHAAP's plans over those of other planners: what both throughput tables have in common.

Every baseline is scored by our estimator, in the same declared space; one that knows a single device type is run twice
on a mixed cluster, taking every device for the slowest (`all`) and using the largest part alone (`part`). AutoHAAP is
the heuristic with its own starts; it is never started from a baseline's plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.grid import Cell, Grid
from experiments.paper.table import (
    Experiment,
    Pair,
    Table,
    bound_s,
    markdown,
    median_s,
    published,
    shown,
    spread,
    times_s,
    tokens_per_s,
)
from haap_rl.problem.presets import preset

ONE_TYPE = ("megatron", "alpa", "aceso")  # know one device type
MIXED = ("amp", "metis", "sailor")
BASELINES = (*ONE_TYPE, *MIXED)
TITLES = {
    "megatron": "Megatron-LM", "alpa": "Alpa", "aceso": "Aceso", "amp": "AMP", "metis": "Metis", "sailor": "Sailor",
}  # fmt: skip
LOST_BY = 1e-3  # a baseline wins a cell where AutoHAAP's plan is slower by more


def is_mixed(cluster: str) -> bool:
    """Whether a cluster of conf/cluster has several device types."""
    return len({group["device"] for group in preset("cluster", cluster)["groups"]}) > 1


def autohaap(experiment: Experiment, pair: Pair) -> Cell:
    return experiment.cell(pair, "autohaap", "autohaap")


def policy(experiment: Experiment, pair: Pair) -> Cell:
    """The shipped policy proposes, relief polishes: it has its own row, "not trained" where there is none."""
    settings = {"policy": "pretrained"}
    evaluations = min(experiment.evaluations, 10_000)
    return experiment.cell(pair, "policy", "ppo", settings, evaluations=evaluations, seeds=experiment.seeds[:3])


def baseline(experiment: Experiment, pair: Pair, name: str) -> list[Cell]:
    """The cells of a baseline, of as many evaluations as AutoHAAP's: one, or one for each way to take a mixed cluster.

    They draw nothing, so one seed does.
    """
    if name not in ONE_TYPE:
        return [experiment.cell(pair, name, name, seeds=[0])]
    ways = ("all", "part") if is_mixed(pair[1]) else ("all",)
    return [experiment.cell(pair, f"{name} {way}", name, {"devices": way}, seeds=[0]) for way in ways]


def cells(experiment: Experiment) -> list[Cell]:
    """Every search of a throughput table."""
    found = []
    for pair in experiment.pairs:
        found += [experiment.exact(pair), autohaap(experiment, pair), policy(experiment, pair)]
        found += [cell for name in BASELINES for cell in baseline(experiment, pair, name)]
    return found


class Line(NamedTuple):
    """What the table says of a method on a problem."""

    pair: Pair
    method: str
    seeds: int
    median_s: float | None
    worst_s: float | None
    gap_pct: float | None
    gain_pct: float | None  # of AutoHAAP's throughput over this one's
    reason: str


def lines(experiment: Experiment, grid: Grid) -> list[Line]:
    """All lines, problem by problem, AutoHAAP's first."""
    found = []
    for pair in experiment.pairs:
        bound, ours = bound_s(grid, experiment, pair), median_s(grid.of(autohaap(experiment, pair)))
        others = [cell for name in BASELINES for cell in baseline(experiment, pair, name)]
        for cell in [autohaap(experiment, pair), policy(experiment, pair), experiment.exact(pair), *others]:
            rows = grid.of(cell)
            theirs = median_s(rows)
            found.append(
                Line(
                    pair,
                    cell.method,
                    len(rows),
                    theirs,
                    max(times_s(rows), default=None),
                    None if theirs is None else 100 * (theirs / bound - 1),
                    None if theirs is None or ours is None else 100 * (theirs / ours - 1),
                    _reason(cell, grid),
                )
            )
    return found


def _reason(cell: Cell, grid: Grid) -> str:
    reason = grid.reason(cell)
    return f"not trained: {reason}" if reason and cell.method == "policy" else reason


def best_gains(experiment: Experiment, found: Sequence[Line]) -> dict[tuple[Pair, str], float]:
    """AutoHAAP's gain over each baseline on each problem, in %, over its better way where it has two."""
    gains: dict[tuple[Pair, str], float] = {}
    for line in found:
        name = line.method.split()[0]
        if name in BASELINES and line.gain_pct is not None:
            gains[line.pair, name] = min(line.gain_pct, gains.get((line.pair, name), line.gain_pct))
    return gains


def table(experiment: Experiment, grid: Grid, title: str, key: str) -> Table:
    """The finished table; `key` is that of the gains in `summary.json` and in what is published."""
    found = lines(experiment, grid)
    gains = best_gains(experiment, found)
    over_best = [
        min(values)
        for pair in experiment.pairs
        if (values := [gain for (where, _), gain in gains.items() if where == pair])
    ]
    ours = [line for line in found if line.method == "autohaap"]
    lost = [[*pair, name] for (pair, name), gain in gains.items() if gain < -100 * LOST_BY / (1 + LOST_BY)] + [
        [*line.pair, "any"] for line in ours if line.median_s is None
    ]
    summary = {
        key: spread(gains.values()),
        f"{key}_over_best_baseline": spread(over_best),
        "per_baseline": {
            name: spread(gain for (_, other), gain in gains.items() if other == name) for name in BASELINES
        },
        "cells": len(found),
        "cells_without_plan": [[*line.pair, line.method, line.reason] for line in found if line.median_s is None],
        "cells_where_a_baseline_wins": lost,
        "gap_to_bound_pct": spread(line.gap_pct for line in ours if line.gap_pct is not None),
    }
    columns = ("model", "cluster", "method", "seeds", "iteration_time_s", "worst_s", "tokens_per_s",
               "gap_to_bound_pct", "autohaap_gain_pct", "reason")  # fmt: skip
    rows = [
        dict(
            zip(
                columns,
                (
                    *line.pair,
                    line.method,
                    line.seeds,
                    _number(line.median_s),
                    _number(line.worst_s),
                    _number(None if line.median_s is None else tokens_per_s(experiment, line.median_s)),
                    _number(line.gap_pct),
                    _number(line.gain_pct),
                    line.reason,
                ),
                strict=True,
            )
        )
        for line in found
    ]
    text = "\n\n".join([_table(experiment, found, gains), _said(summary, key)])
    return Table(title, text, columns, rows, summary, lambda path: _draw(experiment, gains, path))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _table(experiment: Experiment, found: Sequence[Line], gains: Mapping[tuple[Pair, str], float]) -> str:
    header = ["model", "cluster", "AutoHAAP, tokens/s", "gap to bound", *(TITLES[name] for name in BASELINES), "policy"]
    body = []
    for pair in experiment.pairs:
        here = {line.method: line for line in found if line.pair == pair}
        ours = here["autohaap"]
        row = [*pair]
        row.append(shown(None if ours.median_s is None else tokens_per_s(experiment, ours.median_s), digits=0))
        row.append(shown(ours.gap_pct, " %", 2))
        for name in BASELINES:
            both = [line for method, line in here.items() if method.split()[0] == name]
            row.append(" / ".join(_gain(line) for line in both))
        row.append(_gain(here["policy"]))
        body.append(row)
    return markdown(header, body)


def _gain(line: Line) -> str:
    if line.gain_pct is not None:
        return shown(line.gain_pct, " %", 1, sign=True)
    return "not trained" if line.reason.startswith("not trained") else "no plan fits"


def _said(summary: Mapping[str, Any], key: str) -> str:
    paper, ours, best = published()["autohaap"], summary[key], summary[f"{key}_over_best_baseline"]
    low, high = paper[key]
    gap = summary["gap_to_bound_pct"]
    lost = summary["cells_where_a_baseline_wins"]
    return (
        "Columns of other planners: AutoHAAP's throughput over theirs; two figures: every device taken for the slowest "
        "/ the largest part of one type alone. "
        f"Ours: {_range(ours)} over each baseline, {_range(best)} over the best one. "
        f"Published: +{low} to +{high} % ({paper['source']}), so the digits cannot be compared. "
        f"AutoHAAP's gap to the proven bound: {_range(gap, sign=False)}. "
        f"Cells in which a baseline wins by more than 0.1 %: {len(lost)}"
        + (f" ({'; '.join(' '.join(cell) for cell in lost)})." if lost else ".")
    )


def _range(values: Mapping[str, float] | None, sign: bool = True) -> str:
    if values is None:
        return "nothing"
    low, middle, high = (shown(values[name], sign=sign) for name in ("min", "median", "max"))
    return f"{low} to {high} % (median {middle} %)"


def _draw(experiment: Experiment, gains: Mapping[tuple[Pair, str], float], path: Path) -> None:
    """Gains as points, a row for each problem."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 1.2 + 0.38 * len(experiment.pairs)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for color, name in enumerate(BASELINES):
        aside = 0.1 * (color - (len(BASELINES) - 1) / 2)  # that none hides another
        points = [
            (gain, y + aside)
            for y, pair in enumerate(experiment.pairs)
            if (gain := gains.get((pair, name))) is not None
        ]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                "o",
                markersize=5,
                color=f"C{color}",
                label=f"over {TITLES[name]}",
                alpha=0.85,
            )
    axes.axvline(0, color="0.4", linewidth=1)
    axes.set_xscale("symlog", linthresh=10)
    axes.set_xlim(min([-1, *(1.2 * gain for gain in gains.values())]), max([12, *(1.3 * g for g in gains.values())]))
    ticks = [tick for tick in (0, 5, 10, 20, 50, 100, 200, 500) if tick <= 1.3 * max([10, *gains.values()])]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_yticks(range(len(experiment.pairs)), [f"{model} on {cluster}" for model, cluster in experiment.pairs])
    axes.set_ylim(len(experiment.pairs) - 0.5, -0.5)
    axes.set_xlabel("AutoHAAP's throughput over the baseline's, % (estimated)")
    axes.grid(axis="x", color="0.9")
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.4, -0.18), ncols=3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)
