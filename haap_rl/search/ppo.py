"""Reinforcement learning: MaskablePPO (sb3-contrib) with a policy that scores candidates builds plans stage by stage.

    +search=ppo                             trains from scratch on this problem, in haap_rl/Construct-v0
    +search=ppo search.policy=pretrained    a policy trained on other problems proposes plans, relief polishes them

The trained policy (`python -m haap_rl.train_policy`, or the shipped one) can also propose only, or go on training on
this problem.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from sb3_contrib import MaskablePPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.vec_env import VecMonitor

from haap_envs.batched import BatchedEnv, ConstructVecEnv, num_environments
from haap_rl.problem.errors import InputError, positive_float, positive_int, share
from haap_rl.problem.plan import Problem
from haap_rl.search.autohaap import AutoHAAP
from haap_rl.search.base import Objective, seeded_global_random
from haap_rl.search.candidate_policy import CandidateNetwork, CandidatePolicy, hidden_units, load_policy
from haap_rl.search.proposals import Proposals

MODES = ("train", "propose", "polish")
PROPOSED, RELIEVED = 2, 300  # batches of proposals and evaluations of relief in a round of polishing
SETTLED = 1500  # evaluations after which the policy has said most of what it knows


class Figures(KVWriter):
    """Passes the figures that Stable-Baselines3 logs (train/*, rollout/*, time/*) on to somebody."""

    def __init__(self, told: Callable[[Mapping[str, float]], None]) -> None:
        self._told = told

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        values = {key: float(value) for key, value in key_values.items() if isinstance(value, int | float | np.number)}
        self._told(values)

    def close(self) -> None:
        pass


class Until(BaseCallback):
    """Ends a training after so many evaluations; 0: never."""

    def __init__(self, objective: Objective, evaluations: int) -> None:
        super().__init__()
        self._objective, self._until = objective, objective.evaluations + (evaluations or 10**18)

    def _on_step(self) -> bool:
        return self._objective.evaluations < self._until


class PPO:
    """Proximal policy optimisation (Schulman et al. 2017) with invalid-action masking (Huang, Ontanon 2022).

    policy         null: train from scratch; `pretrained` or a file of `train_policy`: start from that policy
    mode           train     PPO on this problem, from scratch or from `policy`
                   propose   only plans of `policy`: the most likely ones, then others drawn from it
                   polish    the same, and bottleneck relief from the best of them
                   null: polish with a policy, train without one
    num_envs       plans built side by side
    num_steps      choices per plan between two updates (fewer where the budget is small)
    learning_rate, gamma, gae_lambda, num_epochs, batch_size, clip_range, entropy   as in Stable-Baselines3
    hidden         units of the network's layers, where it is trained from scratch
    cycle          evaluations after which a new policy is trained, since one that has settled finds nothing new (0:
                   never)

    A model that was trained is kept as the artifact policy.zip, for `MaskablePPO.load`.
    """

    def __init__(
        self,
        policy: str | None = None,
        mode: str | None = None,
        num_envs: int = 64,
        num_steps: int = 8,
        learning_rate: float = 3e-3,
        gamma: float = 1.0,
        gae_lambda: float = 0.95,
        num_epochs: int = 4,
        batch_size: int = 128,
        clip_range: float = 0.2,
        entropy: float = 0.01,
        hidden: int = 64,
        cycle: int = 2500,
    ) -> None:
        where = "search=ppo"
        self.mode = mode or ("train" if policy is None else "polish")
        if self.mode not in MODES:
            raise InputError(f"{where}: mode={mode!r} is not known; choose one of {', '.join(MODES)}, or null")
        if policy is None and self.mode != "train":
            raise InputError(f"{where}: mode={mode} needs a policy; add search.policy=pretrained, or use mode=train")
        if policy is not None and not isinstance(policy, str):
            raise InputError(f"{where}: policy={policy!r} must be pretrained or the path of a policy file")
        self.network = None if policy is None else load_policy(policy)[0]
        self.num_envs = num_environments(where, num_envs)
        self.num_steps = positive_int(where, "num_steps", num_steps)
        self.hidden = hidden_units(where, hidden) if self.network is None else self.network.hidden
        self.cycle = cycle if cycle == 0 and type(cycle) is int else positive_int(where, "cycle", cycle)
        self._model: MaskablePPO | None = None
        self._settings: dict[str, Any] = {
            "learning_rate": positive_float(where, "learning_rate", learning_rate),
            "gamma": share(where, "gamma", gamma),
            "gae_lambda": share(where, "gae_lambda", gae_lambda),
            "n_epochs": positive_int(where, "num_epochs", num_epochs),
            "batch_size": positive_int(where, "batch_size", batch_size),
            "clip_range": positive_float(where, "clip_range", clip_range),
            "ent_coef": share(where, "entropy", entropy),
        }
        # torch imports a second's worth of modules at its first optimiser: better now than on the search's clock
        torch.optim.Adam([torch.zeros(1, requires_grad=True)])

    def search(self, problem: Problem, objective: Objective, rng: np.random.Generator) -> None:
        self._model = None
        with seeded_global_random(rng) as seed:
            if self.mode == "train":
                self._train(objective, seed, rng)
                return
            assert self.network is not None
            proposals = Proposals(objective, self.network, rng)
            proposals.first()
            if self.mode == "polish":
                polish(proposals, rng)
            while proposals.more():
                pass
            while True:  # the policy has nothing new to say
                objective.many(objective.space.draws(rng, self.num_envs))

    # ------------------------------------------------------------------------------- training on one problem
    def environments(self, objective: Objective) -> BatchedEnv:
        """What the policy is trained in."""
        return ConstructVecEnv([objective], self.num_envs)

    def _train(self, objective: Objective, seed: int, rng: np.random.Generator) -> None:
        if self.network is not None:  # what it can do already comes first
            Proposals(objective, self.network, rng).first()
        num_steps = self.num_steps
        if objective.remaining is not None:  # some twenty updates, or PPO would hardly learn anything
            num_steps = max(2, min(num_steps, objective.remaining * 8 // (20 * self.num_envs)))
        settings = {**self._settings, "batch_size": min(self._settings["batch_size"], num_steps * self.num_envs)}
        environments = VecMonitor(self.environments(objective))  # which sums the rewards for rollout/*
        for attempt in itertools.count():
            trained = self._model = model(
                environments, seed + attempt, n_steps=num_steps, policy_kwargs={"hidden": self.hidden}, **settings
            )
            if self.network is not None:
                network: CandidateNetwork = trained.policy.network  # type: ignore[assignment]
                network.load_state_dict(self.network.state_dict())
            trained.set_logger(Logger(folder=None, output_formats=[Figures(objective.log)]))
            trained.learn(10**12, callback=Until(objective, self.cycle))  # or until the objective ends it

    def artifacts(self) -> Mapping[str, bytes]:
        """policy.zip: the model as it was when the search ended; nothing where none was trained."""
        if self._model is None:
            return {}
        file = io.BytesIO()
        self._model.save(file)
        return {"policy.zip": file.getvalue()}


def model(environments: Any, seed: int, **settings: Any) -> MaskablePPO:
    """MaskablePPO with the candidate-scoring policy on these environments."""
    return MaskablePPO(CandidatePolicy, environments, seed=seed, device="cpu", **settings)


def polish(proposals: Proposals, rng: np.random.Generator) -> None:
    """In turn more proposals and relief of the best new ones; beyond SETTLED evaluations AutoHAAP's own descents too.

    Ends by BudgetExhausted alone. The first batch of proposals is priced before anything is relieved, so that a small
    budget is all the policy's.
    """
    objective, relief = proposals.objective, AutoHAAP()
    proposals.more()
    while True:
        for _ in range(PROPOSED):
            proposals.more()
        relief.descend(objective, rng, most=RELIEVED, kept=proposals.take(relief.width))
        if objective.evaluations > SETTLED:
            relief.descend(objective, rng)
