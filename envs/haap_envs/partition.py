"""`haap_rl/Partition-v0`: edit a plan, one masked move at a time."""

# mypy: allow-untyped-calls

from __future__ import annotations

import math
from functools import cache, cached_property
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from haap_rl.cost.estimate import Estimate
from haap_rl.cost.estimator import FIRST, LAST, Estimator
from haap_rl.problem.plan import RECOMPUTE_MODES, Problem
from haap_rl.problem.presets import load_problem
from haap_rl.search.base import Explained, Objective
from haap_rl.space import kernels, moves
from haap_rl.space.options import SpaceSpec
from haap_rl.space.space import Code, Genome

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
    over what memory allows, one-hot device group (of a stage on two groups both, with tp and dp of the first). Then:
    stages, log2 micro-batches, bubble, balance, moves left, iteration time over the episode's first (squashed), idle
    share of each device group.

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
        self._coded = kernels.coded(self.moves)
        groups = len(self.space.num_devices)
        self._num_devices = np.array(self.space.num_devices)
        self._uses = np.array([option.uses(groups) for option in self.space.options])
        self._features = np.zeros((len(self.space.options), STAGE_FEATURES + groups), np.float32)
        for features, option in zip(self._features, self.space.options, strict=True):
            features[0] = 1.0
            features[4:7] = (
                math.log2(option.tp) / 4,
                math.log2(option.dp) / 8,
                RECOMPUTE_MODES.index(option.recompute) / 2,
            )
            features[[STAGE_FEATURES + group for group, _, _ in option.parts]] = 1.0
        size = self.space.max_stages * (STAGE_FEATURES + groups) + GLOBAL_FEATURES + groups
        self.action_space = gym.spaces.Discrete(len(self.moves) + 1)
        self.observation_space = gym.spaces.Box(0.0, 1.0, (size,), np.float32)
        self._moves_left = 0
        self._first_s = math.inf
        self._code: Code = np.zeros(2 + 2 * self.space.max_stages, np.int64)
        self._explained: Explained

    @property
    def genome(self) -> Genome:
        """The current plan as a point of the space."""
        return self.space.genome_of(self._code)

    @property
    def estimate(self) -> Estimate:
        """All about the current plan, by the readable estimator; not an evaluation."""
        return self._estimator(self.space.plan(self.genome))

    @cached_property
    def _estimator(self) -> Estimator:
        return Estimator(self.space.problem, profile=self.space.estimator.profile)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        plan = (options or {}).get("plan")
        if plan is not None:
            (self._code,) = self.space.encode([self.space.genome(plan)])
        else:
            (self._code,) = self.space.draws(self.np_random, 1)
        self._explained = self.objective.explain(self._code)
        self._moves_left, self._first_s = self.max_moves, self._explained.iteration_s
        return self._observation(), self._info()

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        self._moves_left -= 1
        reward = ILLEGAL_MOVE_REWARD
        code = np.empty_like(self._code)  # a new one each time, so that copies of an environment go apart
        if action == self._stay:
            if self.action_masks()[self._stay]:
                reward = 0.0
        elif self._apply(action, code):
            before = self._explained.energy
            self._code, self._explained = code, self.objective.explain(code)
            reward = before - self._explained.energy
        return self._observation(), reward, False, self._moves_left <= 0, self._info()

    def _apply(self, action: np.int64, code: Code) -> bool:
        """Write the plan after an action to `code`; False if it is not legal."""
        kind, stage, argument = self._coded[action].tolist()
        legal: bool = kernels.apply(self.space.neighbourhood, self._code, kind, stage, argument, code)
        return legal

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """(n,) which actions are legal now; at least one always is."""
        legal = np.empty(self._stay + 1, np.bool_)
        legal[-1] = kernels.legal_mask(self.space.neighbourhood, self._code, self._coded, legal) == 0
        return legal

    def _info(self) -> dict[str, Any]:
        return {"iteration_time_s": self._explained.iteration_s, "fits": self._explained.fits}

    def _observation(self) -> Observation:
        space, cost, code = self.space, self._explained, self._code
        p, most, groups = int(code[1]), space.max_stages, len(space.num_devices)
        options, layers = code[2 : 2 + p], code[2 + most : 2 + most + p]
        observation: Observation = np.zeros(self.observation_space.shape, np.float32)  # type: ignore[arg-type]
        whole = most * (STAGE_FEATURES + groups)
        stages = observation[:whole].reshape(most, -1)[:p]
        stages[:] = self._features[options]
        stages[:, 1] = layers / space.num_layers
        stages[:, 2] = cost.busy_s / cost.busy_s.max()
        stages[:, 3] = cost.memory_share
        stages[:, 7] = (cost.tensor_parallel_s + cost.blocked_s) / cost.busy_s
        stages[:, 8] = cost.gradient_sync_s / cost.iteration_s
        stages[:, 9] = layers / np.maximum(space.neighbourhood.most[code[0], *_places(p), options], 1)
        observation[whole:] = (
            p / most,
            math.log2(space.num_microbatches[code[0]]) / 12,
            cost.bubble,
            cost.balance,
            self._moves_left / self.max_moves,
            0.5 + 0.5 * math.tanh(math.log(cost.iteration_s / self._first_s)),
            *((self._num_devices - self._uses[options].sum(0)) / self._num_devices),
        )
        return observation.clip(0.0, 1.0, out=observation)


@cache
def _places(p: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(position, place counted from the end) of each of p stages."""
    position = np.zeros(p, np.int64)
    position[0] |= FIRST
    position[-1] |= LAST
    return position, np.arange(p, 0, -1)
