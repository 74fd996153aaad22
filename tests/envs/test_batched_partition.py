"""The batched environment against single ones in a DummyVecEnv: equal in every value, step by step."""

import numpy as np
import pytest
from stable_baselines3.common.vec_env import DummyVecEnv

from haap_envs.batched import PartitionVecEnv
from haap_envs.partition import PartitionEnv
from haap_rl.problem.presets import load_problem
from haap_rl.search.base import Budget, BudgetExhausted, Objective
from haap_rl.space.options import SpaceSpec
from tests.builders import group, problem, three_groups

TIED = {"tied_embeddings": True}
SMALL = {"num_microbatches": (2, 4, 8), "max_stages": 5, "max_tp": 4, "group_sizes": (1, 2, 4, 8)}


def lonely():
    return problem((group("one", per_node=1, memory_gb=40.0),), {"num_layers": 1})


SPACES = {
    "default": (load_problem, SpaceSpec()),
    "mixed stages": (lambda: three_groups(TIED), SpaceSpec(**SMALL, mixed_stages=True)),
    "memory ignored": (lambda: three_groups(TIED), SpaceSpec(**SMALL, memory_aware_init=False)),
    "no move": (
        lonely,
        SpaceSpec(num_microbatches=(8,), max_stages=1, max_tp=1, group_sizes=(1,), recompute=("none",)),
    ),
}


def pair(name, n=4, max_moves=5, cached=True, **budget):
    """(batched, single ones, their objectives)."""
    make, spec = SPACES[name]
    limit = Budget(**budget) if budget else None
    ours, theirs = (Objective(make(), limit, spec, cached) for _ in range(2))
    batched = PartitionVecEnv(ours, n, max_moves)
    single = DummyVecEnv([lambda: PartitionEnv(objective=theirs, max_moves=max_moves)] * n)
    return batched, single, ours, theirs


def same_infos(found, wanted):
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert np.array_equal(ours[key], theirs[key]), key
            assert isinstance(ours[key], np.ndarray) or type(ours[key]) is type(theirs[key]), key


def chosen(masks, rng):
    """A legal action for most, any for some."""
    masks = np.array(masks)
    actions = (rng.random(masks.shape) * masks).argmax(1)
    return np.where(rng.random(len(masks)) < 0.2, rng.integers(masks.shape[1], size=len(masks)), actions)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("name", SPACES)
def test_every_step_is_that_of_single_environments(name, cached):
    batched, single, ours, theirs = pair(name, cached=cached)
    assert batched.observation_space == single.observation_space
    assert batched.action_space == single.action_space
    rng = np.random.default_rng(3)
    for seed in (11, None, 12):
        if seed is not None:
            batched.seed(seed)
            single.seed(seed)
        if seed is None:  # a reset without a seed goes on drawing
            assert [a.random() for a in batched.rngs] == [e.np_random.random() for e in single.envs]
        np.testing.assert_array_equal(batched.reset(), single.reset())
        same_infos(batched.reset_infos, single.reset_infos)
        for _ in range(17):
            masks = single.env_method("action_masks")
            np.testing.assert_array_equal(batched.env_method("action_masks"), masks)
            np.testing.assert_array_equal(batched.masks(), masks)
            actions = chosen(masks, rng)
            found, wanted = batched.step(actions), single.step(actions)
            for values, others in zip(found[:3], wanted[:3], strict=True):
                assert values.dtype == others.dtype
                np.testing.assert_array_equal(values, others)
            same_infos(found[3], wanted[3])
            same_infos(batched.reset_infos, single.reset_infos)
        assert ours.evaluations == theirs.evaluations
        assert ours.best_rank == theirs.best_rank


def test_observations_and_masks_are_the_callers_own():
    batched, _, ours, _ = pair("default")
    first = batched.reset()
    kept, masks = first.copy(), batched.masks()
    second, *_ = batched.step(masks.argmax(1))
    np.testing.assert_array_equal(first, kept)
    legal = batched.masks()
    second[:] = 0
    batched.masks()[:] = False
    np.testing.assert_array_equal(batched.masks(), legal)
    assert ours.evaluations == 8


def test_an_episode_can_begin_with_a_given_plan_the_next_one_does_not():
    batched, single, ours, _ = pair("mixed stages", max_moves=2)
    plan = ours.space.plan(ours.space.draw(np.random.default_rng(5)))
    for environments in (batched, single):
        environments.seed(1)
        environments.set_options([{"plan": plan}, {}, {}, {"plan": plan}])
    np.testing.assert_array_equal(batched.reset(), single.reset())
    assert batched.reset_infos[0] == batched.reset_infos[3] == single.reset_infos[0]
    for _ in range(3):
        actions = batched.masks().argmax(1)
        np.testing.assert_array_equal(batched.step(actions)[0], single.step(actions)[0])


def walk(environments):
    environments.seed(0)
    environments.reset()
    while True:
        environments.step(np.array([mask.argmax() for mask in environments.env_method("action_masks")]))


@pytest.mark.parametrize("evaluations", [2, 6, 9, 21, 25])
def test_a_spent_budget_passes_through_reset_and_step(evaluations):
    batched, single, ours, theirs = pair("default", evaluations=evaluations)
    for environments, objective in ((batched, ours), (single, theirs)):
        with pytest.raises(BudgetExhausted):
            walk(environments)
        assert objective.evaluations == evaluations


def test_illegal_actions_cost_no_evaluation_even_where_none_is_left():
    batched, _, ours, _ = pair("default", max_moves=3, evaluations=4)
    batched.reset()
    illegal = (~batched.masks()).argmax(1)
    _, rewards, dones, _ = batched.step(illegal)
    assert (rewards < 0).all()
    assert not dones.any()
    assert ours.evaluations == 4


def test_maskable_ppo_learns_on_it():
    from sb3_contrib import MaskablePPO

    batched, _, ours, _ = pair("mixed stages", max_moves=8)
    MaskablePPO("MlpPolicy", batched, n_steps=8, batch_size=16, n_epochs=1, seed=0, device="cpu").learn(64)
    assert ours.evaluations == 4 + 64 + 2 * 4
