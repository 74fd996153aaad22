"""How good is each searcher, at how many evaluations? Every searcher on the suite, many seeds, intervals.

    python -m experiments.search_quality out=results/search_quality     about an hour on one core, most of it PPO
    python -m experiments.search_quality out=/tmp/try quick=true        half a minute, to see that it works
    python -m experiments.search_quality out=results/others searchers=megatron,alpa,aceso,amp,metis,sailor

Gap = best iteration time so far / best plan known of the instance - 1; the certificate's own width is printed beside
(`experiments/suite.py`). Settings are those of conf/search/; they were chosen on `suite.TUNING`, seeds 1000 and up,
which are not reported. Each run is one file under out/runs/, so an interrupted comparison goes on where it stopped.
Written at the end: runs.csv (a row per instance, searcher and seed), table.md, instances.md, summary.json, curves.png.

Figures over instances and seeds: interquartile mean with its 95 % interval by stratified bootstrap (seeds drawn anew
within each instance; Agarwal et al. 2021), mean, worst, share of runs at the optimum.
"""

from __future__ import annotations

import csv
import io
import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from experiments import suite
from experiments.paper import throughput
from experiments.stored import stored
from haap_rl import configs
from haap_rl.cost.estimator import fingerprint
from haap_rl.problem.errors import InputError, positive_int, yes_or_no
from haap_rl.problem.presets import preset
from haap_rl.search.base import Budget, load_searcher, run_search
from haap_rl.tracking.record import to_json_text, write_files

Floats = npt.NDArray[np.float64]
BUDGETS = (100, 1000, 10_000, 100_000)
SEARCHERS = ("random", "annealing", "ga", "autohaap", "ppo", "megatron")  # exact is the measure
STRATEGIES = throughput.BASELINES  # of others; they draw nothing: one seed
MOST = {"ppo": 1000}  # evaluations of a searcher that is too slow for more: its policy costs more than its plans
OPTIMAL = 1e-6  # relative: what counts as the optimum
RESAMPLES = 2000
OPTIONS = {"out": None, "quick": False, "seeds": 10, "searchers": ",".join(SEARCHERS)}


def run_once(name: str, certified: suite.Certified, evaluations: int, seed: int) -> dict[str, Any]:
    """Figures of one run: best time at each budget, evaluations used, seconds."""
    settings = preset("search", name)
    searcher = load_searcher(settings.pop("name"), settings)
    result = run_search(searcher, certified.instance.problem(), Budget(evaluations), seed, suite.spec())
    best: list[float | None] = []
    for budget in BUDGETS:
        times = [p.best_iteration_time_s for p in result.trace if p.evaluations <= budget]
        finished = result.stopped_by == "finished"  # before its budget: it would find no more
        reached = budget <= evaluations or finished
        best.append(times[-1] if times and reached else None)
    return {"best_s": best, "evaluations": result.evaluations, "seconds": result.wall_time_s}


def run_all(names: Sequence[str], seeds: int, instances: Sequence[suite.Certified], most: int, out: Path) -> Any:
    """{searcher: [instance][seed] figures of a run}; runs already on disk are not run again."""
    folder = out / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[list[dict[str, Any]]]] = {}
    for name in names:
        evaluations = min(most, MOST.get(name, most))
        settings = {"settings": preset("search", name), "evaluations": evaluations, "estimator": fingerprint()}
        found[name] = []
        for number, certified in enumerate(instances):
            runs = []
            for seed in range(1 if name in STRATEGIES else seeds):
                path = folder / f"{name}-{number:02d}-{seed}.json"
                key = {**settings, "instance": certified.instance.name}
                runs.append(stored(path, key, partial(run_once, name, certified, evaluations, seed)))
            found[name].append(runs)
            print(f"{name}: {number + 1} of {len(instances)} instances", flush=True)
    return found


def interquartile_mean(gaps: Floats) -> float:
    """Mean of the middle half."""
    from scipy import stats

    return float(stats.trim_mean(gaps.ravel(), 0.25))


def resampled_means(gaps: Floats, groups: int = 1, stream: int = 0) -> Floats:
    """(RESAMPLES,) interquartile means of (instances, seeds) gaps, seeds drawn anew within each instance.

    groups: where seed s belongs to group s % groups (of runs that share a trained policy), whole groups are drawn
    first, the same ones for every instance, then seeds within them. stream: other seeds for another value, of the same
    groups.
    """
    from scipy import stats

    instances, seeds = gaps.shape
    shape = (RESAMPLES, instances, seeds)
    groups = min(groups, seeds)
    rng = np.random.default_rng(stream)
    if groups == 1:
        drawn = rng.integers(seeds, size=shape)
    else:
        group = np.random.default_rng((0, groups)).integers(groups, size=(RESAMPLES, groups))[
            :, np.arange(seeds) % groups
        ]
        sizes = np.bincount(np.arange(seeds) % groups)
        drawn = group[:, None] + groups * rng.integers(sizes[group][:, None], size=shape)
    chosen = np.take_along_axis(np.broadcast_to(gaps, shape), drawn, 2).reshape(RESAMPLES, -1)
    return np.asarray(stats.trim_mean(chosen, 0.25, axis=1))


def interval(gaps: list[Floats]) -> tuple[float, float]:
    """95 % interval of the interquartile mean: seeds drawn anew within each instance."""
    low, high = np.percentile(resampled_means(np.array(gaps)), (2.5, 97.5))
    return float(low), float(high)


def gaps_of(runs: list[list[dict[str, Any]]], best_s: Sequence[float], budget: int) -> list[Floats] | None:
    """Per instance, the gap of each seed at a budget, in %, infinity where there was no plan. None: none got there."""
    at = BUDGETS.index(budget)
    if all(run["best_s"][at] is None for here in runs for run in here):
        return None
    return [
        100 * np.array([np.inf if run["best_s"][at] is None else run["best_s"][at] / known_s - 1 for run in here])
        for here, known_s in zip(runs, best_s, strict=True)
    ]


def summarise(found: dict[str, Any], instances: Sequence[suite.Certified]) -> dict[str, Any]:
    """Every figure of the tables."""
    known = [
        min([c.iteration_time_s, *(t for name in found for run in found[name][i] for t in run["best_s"] if t)])
        for i, c in enumerate(instances)
    ]
    summary: dict[str, Any] = {
        "instances": len(instances),
        "proven": sum(c.iteration_time_s <= c.lower_bound_s * (1 + 1e-9) for c in instances),
        "widest_certificate_pct": 100 * max(c.iteration_time_s / c.lower_bound_s - 1 for c in instances),
        "better_than_certificate": sum(
            best < c.iteration_time_s * (1 - 1e-9) for best, c in zip(known, instances, strict=True)
        ),
        "iqm_gap_pct": {},
        "searchers": {},
        "known_s": known,
    }
    for name, runs in found.items():
        rows = {}
        for budget in BUDGETS:
            gaps = gaps_of(runs, known, budget)
            if gaps is None:
                continue
            every = np.concatenate(gaps)
            middle, all_found = interquartile_mean(every), bool(np.isfinite(every).all())
            rows[str(budget)] = {
                "iqm_gap_pct": middle if math.isfinite(middle) else None,
                "interval_95_pct": interval(gaps) if all_found else None,
                "mean_gap_pct": float(every.mean()) if all_found else None,
                "worst_gap_pct": float(every.max()) if all_found else None,
                "share_without_plan": float(np.isinf(every).mean()),
                "share_optimal": float((every <= 100 * OPTIMAL).mean()),
            }
        summary["iqm_gap_pct"][name] = {budget: row["iqm_gap_pct"] for budget, row in rows.items()}
        total = sum(run["seconds"] for here in runs for run in here)
        evaluations = sum(run["evaluations"] for here in runs for run in here)
        summary["searchers"][name] = {
            "budgets": rows,
            "seeds": len(runs[0]),
            "evaluations_per_s": evaluations / total,
            "seconds_per_run": total / sum(map(len, runs)),
        }
    return summary


def table(summary: dict[str, Any]) -> str:
    """The comparison as Markdown: one row per searcher and budget."""
    lines = [
        f"{summary['instances']} instances, {summary['proven']} with a proven optimum, the others within "
        f"{summary['widest_certificate_pct']:.2f} % of it. Gap to the best plan known, %.",
        "",
        "| searcher | seeds | evaluations | IQM (95 % interval) | mean | worst | at the optimum | no plan |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in summary["searchers"].items():
        for budget, here in row["budgets"].items():
            middle = "-"
            if here["iqm_gap_pct"] is not None:
                middle = f"{here['iqm_gap_pct']:.3f}"
            if here["interval_95_pct"] is not None:
                middle += " ({:.3f} to {:.3f})".format(*here["interval_95_pct"])
            ends = ["-" if here[key] is None else f"{here[key]:.2f}" for key in ("mean_gap_pct", "worst_gap_pct")]
            lines.append(
                f"| {name} | {row['seeds']} | {int(budget):,} | {middle} | {ends[0]} | {ends[1]} | "
                f"{here['share_optimal']:.0%} | {here['share_without_plan']:.0%} |"
            )
    lines += ["", "| searcher | evaluations/s | seconds of a run |", "|---|---|---|"]
    for name, row in summary["searchers"].items():
        lines.append(f"| {name} | {row['evaluations_per_s']:,.0f} | {row['seconds_per_run']:.2f} |")
    return "\n".join(lines) + "\n"


def instances_table(summary: dict[str, Any], found: dict[str, Any], instances: Sequence[suite.Certified]) -> str:
    """What each instance is: optimum, width of its certificate, median gap of each searcher at its largest budget."""
    names = list(found)
    lines = [
        "| instance | devices | best known, s | certificate's width, % | " + " | ".join(names) + " |",
        "|" + "---|" * (4 + len(names)),
    ]
    for i, certified in enumerate(instances):
        medians = []
        for name in names:
            times = [run["best_s"] for run in found[name][i]]
            last = [next((t for t in reversed(best) if t is not None), np.inf) for best in times]
            medians.append(f"{100 * (np.median(last) / summary['known_s'][i] - 1):.2f}")
        width = 100 * (certified.iteration_time_s / certified.lower_bound_s - 1)
        lines.append(
            f"| {certified.instance.name} | {certified.instance.num_devices} | {summary['known_s'][i]:.4f} | "
            f"{width:.2f} | {' | '.join(medians)} |"
        )
    return "\n".join(lines) + "\n"


def draw_curves(axes: Any, rows: Mapping[str, Sequence[tuple[int, float, float, float]]]) -> None:
    """Interquartile mean of the gap against evaluations, with its interval: (evaluations, mean, low, high) by name."""
    floor = 0.003  # %, where a logarithmic axis ends
    for color, (name, points) in enumerate(rows.items()):
        if not points:
            continue
        at = [point[0] for point in points]
        middle, low, high = np.maximum(floor, np.array([point[1:] for point in points])).T
        axes.plot(at, middle, "o-" if color < 10 else "s--", color=f"C{color}", label=name, markersize=4)
        axes.fill_between(at, low, high, color=f"C{color}", alpha=0.15, linewidth=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("plan evaluations")
    axes.set_ylabel(f"gap to the optimum, % (IQM; {floor} or less at the bottom)", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def draw(summary: dict[str, Any], path: Path) -> None:
    """The curves of every searcher as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    rows = {
        name: [
            (int(budget), here["iqm_gap_pct"], *here["interval_95_pct"])
            for budget, here in row["budgets"].items()
            if here["interval_95_pct"] is not None
        ]
        for name, row in summary["searchers"].items()
    }
    axes = figure.subplots()
    draw_curves(axes, rows)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)


def runs_csv(found: dict[str, Any], summary: dict[str, Any], instances: Sequence[suite.Certified]) -> str:
    """One row per instance, searcher and seed."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["instance", "searcher", "seed", "evaluations", "seconds", *(f"best_s_at_{b}" for b in BUDGETS)])
    for name, runs in found.items():
        for certified, here in zip(instances, runs, strict=True):
            for seed, run in enumerate(here):
                times = ["" if time is None else repr(time) for time in run["best_s"]]
                writer.writerow(
                    [certified.instance.name, name, seed, run["evaluations"], f"{run['seconds']:.3f}", *times]
                )
    return text.getvalue()


def compare(options: dict[str, Any]) -> int:
    """Run what is missing and write the files; the exit status."""
    out = Path(str(options["out"]))
    seeds = positive_int("search_quality", "seeds", options["seeds"])
    names = [name.strip() for name in str(options["searchers"]).split(",")]
    known = list(dict.fromkeys(SEARCHERS + STRATEGIES))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(f"search_quality: searchers: {unknown[0]!r} is not one of {', '.join(known)}")
    instances = suite.certified()
    most = BUDGETS[-1]
    if yes_or_no("search_quality", "quick", options["quick"]):
        instances, seeds, most = instances[:2], min(seeds, 2), 1000
    found = run_all(names, seeds, instances, most, out)
    summary = summarise(found, instances)
    texts = {
        "summary.json": to_json_text(summary),
        "table.md": table(summary),
        "instances.md": instances_table(summary, found, instances),
        "runs.csv": runs_csv(found, summary, instances),
    }
    write_files(out, {name: content.encode() for name, content in texts.items()})
    draw(summary, out / "curves.png")
    print(texts["table.md"])
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    return configs.run_with_options(compare, dict(OPTIONS), sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
