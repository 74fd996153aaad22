"""Many environments of one kind stepped at once on the compiled kernels, as a Stable-Baselines3 `VecEnv`.

Each equals the environments of its name one by one, step by step, in a `DummyVecEnv` (tests hold them equal).
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.utils import seeding
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvStepReturn

from haap_envs.construct import ILLEGAL_REWARD, candidates_of, choice_of_count, num_candidates, spaces
from haap_rl.search.base import Objective
from haap_rl.space import construction_kernels as kernels
from haap_rl.space.construction import FEATURES

Observations = npt.NDArray[np.float32]
Infos = list[dict[str, Any]]


class BatchedEnv(VecEnv):
    """What the batched environments have in common: seeds, masks, and how an episode's end is told.

    As in `DummyVecEnv`, `seed(s)` seeds environment i with s + i at the next `reset` only, and an environment that
    ends begins anew in the same step, its last observation being `infos[i]["terminal_observation"]`.
    """

    def __init__(self, num_envs: int, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        self.render_mode = None
        super().__init__(num_envs, observation_space, action_space)
        self.rngs = [seeding.np_random()[0] for _ in range(num_envs)]
        self._actions = np.zeros(num_envs, np.int64)

    # what a batched environment is
    def _begin(self, members: npt.NDArray[np.int64]) -> None:
        """Begin these environments anew."""
        raise NotImplementedError

    def _advance(
        self, actions: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_], Observations, Infos]:
        """Step all: (rewards, dones, terminal observations of those done in their order, infos)."""
        raise NotImplementedError

    def _observe(self) -> Observations:
        """What all see now, a new array."""
        raise NotImplementedError

    def masks(self) -> npt.NDArray[np.bool_]:
        """(num_envs, n) which actions are legal now."""
        raise NotImplementedError

    # the rest of SB3's interface
    def reset(self) -> Observations:
        for i, seed in enumerate(self._seeds):
            if seed is not None:
                self.rngs[i] = seeding.np_random(seed)[0]
        self.reset_infos = [{} for _ in range(self.num_envs)]
        self._begin(np.arange(self.num_envs))
        self._reset_seeds()
        self._reset_options()
        return self._observe()

    def step_async(self, actions: npt.NDArray[Any]) -> None:
        self._actions = np.asarray(actions, np.int64)

    def step_wait(self) -> VecEnvStepReturn:
        rewards, dones, last, infos = self._advance(self._actions)
        ended = np.flatnonzero(dones)
        for i, observation in zip(ended.tolist(), last, strict=True):
            infos[i]["terminal_observation"] = observation
        if len(ended):
            self._begin(ended)
        return self._observe(), rewards, dones, infos

    def close(self) -> None:
        pass

    def has_attr(self, attr_name: str) -> bool:
        return attr_name == "action_masks" or hasattr(self, attr_name)

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        return [getattr(self, attr_name) for _ in self._indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        raise AttributeError(f"{type(self).__name__}: attributes of single environments cannot be set ({attr_name})")

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        if method_name != "action_masks":
            raise AttributeError(f"{type(self).__name__}: single environments have no method {method_name!r}")
        masks = self.masks()
        return [masks[i] for i in self._indices(indices)]

    def env_is_wrapped(
        self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: VecEnvIndices = None
    ) -> list[bool]:
        return [False for _ in self._indices(indices)]

    def _indices(self, indices: VecEnvIndices) -> Iterable[int]:
        return self._get_indices(indices)


class ConstructVecEnv(BatchedEnv):
    """`num_envs` environments `haap_rl/Construct-v0` of the same problems.

    objectives      one for each problem; the environments share them
    num_candidates  as of `ConstructEnv`
    """

    def __init__(self, objectives: Sequence[Objective], num_envs: int, num_candidates: int | None = None) -> None:
        self.objectives = objectives
        rows = candidates_of(objectives, num_candidates)
        super().__init__(num_envs, *spaces(rows))
        self.problem = np.zeros(num_envs, np.int64)  # of each environment
        self._seen = np.zeros((num_envs, rows, len(FEATURES)), np.float32)
        self._nothing = np.zeros(self._seen.shape[1:], np.float32)
        self._nothing.flags.writeable = False
        first = objectives[0].space
        self._partials = kernels.partials(num_envs, first.max_stages, len(first.num_devices))

    def _begin(self, members: npt.NDArray[np.int64]) -> None:
        if len(self.objectives) > 1:
            for i in members.tolist():
                self.problem[i] = self.rngs[i].integers(len(self.objectives))
        for problem, here in self._by_problem(members):
            objective = self.objectives[problem]
            num_candidates(objective, self._seen.shape[1])
            c = objective.space.construction
            self._make_room(c.max_stages, len(c.total))
            counts = [choice_of_count(c, self.count_of(problem, self._options[i])) for i in here.tolist()]
            kernels.begin_many(c, self._partials, here, np.array(counts, np.int64), self._seen)

    def _make_room(self, stages: int, groups: int) -> None:
        """Widen the arrays for a problem with more stages or device groups than those before."""
        old = self._partials
        if old.options.shape[1] >= stages and old.left.shape[1] >= groups:
            return
        stages, groups = max(stages, old.options.shape[1]), max(groups, old.left.shape[1])
        new = kernels.partials(self.num_envs, stages, groups)
        for before, after in zip(old, new, strict=True):
            after[tuple(slice(size) for size in before.shape)] = before
        self._partials = new

    def _by_problem(self, members: npt.NDArray[np.int64]) -> Iterable[tuple[int, npt.NDArray[np.int64]]]:
        problems = self.problem[members]
        for problem in np.unique(problems).tolist():
            yield problem, members[problems == problem]

    def count_of(self, problem: int, options: Mapping[str, Any]) -> int | None:
        """Number of micro-batches that an episode begins with; None: it is the first choice."""
        return options.get("num_microbatches")

    def reward(self, problem: int, energy: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Rewards of plans of these energies (`Estimate.energy`)."""
        ideal_s = self.objectives[problem].space.construction.ideal_s
        return math.log(ideal_s) - energy

    def _advance(
        self, actions: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_], Observations, Infos]:
        n = self.num_envs
        legal = self._seen[np.arange(n), actions, 0] > 0
        rewards = np.where(legal, 0.0, ILLEGAL_REWARD).astype(np.float32)
        dones, infos = ~legal, [{"TimeLimit.truncated": False} for _ in range(n)]  # type: npt.NDArray[np.bool_], Infos
        for i in np.flatnonzero(dones).tolist():
            infos[i].update(iteration_time_s=math.inf, fits=False)
        for problem, members in self._by_problem(np.flatnonzero(legal)):
            objective = self.objectives[problem]
            space = objective.space
            ended, rows = kernels.step_many(space.construction, self._partials, members, actions[members], self._seen)
            if not ended.any():
                continue
            prices = objective.many(rows[ended])
            who = members[ended]
            rewards[who] = self.reward(problem, prices.energy)
            dones[who] = True
            for i, seconds, missing in zip(
                who.tolist(), prices.iteration_s.tolist(), prices.bytes_missing.tolist(), strict=True
            ):
                infos[i].update(iteration_time_s=seconds, fits=not missing)
        return rewards, dones, np.broadcast_to(self._nothing, (int(dones.sum()), *self._nothing.shape)), infos

    def _observe(self) -> Observations:
        return self._seen.copy()

    def masks(self) -> npt.NDArray[np.bool_]:
        legal: npt.NDArray[np.bool_] = self._seen[:, :, 0] > 0
        return legal
