"""Where each device's memory goes, and how searches came to their plans, as pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from haap_rl.cost.estimate import Estimate
from haap_rl.problem.cluster import GIB
from haap_rl.report.markup import Markup, element
from haap_rl.report.pipeline import MEMORY_PARTS, memory_parts
from haap_rl.report.plan_drawing import stage_class
from haap_rl.report.svg import (
    CHARACTER,
    STAGE_COLOURS,
    WIDTH,
    legend,
    line,
    picture,
    rectangle,
    short,
    text,
    ticks,
    ticks_between,
)
from haap_rl.search.base import TracePoint

LEFT, RIGHT = 150.0, WIDTH - 130  # pixels between which memory is drawn
CURVE_LEFT, CURVE_RIGHT, CURVE_HEIGHT = 64.0, WIDTH - 16, 280.0


def memory_picture(estimate: Estimate) -> Markup:
    """A bar per replica group of each stage: GiB on one device by part, and a line at what the device has."""
    rows = [(i, group) for i, groups in enumerate(estimate.memory) for group in groups]
    most = max(max(group.used_bytes, group.capacity_bytes) for _, group in rows)
    per_byte = (RIGHT - LEFT) / most
    height = 30.0 if len(rows) <= 12 else 20.0
    names, top = legend([(f"memory{k}", name) for k, (name, _) in enumerate(MEMORY_PARTS)], LEFT, 14)
    parts: list[Markup | None] = [names]
    bottom = top + height * len(rows)
    for gib in ticks(most / GIB):
        x = LEFT + gib * GIB * per_byte
        parts += [line(x, top, x, bottom, "grid"), text(x, bottom + 16, f"{gib:g}", "middle", "soft")]
    parts.append(text(RIGHT, bottom + 32, "GiB on one device; the line is what it has", "end", "soft"))
    for row, (i, group) in enumerate(rows):
        y, x = top + row * height, LEFT
        parts.append(rectangle(0, y + 3, 12, height - 6, stage_class(i), round_=2))
        parts.append(text(18, y + height / 2 + 4, f"{i}: {short(group.group, 17)}"))
        for k, (size, (name, _)) in enumerate(zip(memory_parts(group), MEMORY_PARTS, strict=True)):
            title = f"{name}: {size / GIB:.2f} GiB"
            parts.append(rectangle(x, y + 3, size * per_byte, height - 6, f"memory{k}", title) if size else None)
            x += size * per_byte
        has = LEFT + group.capacity_bytes * per_byte
        parts.append(line(has, y, has, y + height, "limit"))
        full = f"{group.used_bytes / GIB:.1f} of {group.capacity_bytes / GIB:.1f} GiB"
        missing = group.missing_bytes > 0
        parts.append(
            text(RIGHT + 8, y + height / 2 + 4, full + (" !" if missing else ""), class_="bad" if missing else None)
        )
    told = "; ".join(
        f"stage {i} on {group.group}: {group.used_bytes / GIB:.2f} of {group.capacity_bytes / GIB:.2f} GiB, of which "
        + ", ".join(
            f"{name} {size / GIB:.2f}" for size, (name, _) in zip(memory_parts(group), MEMORY_PARTS, strict=True)
        )
        for i, group in rows
    )
    return picture("memory of one device of each stage", f"{told}.", bottom + 40, *filter(None, parts))


class Curve(NamedTuple):
    """A search to be drawn: its name, its trace, and the iteration time that no plan beats (None: nothing proven)."""

    name: str
    trace: Sequence[TracePoint]
    lower_bound_s: float | None

    @property
    def points(self) -> list[tuple[int, float]]:
        """(evaluations, best seconds) from the first plan that fits."""
        return [(p.evaluations, p.best_iteration_time_s) for p in self.trace if p.best_iteration_time_s is not None]


def curves_picture(curves: Sequence[Curve]) -> Markup | None:
    """Best iteration time against plans priced, both logarithmic, over the highest bound; None where no plan fits."""
    drawn = [curve for curve in curves if curve.points]
    if not drawn:
        return None
    bounds = [curve.lower_bound_s for curve in drawn if curve.lower_bound_s]
    bound_s = max(bounds, default=None)
    best_s = min(curve.points[-1][1] for curve in drawn)
    worst_s = max(curve.points[0][1] for curve in drawn)
    low, high = min(best_s, bound_s or best_s) * 0.98, worst_s * 1.03
    last = max(2, max(curve.trace[-1].evaluations for curve in drawn))

    def x_of(evaluations: float) -> float:
        return CURVE_LEFT + (CURVE_RIGHT - CURVE_LEFT) * math.log(max(1.0, evaluations)) / math.log(last)

    parts: list[Markup | None] = []
    top = 10.0
    if len(drawn) > 1:
        names, top = legend([(f"curve{k % STAGE_COLOURS}", c.name) for k, c in enumerate(drawn)], CURVE_LEFT, 14)
    bottom = top + CURVE_HEIGHT

    def y_of(seconds: float) -> float:
        return bottom - CURVE_HEIGHT * math.log(seconds / low) / math.log(high / low)

    parts += [names] if len(drawn) > 1 else []
    for seconds in ticks_between(low, high):
        y = y_of(seconds)
        parts += [
            line(CURVE_LEFT, y, CURVE_RIGHT, y, "grid"),
            text(CURVE_LEFT - 8, y + 4, f"{seconds:.4g}", "end", "soft"),
        ]
    for plans in ticks_between(1.0, float(last)):
        if plans == int(plans):
            parts.append(text(x_of(plans), bottom + 18, f"{int(plans):,}", "middle", "soft"))
    parts.append(line(CURVE_LEFT, bottom, CURVE_RIGHT, bottom, "axis"))
    parts.append(text(CURVE_RIGHT, bottom + 36, "plans priced (logarithmic)", "end", "soft"))
    parts.append(text(0, bottom + 36, "seconds per iteration, best so far (logarithmic)", class_="soft"))
    if bound_s:
        y = y_of(bound_s)
        parts += [line(CURVE_LEFT, y, CURVE_RIGHT, y, "bound")]
        parts.append(
            text(CURVE_LEFT + 6, y - 6, f"no plan is faster than {bound_s:.3f} s (proven)", class_="boundname")
        )
    for k, curve in enumerate(drawn):
        points = curve.points
        steps = f"M{x_of(points[0][0]):.1f} {y_of(points[0][1]):.1f}"
        for evaluations, seconds in points[1:]:
            steps += f"H{x_of(evaluations):.1f}V{y_of(seconds):.1f}"
        steps += f"H{x_of(curve.trace[-1].evaluations):.1f}"
        title = element("title", f"{curve.name}: {points[-1][1]:.3f} s")
        parts.append(element("path", title, d=steps, class_=f"curve curve{k % STAGE_COLOURS}"))
    if len(drawn) == 1:
        x, y = x_of(points[-1][0]), y_of(points[-1][1])
        parts.append(element("circle", cx=x, cy=y, r=3.5, class_="curve0 end"))
        near = "end" if x > CURVE_RIGHT - 12 * CHARACTER else "start"
        parts.append(text(x, y - 10, f"{points[-1][1]:.3f} s", near, "strong"))
    told = "; ".join(
        f"{c.name}: first {c.points[0][1]:.3f} s after {c.points[0][0]:,} plans, best {c.points[-1][1]:.3f} s after "
        f"{c.points[-1][0]:,} of {c.trace[-1].evaluations:,}"
        for c in drawn
    )
    told += f". No plan is faster than {bound_s:.3f} s (proven)." if bound_s else "."
    return picture("best plan by plans priced", told, bottom + 44, *filter(None, parts))
