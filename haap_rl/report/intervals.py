"""How far a mean of few values may be off."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Interval(NamedTuple):
    """A mean, and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float


def half_width(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of the mean by Student's t (1908); None for a single value."""
    from scipy.special import stdtrit

    if len(values) < 2:
        return None
    return float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))


def interval(values: Sequence[float]) -> Interval:
    """The mean with its interval; of a single value, that value alone."""
    mean, half = statistics.fmean(values), half_width(values) or 0.0
    return Interval(mean, mean - half, mean + half)
