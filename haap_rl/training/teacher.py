"""Lessons for a policy: the plans that the exact search gives for an instance, one for each number of micro-batches.

Lessons are kept in a file as they are made, a line each, so that an interrupted training goes on with them.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import numpy as np

from haap_rl.cost.estimator import fingerprint
from haap_rl.problem.instances import Instance
from haap_rl.problem.plan import Problem
from haap_rl.search.base import Budget, BudgetExhausted, Objective
from haap_rl.search.certificate import problem_key
from haap_rl.search.exact import Exact
from haap_rl.space.bound import lower_bound
from haap_rl.space.options import SpaceSpec

HEURISTIC, NODES = 1000, 2_000_000  # effort of one proof, in evaluations and steps; the walk's steps take a few tenths
EVALUATIONS = 10**9  # the steps end a proof, not its plans
SLOWER = 1.12  # numbers of micro-batches at which no plan can be so good are not taught


@dataclass(frozen=True, slots=True)
class Example:
    """The teacher's plan at one number of micro-batches: options front to back, and what it takes."""

    num_microbatches: int
    options: tuple[int, ...]
    iteration_s: float
    lower_bound_s: float


@dataclass(frozen=True, slots=True)
class Lesson:
    """What the teacher says about an instance."""

    name: str
    problem: str  # its key, which names the space as well
    examples: tuple[Example, ...]

    @property
    def best_s(self) -> float:
        """Seconds of the best plan known."""
        return min(example.iteration_s for example in self.examples)


def fits(spec: SpaceSpec, problem: Problem) -> bool:
    """Whether some plan of the space fits, whatever its switches."""
    return bool(Objective(problem, space=plain(spec)).space.feasible_microbatches)


def plain(spec: SpaceSpec) -> SpaceSpec:
    """The space without ablations: the teacher knows the best plans of it, wherever its pupil looks."""
    return replace(spec, memory_aware_init=True, load_balance=True)


def teach(spec: SpaceSpec, instance: Instance) -> Lesson:
    """The lesson of one instance; numbers of micro-batches with the least bound first."""
    problem, spec = instance.problem(), plain(spec)
    counts = Objective(problem, space=spec).space.feasible_microbatches
    alone = {m: replace(spec, num_microbatches=(m,)) for m in counts}
    bounds = {m: lower_bound(problem, alone[m]).seconds for m in counts}
    examples: list[Example] = []
    for m in sorted(counts, key=lambda m: (bounds[m], m)):
        if examples and bounds[m] > SLOWER * min(example.iteration_s for example in examples):
            continue
        objective = Objective(problem, Budget(EVALUATIONS), alone[m], lower_bound_s=bounds[m])
        with contextlib.suppress(BudgetExhausted):
            Exact(HEURISTIC, NODES).search(problem, objective, np.random.default_rng(0))
        if objective.best is not None and objective.best[1].fits:
            options = objective.space.genome(objective.best[0]).options
            examples.append(Example(m, options, objective.best_s, objective.lower_bound_s))
    return Lesson(instance.name, problem_key(problem, spec), tuple(examples))


def lessons(
    instances: Sequence[Instance], spec: SpaceSpec, path: Path, processes: int, told: Callable[[int], None]
) -> list[Lesson]:
    """The lessons of all instances, in order; those already in the file are not made again.

    told: is called with how many there are, after each.
    """
    known = dict(_read(path))
    keys = [key(instance, spec) for instance in instances]
    todo = [instance for each, instance in zip(keys, instances, strict=True) if each not in known]
    told(len(instances) - len(todo))
    if todo:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file, pool_of(min(processes, len(todo))) as pool:
            for number, lesson in enumerate(pool.imap(partial(teach, spec), todo), 1):
                known[lesson.problem] = lesson
                line = {"estimator": fingerprint(), **asdict(lesson)}
                file.write(json.dumps(line) + "\n")
                file.flush()
                told(len(instances) - len(todo) + number)
    return [known[each] for each in keys if known[each].examples]


def pool_of(processes: int) -> Pool:
    """Spawned processes that leave Ctrl-C to the one that waits for them."""
    return get_context("spawn").Pool(processes, signal.signal, (signal.SIGINT, signal.SIG_IGN))


def key(instance: Instance, spec: SpaceSpec) -> str:
    """What a lesson's `problem` is called."""
    return problem_key(instance.problem(), spec)


def _read(path: Path) -> Iterator[tuple[str, Lesson]]:
    """Lessons of a file made with the present estimator; a line that was cut short is passed over."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            data: dict[str, Any] = json.loads(line)
            if data.pop("estimator") != fingerprint():
                continue
            examples = [Example(**{**e, "options": tuple(e["options"])}) for e in data.pop("examples")]
            yield data["problem"], Lesson(**data, examples=tuple(examples))
        except (ValueError, KeyError, TypeError):
            continue
