"""Table: what each of the three ideas gives AutoHAAP, one off at a time, at equal evaluations.

`experiments/ablation.py` asks the same of the 29 instances on which searchers are compared, and at equal seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from experiments.ablation import OFF, ON, TITLES, Variant
from experiments.grid import Cell, Grid, Rows
from experiments.paper.table import Experiment, Pair, Table, bound_s, markdown, median_s, shown, spread

CACHING = "state_caching"


def evaluations(experiment: Experiment, idea: str) -> int:
    """Without the memo a plan takes milliseconds, so that idea is compared at few evaluations."""
    return experiment.few if idea == CACHING else experiment.evaluations


def cell(experiment: Experiment, pair: Pair, variant: Variant, budget: int) -> Cell:
    """AutoHAAP with the switches of a variant."""
    space = {"memory_aware_init": variant.memory_aware_init, "load_balance": variant.load_balance}
    return experiment.cell(
        pair, f"autohaap, {variant.name}", "autohaap", evaluations=budget, space=space, cached=variant.cached
    )


def cells(experiment: Experiment) -> list[Cell]:
    found = []
    for pair in experiment.pairs:
        found.append(experiment.exact(pair))
        for idea, off in OFF.items():
            found += [cell(experiment, pair, variant, evaluations(experiment, idea)) for variant in (ON, off)]
    return found


def table(experiment: Experiment, grid: Grid) -> Table:
    rows: list[dict[str, Any]] = []
    for pair in experiment.pairs:
        bound = bound_s(grid, experiment, pair)
        for idea, off in OFF.items():
            budget = evaluations(experiment, idea)
            on, without = (grid.of(cell(experiment, pair, variant, budget)) for variant in (ON, off))
            rows.append(
                {
                    "model": pair[0],
                    "cluster": pair[1],
                    "idea": idea,
                    "evaluations": budget,
                    "gap_pct_with": _gap(on, bound),
                    "gap_pct_without": _gap(without, bound),
                    "operator_latencies_avoided": _avoided(on) if idea == CACHING else None,
                    "legal_plans_per_plan_that_fits": float(on[0]["pruning_factor"])
                    if idea == "memory_aware_init" and on and on[0]["pruning_factor"]
                    else None,
                    "rows_that_differ": _differing(on, without) if idea == CACHING else None,
                    "speedup_by_seconds": _speed(on) / _speed(without) if idea == CACHING and on and without else None,
                }
            )
    summary = {
        idea: {
            "gap_pct_with": spread(_values(rows, idea, "gap_pct_with")),
            "gap_pct_without": spread(_values(rows, idea, "gap_pct_without")),
            "without_plan": sum(row["gap_pct_without"] is None for row in rows if row["idea"] == idea),
        }
        for idea in OFF
    }
    return Table("The three ideas, each off in turn", _text(experiment, rows), list(rows[0]), rows, summary)


def _gap(rows: Rows, bound: float) -> float | None:
    """Median gap to the bound, %."""
    middle = median_s(rows)
    return None if middle is None else 100 * (middle / bound - 1)


def _avoided(rows: Rows) -> float:
    """Share of operator latencies that were not computed again."""
    avoided, computed = (sum(int(row[key] or 0) for row in rows) for key in
                         ("operator_evaluations_avoided", "operator_evaluations"))  # fmt: skip
    return avoided / max(1, avoided + computed)


def _differing(on: Rows, off: Rows) -> int:
    """Seeds whose trace depends on the memo: none should."""
    return sum(a["trace"] != b["trace"] for a, b in zip(on, off, strict=False))


def _speed(rows: Rows) -> float:
    """Evaluations per second."""
    return sum(int(row["evaluations"] or 0) for row in rows) / max(
        1e-9, sum(float(row["seconds"] or 0) for row in rows)
    )


def _values(rows: Sequence[dict[str, Any]], idea: str, key: str) -> list[float]:
    return [row[key] for row in rows if row["idea"] == idea and row[key] is not None]


def _text(experiment: Experiment, rows: Sequence[dict[str, Any]]) -> str:
    header = ["model", "cluster", "idea", "evaluations", "gap with it", "gap without it", "besides"]
    body = [
        [
            row["model"],
            row["cluster"],
            TITLES[row["idea"]],
            f"{row['evaluations']:,}",
            shown(row["gap_pct_with"], " %", 2),
            "no plan fits" if row["gap_pct_without"] is None else shown(row["gap_pct_without"], " %", 2),
            _besides(row),
        ]
        for row in rows
    ]
    seeds = len(experiment.seeds)
    return (
        f"{markdown(header, body)}\n\nGaps are to the proven bound, medians over {seeds} seeds. State caching changes "
        "no result, only its price, so it is shown at few evaluations."
    )


def _besides(row: dict[str, Any]) -> str:
    if row["speedup_by_seconds"] is not None:
        return (
            f"{row['speedup_by_seconds']:,.0f} x the evaluations per second, {row['operator_latencies_avoided']:.2%} "
            f"of operator latencies avoided, {row['rows_that_differ']} results differ"
        )
    factor = row["legal_plans_per_plan_that_fits"]
    if factor is None:
        return "-"
    return (
        f"1 in {factor:,.1f} legal plans fits" if factor < 1e6 else f"1 in 10^{math.log10(factor):.1f} legal plans fits"
    )
