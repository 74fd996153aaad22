"""`haap_rl/Construct-v0`: build a plan stage by stage, from the pipeline's end."""

# mypy: allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, overload

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from haap_rl.problem.errors import InputError
from haap_rl.problem.plan import Problem
from haap_rl.problem.presets import load_problem
from haap_rl.search.base import Objective
from haap_rl.space import construction
from haap_rl.space.construction import FEATURES, MOST, Construction, Partial
from haap_rl.space.options import SpaceSpec

Observation = npt.NDArray[np.float32]
ILLEGAL_REWARD = -4.0  # a plan e^4 times slower than the ideal


class Problems(Sequence[Objective]):
    """An unlimited Objective for each of many problems, made when it is first asked for, then kept."""

    def __init__(self, problems: Sequence[Problem], space: SpaceSpec | None = None) -> None:
        if not problems:
            raise InputError("Construct-v0: no problem is given; give at least one")
        self.problems, self.spec = tuple(problems), space
        self._made: dict[int, Objective] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> Problems:
        """Itself: Gymnasium deep-copies the arguments of `make`."""
        return self

    def __len__(self) -> int:
        return len(self.problems)

    @overload
    def __getitem__(self, index: int) -> Objective: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Objective]: ...
    def __getitem__(self, index: int | slice) -> Objective | Sequence[Objective]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index not in self._made:
            self._made[index] = Objective(self.problems[index], space=self.spec)
        return self._made[index]

    @property
    def evaluations(self) -> int:
        """Plans priced on all of them."""
        return sum(objective.evaluations for objective in self._made.values())


def num_candidates(objective: Objective, most: int | None = None) -> int:
    """Rows that the observation of a problem needs. Raises InputError if these are more than `most`."""
    space = objective.space
    needed = max(len(space.options) + 1, len(space.num_microbatches))
    if most is not None and needed > most:
        raise InputError(
            f"Construct-v0: cluster {space.problem.cluster.name!r} has {needed} choices per stage and the observation "
            f"has room for {most}; give num_candidates={needed}, or fewer space.group_sizes"
        )
    return needed


def spaces(rows: int) -> tuple[gym.spaces.Space[Observation], gym.spaces.Discrete]:
    """Observation and action space for so many candidates."""
    box: gym.spaces.Space[Any] = gym.spaces.Box(-MOST, MOST, (rows, len(FEATURES)), np.float32)
    return box, gym.spaces.Discrete(rows)


def choice_of_count(c: Construction, num_microbatches: int | None) -> int:
    """Which choice of the first decision a number of micro-batches is; -1 for None. Raises InputError if none is."""
    if num_microbatches is None:
        return -1
    counts = c.m.tolist()
    if num_microbatches not in counts:
        raise InputError(f"Construct-v0: num_microbatches={num_microbatches!r} is not one of {counts}; choose one")
    return int(counts.index(num_microbatches))


class ConstructEnv(gym.Env[Observation, np.int64]):
    """Build a plan from its last stage to its first.

    ## Action Space
    `Discrete(n)`, a row of the observation: first the number of micro-batches (row i is the i-th that some plan fits
    at), then per step the option of the next stage towards the front (row k is `space.options[k]`), until STOP (the
    row behind the last option). The balancer then gives out the layers. `action_masks()` says what is legal: within
    the devices, and such that the plan can be completed within memory; at least one choice always is. An illegal one
    ends the episode without a plan.

    ## Observation Space
    `Box(-4, 4, (n, F), float32)`: a row of ratios (`construction.FEATURES`) per choice, zeros where it is not legal;
    its first column is the mask. Nothing in it depends on the order of the rows. All zeros once the plan is complete.

    ## Rewards
    At the end -log(iteration time / ideal time), the ideal being a cluster that loses nothing at the best number of
    micro-batches; a plan that does not fit (possible only with space.memory_aware_init off) counts as
    e^(1 + missing bytes / capacity) times slower. An illegal choice gives -4. Otherwise 0.

    ## Starting State
    An empty plan of one of the problems, drawn from `np_random` where there are several.
    `reset(options={"problem": Problem, "num_microbatches": 16})` takes that problem, and that number as chosen.

    ## Episode End
    Terminated by STOP; never truncated.

    ## Arguments
    problem         what to plan (default: Llama-3 8B on 8 A100 and 16 V100)
    objective       prices every plan, counts it, and raises BudgetExhausted through `step` when its budget is spent
                    (default: one of its own, unlimited)
    space           the declared space, where there is no `objective` to take it from
    objectives      one for each of many problems, instead of the above, such as `Problems`
    num_candidates  rows of the observation (default: as many as the problem needs); needed with `objectives`
    An episode is one evaluation.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own declaration

    def __init__(
        self,
        problem: Problem | None = None,
        objective: Objective | None = None,
        space: SpaceSpec | None = None,
        objectives: Sequence[Objective] | None = None,
        num_candidates: int | None = None,
    ) -> None:
        if objectives is None:
            objectives = [objective or Objective(problem or load_problem(), space=space)]
        self.objectives, self.num_candidates = objectives, candidates_of(objectives, num_candidates)
        self.observation_space, self.action_space = spaces(self.num_candidates)
        self.objective = objectives[0]
        self._partial: Partial | None = None

    @property
    def construction(self) -> Construction:
        """What may be chosen in the present problem."""
        return self.objective.space.construction

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        options = options or {}
        problem = options.get("problem")
        if problem is not None:
            self.objective = Objective(problem, space=self.objectives[0].space.spec)
        elif len(self.objectives) > 1:
            self.objective = self.objectives[int(self.np_random.integers(len(self.objectives)))]
        else:
            self.objective = self.objectives[0]
        num_candidates(self.objective, self.num_candidates)
        self._partial = construction.begin(self.construction)
        count = choice_of_count(self.construction, options.get("num_microbatches"))
        if count >= 0:
            self._partial = construction.chosen(self.construction, self._partial, count)
        return self._observation(), {}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if self._partial is None or not self.action_masks()[action]:
            self._partial = None
            return self._observation(), ILLEGAL_REWARD, True, False, {"iteration_time_s": math.inf, "fits": False}
        stop = len(self.construction.step)
        if self._partial.count < 0 or action < stop:
            self._partial = construction.chosen(self.construction, self._partial, int(action))
            return self._observation(), 0.0, False, False, {}
        space = self.objective.space
        prices = self.objective.many(space.encode([construction.genome(space, self._partial)]))
        self._partial = None
        reward = math.log(self.construction.ideal_s) - float(prices.energy[0])
        info = {"iteration_time_s": float(prices.iteration_s[0]), "fits": not prices.bytes_missing[0]}
        return self._observation(), reward, True, False, info

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """(n,) which choices are legal now; at least one is until the plan is complete."""
        mask = np.zeros(self.num_candidates, np.bool_)
        if self._partial is not None:
            legal = construction.legal(self.construction, self._partial)
            mask[: len(legal)] = legal
        return mask

    def _observation(self) -> Observation:
        observation = np.zeros((self.num_candidates, len(FEATURES)), np.float32)
        if self._partial is not None:
            features = construction.features(self.construction, self._partial)
            observation[: len(features)] = features
        return observation


def candidates_of(objectives: Sequence[Objective], asked: int | None) -> int:
    """Rows of the observation: as asked, or as one problem needs. Raises InputError if that is too few, or unknown."""
    if asked is None and len(objectives) > 1:
        raise InputError("Construct-v0: with several problems give num_candidates, the most choices of any of them")
    needed = num_candidates(objectives[0], asked)
    return needed if asked is None else asked
