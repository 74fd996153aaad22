"""A genetic algorithm on DEAP: micro-batches and stage options are the genes, the balancer gives out the layers."""

from __future__ import annotations

import numpy as np
from deap import base, tools

from haap_rl.problem.errors import positive_float, positive_int, share
from haap_rl.problem.plan import Problem
from haap_rl.search.base import Objective, seeded_global_random
from haap_rl.space import moves
from haap_rl.space.space import Genome, Space


class Fitness(base.Fitness):
    """The three parts of `Estimate.rank`, all minimised, compared in that order."""

    weights = (-1.0, -1.0, -1.0)


class Individual:
    """A genome with its fitness. A plain class: DEAP's `creator` makes classes that do not survive pickling."""

    def __init__(self, genome: Genome) -> None:
        self.genome, self.fitness = genome, Fitness()


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
        self._edits = moves.edits(space)
        parents = self._evaluated([space.draw(rng) for _ in range(self.population)], objective)
        with seeded_global_random(rng):
            while True:
                couples = tools.selTournament(parents, 2 * self.population, self.tournament)
                genomes = [
                    self._child(space, couples[2 * i].genome, couples[2 * i + 1].genome, rng)
                    for i in range(self.population)
                ]
                known = {parent.genome for parent in parents}
                fresh = [genome for genome in dict.fromkeys(genomes) if genome not in known]
                if not fresh:  # the population has converged: new blood
                    fresh = [space.draw(rng) for _ in range(self.population)]
                parents = tools.selBest(parents + self._evaluated(fresh, objective), self.population)

    def _evaluated(self, genomes: list[Genome], objective: Objective) -> list[Individual]:
        individuals = [Individual(genome) for genome in genomes]
        estimates = objective.many([objective.space.plan(genome) for genome in genomes])
        for individual, estimate in zip(individuals, estimates, strict=True):
            individual.fitness.values = objective.rank(estimate)
        return individuals

    def _child(self, space: Space, mother: Genome, father: Genome, rng: np.random.Generator) -> Genome:
        crossed = cross(space, mother, father, rng) if rng.random() < self.crossover else None
        child = mother if crossed is None else crossed
        for _ in range(max(int(crossed is None), int(rng.poisson(self.mutations)))):
            child = moves.random_neighbour(space, child, self._edits, rng)
        return child


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
