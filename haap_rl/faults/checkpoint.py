"""How often to write checkpoints, and what is left of the time when failures cost what was trained since the last.

T seconds of training between two checkpoints, C seconds to write one, M mean seconds between the failures that stop
training, R seconds of a restart. T = 0 stands for continuous checkpoints, which lose nothing and cost nothing.
"""

from __future__ import annotations

import math


def youngs_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """T = sqrt(2 C M): the best interval while C is small against M.

    Source: Young 1974, "A first order approximation to the optimum checkpoint interval".
    """
    return math.sqrt(2 * checkpoint_s * mtbf_s)


def dalys_efficiency(interval_s: float, checkpoint_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """Share of the time that is training which is kept: e = T / (M e^(R/M) (e^((T+C)/M) - 1)).

    Failures are exponential and come during restarts and checkpoints as well.
    Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps".
    """
    return math.exp(-restart_s / mtbf_s) * kept_share(interval_s, checkpoint_s, mtbf_s)


def kept_share(interval_s: float, checkpoint_s: float, mtbf_s: float) -> float:
    """Share of running time that is training before a complete checkpoint: T/M / (e^((T+C)/M) - 1).

    Running time after a restart is exponential with mean M; it holds 1 / (e^((T+C)/M) - 1) whole cycles on average.
    """
    if interval_s == 0:
        return 1.0
    if math.isinf(mtbf_s):
        return 1.0 if math.isinf(interval_s) else interval_s / (interval_s + checkpoint_s)
    cycles = (interval_s + checkpoint_s) / mtbf_s
    return interval_s / mtbf_s / math.expm1(cycles) if cycles < 700 else 0.0  # e^709 is the largest float


def best_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """The T of Daly's largest efficiency, found by bisection; R moves it nowhere.

    Where the derivative of ln e vanishes, T/M = 1 - e^(-(T+C)/M); left less right is convex, so it has one root.
    """
    if checkpoint_s == 0 or math.isinf(mtbf_s):
        return 0.0 if checkpoint_s == 0 else math.inf
    low, high = 0.0, mtbf_s
    while low < (middle := (low + high) / 2) < high:
        if middle / mtbf_s + math.expm1(-(middle + checkpoint_s) / mtbf_s) < 0:
            low = middle
        else:
            high = middle
    return middle
