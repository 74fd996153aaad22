"""The pipeline's iteration as a picture and in seconds: what each stage does when, and for whom it waits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from haap_rl.cost.estimate import Estimate
from haap_rl.problem.plan import Plan
from haap_rl.report.markup import Markup
from haap_rl.report.plan_drawing import stage_class
from haap_rl.report.svg import CHARACTER, WIDTH, bars, legend, line, picture, rectangle, short, text, ticks

LEFT, RIGHT = 150.0, WIDTH - 8  # pixels between which the iteration is drawn
MOST_SPANS = 12_000  # of the whole picture, some twenty bytes each
NARROWEST = 1.2  # pixels of a slot, on average, that is still drawn as itself
LEVELS = 12  # steps of a share, where slots are drawn together
PALEST = 0.45  # opacity of the last of several interleaved chunks; the first is solid

FORWARD, BACKWARD, BEFORE, AFTER, TAIL, END = "forward", "backward", "before", "after", "tail", "end"
NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    TAIL: "gradient sync, optimiser",
    BEFORE: "waits for stage before",
    AFTER: "waits for stage after",
    END: "waits for end",
}


class Span(NamedTuple):
    """What a stage does, or for whom it waits, between two times; kind is one of NAMES."""

    kind: str
    start_s: float
    end_s: float
    microbatch: int = -1
    chunk: int = 0


class Waits(NamedTuple):
    """Seconds of an iteration that a stage waits."""

    before_s: float  # for activations of the stage before it, their transfer included
    after_s: float  # for gradients of the stage after it, their transfer included
    end_s: float  # once it has ended, for the slowest stage


def spans(estimate: Estimate) -> list[list[Span]]:
    """Per stage, its whole iteration without gaps, in order.

    In a 1F1B schedule a stage that is free waits for the input of its next operation: activations from the stage
    before it (with interleaved chunks, the first stage's come from the last) or gradients from the stage after it.
    """
    stages: list[list[Span]] = [[] for _ in estimate.stages]
    for slot in estimate.timeline():  # of one stage they come in order
        mine = stages[slot.stage]
        free = mine[-1].end_s if mine else 0.0
        if slot.start_s > free:
            mine.append(Span(BEFORE if slot.is_forward else AFTER, free, slot.start_s))
        kind = FORWARD if slot.is_forward else BACKWARD
        mine.append(Span(kind, slot.start_s, slot.end_s, slot.microbatch, slot.chunk))
    for mine, stage in zip(stages, estimate.stages, strict=True):
        end = mine[-1].end_s
        mine.append(Span(TAIL, end, end + stage.tail_s))
        mine.append(Span(END, end + stage.tail_s, max(end + stage.tail_s, estimate.iteration_s)))
    return stages


def waits(estimate: Estimate) -> list[Waits]:
    """Seconds that each stage waits, by whom it waits for."""
    return [
        Waits(*(math.fsum(s.end_s - s.start_s for s in stage if s.kind == kind) for kind in (BEFORE, AFTER, END)))
        for stage in spans(estimate)
    ]


def timeline_picture(plan: Plan, estimate: Estimate) -> Markup:
    """A row per stage from the start to the end of the iteration; bubbles are grey, by whom the stage waits for.

    Slots too many to be seen are drawn together: the height of a colour is then its share of the time.
    """
    rows = spans(estimate)
    per_second = (RIGHT - LEFT) / estimate.iteration_s
    most = max(map(len, rows))
    apart = (RIGHT - LEFT) / most >= NARROWEST and sum(map(len, rows)) <= MOST_SPANS
    height = 30.0 if len(rows) <= 8 else 22.0 if len(rows) <= 24 else 14.0
    parts: list[Markup | None] = []
    used = [kind for kind in NAMES if any(s.kind == kind and s.end_s > s.start_s for row in rows for s in row)]
    names, top = legend([(kind, NAMES[kind]) for kind in used], LEFT, 14)
    parts.append(names)
    bottom = top + height * len(rows)
    for second in ticks(estimate.iteration_s, 8):
        x = LEFT + second * per_second
        parts += [line(x, top, x, bottom, "grid"), text(x, bottom + 16, f"{second:g}", "middle", "soft")]
    parts.append(text(RIGHT, bottom + 32, "seconds", "end", "soft"))
    bins = max(1, min(450, MOST_SPANS // (2 * len(rows))))
    for i, row in enumerate(rows):
        y = top + i * height
        devices = " + ".join(f"{r.num_devices} {r.group}" for r in plan.stages[i].replicas)
        parts.append(rectangle(0, y + 2, 12, height - 4, stage_class(i), round_=2))
        parts.append(text(18, y + height / 2 + 4, f"{i}: {short(devices, 17)}"))
        parts += (
            _apart(row, y, height, per_second, plan.virtual_stages)
            if apart
            else _together(row, y, height, per_second, bins)
        )
    note = None if apart else "Slots are drawn together: the height of a colour is its share of the time."
    if note is None and plan.virtual_stages > 1:
        note = "Paler: a later chunk of the stage."
    parts.append(text(LEFT, bottom + 32, note, class_="soft") if note else None)
    return picture("timeline of one iteration", _told(estimate), bottom + 40, *filter(None, parts))


def _apart(row: Sequence[Span], y: float, height: float, per_second: float, chunks: int) -> list[Markup | None]:
    """Every slot by itself, one path per kind and chunk; numbered where there is room in every backward slot."""
    parts: list[Markup | None] = []
    for kind in NAMES:
        for chunk in range(chunks if kind in (FORWARD, BACKWARD) else 1):
            boxes = [
                (LEFT + s.start_s * per_second, y + 2, (s.end_s - s.start_s) * per_second, height - 4)
                for s in row
                if s.kind == kind and s.chunk == chunk and s.end_s > s.start_s
            ]
            wide = kind in (FORWARD, BACKWARD) and boxes and sum(b[2] for b in boxes) / len(boxes) >= 4
            shade = 1.0 - (1.0 - PALEST) * chunk / (chunks - 1) if chunk else None
            parts.append(bars(boxes, f"{kind} slot" if wide else kind, shade))
    numbered = [s for s in row if s.microbatch >= 0 and height >= 22]
    widest = 4 + CHARACTER * len(str(max((s.microbatch for s in numbered), default=0)))
    if all((s.end_s - s.start_s) * per_second >= widest for s in numbered if s.kind == BACKWARD):
        for s in numbered:
            if (s.end_s - s.start_s) * per_second >= widest:
                x = LEFT + (s.start_s + s.end_s) / 2 * per_second
                parts.append(text(x, y + height / 2 + 4, s.microbatch, "middle", "number"))
    return parts


def _together(row: Sequence[Span], y: float, height: float, per_second: float, bins: int) -> list[Markup | None]:
    """The row cut into equal pieces of time, each a stack of the shares of what happens in it; equal ones joined."""
    end_s = row[-1].end_s
    shares = {kind: [0.0] * bins for kind in NAMES}
    for span in row:
        first, last = (min(bins - 1, int(t / end_s * bins)) for t in (span.start_s, span.end_s))
        for k in range(first, last + 1):
            inside_s = min(span.end_s, (k + 1) * end_s / bins) - max(span.start_s, k * end_s / bins)
            shares[span.kind][k] += max(0.0, inside_s) * bins / end_s
    width, full = end_s * per_second / bins, height - 4
    parts = []
    from_top = [0] * bins
    filled = [0.0] * bins
    for kind, values in shares.items():
        filled = [before + value for before, value in zip(filled, values, strict=True)]
        upto = [round(LEVELS * value) for value in filled]
        boxes, k = [], 0
        while k < bins:
            end = k + 1
            while end < bins and (from_top[end], upto[end]) == (from_top[k], upto[k]):
                end += 1
            if upto[k] > from_top[k]:
                low, high = from_top[k] * full / LEVELS, upto[k] * full / LEVELS
                boxes.append((LEFT + k * width, y + 2 + low, (end - k) * width, high - low))
            k = end
        parts.append(bars(boxes, kind))
        from_top = upto
    return parts


def _told(estimate: Estimate) -> str:
    """The picture in words."""
    stages = "; ".join(
        f"stage {i} computes for {estimate.num_microbatches * stage.busy_s:.3f} s, waits {wait.before_s:.3f} s for the "
        f"stage before it and {wait.after_s:.3f} s for the one after it, takes {stage.tail_s:.3f} s for gradient sync "
        f"and optimiser, then waits {wait.end_s:.3f} s"
        for i, (stage, wait) in enumerate(zip(estimate.stages, waits(estimate), strict=True))
    )
    return f"{estimate.num_microbatches} micro-batches in {estimate.iteration_s:.3f} s: {stages}."
