"""How Metis chooses: device groups for the stages are enumerated, then tp is raised where memory is short.

After Um et al. 2024 (USENIX ATC). For every order of the device types along the pipeline, every number of stages and
every number of micro-batches: device groups of 1, 2, 4, ... devices that use all devices, none smaller than `variance`
times an equal share (the paper's pruning). Each starts with data parallelism alone; layers are given out by the stages'
speeds, and where they do not fit, again by speed and memory together; the stage with the least memory left halves dp
and doubles tp, until memory does not matter any more. Every plan on that way is priced.

In the authors' code the stage count falls back to 1 when the device order changes while the device groups are those of
two stages, so a published plan of two stages is priced by one of them. Here a plan has the stages of its device groups.

Deviations: a stage stays on one device group, where Metis may mix types in a stage and then balances the samples of its
replicas; of the orders of a type's device groups, ascending and descending ones are tried, where Metis permutes up to
four runs; layers are balanced by water-fill; recomputation is an input, so a heavier mode is tried where memory
matters. Deterministic: it ends when all device groups are planned and priced.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from haap_rl.problem.errors import positive_float
from haap_rl.problem.plan import Problem
from haap_rl.search.base import Objective
from haap_rl.search.strategies.stages import modes, note_if_nothing
from haap_rl.space.balance import water_fill
from haap_rl.space.moves import scaled
from haap_rl.space.options import Option
from haap_rl.space.space import Genome, Space

Stages = tuple[tuple[int, int], ...]  # (device group, devices) of each stage, front to back


class Metis:
    """Enumerates device groups; layers and tp follow.

    variance   least devices of a stage, as a share of an equal share; 1: equal stages only, small: all sizes
    """

    def __init__(self, variance: float = 0.5) -> None:
        self.variance = positive_float("search=metis", "variance", variance)

    def search(self, problem: Problem, objective: Objective, rng: np.random.Generator) -> None:
        space = objective.space
        for order in itertools.permutations(range(len(space.num_devices))):
            for p in range(1, space.max_stages + 1):
                for stages in device_groups(space, order, p, self.variance):
                    objective.check_seconds()
                    genomes = [genome for m in space.num_microbatches for genome in plans(space, m, stages)]
                    if genomes:
                        objective.many(space.encode(genomes))
        note_if_nothing(objective, "Metis")


def device_groups(space: Space, order: Sequence[int], p: int, variance: float) -> Iterator[Stages]:
    """Every way to give all devices to p stages, the device groups (indices) in this order along the pipeline."""
    least = variance * sum(space.num_devices) / p
    sizes = [size for size in sorted({option.num_devices for option in space.options}) if size >= least]
    sizes = [size for size in sizes if size & (size - 1) == 0]
    for cuts in itertools.combinations(range(1, p), len(order) - 1):  # each device group has a stage at least
        counts = [b - a for a, b in itertools.pairwise((0, *cuts, p))]
        runs = []
        for group, count in zip(order, counts, strict=True):
            ascending = list(partitions(space.num_devices[group], count, sizes))
            ways = dict.fromkeys(run for sizes_ in ascending for run in (sizes_, sizes_[::-1]))
            runs.append([tuple((group, size) for size in run) for run in ways])
        for chosen in itertools.product(*runs):
            yield tuple(itertools.chain.from_iterable(chosen))


def partitions(total: int, count: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """`count` of the ascending sizes, in ascending order, that sum to `total`."""
    if count == 0:
        if total == 0:
            yield ()
        return
    for at, size in enumerate(sizes):
        if size * count > total:
            return
        for rest in partitions(total - size, count - 1, sizes[at:]):
            yield size, *rest


def plans(space: Space, m: int, stages: Stages) -> Iterator[Genome]:
    """The plans on the way from data parallelism alone to one that memory does not touch, or that nothing helps."""
    for mode in modes(space):
        options = data_parallel(space, m, stages, mode)
        while options is not None:
            by_speed, layers, room = balanced(space, m, options)
            if layers is not None:
                yield Genome(m, options, layers)
            if layers == by_speed:
                return  # no memory is short: neither more tp nor recomputation is called for
            options = relieved(space, options, room)


def data_parallel(space: Space, m: int, stages: Stages, mode: str) -> tuple[int, ...] | None:
    """Per stage the option with the least tp whose dp divides a micro-batch; None where a stage has none."""
    options = []
    for group, size in stages:
        for tp in [option.tp for option in space.options if option.group == group and option.num_devices == size]:
            k = space.option_index.get(Option(group, tp, size // tp, mode))
            if k is not None and space.sizes(m, k) is not None:
                options.append(k)
                break
        else:
            return None
    return tuple(options)


def balanced(
    space: Space, m: int, options: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...] | None, list[int]]:
    """(layers by speed alone, layers by speed and memory or None, layers that memory has room for beyond the first)."""
    tables, p = space.tables(m), len(options)
    fixed = [0.0] * p
    fixed[0] += tables.embedding_s[options[0]]
    fixed[-1] += tables.head_s[options[-1]]
    speeds, caps = [tables.layer_s[k] for k in options], tables.caps(options)
    by_speed = water_fill(speeds, fixed, [space.num_layers] * p, space.num_layers)
    if by_speed is None:
        raise AssertionError(f"{p} stages for {space.num_layers} layers")
    layers = water_fill(speeds, fixed, caps, space.num_layers)
    return by_speed, layers, [cap - n for cap, n in zip(caps, by_speed, strict=True)]


def relieved(space: Space, options: tuple[int, ...], room: Sequence[int]) -> tuple[int, ...] | None:
    """The options with dp halved and tp doubled where memory has least room for; None where none can."""
    for i in sorted(range(len(options)), key=lambda i: room[i]):
        halved = scaled(space, space.options[options[i]], 2, 0.5)
        if halved is not None:
            return (*options[:i], halved, *options[i + 1 :])
    return None
