"""What every picture of a report is made of: a frame with a text alternative, labels, axes and a legend.

Pictures are inline SVG in pixels, x to the right and y down; colours are classes of `page.css`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from haap_rl.report.markup import Markup, element, joined

WIDTH = 960.0  # of every picture
CHARACTER = 6.4  # pixels of an average character of a label, 12 pixels high
STAGE_COLOURS = 12  # classes stage0, stage1, ...; later stages begin anew


def picture(label: str, description: str, height: float, *content: Markup) -> Markup:
    """An SVG of WIDTH x height pixels. `label` names it and `description` tells what is to be seen in it."""
    return element(
        "svg",
        element("desc", description),
        *content,
        role="img",
        aria_label=label,
        viewBox=f"0 0 {WIDTH:.0f} {height:.0f}",
        width=WIDTH,
        height=height,
    )


def rectangle(
    x: float, y: float, width: float, height: float, class_: str, title: str = "", round_: float = 0
) -> Markup:
    """A rectangle; `title` is shown where the pointer rests on it."""
    inside = element("title", title) if title else None
    return element("rect", inside, x=x, y=y, width=max(width, 0.0), height=height, rx=round_ or None, class_=class_)


def text(x: float, y: float, content: object, anchor: str | None = None, class_: str | None = None) -> Markup:
    """Text with its baseline at y; anchor: None for a text that begins at x, "middle" or "end"."""
    return element("text", content, x=x, y=y, text_anchor=anchor, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def bars(
    spans: Iterable[tuple[float, float, float, float]], class_: str, opacity: float | None = None
) -> Markup | None:
    """Many rectangles (x, y, width, height) as one path, which takes few bytes; None where there are none."""
    path = "".join(f"M{_n(x)} {_n(y)}h{_n(w)}v{_n(h)}h-{_n(w)}z" for x, y, w, h in spans)
    shade = None if opacity is None else f"{opacity:.2f}"
    return element("path", d=path, class_=class_, fill_opacity=shade) if path else None


def cuts(xs: Iterable[float], y: float, height: float) -> Markup | None:
    """Thin upright lines that part a rectangle; None where there are none."""
    path = "".join(f"M{_n(x)} {_n(y)}v{_n(height)}" for x in xs)
    return element("path", d=path, class_="cut") if path else None


def _n(value: float) -> str:
    """A number with up to two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def legend(entries: Iterable[tuple[str, str]], x: float, y: float, right: float = WIDTH) -> tuple[Markup, float]:
    """(the entries, as class and name, in lines of text that end before `right`; the y below them)."""
    parts, left = [], x
    for class_, name in entries:
        width = 18 + CHARACTER * len(name) + 14
        if x > left and x + width > right:
            x, y = left, y + 18
        parts += [rectangle(x, y - 10, 12, 12, class_, round_=2), text(x + 18, y, name)]
        x += width
    return joined(*parts), y + 18


def short(name: str, most: int) -> str:
    """`name` in at most so many characters."""
    return name if len(name) <= most else name[: most - 1] + "…"


def ticks(high: float, count: int = 6) -> list[float]:
    """About `count` round numbers from 0 to `high`."""
    step = _round_step(high / count)
    return [k * step for k in range(int(high / step + 1e-9) + 1)]


def ticks_between(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, for a logarithmic axis: even steps, or 1, 2, 5 where it is long."""
    if high < 4 * low:
        step = _round_step((high - low) / count)
        return [k * step for k in range(math.ceil(low / step - 1e-9), int(high / step + 1e-9) + 1)]
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [first * 10.0**decade for decade in decades for first in ((1, 2, 5) if len(decades) < 5 else (1,))]
    return [value for value in values if low <= value <= high]


def _round_step(step: float) -> float:
    """The least of 1, 2, 5, 10, ... times a power of ten that is at least `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(first * power for first in (1, 2, 5, 10) if first * power >= step * (1 - 1e-9))
