"""How AMP chooses: degrees by enumeration, layers by a cut of the pipeline, mixed devices as one average device.

After Li et al. 2022 (NeurIPS, arXiv 2210.07297): every (tp, dp, number of micro-batches) whose stages use all devices
is predicted, with what a layer takes averaged over the device types by fixed weights, so that all stages look alike and
their layers are cut for the average:

    sum_i t_i + (m - 1) max_i t_i + sum of the sends between stages + the slowest gradient synchronisation

Links are not averaged: sends and synchronisation see where each stage sits. Memory is not modelled, so AMP's users run
the best predicted plans one after the other, and turn recomputation on where a plan runs out of memory.

Deviations: a weight is its type's share of the devices (the authors' experiment has 3/4 and 1/4 written in); the cut is
a water-fill, which has the minimum of AMP's dynamic program where layers are alike; devices are placed in the cluster's
order, stages as many as each device group has room for; plans without recomputation are what is predicted.
Deterministic: it ends when `trials` plans have run, or all were tried.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from haap_rl.problem.errors import positive_int
from haap_rl.problem.plan import Problem
from haap_rl.search.base import Objective
from haap_rl.search.strategies.stages import modes, note_if_nothing, send_s, sync_s
from haap_rl.space import moves
from haap_rl.space.balance import water_fill
from haap_rl.space.options import Option
from haap_rl.space.space import Genome, Space


class AMP:
    """Ranks by prediction, then runs.

    trials   plans that run before the fastest of them is taken; those that do not fit are passed over
    """

    def __init__(self, trials: int = 10) -> None:
        self.trials = positive_int("search=amp", "trials", trials)

    def search(self, problem: Problem, objective: Objective, rng: np.random.Generator) -> None:
        space, ran = objective.space, 0
        for _, genome in sorted((predicted_s(space, genome), genome) for genome in candidates(space)):
            ran += self.runs(objective, genome)
            if ran == self.trials:
                return
        note_if_nothing(objective, "AMP")

    @staticmethod
    def runs(objective: Objective, genome: Genome) -> bool:
        """Try one plan, with heavier recomputation until it fits; whether it did."""
        space = objective.space
        for mode in modes(space):
            heavier = [moves.with_mode(space, space.options[k], mode) for k in genome.options]
            options = tuple(k for k in heavier if k is not None)
            prices = objective.many(space.encode([genome._replace(options=options)]))
            if not prices.bytes_missing[0]:
                return True
        return False


def candidates(space: Space) -> Iterator[Genome]:
    """Every combination of degrees and micro-batches, all stages alike, with the lightest recomputation."""
    lightest = modes(space)[0]
    for tp, dp in dict.fromkeys((option.tp, option.dp) for option in space.options if option.partner is None):
        stages: list[int] = []
        for group, devices in enumerate(space.num_devices):
            k = space.option_index.get(Option(group, tp, dp, lightest))
            if k is not None:
                stages += [k] * (devices // (tp * dp))
        if not 0 < len(stages) <= space.max_stages:
            continue
        for m in space.num_microbatches:
            if space.sizes(m, stages[0]) is not None:
                yield cut(space, m, tuple(stages))


def average_s(space: Space, m: int, options: tuple[int, ...]) -> tuple[float, float, float]:
    """Seconds of (embedding, layer, head) on the average device: weighted by each stage's devices."""
    tables, devices = space.tables(m), [space.options[k].num_devices for k in options]
    times = (tables.forward_s + tables.backward_s)[list(options)]  # (p, 3)
    embedding, layer, head = np.average(times, axis=0, weights=devices).tolist()
    return embedding, layer, head


def cut(space: Space, m: int, options: tuple[int, ...]) -> Genome:
    """The layers that make the slowest stage of average devices fastest; their sum is the same for every cut."""
    p = len(options)
    embedding_s, layer_s, head_s = average_s(space, m, options)
    fixed = [0.0] * p
    fixed[0] += embedding_s
    fixed[-1] += head_s
    layers = water_fill([layer_s] * p, fixed, [space.num_layers] * p, space.num_layers)
    if layers is None:
        raise AssertionError(f"{p} stages for {space.num_layers} layers")
    return Genome(m, options, layers)


def predicted_s(space: Space, genome: Genome) -> float:
    """AMP's prediction of the iteration's seconds; no evaluation, since it knows no schedule and no real device."""
    m, options, layers = genome
    last = len(options) - 1
    embedding_s, layer_s, head_s = average_s(space, m, options)
    stages = [n * layer_s + (i == 0) * embedding_s + (i == last) * head_s for i, n in enumerate(layers)]
    sends = sum(2 * send_s(space, m, options[i], options[i + 1]) for i in range(last))  # and the gradients back
    syncs = [sync_s(space, m, k, n, i == 0, i == last) for i, (k, n) in enumerate(zip(options, layers, strict=True))]
    return sum(stages) + (m - 1) * max(stages) + sends + max(syncs)
