"""Who does what in a plan and who sends what to whom: pure, no torch, so that order can be tested without devices.

Ranks are numbered stage after stage, replica after replica. Hidden states are whole on every tensor-parallel rank at a
stage's border, so between two stages with other degrees every receiving rank gets each part of its samples from one
rank of the replica that has it: from the one whose tp index is its own modulo that replica's tp. Gradients come back
by the same rule, read backwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from haap_rl.problem.plan import Plan, ReplicaGroup, Stage
from haap_rl.runtime.schedule import operations

Direction = Literal["down", "up"]  # activations to the next stage, gradients to the one before


class Place(NamedTuple):
    """What one rank is: a tensor-parallel index of a replica of a stage.

    group            device group it stands for; replica_group: which of the stage's replica groups
    replica          number of the replica in its stage
    first, end       samples of each micro-batch that the replica takes, end not included
    """

    rank: int
    stage: int
    group: str
    replica_group: int
    replica: int
    tp: int
    tp_index: int
    first: int
    end: int


class Message(NamedTuple):
    """Samples `first` to `end` (not included) of each micro-batch, from one rank to another, always in that order."""

    sender: int
    receiver: int
    first: int
    end: int


class Transfer(NamedTuple):
    """One send or receive of a rank, in the order in which it starts them."""

    direction: Direction
    is_send: bool
    peer: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Routes:
    """The ranks of a plan and all their messages.

    units     per stage, its units as (first, end), end not included
    stages    per stage, per replica, its ranks in the order of their tp index
    down, up  per boundary, the messages of every micro-batch
    samples   of a micro-batch
    """

    places: tuple[Place, ...]
    units: tuple[tuple[int, int], ...]
    stages: tuple[tuple[tuple[int, ...], ...], ...]
    down: tuple[tuple[Message, ...], ...]
    up: tuple[tuple[Message, ...], ...]
    num_microbatches: int
    samples: int

    @property
    def num_ranks(self) -> int:
        return len(self.places)

    @property
    def outer_ranks(self) -> tuple[int, ...]:
        """The ranks of the first and of the last stage, which share a tied embedding."""
        return tuple(rank for stage in (self.stages[0], self.stages[-1]) for ranks in stage for rank in ranks)

    def pieces(self, stage: int) -> int:
        """Into how many equal pieces a sharded weight of the stage falls, so that every rank holds whole ones.

        More than tp only where the stage's replicas differ in tp.
        """
        return math.lcm(*(len(ranks) for ranks in self.stages[stage]))

    def holders(self, stage: int, piece: int) -> tuple[int, ...]:
        """One rank of each replica of the stage: those that hold this piece, whose gradients must be summed."""
        pieces = self.pieces(stage)
        return tuple(ranks[piece * len(ranks) // pieces] for ranks in self.stages[stage])


def routes(plan: Plan, samples: int) -> Routes:
    """The Routes of a legal plan whose micro-batches have `samples` samples."""
    places: list[Place] = []
    stages: list[tuple[tuple[int, ...], ...]] = []
    units: list[tuple[int, int]] = []
    for i, stage in enumerate(plan.stages):
        begin = units[-1][1] if units else 0
        units.append((begin, begin + stage.num_units))
        replicas: list[tuple[int, ...]] = []
        first = 0
        for j, group in enumerate(stage.replicas):
            for _ in range(group.dp):
                end = first + group.microbatch_size
                ranks = range(len(places), len(places) + group.tp)
                places += [
                    Place(rank, i, group.group, j, len(replicas), group.tp, index, first, end)
                    for index, rank in enumerate(ranks)
                ]
                replicas.append(tuple(ranks))
                first = end
        stages.append(tuple(replicas))
    borders = range(len(stages) - 1)
    return Routes(
        places=tuple(places),
        units=tuple(units),
        stages=tuple(stages),
        down=tuple(_messages(places, stages[i], stages[i + 1]) for i in borders),
        up=tuple(_messages(places, stages[i + 1], stages[i]) for i in borders),
        num_microbatches=plan.num_microbatches,
        samples=samples,
    )


def routes_of_replicas(tp: int, dp: int) -> Routes:
    """The Routes of one stage of dp replicas of tp ranks, a sample each: who meets whom, without a model."""
    return routes(Plan((Stage(1, (ReplicaGroup("here", tp, dp, 1),)),), 1), dp)


def _messages(
    places: list[Place], senders: tuple[tuple[int, ...], ...], receivers: tuple[tuple[int, ...], ...]
) -> tuple[Message, ...]:
    """One message per receiving rank and sending replica whose samples overlap."""
    found = []
    for receiving in receivers:
        for sending in senders:
            theirs, mine = places[sending[0]], places[receiving[0]]
            first, end = max(theirs.first, mine.first), min(theirs.end, mine.end)
            if first < end:
                found += [
                    Message(sending[index % len(sending)], rank, first, end) for index, rank in enumerate(receiving)
                ]
    return tuple(found)


def incoming(routes: Routes, place: Place, direction: Direction) -> tuple[Message, ...]:
    """What a rank receives for every micro-batch: activations ("down"), or gradients of its output ("up")."""
    border = place.stage - 1 if direction == "down" else place.stage
    sides = routes.down if direction == "down" else routes.up
    return tuple(m for m in sides[border] if m.receiver == place.rank) if 0 <= border < len(sides) else ()


def outgoing(routes: Routes, place: Place, direction: Direction) -> tuple[Message, ...]:
    """What a rank sends for every micro-batch: its output ("down"), or gradients of its input ("up")."""
    border = place.stage if direction == "down" else place.stage - 1
    sides = routes.down if direction == "down" else routes.up
    return tuple(m for m in sides[border] if m.sender == place.rank) if 0 <= border < len(sides) else ()


def transfers(routes: Routes, place: Place) -> list[Transfer]:
    """Every send and receive of a rank in one step, in order: what a deadlock would come from."""
    order = []
    for op in operations(len(routes.stages), place.stage, routes.num_microbatches):
        direction: Direction = "down" if op.is_forward else "up"
        order += [Transfer(direction, False, m.sender, op.microbatch) for m in incoming(routes, place, direction)]
        order += [Transfer(direction, True, m.receiver, op.microbatch) for m in outgoing(routes, place, direction)]
    return order
