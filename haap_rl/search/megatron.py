"""What an expert of Megatron-LM tries: one tp, dp, micro-batch and recompute mode for all stages, even layers.

After Narayanan et al. 2021 (arXiv 2104.04473): tensor parallelism inside a node first, then pipeline, then data
parallelism; every combination of the declared space is priced. On a mixed cluster, where Megatron-LM knows one kind of
device only, its users run it on all devices as if they were equal or on the largest equal part; both are tried, with
the device groups in either order along the pipeline. A stage stays on one device group, so devices that a group has
beyond a multiple of tp x dp stay idle. Deterministic: it ends when the grid is priced.
"""

from __future__ import annotations

import itertools

import numpy as np

from haap_rl.problem.plan import Problem, even_layers
from haap_rl.search.base import Objective
from haap_rl.space.options import Option
from haap_rl.space.space import Genome, Space


class Megatron:
    """The uniform grid: finite, without randomness or hyper-parameters."""

    def search(self, problem: Problem, objective: Objective, rng: np.random.Generator) -> None:
        space = objective.space
        genomes = [genome for m in space.num_microbatches for genome in uniform_genomes(space, m)]
        objective.many(space.encode(genomes))


def uniform_genomes(space: Space, m: int) -> list[Genome]:
    """Every uniform genome at `m` micro-batches, the best ones of an expert among them, in a fixed order."""
    samples = space.problem.global_batch_size // m
    shapes = dict.fromkeys((option.tp, option.dp, option.recompute) for option in space.options)
    sequences: dict[tuple[int, ...], None] = {}
    for tp, dp, recompute in shapes:
        if samples % dp:
            continue
        longest = []  # per device group, as many such stages as it has devices for
        for group, devices in enumerate(space.num_devices):
            k = space.option_index.get(Option(group, tp, dp, recompute))
            longest.append(() if k is None else (k,) * (devices // (tp * dp)))
        for order in (longest, longest[::-1]):  # all devices, as if they were equal
            sequences[tuple(itertools.chain.from_iterable(order))] = None
        for stages in longest:  # one equal part of the cluster
            sequences.update(dict.fromkeys(stages[:n] for n in range(1, len(stages) + 1)))
    return [
        Genome(m, options, even_layers(space.num_layers, len(options)))
        for options in sequences
        if 0 < len(options) <= space.max_stages
    ]
