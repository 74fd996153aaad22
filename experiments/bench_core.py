"""How fast plans are priced: the ladder from the readable estimator to compiled what-ifs, and how it grows.

    python -m experiments.bench_core out=results/bench_core       some two minutes on one core
    python -m experiments.bench_core out=/tmp/try quick=true      some seconds, to see that it works

All in one process on one core, best of several repetitions, on Llama-3 70B and 32 H100 + 32 A100. For each number of
stages some plans are polished (`cost.kernels.polish`) and a walk of random legal moves that keep that number starts at
the first: the readable estimators and the full prices see the same neighbouring plans. The memo of the cached one is
warm: each repetition prices the same plans. What-ifs are all changes of one kind or one layer of each polished plan,
against its own time: what a local search asks at its end. Written: summary.json, table.md, growth.csv, growth.png.
"""

from __future__ import annotations

import csv
import io
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from haap_rl import configs
from haap_rl.cost import kernels
from haap_rl.cost.compiling import jit, ready
from haap_rl.cost.estimator import Estimator
from haap_rl.cost.kernels import BACKWARD, DELAY, FORWARD, STEP, SYNC, State
from haap_rl.cost.stage_tables import StageTables
from haap_rl.problem.errors import InputError
from haap_rl.problem.plan import Problem
from haap_rl.problem.presets import load_problem
from haap_rl.search.base import Objective, compile_kernels
from haap_rl.search.exact import alike_options
from haap_rl.space import kernels as space_kernels
from haap_rl.space import moves
from haap_rl.space.options import SpaceSpec
from haap_rl.space.space import Codes, Space
from haap_rl.tracking.record import to_json_text, write_files

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
OPTIONS = {"out": None, "quick": False}
MODEL, CLUSTER = "llama3_70b", "h100x32_a100x32"
MOST_STAGES = 16
STAGES = (4, 8, 16)
PIPELINES = ((4, 16), (8, 32), (16, 64))  # stages, micro-batches
DECIDED_BY = ("change", "lower", "upper", "recurrence", "memory")  # in the order of kernels.BY_*
BY_BOUNDS = (kernels.BY_CHANGE, kernels.BY_LOWER, kernels.BY_UPPER)
GROWTH_STAGES = (4, 6, 8, 10, 12, 14, 16)
GROWTH_NODES = (1, 2, 4, 8, 16, 32, 64)  # of each kind, 8 devices each
GROWTH_LAYERS = (24, 40, 60, 80, 100, 126)
GROWTH_OF_DEVICES = {"num_layers": 24, "stages": 8}  # what fits on 8 + 8 devices


class Effort(NamedTuple):
    """How much is measured."""

    plans: int  # that are polished
    draws: int  # from the best of which each is polished
    walk: int  # plans of a batch
    readable: tuple[int, int]  # plans per repetition, uncached and cached
    changes: int  # what-ifs per plan and repetition
    repetitions: int
    every: int  # every so many of the growth's points


FULL = Effort(10, 20, 4096, (6, 400), 100_000, 7, 1)
QUICK = Effort(2, 2, 64, (1, 10), 1_000, 2, 3)


def best_s(run: Callable[[], object], repetitions: int) -> float:
    """Least seconds of a call."""
    times = []
    for _ in range(repetitions):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


# --------------------------------------------------------------------------------------- compiled loops
@jit
def what_ifs(t: StageTables, state: State, changes: Ints, limit_s: float, decided: Ints) -> float:
    """Least seconds of all the changes; decided (5,): how many were decided how."""
    best = np.inf
    for x in range(changes.shape[0]):
        c = changes[x]
        seconds, how = kernels.what_if(t, state, c[0], c[1], c[2], c[3], c[4], c[5], limit_s)
        decided[how] += 1
        best = min(best, seconds)
    return best


@jit
def recurrences(pipelines: Floats, p: int, m: int) -> float:
    """Largest of the exact times of all pipelines."""
    worst = 0.0
    for x in range(pipelines.shape[0]):
        worst = max(worst, kernels.exact_s(pipelines[x], p, m))
    return worst


# ---------------------------------------------------------------------------------- plans and changes
class Polished(NamedTuple):
    """Polished plans of one number of stages, with what is measured from them."""

    space: Space
    tables: StageTables
    objective: Objective
    states: list[State]
    changes: list[Ints]  # of each, (N, 6) as `what_if` takes them
    walk: Codes


def polished(problem: Problem, stages: int, effort: Effort) -> Polished:
    """Polished plans with `stages` stages, their changes, and plans that random moves lead to. Raises InputError."""
    objective = Objective(problem, space=SpaceSpec(max_stages=MOST_STAGES))
    space, rng = objective.space, np.random.default_rng(0)
    tables, wanted = space.stage_tables, effort.plans * effort.draws
    found: list[Codes] = []
    for _ in range(200):
        drawn = space.draws(rng, 500)
        found.append(drawn[drawn[:, 1] == stages])
        if sum(map(len, found)) >= wanted:
            break
    codes = np.concatenate(found)[:wanted]
    if len(codes) < effort.plans:
        raise InputError(f"bench_core: too few plans with {stages} stages were drawn for {problem.cluster.name}")
    alike, states = alike_options(tables), []
    for starts in np.array_split(codes, effort.plans):
        start = starts[objective.many(starts).best]
        states.append(kernels.state_of(tables, start))
        kernels.polish(tables, states[-1], alike, 10**9, np.zeros_like(start), np.zeros(5, np.int64))
    changes = [all_changes(state, alike) for state in states]
    return Polished(space, tables, objective, states, changes, walk(space, states[0].plan, effort, rng))


def all_changes(state: State, alike: Ints) -> Ints:
    """(N, 6) a layer from each stage to each other one, then each other kind of each stage, as `polish` tries them."""
    plan, stages = state.plan.tolist(), (len(state.plan) - 2) // 2
    p, kinds, layers = plan[1], plan[2 : 2 + stages], plan[2 + stages :]
    changes = []
    for x in range(p):
        for y in range(p):
            if x != y and layers[x] > 1:
                i, j, more = min(x, y), max(x, y), 1 if x > y else -1
                changes.append((i, kinds[i], layers[i] + more, j, kinds[j], layers[j] - more))
        changes += [(x, k, layers[x], -1, 0, 0) for k in alike[kinds[x]].tolist() if k >= 0]
    return np.array(changes, np.int64)


def walk(space: Space, start: Ints, effort: Effort, rng: np.random.Generator) -> Codes:
    """Plans that fit and have as many stages as `start`, each a random move from the one before."""
    edits = space_kernels.coded(moves.edits(space))
    plans = np.tile(start, (effort.walk, 1))
    after = plans[:1].copy()
    for x in range(1, effort.walk):
        plans[x] = plans[x - 1]
        for _ in range(50):
            space_kernels.random_neighbours(space.neighbourhood, plans[x - 1 : x], edits, rng, after)
            if after[0, 1] == start[1]:
                plans[x] = after[0]
                break
    return plans


# ------------------------------------------------------------------------------------------ measuring
def readable_per_s(case: Polished, cached: bool, effort: Effort) -> float:
    """Plans per second of the readable estimator, on the first plans of the walk."""
    plans = [case.space.plan(case.space.genome_of(row)) for row in case.walk[: effort.readable[cached]]]
    estimator = Estimator(case.space.problem, cached)
    return len(plans) / best_s(lambda: [estimator(plan) for plan in plans], min(effort.repetitions, 5))


def full_per_s(case: Polished, effort: Effort) -> float:
    """Exact prices per second of the walk's plans, in one batch from Python."""
    return len(case.walk) / best_s(lambda: case.objective.many(case.walk), effort.repetitions)


def bounds_per_s(case: Polished, effort: Effort) -> float:
    """Plans per second of the walk that are placed, priced and decided by their lower bound, from nothing."""
    n = len(case.walk)
    work, seconds, counts = kernels.scratch(case.tables), np.zeros(n), np.zeros(3, np.int64)
    missing, capacity = np.zeros(n, np.int64), np.zeros(n, np.int64)
    took_s = best_s(
        lambda: kernels.price_many(case.tables, case.walk, 0.0, work, seconds, missing, capacity, counts),
        effort.repetitions,
    )
    if counts[0] or missing.any():
        raise AssertionError("a plan of the walk does not fit, or its bound did not decide")
    return n / took_s


def exact_per_s(p: int, m: int, effort: Effort) -> float:
    """Recurrences per second on random pipelines."""
    rng = np.random.default_rng(0)
    pipelines = np.zeros((effort.walk, kernels.UP + 1, p))
    for row, scale in ((FORWARD, 1.0), (BACKWARD, 2.0), (DELAY, 0.1), (SYNC, 1.0), (STEP, 0.1)):
        pipelines[:, row] = scale * rng.uniform(0.5, 1.5, (effort.walk, p))
    return effort.walk / best_s(lambda: recurrences(pipelines, p, m), effort.repetitions)


def what_ifs_per_s(case: Polished, effort: Effort) -> tuple[float, float, dict[str, float]]:
    """(what-ifs per second; those decided by bounds per second, alone; share of all that each way decided)."""
    rng, tables = np.random.default_rng(0), case.tables
    took_s, counts = np.zeros(2), np.zeros(len(DECIDED_BY), np.int64)
    for state, changes in zip(case.states, case.changes, strict=True):
        limit_s, decided = float(state.whole[1]), np.zeros(5, np.int64)
        how = []
        for i, k, n, j, q, o in changes.tolist():
            how.append(kernels.what_if(tables, state, i, k, n, j, q, o, limit_s)[1])
        counts += np.bincount(how, minlength=len(DECIDED_BY))
        for x, listed in enumerate((changes, changes[np.isin(how, BY_BOUNDS)])):
            stream = listed[rng.integers(len(listed), size=effort.changes)]
            took_s[x] += best_s(partial(what_ifs, tables, state, stream, limit_s, decided), effort.repetitions)
    every, decided_by_bounds = (len(case.states) * effort.changes / took_s).tolist()
    return every, decided_by_bounds, dict(zip(DECIDED_BY, (counts / counts.sum()).tolist(), strict=True))


def ladder(problem: Problem, effort: Effort) -> tuple[list[dict[str, Any]], dict[int, dict[str, float]]]:
    """(steps from the slowest to the fastest way, shares of what decided the what-ifs by number of stages)."""
    cases = {p: polished(problem, p, effort) for p in STAGES}
    steps: list[dict[str, Any]] = []
    shares: dict[int, dict[str, float]] = {}

    def add(step: str, stages: int, per_s: float) -> None:
        first = steps[0]["per_s"] if steps else per_s
        steps.append({"step": step, "stages": stages, "per_s": per_s, "over_uncached": per_s / first})
        print(f"{step}, {stages} stages: {per_s:,.0f} /s", flush=True)

    add("readable, no memo", MOST_STAGES, readable_per_s(cases[MOST_STAGES], False, effort))
    add("readable, memo", MOST_STAGES, readable_per_s(cases[MOST_STAGES], True, effort))
    for p, case in cases.items():
        add("compiled, exact, batches from Python", p, full_per_s(case, effort))
    for p, case in cases.items():
        add("compiled, bounds of full plans", p, bounds_per_s(case, effort))
    for p, m in PIPELINES:
        add(f"exact recurrence alone, {m} micro-batches", p, exact_per_s(p, m, effort))
    for p, case in cases.items():
        every, decided, shares[p] = what_ifs_per_s(case, effort)
        add("what-ifs", p, every)
        add("what-ifs decided by bounds", p, decided)
    return steps, shares


def growth(problem: Problem, effort: Effort) -> list[dict[str, Any]]:
    """Speed of full bounds and of what-ifs as stages, devices or layers grow, one row per point."""
    points: list[tuple[str, int, Problem, int]] = [("stages", p, problem, p) for p in GROWTH_STAGES[:: effort.every]]
    for nodes in GROWTH_NODES[:: effort.every]:
        groups = tuple(replace(group, num_nodes=nodes) for group in problem.cluster.groups)
        model = replace(problem.model, num_layers=GROWTH_OF_DEVICES["num_layers"])
        larger = replace(problem, model=model, cluster=replace(problem.cluster, groups=groups))
        points.append(("devices", sum(group.num_devices for group in groups), larger, GROWTH_OF_DEVICES["stages"]))
    for layers in GROWTH_LAYERS[:: effort.every]:
        deeper = replace(problem, model=replace(problem.model, num_layers=layers))
        points.append(("layers", layers, deeper, MOST_STAGES))
    rows = []
    for axis, value, target, stages in points:
        case = polished(target, stages, effort)
        every, decided, _ = what_ifs_per_s(case, effort)
        rows.append(
            {
                "axis": axis,
                "value": value,
                "stages": stages,
                "full_bounds_per_s": bounds_per_s(case, effort),
                "what_ifs_per_s": every,
                "what_ifs_by_bounds_per_s": decided,
            }
        )
        print(
            f"{value} {axis}: {rows[-1]['full_bounds_per_s']:,.0f} full bounds/s, {every:,.0f} what-ifs/s", flush=True
        )
    return rows


# ------------------------------------------------------------------------------------------- writing
def summarise(
    steps: list[dict[str, Any]], shares: dict[int, dict[str, float]], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """What summary.json holds; `incremental` are what-ifs decided by bounds at the most stages."""
    speed = {(step["step"], step["stages"]): step["per_s"] for step in steps}
    incremental = speed["what-ifs decided by bounds", MOST_STAGES]
    return {
        "model": MODEL,
        "cluster": CLUSTER,
        "incremental_per_s": incremental,
        "full_16_stages_per_s": speed["compiled, bounds of full plans", MOST_STAGES],
        "exact_16_64_per_s": speed["exact recurrence alone, 64 micro-batches", 16],
        "incremental_over_uncached": incremental / speed["readable, no memo", MOST_STAGES],
        "incremental_over_cached": incremental / speed["readable, memo", MOST_STAGES],
        "ladder": steps,
        "what_ifs_decided_by": {str(p): by for p, by in shares.items()},
        "growth": rows,
    }


def table(summary: dict[str, Any]) -> str:
    """The ladder as Markdown."""
    lines = [
        f"{MODEL} on {CLUSTER}, one core, best of several repetitions",
        "",
        "| what | stages | plans/s | over no memo |",
        "|---|---|---|---|",
    ]
    for step in summary["ladder"]:
        speed = f"{step['per_s']:,.0f}" if step["per_s"] < 1e5 else f"{step['per_s'] / 1e6:.2f} M"
        lines.append(f"| {step['step']} | {step['stages']} | {speed} | {step['over_uncached']:,.0f} |")
    lines += ["", "| what-ifs decided by | " + " | ".join(DECIDED_BY) + " |", "|---" * (len(DECIDED_BY) + 1) + "|"]
    for stages, by in summary["what_ifs_decided_by"].items():
        lines.append(f"| {stages} stages | " + " | ".join(f"{by[way]:.1%}" for way in DECIDED_BY) + " |")
    return "\n".join(lines) + "\n"


def draw_growth(rows: list[dict[str, Any]]) -> bytes:
    """Nanoseconds per plan against stages, devices and layers, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    lines = {
        "full_bounds_per_s": "bounds of a full plan",
        "what_ifs_per_s": "what-if",
        "what_ifs_by_bounds_per_s": "what-if decided by bounds",
    }
    for axes, axis in zip(figure.subplots(1, 3, sharey=True), ("stages", "devices", "layers"), strict=True):
        points = [row for row in rows if row["axis"] == axis]
        for key, label in lines.items():
            axes.plot([row["value"] for row in points], [1e9 / row[key] for row in points], marker="o", label=label)
        axes.set_xscale("log" if axis == "devices" else "linear", **({"base": 2} if axis == "devices" else {}))
        axes.set_yscale("log")
        fixed = {row["stages"] for row in points}
        axes.set_xlabel(axis if axis == "stages" else f"{axis} ({', '.join(map(str, fixed))} stages)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        if axis == "devices":
            axes.set_xticks([row["value"] for row in points], [str(row["value"]) for row in points])
        if axis == "stages":
            axes.set_ylabel("nanoseconds each")
            figure.legend(loc="outside upper center", ncols=len(lines), frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format="png")
    return picture.getvalue()


def bench(options: dict[str, Any]) -> int:
    """Measure and write the files; the exit status."""
    if not isinstance(options["quick"], bool):
        raise InputError(f"bench_core: quick={options['quick']!r} must be true or false")
    effort = QUICK if options["quick"] else FULL
    compile_kernels()
    problem = load_problem(MODEL, CLUSTER)
    ready("benchmark", lambda: (what_ifs_per_s(polished(problem, 4, QUICK), QUICK), exact_per_s(4, 4, QUICK)))
    steps, shares = ladder(problem, effort)
    rows = growth(problem, effort)
    summary = summarise(steps, shares, rows)
    if not all(math.isfinite(step["per_s"]) for step in steps):
        raise AssertionError("a step took no time")
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    texts = {"summary.json": to_json_text(summary), "table.md": table(summary), "growth.csv": text.getvalue()}
    files = {name: content.encode() for name, content in texts.items()}
    write_files(Path(str(options["out"])), {**files, "growth.png": draw_growth(rows)})
    print(texts["table.md"])
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    return configs.run_with_options(bench, dict(OPTIONS), sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
