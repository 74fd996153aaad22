"""haap_rl/Partition-v0: both checkers, masks, rewards that telescope, one evaluation per step, budgets that end it."""

import copy
import math
import subprocess
import sys
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from haap_rl.cost.estimator import Estimator
from haap_rl.problem.presets import load_problem
from haap_rl.search.base import Budget, BudgetExhausted, Objective
from haap_rl.space import move_features, moves
from haap_rl.space.options import SpaceSpec
from tests.builders import group, problem, room, three_groups

ID = "haap_envs:haap_rl/Partition-v0"


def make(**settings):
    return gym.make(ID, **settings)


def walk(environment, seed, steps):
    """Uniformly random legal moves; yields (action, observation, reward, truncated, info)."""
    rng = np.random.default_rng(seed)
    environment.reset(seed=seed)
    for _ in range(steps):
        mask = environment.unwrapped.action_masks()
        action = int(rng.choice(np.flatnonzero(mask)))
        observation, reward, terminated, truncated, info = environment.step(action)
        assert not terminated
        yield action, observation, reward, truncated, info
        if truncated:
            environment.reset()


@pytest.mark.parametrize("memory_aware", [True, False])
def test_both_checkers_pass(memory_aware):
    from stable_baselines3.common.env_checker import check_env as sb3_check_env

    environment = make(space=SpaceSpec(memory_aware_init=memory_aware))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*unconventional shape")  # a table, for policies that score its rows
        check_env(environment.unwrapped)
        sb3_check_env(environment.unwrapped)


def test_the_module_qualified_id_needs_no_import_and_the_plain_one_the_package():
    code = "import gymnasium; gymnasium.make('haap_envs:haap_rl/Partition-v0'); gymnasium.make('haap_rl/Partition-v0')"
    subprocess.run([sys.executable, "-c", code], check=True)
    subprocess.run([sys.executable, "-c", f"import haap_envs; {code.split(';')[0]}; {code.split(';')[2]}"], check=True)


def test_legal_actions_change_the_plan_and_keep_it_in_memory():
    environment = make(problem=load_problem("gpt3_1_3b", "v100x4_t4x4"))
    for _action, observation, _, _, info in walk(environment, 0, 100):
        assert info["fits"]
        assert environment.observation_space.contains(observation)


def test_an_episode_ends_after_max_moves_and_its_return_is_the_log_speed_up():
    environment = make(max_moves=12)
    environment.reset(seed=5)
    start = environment.unwrapped.estimate.iteration_s
    total = 0.0
    times = []
    for count, (_, _, reward, truncated, info) in enumerate(walk(environment, 5, 12), 1):
        total += reward
        times.append(info["iteration_time_s"])
        assert truncated == (count == 12)
    assert total == pytest.approx(math.log(start / times[-1]))


def test_each_reset_and_each_legal_step_is_one_evaluation():
    objective = Objective(load_problem())
    environment = make(objective=objective)
    environment.reset(seed=0)
    assert objective.evaluations == 1
    mask = environment.unwrapped.action_masks()
    environment.step(int(np.flatnonzero(mask)[0]))
    assert objective.evaluations == 2
    illegal = int(np.flatnonzero(~environment.unwrapped.action_masks())[0])
    _, reward, *_ = environment.step(illegal)
    assert objective.evaluations == 2
    assert reward < 0


def test_masks_agree_with_what_a_step_does():
    environment = make()
    for _ in walk(environment, 1, 5):
        base = environment.unwrapped
        mask, genome = base.action_masks(), base.genome
        assert mask.any()
        for action in range(0, len(mask), 7):
            probe = copy.copy(base)
            probe.step(action)
            assert (probe.genome != genome) == (mask[action] and action != len(mask) - 1)


TIED = {"tied_embeddings": True}
SMALL = {"num_microbatches": (2, 4, 8), "max_stages": 5, "max_tp": 4, "group_sizes": (1, 2, 4, 8)}


def six_and_ten():
    """Nodes of 6 and of 10 devices, which stages of 3 and of 5 straddle."""
    groups = [
        group("six", nodes=2, per_node=6, memory_gb=room(2.4)),
        group("ten", per_node=10, memory_gb=room(1.6), tflops=50.0),
    ]
    return problem(groups, {"num_layers": 9, "heads": 30, "kv_heads": 30}, global_batch_size=60, seq_len=1020)


ODD = {"num_microbatches": (3, 5, 6, 10, 12), "max_stages": 6, "max_tp": 6, "group_sizes": (1, 2, 3, 5, 6, 10)}
SPACES = {
    "default": (load_problem, SpaceSpec()),
    "three groups": (lambda: three_groups(TIED), SpaceSpec(**SMALL)),
    "mixed stages": (lambda: three_groups(TIED), SpaceSpec(**SMALL, mixed_stages=True)),
    "straddled nodes": (six_and_ten, SpaceSpec(**ODD)),
    "memory ignored": (lambda: three_groups(TIED), SpaceSpec(**SMALL, memory_aware_init=False)),
}


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("name", SPACES)
def test_an_episode_is_what_the_readable_estimator_and_moves_say(name, cached):
    make_problem, spec = SPACES[name]
    target = make_problem()
    objective = Objective(target, space=spec, cached=cached)
    environment = make(objective=objective, max_moves=20).unwrapped
    space, price = environment.space, Estimator(target)
    rng = np.random.default_rng(2)
    mixed = 0
    for seed in range(3):
        observation, info = environment.reset(seed=seed)
        estimate = price(space.plan(environment.genome))
        first_s = estimate.iteration_s
        for moves_left in range(20, -1, -1):
            assert info == {"iteration_time_s": estimate.iteration_s, "fits": estimate.fits}
            speed_up = first_s / estimate.iteration_s
            expected = move_features.rows(
                space, environment.genome, environment.moves, lambda g: price(space.plan(g)), moves_left / 20, speed_up
            )
            np.testing.assert_allclose(observation, expected, rtol=0, atol=1e-6)
            mask = environment.action_masks()
            assert mask.tolist() == (observation[:, 0] == 1).tolist()
            assert mask[:-1].tolist() == [moves.is_legal(space, environment.genome, move) for move in environment.moves]
            if moves_left:
                action = int(rng.choice(np.flatnonzero(mask)))
                after = moves.apply(space, environment.genome, environment.moves[action])
                observation, reward, _, _, info = environment.step(action)
                assert environment.genome == after
                before, estimate = estimate, price(space.plan(after))
                assert reward == pytest.approx(before.energy - estimate.energy, rel=0, abs=1e-12)
                mixed += any(space.options[k].partner is not None for k in after.options)
    assert (mixed > 0) == (name == "mixed stages")
    assert objective.evaluations == 63


@pytest.mark.parametrize("name", SPACES)
def test_a_compiled_explanation_is_the_readable_one(name):
    make_problem, spec = SPACES[name]
    target = make_problem()
    compiled, readable = (Objective(target, space=spec, cached=cached) for cached in (True, False))
    for code in compiled.space.draws(np.random.default_rng(5), 40 if name != "default" else 10):
        found, expected = compiled.explain(code), readable.explain(code)
        for values, others in zip(found.prices, expected.prices, strict=True):
            assert values.tolist() == others.tolist()
        assert (found.iteration_s, found.fits, found.energy) == (expected.iteration_s, expected.fits, expected.energy)
        for values, others in zip(found[1:], expected[1:], strict=True):
            np.testing.assert_allclose(values, others, rtol=1e-12, atol=1e-15)
    assert compiled.evaluations == readable.evaluations
    assert compiled.best_rank == readable.best_rank
    counted = [(point.evaluations, point.best_iteration_time_s) for point in compiled.trace]
    assert counted == [(point.evaluations, point.best_iteration_time_s) for point in readable.trace]
    for counter in ("operators_requested", "operators_distinct"):
        assert getattr(compiled.estimator, counter) == getattr(readable.estimator, counter)


def test_something_is_legal_even_where_no_move_is():
    lonely = problem((group("one", per_node=1, memory_gb=40.0),), {"num_layers": 1})
    spec = SpaceSpec(num_microbatches=(8,), max_stages=1, max_tp=1, group_sizes=(1,), recompute=("none",))
    environment = make(problem=lonely, space=spec)
    environment.reset(seed=0)
    mask = environment.unwrapped.action_masks()
    assert mask.sum() == 1
    assert mask[-1]
    _, reward, *_ = environment.step(len(mask) - 1)
    assert reward == 0


def test_looking_at_moves_is_no_evaluation_and_an_observation_is_the_callers_own():
    objective = Objective(load_problem())
    environment = make(objective=objective).unwrapped
    observation, _ = environment.reset(seed=0)
    mask = environment.action_masks()
    observation[:] = 0
    assert environment.action_masks().tolist() == mask.tolist()
    assert mask.sum() > 1
    assert objective.evaluations == 1


def test_same_seed_same_episode():
    first = [(action, reward) for action, _, reward, _, _ in walk(make(), 3, 40)]
    assert first == [(action, reward) for action, _, reward, _, _ in walk(make(), 3, 40)]
    assert first != [(action, reward) for action, _, reward, _, _ in walk(make(), 4, 40)]


def test_a_spent_budget_passes_through():
    environment = make(objective=Objective(load_problem(), Budget(evaluations=1)))
    environment.reset(seed=0)
    legal = int(np.flatnonzero(environment.unwrapped.action_masks())[0])
    with pytest.raises(BudgetExhausted):
        environment.step(legal)


def test_an_objective_is_shared_not_copied():
    objective = Objective(load_problem())
    environment = make(objective=objective)
    assert environment.unwrapped.objective is objective
    assert copy.deepcopy(objective) is objective


def test_reset_to_a_given_plan():
    environment = make()
    environment.reset(seed=0)
    base = environment.unwrapped
    plan = base.space.plan(base.genome)
    other = make()
    _, info = other.reset(seed=1, options={"plan": plan})
    assert info["iteration_time_s"] == base.estimate.iteration_s


def test_without_memory_awareness_a_plan_that_does_not_fit_is_penalised():
    environment = make(space=SpaceSpec(memory_aware_init=False), max_moves=500)
    environment.reset(seed=0)
    before = environment.unwrapped.estimate
    crossings = 0
    for _, _, reward, _, info in walk(environment, 0, 200):
        if before.fits and not info["fits"]:
            crossings += 1
            assert reward < math.log(before.iteration_s / info["iteration_time_s"]) - 1
        before = environment.unwrapped.estimate
    assert crossings > 0
