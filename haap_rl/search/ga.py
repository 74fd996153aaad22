"""A memetic genetic algorithm on DEAP: micro-batches and stage options are the genes, the balancer deals the layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from deap import base, tools

from haap_rl.cost.compiling import ready
from haap_rl.problem.errors import InputError, positive_float, positive_int, share
from haap_rl.problem.plan import Problem
from haap_rl.problem.presets import load_problem
from haap_rl.search import ga_kernels, relief_kernels
from haap_rl.search.autohaap import Kept
from haap_rl.search.base import Objective, compile_kernels, seeded_global_random
from haap_rl.space import kernels, moves
from haap_rl.space.options import SpaceSpec
from haap_rl.space.space import Code, Codes, Genome, Space

Ints = npt.NDArray[np.int64]


class Fitness(base.Fitness):
    """The three parts of `Estimate.rank`, all minimised, compared in that order."""

    weights = (-1.0, -1.0, -1.0)


class Individual:
    """A row of the space with its fitness; a plain class, for those of DEAP's `creator` do not survive pickling."""

    def __init__(self, code: Code, rank: tuple[bool, int, float]) -> None:
        self.code, self.fitness, self.relieved = code, Fitness(rank), False


class GeneticAlgorithm:
    """(mu + lambda) evolution with tournament selection; of individuals with equal fitness one is kept.

    population  parents kept, and children made, per generation
    crossover   probability that a child has two parents
    mutations   mean number of neighbour moves per child (at least one is made where there was no crossover)
    tournament  individuals per selection tournament
    relief      share of all evaluations, 0 to 1, that go to bottleneck relief; 0: none, a plain genetic algorithm.
                After each generation, as long as relief has had less than its share, the best individual of the
                population that was not relieved yet has every plan priced that relieves its most loaded stage
                (`relief_kernels.candidates`); the best of them takes its place if it is better, and may be relieved
                in its turn
    regular     share of a first population that is drawn regular, each device group one run of equal stages
                (`relief_kernels.regular`); the rest are the space's draws
    patience    generations without a better plan after which evolution starts anew from a fresh population
    policy      `pretrained` or a file of `train_policy`: the best plans it proposes are the first population, later
                ones are drawn; null: all are drawn
    """

    def __init__(
        self,
        population: int = 60,
        crossover: float = 0.5,
        mutations: float = 1.5,
        tournament: int = 3,
        relief: float = 0.5,
        regular: float = 0.5,
        patience: int = 20,
        policy: str | None = None,
    ) -> None:
        where = "search=ga"
        self.population = positive_int(where, "population", population)
        self.crossover = share(where, "crossover", crossover)
        self.mutations = positive_float(where, "mutations", mutations)
        self.tournament = positive_int(where, "tournament", tournament)
        self.relief, self.regular = share(where, "relief", relief), share(where, "regular", regular)
        self.patience = positive_int(where, "patience", patience)
        if policy is not None and not isinstance(policy, str):
            raise InputError(f"{where}: policy={policy!r} must be pretrained or the path of a policy file")
        self.network = None
        if policy is not None:
            from haap_rl.search.candidate_policy import load_policy  # torch is imported only for a policy

            self.network = load_policy(policy)[0]

    def prepare(self) -> None:
        """Have the crossover compiled too."""
        compile_kernels()
        ready("crossover", _first_cross)

    def search(self, problem: Problem, objective: Objective, rng: np.random.Generator) -> None:
        if self.network is None:
            self.evolve(objective, rng, self.draws(objective.space, rng))
        else:
            self.evolve(objective, rng, objective.space.draws(rng, 0), self.proposed(objective, rng))

    def proposed(self, objective: Objective, rng: np.random.Generator) -> list[Kept]:
        """The best plans that the policy proposes, priced: one per number of micro-batches, and one batch drawn."""
        from haap_rl.search.proposals import Proposals

        assert self.network is not None
        proposals = Proposals(objective, self.network, rng)
        with seeded_global_random(rng):
            proposals.first()
            proposals.more()
        return proposals.take(self.population)

    def draws(self, space: Space, rng: np.random.Generator) -> Codes:
        """A fresh population."""
        codes = space.draws(rng, self.population)
        regular = codes[: round(self.regular * self.population)]
        if len(regular):
            relief_kernels.regular(space.neighbourhood, relief_kernels.regular_options(space), rng, regular)
        return codes

    def evolve(self, objective: Objective, rng: np.random.Generator, codes: Codes, priced: Sequence[Kept] = ()) -> None:
        """Evolve the rows `codes`, plans of the space in any number, and then fresh ones, until the budget ends.

        priced: plans of the first population that have been priced already, and are not priced again.
        """
        self.prepare()
        space = objective.space
        self._edits, self._smaller = kernels.coded(moves.edits(space)), ga_kernels.as_table(smaller_options(space))
        with seeded_global_random(rng):
            while True:
                self._generations(objective, rng, codes, priced)
                codes, priced = self.draws(space, rng), ()

    def _generations(
        self, objective: Objective, rng: np.random.Generator, codes: Codes, priced: Sequence[Kept]
    ) -> None:
        """Evolve the plans until `patience` generations in a row have found nothing better."""
        start = objective.evaluations - len(priced)
        relieved = idle = 0
        known = [Individual(plan.code, plan.rank) for plan in priced]
        parents = tools.selBest(known + self._evaluated(_fresh(codes, known), objective), len(known) + len(codes))
        while idle < self.patience:
            best = parents[0].fitness
            while relieved < self.relief * (objective.evaluations - start):
                before = objective.evaluations
                if not self._relieve(parents, objective):
                    break
                relieved += objective.evaluations - before
            couples = tools.selTournament(parents, 2 * self.population, self.tournament)
            children = self._evaluated(_fresh(self._children(objective.space, couples, rng), parents), objective)
            unlike = {individual.fitness.values: individual for individual in children + parents}  # parents stay
            parents = tools.selBest(list(unlike.values()), self.population)
            idle = 0 if parents[0].fitness > best else idle + 1

    def _evaluated(self, codes: Codes, objective: Objective) -> list[Individual]:
        """The rows as individuals, best first."""
        if not len(codes):
            return []
        prices = objective.many(codes)
        return tools.selBest([Individual(code, prices.rank(i)) for i, code in enumerate(codes)], len(codes))  # type: ignore[no-any-return]

    def _relieve(self, parents: list[Individual], objective: Objective) -> bool:
        """Relieve the best of `parents` (in no order) that was not yet; False if there is none."""
        waiting = [x for x, parent in enumerate(parents) if not parent.relieved]
        if not waiting:
            return False
        x = max(waiting, key=lambda x: parents[x].fitness)
        parents[x].relieved = True
        space, code, rank = objective.space, parents[x].code, parents[x].fitness.values
        found = np.zeros((kernels.most_relief(space) + len(space.options) + 1, len(code)), np.int64)
        _, stage = objective.loads_s(code)
        codes = _fresh(found[: relief_kernels.candidates(space.neighbourhood, code, stage, found)], parents)
        if len(codes):
            prices = objective.many(codes, np.inf if rank[0] else rank[2])
            if prices.rank(prices.best) < rank:
                parents[x] = Individual(codes[prices.best], prices.rank(prices.best))
        return True

    def _children(self, space: Space, couples: list[Individual], rng: np.random.Generator) -> Codes:
        """One child per couple: crossed or the mother's copy, then mutated, all of them move by move."""
        children, fathers = (np.array([parent.code for parent in couples[x::2]]) for x in range(2))
        moved = np.maximum(1, rng.poisson(self.mutations, len(children)))
        crossed = np.flatnonzero(rng.random(len(children)) < self.crossover)
        cuts = random_cuts(space, rng, len(crossed))
        made = ga_kernels.cross(space.neighbourhood, self._smaller, children, fathers, crossed, cuts)
        moved[made] = rng.poisson(self.mutations, len(made))
        for move in range(int(moved.max(initial=0))):
            still = np.flatnonzero(moved > move)
            neighbours = np.empty((len(still), children.shape[1]), np.int64)
            kernels.random_neighbours(space.neighbourhood, children[still], self._edits, rng, neighbours)
            children[still] = neighbours
        return children


def _fresh(codes: Codes, known: list[Individual]) -> Codes:
    """The rows that differ from each other and from the individuals known."""
    keys = {individual.code.tobytes() for individual in known}
    fresh = {key: x for x, code in enumerate(codes) if (key := code.tobytes()) not in keys}
    return codes[list(fresh.values())]


def random_cuts(space: Space, rng: np.random.Generator, count: int) -> Ints:
    """Layers to cut at, between the first and the last one where there are two."""
    return 1 + (rng.random(count) * (space.num_layers - 1)).astype(np.int64)


def smaller_options(space: Space) -> list[list[tuple[int, ...]]]:
    """Per micro-batch count and option: itself and those of its kind on a half, a quarter, ... of its devices.

    Largest first, tensor parallelism kept as far as it goes, and only those whose replicas share the micro-batch
    evenly. An option on two device groups has itself alone.
    """

    def halvings(m: int, k: int) -> tuple[int, ...]:
        option, found = space.options[k], []
        if option.partner is not None:
            return (k,)
        size = option.num_devices
        while size:
            tp = min(option.tp, size)
            smaller = space.option_index.get(option._replace(tp=tp, dp=size // tp))
            if smaller is not None and space.problem.global_batch_size // m % (size // tp) == 0:
                found.append(smaller)
            size //= 2
        return tuple(found)

    return [[halvings(m, k) for k in range(len(space.options))] for m in space.num_microbatches]


def cross(
    space: Space, smaller: list[list[tuple[int, ...]]], mother: Genome, father: Genome, cut: int
) -> Genome | None:
    """The mother's stages up to a layer, the father's from there on, at the mother's micro-batches; None if it fails.

    Front to back, each takes the largest of its `smaller_options` for which devices are left; a stage for which there
    are none is dropped. Twin: `ga_kernels.cross`.
    """
    options = [k for k, end in zip(mother.options, np.cumsum(mother.layers), strict=True) if end <= cut]
    begins = np.cumsum(father.layers) - father.layers
    options += [k for k, begin in zip(father.options, begins, strict=True) if begin >= cut]
    m, child = mother.num_microbatches, ()  # type: int, tuple[int, ...]
    for k in options:
        allowed = smaller[space.num_microbatches.index(m)][k]
        child += tuple(s for s in allowed if min(space.devices_left((*child, s))) >= 0)[:1]
    child = child[: space.max_stages]
    return space.decode(m, child) if space.holds(m, child) else None


def _first_cross() -> None:
    """Have the crossover's kernel compiled by a call on a small problem."""
    spec = SpaceSpec(num_microbatches=(16, 32), max_stages=2, max_tp=1, group_sizes=(4,), recompute=("full",))
    space = Objective(load_problem("gpt3_350m", "v100x4_t4x4"), space=spec).space
    codes, first = space.draws(np.random.default_rng(0), 2), np.zeros(1, np.int64)
    table = ga_kernels.as_table(smaller_options(space))
    ga_kernels.cross(space.neighbourhood, table, codes[:1], codes[1:], first, first + 1)
