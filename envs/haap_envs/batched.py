"""Many environments of one kind stepped at once on the compiled kernels, as a Stable-Baselines3 `VecEnv`.

Each equals the environments of its name one by one, step by step, in a `DummyVecEnv` (tests hold them equal).
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.utils import seeding
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvStepReturn

from haap_envs import construct, partition
from haap_rl.cost.kernels import scratch
from haap_rl.problem.errors import InputError, positive_int
from haap_rl.problem.plan import Plan
from haap_rl.search.base import Objective, compile_kernels
from haap_rl.space import construction, construction_kernels, kernels, move_feature_kernels, move_features, moves

Ints = npt.NDArray[np.int64]
Observations = npt.NDArray[np.float32]
Infos = list[dict[str, Any]]
MOST_ENVS = 10_000  # some gigabytes of observations on a large space


def num_environments(where: str, value: object) -> int:
    """`value` as a number of environments. Raises InputError for what is none, or more than MOST_ENVS."""
    number = positive_int(where, "num_envs", value)
    if number > MOST_ENVS:
        raise InputError(f"{where}: num_envs={number} must be at most {MOST_ENVS}; give for example num_envs=64")
    return number


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
    @abstractmethod
    def _begin(self, members: Ints) -> None:
        """Begin these environments anew."""

    @abstractmethod
    def _advance(self, actions: Ints) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_], Observations, Infos]:
        """Step all: (rewards, dones, terminal observations of those done in their order, infos)."""

    @abstractmethod
    def _observe(self) -> Observations:
        """What all see now, a new array."""

    @abstractmethod
    def masks(self) -> npt.NDArray[np.bool_]:
        """(num_envs, n) which actions are legal now."""

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
        compile_kernels()
        rows = construct.candidates_of(objectives, num_candidates)
        super().__init__(num_envs, *construct.spaces(rows))
        self.problem = np.zeros(num_envs, np.int64)  # of each environment
        self._asked: list[int | None] = [None] * num_envs  # numbers of micro-batches to begin the next episode with
        self._seen = np.zeros((num_envs, rows, len(construction.FEATURES)), np.float32)
        self._nothing = np.zeros(self._seen.shape[1:], np.float32)
        self._nothing.flags.writeable = False
        first = objectives[0].space
        self._partials = construction_kernels.partials(num_envs, first.max_stages, len(first.num_devices))

    def reset(self) -> Observations:
        self._asked = [options.get("num_microbatches") for options in self._options]
        return super().reset()

    def _begin(self, members: Ints) -> None:
        if len(self.objectives) > 1:
            for i in members.tolist():
                self.problem[i] = self.rngs[i].integers(len(self.objectives))
        for problem, here in self._by_problem(members):
            objective = self.objectives[problem]
            construct.num_candidates(objective, self._seen.shape[1])
            c = objective.space.construction
            self._make_room(c.max_stages, len(c.total))
            counts = [construct.choice_of_count(c, self.count_of(problem, i)) for i in here.tolist()]
            construction_kernels.begin_many(c, self._partials, here, np.array(counts, np.int64), self._seen)

    def _make_room(self, stages: int, groups: int) -> None:
        """Widen the arrays for a problem with more stages or device groups than those before."""
        old = self._partials
        if old.options.shape[1] >= stages and old.left.shape[1] >= groups:
            return
        stages, groups = max(stages, old.options.shape[1]), max(groups, old.left.shape[1])
        new = construction_kernels.partials(self.num_envs, stages, groups)
        for before, after in zip(old, new, strict=True):
            after[tuple(slice(size) for size in before.shape)] = before
        self._partials = new

    def _by_problem(self, members: Ints) -> Iterable[tuple[int, Ints]]:
        problems = self.problem[members]
        for problem in np.unique(problems).tolist():
            yield problem, members[problems == problem]

    def count_of(self, problem: int, member: int) -> int | None:
        """Number of micro-batches that an environment's episode begins with; None: it is the first choice."""
        count, self._asked[member] = self._asked[member], None
        return count

    def reward(self, problem: int, energy: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Rewards of plans of these energies (`Estimate.energy`)."""
        ideal_s = self.objectives[problem].space.construction.ideal_s
        return math.log(ideal_s) - energy

    def _advance(self, actions: Ints) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_], Observations, Infos]:
        n = self.num_envs
        legal = self._seen[np.arange(n), actions, 0] > 0
        rewards = np.where(legal, 0.0, construct.ILLEGAL_REWARD).astype(np.float32)
        dones, infos = ~legal, [{"TimeLimit.truncated": False} for _ in range(n)]  # type: npt.NDArray[np.bool_], Infos
        for i in np.flatnonzero(dones).tolist():
            infos[i].update(iteration_time_s=math.inf, fits=False)
        for problem, members in self._by_problem(np.flatnonzero(legal)):
            objective = self.objectives[problem]
            space = objective.space
            ended, rows = construction_kernels.step_many(
                space.construction, self._partials, members, actions[members], self._seen
            )
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


class PartitionVecEnv(BatchedEnv):
    """`num_envs` environments `haap_rl/Partition-v0` that share an objective; equal to them in a `DummyVecEnv`.

    objective   prices every plan, counts it, and raises BudgetExhausted through `step` and `reset`
    max_moves   moves per episode
    In a step all moves are priced in one batch, then the new plans of the environments that begin anew.
    """

    def __init__(self, objective: Objective, num_envs: int, max_moves: int = 32) -> None:
        self.objective, self.space, self.max_moves = objective, objective.space, max_moves
        self.moves = moves.edits(self.space)
        super().__init__(num_envs, *partition.spaces(len(self.moves)))
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
        move_feature_kernels.apply_each(self.space.neighbourhood, self._codes, self._coded, actions, codes, moved)
        rewards = np.where(stays, 0.0, partition.ILLEGAL_MOVE_REWARD)
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
        features = np.empty((len(members), len(self.moves) + 1, len(move_features.FEATURES)), np.float32)
        move_feature_kernels.observe(
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
