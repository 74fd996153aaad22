"""Table: reinforcement learning and evolution against the baseline heuristic under equal budgets, and how far each is
from the proven optimum."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.grid import Cell, Grid
from experiments.paper.table import Experiment, Pair, Table, bound_s, markdown, median_s, shown, spread, times_s, trace

SEARCHES = ("autohaap", "ga", "ppo", "ppo_partition", "annealing", "random")
TITLES = {
    "autohaap": "AutoHAAP (heuristic)",
    "ga": "GA",
    "ppo": "PPO from scratch, builds plans",
    "ppo_partition": "PPO from scratch, edits plans",
    "policy": "trained policy, polished",
    "annealing": "annealing",
    "random": "random",
    "exact": "exact",
}


def method_cells(experiment: Experiment, pair: Pair) -> list[Cell]:
    """The searches that are compared on a problem; the policy's after those that learn nothing beforehand."""
    trained = experiment.cell(pair, "policy", "ppo", {"policy": "pretrained"})
    return [*(experiment.cell(pair, name, name) for name in SEARCHES), trained]


def cells(experiment: Experiment) -> list[Cell]:
    return [cell for pair in experiment.pairs for cell in [experiment.exact(pair), *method_cells(experiment, pair)]]


def table(experiment: Experiment, grid: Grid) -> Table:
    rows: list[dict[str, Any]] = []
    for pair in experiment.pairs:
        bound = bound_s(grid, experiment, pair)
        for cell in [*method_cells(experiment, pair), experiment.exact(pair)]:
            found = grid.of(cell)
            middle, worst = median_s(found), max(times_s(found), default=None)
            reason = grid.reason(cell)
            rows.append(
                {
                    "model": pair[0],
                    "cluster": pair[1],
                    "method": cell.method,
                    "seeds": len(found),
                    "evaluations": experiment.evaluations if cell.method != "exact" else None,
                    "gap_pct_median": None if middle is None else 100 * (middle / bound - 1),
                    "gap_pct_worst": None if worst is None else 100 * (worst / bound - 1),
                    "seeds_without_plan": len(found) - len(times_s(found)),
                    "reason": f"not trained: {reason}" if reason and cell.method == "policy" else reason,
                }
            )
    summary = {
        method: spread(
            row["gap_pct_median"] for row in rows if row["method"] == method and row["gap_pct_median"] is not None
        )
        for method in TITLES
    }
    return Table(
        "PPO and GA against the heuristic, equal budgets",
        _text(experiment, rows),
        list(rows[0]),
        rows,
        {"gap_to_bound_pct_by_method": summary},
        lambda path: _draw(experiment, grid, path),
    )


def _text(experiment: Experiment, rows: Sequence[dict[str, Any]]) -> str:
    header = ["method", *(f"{model} on {cluster}" for model, cluster in experiment.pairs)]
    body = []
    for method, title in TITLES.items():
        here = [row for row in rows if row["method"] == method]
        body.append([title, *(_figure(row) for row in here)])
    return (
        f"{markdown(header, body)}\n\nGap to the proven bound after {experiment.evaluations:,} evaluations, median "
        f"over {len(experiment.seeds)} seeds (worst); exact: how close its own best plan and bound are."
    )


def _figure(row: dict[str, Any]) -> str:
    if row["gap_pct_median"] is None:
        return "not trained" if row["reason"].startswith("not trained") else "no plan fits"
    lost = f", {row['seeds_without_plan']} without a plan" if row["seeds_without_plan"] else ""
    if row["seeds"] == 1:
        return f"{row['gap_pct_median']:.2f} %"
    return f"{row['gap_pct_median']:.2f} % ({shown(row['gap_pct_worst'], '', 2)}{lost})"


def _draw(experiment: Experiment, grid: Grid, path: Path) -> None:
    """Median gap against evaluations, a panel for each problem."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.9 * len(experiment.pairs), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(experiment.pairs), sharey=True, squeeze=False)[0]
    grid_points = np.unique(np.geomspace(6, experiment.evaluations, 60).astype(int))
    for axes, pair in zip(panels, experiment.pairs, strict=True):
        bound = bound_s(grid, experiment, pair)
        for color, cell in enumerate(method_cells(experiment, pair)):
            curves = []
            for row in grid.of(cell):
                points = trace(row)
                best = [min((t for n, t, _ in points if n <= budget), default=np.inf) for budget in grid_points]
                curves.append(100 * (np.array(best) / bound - 1))
            if curves:
                middle = np.median(np.array(curves), axis=0)
                axes.plot(grid_points, np.maximum(middle, 0.01), color=f"C{color}", label=TITLES[cell.method])
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(f"{pair[0]}\n{pair[1]}", fontsize=9)
        axes.set_xlabel("plan evaluations", fontsize=9)
        axes.grid(color="0.93")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("gap to the proven bound, %\n(0.01 or less at the bottom)", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path, dpi=100)
