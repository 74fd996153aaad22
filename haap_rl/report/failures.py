"""The part of a report that says what the plan is worth when devices fail, and what other plans trade for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from haap_rl.faults.tradeoff import FRONT, Tradeoff
from haap_rl.report.markup import Markup, element, table
from haap_rl.report.svg import WIDTH, legend, line, picture, text, ticks

LEFT, RIGHT, HEIGHT = 84.0, WIDTH - 16, 300.0
KEEPS = (
    (0.95, "curve0", "95 % or more of attention gradients computed"),
    (0.8, "curve2", "80 to 95 %"),
    (0.0, "curve1", "less"),
)  # of gradients


def section_under_failures(facts: Mapping[str, Any] | None, front: Sequence[Tradeoff]) -> list[Markup | None]:
    """Figures and, where a search ranked plans by them, the plans that no other one beats; nothing without failures."""
    if facts is None:
        return []
    mean, low, high = (facts[f"expected_tokens_per_s{end}"] for end in ("", "_low", "_high"))
    free = facts["failure_free_tokens_per_s"]
    interval = facts["checkpoint_interval_s"]
    rows = [
        ("expected throughput", f"{mean:,.0f} tokens/s", f"between {low:,.0f} and {high:,.0f}"),
        ("of the throughput without failures", f"{mean / free:.1%}", f"{free:,.0f} tokens/s"),
        ("stopped by what is down", f"{facts['stopped_share']:.2%}", f"{facts['stops_per_hour']:.3g} stops an hour"),
        ("attention gradients computed", f"{facts['gradient_fidelity']:.1%}", "all others are exact or low-rank"),
        ("a checkpoint", "never" if interval is None else f"every {interval:,.0f} s", "of training"),
    ]
    what = {"counts": "combinations of failures", "sets": "sets of failures", "draws": "random sets of failures"}
    summed = f"summed over {facts['states']:,} {what.get(facts['method'], 'sets')}"
    policy = facts["policy"]
    if facts["policy_used"] != policy:
        policy = f"{facts['policy_used']}, as {policy} cannot be used with this plan"
    said = f"{facts['faults']}, met by policy {policy}; {summed}."
    drawing = front_picture(front, (free, mean)) if len(front) > 1 else None
    caption = (
        "Plans that the search has priced and no other beats in all three: throughput without failures, throughput "
        f"under them, attention gradients computed. The ring is the plan of this report. {FRONT} has them all."
    )
    return [
        element("h2", "When devices fail"),
        table(said, ["", "#", ""], rows),
        None if drawing is None else element("figure", drawing, element("figcaption", caption)),
    ]


def front_picture(front: Sequence[Tradeoff], chosen: tuple[float, float]) -> Markup:
    """Failure-free against expected tokens per second, coloured by the gradients that are computed."""
    xs = [point.failure_free for point in front] + [chosen[0]]
    ys = [point.expected for point in front] + [chosen[1]]
    names, top = legend([(kind, name) for _, kind, name in KEEPS], LEFT, 14)
    bottom = top + HEIGHT
    low_x, high_x = _around(xs)
    low_y, high_y = _around(ys)

    def x_of(value: float) -> float:
        return LEFT + (RIGHT - LEFT) * (value - low_x) / (high_x - low_x)

    def y_of(value: float) -> float:
        return bottom - HEIGHT * (value - low_y) / (high_y - low_y)

    parts: list[Markup | None] = [names]
    for value in _round_values(low_y, high_y):
        parts += [line(LEFT, y_of(value), RIGHT, y_of(value), "grid")]
        parts += [text(LEFT - 8, y_of(value) + 4, f"{value:,.0f}", "end", "soft")]
    for value in _round_values(low_x, high_x):
        parts.append(text(x_of(value), bottom + 18, f"{value:,.0f}", "middle", "soft"))
    parts.append(line(LEFT, bottom, RIGHT, bottom, "axis"))
    parts.append(text(RIGHT, bottom + 36, "tokens per second without failures", "end", "soft"))
    parts.append(text(0, bottom + 36, "expected tokens per second", class_="soft"))
    for point in front:
        kind = next(kind for least, kind, _ in KEEPS if point.fidelity >= least)
        title = element("title", f"{point.failure_free:,.0f}, {point.expected:,.0f} expected, {point.fidelity:.1%}")
        parts.append(
            element("circle", title, cx=x_of(point.failure_free), cy=y_of(point.expected), r=4.5, class_=f"dot {kind}")
        )
    parts.append(element("circle", cx=x_of(chosen[0]), cy=y_of(chosen[1]), r=9.0, class_="ring"))
    best = max(front, key=lambda point: point.expected)
    fastest = max(front, key=lambda point: point.failure_free)
    told = (
        f"{len(front)} plans; best under failures: {best.expected:,.0f} expected, {best.failure_free:,.0f} without; "
        f"fastest without: {fastest.failure_free:,.0f}, {fastest.expected:,.0f} expected."
    )
    return picture("throughput without failures against expected throughput", told, bottom + 44, *filter(None, parts))


def _round_values(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high` on a linear axis."""
    return [value for value in ticks(high, round(6 * high / (high - low))) if value >= low]


def _around(values: Sequence[float]) -> tuple[float, float]:
    """A little more than the range of the values."""
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 0.05 * high or 1.0
    return low - margin, high + margin
