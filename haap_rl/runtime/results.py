"""What a run came to, as tables and lines: predicted against measured, by stage and part, and against one process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from haap_rl.runtime.compare import Measured, Row
from haap_rl.runtime.executor import Held
from haap_rl.runtime.job import Job
from haap_rl.runtime.training import WITHIN, Checkpoint, one_process

UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))
HELD = ("weights", "gradients", "optimiser", "activations")  # the parts of a Held


class Against(NamedTuple):
    """How far a plan's training is from one process's; not a number where one of them diverged."""

    losses: tuple[float, ...]  # of one process
    apart: float
    weights_apart: float
    good: bool

    def line(self) -> str:
        """The same in words."""
        return (
            f"against one process, {len(self.losses)} steps: losses differ by at most {self.apart:.1e}, weights by "
            f"{self.weights_apart:.1e}" + ("" if self.good else "; that is too much, the plan is NOT trained right")
        )


def against_one_process(job: Job, losses: Sequence[float], checkpoint: Checkpoint, begin: Checkpoint | None) -> Against:
    """Train the same in one process. losses, checkpoint: of a plan that began with `begin`."""
    alone, weights = one_process(job, len(losses), begin)
    apart = _largest(a - b for a, b in zip(losses, alone, strict=True))
    trained = checkpoint.state["weights"]
    weights_apart = _largest(float((trained[name] - weight).abs().max()) for name, weight in weights.items())
    good = apart <= WITHIN[job.dtype].loss and weights_apart <= WITHIN[job.dtype].weight
    return Against(tuple(alone), apart, weights_apart, good)


def _largest(differences: Iterable[float]) -> float:
    """The largest absolute value; not a number if one of them is none."""
    values = [abs(difference) for difference in differences]
    return max(values) if all(map(math.isfinite, values)) else math.nan


def finite_or_none(value: float) -> float | None:
    """As JSON has it, which knows no infinite numbers."""
    return value if math.isfinite(value) else None


def time_table(table: Sequence[Row], mode: str, comparable: bool) -> Table:
    shown_table = _columns(f"ms per micro-batch (sync, optimiser: per step), {mode}")
    for row in table:
        measured = "-" if row.measured_s is None else f"{1e3 * row.measured_s:.2f}"
        error = _error(row.predicted_s, row.measured_s) if comparable else "-"
        shown_table.add_row(str(row.stage), row.part, f"{1e3 * row.predicted_s:.2f}", measured, error)
    return shown_table


def memory_table(held: Sequence[tuple[Held, Held]]) -> Table:
    largest = max(max(*predicted, *measured) for predicted, measured in held)
    unit, size = next((name, size) for name, size in UNITS if largest >= size or size == 1)
    shown_table = _columns(f"{unit} on the fullest device, job as run")
    for stage, (predicted, measured) in enumerate(held):
        for part, expected, seen in zip(HELD, predicted, measured, strict=True):
            row = (f"{expected / size:.2f}", f"{seen / size:.2f}", _error(expected, seen))
            shown_table.add_row(str(stage), part, *row)
    return shown_table


def _columns(title: str) -> Table:
    table = Table(title=title)
    for name in ("stage", "part", "predicted", "measured", "error"):
        table.add_column(name, justify="left" if name == "part" else "right")
    return table


def _error(predicted: float, measured: float | None) -> str:
    return f"{predicted / measured - 1:+.1%}" if predicted and measured else "-"


def closing_lines(seen: Measured, losses: Sequence[float], result: dict[str, Any], comparable: bool) -> list[str]:
    predicted = result["predicted_iteration_time_s"]
    error = f" ({result['error']:+.1%})" if comparable else ""
    lines = [
        f"iteration: predicted {predicted:.4f} s, measured {seen.iteration_s:.4f} s{error}; by the schedule from "
        f"measured times {seen.replayed_s:.4f} s ({seen.replay_error:+.1%})",
        f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; overrun {seen.overrun_share:.1%}; load of the "
        f"machine {result['machine_load']:.1f}",
    ]
    if not comparable:
        lines.append(
            "predicted times are the model's on the plan's cluster, measured those of the tiny one here; "
            "device=imposed compares the two"
        )
    return lines
