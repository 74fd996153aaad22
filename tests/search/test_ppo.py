"""The modes of `+search=ppo`: from scratch, and what a trained policy is used for."""

import numpy as np
import pytest
import torch

from haap_envs.batched import ConstructVecEnv
from haap_rl.problem.errors import InputError
from haap_rl.problem.presets import load_problem
from haap_rl.search.base import (
    Budget,
    BudgetExhausted,
    Objective,
    load_searcher,
    run_search,
)
from haap_rl.search.candidate_policy import CandidateNetwork, load_policy, policy_bytes
from haap_rl.search.ppo import PPO
from haap_rl.search.proposals import Proposals, drawn, likeliest
from haap_rl.space.construction import FEATURES
from haap_rl.space.options import SpaceSpec
from tests.builders import group, problem, room

SPEC = SpaceSpec(num_microbatches=(2, 4, 8), max_stages=5, max_tp=4, group_sizes=(1, 2, 4, 8))


def target():
    groups = [
        group("fast", per_node=4, memory_gb=room(3.0)),
        group("slow", nodes=2, per_node=4, memory_gb=room(1.2), tflops=40.0),
    ]
    return problem(groups, {"num_layers": 7}, global_batch_size=16, seq_len=1024)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """The file of an untrained network."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("policy") / "policy.npz"
    path.write_bytes(policy_bytes(CandidateNetwork(len(FEATURES), 16), {}))
    return str(path)


def search(evaluations, seed=0, **settings):
    return run_search(PPO(**settings), target(), Budget(evaluations), seed, SPEC)


@pytest.mark.parametrize("mode", ["propose", "polish", "train"])
def test_a_policy_is_used_within_the_budget_and_equally_each_time(policy, mode):
    first, second = (search(300, policy=policy, mode=mode) for _ in range(2))
    assert first.trace == second.trace
    assert first.evaluations == 300
    assert first.plan is not None
    assert ("policy.zip" in first.artifacts) == (mode == "train")


def test_the_first_plans_are_the_likeliest_at_every_number_of_microbatches(policy):
    """A budget of less than a batch is the policy's: every mode begins alike, and none prices a plan twice."""
    objective = Objective(target(), space=SPEC)
    proposals = Proposals(objective, PPO(policy=policy).network, np.random.default_rng(0))
    proposals.first()
    assert objective.evaluations == 3
    np.testing.assert_array_equal(proposals.codes, likeliest(objective, proposals.network, np.arange(3)))
    assert proposals.codes[:, 0].tolist() == [0, 1, 2]
    for _ in range(3):
        proposals.more(20)
    assert len(np.unique(proposals.codes, axis=0)) == len(proposals.codes) == objective.evaluations
    assert proposals.best_s == pytest.approx(objective.best_s)
    best = {mode: search(3, policy=policy, mode=mode).estimate.iteration_s for mode in ("propose", "polish", "train")}
    assert len(set(best.values())) == 1


def test_polishing_is_never_worse_than_proposing(policy):
    for budget in (3, 50, 93, 400):
        proposed, polished = (search(budget, policy=policy, mode=mode) for mode in ("propose", "polish"))
        assert polished.estimate.iteration_s <= proposed.estimate.iteration_s * (1 if budget <= 93 else 1.02)


def test_a_policy_that_has_nothing_new_to_say_ends_no_search():
    tiny = SpaceSpec(num_microbatches=(8,), max_stages=1, max_tp=1, group_sizes=(1,), recompute=("none",))
    objective = Objective(problem((group("one", per_node=1),)), Budget(50), tiny)
    proposals = Proposals(objective, CandidateNetwork(len(FEATURES), 8), np.random.default_rng(0))
    proposals.first()
    assert proposals.more() == 0


def test_from_scratch_it_learns():
    """Ten times the evaluations of random draws do not reach what it reaches."""
    learnt = [search(1500, seed).estimate.iteration_s for seed in range(2)]
    objective = Objective(target(), Budget(1500), SPEC)
    random_s = float(objective.many(objective.space.draws(np.random.default_rng(0), 1500)).iteration_s.min())
    assert max(learnt) <= random_s


def test_a_new_policy_is_trained_after_a_cycle():
    result = search(400, cycle=150, num_envs=8)
    assert result.evaluations == 400


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "polish"}, "mode=polish needs a policy; add search.policy=pretrained"),
        ({"mode": "fast"}, "mode='fast' is not known; choose one of train, propose, polish"),
        ({"policy": 3}, "policy=3 must be pretrained or the path"),
        ({"policy": "nowhere.npz"}, "there is no such file"),
        ({"cycle": -1}, "cycle=-1 must be"),
        ({"hidden": 10**9}, "hidden=1000000000 must be at most 4096"),
        ({"num_envs": 10**12}, "num_envs=1000000000000 must be at most 10000"),
    ],
)
def test_bad_settings_are_one_line(settings, message):
    with pytest.raises(InputError, match=message):
        PPO(**settings)


def test_a_budget_too_small_for_a_rollout_still_gives_plans(policy):
    assert search(1).plan is not None
    assert search(1, policy=policy).plan is not None
    with pytest.raises(BudgetExhausted):
        PPO(num_envs=4).search(target(), Objective(target(), Budget(1), SPEC), np.random.default_rng(0))


def test_the_shipped_policy_plans_a_problem_it_never_saw_at_once():
    """A dozen plans of it are better than ten times as many random ones, on every number of stages and types."""
    network, facts = load_policy("pretrained")
    assert facts["training_instances"] > 0
    assert sum(parameter.numel() for parameter in network.parameters()) * 4 < 400_000  # bytes
    problem_ = load_problem()
    proposed = run_search(PPO(policy="pretrained", mode="propose"), problem_, Budget(12), 0)
    drawn = run_search(load_searcher("random"), problem_, Budget(120), 0)
    assert proposed.estimate.iteration_s < drawn.estimate.iteration_s
    polished = run_search(PPO(policy="pretrained"), problem_, Budget(1000), 0)
    assert polished.estimate.iteration_s <= 1.01 * 5.8518692


def test_plans_are_drawn_as_often_as_the_policy_would(policy):
    """Against playing single episodes in the environment, by the policy's own probabilities."""
    objective, network = Objective(target(), space=SPEC), PPO(policy=policy).network
    rows, often = drawn(objective, network, np.array([1]), np.array([4000]), 1.0, np.random.default_rng(0))
    assert often.sum() == 4000
    assert len(np.unique(rows, axis=0)) == len(rows)
    environments = ConstructVecEnv([objective], 500)
    environments.set_options({"num_microbatches": 4})
    seen, rng, lengths, stages = environments.reset(), np.random.default_rng(1), [], np.zeros(500, int)
    waiting = np.ones(500, bool)  # for the end of their first episode
    while waiting.any():
        with torch.no_grad():
            chances = torch.softmax(network(torch.from_numpy(seen))[0], 1).double().numpy()
        actions = (chances.cumsum(1) > rng.random((500, 1)) * chances.sum(1, keepdims=True)).argmax(1)
        seen, _, done, _ = environments.step(actions)
        lengths += stages[done & waiting].tolist()
        waiting &= ~done
        stages += 1
    shares = np.bincount(lengths, minlength=6) / len(lengths)
    np.testing.assert_allclose(np.bincount(rows[:, 1], often, minlength=6) / 4000, shares, atol=0.07)
