"""The loop closed: this machine profiled, a mixed cluster emulated, a plan searched for, and plans really run.

    python -m experiments.plan_to_run out=results/plan_to_run              some minutes on two cores
    python -m experiments.plan_to_run out=/tmp/try quick=true              about two minutes

The units of a small model are timed on this machine. The cluster has two kinds of devices, 4 and 10 times as slow as
one of its threads, and links with the latencies below. The estimator, with these times as its profile, is what AutoHAAP
searches with and what predicts. Then the best plan, the best two that
Megatron-LM's uniform grid has (on all devices, and on one kind alone), and five plans drawn at random are trained by
one process per device, with the times of units and links imposed (`haap_rl.runtime.device`) and everything else real:
order, routes, waiting, tensor-parallel collectives, gradient sums, overhead. Every plan's losses are compared with
those of one process.

Tensor-parallel units are profiled with their collectives, in place, under pacing. A plan whose steps differ by more
than 5 %, or of whose operations more than 2 % overran, was disturbed by something else on the machine: it is run again,
and the calmest of three runs counts. Every plan that was run is a file under out/runs/, so the same command goes on
where it was stopped.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.grid import csv_text, version
from experiments.paper.table import markdown
from experiments.stored import stored
from haap_rl import configs
from haap_rl.cost.estimate import Estimate
from haap_rl.cost.estimator import Estimator, UnitKey
from haap_rl.cost.profile_files import profile_from_json, profile_to_json
from haap_rl.cost.profiles import UNITS, MeasuredFor, Profile, UnitCell
from haap_rl.problem.cluster import GIB, Cluster, DeviceGroup, DeviceType, Link
from haap_rl.problem.errors import InputError, yes_or_no
from haap_rl.problem.model import Model
from haap_rl.problem.plan import Plan, Problem
from haap_rl.runtime.compare import (
    Measured,
    StageMeasured,
    expected_held,
    expected_in_flight,
    fullest,
    measure,
)
from haap_rl.runtime.device import MOST_OVERRUN, Pacing, Target, imposed, unit_targets
from haap_rl.runtime.executor import Event, Held, Report
from haap_rl.runtime.job import Job, full_size, tiny
from haap_rl.runtime.profiling import Cell, time_alone, time_paced
from haap_rl.runtime.routes import Place
from haap_rl.runtime.session import Session
from haap_rl.runtime.training import one_process, train
from haap_rl.search.autohaap import AutoHAAP
from haap_rl.search.base import Budget, Searcher, run_search
from haap_rl.search.strategies.megatron import Megatron
from haap_rl.space.options import SpaceSpec
from haap_rl.space.space import Space
from haap_rl.tracking.record import check_writable, to_json_text, write_files

MODEL = Model(
    name="tiny_llama", num_layers=10, hidden=128, heads=8, kv_heads=8, head_dim=16, ffn=512, gated_mlp=False, vocab=512,
    max_positions=128, learned_positions=False, norm="rmsnorm", tied_embeddings=False, biases=False, dropout=False,
)  # fmt: skip
SEQ_LEN, BATCH = 128, 24
SLOWER = {"fast": 4.0, "slow": 10.0}  # than a thread of this machine
DEVICES = {"fast": 2, "slow": 4}
# inside a node and between nodes; more than what messages between processes here really take
INSIDE, BETWEEN = Link(3e-3, 50e9), Link(5e-3, 12.5e9)
SPACE = SpaceSpec(
    num_microbatches=(4, 6, 12), max_stages=5, max_tp=2, group_sizes=(1, 2, 4), recompute=("none",), zero_stage=1
)
SIZES = (1, 2, 3, 4, 6)  # samples of a replica that this space has
TPS = (1, 2)
EVALUATIONS, SEED = 20_000, 0
OTHERS, WITHIN = 5, 2.0  # further plans, none predicted to be so many times as slow as the best
DRAWN = 400
UNIFORM = {"uniform": "all", "uniform, one kind": "part"}  # plan -> devices of Megatron-LM's grid
APART = 0.02  # predictions that are nearer to each other order no pair
STEPS, QUICK_STEPS = 5, 4  # the first only warms up
CALM, TRIES = 0.05, 3  # steps of one plan differ by less, unless something else ran meanwhile; then it is run again
REPEATS, QUICK_REPEATS = 8, 4
OPTIONS = {"out": None, "quick": False}


class Run(NamedTuple):
    """A plan, what was predicted of it, and what was measured."""

    name: str
    plan: Plan
    estimate: Estimate
    measured: Measured
    loss_difference: float
    reports: tuple[Report, ...]
    memory: tuple[tuple[Held, ...], ...]  # predicted, per stage and replica group
    tries: int  # runs, of which the calmest counts

    @property
    def error(self) -> float:
        return self.estimate.iteration_s / self.measured.iteration_s - 1.0

    @property
    def memory_errors(self) -> list[float]:
        """Of each stage's fullest device, all that it holds."""
        pairs = fullest(self.memory, self.measured.held)
        return [predicted.total / measured.total - 1.0 for predicted, measured in pairs]


def problem_here() -> Problem:
    """The small model on the emulated cluster. Its devices' peaks and memory are never asked for: times are measured,
    and everything fits."""
    groups = tuple(
        DeviceGroup(name, DeviceType(name, (("fp32", 1e12),), 40 * GIB, 1e12), 1, count, INSIDE, BETWEEN)
        for name, count in DEVICES.items()
    )
    return Problem(Cluster("two kinds", groups), MODEL, SEQ_LEN, BATCH, "fp32")


# ------------------------------------------------------------------------------------------------ profiles
def device_table(session: Session, problem: Problem, repeats: int) -> Profile:
    """This machine's seconds per unit, of a shard without collectives where tp > 1, times each device's factor."""
    cells = [Cell(unit, tp, size) for tp in TPS for size in SIZES for unit in UNITS]
    times = session.call(time_alone, full_size(problem), cells, repeats)[0]
    units = tuple(
        UnitCell(name, cell.unit, cell.tp, cell.size, factor * timed.forward_s, factor * timed.backward_s)
        for name, factor in SLOWER.items()
        for cell, timed in zip(cells, times, strict=True)
    )
    return Profile("emulated devices", _measured_for(problem, False), units)


def in_place(session: Session, problem: Problem, job: Job, table: Profile, repeats: int) -> Profile:
    """The table with its tensor-parallel cells as they are with collectives under pacing."""
    priced = Estimator(problem, profile=table)
    wanted = [cell for cell in table.units if cell.tp > 1]
    asked = []
    for cell in wanted:
        key = Cell(cell.unit, cell.tp, cell.microbatch_size)
        asked.append((key, *_targets(priced, cell)))
    found = session.call(time_paced, job, asked, repeats)
    paced = tuple(
        cell._replace(
            forward_s=statistics.median(rank[k].forward_s for rank in found if rank[k].forward_s),
            backward_s=statistics.median(rank[k].backward_s for rank in found if rank[k].backward_s),
        )
        for k, cell in enumerate(wanted)
    )
    alone = tuple(cell for cell in table.units if cell.tp == 1)
    return Profile("in place", _measured_for(problem, True), (*alone, *paced))


def _targets(priced: Estimator, cell: UnitCell) -> tuple[Target, Target]:
    """What is imposed on one pass through a unit, as `device.imposed` has it for a whole plan."""
    key = UnitKey(cell.unit, priced.problem.cluster.index(cell.device), cell.tp, 1, cell.microbatch_size, True)
    return unit_targets(priced, key, cell.unit, "none")


def _measured_for(problem: Problem, collectives_included: bool) -> MeasuredFor:
    return MeasuredFor(
        seq_len=problem.seq_len,
        precision=problem.precision,
        fused_attention=problem.fused_attention,
        collectives_included=collectives_included,
    )


# --------------------------------------------------------------------------------------------------- plans
def plans_to_run(problem: Problem, profile: Profile) -> dict[str, Plan]:
    """The best plan found, Megatron-LM's best uniform ones, and others drawn at random, no plan twice."""
    searchers: dict[str, Searcher] = {
        "ours": AutoHAAP(),
        **{name: Megatron(devices) for name, devices in UNIFORM.items()},
    }
    chosen: dict[str, Plan] = {}
    for name, searcher in searchers.items():
        result = run_search(searcher, problem, Budget(EVALUATIONS), SEED, SPACE, profile=profile)
        if result.plan is None:
            raise InputError(f"plan_to_run: {name}: {result.reason}")
        chosen[name] = result.plan
    estimator = Estimator(problem, profile=profile)
    space = Space(problem, SPACE, estimator)
    limit_s = WITHIN * estimator(chosen["ours"]).iteration_s
    drawn: dict[float, Plan] = {}
    for row in space.draws(np.random.default_rng(SEED), DRAWN):
        plan = space.plan(space.genome_of(row))
        seconds = estimator(plan).iteration_s
        if seconds <= limit_s and plan not in chosen.values():
            drawn[seconds] = plan
    times = sorted(drawn)
    if len(times) < OTHERS:
        raise InputError(f"plan_to_run: only {len(times)} plans drawn are not hopeless; run it again")
    for k in range(OTHERS):
        chosen[f"other {k + 1}"] = drawn[times[round(k * (len(times) - 1) / (OTHERS - 1))]]
    return chosen


def run_plan(
    session: Session, job: Job, plan: Plan, pacing: Pacing, steps: int, alone: Sequence[float]
) -> dict[str, Any]:
    """What came of a plan that was run, as JSON data: of the calmest of TRIES runs, if no earlier one was calm."""
    tries: list[dict[str, Any]] = []
    while len(tries) < TRIES and not (tries and _disturbance(tries[-1]) <= (0.0, CALM)):
        tries.append(_run_once(session, job, plan, pacing, steps, alone))
    calmest = min(tries, key=_disturbance)
    return {**calmest, "tries": len(tries)}


def _disturbance(data: Mapping[str, Any]) -> tuple[float, float]:
    """How far overruns are above what is allowed, and how much steps differ: of a calm run (0, less than CALM)."""
    measured = data["measured"]
    return max(0.0, float(measured["overrun_share"]) - MOST_OVERRUN), float(measured["spread"])


def _run_once(
    session: Session, job: Job, plan: Plan, pacing: Pacing, steps: int, alone: Sequence[float]
) -> dict[str, Any]:
    found = session.call(train, job, plan, steps, pacing)
    reports = [trained.report for trained in found if trained.report is not None]
    losses = reports[0].losses
    return {
        "measured": measure(reports, plan.num_microbatches)._asdict(),
        "loss_difference": max(abs(a - b) for a, b in zip(losses, alone, strict=True)),
        "machine_load": os.getloadavg()[0],
        # the last step, for the pictures
        "reports": [{**report._asdict(), "events": [report.events[-1]]} for report in reports],
    }


def _run(name: str, plan: Plan, estimate: Estimate, memory: Sequence[Sequence[Held]], data: Mapping[str, Any]) -> Run:
    """A Run from JSON data."""
    measured = dict(data["measured"])
    measured["stages"] = tuple(StageMeasured(*stage) for stage in measured["stages"])
    measured["in_flight"] = tuple(measured["in_flight"])
    measured["held"] = tuple(tuple(Held(*group) for group in stage) for stage in measured["held"])
    reports = tuple(
        Report(
            **{
                **report,
                "place": Place(*report["place"]),
                "losses": tuple(report["losses"]),
                "held": Held(*report["held"]),
                "events": tuple(tuple(Event(*event) for event in step) for step in report["events"]),
            }
        )
        for report in data["reports"]
    )
    return Run(
        name,
        plan,
        estimate,
        Measured(**measured),
        data["loss_difference"],
        reports,
        tuple(map(tuple, memory)),
        data["tries"],
    )


# ----------------------------------------------------------------------------------------------- what came of it
def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """The figures that the table's claims rest on; shares in percent where the key says so."""
    errors = [100 * abs(run.error) for run in runs]
    of_memory = [100 * abs(error) for run in runs for error in run.memory_errors]
    pairs = [
        (a, b)
        for a, b in itertools.combinations(runs, 2)
        if abs(a.estimate.iteration_s / b.estimate.iteration_s - 1) > APART
    ]
    ordered = [
        (a.estimate.iteration_s < b.estimate.iteration_s) == (a.measured.iteration_s < b.measured.iteration_s)
        for a, b in pairs
    ]
    picked = min(runs, key=lambda run: run.estimate.iteration_s)
    best_s = min(run.measured.iteration_s for run in runs)
    measured = {run.name: run.measured.iteration_s for run in runs}
    predicted = {run.name: run.estimate.iteration_s for run in runs}
    return {
        "mean_error_pct": statistics.fmean(errors),
        "worst_error_pct": max(errors),
        "mean_memory_error_pct": statistics.fmean(of_memory),
        "worst_memory_error_pct": max(of_memory),
        "pairs_in_order_pct": 100 * statistics.fmean(ordered) if ordered else 100.0,
        "pairs": len(pairs),
        "regret_pct": 100 * (picked.measured.iteration_s / best_s - 1),
        "max_loss_difference": max(run.loss_difference for run in runs),
        "replay_error_pct": max(100 * abs(run.measured.replay_error) for run in runs),
        "gain_over_uniform_pct": _gain_pct(measured),
        "predicted_gain_over_uniform_pct": _gain_pct(predicted),
        "overrun_share": max(run.measured.overrun_share for run in runs),
        "in_flight_as_predicted": all(
            run.measured.in_flight == expected_in_flight(len(run.plan.stages), run.plan.num_microbatches)
            for run in runs
        ),
        "plans": len(runs),
        "disturbed_runs": sum(run.tries - 1 for run in runs),
    }


def _gain_pct(seconds: Mapping[str, float]) -> float:
    """How much faster our plan is than the faster of the uniform ones."""
    return 100 * (min(seconds[name] for name in UNIFORM) / seconds["ours"] - 1)


def described(plan: Plan) -> str:
    """A plan in one line: per stage its units, its replicas and their samples."""
    stages = []
    for stage in plan.stages:
        parts = [f"{r.group} tp{r.tp} dp{r.dp} x{r.microbatch_size}" for r in stage.replicas]
        stages.append(f"{stage.num_units}: {' + '.join(parts)}")
    return f"m={plan.num_microbatches}; " + " -> ".join(stages)


def table_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    return [
        {
            "plan": run.name,
            "what": described(run.plan),
            "predicted_s": run.estimate.iteration_s,
            "measured_s": run.measured.iteration_s,
            "error_pct": 100 * run.error,
            "replay_error_pct": 100 * run.measured.replay_error,
            "spread_pct": 100 * run.measured.spread,
            "tries": run.tries,
            "loss_difference": run.loss_difference,
            "in_flight": " ".join(map(str, run.measured.in_flight)),
            "memory_error_pct": " ".join(f"{100 * error:+.1f}" for error in run.memory_errors),
            "overrun_pct": 100 * run.measured.overrun_share,
        }
        for run in runs
    ]


def text(runs: Sequence[Run], figures: Mapping[str, Any]) -> str:
    """The report in Markdown."""
    header = ["plan", "stages (units: replicas x samples)", "predicted, s", "measured, s", "error, %", "replay, %",
              "memory by stage, %", "losses apart", "in flight", "overrun, %"]  # fmt: skip
    body = [
        [
            row["plan"], row["what"], f"{row['predicted_s']:.3f}", f"{row['measured_s']:.3f}",
            f"{row['error_pct']:+.1f}",
            f"{row['replay_error_pct']:+.1f}", row["memory_error_pct"], f"{row['loss_difference']:.1e}",
            row["in_flight"], f"{row['overrun_pct']:.1f}",
        ]
        for row in sorted(table_rows(runs), key=lambda row: row["predicted_s"])
    ]  # fmt: skip
    lines = [
        "## Plans that were run",
        "",
        f"{MODEL.num_layers} layers on {' + '.join(f'{count} {name}' for name, count in DEVICES.items())}, times "
        "imposed. Errors are predicted over measured. Replay: the schedule's recurrence fed with the times measured in "
        "the same run. Memory: all that the fullest device of each stage holds.",
        "",
        markdown(header, body),
        "",
        f"Mean error {figures['mean_error_pct']:.1f} %, worst {figures['worst_error_pct']:.1f} %; "
        f"{figures['pairs_in_order_pct']:.0f} % of {figures['pairs']} pairs in order; regret "
        f"{figures['regret_pct']:.1f} %. Memory: mean error {figures['mean_memory_error_pct']:.1f} %, worst "
        f"{figures['worst_memory_error_pct']:.1f} %. As executed, ours is {figures['gain_over_uniform_pct']:.0f} % "
        f"faster than the faster uniform plan ({figures['predicted_gain_over_uniform_pct']:.0f} % predicted).",
    ]
    if figures["disturbed_runs"]:
        lines.append(
            f"{figures['disturbed_runs']} runs in which steps differed by more than {CALM:.0%} or more than "
            f"{MOST_OVERRUN:.0%} overran were made again; the calmest of a plan counts."
        )
    if figures["overrun_share"] > MOST_OVERRUN:
        lines.append(
            f"{figures['overrun_share']:.1%} of some plan's operations overran: the machine was too busy for evidence."
        )
    return "\n".join(lines) + "\n"


def draw(runs: Sequence[Run], path: Path) -> None:
    """Timelines of our plan and of the uniform one, predicted beside measured, a row per device, on one scale."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [run for name in ("uniform", "ours") for run in runs if run.name == name]
    longest_s = max(max(run.estimate.iteration_s, run.measured.iteration_s) for run in shown)
    figure = Figure(figsize=(13.0, 2.9 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(shown), 2, squeeze=False, sharex=True)
    for row, run in enumerate(shown):
        places = [report.place for report in run.reports]
        names = [f"{place.stage}: {place.group}" for place in places]
        for column, (title, bars) in enumerate((("predicted", _predicted(run)), ("measured", _seen(run)))):
            here = axes[row][column]
            for kind, colour in COLOURS.items():
                for rank, spans in enumerate(bars):
                    boxes = [(start, end - start) for name, start, end in spans if name == kind]
                    here.broken_barh(
                        boxes, (rank - 0.4, 0.8), color=colour, edgecolor="white", linewidth=0.3,
                        label=kind if rank == 0 else None,
                    )  # fmt: skip
            seconds = run.estimate.iteration_s if title == "predicted" else run.measured.iteration_s
            here.axvline(seconds, color="0.3", linewidth=0.8, linestyle="--")
            here.set_title(f"{run.name}, {title}: {seconds:.3f} s", fontsize=10)
            here.set_yticks(range(len(places)), names, fontsize=8)
            here.set_ylim(len(places) - 0.4, -0.6)
            here.set_xlim(0, 1.02 * longest_s)
            here.spines[["top", "right"]].set_visible(False)
    for here in axes[-1]:
        here.set_xlabel("seconds from the step's beginning", fontsize=9)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(COLOURS), frameon=False, fontsize=9)
    figure.savefig(path, dpi=100)


COLOURS = {"forward": "#4c78a8", "backward": "#f58518", "update": "#54a24b"}
Bars = list[list[tuple[str, float, float]]]  # per rank: (kind, start, end) in seconds


def _predicted(run: Run) -> Bars:
    found: Bars = []
    ends: dict[int, float] = {}
    slots = run.estimate.timeline()
    for slot in slots:
        ends[slot.stage] = max(ends.get(slot.stage, 0.0), slot.end_s)
    for report in run.reports:
        stage = report.place.stage
        mine = [("forward" if s.is_forward else "backward", s.start_s, s.end_s) for s in slots if s.stage == stage]
        found.append([*mine, ("update", ends[stage], ends[stage] + run.estimate.stages[stage].tail_s)])
    return found


def _seen(run: Run) -> Bars:
    kinds = {"forward": "forward", "backward": "backward", "sync": "update", "optimizer": "update", "gather": "update"}
    return [
        [(kinds[event.kind], event.start_s, event.end_s) for event in report.events[-1] if event.kind in kinds]
        for report in run.reports
    ]


def draw_errors(runs: Sequence[Run], path: Path) -> None:
    """Predicted against measured iteration times of all plans."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    here = figure.subplots()
    times = [seconds for run in runs for seconds in (run.estimate.iteration_s, run.measured.iteration_s)]
    low, high = 0.9 * min(times), 1.1 * max(times)
    here.plot([low, high], [low, high], color="0.6", linewidth=0.8)
    for run in runs:
        x, y = run.estimate.iteration_s, run.measured.iteration_s
        searched = run.name in ("ours", *UNIFORM)
        here.plot(x, y, "o", color="#f58518" if searched else "#4c78a8", markersize=6)
        offset, side = ((-6, 4), "right") if searched else ((6, -9), "left")  # neighbours on either side of the line
        here.annotate(run.name, (x, y), xytext=offset, textcoords="offset points", fontsize=8, ha=side)
    here.set_xlim(low, high)
    here.set_ylim(low, high)
    here.set_xlabel("predicted seconds per step")
    here.set_ylabel("measured")
    here.grid(color="0.92")
    here.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


# --------------------------------------------------------------------------------------------- the command
def plan_to_run(options: Mapping[str, Any]) -> int:
    """Run what is missing and write figures and pictures; the exit status."""
    quick = yes_or_no("plan_to_run", "quick", options["quick"])
    out = Path(str(options["out"]))
    check_writable(out)
    folder = out / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    steps, repeats = (QUICK_STEPS, QUICK_REPEATS) if quick else (STEPS, REPEATS)
    problem = problem_here()
    job = tiny(problem)
    try:
        with Session(problem.cluster.num_devices) as session:
            settings = {"version": version(), "slower": SLOWER, "repeats": repeats, "sizes": list(SIZES)}

            def profiles() -> dict[str, Any]:
                table = device_table(session, problem, repeats)
                measured = in_place(session, problem, job, table, repeats)
                return {"table": profile_to_json(table), "in_place": profile_to_json(measured)}

            made = stored(folder / "profiles.json", settings, profiles)
            table, profile = (profile_from_json(made[key], key) for key in ("table", "in_place"))
            print("profiled: units alone and in place", flush=True)
            given, predict = Estimator(problem, profile=table), Estimator(problem, profile=profile)
            plans = plans_to_run(problem, profile)
            alone, _ = one_process(job, steps)
            runs = []
            for name, plan in plans.items():
                settings = {
                    "version": version(),
                    "plan": problem.plan_to_json(plan),
                    "steps": steps,
                    "table": table.checksum,
                }
                pacing = imposed(given, plan)
                data = stored(
                    folder / f"{name.replace(' ', '-')}.json",
                    settings,
                    lambda plan=plan, pacing=pacing: run_plan(session, job, plan, pacing, steps, alone),  # type: ignore[misc]
                )
                runs.append(_run(name, plan, predict(plan), expected_held(problem, job, plan), data))
                print(
                    f"{name}: predicted {runs[-1].estimate.iteration_s:.3f} s, measured "
                    f"{runs[-1].measured.iteration_s:.3f} s ({runs[-1].error:+.1%}), load {data['machine_load']:.1f}",
                    flush=True,
                )
    except KeyboardInterrupt:
        print("interrupted; the same command goes on with the plans that are missing", file=sys.stderr)
        return 130
    figures = summary(runs)
    rows = table_rows(runs)
    report = text(runs, figures)
    write_files(
        out,
        {
            "summary.json": to_json_text(figures).encode(),
            "table.md": report.encode(),
            "plan_to_run.csv": csv_text(rows, list(rows[0])).encode(),
        },
    )
    draw(runs, out / "timelines.png")
    draw_errors(runs, out / "predicted_measured.png")
    print(report)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    return configs.run_with_options(plan_to_run, dict(OPTIONS), sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
