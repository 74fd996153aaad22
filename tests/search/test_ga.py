"""What is particular to the genetic algorithm: crossover and its compiled twin, relief, starts that are handed in."""

import pickle

import numpy as np
import pytest
import torch

from haap_rl.problem.errors import InputError
from haap_rl.problem.presets import load_problem
from haap_rl.search import ga_kernels
from haap_rl.search.base import Budget, BudgetExhausted, Objective, run_search
from haap_rl.search.candidate_policy import CandidateNetwork, policy_bytes
from haap_rl.search.ga import GeneticAlgorithm, Individual, cross, random_cuts, smaller_options
from haap_rl.space.construction import FEATURES
from haap_rl.space.options import SpaceSpec
from tests.builders import group, problem

SPECS = {
    "default": SpaceSpec(),
    "mixed_stages": SpaceSpec(num_microbatches=(8, 64), mixed_stages=True, max_stages=6),
    "even layers": SpaceSpec(load_balance=False, num_microbatches=(16, 32), group_sizes=(2, 8)),
    "no memory": SpaceSpec(memory_aware_init=False, num_microbatches=(32,)),
}


@pytest.mark.parametrize("name", SPECS)
def test_the_compiled_crossover_gives_the_children_of_the_readable_one(name):
    space = Objective(load_problem(), space=SPECS[name]).space
    rng = np.random.default_rng(0)
    mothers, fathers, cuts = space.draws(rng, 200), space.draws(rng, 200), random_cuts(space, rng, 200)
    smaller, children, which = smaller_options(space), mothers.copy(), np.arange(200)
    table = ga_kernels.as_table(smaller)
    made = ga_kernels.cross(space.neighbourhood, table, children, fathers, which, cuts)
    born = [
        cross(space, smaller, space.genome_of(mother), space.genome_of(father), int(cut))
        for mother, father, cut in zip(mothers, fathers, cuts, strict=True)
    ]
    assert made.tolist() == [x for x in which if born[x] is not None]
    assert len(made) > 10
    for x in which:
        assert space.genome_of(children[x]) == (born[x] or space.genome_of(mothers[x]))


def test_children_fit_and_use_no_more_devices_than_there_are():
    space = Objective(load_problem()).space
    rng, smaller = np.random.default_rng(0), smaller_options(Objective(load_problem()).space)
    children = 0
    for cut in random_cuts(space, rng, 150):
        mother, father = space.draw(rng), space.draw(rng)
        child = cross(space, smaller, mother, father, int(cut))
        if child is None:
            continue
        children += 1
        assert child.num_microbatches == mother.num_microbatches
        assert min(space.devices_left(child.options)) >= 0
        assert space.estimator(space.plan(child)).fits
    assert children > 30


def test_a_plan_crossed_with_itself_is_itself_with_its_layers_given_out_anew():
    space = Objective(load_problem()).space
    smaller, rng = smaller_options(space), np.random.default_rng(0)
    for _ in range(30):
        genome = space.draw(rng)
        cut = int(sum(genome.layers[: len(genome.layers) // 2]))
        assert cross(space, smaller, genome, genome, cut) == space.decode(*genome[:2])


def test_smaller_options_are_halves_of_the_same_kind_that_divide_the_micro_batch():
    space = Objective(load_problem()).space
    for m, of_count in zip(space.num_microbatches, smaller_options(space), strict=True):
        for k, found in enumerate(of_count):
            option = space.options[k]
            for s in found:
                other = space.options[s]
                assert (other.group, other.recompute) == (option.group, option.recompute)
                assert space.problem.global_batch_size // m % other.dp == 0
            sizes = [space.options[s].num_devices for s in found]
            assert sizes == sorted(set(sizes), reverse=True)
            assert all(option.num_devices % size == 0 for size in sizes)


def test_evolution_starts_from_the_plans_it_is_given_and_never_loses_them():
    rng = np.random.default_rng(0)
    objective = Objective(load_problem(), Budget(evaluations=300))
    codes = objective.space.draws(rng, 500)
    best = codes[Objective(load_problem()).many(codes).best]
    start = np.array([best, codes[0], best])
    with pytest.raises(BudgetExhausted):
        GeneticAlgorithm().evolve(objective, rng, start)
    assert objective.evaluations == 300
    first, second = objective.trace[0], objective.trace[1]  # the one given twice is priced once, and leads at once
    assert (
        first.best_iteration_time_s
        == objective.estimator(objective.space.plan(objective.space.genome_of(best))).iteration_s
    )
    assert second.evaluations > 2
    assert objective.best_s < first.best_iteration_time_s


def test_search_is_evolution_of_fresh_draws():
    def run(search):
        objective = Objective(load_problem(), Budget(evaluations=1000))
        with pytest.raises(BudgetExhausted):
            search(objective, np.random.default_rng(5))
        objective.record()
        return objective.trace

    ga = GeneticAlgorithm()
    assert run(lambda objective, rng: ga.search(objective.problem, objective, rng)) == run(
        lambda objective, rng: ga.evolve(objective, rng, ga.draws(objective.space, rng))
    )


def test_a_policy_gives_the_first_population_and_its_plans_are_priced_once(tmp_path):
    torch.manual_seed(0)
    (tmp_path / "policy.npz").write_bytes(policy_bytes(CandidateNetwork(len(FEATURES), 8), {}))
    ga = GeneticAlgorithm(policy=str(tmp_path / "policy.npz"))
    objective, priced = Objective(load_problem(), Budget(evaluations=300)), []
    many = objective.many
    objective.many = lambda codes, *limit: priced.extend(code.tobytes() for code in codes) or many(codes, *limit)
    other = Objective(load_problem())
    first = ga.proposed(other, np.random.default_rng(7))
    assert len(first) == ga.population
    with pytest.raises(BudgetExhausted):
        ga.search(objective.problem, objective, np.random.default_rng(7))
    proposed = priced[: other.evaluations]
    assert {plan.code.tobytes() for plan in first} <= set(proposed)
    assert not set(proposed) & set(priced[other.evaluations : other.evaluations + ga.population])
    assert objective.evaluations == 300
    assert objective.best_s <= other.best_s


@pytest.mark.parametrize("relief", [0.0, 0.3, 0.8])
def test_relief_gets_its_share_of_the_evaluations(relief, monkeypatch):
    spent = []
    relieve = GeneticAlgorithm._relieve

    def watched(self, parents, objective):
        before = objective.evaluations
        try:
            return relieve(self, parents, objective)
        finally:
            spent.append(objective.evaluations - before)

    monkeypatch.setattr(GeneticAlgorithm, "_relieve", watched)
    run_search(GeneticAlgorithm(relief=relief), load_problem(), Budget(evaluations=4000), seed=0)
    assert sum(spent) / 4000 == pytest.approx(relief, abs=0.1)


def test_relief_puts_the_better_plan_in_the_place_of_the_one_relieved():
    objective = Objective(load_problem())
    codes = objective.space.draws(np.random.default_rng(0), 20)
    ga = GeneticAlgorithm()
    parents = ga._evaluated(codes, objective)
    before = parents[0]
    assert all(before.fitness >= other.fitness for other in parents)
    while not before.relieved:
        ga._relieve(parents, objective)
    assert len(parents) == 20
    assert parents[0] is before or parents[0].fitness > before.fitness
    for _ in range(1000):
        if not ga._relieve(parents, objective):
            break
    assert all(parent.relieved for parent in parents)  # all are local optima
    assert max(parent.fitness for parent in parents) > before.fitness


def test_an_individual_keeps_its_class_when_pickled():
    space = Objective(load_problem()).space
    individual = Individual(space.draws(np.random.default_rng(0), 1)[0], (False, 0, 1.5))
    copy = pickle.loads(pickle.dumps(individual))
    assert isinstance(copy, Individual)
    assert (copy.code == individual.code).all()
    assert copy.fitness.values == individual.fitness.values


def test_fitness_is_the_rank_in_its_order():
    assert Individual(np.zeros(4), (False, 0, 9.0)).fitness > Individual(np.zeros(4), (True, 5, 1.0)).fitness


def test_a_space_of_one_plan_is_searched_to_the_end_of_the_budget():
    spec = SpaceSpec(num_microbatches=(2,), max_stages=1, max_tp=1, group_sizes=(4,), recompute=("none",))
    for layers in (1, 4):
        target = problem((group("only"),), {"num_layers": layers})
        result = run_search(GeneticAlgorithm(population=1), target, Budget(evaluations=50), space=spec)
        assert (result.evaluations, len(result.plan.stages)) == (50, 1)


@pytest.mark.parametrize("values", [
    {"relief": 1.5}, {"regular": -1}, {"patience": 0}, {"population": 1.5}, {"policy": 5},
])  # fmt: skip
def test_bad_settings_are_refused(values):
    with pytest.raises(InputError, match="search=ga"):
        GeneticAlgorithm(**values)
