"""`report.html` of a run: one file that needs nothing else, made from the run's record.

The plan on its cluster, an iteration as a timeline, memory, what limits the plan and what one change of the cluster
would buy, the search, and the command that makes the run again. Everything is priced anew by the present estimator;
where a record was made with another one, the page says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from haap_rl import configs
from haap_rl.cost.estimate import Estimate
from haap_rl.cost.estimator import Estimator, fingerprint
from haap_rl.problem.cluster import GIB
from haap_rl.problem.plan import Plan
from haap_rl.report.charts import Curve, curves_picture, memory_picture
from haap_rl.report.failures import section_under_failures
from haap_rl.report.markup import Markup, element, joined, table
from haap_rl.report.plan_drawing import plan_picture, stage_class
from haap_rl.report.tables import profile_lines
from haap_rl.report.timeline import timeline_picture, waits
from haap_rl.report.what_if import EVALUATIONS, WhatIf, what_if
from haap_rl.tracking.record import REPORT, Record, read_record, write_files

WORTH_SAYING = 0.001  # a gain below it is "nothing"


class Run(NamedTuple):
    """A record and what its plan costs; the estimate is None where there is no plan."""

    record: Record
    estimate: Estimate | None
    gaps: tuple[str, ...]  # what the price owes to no measurement of the record's profile

    @property
    def name(self) -> str:
        return f"{self.record.searcher}, seed {self.record.seed}"

    @property
    def curve(self) -> Curve:
        return Curve(self.name, self.record.trace, self.record.lower_bound_s)


def read_run(directory: Path) -> Run:
    """The run whose record lies in `directory`. Raises InputError if none does."""
    record = read_record(directory)
    if record.plan is None:
        return Run(record, None, ())
    estimator = Estimator(record.problem, profile=record.profile)
    return Run(record, estimator(record.plan), estimator.gaps(record.plan))


def write_report(directory: Path) -> Path:
    """Write the report of the record in `directory` beside it; its path. Raises InputError where it cannot."""
    write_files(directory, {REPORT: run_page(read_run(directory)).encode()})
    return directory / REPORT


def run_page(run: Run) -> str:
    """The whole page of one run, as HTML."""
    record = run.record
    problem = record.problem
    title = f"{problem.model.name} on {problem.cluster.name}"
    parts = [element("h1", title), element("p", _lead(run), class_="lead"), _stale(run)]
    if record.plan is None or run.estimate is None:
        parts += [
            element("p", f"No plan was found: {record.reason}.", class_="warning"),
            _section("Cluster", plan_picture(problem, None)),
        ]
    else:
        plan, estimate = record.plan, run.estimate
        parts += [
            figures(run),
            *section_of_plan(run, "Cluster and plan"),
            _section(
                "One iteration",
                timeline_picture(plan, estimate),
                "Each row is a stage, from the start of the iteration to its end. Grey is bubble: the stage waits.",
            ),
            _seconds_table(estimate),
            _section("Memory", memory_picture(estimate)),
            *section_under_failures(record.under_failures, record.front),
            *_limits(run, plan, estimate),
        ]
    parts += [*_search(run), *_again(run)]
    return document(title, *parts)


def document(title: str, *content: Markup | None) -> str:
    """A page with its style in it."""
    style = Markup(Path(__file__).with_name("page.css").read_text(encoding="utf-8"))
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", style),
    )
    return "<!DOCTYPE html>\n" + element("html", head, element("body", element("main", *content)), lang="en") + "\n"


def _section(title: str | None, drawing: Markup, caption: str | None = None) -> Markup:
    below = None if caption is None else element("figcaption", caption)
    return joined(None if title is None else element("h2", title), element("figure", drawing, below))


def _lead(run: Run) -> str:
    record, problem = run.record, run.record.problem
    plan = "no plan"
    if record.plan is not None:
        stages = len(record.plan.stages)
        plan = f"{stages} stage{'s' * (stages > 1)}, {record.plan.num_microbatches} micro-batches"
        if record.plan.virtual_stages > 1:
            plan += f", each stage in {record.plan.virtual_stages} interleaved chunks"
    return (
        f"{plan}, by {run.name}. {problem.model.num_parameters / 1e9:.3g} billion parameters in "
        f"{problem.model.num_layers} layers; {problem.global_batch_size} sequences of {problem.seq_len:,} tokens per "
        f"iteration, {problem.precision}, {problem.framework}; {problem.cluster.num_devices:,} devices."
    )


def _stale(run: Run) -> Markup | None:
    """A warning where the record's own figures come from another estimator than the page's."""
    record = run.record
    if record.fingerprint == fingerprint(profile=record.profile):
        return None
    then = "" if record.iteration_time_s is None else f" It then took {record.iteration_time_s:.3f} s."
    return element(
        "p",
        "This run was made with another version of the estimator. The plan is priced anew here; the search and its "
        f"bound are shown as they were.{then}",
        class_="warning",
    )


def gap(run: Run) -> float | None:
    """Iteration time / proven bound - 1; None where one of them is missing."""
    if run.estimate is None or not run.record.lower_bound_s:
        return None
    return run.estimate.iteration_s / run.record.lower_bound_s - 1.0


def interval(estimate: Estimate) -> str:
    """The 90 % interval in seconds, or nothing where none is known."""
    between = estimate.interval_s
    return "" if between is None else f"{between[0]:.3f} to {between[1]:.3f} s"


def figures(run: Run) -> Markup:
    """What matters most, as large numbers."""
    record, estimate = run.record, run.estimate
    if estimate is None:
        raise ValueError("a run without a plan has no figures")
    known = interval(estimate)
    entries = [
        ("iteration", f"{estimate.iteration_s:.3f} s", f"90 % interval {known}" if known else "no interval known"),
        ("throughput", f"{estimate.tokens_per_s:,.0f}", "tokens per second"),
        ("bubble", f"{estimate.bubble:.1%}", "of the devices' time in the pipeline"),
    ]
    far = gap(run)
    if far is not None:
        optimal = record.proven_optimal and "a proven optimum of the space"
        entries.append(("gap to proven bound", f"{far:.1%}", optimal or f"bound {record.lower_bound_s:.3f} s"))
    fullest = max((g for groups in estimate.memory for g in groups), key=lambda g: g.needed_bytes / g.capacity_bytes)
    fits = "fits" if estimate.fits else f"{estimate.bytes_missing / GIB:.2f} GiB are missing"
    share = f"{fullest.used_bytes / GIB:.1f} of {fullest.capacity_bytes / GIB:.0f} GiB"
    entries.append(("fullest device", share, f"{fullest.group}; {fits}"))
    return element(
        "dl",
        *(element("div", element("dt", a), element("dd", b), element("dd", c)) for a, b, c in entries),
        class_="figures",
    )


def section_of_plan(run: Run, title: str | None) -> list[Markup]:
    """The plan drawn, and stage by stage."""
    plan, estimate = run.record.plan, run.estimate
    if plan is None or estimate is None:
        return []
    drawing = plan_picture(run.record.problem, plan)
    caption = "A colour is a stage. Devices in one piece are one tensor-parallel replica; a frame is a node."
    return [_section(title, drawing, caption), stage_table(plan, estimate)]


def _swatch(stage: int) -> Markup:
    return joined(element("span", class_=f"swatch {stage_class(stage)}"), str(stage))


def stage_table(plan: Plan, estimate: Estimate) -> Markup:
    """A row per replica group of each stage."""
    last, slowest = len(plan.stages) - 1, max(estimate.loads_s)
    rows = [
        (
            _swatch(i),
            ("E+" if i == 0 else "") + str(stage.num_units - (i == 0) - (i == last)) + ("+H" if i == last else ""),
            f"{replicas.num_devices:,} {replicas.group}",
            f"{replicas.tp} × {replicas.dp}",
            replicas.microbatch_size,
            stage.recompute.mode + (f" ({stage.recompute.num_layers})" if stage.recompute.num_layers else ""),
            f"{memory.used_bytes / GIB:.1f} of {memory.capacity_bytes / GIB:.0f}" + " !" * (memory.missing_bytes > 0),
            f"{1e3 * time.forward_s:.1f}",
            f"{1e3 * time.backward_s:.1f}",
            f"{estimate.loads_s[i] / slowest:.0%}",
        )
        for i, (stage, time, groups) in enumerate(zip(plan.stages, estimate.stages, estimate.memory, strict=True))
        for replicas, memory in zip(stage.replicas, groups, strict=True)
    ]
    columns = (
        "stage", "layers", "devices", "tp × dp", "#micro-batch", "recompute (layers)", "#memory, GiB", "#forward, ms",
        "#backward, ms", "#load",
    )  # fmt: skip
    return table(
        "Times are per micro-batch. E: embedding, H: head. Load: busy time against that of the busiest stage.",
        columns,
        rows,
    )


def _seconds_table(estimate: Estimate) -> Markup:
    """Where each stage's iteration goes; a column that is zero everywhere is left out."""
    columns = {
        "computes": [
            s.busy_s - s.recompute_s - s.tensor_parallel_s - s.sharding_s - s.blocked_s for s in estimate.stages
        ],
        "recomputes": [s.recompute_s for s in estimate.stages],
        "tensor parallel": [s.tensor_parallel_s for s in estimate.stages],
        "sharding": [s.sharding_s for s in estimate.stages],
        "blocked by sends": [s.blocked_s for s in estimate.stages],
    }
    columns = {name: [estimate.num_microbatches * max(0.0, s) for s in values] for name, values in columns.items()}
    waiting = waits(estimate)
    columns |= {
        "waits for stage before": [wait.before_s for wait in waiting],
        "waits for stage after": [wait.after_s for wait in waiting],
        "gradient sync": [s.gradient_sync_s for s in estimate.stages],
        "optimiser": [s.optimizer_s for s in estimate.stages],
        "waits for end": [wait.end_s for wait in waiting],
    }
    shown = {name: values for name, values in columns.items() if max(values) >= 0.0005}
    rows = [(_swatch(i), *(f"{values[i]:.3f}" for values in shown.values())) for i in range(len(estimate.stages))]
    caption = f"Seconds of each stage, of {estimate.iteration_s:.3f} s; what is zero everywhere is left out."
    return table(caption, ["stage", *(f"#{name}" for name in shown)], rows)


def _limits(run: Run, plan: Plan, estimate: Estimate) -> list[Markup | None]:
    """What sets the pace, and what one change would buy."""
    record = run.record
    index, resource = estimate.bottleneck
    stage = estimate.stages[index]
    devices = " + ".join(f"{r.num_devices} {r.group}" for r in plan.stages[index].replicas)
    if not estimate.fits:
        text = f"Memory of stage {index} ({devices}): {estimate.bytes_missing / GIB:.2f} GiB are missing in all."
        return [element("h2", "What limits the plan"), element("p", text)]
    load_s = estimate.loads_s[index]
    traffic_s = estimate.num_microbatches * (stage.tensor_parallel_s + stage.sharding_s + stage.blocked_s)
    traffic_s += stage.gradient_sync_s
    kind = "communication" if resource == "comm" else "computing"
    lines = [
        f"Stage {index} ({devices}) sets the pace, by {kind}: of {estimate.iteration_s:.3f} s it is busy for "
        f"{load_s:.3f} s, {traffic_s / load_s:.0%} of that with communication."
    ]
    far = gap(run)
    if far is not None:
        lines.append(
            "No plan of the space is faster: this is a proven optimum. Only another cluster helps."
            if record.proven_optimal
            else f"No plan of the space takes less than {record.lower_bound_s:.3f} s, which is proven; this one takes "
            f"{far:.1%} more."
        )
    found = what_if(record.problem, record.space, plan, record.profile)
    otherwise = None
    if record.objective != "iteration_time":
        otherwise = element(
            "p", f"In iteration time while nothing fails, but the plan was chosen by {record.objective}.", class_="soft"
        )
    return [
        element("h2", "What limits the plan"),
        otherwise,
        *(element("p", line) for line in lines),
        element("h2", "What one change would buy"),
        otherwise,
        *_gains(found),
    ]


def _gains(found: WhatIf) -> list[Markup | None]:
    """The changes that buy something, the largest first, and a line on those that do not."""
    better = found.present_s / found.searched_s - 1.0
    parts: list[Markup | None] = []
    if better >= WORTH_SAYING:
        parts.append(
            element(
                "p",
                f"A longer search alone buys {better:.1%}: autohaap went on from this plan and found one of "
                f"{found.searched_s:.3f} s for the cluster as it is. What follows comes on top of that.",
                class_="warning",
            )
        )
    worth = [gain for gain in found.gains if found.speedup(gain) >= WORTH_SAYING]
    most = max(map(found.speedup, worth), default=1.0)
    rows = [
        (
            element("span", gain.text, class_="words"),
            f"+{found.speedup(gain):.1%}",
            element("span", class_="bar", style=f"width:{max(1.0, 140 * found.speedup(gain) / most):.0f}px"),
            f"{gain.best_s:.3f}",
            f"{gain.present_plan_s:.3f}",
        )
        for gain in worth
    ]
    caption = (
        f"Each change alone, planned anew by autohaap (from this plan and from fresh starts, {EVALUATIONS:,} plans). "
        "By the estimator, tokens per second rise by at least so much."
    )
    if rows:
        columns = ("change", "#tokens/s", "", "#new plan, s", "#this plan, s")
        parts.append(table(caption, columns, rows))
    nothing = [gain.text for gain in found.gains if found.speedup(gain) < WORTH_SAYING]
    if nothing:
        parts.append(element("p", f"Nothing, or less than {WORTH_SAYING:.1%}: {'; '.join(nothing)}."))
    if found.not_asked:
        parts.append(element("p", f"Not asked: {found.not_asked}.", class_="soft"))
    return parts


def _search(run: Run) -> list[Markup | None]:
    """How the plan was found."""
    record = run.record
    drawing = curves_picture([run.curve])
    lines = [
        f"{record.searcher} priced {record.evaluations:,} plans in {record.wall_time_s:.1f} s "
        f"({record.stopped_by}), seed {record.seed}.",
        *record.notes,
    ]
    return [
        element("h2", "Search"),
        None if drawing is None else element("figure", drawing),
        *(element("p", line) for line in lines),
    ]


def _again(run: Run) -> list[Markup | None]:
    """The command, and what the figures rest on."""
    record = run.record
    return [
        element("h2", "The same again"),
        element("pre", element("code", configs.command_line(record.config))),
        element(
            "p",
            f"The record lies beside this page: config.yaml has every setting. Estimator {record.fingerprint}.",
            class_="soft",
        ),
        *(element("p", line, class_="soft") for line in profile_lines(record.profile, run.gaps)),
    ]
