"""Pretrain a small LLaMA while devices fail: `python -m haap_rl.mecefo.pretrain cells_down=2 [key=value ...]`.

ranks x stages        the grid, simulated in this process; with processes=true every rank is a process of its own (one
                      stage), those that fail are killed, and others take over
cells_down            cells down at any time, drawn anew every redraw_steps steps; or
failure_steps, recovery_steps   steps between failures on average, where that is not 0, and until a cell is repaired
policy                mecefo, or drop_replica: samples of a replica with a dead cell are lost
checkpoint_steps      steps between checkpoints. Where failures cannot be taken over, training waits for repair and goes
                      on from the last one; failures come by a clock on which steps lost and waited count too, and
                      training is given up where it would take ten times its steps on it
checkpoint            a file for them: the same command goes on from it after it was killed, and ends the same
error_steps           the gradient is compared with the failure-free one every so many steps; 0: never
skip, recompute       the techniques (haap_rl/mecefo/options.py); beside them all options of MeCeFO
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from haap_rl.mecefo.aggregate import relative_error
from haap_rl.mecefo.checkpoint import Checkpoints, Training
from haap_rl.mecefo.corpus import ALPHABET
from haap_rl.mecefo.failures import (
    PATIENCE,
    UNBROKEN,
    Grid,
    Restart,
    Schedule,
    Timeline,
    arriving,
    redrawn,
    restarted,
)
from haap_rl.mecefo.job import CharacterPretraining
from haap_rl.mecefo.llama import LlamaShape
from haap_rl.mecefo.options import MecefoOptions, Techniques
from haap_rl.mecefo.parallel import FaultyDataParallel, Policy
from haap_rl.mecefo.processes import train_in_processes

TOY = MecefoOptions(rank=8)  # a rank of 64 would be more than the toy's matrices have
SHAPE = ("hidden", "ffn", "layers", "heads", "kv_heads")
# the largest of what takes memory or processes at once: what is trained here is small
MOST = {
    "seed": 2**31 - 1, "ranks": 1024, "stages": 256, "layers": 256, "hidden": 8192, "ffn": 32768, "heads": 256,
    "kv_heads": 256, "samples": 4096, "length": 8192,
}  # fmt: skip
JOB = ("seed", "steps", "samples", "length", "learning_rate")


@dataclass(frozen=True, slots=True)
class Pretrained:
    """What came of a training.

    losses    mean loss of each step; of one that was done again, the last
    errors    (step, norm ratio of the gradient's error) of the steps that were looked at
    timeline  its restarts, with the steps lost and waited
    """

    perplexity: float
    losses: list[float]
    errors: list[tuple[int, float]]
    timeline: Timeline = UNBROKEN


def pretrain(
    job: CharacterPretraining,
    grid: Grid,
    schedule: Schedule,
    options: MecefoOptions,
    techniques: Techniques | None = None,
    policy: Policy = "mecefo",
    error_steps: int = 0,
    checkpoints: Checkpoints | None = None,
) -> Pretrained:
    """Train on simulated ranks. Equal arguments give equal figures on one machine with one thread.

    Where failures cannot be lived with, training waits for repair and goes on from its last checkpoint. `schedule` is
    by the clock that `Timeline` explains. With a file of checkpoints from before, training goes on from there.
    Raises Restart where failures outpace repair, and ValueError for a file that is not of this training.
    """
    checkpoints = checkpoints or Checkpoints()
    model = job.model()
    optimizer = job.optimizer(model)
    parallel = FaultyDataParallel(model, job.loss, grid, schedule, options, techniques, policy)
    training = Training(model, optimizer, parallel.degradable.projectors)
    timeline = checkpoints.restore(training)
    checkpoints.keep(training, timeline, job.steps)
    while (step := training.step) < job.steps:
        batches = [job.batch(step, rank) for rank in range(grid.ranks)]
        try:
            loss = parallel.backward(batches, step, timeline)
        except Restart as reason:
            checkpoints.restore(training)
            timeline = restarted(
                timeline, step, training.step, job.steps, schedule, options, parallel.live_with, reason
            )
            continue
        if error_steps and step % error_steps == 0:
            _, exact = parallel.gradients(batches, frozenset())
            error = relative_error({n: p.grad for n, p in model.named_parameters()}, exact)
            training.errors.append((step, error))
        job.update(model, optimizer, step)
        training.losses.append(loss)
        checkpoints.keep(training, timeline, job.steps)
    return Pretrained(job.perplexity(model), training.losses, training.errors, timeline)


DEFAULTS: dict[str, Any] = {
    **{key: getattr(CharacterPretraining(), key) for key in JOB},
    **{key: getattr(CharacterPretraining().shape, key) for key in SHAPE},
    "ranks": 8,
    "stages": 2,
    "cells_down": 2,
    "redraw_steps": 50,
    "failure_steps": 0,
    "recovery_steps": 50,
    "policy": "mecefo",
    "checkpoint_steps": 50,
    "checkpoint": "",
    "error_steps": 10,
    "processes": False,
    **asdict(Techniques()),
    **asdict(TOY),
}


def read(arguments: Sequence[str]) -> dict[str, Any]:
    """DEFAULTS with what `key=value` arguments change, in the types of the defaults. Raises ValueError in one line."""
    found = dict(DEFAULTS)
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or key not in DEFAULTS:
            raise ValueError(f"mecefo: {argument!r} is not an option; options: {', '.join(DEFAULTS)}")
        kind = type(DEFAULTS[key])
        try:
            if kind is bool:
                found[key] = {"true": True, "false": False}[text.lower()]
            elif kind is tuple:
                found[key] = tuple(filter(None, text.strip("[]").replace(" ", "").split(",")))
            else:
                found[key] = kind(text)
        except (KeyError, ValueError):
            example = str(DEFAULTS[key]).lower()
            raise ValueError(f"mecefo: {key}={text!r} cannot be read; give for example {key}={example}") from None
        most = MOST.get(key, 10**6)
        if kind in (int, float) and not 0 <= found[key] <= most:
            raise ValueError(f"mecefo: {key}={text} must be a number from 0 to {most:,}; give {key}={DEFAULTS[key]}")
    for key in (*SHAPE, *(key for key in JOB if key != "seed"), "redraw_steps", "recovery_steps", "checkpoint_steps"):
        if not found[key]:
            raise ValueError(f"mecefo: {key}=0 leaves nothing to do; give for example {key}={DEFAULTS[key]}")
    return found


def run(given: dict[str, Any]) -> None:
    """Train as `read` gave it, and say what came of it."""
    shape = LlamaShape(vocab=len(ALPHABET), **{key: given[key] for key in SHAPE})
    job = CharacterPretraining(shape=shape, **{key: given[key] for key in JOB})
    options = MecefoOptions(**{field.name: given[field.name] for field in fields(MecefoOptions)})
    techniques = Techniques(given["skip"], given["recompute"])
    grid = Grid(given["ranks"], 1 if given["processes"] else given["stages"])
    rng, clock = np.random.default_rng(job.seed), PATIENCE * job.steps
    if given["failure_steps"]:
        schedule = arriving(grid, given["failure_steps"], given["recovery_steps"], clock, rng)
    else:
        schedule = redrawn(grid, given["cells_down"], given["redraw_steps"], clock, rng)
    checkpoints = Checkpoints(
        given["checkpoint_steps"],
        Path(given["checkpoint"]) if given["checkpoint"] else None,
        {key: value for key, value in given.items() if key != "checkpoint"},
    )
    torch.set_num_threads(1)
    if given["processes"]:
        if given["policy"] != "mecefo":
            raise ValueError(f"mecefo: policy={given['policy']!r} has no processes; leave out processes=true")
        done = train_in_processes(job, grid.ranks, job.steps, schedule, options, techniques, checkpoints=checkpoints)
        model = job.model()
        model.load_state_dict(next(iter(done.weights.values())))
        print(f"{len(done.generations)} process groups; the ranks that live end with equal weights")
        print(f"loss {done.losses[-1]:.4f} nats, held-out perplexity {job.perplexity(model):.4f} per character")
        say_restarts(done.timeline)
        return
    trained = pretrain(job, grid, schedule, options, techniques, given["policy"], given["error_steps"], checkpoints)
    print(f"loss {trained.losses[-1]:.4f} nats, held-out perplexity {trained.perplexity:.4f} per character")
    if trained.errors:
        errors = [error for _, error in trained.errors]
        print(f"relative gradient error: mean {np.mean(errors):.3f}, largest {max(errors):.3f}")
    say_restarts(trained.timeline)


def say_restarts(timeline: Timeline) -> None:
    """Print what failures that nobody could take over have cost, if there were any."""
    if timeline.restarts:
        print(
            f"restarts from a checkpoint: {len(timeline.restarts)}; {timeline.lost} steps done again, "
            f"{timeline.waited} waited for repair"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 good, 1 failures that outpace repair, 2 bad input, 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        print("options, with their defaults:", " ".join(f"{key}={value}" for key, value in DEFAULTS.items()))
        return 0
    try:
        run(read(arguments))
    except Restart as error:
        print(f"mecefo: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mecefo: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
