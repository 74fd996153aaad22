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

from haap_rl.problem.presets import load_problem
from haap_rl.search.base import Budget, BudgetExhausted, Objective
from haap_rl.space.options import SpaceSpec

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


def test_something_is_legal_even_where_no_move_is():
    from tests.builders import group, problem

    lonely = problem((group("one", per_node=1, memory_gb=40.0),), {"num_layers": 1})
    spec = SpaceSpec(num_microbatches=(8,), max_stages=1, max_tp=1, group_sizes=(1,), recompute=("none",))
    environment = make(problem=lonely, space=spec)
    environment.reset(seed=0)
    mask = environment.unwrapped.action_masks()
    assert mask.sum() == 1
    assert mask[-1]
    _, reward, *_ = environment.step(len(mask) - 1)
    assert reward == 0


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
