"""What plans are traded against each other for, and the file that keeps those that no other plan beats."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from haap_rl.problem.errors import LARGEST_NUMBER, InputError
from haap_rl.problem.formats.files import read_text

FRONT = "pareto.csv"
FIGURES = ("failure_free_tokens_per_s", "expected_tokens_per_s", "gradient_fidelity")
COLUMNS = (*FIGURES, "num_microbatches", "stages")


class Tradeoff(NamedTuple):
    """A plan's figures, all the better the larger.

    failure_free, expected: tokens per second while nothing fails, and on average over failures. fidelity: share of
    attention gradients that are computed.
    """

    failure_free: float
    expected: float
    fidelity: float

    def beaten_by(self, other: Tradeoff) -> bool:
        """Whether `other` is at least as good in all three and better in one."""
        return other != self and all(theirs >= own for theirs, own in zip(other, self, strict=True))


def front_csv(plans: Iterable[tuple[Tradeoff, Sequence[object]]]) -> str:
    """The plans as CSV: their figures, then (micro-batches, stages in words)."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for point, said in plans:
        writer.writerow([*(f"{value:.9g}" for value in point), *said])
    return text.getvalue()


def read_front(path: Path) -> tuple[Tradeoff, ...]:
    """The plans' figures in a file of `front_csv`. Raises InputError naming the line that is none."""
    where = f"front {str(path)!r}"
    rows = csv.reader(io.StringIO(read_text(path, "front")))
    if (next(rows, None) or [])[:3] != list(FIGURES):
        raise InputError(f"{where}: its first line does not begin with {','.join(FIGURES)}; run it again")
    points = []
    try:
        for row in rows:
            points.append(Tradeoff(*map(float, row[:3])))
            if not all(0 <= value <= LARGEST_NUMBER for value in points[-1]):
                raise ValueError
    except (TypeError, ValueError, csv.Error):
        raise InputError(f"{where}: line {rows.line_num} is not a plan's figures; run it again") from None
    return tuple(points)
