"""Reinforcement learning: MaskablePPO (sb3-contrib) edits plans in `haap_rl/Partition-v0`, from scratch on one problem.

The environment is taken by its module-qualified id, so nothing here imports upwards.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from sb3_contrib import MaskablePPO
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

from haap_rl.problem.errors import positive_float, positive_int, share
from haap_rl.problem.plan import Problem
from haap_rl.search.base import Objective, seeded_global_random

ENVIRONMENT = "haap_envs:haap_rl/Partition-v0"


class ObjectiveWriter(KVWriter):
    """Passes the figures that Stable-Baselines3 logs (train/*, rollout/*, time/*) on to the objective."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        values = {key: float(value) for key, value in key_values.items() if isinstance(value, int | float | np.number)}
        self._objective.log(values)

    def close(self) -> None:
        pass


class PPO:
    """Proximal policy optimisation (Schulman et al. 2017) with invalid-action masking (Huang, Ontanon 2022).

    num_envs       environments stepped side by side
    num_steps      moves per environment between two updates (fewer where the budget is small)
    max_moves      moves per episode
    learning_rate, gamma, gae_lambda, num_epochs, batch_size, clip_range, entropy   as in Stable-Baselines3
    hidden         units of each of the two hidden layers, policy and value network each

    The trained model is kept as the artifact policy.zip, for `MaskablePPO.load`.
    """

    def __init__(
        self,
        num_envs: int = 8,
        num_steps: int = 16,
        max_moves: int = 32,
        learning_rate: float = 3e-3,
        gamma: float = 0.3,
        gae_lambda: float = 0.95,
        num_epochs: int = 10,
        batch_size: int = 64,
        clip_range: float = 0.2,
        entropy: float = 0.01,
        hidden: int = 64,
    ) -> None:
        where = "search=ppo"
        self.num_envs = positive_int(where, "num_envs", num_envs)
        self.num_steps = positive_int(where, "num_steps", num_steps)
        self.max_moves = positive_int(where, "max_moves", max_moves)
        self.hidden = positive_int(where, "hidden", hidden)
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
        def make() -> gym.Env[Any, Any]:
            return gym.make(
                ENVIRONMENT,
                problem=problem,
                objective=objective,
                max_moves=self.max_moves,
                disable_env_checker=True,
            )

        self._model = None
        num_steps = self.num_steps
        if objective.remaining is not None:  # at least four updates, or PPO would only ever act at random
            num_steps = max(2, min(num_steps, objective.remaining // (4 * self.num_envs)))
        with seeded_global_random(rng) as seed:
            environments = VecMonitor(DummyVecEnv([make] * self.num_envs))  # which sums the rewards for rollout/*
            settings = {**self._settings, "batch_size": min(self._settings["batch_size"], num_steps * self.num_envs)}
            self._model = MaskablePPO(
                "MlpPolicy",
                environments,
                n_steps=num_steps,
                policy_kwargs={"net_arch": [self.hidden, self.hidden], "activation_fn": torch.nn.Tanh},
                seed=seed,
                device="cpu",
                **settings,
            )
            self._model.set_logger(Logger(folder=None, output_formats=[ObjectiveWriter(objective)]))
            self._model.learn(total_timesteps=10**12)  # the objective ends it

    def artifacts(self) -> Mapping[str, bytes]:
        """policy.zip: the model as it was when the search ended; nothing if that was before there was one."""
        if self._model is None:
            return {}
        file = io.BytesIO()
        self._model.save(file)
        return {"policy.zip": file.getvalue()}
