"""The three ideas of AutoHAAP, each off in turn: what does each give the baseline heuristic on the suite?

    python -m experiments.ablation out=results/ablation         about half an hour on one core
    python -m experiments.ablation out=/tmp/try quick=true      a few seconds, to see that it works

| idea | switch | what is measured |
|---|---|---|
| memory-aware initialisation | space.memory_aware_init | quality; legal plans per plan that fits, counted exactly |
| load balancing | space.load_balance | quality |
| state caching | estimator.cached | evaluations/s; operator latencies avoided; results are equal plan by plan |

Quality is the interquartile mean, over instances and seeds, of the gap to the best plan known (`experiments/suite.py`):
at equal evaluations, and at equal seconds. Without tables (state caching off) an evaluation takes thousands of times
longer, so that row's equal evaluations are few. Each run is one file under out/runs/; an interrupted ablation goes on.
Written at the end: runs.csv, table.md, summary.json.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import suite
from experiments.search_quality import interquartile_mean
from experiments.stored import stored
from haap_rl import configs
from haap_rl.cost.estimator import fingerprint
from haap_rl.problem.errors import positive_float, positive_int, yes_or_no
from haap_rl.problem.presets import preset
from haap_rl.search.base import Budget, load_searcher, run_search
from haap_rl.tracking.record import to_json_text, write_files

OPTIONS = {"out": None, "quick": False, "seeds": 5, "evaluations": 10_000, "few": 300, "seconds": 0.5}


class Variant(NamedTuple):
    """The heuristic with one idea off, or none."""

    name: str
    memory_aware_init: bool = True
    load_balance: bool = True
    cached: bool = True


ON = Variant("all on")
OFF = {
    "memory_aware_init": Variant("memory_aware_init off", memory_aware_init=False),
    "load_balance": Variant("load_balance off", load_balance=False),
    "state_caching": Variant("state_caching off", cached=False),
}
TITLES = {
    "memory_aware_init": "memory-aware initialisation",
    "load_balance": "heterogeneity-aware load balancing",
    "state_caching": "state caching",
}


def run_once(variant: Variant, certified: suite.Certified, budget: Budget, seed: int) -> dict[str, Any]:
    """Figures of one run."""
    space = dataclasses.replace(
        suite.spec(), memory_aware_init=variant.memory_aware_init, load_balance=variant.load_balance
    )
    settings = preset("search", "autohaap")
    searcher = load_searcher(settings.pop("name"), settings)
    result = run_search(searcher, certified.instance.problem(), budget, seed, space, cached=variant.cached)
    best_s = result.estimate.iteration_s if result.estimate else math.inf
    return {
        "gap_pct": 100 * (best_s / certified.iteration_time_s - 1) if math.isfinite(best_s) else None,
        "evaluations": result.evaluations,
        "seconds": result.wall_time_s,
        "operator_evaluations": result.operator_evaluations,
        "operator_evaluations_avoided": result.operator_evaluations_avoided,
        "pruning_factor": result.pruning.factor,
    }


def cells(options: dict[str, Any]) -> list[tuple[str, Variant, Budget]]:
    """(what is equal, variant, budget) of every column of runs."""
    many = Budget(positive_int("ablation", "evaluations", options["evaluations"]))
    few = Budget(positive_int("ablation", "few", options["few"]))
    seconds = Budget(seconds=positive_float("ablation", "seconds", options["seconds"]))
    columns = [("evaluations", v, many) for v in (ON, OFF["memory_aware_init"], OFF["load_balance"])]
    columns += [("few evaluations", v, few) for v in (ON, OFF["state_caching"])]
    return columns + [("seconds", v, seconds) for v in (ON, *OFF.values())]


def run_all(options: dict[str, Any], instances: Sequence[suite.Certified], out: Path) -> dict[tuple[str, str], Any]:
    """{(what is equal, variant): every run}; runs already on disk are not run again."""
    folder = out / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    seeds = positive_int("ablation", "seeds", options["seeds"])
    found: dict[tuple[str, str], Any] = {}
    for equal, variant, budget in cells(options):
        runs = []
        for number, certified in enumerate(instances):
            for seed in range(seeds):
                key = {
                    "variant": list(variant),
                    "budget": [budget.evaluations, budget.seconds],
                    "settings": preset("search", "autohaap"),
                    "estimator": fingerprint(),
                    "instance": certified.instance.name,
                    "best_known_s": certified.iteration_time_s,
                }
                path = folder / f"{equal}-{variant.name}-{number:02d}-{seed}.json".replace(" ", "_")
                runs.append(stored(path, key, partial(run_once, variant, certified, budget, seed)))
        found[equal, variant.name] = runs
        print(f"equal {equal}, {variant.name}: {len(runs)} runs", flush=True)
    return found


def gap(runs: list[dict[str, Any]]) -> float | None:
    """Interquartile mean of the gap, %; None where more than a quarter of the runs found no plan."""
    value = interquartile_mean(np.array([math.inf if run["gap_pct"] is None else run["gap_pct"] for run in runs]))
    return value if math.isfinite(value) else None


def speed(runs: list[dict[str, Any]]) -> float:
    """Evaluations per second, all runs together."""
    return float(sum(run["evaluations"] for run in runs) / sum(run["seconds"] for run in runs))


def summarise(found: dict[tuple[str, str], Any], instances: int) -> dict[str, Any]:
    """Per idea: quality and speed with it and without, what the cache avoids, what memory prunes."""
    summary: dict[str, Any] = {"instances": instances}
    for idea, off in OFF.items():
        equal = "few evaluations" if idea == "state_caching" else "evaluations"
        on_runs, off_runs = found[equal, ON.name], found[equal, off.name]
        computed = sum(run["operator_evaluations"] for run in on_runs)
        avoided = sum(run["operator_evaluations_avoided"] for run in on_runs)
        factors = [run["pruning_factor"] for run in on_runs if run["pruning_factor"]]
        summary[idea] = {
            "gap_pct_on": gap(on_runs),
            "gap_pct_off": gap(off_runs),
            "evaluations": max(run["evaluations"] for run in on_runs),
            "gap_pct_on_equal_seconds": gap(found["seconds", ON.name]),
            "gap_pct_off_equal_seconds": gap(found["seconds", off.name]),
            "without_plan_off": sum(run["gap_pct"] is None for run in off_runs) / len(off_runs),
            "evaluations_per_s_on": speed(found["seconds", ON.name]),
            "evaluations_per_s_off": speed(found["seconds", off.name]),
            "operator_evaluations_avoided_share": avoided / (avoided + computed),
            "pruning_factor": float(np.exp(np.mean(np.log(factors)))) if factors else None,
            "pruning_factor_range": [min(factors), max(factors)] if factors else None,
        }
    on, off_few = found["few evaluations", ON.name], found["few evaluations", OFF["state_caching"].name]
    summary["state_caching"]["runs_that_differ"] = sum(
        a["gap_pct"] != b["gap_pct"] for a, b in zip(on, off_few, strict=True)
    )
    return summary


def table(summary: dict[str, Any], seconds: float) -> str:
    """The paper's three claims as three rows."""
    lines = [
        f"AutoHAAP's search on {summary['instances']} instances, gap to the best plan known (IQM, %), with the idea / "
        "without it.",
        "",
        f"| idea | at equal evaluations | at {seconds:g} s | evaluations/s | operator latencies avoided | "
        "legal plans per plan that fits |",
        "|---|---|---|---|---|---|",
    ]

    def shown(value: float | None) -> str:
        return "no plan" if value is None else f"{value:.2f}"

    for idea, title in TITLES.items():
        row = summary[idea]
        lines.append(
            f"| {title} | {shown(row['gap_pct_on'])} / {shown(row['gap_pct_off'])} ({row['evaluations']:,}) | "
            f"{shown(row['gap_pct_on_equal_seconds'])} / {shown(row['gap_pct_off_equal_seconds'])} | "
            f"{row['evaluations_per_s_on']:,.0f} / {row['evaluations_per_s_off']:,.0f} | "
            f"{row['operator_evaluations_avoided_share']:.3%} | "
            + (
                f"{row['pruning_factor']:,.0f} (geometric mean; {row['pruning_factor_range'][0]:,.1f} to "
                f"{row['pruning_factor_range'][1]:,.0f}) |"
                if idea == "memory_aware_init" and row["pruning_factor"]
                else "- |"
            )
        )
    lines += ["", f"Runs whose result differs without the cache: {summary['state_caching']['runs_that_differ']}."]
    return "\n".join(lines) + "\n"


def ablate(options: dict[str, Any]) -> int:
    """Run what is missing and write the files; the exit status."""
    out = Path(str(options["out"]))
    instances = suite.certified()
    if yes_or_no("ablation", "quick", options["quick"]):
        options = {**options, "seeds": 1, "evaluations": 300, "few": 20, "seconds": 0.05}
        instances = instances[:2]
    found = run_all(options, instances, out)
    summary = summarise(found, len(instances))
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    names = list(next(iter(found.values()))[0])
    writer.writerow(["equal", "variant", *names])
    for (equal, variant), runs in found.items():
        writer.writerows([equal, variant, *(run[name] for name in names)] for run in runs)
    text = table(summary, float(options["seconds"]))
    texts = {"summary.json": to_json_text(summary), "table.md": text, "runs.csv": rows.getvalue()}
    write_files(out, {name: content.encode() for name, content in texts.items()})
    print(text)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    return configs.run_with_options(ablate, dict(OPTIONS), sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
