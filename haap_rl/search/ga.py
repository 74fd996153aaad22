"""A genetic algorithm on DEAP: micro-batches and stage options are the genes, the balancer gives out the layers."""

from __future__ import annotations

import numpy as np
from deap import base, tools

from haap_rl.problem.errors import positive_float, positive_int, share
from haap_rl.problem.plan import Problem
from haap_rl.search.base import Objective, seeded_global_random
from haap_rl.space import kernels, moves
from haap_rl.space.space import Code, Codes, Genome, Space


class Fitness(base.Fitness):
    """The three parts of `Estimate.rank`, all minimised, compared in that order."""

    weights = (-1.0, -1.0, -1.0)


class Individual:
    """A row of the space with its fitness; a plain class, for those of DEAP's `creator` do not survive pickling."""

    def __init__(self, code: Code) -> None:
        self.code, self.fitness = code, Fitness()
        self.key = code.tobytes()


class GeneticAlgorithm:
    """(mu + lambda) evolution with tournament selection; parents and children that are alike are kept once.

    population  parents kept, and children made, per generation
    crossover   probability that a child has two parents
    mutations   mean number of neighbour moves per child (at least one is made where there was no crossover)
    tournament  individuals per selection tournament
    """

    def __init__(
        self, population: int = 60, crossover: float = 0.5, mutations: float = 1.5, tournament: int = 3
    ) -> None:
        where = "search=ga"
        self.population = positive_int(where, "population", population)
        self.crossover = share(where, "crossover", crossover)
        self.mutations = positive_float(where, "mutations", mutations)
        self.tournament = positive_int(where, "tournament", tournament)

    def search(self, problem: Problem, objective: Objective, rng: np.random.Generator) -> None:
        space = objective.space
        self._edits = kernels.coded(moves.edits(space))
        parents = self._evaluated(space.draws(rng, self.population), objective)
        with seeded_global_random(rng):
            while True:
                couples = tools.selTournament(parents, 2 * self.population, self.tournament)
                children = self._children(space, couples, rng)
                known = {parent.key for parent in parents}
                fresh = {child.tobytes(): child for child in children}
                codes = np.array([child for key, child in fresh.items() if key not in known])
                if not len(codes):  # the population has converged: new blood
                    codes = space.draws(rng, self.population)
                parents = tools.selBest(parents + self._evaluated(codes, objective), self.population)

    def _evaluated(self, codes: Codes, objective: Objective) -> list[Individual]:
        prices = objective.many(codes)
        individuals = [Individual(code) for code in codes]
        for i, individual in enumerate(individuals):
            individual.fitness.values = prices.rank(i)
        return individuals

    def _children(self, space: Space, couples: list[Individual], rng: np.random.Generator) -> Codes:
        """One child per couple: crossed or the mother's copy, then mutated, all of them move by move."""
        children = np.array([mother.code for mother in couples[::2]])
        moved = np.maximum(1, rng.poisson(self.mutations, len(children)))
        for i in np.flatnonzero(rng.random(len(children)) < self.crossover).tolist():
            mother, father = space.genome_of(couples[2 * i].code), space.genome_of(couples[2 * i + 1].code)
            crossed = cross(space, mother, father, rng)
            if crossed is not None:
                children[i] = space.encode([crossed])[0]
                moved[i] = rng.poisson(self.mutations)
        for move in range(int(moved.max(initial=0))):
            still = np.flatnonzero(moved > move)
            neighbours = np.empty((len(still), children.shape[1]), np.int64)
            kernels.random_neighbours(space.neighbourhood, children[still], self._edits, rng, neighbours)
            children[still] = neighbours
        return children


def cross(space: Space, mother: Genome, father: Genome, rng: np.random.Generator) -> Genome | None:
    """The mother's stages up to a layer, the father's from there on, at the mother's micro-batches; None if it fails.

    A device group that is then over-used is repaired: its stages take the largest option of the same kind that fits,
    and stages for which there is none are dropped.
    """
    cut = int(rng.integers(1, space.num_layers))
    options = [k for k, end in zip(mother.options, np.cumsum(mother.layers), strict=True) if end <= cut]
    begins = np.cumsum(father.layers) - father.layers
    options += [k for k, begin in zip(father.options, begins, strict=True) if begin >= cut]
    samples = space.problem.global_batch_size // mother.num_microbatches
    left, repaired = list(space.num_devices), []
    for k in options:
        option = space.options[k]
        if option.partner is not None:  # on two device groups: kept where both have room, else dropped
            room = [n - used for n, used in zip(left, option.uses(len(left)), strict=True)]
            if min(room) >= 0:
                repaired.append(k)
                left = room
            continue
        size, tp = option.num_devices, option.tp
        while size > left[option.group] or (size // tp > 1 and samples % (size // tp)):
            size //= 2
            tp = min(tp, max(size, 1))
            if size == 0:
                break
        smaller = space.option_index.get(option._replace(tp=tp, dp=size // tp)) if size else None
        if smaller is not None:
            repaired.append(smaller)
            left[option.group] -= size
    child = tuple(repaired[: space.max_stages])
    if not child or not space.holds(mother.num_microbatches, child):
        return None
    return space.decode(mother.num_microbatches, child)
