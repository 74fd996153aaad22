"""Run a plan: `python -m haap_rl.runtime plan=FILE steps=10 check=true [device=imposed]`, by itself or under torchrun.

Trains the plan with one process per rank, compares with one process if asked to, prints what was predicted and measured
by stage and part, and writes runtime.json and trace.json.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from haap_rl import configs
from haap_rl.problem.errors import InputError, check_keys, positive_float, positive_int, shown, yes_or_no
from haap_rl.problem.plan import Plan, Problem

if TYPE_CHECKING:
    from haap_rl.cost.estimate import Estimate
    from haap_rl.cost.estimator import Estimator
    from haap_rl.runtime.device import Pacing
    from haap_rl.runtime.executor import Held
    from haap_rl.runtime.job import Job
    from haap_rl.runtime.survival import Survived
    from haap_rl.runtime.training import Checkpoint, Trained

SIZES = ("tiny", "full")
MOST_DILATED = 1e6
KEYS = (
    "model", "cluster", "problem", "estimator", "plan", "steps", "check", "size", "dtype", "seed", "pacing",
    "time_scale", "dilation", "processes", "port", "timeout_s", "load", "save", "then", "every", "out",
)  # fmt: skip


def run(config: dict[str, Any], directory: Path) -> int:
    """Run the plan that `config` names; the exit status: 1 where it differs from one process, 130 interrupted.

    Raises InputError for bad input, and where a rank dies or hangs; all processes are ended then.
    """
    from haap_rl.cost.estimator import Estimator
    from haap_rl.cost.profile_files import profile_from_config
    from haap_rl.problem.presets import problem_from_config
    from haap_rl.runtime.checkpoint import load_checkpoint
    from haap_rl.runtime.compare import expected_held
    from haap_rl.runtime.session import under_torchrun
    from haap_rl.runtime.survival import Survived
    from haap_rl.tracking.record import check_writable

    check_keys("configuration", config, KEYS)
    problem = problem_from_config(config["model"], config["cluster"], config["problem"])
    plan = problem.load_plan(str(config["plan"]))
    cached, profile = profile_from_config(config["estimator"])
    estimator = Estimator(problem, cached, profile=profile)
    steps = positive_int("runtime", "steps", config["steps"])
    check = yes_or_no("runtime", "check", config["check"])
    positive_int("runtime", "every", config["every"])
    save, load, then = (_path(config, key) for key in ("save", "load", "then"))
    job = _job(problem, plan, config)
    pacing = _pacing(estimator, plan, config)
    begin = None if load is None else load_checkpoint(load, job)
    first = int(os.environ.get("RANK", "0")) == 0 if under_torchrun() else True
    if first:
        check_writable(directory)
        if save is not None:
            check_writable(save.parent, "save")
    try:
        if then is not None:
            plans = plan, problem.load_plan(then)
            pacings = pacing, _pacing(estimator, plans[1], config)
            outcome = _survived(config, job, plans, pacings, steps, begin)
            if outcome.why:
                print(f"{outcome.why}; {then} goes on from the checkpoint", flush=True)
        else:
            outcome = Survived(_trained(config, job, plan, steps, pacing, begin), plan, begin, [], "")
    except KeyboardInterrupt:
        print("haap_rl: interrupted; all ranks were ended", file=sys.stderr)
        return 130
    if not first:
        return 0
    memory = expected_held(problem, job, outcome.plan)
    return _told(config, directory, job, estimator(outcome.plan), memory, check, begin, outcome)


def _path(config: dict[str, Any], key: str) -> Path | None:
    """The file that a key names, if it names one."""
    value = config[key]
    if value is None:
        return None
    if not isinstance(value, str) or not value or Path(value).is_dir():
        raise InputError(f"runtime: {key}={shown(value)} must be the name of a file")
    return Path(value)


def _job(problem: Problem, plan: Plan, config: dict[str, Any]) -> Job:
    from haap_rl.runtime.job import DTYPES, check_runs, full_size, tiny

    if config["size"] not in SIZES:
        raise InputError(f"runtime: size={shown(config['size'])} is not one of {', '.join(SIZES)}")
    if config["dtype"] not in tuple(DTYPES):
        raise InputError(f"runtime: dtype={shown(config['dtype'])} is not one of {', '.join(DTYPES)}")
    if type(config["seed"]) is not int or not 0 <= config["seed"] < 2**31:
        raise InputError(f"runtime: seed={shown(config['seed'])} must be a whole number from 0 to 2^31 - 1")
    job = (tiny if config["size"] == "tiny" else full_size)(problem, config["dtype"], config["seed"])
    check_runs(job, plan)
    return job


def _pacing(estimator: Estimator, plan: Plan, config: dict[str, Any]) -> Pacing:
    from haap_rl.runtime.device import MODES, NATIVE, Pacing, imposed, longest_s

    mode = config["pacing"]
    if mode not in MODES:
        raise InputError(f"runtime: device={shown(mode)} is not one of {', '.join(MODES)}")
    scale = positive_float("runtime", "time_scale", config["time_scale"])
    dilation = positive_float("runtime", "dilation", config["dilation"])
    if dilation > MOST_DILATED:
        raise InputError(f"runtime: dilation={dilation:g} must be at most {MOST_DILATED:g}")
    if mode == "imposed":
        if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
            raise InputError("runtime: device=imposed counts on the clock of one machine; use device=native on several")
        pacing = imposed(estimator, plan, scale)
        timeout_s = positive_float("runtime", "timeout_s", config["timeout_s"])
        if longest_s(pacing) >= timeout_s:
            raise InputError(
                f"runtime: time_scale={scale:g} makes an operation last {longest_s(pacing):.3g} s, which "
                f"timeout_s={timeout_s:g} would take for a hang; lower time_scale or raise timeout_s"
            )
        return pacing
    if mode == "native":
        return NATIVE
    precision = estimator.problem.precision
    peaks = {group.name: group.device.peak(precision) for group in estimator.problem.cluster.groups}
    return Pacing("dilated", dilation={name: dilation * max(peaks.values()) / peak for name, peak in peaks.items()})


def _trained(
    config: dict[str, Any], job: Job, plan: Plan, steps: int, pacing: Pacing, begin: Checkpoint | None
) -> list[Trained]:
    """What all ranks bring back; under torchrun this process is one of them."""
    import torch
    import torch.distributed as dist

    from haap_rl.runtime.job import check_ranks, num_ranks
    from haap_rl.runtime.session import Session, from_torchrun, under_torchrun
    from haap_rl.runtime.training import train

    timeout_s = positive_float("runtime", "timeout_s", config["timeout_s"])
    told = Told(steps, begin)
    arguments = (job, plan, steps, pacing, begin, config["check"] or config["save"] is not None)
    needed = num_ranks(plan)
    if under_torchrun():
        check_ranks(plan, int(os.environ["WORLD_SIZE"]))
        with from_torchrun(timeout_s, told) as member:
            mine = train(member, *arguments)
            found: list[Any] | None = [None] * needed if member.rank == 0 else None
            if member.rank < needed:  # the others have nothing to wait for
                dist.gather_object(mine, found, dst=0, group=member.groups.control(needed))
        return found or []
    processes = needed if config["processes"] is None else config["processes"]
    processes = positive_int("runtime", "processes", processes)
    check_ranks(plan, processes)
    port = _port(config)
    kind = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= processes else "cpu"
    with Session(processes, kind, port, timeout_s, told) as session:
        return session.call(train, *arguments)


class Told:
    """Prints a line for the first of `steps` steps that it hears of, and after every tenth of them."""

    def __init__(self, steps: int, begin: Checkpoint | None) -> None:
        self._steps, self._begin = steps, 0 if begin is None else begin.step
        self._tenths = -1

    def __call__(self, done: int, loss: float) -> None:
        tenths = 10 * (done - self._begin) // self._steps
        if tenths > self._tenths:
            self._tenths = tenths
            print(f"step {done} of {self._begin + self._steps}: loss {loss:.4f}", flush=True)


def _survived(
    config: dict[str, Any],
    job: Job,
    plans: tuple[Plan, Plan],
    pacings: tuple[Pacing, Pacing],
    steps: int,
    begin: Checkpoint | None,
) -> Survived:
    """Train the first plan in pieces, the other one being ready."""
    from haap_rl.runtime.job import check_runs
    from haap_rl.runtime.session import under_torchrun
    from haap_rl.runtime.survival import train_in_pieces

    if under_torchrun() or config["processes"] is not None:
        raise InputError(
            "runtime: then= starts processes itself, as many as a plan needs; leave out processes, torchrun"
        )
    check_runs(job, plans[1])
    every = positive_int("runtime", "every", config["every"])
    timeout_s = positive_float("runtime", "timeout_s", config["timeout_s"])
    told = Told(steps, begin)
    return train_in_pieces(job, plans, pacings, steps, every, begin, "cpu", _port(config), timeout_s, told)


def _port(config: dict[str, Any]) -> int:
    port = config["port"]
    if type(port) is not int or not 0 <= port < 2**16:
        raise InputError(f"runtime: port={shown(port)} must be a whole number from 0 to 65535; 0 takes a free one")
    return port


def _told(
    config: dict[str, Any],
    directory: Path,
    job: Job,
    cost: Estimate,
    memory: Sequence[Sequence[Held]],
    check: bool,
    begin: Checkpoint | None,
    outcome: Survived,
) -> int:
    """Compare, print and write; the exit status: 1 too where a loss is not finite. cost, memory: what was predicted."""
    from rich.console import Console

    from haap_rl.runtime.checkpoint import checkpoint_bytes
    from haap_rl.runtime.compare import chrome_trace, expected_in_flight, fullest, measure, rows
    from haap_rl.runtime.device import MOST_OVERRUN
    from haap_rl.runtime.results import against_one_process, closing_lines, finite_or_none, memory_table, time_table
    from haap_rl.tracking.record import to_json_text, write_files

    plan, lost = outcome.plan, outcome.why
    reports = [trained.report for trained in outcome.found if trained.report is not None]
    checkpoint = outcome.found[0].checkpoint
    losses = (*outcome.before, *reports[0].losses)
    seen = measure(reports, plan.num_microbatches)
    scale = float(config["time_scale"]) if config["pacing"] == "imposed" else 1.0
    table = rows(cost, seen, scale)
    held = fullest(memory, seen.held)
    expected = expected_in_flight(len(plan.stages), plan.num_microbatches)
    result: dict[str, Any] = {
        "model": job.model.name,
        "size": config["size"],
        "device": config["pacing"],
        "ranks": len(reports),
        "machine_load": os.getloadavg()[0],
        "losses": list(map(finite_or_none, losses)),
        "lost_rank": lost or None,
        "plan": config["then"] if lost else config["plan"],
        "predicted_iteration_time_s": scale * cost.iteration_s,
        "measured_iteration_time_s": seen.iteration_s,
        "measured_spread": seen.spread,
        "error": scale * cost.iteration_s / seen.iteration_s - 1.0,
        "replayed_iteration_time_s": seen.replayed_s,
        "replay_error": seen.replay_error,
        "overrun_share": seen.overrun_share,
        "in_flight": list(seen.in_flight),
        "predicted_in_flight": list(expected),
        "parts": [row._asdict() for row in table],
        "memory_bytes": [
            {"stage": i, "predicted": predicted._asdict(), "measured": measured._asdict()}
            for i, (predicted, measured) in enumerate(held)
        ],
    }
    finite = all(map(math.isfinite, losses))
    status = 0 if finite else 1
    console = Console(width=None if sys.stdout.isatty() else 120)
    lines: list[str] = []
    if check and checkpoint is not None:
        against = against_one_process(job, losses, checkpoint, begin)
        status = status if against.good else 1
        lines.append(against.line())
        result.update(
            one_process_losses=list(map(finite_or_none, against.losses)),
            max_loss_difference=finite_or_none(against.apart),
            max_weight_difference=finite_or_none(against.weights_apart),
        )
    if not finite:
        step = next(i for i, loss in enumerate(losses) if not math.isfinite(loss))
        lines.append(f"the loss of step {step + 1} is not finite: the training has diverged")
    comparable = config["pacing"] == "imposed" or config["size"] == "full"
    console.print(time_table(table, config["pacing"], comparable))
    console.print(memory_table(held))
    lines += closing_lines(seen, losses, result, comparable)
    if seen.in_flight != expected:
        lines.append(f"in flight {seen.in_flight}, the memory model has {expected}")
    if seen.overrun_share > MOST_OVERRUN:
        lines.append(
            f"{seen.overrun_share:.1%} of the operations overran, more than {MOST_OVERRUN:.0%}: these times are no "
            "evidence; try a larger time_scale or a quieter machine"
        )
    if config["save"] is not None and checkpoint is not None:
        path = Path(config["save"])
        write_files(path.parent, {path.name: checkpoint_bytes(checkpoint, job)}, "save")
        lines.append(f"checkpoint after {checkpoint.step} steps: {path}")
    files = {
        "runtime.json": to_json_text(result).encode(),
        "trace.json": to_json_text(chrome_trace(reports)).encode(),
    }
    write_files(directory, files)
    lines.append(f"written: {directory}")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status (see `haap_rl.configs`)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # to Hydra `device=` is a choice of conf/device; here it says how long things last
    renamed = [re.sub("^device=", "pacing=", argument) for argument in arguments]
    return configs.run("runtime", run, renamed)


if __name__ == "__main__":
    sys.exit(main())
