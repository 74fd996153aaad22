"""Many environments `haap_rl/Partition-v0` of one problem stepped at once on the compiled kernels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from haap_envs.batched import BatchedEnv, Infos, Observations
from haap_envs.partition import ILLEGAL_MOVE_REWARD, spaces
from haap_rl.cost.kernels import scratch
from haap_rl.problem.plan import Plan
from haap_rl.search.base import Objective, compile_kernels
from haap_rl.space import kernels, moves
from haap_rl.space.move_feature_kernels import apply_each, observe
from haap_rl.space.move_features import FEATURES

Ints = npt.NDArray[np.int64]


class PartitionVecEnv(BatchedEnv):
    """`num_envs` environments `haap_rl/Partition-v0` that share an objective; equal to them in a `DummyVecEnv`.

    objective   prices every plan, counts it, and raises BudgetExhausted through `step` and `reset`
    max_moves   moves per episode
    In a step all moves are priced in one batch, then the new plans of the environments that begin anew.
    """

    def __init__(self, objective: Objective, num_envs: int, max_moves: int = 32) -> None:
        self.objective, self.space, self.max_moves = objective, objective.space, max_moves
        self.moves = moves.edits(self.space)
        super().__init__(num_envs, *spaces(len(self.moves)))
        self._coded = kernels.coded(self.moves)
        compile_kernels()
        self._work = scratch(self.space.stage_tables)
        self._plans: list[Plan | None] = [None] * num_envs  # to begin the next episode with, instead of a draw
        self._codes = np.zeros((num_envs, 2 + 2 * self.space.max_stages), np.int64)
        self._iteration_s, self._first_s, self._energy = (np.full(num_envs, np.inf) for _ in range(3))
        self._fits = np.zeros(num_envs, np.bool_)
        self._moves_left = np.zeros(num_envs, np.int64)
        self._legal = np.zeros((num_envs, len(self.moves) + 1), np.bool_)

    def reset(self) -> Observations:
        self._plans = [options.get("plan") for options in self._options]
        observations = super().reset()
        self.reset_infos = self._infos(range(self.num_envs))
        return observations

    def _begin(self, members: Ints) -> None:
        codes = np.empty((len(members), self._codes.shape[1]), np.int64)
        for code, i in zip(codes, members.tolist(), strict=True):
            plan, self._plans[i] = self._plans[i], None
            if plan is not None:
                (code[:],) = self.space.encode([self.space.genome(plan)])
            else:
                (code[:],) = self.space.draws(self.rngs[i], 1)
        self._price(members, codes)
        self._first_s[members] = self._iteration_s[members]
        self._moves_left[members] = self.max_moves
        for i, info in zip(members.tolist(), self._infos(members.tolist()), strict=True):
            self.reset_infos[i] = info

    def _advance(self, actions: Ints) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_], Observations, Infos]:
        n, stay = self.num_envs, len(self.moves)
        stays = (actions == stay) & self._legal[:, stay]
        codes, moved = np.empty_like(self._codes), np.empty(n, np.bool_)
        apply_each(self.space.neighbourhood, self._codes, self._coded, actions, codes, moved)
        rewards = np.where(stays, 0.0, ILLEGAL_MOVE_REWARD)
        members = np.flatnonzero(moved)
        if len(members):
            before = self._energy[members]
            self._price(members, codes[members])
            rewards[members] = before - self._energy[members]
        self._moves_left -= 1
        dones = self._moves_left <= 0
        infos = self._infos(range(n))
        for info, done in zip(infos, dones.tolist(), strict=True):
            info["TimeLimit.truncated"] = done
        return rewards.astype(np.float32), dones, self._features(np.flatnonzero(dones)), infos

    def _observe(self) -> Observations:
        features = self._features(np.arange(self.num_envs))
        self._legal = features[:, :, 0] > 0
        return features

    def masks(self) -> npt.NDArray[np.bool_]:
        return self._legal.copy()

    def _price(self, members: Ints, codes: Ints) -> None:
        """Make `codes` the plans of these environments. Raises BudgetExhausted, and changes nothing, if it is spent."""
        prices = self.objective.many(codes)
        self._codes[members], self._energy[members] = codes, prices.energy
        self._iteration_s[members], self._fits[members] = prices.iteration_s, prices.bytes_missing == 0

    def _features(self, members: Ints) -> Observations:
        """What these environments see, a new array."""
        features = np.empty((len(members), len(self.moves) + 1, len(FEATURES)), np.float32)
        observe(
            self.space.stage_tables,
            self.space.neighbourhood,
            self._work,
            self._codes[members],
            self._coded,
            self._moves_left[members] / self.max_moves,
            self._first_s[members] / self._iteration_s[members],
            features,
        )
        return features

    def _infos(self, members: range | list[int]) -> Infos:
        times, fits = self._iteration_s.tolist(), self._fits.tolist()
        return [{"iteration_time_s": times[i], "fits": fits[i]} for i in members]
