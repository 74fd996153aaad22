"""Searching on expected throughput against searching as if nothing failed, on the mixed clusters of the paper's tables.

    python -m experiments.expected_throughput out=results/faults                 about half an hour on two cores
    python -m experiments.expected_throughput out=/tmp/try quick=true            some minutes

On each problem AutoHAAP first looks for the plan that is fastest while nothing fails, with a budget that brings it to
or near the proven optimum. Then it looks for the plan with the highest expected throughput, the former plan being its
first candidate. Both plans are held against each other by the expectation with its bounds, and by Monte-Carlo on common
random traces. Devices fail as on the 32 devices of MeCeFO's "low" scenario (arXiv 2510.16415, Table 1: one failure per
2 h, back after 4 h), so each of them is down one sixteenth of the time, whatever the cluster's size.

Every search that is finished is a file under out/runs/, so the same command goes on where it was stopped.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.grid import csv_text, version
from experiments.paper.table import markdown
from experiments.stored import kept, stored
from haap_rl import configs
from haap_rl.faults.expected import Counts, Expected, expected_throughput, with_best_interval
from haap_rl.faults.model import FailureModel, Hazard
from haap_rl.faults.objective import ExpectedThroughput, describe
from haap_rl.faults.policy import Constants, StagePolicy, policy_named
from haap_rl.faults.reactions import Reactions
from haap_rl.faults.settings import Faults
from haap_rl.faults.simulate import simulate
from haap_rl.faults.traces import draw
from haap_rl.mecefo.options import MecefoOptions
from haap_rl.problem.errors import InputError, positive_int, yes_or_no
from haap_rl.problem.plan import Plan, Problem
from haap_rl.problem.presets import load_problem
from haap_rl.report.intervals import interval
from haap_rl.runtime.orphans import end_with_parent
from haap_rl.search.autohaap import AutoHAAP
from haap_rl.search.base import Budget, run_search
from haap_rl.tracking.record import check_writable, to_json_text, write_files

PROBLEMS = (
    ("llama3_8b", "a100x8_v100x16"),
    ("gpt3_1_3b", "v100x4_t4x4"),
    ("llama2_13b", "v100x16_t4x16"),
    ("gpt3_13b", "a100x8_v100x8_l40sx8"),
    ("llama3_8b", "h100x8_a100x8_v100x16_t4x8"),
    ("llama2_70b", "a100x16_v100x32"),
    ("llama3_70b", "h100x32_a100x32"),
)
POLICIES = ("mecefo", "recycle")
SEEDS = (0, 1, 2)
HOUR_S = 3600.0
CYCLE_H, RECOVERY_H = 2.0 * 32, 4.0  # of one device: Table 1's "low" on its 32 devices
FAILURE_FREE_EVALUATIONS = 100_000  # as in the paper's tables; they take seconds
EVALUATIONS, QUICK_EVALUATIONS = 4000, 500
TRACES, TRACE_H = 10, 240.0
WORTH = ("tokens_per_s", "lower", "upper", "failure_free", "fidelity", "stopped")  # of `Expected`, that are kept
OPTIONS = {"out": None, "quick": False, "processes": 2}


class Case(NamedTuple):
    """A pair of searches: a problem, a policy, a seed, and the plans that the one on expected throughput may price."""

    model: str
    cluster: str
    policy: str
    seed: int
    evaluations: int


def faults_of(policy: str) -> Faults:
    """The failures and the policy that meets them."""
    hazard = Hazard("device", RECOVERY_H * HOUR_S, mtbf_s=(CYCLE_H - RECOVERY_H) * HOUR_S)
    options, constants = MecefoOptions(takeover="most_slack"), Constants()
    chosen = policy_named(policy, options, constants)
    return Faults(FailureModel("low, per device", (hazard,)), chosen, options, constants)


def compare(case: Case) -> dict[str, Any]:
    """Both searches of a case, their plans and what they are worth."""
    problem, faults = load_problem(case.model, case.cluster), faults_of(case.policy)
    blind = run_search(AutoHAAP(), problem, Budget(FAILURE_FREE_EVALUATIONS), case.seed)
    if blind.plan is None:
        raise InputError(f"{case.model} on {case.cluster}: {blind.reason}")
    scorer = ExpectedThroughput(faults)
    budget = Budget(case.evaluations + 1)
    seeing = run_search(AutoHAAP(), problem, budget, case.seed, scorer=scorer, incumbents=[blind.plan])
    assert seeing.plan is not None
    plans = {"blind": blind.plan, "seeing": seeing.plan}
    worth = {name: _worth(problem, faults, plan) for name, plan in plans.items()}
    paired = _simulated(problem, faults, plans)
    return {
        **{f"{name}_{key}": getattr(found, key) for name, found in worth.items() for key in WORTH},
        **{f"{name}_plan": problem.plan_to_json(plan) for name, plan in plans.items()},
        **{f"{name}_stages": describe(plan) for name, plan in plans.items()},
        "gain_pct": 100 * (worth["seeing"].tokens_per_s / worth["blind"].tokens_per_s - 1),
        "gain_at_least_pct": 100 * (worth["seeing"].lower / worth["blind"].upper - 1),
        "blind_gap_to_bound_pct": 100 * (blind.gap_to_lower_bound or 0.0),
        "failure_free_cost_pct": 100 * (1 - worth["seeing"].failure_free / worth["blind"].failure_free),
        "simulated_gains_pct": paired,
        "front": [list(point) for point, _ in scorer.front],
        "operators_avoided": seeing.operator_evaluations_avoided,
        "operators_computed": seeing.operator_evaluations,
        "seconds": blind.wall_time_s + seeing.wall_time_s,
    }


def _worth(problem: Problem, faults: Faults, plan: Plan) -> Expected:
    """The expectation, with bounds ten times as tight as in the search."""
    estimator = faults.estimator(problem)
    assert isinstance(faults.policy, StagePolicy)
    counts = Counts(estimator, faults.policy, faults.least_probability / 10)
    return expected_throughput(
        Reactions(estimator, plan, faults.policy, faults.model.components(problem.cluster)), counts
    )


def _simulated(problem: Problem, faults: Faults, plans: Mapping[str, Plan]) -> list[float | None]:
    """Gain in % on each of some traces, the same for both plans; None where the blind one makes nothing."""
    components = faults.model.components(problem.cluster)
    estimator = faults.estimator(problem)
    reactions = {
        name: with_best_interval(Reactions(estimator, plan, faults.policy, components)) for name, plan in plans.items()
    }
    gains: list[float | None] = []
    for rng in np.random.default_rng(0).spawn(TRACES):
        trace = draw(components, TRACE_H * HOUR_S, rng, stationary=True)
        made = {name: simulate(trace, react).tokens for name, react in reactions.items()}
        gains.append(100 * (made["seeing"] / made["blind"] - 1) if made["blind"] else None)
    return gains


# -------------------------------------------------------------------------------------------- the command
def expected(options: Mapping[str, Any]) -> int:
    """Run what is missing and write the tables; the exit status."""
    quick = yes_or_no("expected_throughput", "quick", options["quick"])
    processes = positive_int("expected_throughput", "processes", options["processes"])
    if processes > 64:
        raise InputError(f"expected_throughput: processes={processes} must be at most 64")
    out = Path(str(options["out"]))
    check_writable(out)
    folder = out / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    seeds, evaluations = (SEEDS[:1], QUICK_EVALUATIONS) if quick else (SEEDS, EVALUATIONS)
    cases = [Case(*problem, policy, seed, evaluations) for policy in POLICIES for problem in PROBLEMS for seed in seeds]
    waiting = [case for case in cases if kept(_path(folder, case), _settings(case)) is None]
    try:
        with ProcessPoolExecutor(processes, get_context("spawn"), end_with_parent) as pool:
            for number, case in enumerate(pool.map(_run, [(folder, case) for case in waiting]), 1):
                print(f"{number} of {len(waiting)}: {' '.join(map(str, case[:4]))}", flush=True)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on with the searches that are missing", file=sys.stderr)
        return 130
    found = {case: kept(_path(folder, case), _settings(case)) or {} for case in cases}
    summary, rows = _summary(found), _rows(found)
    text = _text(found, summary)
    files = {
        "summary.json": to_json_text(summary).encode(),
        "table.md": text.encode(),
        "expected_throughput.csv": csv_text(rows, list(rows[0])).encode(),
    }
    write_files(out, files)
    draw_fronts(found, out / "pareto.png")
    print(text)
    return 0


def _run(job: tuple[Path, Case]) -> Case:
    folder, case = job
    stored(_path(folder, case), _settings(case), lambda: compare(case))
    return case


def _path(folder: Path, case: Case) -> Path:
    return folder / f"{'-'.join(map(str, case))}.json"


def _settings(case: Case) -> dict[str, Any]:
    return {**case._asdict(), "version": version(), "faults": [CYCLE_H, RECOVERY_H], "traces": [TRACES, TRACE_H]}


def _of(found: Mapping[Case, dict[str, Any]], problem: tuple[str, str], policy: str) -> list[dict[str, Any]]:
    return [
        figures for case, figures in found.items() if (case.model, case.cluster) == problem and case.policy == policy
    ]


def _summary(found: Mapping[Case, dict[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {"gain_pct": {}, "clusters_better": {}, "never_worse": {}, "failure_free_cost_pct": {}}
    for policy in POLICIES:
        gains, better = {}, []
        for problem in PROBLEMS:
            runs = _of(found, problem, policy)
            mean, low, high = interval([run["gain_pct"] for run in runs])
            # seeds meet the same traces: one figure for each trace
            traces = [[gain for gain in gains if gain is not None] for gains in _traces(runs)]
            finite = [statistics.fmean(gains) for gains in traces if gains]
            simulated = interval(finite) if finite else (0.0, 0.0, 0.0)
            name = " on ".join(problem)
            gains[name] = {
                "mean": mean, "low": low, "high": high, "least_proven": min(run["gain_at_least_pct"] for run in runs),
                "simulated": simulated[0], "simulated_low": simulated[1], "simulated_high": simulated[2],
                "traces": len(traces), "traces_without_blind": len(traces) - len(finite),
            }  # fmt: skip
            if min(run["gain_at_least_pct"] for run in runs) > 0:
                better.append(name)
        result["gain_pct"][policy] = gains
        result["clusters_better"][policy] = better
        result["never_worse"][policy] = all(
            run["gain_pct"] >= -1e-9 for problem in PROBLEMS for run in _of(found, problem, policy)
        )
        result["failure_free_cost_pct"][policy] = {
            " on ".join(problem): statistics.fmean(run["failure_free_cost_pct"] for run in _of(found, problem, policy))
            for problem in PROBLEMS
        }
    return result


def _traces(runs: Sequence[Mapping[str, Any]]) -> list[tuple[float | None, ...]]:
    """The gains of all runs, trace by trace."""
    return list(zip(*(run["simulated_gains_pct"] for run in runs), strict=True))


def _rows(found: Mapping[Case, dict[str, Any]]) -> list[dict[str, Any]]:
    left_out = ("front", "blind_plan", "seeing_plan", "simulated_gains_pct")
    return [
        {**case._asdict(), **{key: value for key, value in figures.items() if key not in left_out}}
        for case, figures in found.items()
    ]


def _text(found: Mapping[Case, dict[str, Any]], summary: Mapping[str, Any]) -> str:
    lines = [
        "## Searching on expected throughput",
        "",
        f"AutoHAAP, {FAILURE_FREE_EVALUATIONS:,} plans as if nothing failed (at most "
        f"{max(figures['blind_gap_to_bound_pct'] for figures in found.values()):.1f} % above the linear program) and "
        f"{max(case.evaluations for case in found):,} on expected throughput, {len({case.seed for case in found})} "
        "seeds. Gain: expected throughput of the plan found on it over that of the plan found as if nothing failed, "
        "mean and 95 % interval over seeds; proven: at least that in every seed, by the bounds of both; simulated: on "
        f"{TRACES} common traces of {TRACE_H / 24:g} days, those left out on which the plan found as if nothing failed "
        "makes nothing at all (traces without). Cost: throughput without failures that is given up. Each device is "
        f"down 1/16 of the time ({RECOVERY_H:g} h in {CYCLE_H:g} h).",
    ]
    header = [
        "problem",
        "policy",
        "gain, %",
        "proven, %",
        "simulated, %",
        "traces without",
        "cost, %",
        "of failure-free, %",
        "fidelity, %",
    ]
    body = []
    for problem in PROBLEMS:
        for policy in POLICIES:
            runs, name = _of(found, problem, policy), " on ".join(problem)
            gain = summary["gain_pct"][policy][name]
            shares = [100 * run["seeing_tokens_per_s"] / run["seeing_failure_free"] for run in runs]
            body.append(
                [
                    name,
                    policy,
                    f"{gain['mean']:.1f} ({gain['low']:.1f} to {gain['high']:.1f})",
                    f"{gain['least_proven']:.1f}",
                    f"{gain['simulated']:.1f} ({gain['simulated_low']:.1f} to {gain['simulated_high']:.1f})",
                    f"{gain['traces_without_blind']} of {gain['traces']}",
                    f"{summary['failure_free_cost_pct'][policy][name]:.1f}",
                    f"{statistics.fmean(shares):.1f}",
                    f"{100 * statistics.fmean(run['seeing_fidelity'] for run in runs):.1f}",
                ]
            )
    lines += ["", markdown(header, body), ""]
    for policy in POLICIES:
        better = summary["clusters_better"][policy]
        lines.append(
            f"{policy}: better by proven bounds in every seed on {len(better)} of {len(PROBLEMS)} problems; never "
            f"worse: {'yes' if summary['never_worse'][policy] else 'no'}."
        )
    return "\n".join(lines) + "\n"


def draw_fronts(found: Mapping[Case, dict[str, Any]], path: Path) -> None:
    """Plans that no other beats in failure-free throughput, expected throughput and gradient fidelity, per problem."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 2
    rows = -(-len(PROBLEMS) // columns)
    figure = Figure(figsize=(11.0, 3.0 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    for number, problem in enumerate(PROBLEMS):
        here = axes[number // columns][number % columns]
        for policy, marker in zip(POLICIES, ("o", "s"), strict=True):
            points = sorted(point for run in _of(found, problem, policy) for point in run["front"])
            shown = here.scatter(
                [point[0] / 1e3 for point in points],
                [point[1] / 1e3 for point in points],
                c=[100 * point[2] for point in points],
                cmap="viridis", vmin=60, vmax=100, marker=marker, s=18, label=policy,
            )  # fmt: skip
            for name, edge in (("blind", "C3"), ("seeing", "C0")):
                run = max(_of(found, problem, policy), key=lambda run: run["seeing_tokens_per_s"])
                here.plot(
                    run[f"{name}_failure_free"] / 1e3, run[f"{name}_tokens_per_s"] / 1e3,
                    marker=marker, markersize=11, markerfacecolor="none", markeredgecolor=edge, linestyle="none",
                )  # fmt: skip
        here.set_title(" on ".join(problem), fontsize=9)
        here.set_xlabel("without failures, thousand tokens/s", fontsize=8)
        here.set_ylabel("expected", fontsize=8)
        here.grid(color="0.92")
        here.spines[["top", "right"]].set_visible(False)
        here.legend(frameon=False, fontsize=8, loc="upper left")
        bar = figure.colorbar(shown, ax=here)
        bar.set_label("attention gradients, %", fontsize=8)
    for number in range(len(PROBLEMS), rows * columns):
        axes[number // columns][number % columns].axis("off")
    said = (
        "Large marks, of the seed that found the best: found as if nothing failed (red), on expected throughput (blue)"
    )
    figure.suptitle(said, fontsize=10)
    figure.savefig(path, dpi=90)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    return configs.run_with_options(expected, dict(OPTIONS), sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
