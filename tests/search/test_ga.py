"""What is particular to the genetic algorithm: crossover with repair, individuals that survive pickling."""

import pickle

import numpy as np

from haap_rl.cost.estimator import Estimator
from haap_rl.problem.presets import load_problem
from haap_rl.search.ga import Individual, cross
from haap_rl.space.options import SpaceSpec
from haap_rl.space.space import Space


def test_children_fit_and_use_no_more_devices_than_there_are():
    space = Space(load_problem(), SpaceSpec(), Estimator(load_problem()))
    rng = np.random.default_rng(0)
    children = 0
    for _ in range(150):
        mother, father = space.draw(rng), space.draw(rng)
        child = cross(space, mother, father, rng)
        if child is None:
            continue
        children += 1
        assert child.num_microbatches == mother.num_microbatches
        assert min(space.devices_left(child.options)) >= 0
        assert space.estimator(space.plan(child)).fits
    assert children > 30


def test_an_individual_keeps_its_class_when_pickled():
    space = Space(load_problem(), SpaceSpec(), Estimator(load_problem()))
    individual = Individual(space.draws(np.random.default_rng(0), 1)[0])
    individual.fitness.values = (0.0, 0.0, 1.5)
    copy = pickle.loads(pickle.dumps(individual))
    assert isinstance(copy, Individual)
    assert (copy.code == individual.code).all()
    assert copy.fitness.values == individual.fitness.values


def test_fitness_is_the_rank_in_its_order():
    worse, better = Individual(np.zeros(4)), Individual(np.zeros(4))
    better.fitness.values, worse.fitness.values = (False, 0, 9.0), (True, 5, 1.0)
    assert better.fitness > worse.fitness
