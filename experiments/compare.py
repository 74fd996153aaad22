"""Compare searchers on one case: equal evaluations, many seeds, intervals. The place where that is done.

    python -m experiments.compare out=results/compare          about six minutes on one core
    python -m experiments.compare out=/tmp/try quick=true      a few seconds, to see that it works

Methods: every searcher of conf/search/ with its settings there, and `legal_moves`, uniformly random legal moves in
PPO's environment; not `replay`, which has no plan of its own, and not how others choose, which draws nothing
(`search_quality` has those). Settings were chosen on TUNING_SEEDS and are reported on REPORT_SEEDS, which nothing was
tuned on (seeds 0-9 were reported once, before `autohaap.starts` went from 10 to 100).
Each run is one file under out/runs/, so an interrupted comparison goes on where it stopped. Written at the end:
runs.csv (one row per run), summary.json, table.md, curves.png.
"""

from __future__ import annotations

import csv
import io
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from experiments.paper.throughput import BASELINES
from experiments.stored import stored
from haap_rl import configs
from haap_rl.cost.estimator import fingerprint
from haap_rl.problem.errors import InputError, positive_int
from haap_rl.problem.plan import Problem
from haap_rl.problem.presets import load_problem, names, preset
from haap_rl.report.tables import share
from haap_rl.search.base import Budget, Objective, Prices, Searcher, load_searcher, run_search
from haap_rl.tracking.record import to_json_text, write_files

Floats = npt.NDArray[np.float64]
TUNING_SEEDS = range(100, 150)
REPORT_SEEDS = range(10, 20)
LEGAL_MOVES = "legal_moves"
CLAIMS = (("autohaap", "random"), ("ga", "random"), ("ppo", LEGAL_MOVES), ("ppo", "random"))  # better, worse
OPTIONS = {
    "out": None,
    "quick": False,
    "model": "llama3_8b",
    "cluster": "a100x8_v100x16",
    "evaluations": 5000,
    "seeds": len(REPORT_SEEDS),
}


class LegalMoves:
    """Uniformly random legal moves in `haap_rl/Partition-v0`: what PPO does before it has learnt anything."""

    def __init__(self, max_moves: int) -> None:
        self.max_moves = max_moves

    def search(self, problem: Problem, objective: Objective, rng: np.random.Generator) -> None:
        environment = gym.make(
            "haap_envs:haap_rl/Partition-v0",
            objective=objective,
            max_moves=self.max_moves,
            disable_env_checker=True,
        )
        environment.reset(seed=int(rng.integers(2**31)))
        masks = environment.get_wrapper_attr("action_masks")
        while True:
            *_, truncated, _ = environment.step(int(rng.choice(np.flatnonzero(masks()))))
            if truncated:
                environment.reset()


def make(name: str) -> Searcher:
    """The searcher called `name` with the settings of its YAML file."""
    if name == LEGAL_MOVES:
        return LegalMoves(preset("search", "ppo_partition")["max_moves"])
    settings = preset("search", name)
    return load_searcher(settings.pop("name"), settings)


def run_once(name: str, problem: Problem, evaluations: int, seed: int, cached: bool) -> dict[str, Any]:
    """Figures of one run: what was found, what it took, and the mean iteration time visited per quarter."""
    visited: list[float] = []
    last: Prices | None = None

    def visit(objective: Objective) -> None:
        nonlocal last
        if objective.last is not last:  # else there is only time to report
            last = objective.last
            visited.extend(last.iteration_s.tolist())

    result = run_search(make(name), problem, Budget(evaluations), seed, on_progress=visit, cached=cached)
    if result.stopped_by == "infeasible":
        raise InputError(result.reason)
    # a search that ends after fewer than four plans has its last plan in the quarters that are empty
    quarters = [float(np.mean(part)) if len(part) else visited[-1] for part in np.array_split(visited, 4)]
    return {
        "searcher": name,
        "seed": seed,
        "iteration_time_s": result.estimate.iteration_s if result.estimate else None,  # None: no plan that fits
        "lower_bound_s": result.lower_bound_s,
        "gap_to_lower_bound": result.gap_to_lower_bound,
        "evaluations": result.evaluations,
        "seconds": result.wall_time_s,
        "operator_evaluations": result.operator_evaluations,
        "operator_evaluations_avoided": result.operator_evaluations_avoided,
        "operator_evaluations_avoided_per_plan": result.operator_evaluations_avoided_per_plan,
        "mean_visited_s_by_quarter": quarters,
        "trace": [[point.evaluations, point.best_iteration_time_s] for point in result.trace],
    }


def run_all(options: dict[str, Any], methods: Sequence[str], out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """({method: its runs}, {method: one run without the cache}); runs already on disk are not run again."""
    problem = load_problem(str(options["model"]), str(options["cluster"]))
    evaluations = positive_int("compare", "evaluations", options["evaluations"])
    first, most = REPORT_SEEDS.start, TUNING_SEEDS.start - REPORT_SEEDS.start
    seeds = range(first, first + positive_int("compare", "seeds", options["seeds"]))
    if len(seeds) > most:
        raise InputError(f"compare: seeds={len(seeds)} would reach the tuning seeds; use at most {most}")
    (out / "runs").mkdir(parents=True, exist_ok=True)

    def figures(name: str, seed: int, cached: bool) -> dict[str, Any]:
        settings = {
            "model": problem.model.name,
            "cluster": problem.cluster.name,
            "evaluations": evaluations,
            "settings": preset("search", "ppo_partition" if name == LEGAL_MOVES else name),
            "space": preset("space", "default"),
            "estimator": fingerprint(),
        }
        path = out / "runs" / f"{name}-{seed}{'' if cached else '-uncached'}.json"
        run = stored(path, settings, lambda: run_once(name, problem, evaluations, seed, cached))
        found = "no plan that fits" if run["iteration_time_s"] is None else f"{run['iteration_time_s']:.4f} s"
        print(f"{name} seed {seed}{'' if cached else ' uncached'}: {found}", flush=True)
        return run

    cached: dict[str, Any] = {}
    uncached: dict[str, Any] = {}
    for name in methods:
        run_once(name, problem, 50, seed=0, cached=True)  # so that no timed run pays for imports
        cached[name] = [figures(name, first, True)]
        uncached[name] = figures(name, first, False)  # right after its twin: the ratio of their seconds is reported
        cached[name] += [figures(name, seed, True) for seed in seeds[1:]]
    return cached, uncached


def summarise(cached: dict[str, Any], uncached: dict[str, Any]) -> dict[str, Any]:
    """Per method: failures, mean and 95 % bootstrap interval of the best time, gaps, tests, cache; see the keys.

    Times are over the seeds that found a plan; gaps are to the strongest bound that any run proved.
    """
    from scipy import stats

    bound_s = max(run["lower_bound_s"] for runs in cached.values() for run in runs)
    found = {name: [run for run in runs if run["iteration_time_s"] is not None] for name, runs in cached.items()}
    times = {name: np.array([run["iteration_time_s"] for run in runs]) for name, runs in found.items() if runs}
    if not times:
        raise InputError("compare: no method found a plan that fits; choose a larger cluster or a smaller model")
    methods = {}
    for name, runs in cached.items():
        first = runs[0]
        methods[name] = {
            "seeds": len(runs),
            "failures": len(runs) - len(found[name]),
            **(times_summary(times[name], bound_s) if name in times else {}),
            "mean_visited_last_quarter_s": float(np.mean([run["mean_visited_s_by_quarter"][3] for run in runs])),
            "mean_evaluations": float(np.mean([run["evaluations"] for run in runs])),
            "mean_seconds": float(np.mean([run["seconds"] for run in runs])),
            "operator_latencies_avoided_against_no_memo": share(
                first["operator_evaluations_avoided"], first["operator_evaluations"]
            ),
            "operator_latencies_avoided_against_once_per_plan": share(
                first["operator_evaluations_avoided_per_plan"], first["operator_evaluations"]
            ),
            "seconds_uncached_over_cached": uncached[name]["seconds"] / first["seconds"],
        }
    tests = {}
    for better, worse in CLAIMS:
        if better in times and worse in times and min(len(times[better]), len(times[worse])) > 1:
            with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # all seeds alike: no variance
                test = stats.ttest_ind(times[better], times[worse], equal_var=False, alternative="less")
            tests[f"{better} better than {worse}"] = float(test.pvalue)
    best = min(float(sample.min()) for sample in times.values())
    return {
        "methods": methods,
        "welch_one_sided_p": tests,
        "lower_bound_s": bound_s,
        "best_s": best,
        "best_over_bound": best / bound_s - 1,
    }


def times_summary(sample: Floats, bound_s: float) -> dict[str, Any]:
    """Mean with its 95 % bootstrap interval, extremes and mean gap of a method's best times."""
    from scipy import stats

    low = high = float(sample.mean())
    if len(set(sample.tolist())) > 1:
        interval = stats.bootstrap((sample,), np.mean, method="percentile", rng=np.random.default_rng(0))
        low, high = float(interval.confidence_interval.low), float(interval.confidence_interval.high)
    return {
        "mean_iteration_time_s": float(sample.mean()),
        "interval_95_s": [low, high],
        "best_s": float(sample.min()),
        "worst_s": float(sample.max()),
        "mean_gap_to_lower_bound": float(sample.mean() / bound_s - 1),
    }


def table(summary: dict[str, Any], options: dict[str, Any]) -> str:
    """The comparison as Markdown."""
    bound_s, best_s = summary["lower_bound_s"], summary["best_s"]
    lines = [
        f"{options['model']} on {options['cluster']}, {options['evaluations']:,} evaluations; proven lower bound "
        f"{bound_s:.3f} s, best plan {best_s:.3f} s, {summary['best_over_bound']:.1%} above it",
        "",
        "| method | seeds (failed) | mean best, s (95 % interval) | best / worst | gap to bound | "
        "visited, last quarter, s | evaluations | avoided: no memo / once per plan | seconds uncached / cached |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows = summary["methods"].items()
    for name, row in sorted(rows, key=lambda item: item[1].get("mean_iteration_time_s", np.inf)):
        found = "no plan that fits | - | -"
        if "interval_95_s" in row:
            low, high = row["interval_95_s"]
            found = (
                f"{row['mean_iteration_time_s']:.3f} ({low:.3f} to {high:.3f}) | {row['best_s']:.3f} / "
                f"{row['worst_s']:.3f} | {row['mean_gap_to_lower_bound']:.1%}"
            )
        lines.append(
            f"| {name} | {row['seeds']} ({row['failures']}) | {found} | {row['mean_visited_last_quarter_s']:.2f} | "
            f"{row['mean_evaluations']:,.0f} | {row['operator_latencies_avoided_against_no_memo']:.2%} / "
            f"{row['operator_latencies_avoided_against_once_per_plan']:.2%} | "
            f"{row['seconds_uncached_over_cached']:.1f} |"
        )
    lines += ["", "One-sided Welch tests on the best times:", ""]
    lines += [f"- {claim}: p = {p:.2g}" for claim, p in summary["welch_one_sided_p"].items()]
    return "\n".join(lines) + "\n"


def draw_curves(cached: dict[str, Any], lower_bound_s: float, evaluations: int, path: Path) -> None:
    """Best plan so far against evaluations: mean over the seeds, and the range from best to worst seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    grid = np.unique(np.geomspace(10, evaluations, 200).astype(int))
    for color, (name, runs) in enumerate(sorted(cached.items())):
        curves = []
        for run in runs:
            at, best = zip(*run["trace"], strict=True)
            curves.append([best[max(0, int(np.searchsorted(at, n, side="right")) - 1)] for n in grid])
        gaps = 100 * (np.array(curves, float) / lower_bound_s - 1)
        axes.plot(grid, gaps.mean(0), color=f"C{color}", label=name)
        axes.fill_between(grid, gaps.min(0), gaps.max(0), color=f"C{color}", alpha=0.12, linewidth=0)
    axes.set_xscale("log")
    axes.set_xlabel("plan evaluations")
    axes.set_ylabel("gap to the proven lower bound, %")
    axes.set_ylim(0, 60)  # what is worse is off the scale for its first evaluations only
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def compare(options: dict[str, Any]) -> int:
    """Run what is missing and write the files; the exit status."""
    out = Path(str(options["out"]))
    if not isinstance(options["quick"], bool):
        raise InputError(f"compare: quick={options['quick']!r} must be true or false")
    if positive_int("compare", "evaluations", options["evaluations"]) < 4:
        raise InputError(f"compare: evaluations={options['evaluations']} must be at least 4, one per quarter")
    if options["quick"]:
        options = {**options, "evaluations": 200, "seeds": 2}
    methods = [name for name in names("search") if name not in ("replay", *BASELINES)]
    cached, uncached = run_all(options, [*methods, LEGAL_MOVES], out)
    summary = summarise(cached, uncached)
    columns = [key for key in next(iter(cached.values()))[0] if key != "trace"]
    rows = io.StringIO()
    writer = csv.DictWriter(rows, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for runs in cached.values():
        writer.writerows(runs)
    text = table(summary, options)
    texts = {"runs.csv": rows.getvalue(), "summary.json": to_json_text(summary), "table.md": text}
    write_files(out, {name: content.encode() for name, content in texts.items()})
    draw_curves(cached, summary["lower_bound_s"], int(options["evaluations"]), out / "curves.png")
    print(text)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    return configs.run_with_options(compare, dict(OPTIONS), sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
