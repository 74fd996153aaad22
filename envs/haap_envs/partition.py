"""`haap_rl/Partition-v0`: edit a plan, one masked move at a time."""

# mypy: allow-untyped-calls

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from haap_rl.cost.estimate import Estimate
from haap_rl.cost.estimator import Estimator
from haap_rl.cost.kernels import scratch
from haap_rl.problem.plan import Problem
from haap_rl.problem.presets import load_problem
from haap_rl.search.base import Objective, compile_kernels
from haap_rl.space import kernels, moves
from haap_rl.space.move_feature_kernels import observe
from haap_rl.space.move_features import FEATURES, WIDEST
from haap_rl.space.options import SpaceSpec
from haap_rl.space.space import Code, Genome

Observation = npt.NDArray[np.float32]
ILLEGAL_MOVE_REWARD = -0.05


def spaces(num_moves: int) -> tuple[gym.Space[Any], gym.spaces.Discrete]:
    """Observation and action space for so many moves, and staying."""
    rows = num_moves + 1
    return gym.spaces.Box(-WIDEST, WIDEST, (rows, len(FEATURES)), np.float32), gym.spaces.Discrete(rows)


class PartitionEnv(gym.Env[Observation, np.int64]):
    """Edit a plan so that its iteration gets shorter.

    ## Action Space
    `Discrete(n)`: the fixed list `moves.edits(space)` (shift a layer, change tp, devices, recompute, device group or
    micro-batches, swap, split, merge, insert, remove, balance, per stage where it applies), and last "stay".
    `action_masks()` says which are legal now: within the devices, within memory (where the space minds it) and not
    without effect; "stay" is legal only where nothing else is. An illegal action leaves the plan as it is.

    ## Observation Space
    `Box(-4, 4, (n, F), float32)`, row x about action x: what it would make of the plan, the F ratios and flags of
    `move_features.FEATURES`. The first says whether it is legal, `action_masks()`; the whole row is zeros where it is
    not. No feature knows the problem's scale or how many moves, stages and groups there are, so a network that scores
    every row alike can serve any problem. Looking at moves is no evaluation: no iteration time is computed.

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
        compile_kernels()
        self._work = scratch(self.space.stage_tables)
        self.observation_space, self.action_space = spaces(len(self.moves))
        self._moves_left = 0
        self._first_s = self._iteration_s = self._energy = math.inf
        self._fits = False
        self._code: Code = np.zeros(2 + 2 * self.space.max_stages, np.int64)
        self._legal = np.zeros(self._stay + 1, np.bool_)

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
            (code,) = self.space.encode([self.space.genome(plan)])
        else:
            (code,) = self.space.draws(self.np_random, 1)
        self._price(code)
        self._moves_left, self._first_s = self.max_moves, self._iteration_s
        return self._observation(), self._info()

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        reward, before = ILLEGAL_MOVE_REWARD, self._energy
        if action == self._stay:
            if self._legal[action]:
                reward = 0.0
        else:
            code = np.empty_like(self._code)  # a new one each time, so that copies of an environment go apart
            kind, stage, argument = self._coded[action].tolist()
            if kernels.apply(self.space.neighbourhood, self._code, kind, stage, argument, code):
                self._price(code)
                reward = before - self._energy
        self._moves_left -= 1
        return self._observation(), reward, False, self._moves_left <= 0, self._info()

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """(n,) which actions are legal now; at least one always is."""
        return self._legal.copy()

    def _price(self, code: Code) -> None:
        """Make `code` the current plan. Raises BudgetExhausted, and changes nothing, if the budget is spent."""
        prices = self.objective.many(code[None])
        self._code, self._energy = code, float(prices.energy[0])
        self._iteration_s, self._fits = float(prices.iteration_s[0]), not prices.bytes_missing[0]

    def _observation(self) -> Observation:
        """The features of every action now, and the mask that they give."""
        observation = np.empty((1, self._stay + 1, len(FEATURES)), np.float32)
        moves_left = np.array([self._moves_left / self.max_moves])
        speed_up = np.array([self._first_s / self._iteration_s])
        tables, neighbourhood = self.space.stage_tables, self.space.neighbourhood
        observe(tables, neighbourhood, self._work, self._code[None], self._coded, moves_left, speed_up, observation)
        self._legal = observation[0, :, 0] > 0
        return np.asarray(observation[0])

    def _info(self) -> dict[str, Any]:
        return {"iteration_time_s": self._iteration_s, "fits": self._fits}
