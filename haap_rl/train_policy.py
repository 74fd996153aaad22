"""Train a policy that plans problems it has never seen: `python -m haap_rl.train_policy [key=value ...]`.

Plans of the exact search on instances of the training split, cloned, then PPO on the same instances; after every round
the policy is tried on instances of the validation split. Everything is kept in `out` as it is made: the same command
goes on where it stopped.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from haap_rl import configs
from haap_rl.problem.errors import InputError, check_keys, positive_int

if TYPE_CHECKING:
    from haap_rl.problem.instances import Instance
    from haap_rl.space.options import SpaceSpec
    from haap_rl.training.teacher import Lesson
    from haap_rl.training.trainer import Point, Settings

KEYS = ("instances", "space", "tracking", "seeds", "processes", "pool", "validation", "pool_seed", "training", "out")
LESSONS = "lessons.jsonl"


class Taught(NamedTuple):
    """Instances of a split with their lessons."""

    instances: tuple[Instance, ...]
    lessons: tuple[Lesson, ...]


class Run(NamedTuple):
    """The training of one seed: what it needs, picklable."""

    settings: Settings
    seed: int
    spec: SpaceSpec
    train: Taught
    validation: Taught
    directory: Path


def train_policy(config: dict[str, Any], directory: Path) -> int:
    """Train what `config` describes into `directory`; the exit status.

    0 trained, 130 interrupted, with what was made so far kept. Raises InputError for a bad configuration.
    """
    try:
        return _train_policy(config, directory)
    except KeyboardInterrupt:
        kept = sorted(str(path) for path in directory.glob("seed-*/policy.npz"))
        print(f"interrupted; the same command goes on from {directory}; policies so far: {', '.join(kept) or 'none'}")
        return 130


def _train_policy(config: dict[str, Any], directory: Path) -> int:
    from haap_rl.problem.instances import draw_pool, load_instances
    from haap_rl.space.options import SpaceSpec
    from haap_rl.tracking import tracker_from_config
    from haap_rl.training import teacher
    from haap_rl.training.trainer import Settings

    check_keys("configuration", config, KEYS)
    check_keys("training", config["training"], [field.name for field in fields(Settings)])
    settings, spec = Settings(**config["training"]), SpaceSpec.from_config(config["space"])
    processes, seeds = positive_int("configuration", "processes", config["processes"]), _seeds(config["seeds"])
    splits = load_instances(config["instances"])
    fits = partial(teacher.fits, spec)
    tracker = tracker_from_config(config, directory)

    taught = []
    for split, key in (("train", "pool"), ("validation", "validation")):
        count = positive_int("configuration", key, config[key])
        drawn = draw_pool(splits.split(split), count, config["pool_seed"], fits)
        print(f"{split}: {len(drawn)} instances; the teacher plans them", flush=True)
        told = _Tenths(split, len(drawn))
        lessons = teacher.lessons(drawn, spec, directory / LESSONS, processes, told)
        by_key = {lesson.problem: lesson for lesson in lessons}
        kept = tuple(instance for instance in drawn if teacher.key(instance, spec) in by_key)
        taught.append(Taught(kept, tuple(by_key[teacher.key(instance, spec)] for instance in kept)))
    train, validation = taught
    runs = [Run(settings, seed, spec, train, validation, directory / f"seed-{seed}") for seed in seeds]
    with tracker:
        tracker.start()
        points = _train_all(runs, processes, tracker.point)
    _choose(directory, dict(zip(seeds, points, strict=True)))
    return 0


def _seeds(value: object) -> list[int]:
    if not isinstance(value, list) or not value or len(set(map(str, value))) != len(value):
        raise InputError(f"seeds={value!r} must be a list of different whole numbers; give for example seeds=[0]")
    for seed in value:
        if type(seed) is not int or seed < 0:
            raise InputError(f"seeds: {seed!r} must be a whole number of at least 0; give for example seeds=[0]")
    return value


class _Tenths:
    """Says how many lessons there are, after every tenth."""

    def __init__(self, name: str, total: int) -> None:
        self._name, self._total, self._tenth = name, total, -1

    def __call__(self, done: int) -> None:
        if 10 * done // self._total > self._tenth:
            self._tenth = 10 * done // self._total
            print(f"{self._name}: {done} of {self._total} lessons", flush=True)


def _train_all(runs: Sequence[Run], processes: int, log: Any) -> list[list[Point]]:
    """The points of every run, in processes side by side where there are several."""
    from haap_rl.training.teacher import pool_of

    if min(processes, len(runs)) == 1:
        return [train_one(run, log) for run in runs]
    with pool_of(min(processes, len(runs))) as pool:
        points = pool.map(train_one, runs, chunksize=1)
    for each, run in zip(points, runs, strict=True):
        for point in each:
            log(_figures(run.seed, point))
    return points


def train_one(run: Run, log: Any = None) -> list[Point]:
    """Train one seed; its points. The best policy so far is in its directory after every round."""
    from haap_envs.construct import Problems
    from haap_rl.search.candidate_policy import policy_bytes
    from haap_rl.tracking.record import write_files
    from haap_rl.training.trainer import Course, Trainer

    train, validation = (
        Course(Problems([instance.problem() for instance in taught.instances], run.spec), taught.lessons)
        for taught in (run.train, run.validation)
    )

    def told(point: Point) -> None:
        print(f"seed {run.seed}: {_line(point)}", flush=True)
        if log is not None:
            log(_figures(run.seed, point))
        write_files(run.directory, {"policy.npz": policy_bytes(trainer.best_network(), facts(run, trainer.points))})

    trainer = Trainer(run.settings, run.seed, train, validation, run.directory / "checkpoint.pt", told)
    trainer.run()
    return trainer.points


def facts(run: Run, points: Sequence[Point]) -> dict[str, Any]:
    """How a policy was trained, as plain JSON data, for its file."""
    from haap_rl.space.options import SpaceSpec
    from haap_rl.training.trainer import score

    best = min(points, key=score)
    return {
        "command": "python -m haap_rl.train_policy",
        "seed": run.seed,
        "settings": asdict(run.settings),
        "space": {name: value for name, value in asdict(run.spec).items() if value != getattr(SpaceSpec(), name)},
        "training_instances": len(run.train.instances),
        "validation_instances": len(run.validation.instances),
        "teacher_examples": sum(len(lesson.examples) for lesson in run.train.lessons),
        "rounds": len(points),
        "training_evaluations": points[-1].evaluations,
        "validation": best._asdict(),
    }


def _line(point: Point) -> str:
    return (
        f"{point.phase} round {point.round}: validation gap {point.greedy_iqm_pct:.2f} % greedy (worst "
        f"{point.greedy_worst_pct:.1f}), {point.sampled_iqm_pct:.3f} % sampled; {point.evaluations:,} plans priced"
    )


def _figures(seed: int, point: Point) -> dict[str, float]:
    """A point for the tracker."""
    values = {name: value for name, value in point._asdict().items() if not isinstance(value, str)}
    return {f"policy/seed_{seed}/{point.phase}_{name}": value for name, value in values.items()}


def _choose(directory: Path, points: dict[int, list[Point]]) -> None:
    """Keep the seed that is best by validation as policy.npz, and the curves."""
    from haap_rl.report.training import draw
    from haap_rl.tracking.record import write_files
    from haap_rl.training.trainer import score

    best = min(points, key=lambda seed: min(map(score, points[seed])))
    write_files(
        directory,
        {
            "policy.npz": (directory / f"seed-{best}" / "policy.npz").read_bytes(),
            "curve.csv": _csv(points).encode(),
        },
    )
    draw(points, directory / "curve.png")
    print(f"best by validation: seed {best}; policy: {directory / 'policy.npz'}")
    print(f"use it: python -m haap_rl.train +search=ppo search.policy={directory / 'policy.npz'}")


def _csv(points: dict[int, list[Point]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    first = next(iter(points.values()))[0]
    writer.writerow(["seed", *first._fields])
    for seed, each in points.items():
        writer.writerows([seed, *point] for point in each)
    return text.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status (see `haap_rl.configs`)."""
    return configs.run("train_policy", train_policy, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
