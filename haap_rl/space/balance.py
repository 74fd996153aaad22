"""Which stage gets how many layers: a memory-capped water-fill in proportion to speed (idea 2 of the paper)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

SLIGHTLY = 1e-9  # relative: the rounding of sums


def water_fill(
    seconds_per_layer: Sequence[float], fixed_s: Sequence[float], caps: Sequence[int], num_layers: int
) -> tuple[int, ...] | None:
    """Layers per stage, or None if they cannot be placed.

    Every stage gets one layer; each further one goes to the stage that would then finish its micro-batch first,
    within `caps`: the split that minimises the slowest stage, since a stage's time grows with its layers.
    fixed_s: what a stage takes besides its layers (embedding, head). Twin: `space.kernels.water_fill`.
    """
    p = len(caps)
    if num_layers < p or min(caps) < 1 or sum(caps) < num_layers:
        return None
    layers = [1] * p
    queue = [
        (fixed_s[i] + 2 * seconds_per_layer[i], i) for i in range(p) if caps[i] > 1
    ]  # (seconds with one layer more, stage)
    heapq.heapify(queue)
    for _ in range(num_layers - p):
        _, i = queue[0]
        layers[i] += 1
        if layers[i] < caps[i]:
            heapq.heapreplace(queue, (fixed_s[i] + (layers[i] + 1) * seconds_per_layer[i], i))
        else:
            heapq.heappop(queue)
    return tuple(layers)


def pipeline_fill(
    seconds_per_layer: Sequence[float], fixed_s: Sequence[float], caps: Sequence[int], num_layers: int, m: int
) -> tuple[int, ...] | None:
    """Layers per stage that make (m - 1) M + S least, or None if they cannot be placed.

    M is the slowest stage's time and S the sum of all: a pipeline of m micro-batches without its sends. `water_fill`
    makes M least; with few micro-batches some more layers on the fastest stages gain more in S than they lose in M. For
    each M from there on, one more layer of some stage at a time, S is least where the fastest stages are full first.
    Twin: `space.construction_kernels.pipeline_fill`.
    """
    layers = water_fill(seconds_per_layer, fixed_s, caps, num_layers)
    if layers is None:
        return None
    p = len(caps)

    def pipeline_s(layers: Sequence[int]) -> float:
        slowest = total = 0.0
        for n, each, fixed in zip(layers, seconds_per_layer, fixed_s, strict=True):
            slowest, total = max(slowest, n * each + fixed), total + (n * each + fixed)
        return (m - 1) * slowest + total

    def filled(most: Sequence[int]) -> list[int]:
        """The fastest stages up to `most`, one layer at least on each."""
        given, left = [1] * p, num_layers - p
        for i in sorted(range(p), key=lambda i: (seconds_per_layer[i], i)):
            more = min(most[i] - 1, left)
            given[i] += more
            left -= more
        return given

    limit_s = max(n * each + fixed for n, each, fixed in zip(layers, seconds_per_layer, fixed_s, strict=True))
    most = list(layers)
    for i in range(p):
        while most[i] < caps[i] and (most[i] + 1) * seconds_per_layer[i] + fixed_s[i] <= limit_s:
            most[i] += 1
    best, best_s = list(layers), pipeline_s(layers)
    free = filled(caps)
    least_s = sum(n * each + fixed for n, each, fixed in zip(free, seconds_per_layer, fixed_s, strict=True))
    while True:
        found = filled(most)
        if pipeline_s(found) < best_s * (1.0 - SLIGHTLY):
            best, best_s = found, pipeline_s(found)
        more = [(most[i] + 1) * seconds_per_layer[i] + fixed_s[i] if most[i] < caps[i] else math.inf for i in range(p)]
        i = more.index(min(more))
        if more[i] == math.inf or (m - 1) * more[i] + least_s >= best_s:
            return tuple(best)
        most[i] += 1


def even_split(caps: Sequence[int], num_layers: int) -> tuple[int, ...] | None:
    """Equal layers per stage within `caps`, the ablation of the balancer: what does not fit moves on."""
    return water_fill([1.0] * len(caps), [0.0] * len(caps), caps, num_layers)
