"""Training a policy on many problems: cloning the teacher's plans, then PPO, watched on problems it never trains on.

Work is done in rounds, each seeded by (seed, phase, round) alone, with a checkpoint after each: a training that was
interrupted goes on with the next round and ends with the weights that it would have had.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecMonitor

from haap_envs.batched import ConstructVecEnv, num_environments
from haap_envs.construct import num_candidates
from haap_rl.problem.errors import InputError, positive_float, positive_int, share, yes_or_no
from haap_rl.search.base import Objective, seeded_global_random
from haap_rl.search.candidate_policy import CandidateNetwork, hidden_units
from haap_rl.search.ppo import Figures, model
from haap_rl.search.proposals import Proposals
from haap_rl.space import construction
from haap_rl.space import construction_kernels as kernels
from haap_rl.space.construction import FEATURES
from haap_rl.training.teacher import Lesson

CLONING, PPO = "cloning", "ppo"
GREEDY_PCT, SAMPLED_PCT = 1.5, 0.3  # what is wanted of a policy
SAMPLES = 96  # evaluations per problem of the second figure of validation
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Settings:
    """Hyper-parameters of `conf/train_policy.yaml`.

    hidden              units of each layer of the network
    masked, blank       ablations: whether illegal choices get no probability; features that are not looked at
    cloning_rounds, cloning_steps   rounds, and gradient steps of each, of cloning
    cloning_batch, cloning_rate     states per step, and Adam's first learning rate, which falls to nothing
    forgiveness         an example whose plan is e^forgiveness times slower than the best of its instance counts 1/e
    ppo_rounds, ppo_updates         rounds, and updates of each, of PPO; the first round trains the critic only
    num_envs, num_steps, learning_rate, gae_lambda, num_epochs, batch_size, clip_range, entropy   of PPO
    regret              gap to the teacher's plan from which on PPO's rewards count ratios of gaps rather than gaps
    patience            rounds of PPO without a better validation, after which it ends
    """

    hidden: int = 96
    masked: bool = True
    blank: tuple[str, ...] = ()
    cloning_rounds: int = 6
    cloning_steps: int = 500
    cloning_batch: int = 256
    cloning_rate: float = 2e-3
    forgiveness: float = 0.05
    ppo_rounds: int = 5
    ppo_updates: int = 6
    num_envs: int = 64
    num_steps: int = 24
    learning_rate: float = 1e-4
    gae_lambda: float = 0.95
    num_epochs: int = 3
    batch_size: int = 256
    clip_range: float = 0.2
    entropy: float = 0.001
    regret: float = 0.02
    patience: int = 4

    def __post_init__(self) -> None:
        where = "training"
        for name in ("cloning_rounds", "cloning_steps", "cloning_batch", "ppo_rounds", "ppo_updates", "num_steps",
                     "num_epochs", "batch_size", "patience"):  # fmt: skip
            if not (name.endswith("_rounds") and getattr(self, name) == 0):  # a phase can be left out
                positive_int(where, name, getattr(self, name))
        hidden_units(where, self.hidden)
        num_environments(where, self.num_envs)
        for name in ("cloning_rate", "forgiveness", "learning_rate", "clip_range", "regret"):
            positive_float(where, name, getattr(self, name))
        for name in ("gae_lambda", "entropy"):
            share(where, name, getattr(self, name))
        if self.cloning_rounds == self.ppo_rounds == 0:
            raise InputError(f"{where}: cloning_rounds and ppo_rounds are both 0; give at least one of them a round")
        yes_or_no(where, "masked", self.masked)
        object.__setattr__(self, "blank", tuple(self.blank))
        for name in self.blank:
            if name not in FEATURES[1:]:
                raise InputError(f"{where}: blank: {name!r} is not a feature that can be left out; see FEATURES")

    def network(self) -> CandidateNetwork:
        """A new one."""
        return CandidateNetwork(len(FEATURES), **self.network_settings())

    def network_settings(self) -> dict[str, Any]:
        """Its arguments besides the number of features."""
        return {"hidden": self.hidden, "masked": self.masked, "blank": [FEATURES.index(name) for name in self.blank]}


class Course(NamedTuple):
    """Problems with their lessons."""

    objectives: Sequence[Objective]
    lessons: Sequence[Lesson]


class Point(NamedTuple):
    """What a policy was worth after a round. Gaps to the teacher's best plans, in %."""

    phase: str
    round: int
    greedy_iqm_pct: float  # best of the most likely plans, one per number of micro-batches
    sampled_iqm_pct: float  # best of about a hundred plans
    greedy_worst_pct: float
    loss: float
    evaluations: int  # plans priced in training so far; the teacher's and validation's are not among them


Told = Callable[[Point], None]


class Decisions(NamedTuple):
    """States with the choices that there were, and how good each was.

    rows    (R, F) features of all choices, state after state
    first   (N + 1,) where each state's begin
    wanted  (R,) probability that a choice should have; those of a state add up to its weight
    """

    rows: torch.Tensor
    first: torch.Tensor
    wanted: torch.Tensor

    @classmethod
    def of(cls, states: Sequence[tuple[construction.Observation, Floats]]) -> Decisions:
        """From what was seen of each state's choices, and what is wanted of each."""
        sizes = [len(wanted) for _, wanted in states]
        return cls(
            torch.from_numpy(np.concatenate([seen for seen, _ in states])),
            torch.from_numpy(np.cumsum([0, *sizes])),
            torch.from_numpy(np.concatenate([wanted for _, wanted in states])).float(),
        )

    def loss(self, network: CandidateNetwork, chosen: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of some states."""
        sizes = self.first[chosen + 1] - self.first[chosen]
        state = torch.repeat_interleave(torch.arange(len(chosen)), sizes)
        begins = torch.cumsum(sizes, 0) - sizes
        index = torch.arange(len(state)) - begins[state] + self.first[chosen][state]
        logits, _ = network.of_rows(self.rows[index], state, len(chosen))
        most = torch.full((len(chosen),), -torch.inf).scatter_reduce(0, state, logits.detach(), "amax")
        total = torch.zeros(len(chosen)).index_add(0, state, torch.exp(logits - most[state]))
        return -(self.wanted[index] * (logits - most[state] - torch.log(total)[state])).sum() / len(chosen)


def taught_decisions(taught: Course, forgiveness: float, masked: bool) -> Decisions:
    """Every choice in the teacher's plans, the best number of micro-batches among them; of the legal ones if masked."""
    states = []
    for objective, lesson in zip(taught.objectives, taught.lessons, strict=True):
        c = objective.space.construction
        counts = c.m.tolist()
        for example in lesson.examples:
            best = example.iteration_s == lesson.best_s
            plan = [counts.index(example.num_microbatches), *reversed(example.options), len(c.step)]
            seen = watched(objective, plan)
            weight = math.exp(-math.log(example.iteration_s / lesson.best_s) / forgiveness)
            for observation, action in list(zip(seen, plan, strict=True))[0 if best else 1 :]:
                legal = np.flatnonzero((observation[:, 0] > 0) | (not masked))
                states.append((observation[legal], weight * (legal == action)))
    return Decisions.of(states)


def watched(objective: Objective, plan: Sequence[int]) -> list[construction.Observation]:
    """What is seen before each choice of a plan: of the number of micro-batches, of options from the end, of STOP."""
    c = objective.space.construction
    partials, only = kernels.partials(1, c.max_stages, len(c.total)), np.array([0])
    view = np.zeros((1, num_candidates(objective), len(FEATURES)), np.float32)
    kernels.begin_many(c, partials, only, np.array([-1]), view)
    seen = []
    for action in plan:
        seen.append(view[0].copy())
        if not view[0, action, 0]:
            raise AssertionError("the teacher's plan cannot be built")
        kernels.step_many(c, partials, only, np.array([action]), view)
    return seen


@dataclass
class Trainer:
    """One training run. `network` is the best policy so far by validation, `points` what was measured.

    checkpoint: where it is kept after every round; a file there is gone on from.
    """

    settings: Settings
    seed: int
    train: Course
    validation: Course
    checkpoint: Path
    told: Told = lambda point: None
    points: list[Point] = field(default_factory=list)

    def run(self) -> CandidateNetwork:
        """Train what is left; the best policy by validation."""
        torch.manual_seed(self.seed)
        self.now = self.settings.network()
        self.optimizers: dict[str, dict[str, Any]] = {}
        self.evaluations = 0
        self._resume()
        with seeded_global_random(np.random.default_rng(self.seed)):
            self._clone()
            self._ppo()
        return self.best_network()

    def best_network(self) -> CandidateNetwork:
        """The policy that was best by validation so far."""
        best = self.settings.network()
        best.load_state_dict(self.best)
        return best.eval()

    def done(self, phase: str) -> int:
        """Rounds of a phase that are finished."""
        return sum(point.phase == phase for point in self.points)

    def _clone(self) -> None:
        s = self.settings
        if self.done(CLONING) >= s.cloning_rounds:
            return
        data = taught_decisions(self.train, s.forgiveness, s.masked)
        optimizer = torch.optim.Adam(self.now.parameters(), lr=s.cloning_rate)
        self._restore(CLONING, optimizer)
        for number in range(self.done(CLONING), s.cloning_rounds):
            rate = s.cloning_rate * (1 - number / s.cloning_rounds)
            loss = self._fit(optimizer, data, rate, np.random.default_rng((self.seed, 0, number)))
            self._end_round(CLONING, number, loss, optimizer)

    def _fit(self, optimizer: torch.optim.Optimizer, data: Decisions, rate: float, rng: np.random.Generator) -> float:
        """A round of gradient steps; the mean loss."""
        s, losses = self.settings, 0.0
        optimizer.param_groups[0]["lr"] = rate
        for _ in range(s.cloning_steps):
            loss = data.loss(self.now, torch.from_numpy(rng.integers(len(data.first) - 1, size=s.cloning_batch)))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.now.parameters(), 1.0)
            optimizer.step()
            losses += loss.item()
        return losses / s.cloning_steps

    def _ppo(self) -> None:
        s = self.settings
        if self.done(PPO) >= s.ppo_rounds or self._stale():
            return
        environments = Relative(self.train, s.num_envs, s.forgiveness, s.regret)
        trained = model(
            VecMonitor(environments),  # which sums the rewards
            self.seed,
            n_steps=s.num_steps,
            learning_rate=s.learning_rate,
            gamma=1.0,
            gae_lambda=s.gae_lambda,
            n_epochs=s.num_epochs,
            batch_size=s.batch_size,
            clip_range=s.clip_range,
            ent_coef=s.entropy,
            policy_kwargs=s.network_settings(),
        )
        network, optimizer = trained.policy.network, trained.policy.optimizer
        network.load_state_dict(self.now.state_dict())  # type: ignore[union-attr]
        self.now = network  # type: ignore[assignment]
        self._restore(PPO, optimizer)
        figures: dict[str, float] = {}
        trained.set_logger(Logger(folder=None, output_formats=[Figures(figures.update)]))
        length = s.ppo_updates * s.num_envs * s.num_steps
        for number in range(self.done(PPO), s.ppo_rounds):
            trained.set_random_seed(int(np.random.default_rng((self.seed, 1, number)).integers(2**31)))
            for name, parameter in self.now.named_parameters():  # a critic that knows nothing would spoil the policy
                parameter.requires_grad_(number > 0 or name.startswith(("seen", "value")))
            before = self._priced()
            trained.learn(length)  # begins with fresh episodes
            self.evaluations += self._priced() - before
            self._end_round(PPO, number, -figures["rollout/ep_rew_mean"], optimizer)
            if self._stale():
                return

    def _priced(self) -> int:
        return sum(objective.evaluations for objective in self.train.objectives)

    def _stale(self) -> bool:
        """Whether PPO has not bettered the validation for `patience` rounds."""
        rounds = [point for point in self.points if point.phase == PPO]
        last = self.settings.patience
        if len(rounds) <= last:
            return False
        better = min(map(score, self.points[: len(self.points) - last]))
        return min(map(score, self.points[-last:])) >= better

    def _end_round(self, phase: str, number: int, loss: float, optimizer: torch.optim.Optimizer) -> None:
        greedy, sampled = validate(self.now, self.validation, self.seed)
        point = Point(
            phase, number, 100 * middle(greedy), 100 * middle(sampled), 100 * float(greedy.max()), loss,
            self.evaluations,
        )  # fmt: skip
        if not self.points or score(point) < min(map(score, self.points)):
            self.best = {name: value.clone() for name, value in self.now.state_dict().items()}
        self.points.append(point)
        self.optimizers = {phase: optimizer.state_dict()}
        self._save()
        self.told(point)

    # -------------------------------------------------------------------------------------- checkpoints
    def _identity(self) -> list[Any]:
        """What a checkpoint belongs to."""
        s = self.settings
        return [
            [str(value) for value in (s, self.seed, FEATURES)],
            [[lesson.problem, lesson.best_s] for lesson in (*self.train.lessons, *self.validation.lessons)],
        ]

    def _save(self) -> None:
        content = {
            "identity": repr(self._identity()),
            "points": [tuple(point) for point in self.points],
            "now": self.now.state_dict(),
            "best": self.best,
            "optimizers": self.optimizers,
        }
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.checkpoint.with_suffix(".tmp")
        torch.save(content, temporary)
        temporary.replace(self.checkpoint)

    def _resume(self) -> None:
        if not self.checkpoint.is_file():
            return
        try:
            content = torch.load(self.checkpoint, weights_only=True)
            identity = content["identity"]
        except Exception as error:  # whatever torch raises for a file that is none
            raise InputError(
                f"checkpoint {str(self.checkpoint)!r} cannot be read ({type(error).__name__}); remove it to train anew"
            ) from None
        if identity != repr(self._identity()):
            raise InputError(
                f"checkpoint {str(self.checkpoint)!r} is of another training (settings, seed, instances or estimator); "
                "choose another out, or remove it to train anew"
            )
        self.points = [Point(*point) for point in content["points"]]
        self.now.load_state_dict(content["now"])
        self.best = content["best"]
        self.optimizers = content["optimizers"]
        self.evaluations = self.points[-1].evaluations

    def _restore(self, phase: str, optimizer: torch.optim.Optimizer) -> None:
        if phase in self.optimizers:
            optimizer.load_state_dict(self.optimizers[phase])


def taught_examples(taught: Course, forgiveness: float) -> list[tuple[int, int]]:
    """(problem, number of micro-batches as a choice) of every example that counts; -1: the choice is the policy's."""
    examples = []
    for problem, (objective, lesson) in enumerate(zip(taught.objectives, taught.lessons, strict=True)):
        counts = objective.space.construction.m.tolist()
        examples.append((problem, -1))
        for example in lesson.examples:
            if math.log(example.iteration_s / lesson.best_s) <= 2 * forgiveness:
                examples.append((problem, counts.index(example.num_microbatches)))
    return examples


class Relative(ConstructVecEnv):
    """Construct-v0 on every example of the teacher, at its number of micro-batches, and on every problem without one.

    Rewards are -log(1 + gap / regret), the gap being that to the teacher's plan: all problems are alike to the critic
    then, and the last percent counts as much as the tenth.
    """

    def __init__(self, taught: Course, num_envs: int, forgiveness: float, regret: float) -> None:
        self._examples, self._regret = taught_examples(taught, forgiveness), regret
        self._best_s = []
        for problem, count in self._examples:
            lesson, counts = taught.lessons[problem], taught.objectives[problem].space.construction.m
            of_count = [e.iteration_s for e in lesson.examples if count >= 0 and e.num_microbatches == counts[count]]
            self._best_s.append(min(of_count, default=lesson.best_s))
        objectives = [taught.objectives[problem] for problem, _ in self._examples]
        super().__init__(objectives, num_envs, max(num_candidates(each) for each in taught.objectives))

    def count_of(self, problem: int, member: int) -> int | None:
        count = self._examples[problem][1]
        return None if count < 0 else int(self.objectives[problem].space.construction.m[count])

    def reward(self, problem: int, energy: Floats) -> Floats:
        gap = np.maximum(np.exp(energy) / self._best_s[problem] - 1.0, 0.0)
        reward: Floats = -np.log1p(gap / self._regret)
        return reward


def score(point: Point) -> float:
    """What validation chooses by, both figures in units of what is wanted of them; smaller is better."""
    return point.greedy_iqm_pct / GREEDY_PCT + point.sampled_iqm_pct / SAMPLED_PCT


def middle(values: Floats) -> float:
    """Interquartile mean."""
    from scipy import stats

    return float(stats.trim_mean(values, 0.25))


def validate(network: CandidateNetwork, on: Course, seed: int) -> tuple[Floats, Floats]:
    """Gaps to the teacher's best plans, as fractions: of the most likely plans, and of SAMPLES proposals."""
    greedy, sampled = [], []
    network.eval()
    rng = np.random.default_rng(seed)
    for objective, lesson in zip(on.objectives, on.lessons, strict=True):
        proposals = Proposals(objective, network, rng)
        proposals.first()
        greedy.append(proposals.best_s / lesson.best_s - 1)
        proposals.more(SAMPLES - len(proposals.codes))
        sampled.append(proposals.best_s / lesson.best_s - 1)
    return np.array(greedy), np.array(sampled)
