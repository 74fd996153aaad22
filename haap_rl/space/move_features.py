"""What-if features: what each move would make of a plan, one row per candidate, for a policy that scores candidates.

Every feature is a ratio or a flag that does not know the problem's scale, nor how many device groups, stages or moves
there are, so one policy can serve any problem. They come from applying the move and looking at single stages of the
plan that it leads to: no schedule is run and no bound computed, so they are no evaluations.

This is the readable statement of them. Twin: `space.move_feature_kernels`, compiled; tests hold the two equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from haap_rl.cost.estimate import Estimate
from haap_rl.space import moves
from haap_rl.space.moves import Move
from haap_rl.space.space import Genome, Space

# "now": of the plan as it is, alike in every row; else of the plan after the move. "Slowest": the stage that is busy
# for longest over the iteration, with gradient sync and optimiser step. "Squashed": 4 tanh(log ratio), so that a few
# per cent are still seen.
FEATURES = (
    "legal",  # 1 where the move is legal; a row without it is all zeros
    "stay",  # 1 for staying, which is legal only where no move is
    "slowest",  # busy seconds of the slowest stage over those now, squashed
    "round_trip",  # seconds of one micro-batch through all stages and back over those now, squashed
    "fill_now",  # round trip over itself and the slowest stage's busy seconds: how much the round trip weighs
    "bubble",  # (p - 1) / (m + p - 1), the share that p equal stages would wait with m micro-batches
    "balance_now",  # mean busy seconds of the stages over the slowest's, 1 if all are alike
    "balance",
    "tail",  # share of gradient sync and optimiser step in the slowest stage's busy seconds
    "memory_now",  # memory over capacity of the tightest stage
    "memory",
    "missing_now",  # 0 if the plan fits, else 1 + missing bytes / capacity, as `Estimate.energy` counts it
    "missing",
    "idle_now",  # share of the devices that no stage has
    "idle",
    "microbatches",  # log2 of how many times as many micro-batches
    "stages",  # how many stages more
    "load",  # busy seconds now of the stages that the move names over the slowest's; 1 where it names none
    "relieves",  # 1 if one of those stages is the slowest
    "is_layers",  # shift, balance
    "is_devices",  # tp, devices, group
    "is_recompute",
    "is_structure",  # remove, split, insert, swap, merge
    "moves_left",  # of the episode
    "speed_up",  # 0.25 squashed: iteration time that the episode began with over that now, which is priced already
)
WIDEST = 4.0  # no feature is larger
GROUPS_OF_KINDS = {
    "is_layers": ("shift", "balance"),
    "is_devices": ("tp", "devices", "group"),
    "is_recompute": ("recompute",),
    "is_structure": ("remove", "split", "insert", "swap", "merge"),
}


def squashed(ratio: float) -> float:
    """4 tanh(log ratio)."""
    return 4.0 * math.tanh(math.log(ratio))


class Look(NamedTuple):
    """What the features are made of: single stages of one plan."""

    loads_s: list[float]
    slowest: int
    round_trip_s: float
    balance: float
    tail: float
    memory: float
    missing: float
    idle: float

    @classmethod
    def at(cls, space: Space, genome: Genome, estimate: Estimate) -> Look:
        """Of a genome and its estimate, whose iteration time is not looked at."""
        loads = estimate.loads_s
        slowest = loads.index(max(loads))
        parts = [part for stage in estimate.memory for part in stage]
        capacity = sum(part.capacity_bytes for part in parts)
        return cls(
            loads,
            slowest,
            sum(stage.busy_s for stage in estimate.stages) + 2.0 * sum(estimate.delays_s),
            sum(loads) / len(loads) / max(loads),
            estimate.stages[slowest].tail_s / loads[slowest],
            max(part.needed_bytes / part.capacity_bytes for part in parts),
            0.0 if estimate.fits else 1.0 + estimate.bytes_missing / capacity,
            sum(space.devices_left(genome.options)) / sum(space.num_devices),
        )


def rows(
    space: Space,
    genome: Genome,
    edits: Sequence[Move],
    price: Callable[[Genome], Estimate],
    moves_left: float,
    speed_up: float,
) -> npt.NDArray[np.float32]:
    """(moves + 1, features) of every move of `edits` and, last, of staying.

    price: the estimate of a genome. moves_left: share of the episode's. speed_up: iteration time that the episode began
    with over that now.
    """
    now = Look.at(space, genome, price(genome))
    found: npt.NDArray[np.float32] = np.zeros((len(edits) + 1, len(FEATURES)), np.float32)
    for row, move in zip(found, edits, strict=False):
        after = moves.apply(space, genome, move)
        if after is not None:
            row[:] = _row(genome, now, after, Look.at(space, after, price(after)), move, moves_left, speed_up)
    if not found.any():
        found[-1] = _row(genome, now, genome, now, None, moves_left, speed_up)
    return found


def _row(
    genome: Genome, now: Look, after: Genome, then: Look, move: Move | None, moves_left: float, speed_up: float
) -> list[float]:
    """The features of one legal move, or of staying."""
    m, p = after.num_microbatches, len(after.options)
    now_s, then_s = now.loads_s[now.slowest], then.loads_s[then.slowest]
    load = max(now.loads_s[i] for i in named(move, len(genome.options)))
    values = {
        "legal": 1.0,
        "stay": float(move is None),
        "slowest": squashed(then_s / now_s),
        "round_trip": squashed(then.round_trip_s / now.round_trip_s),
        "fill_now": now.round_trip_s / (now.round_trip_s + now_s),
        "bubble": (p - 1) / (m + p - 1),
        "balance_now": now.balance,
        "balance": then.balance,
        "tail": then.tail,
        "memory_now": now.memory,
        "memory": then.memory,
        "missing_now": now.missing,
        "missing": then.missing,
        "idle_now": now.idle,
        "idle": then.idle,
        "microbatches": math.log2(m / genome.num_microbatches),
        "stages": float(p - len(genome.options)),
        "load": load / now_s,
        "relieves": float(load == now_s),
        **{name: float(move is not None and move.kind in kinds) for name, kinds in GROUPS_OF_KINDS.items()},
        "moves_left": moves_left,
        "speed_up": 0.25 * squashed(speed_up),
    }
    return [min(max(values[name], -WIDEST), WIDEST) for name in FEATURES]


def named(move: Move | None, p: int) -> Sequence[int]:
    """The stages of p that a move names; all of them where it is about none in particular."""
    if move is None or move.kind in ("balance", "microbatches"):
        return range(p)
    if move.kind == "shift":
        return move.stage, move.stage + move.argument
    if move.kind in ("swap", "merge"):
        return move.stage, move.stage + 1
    return (move.stage,)
