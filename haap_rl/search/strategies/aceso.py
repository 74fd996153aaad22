"""How Aceso chooses: find the bottleneck stage, apply a primitive that relieves it, go on from there.

After Liu et al. 2024 (EuroSys). A configuration has one bottleneck: the stage that lacks most memory, or else the one
that is busy for longest, and there the resource of which it uses most. Primitives trade resources (section 3); those
that relieve the bottleneck's are tried first, with the stages that are least busy as partners. Where no primitive makes
the configuration better, its results are gone on from, up to `hops` in a row (multi-hop search), never to a
configuration seen before. Aceso searches for each number of stages by itself, and so does this: each has an equal share
of the budget.

Deviations: recomputation is chosen per stage, all of its layers or none as the declared space has it, where Aceso
chooses per operator; tp and dp are one per stage, where Aceso may change them inside a stage; a start has even layers,
devices as equal as powers of two allow, data parallelism and the most micro-batches; what one step does is our reading
of the paper's primitives (`PRIMITIVES`). On a mixed cluster see `strategies.one_type`; evaluations of the cluster
believed in count like any other. Deterministic: it ends when every descent has, or with the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from haap_rl.problem.errors import InputError, positive_int
from haap_rl.problem.plan import Problem, even_layers
from haap_rl.search.base import Explained, Objective
from haap_rl.search.strategies import one_type
from haap_rl.search.strategies.one_type import View
from haap_rl.search.strategies.stages import modes
from haap_rl.space import moves
from haap_rl.space.space import Genome, Space

Rank = tuple[bool, int, float]
# (space, configuration, bottleneck stage, partners) -> the configurations after it
Primitive = Callable[[Space, Genome, int, Sequence[int]], Iterator[Genome]]
MOST_HOPS = 100  # each is a call inside the one before it
PARTNERS = 2  # stages, the least loaded ones, that layers go to and devices come from


class Aceso:
    """One descent per number of stages, and per view of a mixed cluster.

    devices   of a mixed cluster: all, part (the largest of one type), or None: both
    hops      primitives in a row, of which only the last one need make the plan better
    """

    def __init__(self, devices: str | None = None, hops: int = 7) -> None:
        where = "search=aceso"
        self.devices, self.hops = one_type.one_of(where, devices), positive_int(where, "hops", hops)
        if self.hops > MOST_HOPS:
            raise InputError(f"{where}: hops={self.hops} must be at most {MOST_HOPS}; give for example hops=7")

    def search(self, problem: Problem, objective: Objective, rng: np.random.Generator) -> None:
        views = one_type.views(objective, self.devices)
        starts = [
            (view, start)
            for view in views
            for p in range(1, view.space.max_stages + 1)
            if (start := even_start(view.space, p)) is not None
        ]
        try:
            for i, (view, start) in enumerate(starts):
                descent = Descent(view, self.hops, until=(i + 1) / len(starts))
                descent.run(start)
                if not view.exact:
                    view.run(descent.ranked())
        finally:
            one_type.note_best(objective, {view.groups: view.best_s for view in views})


class Descent:
    """From a start downhill, as far as primitives lead and until a share of the budget is used.

    seen   configurations priced so far, by the view, with their ranks
    """

    def __init__(self, view: View, hops: int, until: float) -> None:
        self.view, self.hops, self.until = view, hops, until
        self.seen: dict[Genome, Rank] = {}

    def run(self, start: Genome) -> None:
        better = next(iter(self._price([start])), None)
        while better is not None:
            rank, genome = better
            better = self.better(rank, genome, self.hops)

    def better(self, than: Rank, genome: Genome, hops: int) -> tuple[Rank, Genome] | None:
        """The first configuration found that is better, at most `hops` primitives from `genome`; None without one."""
        explained = None if self.view.objective.used >= self.until else self.view.explain(genome)
        if explained is None:
            return None
        tried: list[tuple[Rank, Genome]] = []
        for candidates in relief(self.view.space, genome, explained):
            priced = self._price([candidate for candidate in candidates if candidate not in self.seen])
            best = min(priced, default=None)
            if best is not None and best[0] < than:
                return best
            tried += priced
        for _, candidate in sorted(tried) if hops > 1 else ():
            found = self.better(than, candidate, hops - 1)
            if found is not None:
                return found
        return None

    def _price(self, genomes: Sequence[Genome]) -> list[tuple[Rank, Genome]]:
        """Price configurations that were not seen; fewer come back where the budget has no more."""
        genomes = list(dict.fromkeys(genomes))
        if not genomes:
            return []
        prices = self.view.price(genomes)
        priced = [(prices.rank(i), genomes[i]) for i in range(len(prices.iteration_s))]
        self.seen.update((genome, rank) for rank, genome in priced)
        return priced

    def ranked(self) -> list[Genome]:
        """What is believed to fit, the best first."""
        return sorted(
            (g for g, rank in self.seen.items() if not rank[0]), key=lambda genome: (self.seen[genome], genome)
        )


def even_start(space: Space, p: int) -> Genome | None:
    """Even layers on p stages of data parallelism that share the devices as equally as powers of two allow.

    The most micro-batches that leave every replica a sample; where not even the fewest do, those, with tp for dp. None
    where there are too few devices.
    """
    (devices,) = space.num_devices
    lightest = modes(space)[0]
    sizes = sorted({option.num_devices for option in space.options if option.num_devices * p <= devices})
    if not sizes:
        return None
    shares, left = [sizes[-1]] * p, devices - sizes[-1] * p
    for i in reversed(range(p)):  # the last stages hold fewest micro-batches, so they have memory to spare
        if left >= shares[i] and any(option.num_devices == 2 * shares[i] for option in space.options):
            left -= shares[i]
            shares[i] *= 2
    options = [_data_parallel(space, share, lightest) for share in shares]
    counts = [m for m in space.num_microbatches if all(space.sizes(m, k) is not None for k in options)]
    m = max(counts, default=space.num_microbatches[0])
    fitted = tuple(k for k in (moves.at_count(space, k, m) for k in options) if k is not None)
    return Genome(m, fitted, even_layers(space.num_layers, p)) if len(fitted) == p else None


def _data_parallel(space: Space, devices: int, mode: str) -> int:
    """The option on so many devices with the least tp."""
    return min(
        (k for k, option in enumerate(space.options) if option.num_devices == devices and option.recompute == mode),
        key=lambda k: space.options[k].tp,
    )


# --------------------------------------------------------------------------------------- bottleneck and primitives
def relief(space: Space, genome: Genome, explained: Explained) -> Iterator[list[Genome]]:
    """What primitives make of the bottleneck stage, per resource, the one it uses most of first."""
    m = genome.num_microbatches
    loads = m * explained.busy_s + explained.gradient_sync_s + explained.optimizer_s
    traffic = m * (explained.tensor_parallel_s + explained.blocked_s) + explained.gradient_sync_s
    if explained.fits:
        stage = int(loads.argmax())
        resources = ["communication", "compute"] if traffic[stage] > loads[stage] / 2 else ["compute", "communication"]
        partners = np.argsort(loads, kind="stable")
    else:
        stage = int(explained.memory_share.argmax())
        resources = ["memory"]
        partners = np.argsort(explained.memory_share, kind="stable")
    others = [int(j) for j in partners if j != stage][:PARTNERS]
    for resource in resources:
        yield [
            found for primitive in RELIEVES[resource] for found in PRIMITIVES[primitive](space, genome, stage, others)
        ]


def _dec_op(space: Space, genome: Genome, stage: int, partners: Sequence[int]) -> Iterator[Genome]:
    """Layers of the stage to a partner (its inc-op): 1, 2, 4, ... of them."""
    for partner in partners:
        count = 1
        while count < genome.layers[stage]:
            layers = list(genome.layers)
            layers[stage] -= count
            layers[partner] += count
            yield genome._replace(layers=tuple(layers))
            count *= 2


def _inc_devices(tp: float, dp: float) -> Primitive:
    """inc-tp or inc-dp: twice the devices, idle ones or those that a partner gives up by halving dp or tp."""

    def primitive(space: Space, genome: Genome, stage: int, partners: Sequence[int]) -> Iterator[Genome]:
        more = moves.scaled(space, space.options[genome.options[stage]], tp, dp)
        yield from _changed(space, genome, {stage: more})
        for partner in partners:
            option = space.options[genome.options[partner]]
            for fewer in (moves.scaled(space, option, 1, 0.5), moves.scaled(space, option, 0.5)):
                yield from _changed(space, genome, {stage: more, partner: fewer})

    return primitive


def _exchange(tp: float, dp: float) -> Primitive:
    """inc-tp with dec-dp, or the other way round, on the stage's own devices."""

    def primitive(space: Space, genome: Genome, stage: int, partners: Sequence[int]) -> Iterator[Genome]:
        yield from _changed(space, genome, {stage: moves.scaled(space, space.options[genome.options[stage]], tp, dp)})

    return primitive


def _recompute(way: int) -> Primitive:
    """inc-rc (1) or dec-rc (-1): the next heavier or lighter mode for the stage."""

    def primitive(space: Space, genome: Genome, stage: int, partners: Sequence[int]) -> Iterator[Genome]:
        option = space.options[genome.options[stage]]
        yield from _changed(space, genome, {stage: moves.with_recompute(space, option, way)})

    return primitive


def _microbatch(factor: float) -> Primitive:
    """inc-mbs (2) or dec-mbs (1/2): the micro-batch size of all stages; where it no longer divides by dp, tp for dp."""

    def primitive(space: Space, genome: Genome, stage: int, partners: Sequence[int]) -> Iterator[Genome]:
        m = genome.num_microbatches / factor
        if m in space.num_microbatches:
            options = [moves.at_count(space, k, int(m)) for k in genome.options]
            yield from _changed(space, genome._replace(num_microbatches=int(m)), dict(enumerate(options)))

    return primitive


def _changed(space: Space, genome: Genome, options: dict[int, int | None]) -> Iterator[Genome]:
    """The genome with other options of some stages, if each is there, divides a micro-batch and devices suffice."""
    changed = [options.get(i, k) for i, k in enumerate(genome.options)]
    m = genome.num_microbatches
    legal = tuple(k for k in changed if k is not None and space.sizes(m, k) is not None)
    if len(legal) == len(changed) and min(space.devices_left(legal)) >= 0:
        yield genome._replace(options=legal)


PRIMITIVES = {
    "dec-op": _dec_op,
    "inc-dp": _inc_devices(1, 2),
    "inc-tp": _inc_devices(2, 1),
    "inc-dp dec-tp": _exchange(0.5, 2),
    "inc-tp dec-dp": _exchange(2, 0.5),
    "inc-mbs": _microbatch(2),
    "dec-mbs": _microbatch(0.5),
    "inc-rc": _recompute(1),
    "dec-rc": _recompute(-1),
}
RELIEVES = {
    "compute": ("dec-op", "inc-dp", "inc-tp", "inc-mbs", "dec-rc"),
    "communication": ("dec-op", "inc-dp dec-tp", "inc-tp dec-dp", "inc-mbs"),
    "memory": ("dec-op", "inc-rc", "inc-tp dec-dp", "inc-dp", "inc-tp", "dec-mbs"),
}
