"""What ranks measured, held against what the estimator predicted: by stage and part, and by the schedule alone.

The replay feeds the estimator's own 1F1B recurrence with the times measured in the same run: what is left is the error
of the schedule and of the synchronisation at its end, without any error of the times that were predicted.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from haap_rl.cost.estimate import Estimate, StageMemory
from haap_rl.cost.estimator import Estimator
from haap_rl.cost.schedule import in_flight, stage_ends_s
from haap_rl.problem.plan import Plan, Problem
from haap_rl.runtime.executor import Event, Held, Report
from haap_rl.runtime.job import Job


class StageMeasured(NamedTuple):
    """Seconds of one stage: per micro-batch the slowest rank's; of the update the last one's to arrive, for whom the
    others wait.

    down_s, up_s  that activations for it, gradients for it, were on their way; None where it never waited for them
    tie_s         of summing a tied embedding's gradient over the first and the last stage, where it holds one
    """

    forward_s: float
    backward_s: float
    collective_s: float  # of forward and backward together, in tensor-parallel collectives
    down_s: float | None
    up_s: float | None
    tie_s: float | None
    reduce_s: float
    clip_s: float
    optimizer_s: float
    gather_s: float


class Measured(NamedTuple):
    """A run: medians over its steps, the first of several left out, for it is slower.

    spread: largest less smallest step over the median.
    """

    iteration_s: float
    spread: float
    stages: tuple[StageMeasured, ...]
    replayed_s: float
    in_flight: tuple[int, ...]
    held: tuple[tuple[Held, ...], ...]  # per stage, per replica group, of the rank that holds most
    overrun_share: float

    @property
    def replay_error(self) -> float:
        return self.replayed_s / self.iteration_s - 1.0


class Row(NamedTuple):
    """A part of a stage, predicted and measured."""

    stage: int
    part: str
    predicted_s: float
    measured_s: float | None


def measure(reports: Sequence[Report], num_microbatches: int) -> Measured:
    """What the ranks' events come to."""
    steps = len(reports[0].events)
    chosen = range(1, steps) if steps > 1 else range(steps)
    ends = [max(report.events[step][-1].end_s for report in reports) for step in chosen]
    iteration_s = statistics.median(ends)
    num_stages = 1 + max(report.place.stage for report in reports)
    per_step = [_stages(reports, step, num_stages) for step in chosen]
    stages = tuple(_median([found[i] for found in per_step]) for i in range(num_stages))
    paced, overran = (sum(getattr(report, name) for report in reports) for name in ("paced", "overran"))

    return Measured(
        iteration_s=iteration_s,
        spread=(max(ends) - min(ends)) / iteration_s,
        stages=stages,
        replayed_s=replay_s(stages, num_microbatches),
        in_flight=tuple(max(r.in_flight for r in reports if r.place.stage == i) for i in range(num_stages)),
        held=tuple(_held(reports, i) for i in range(num_stages)),
        overrun_share=overran / paced if paced else 0.0,
    )


def _held(reports: Sequence[Report], stage: int) -> tuple[Held, ...]:
    by_group: dict[int, list[Held]] = {}
    for report in reports:
        if report.place.stage == stage:
            by_group.setdefault(report.place.replica_group, []).append(report.held)
    return tuple(max(by_group[group], key=lambda held: held.total) for group in sorted(by_group))


def _stages(reports: Sequence[Report], step: int, num_stages: int) -> list[StageMeasured]:
    of_stage = [[r.events[step] for r in reports if r.place.stage == i] for i in range(num_stages)]
    found = []
    ties = [event.seconds for ranks in of_stage for events in ranks for event in events if event.kind == "tie"]
    for i, ranks in enumerate(of_stage):
        found.append(
            StageMeasured(
                forward_s=_slowest(ranks, "forward"),
                backward_s=_slowest(ranks, "backward"),
                collective_s=max(_mean_collective(events) for events in ranks),
                down_s=_on_their_way(of_stage[i - 1], ranks, "forward") if i else None,
                up_s=_on_their_way(of_stage[i + 1], ranks, "backward") if i < num_stages - 1 else None,
                # the first and the last stage wait for each other there
                tie_s=min(ties) if ties and i in (0, num_stages - 1) else None,
                reduce_s=_last(ranks, "sync"),
                clip_s=_last(ranks, "clip"),
                optimizer_s=max(_one(events, "optimizer").seconds for events in ranks),
                gather_s=_last(ranks, "gather"),
            )
        )
    return found


def _one(events: Sequence[Event], kind: str) -> Event:
    return next(event for event in events if event.kind == kind)


def _last(ranks: Sequence[Sequence[Event]], kind: str) -> float:
    """Seconds of the rank for which nobody has to be waited for."""
    return min(_one(events, kind).seconds for events in ranks)


def _slowest(ranks: Sequence[Sequence[Event]], kind: str) -> float:
    """Mean over micro-batches of the slowest rank's seconds."""
    longest: dict[int, float] = {}
    for events in ranks:
        for event in events:
            if event.kind == kind:
                longest[event.microbatch] = max(longest.get(event.microbatch, 0.0), event.seconds)
    return statistics.fmean(longest.values())


def _mean_collective(events: Sequence[Event]) -> float:
    passes = [event for event in events if event.kind in ("forward", "backward")]
    return 2.0 * statistics.fmean(event.collective_s for event in passes)


def _on_their_way(senders: Sequence[Sequence[Event]], receivers: Sequence[Sequence[Event]], kind: str) -> float | None:
    """Seconds from the last sender's end of a pass to the receiver's having it, where a receiver waited for it."""
    sent: dict[int, float] = {}
    for events in senders:
        for event in events:
            if event.kind == kind:
                sent[event.microbatch] = max(sent.get(event.microbatch, 0.0), event.end_s)
    waited: dict[int, float] = {}
    for events in receivers:
        for event in events:
            if event.kind == f"wait {kind}" and event.start_s < sent[event.microbatch] < event.end_s:
                late = event.end_s - sent[event.microbatch]
                waited[event.microbatch] = max(waited.get(event.microbatch, 0.0), late)
    return statistics.median(waited.values()) if waited else None


def _median(found: Sequence[StageMeasured]) -> StageMeasured:
    values = []
    for column in zip(*found, strict=True):
        known = [value for value in column if value is not None]
        values.append(statistics.median(known) if known else None)
    return StageMeasured(*values)  # type: ignore[arg-type]


def replay_s(stages: Sequence[StageMeasured], num_microbatches: int) -> float:
    """Seconds of an iteration by the recurrence of `cost.schedule`, fed with measured times.

    The end as it is run: gradients are summed per stage, all stages meet to clip, each updates and gathers.
    """
    ends = stage_ends_s(
        [stage.forward_s for stage in stages],
        [stage.backward_s for stage in stages],
        [stage.down_s or 0.0 for stage in stages[1:]],
        [stage.up_s or 0.0 for stage in stages[:-1]],
        num_microbatches,
    )
    if stages[0].tie_s is not None:
        ends[0] = ends[-1] = max(ends[0], ends[-1]) + stages[0].tie_s
    summed = max(end + stage.reduce_s for end, stage in zip(ends, stages, strict=True))
    tail = max(stage.optimizer_s + stage.gather_s for stage in stages)
    return summed + min(stage.clip_s for stage in stages) + tail


def rows(estimate: Estimate, found: Measured, scale: float = 1.0) -> list[Row]:
    """Every part of every stage, predicted (times `scale`) and measured."""
    table = []
    for i, (stage, seen) in enumerate(zip(estimate.stages, found.stages, strict=True)):
        table += [
            Row(i, "forward", scale * stage.forward_s, seen.forward_s),
            Row(i, "backward", scale * stage.backward_s, seen.backward_s),
            Row(i, "gradient sync", scale * stage.gradient_sync_s, (seen.tie_s or 0.0) + seen.reduce_s + seen.gather_s),
            Row(i, "optimiser", scale * stage.optimizer_s, seen.optimizer_s),
        ]
        if i:
            table.append(Row(i, "activations on their way", scale * estimate.delays_s[i - 1], seen.down_s))
        if i < len(estimate.stages) - 1:
            table.append(Row(i, "gradients on their way", scale * estimate.delays_s[i], seen.up_s))
        if stage.tensor_parallel_s:
            table.append(Row(i, "of it tensor parallel", scale * stage.tensor_parallel_s, seen.collective_s))
    return table


def expected_held(problem: Problem, job: Job, plan: Plan) -> tuple[tuple[Held, ...], ...]:
    """What the memory model says of the job as it is run, per stage and replica group.

    That is: its own model and length, 4 or 8 bytes per value, no sequence parallelism; of recomputation only what is
    kept, not the working set of the layer under way.
    """
    groups = tuple(
        replace(group, device=replace(group.device, peak_flops=(("fp32", 1.0),))) for group in problem.cluster.groups
    )
    cluster = replace(problem.cluster, groups=groups)
    as_run = replace(problem, cluster=cluster, model=job.model, seq_len=job.seq_len, precision="fp32")
    wider = job.torch_dtype.itemsize // 4

    def held(memory: StageMemory) -> Held:
        kept = memory.activations_bytes + memory.logits_bytes
        parts = memory.weights_bytes, memory.gradients_bytes, memory.optimizer_bytes, kept
        return Held(*(wider * part for part in parts))

    return tuple(tuple(map(held, stage)) for stage in Estimator(as_run)(replace(plan, sequence_parallel=False)).memory)


def fullest(predicted: Sequence[Sequence[Held]], measured: Sequence[Sequence[Held]]) -> list[tuple[Held, Held]]:
    """(predicted, measured) of each stage's replica group that is predicted to hold most."""
    pairs = (zip(expected, seen, strict=True) for expected, seen in zip(predicted, measured, strict=True))
    return [max(stage, key=lambda pair: pair[0].total) for stage in pairs]


def expected_in_flight(num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """Micro-batches that the memory model has in flight on each stage."""
    return tuple(in_flight(num_stages, i, num_microbatches) for i in range(num_stages))


def chrome_trace(reports: Sequence[Report], step: int = -1) -> dict[str, Any]:
    """One step as Chrome's trace viewer (chrome://tracing, Perfetto) reads it: a process per stage, a thread per rank.

    Times in microseconds.
    """
    events: list[dict[str, Any]] = []
    for report in reports:
        place = report.place
        of = {"pid": place.stage, "tid": place.rank}
        name = f"rank {place.rank}: {place.group}, replica {place.replica}, tp index {place.tp_index}"
        events.append({"name": "process_name", "ph": "M", **of, "args": {"name": f"stage {place.stage}"}})
        events.append({"name": "thread_name", "ph": "M", **of, "args": {"name": name}})
        for event in report.events[step]:
            number = f" {event.microbatch}" if event.microbatch >= 0 else ""
            events.append(
                {
                    "name": f"{event.kind}{number}",
                    "cat": event.kind,
                    "ph": "X",
                    "ts": 1e6 * event.start_s,
                    "dur": 1e6 * event.seconds,
                    **of,
                    "args": {"collective_us": 1e6 * event.collective_s},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
