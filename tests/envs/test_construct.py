"""`haap_rl/Construct-v0`, one at a time and batched on the kernels, which must be equal step by step."""

import math

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env as check_gymnasium
from stable_baselines3.common.env_checker import check_env as check_sb3
from stable_baselines3.common.vec_env import DummyVecEnv

from haap_envs.batched import ConstructVecEnv
from haap_envs.construct import ILLEGAL_REWARD, ConstructEnv, Problems
from haap_rl.problem.errors import InputError
from haap_rl.problem.presets import load_problem
from haap_rl.search.base import Budget, BudgetExhausted, Objective
from haap_rl.space.options import SpaceSpec
from tests.builders import group, problem, three_groups

SMALL = {"num_microbatches": (2, 4, 8), "max_stages": 5, "max_tp": 4, "group_sizes": (1, 2, 4, 8)}
ROWS = 120


def objectives(name):
    if name == "one problem":
        return [Objective(load_problem())], None
    if name == "uncached":
        return [Objective(three_groups(), space=SpaceSpec(**SMALL), cached=False)], None
    if name == "memory ignored":
        return [Objective(three_groups(), space=SpaceSpec(**SMALL, memory_aware_init=False))], None
    return Problems([three_groups(), problem(), problem((group("one"),))], SpaceSpec(**SMALL)), ROWS


@pytest.mark.filterwarnings("ignore:Your observation  has an unconventional shape")
def test_environment_checkers_pass():
    check_gymnasium(ConstructEnv(three_groups(), space=SpaceSpec(**SMALL)))
    check_sb3(ConstructEnv(three_groups(), space=SpaceSpec(**SMALL)))


def test_made_by_its_id():
    environment = gym.make("haap_envs:haap_rl/Construct-v0", problem=problem())
    observation, _ = environment.reset(seed=0)
    assert observation in environment.observation_space
    assert environment.get_wrapper_attr("action_masks")().any()


@pytest.mark.parametrize("name", ["one problem", "uncached", "memory ignored", "many problems"])
def test_every_step_is_that_of_single_environments(name):
    (ours, rows), (theirs, _) = objectives(name), objectives(name)
    n = 4
    batched = ConstructVecEnv(ours, n, rows)
    single = DummyVecEnv([lambda: ConstructEnv(objectives=theirs, num_candidates=rows)] * n)
    assert batched.observation_space == single.observation_space
    assert batched.action_space == single.action_space
    rng = np.random.default_rng(3)
    for seed in (11, None, 12):
        if seed is not None:
            batched.seed(seed)
            single.seed(seed)
        elif rows:  # a reset without a seed goes on drawing
            assert [a.random() for a in batched.rngs] == [e.np_random.random() for e in single.envs]
        np.testing.assert_allclose(batched.reset(), single.reset(), atol=2e-6)
        assert batched.reset_infos == single.reset_infos
        for _ in range(40):
            masks = np.stack(batched.env_method("action_masks"))
            np.testing.assert_array_equal(masks, np.stack(single.env_method("action_masks")))
            assert masks.any(1).all()
            actions = (rng.random(masks.shape) * masks).argmax(1)
            actions = np.where(rng.random(n) < 0.03, rng.integers(masks.shape[1], size=n), actions)
            found, wanted = batched.step(actions), single.step(actions)
            np.testing.assert_allclose(found[0], wanted[0], atol=2e-6)
            np.testing.assert_allclose(found[1], wanted[1], atol=1e-6)
            np.testing.assert_array_equal(found[2], wanted[2])
            for ours_, theirs_ in zip(found[3], wanted[3], strict=True):
                assert ours_.keys() == theirs_.keys()
                assert all(np.array_equal(ours_[key], theirs_[key]) for key in ours_)
    if not rows:
        assert ours[0].evaluations == theirs[0].evaluations > 0
        assert ours[0].best_s == theirs[0].best_s


def test_reward_is_the_log_of_ideal_over_real_time_and_an_episode_one_evaluation():
    objective = Objective(problem(), space=SpaceSpec(**SMALL))
    environment = ConstructEnv(objective=objective)
    _, rng = environment.reset(seed=0), np.random.default_rng(0)
    done, total = False, 0.0
    while not done:
        action = rng.choice(np.flatnonzero(environment.action_masks()))
        observation, reward, done, truncated, info = environment.step(action)
        total += reward
        assert not truncated
    assert objective.evaluations == 1
    assert not observation.any()
    assert info["iteration_time_s"] == objective.best_s
    assert total == pytest.approx(math.log(objective.space.construction.ideal_s / objective.best_s))


def test_an_illegal_choice_ends_the_episode_without_a_plan():
    environment = ConstructEnv(problem(), space=SpaceSpec(**SMALL))
    environment.reset(seed=0)
    illegal = int(np.flatnonzero(~environment.action_masks())[0])
    observation, reward, done, _, info = environment.step(illegal)
    assert (reward, done, info["fits"]) == (ILLEGAL_REWARD, True, False)
    assert not observation.any()
    assert environment.objective.evaluations == 0


def test_reset_takes_a_problem_and_a_number_of_microbatches():
    environment = ConstructEnv(problem(), space=SpaceSpec(**SMALL), num_candidates=ROWS)
    environment.reset(options={"problem": three_groups(), "num_microbatches": 4})
    assert environment.objective.problem == three_groups()
    assert environment.action_masks()[: len(environment.objective.space.options)].any()
    environment.reset()
    assert environment.objective.problem == problem()
    with pytest.raises(InputError, match="num_microbatches=5 is not one of"):
        environment.reset(options={"num_microbatches": 5})
    batched = ConstructVecEnv([Objective(problem(), space=SpaceSpec(**SMALL))], 2)
    batched.set_options([{"num_microbatches": 8}, {}])
    seen = batched.reset()
    assert seen[0, :, 1].max() == 0  # past the first decision
    assert seen[1, :, 1].max() == 1


def test_more_choices_than_the_buffer_are_refused_in_one_line():
    with pytest.raises(InputError, match=r"has \d+ choices per stage and the observation has room for 5; give num_can"):
        ConstructEnv(problem(), num_candidates=5)
    with pytest.raises(InputError, match="with several problems give num_candidates"):
        ConstructVecEnv(Problems([problem(), problem()]), 2)
    with pytest.raises(InputError, match="no problem is given"):
        Problems([])


def test_the_budget_ends_it():
    batched = ConstructVecEnv([Objective(problem(), Budget(3), SpaceSpec(**SMALL))], 4)
    batched.seed(0)
    batched.reset()
    rng = np.random.default_rng(0)

    def forever():
        while True:
            masks = batched.masks()
            batched.step((rng.random(masks.shape) * masks).argmax(1))

    with pytest.raises(BudgetExhausted):
        forever()
    assert batched.objectives[0].evaluations == 3
