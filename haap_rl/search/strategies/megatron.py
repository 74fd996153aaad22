"""What an expert of Megatron-LM tries: one tp, dp, micro-batch and recompute mode for all stages, even layers.

After Narayanan et al. 2021 (arXiv 2104.04473): tensor parallelism inside a node first, then pipeline, then data
parallelism. The expert runs the whole grid of the declared space and keeps what is fastest, so every plan is priced on
the real devices and no belief about them enters. On a mixed cluster (`strategies.one_type`), all devices are used as if
they were equal, the device groups in either order along the pipeline, or the largest part of one type alone, of which
some devices may stay idle.

Deviations: the grid is that of the declared space (its micro-batch counts, its most stages), stages are not
interleaved, and a stage stays on one device group. Deterministic: it ends when the grid is priced.
"""

from __future__ import annotations

import itertools

import numpy as np

from haap_rl.problem.plan import Problem, even_layers
from haap_rl.search.base import Objective
from haap_rl.search.strategies import one_type
from haap_rl.space.options import Option
from haap_rl.space.space import Genome, Space


class Megatron:
    """The uniform grid: finite, without randomness.

    devices   of a mixed cluster: all, part (the largest of one type), or None: both
    """

    def __init__(self, devices: str | None = None) -> None:
        self.devices = one_type.one_of("search=megatron", devices)

    def search(self, problem: Problem, objective: Objective, rng: np.random.Generator) -> None:
        space, largest = objective.space, one_type.largest_part(objective.space)
        grids = {
            part: [
                genome for m in space.num_microbatches for genome in uniform_genomes(space, m, part, part == largest)
            ]
            for part in one_type.parts(space, self.devices)
        }
        genomes = list(dict.fromkeys(itertools.chain.from_iterable(grids.values())))
        if genomes:
            prices = objective.many(space.encode(genomes))
            times = dict(zip(genomes, np.where(prices.bytes_missing, np.inf, prices.iteration_s).tolist(), strict=True))
            best_s = {part: min((times[genome] for genome in grid), default=np.inf) for part, grid in grids.items()}
            one_type.note_best(objective, best_s)


def uniform_genomes(space: Space, m: int, groups: tuple[int, ...], fewer: bool) -> list[Genome]:
    """Every uniform genome at `m` micro-batches on some device groups (indices), in a fixed order.

    Each group has as many stages as it has devices for, the groups in either order. fewer: and any number of stages on
    each group by itself, which leaves the other devices idle.
    """
    samples = space.problem.global_batch_size // m
    shapes = dict.fromkeys((option.tp, option.dp, option.recompute) for option in space.options)
    sequences: dict[tuple[int, ...], None] = {}
    for tp, dp, recompute in shapes:
        if samples % dp:
            continue
        longest = {}  # per device group, as many such stages as it has devices for
        for group, devices in enumerate(space.num_devices):
            k = space.option_index.get(Option(group, tp, dp, recompute))
            longest[group] = () if k is None else (k,) * (devices // (tp * dp))
        for order in (groups, groups[::-1]):
            sequences[tuple(itertools.chain.from_iterable(longest[group] for group in order))] = None
        for group in groups if fewer else ():
            sequences.update(dict.fromkeys(longest[group][:n] for n in range(1, len(longest[group]) + 1)))
    return [
        Genome(m, options, even_layers(space.num_layers, len(options)))
        for options in sequences
        if 0 < len(options) <= space.max_stages
    ]
