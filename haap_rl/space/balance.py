"""Which stage gets how many layers: a memory-capped water-fill in proportion to speed (idea 2 of the paper)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


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


def even_split(caps: Sequence[int], num_layers: int) -> tuple[int, ...] | None:
    """Equal layers per stage within `caps`, the ablation of the balancer: what does not fit moves on."""
    return water_fill([1.0] * len(caps), [0.0] * len(caps), caps, num_layers)
