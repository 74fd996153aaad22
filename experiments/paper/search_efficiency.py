"""Table: what a search costs, AutoHAAP against each baseline: until it is as good, and until it ends.

Costs of the searches as we run them are plan evaluations and seconds, of one process each. What the papers themselves
count stands beside: Alpa compiles and profiles every run of layers on every submesh (Zheng et al. 2022, section 5),
Aceso prices configurations by a model of profiled operators and stops after a fixed time (Liu et al. 2024), AutoHAAP
prices plans from operator latencies, none of them twice. Published search times hold compiling and profiling on real
devices, so their ratio to ours says how long a person waits, not whose algorithm is better.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments.grid import Cell, Grid, Rows
from experiments.paper import throughput
from experiments.paper.table import Experiment, Pair, Table, markdown, median_s, published, shown, spread, trace
from haap_rl.problem.plan import Problem
from haap_rl.problem.presets import load_problem

KEY = "search_efficiency_x"


def cells(experiment: Experiment) -> list[Cell]:
    """AutoHAAP and every baseline; none of them is timed against a proof."""
    return [
        cell
        for pair in experiment.pairs
        for cell in [
            throughput.autohaap(experiment, pair),
            *(each for name in throughput.BASELINES for each in throughput.baseline(experiment, pair, name)),
        ]
    ]


class Reached(NamedTuple):
    """What AutoHAAP took until its plan was as good as another's: medians over seeds; None: half of them never were."""

    evaluations: float | None
    seconds: float | None


def reached(rows: Rows, wanted_s: float) -> Reached:
    """Evaluations and seconds until the best plan took `wanted_s` or less."""
    hits = [
        next(((n, at) for n, best, at in trace(row) if best <= wanted_s * (1 + 1e-9)), None) if row["trace"] else None
        for row in rows
    ]
    found = [hit for hit in hits if hit is not None]
    if 2 * len(found) <= len(hits):
        return Reached(None, None)
    return Reached(*(statistics.median(hit[i] for hit in found) for i in range(2)))


def alpa_candidates(problem: Problem) -> int:
    """Runs of layers x submeshes of 1, 2, 4, ... devices: what Alpa compiles and profiles before it chooses."""
    layers = problem.model.num_layers
    return layers * (layers + 1) // 2 * problem.cluster.num_devices.bit_length()


def table(experiment: Experiment, grid: Grid) -> Table:
    facts = {(fact["model"], fact["cluster"]): fact for fact in published()["gpt3_on_v100"]["cells"]}
    rows: list[dict[str, Any]] = []
    for pair in experiment.pairs:
        ours = grid.of(throughput.autohaap(experiment, pair))
        for name in throughput.BASELINES:
            cell = throughput.baseline(experiment, pair, name)[0]
            theirs = grid.of(cell)
            rows.append(_row(pair, name, ours, theirs, facts.get(pair, {}), grid.reason(cell)))
    summary = {
        KEY: {name: spread(_values(rows, name, "x_by_seconds")) for name in throughput.BASELINES},
        f"{KEY}_by_evaluations": {
            name: spread(_values(rows, name, "x_by_evaluations")) for name in throughput.BASELINES
        },
        "published_search_seconds_over_ours": spread(
            row["published_search_seconds"] / row["autohaap_budget_seconds"]
            for row in rows
            if row["published_search_seconds"] and row["autohaap_budget_seconds"]
        ),
        "never_as_good": [[row["model"], row["cluster"], row["baseline"]] for row in rows if row["never"]],
    }
    columns = [key for key in rows[0] if key != "never"]
    return Table("Search efficiency", _text(rows, summary), columns, rows, summary)


def _row(pair: Pair, name: str, ours: Rows, theirs: Rows, fact: Mapping[str, Any], reason: str) -> dict[str, Any]:
    wanted = median_s(theirs)
    hit = Reached(None, None) if wanted is None else reached(ours, wanted)
    evaluations = int(theirs[0]["evaluations"]) if wanted is not None else None
    seconds = float(theirs[0]["seconds"]) if wanted is not None else None
    return {
        "model": pair[0],
        "cluster": pair[1],
        "baseline": name,
        "reason": reason,
        "baseline_evaluations": evaluations,
        "autohaap_evaluations": hit.evaluations,
        "x_by_evaluations": _over(evaluations, hit.evaluations),
        "baseline_seconds": seconds,
        "autohaap_seconds": hit.seconds,
        "x_by_seconds": _over(seconds, hit.seconds),
        "autohaap_budget_seconds": statistics.median(float(row["seconds"]) for row in ours) if ours else None,
        "published_search_seconds": fact.get(f"{name}_search_s"),
        "alpa_candidates": alpa_candidates(load_problem(*pair)) if name == "alpa" else None,
        "autohaap_operator_latencies": int(ours[0]["operator_evaluations"]) if ours else None,
        "never": wanted is not None and hit.evaluations is None,
    }


def _over(theirs: float | None, ours: float | None) -> float | None:
    return None if theirs is None or not ours else theirs / ours


def _values(rows: list[dict[str, Any]], name: str, key: str) -> list[float]:
    return [row[key] for row in rows if row["baseline"] == name and row[key] is not None]


def _text(rows: list[dict[str, Any]], summary: Mapping[str, Any]) -> str:
    header = ["model", "cluster", "baseline", "its evaluations", "AutoHAAP's until as good", "its seconds",
              "AutoHAAP's until as good", "x by seconds", "published search, s"]  # fmt: skip
    body = [
        [
            row["model"],
            row["cluster"],
            throughput.TITLES[row["baseline"]],
            shown(row["baseline_evaluations"], digits=0),
            "never" if row["never"] else shown(row["autohaap_evaluations"], digits=0),
            shown(row["baseline_seconds"], digits=3),
            "never" if row["never"] else shown(row["autohaap_seconds"], digits=3),
            shown(row["x_by_seconds"], digits=2),
            shown(row["published_search_seconds"], digits=0),
        ]
        for row in rows
    ]
    paper = published()["autohaap"]
    low, high = paper[KEY]
    counted = [
        f"{row['model']}: {row['alpa_candidates']:,} runs of layers on submeshes for Alpa to compile and profile, "
        f"{row['autohaap_operator_latencies']:,} operator latencies for AutoHAAP"
        for row in rows
        if row["alpa_candidates"] and row["autohaap_operator_latencies"]
    ]
    over = summary["published_search_seconds_over_ours"]
    lines = [
        f"Published for AutoHAAP: {low} to {high} x ({paper['source']}).",
        "x by seconds: a baseline's search over AutoHAAP's until its plan is as good; both as run here, on tables "
        "that are made beforehand, so a grid or a dynamic program that prices few plans can be the faster one.",
        "What the papers count instead: " + "; ".join(counted) + ".",
    ]
    if over:
        lines.append(
            f"Published search times over AutoHAAP's whole budget here: {over['min']:,.0f} to {over['max']:,.0f} x, "
            "which is what compiling and profiling on devices costs; it is no comparison of algorithms."
        )
    return markdown(header, body) + "\n\n" + "\n\n".join(lines)
