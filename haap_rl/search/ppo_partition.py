"""Reinforcement learning that edits plans: MaskablePPO from scratch in `haap_rl/Partition-v0`.

The same policy as `ppo.py`, over what each move would make of the plan (`space.move_features`). Its greedy choice by
those features is bottleneck relief; learning has to find out which relief pays. `ppo.py`, which builds plans, is
ahead in the first hundred plans, this one later; docs/policy.md has both.
"""

from __future__ import annotations

from haap_envs.batched import BatchedEnv, PartitionVecEnv
from haap_rl.problem.errors import positive_int
from haap_rl.search.base import Objective
from haap_rl.search.ppo import PPO


class PartitionPPO(PPO):
    """As `PPO` trained from scratch, in the other environment.

    max_moves   moves per episode
    """

    def __init__(
        self,
        num_envs: int = 16,
        num_steps: int = 8,
        max_moves: int = 32,
        learning_rate: float = 3e-3,
        gamma: float = 0.3,
        gae_lambda: float = 0.95,
        num_epochs: int = 4,
        batch_size: int = 64,
        clip_range: float = 0.2,
        entropy: float = 0.01,
        hidden: int = 64,
        cycle: int = 0,
    ) -> None:
        super().__init__(
            num_envs=num_envs,
            num_steps=num_steps,
            learning_rate=learning_rate,
            gamma=gamma,
            gae_lambda=gae_lambda,
            num_epochs=num_epochs,
            batch_size=batch_size,
            clip_range=clip_range,
            entropy=entropy,
            hidden=hidden,
            cycle=cycle,
        )
        self.max_moves = positive_int("search=ppo_partition", "max_moves", max_moves)

    def environments(self, objective: Objective) -> BatchedEnv:
        return PartitionVecEnv(objective, self.num_envs, self.max_moves)
