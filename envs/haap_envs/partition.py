"""`haap_rl/Partition-v0`: edit a plan, one masked move at a time."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from haap_rl.cost.estimate import Estimate
from haap_rl.problem.plan import RECOMPUTE_MODES, Problem
from haap_rl.problem.presets import load_problem
from haap_rl.search.base import Objective
from haap_rl.space import moves
from haap_rl.space.options import SpaceSpec
from haap_rl.space.space import Genome

Observation = npt.NDArray[np.float32]
STAGE_FEATURES = 10  # besides one per device group
GLOBAL_FEATURES = 6  # besides one per device group
ILLEGAL_MOVE_REWARD = -0.05


class PartitionEnv(gym.Env[Observation, np.int64]):
    """Edit a plan so that its iteration gets shorter.

    ## Action Space
    `Discrete(n)`: the fixed list `moves.edits(space)` (shift a layer, change tp, devices, recompute, device group or
    micro-batches, swap, split, merge, insert, remove, balance, per stage where it applies), and last "stay".
    `action_masks()` says which are legal now: within the devices, within memory (where the space minds it) and not
    without effect; "stay" is legal only where nothing else is. An illegal action leaves the plan as it is.

    ## Observation Space
    `Box(0, 1, (n,), float32)`, ratios only, of the current plan and no other. Per possible stage, front to back, zero
    where there is none: presence, share of the layers, busy time over the slowest stage's, memory over capacity,
    log2 tp, log2 dp, recompute mode, share of busy time in communication, gradient sync over the iteration, layers
    over what memory allows, one-hot device group. Then: stages, log2 micro-batches, bubble, balance, moves left,
    iteration time over the episode's first (squashed), idle share of each device group.

    ## Rewards
    log(iteration time before / after), so an episode's return is the log of its total speed-up. A plan that does not
    fit counts as e^(1 + missing bytes / capacity) times slower; an illegal action gives -0.05.

    ## Starting State
    A plan drawn by the memory-aware initialisation from `np_random`, or `reset(options={"plan": plan})`.

    ## Episode End
    Truncated after `max_moves` moves; never terminated.

    ## Arguments
    problem     what to plan (default: Llama-3 8B on 8 A100 and 16 V100)
    objective   prices every plan, counts it, and raises BudgetExhausted through `step` and `reset` when its budget is
                spent (default: one of its own, unlimited)
    space       the declared space, where there is no `objective` to take it from
    max_moves   moves per episode
    Each reset and each step with a legal action is one evaluation.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own declaration

    def __init__(
        self,
        problem: Problem | None = None,
        objective: Objective | None = None,
        space: SpaceSpec | None = None,
        max_moves: int = 32,
    ) -> None:
        if objective is None:
            objective = Objective(problem or load_problem(), space=space)
        self.objective, self.space, self.max_moves = objective, objective.space, max_moves
        self.moves = moves.edits(self.space)
        self._stay = len(self.moves)
        groups = len(self.space.num_devices)
        size = self.space.max_stages * (STAGE_FEATURES + groups) + GLOBAL_FEATURES + groups
        self.action_space = gym.spaces.Discrete(len(self.moves) + 1)
        self.observation_space = gym.spaces.Box(0.0, 1.0, (size,), np.float32)
        self._moves_left = 0
        self._first_s = math.inf
        self.genome: Genome
        self.estimate: Estimate

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        plan = (options or {}).get("plan")
        self.genome = self.space.genome(plan) if plan is not None else self.space.draw(self.np_random)
        self.estimate = self.objective(self.space.plan(self.genome))
        self._moves_left, self._first_s = self.max_moves, self.estimate.iteration_s
        return self._observation(), self._info()

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        self._moves_left -= 1
        reward = ILLEGAL_MOVE_REWARD
        genome = None if action == self._stay else moves.apply(self.space, self.genome, self.moves[int(action)])
        if genome is not None:
            before = self.estimate.energy
            self.genome, self.estimate = genome, self.objective(self.space.plan(genome))
            reward = before - self.estimate.energy
        elif action == self._stay and self.action_masks()[self._stay]:
            reward = 0.0
        return self._observation(), reward, False, self._moves_left <= 0, self._info()

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """(n,) which actions are legal now; at least one always is."""
        legal = [moves.is_legal(self.space, self.genome, move) for move in self.moves]
        return np.array([*legal, not any(legal)])

    def _info(self) -> dict[str, Any]:
        return {"iteration_time_s": self.estimate.iteration_s, "fits": self.estimate.fits}

    def _observation(self) -> Observation:
        space, estimate = self.space, self.estimate
        m, options, layers = self.genome
        groups = len(space.num_devices)
        per_stage = np.zeros((space.max_stages, STAGE_FEATURES + groups), np.float32)
        slowest = max(stage.busy_s for stage in estimate.stages)
        caps = space.tables(m).caps(options)
        for i, (k, stage, memory) in enumerate(zip(options, estimate.stages, estimate.memory, strict=True)):
            option = space.options[k]
            per_stage[i, :STAGE_FEATURES] = (
                1.0,
                layers[i] / space.num_layers,
                stage.busy_s / slowest,
                max(group.needed_bytes / group.capacity_bytes for group in memory),
                math.log2(option.tp) / 4,
                math.log2(option.dp) / 8,
                RECOMPUTE_MODES.index(option.recompute) / 2,
                (stage.tensor_parallel_s + stage.blocked_s) / stage.busy_s,
                stage.gradient_sync_s / estimate.iteration_s,
                layers[i] / max(caps[i], 1),
            )
            per_stage[i, STAGE_FEATURES + option.group] = 1.0
        idle = space.devices_left(options)
        whole = [
            len(options) / space.max_stages,
            math.log2(m) / 12,
            estimate.bubble,
            estimate.balance,
            self._moves_left / self.max_moves,
            0.5 + 0.5 * math.tanh(math.log(estimate.iteration_s / self._first_s)),
            *(left / there for left, there in zip(idle, space.num_devices, strict=True)),
        ]
        observation: Observation = np.concatenate([per_stage.ravel(), np.array(whole, np.float32)]).clip(0.0, 1.0)
        return observation
