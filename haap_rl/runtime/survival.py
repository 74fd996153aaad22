"""A training that outlives a rank: when one dies or hangs, another plan goes on from the last checkpoint.

Names in a checkpoint are those of the whole model, so the plan that goes on may have other stages, replicas and tensor
parallelism, on fewer devices: that of another search, or what a policy of `haap_rl.faults` makes of the plan.
"""

from __future__ import annotations

from typing import NamedTuple

from haap_rl.problem.plan import Plan
from haap_rl.runtime.device import Pacing
from haap_rl.runtime.job import Job, num_ranks
from haap_rl.runtime.session import OnStep, RankError, Session
from haap_rl.runtime.training import Checkpoint, Trained, train


class Survived(NamedTuple):
    """What came of a training in pieces of some steps.

    found    what the ranks bring back of the last piece, and the plan that they trained
    begin    the checkpoint that this piece began with; None: the seed's weights
    before   losses of the steps before it
    why      what happened to the rank that was lost; "" where none was
    """

    found: list[Trained]
    plan: Plan
    begin: Checkpoint | None
    before: list[float]
    why: str


def train_in_pieces(
    job: Job,
    plans: tuple[Plan, Plan],
    pacings: tuple[Pacing, Pacing],
    steps: int,
    every: int,
    begin: Checkpoint | None,
    kind: str,
    port: int,
    timeout_s: float,
    on_step: OnStep | None = None,
) -> Survived:
    """Train the first of two plans with a checkpoint every `every` of `steps` steps, the second when a rank is lost.

    The second plan's processes are started anew, and repeat what was trained since the last checkpoint. Raises
    RankError where they lose a rank too, and as `Session` does.
    """
    first_step = 0 if begin is None else begin.step
    losses: list[float] = []
    why = ""
    for plan, pacing in zip(plans, pacings, strict=True):
        try:
            with Session(num_ranks(plan), kind, port, timeout_s, on_step) as session:
                while True:
                    done = 0 if begin is None else begin.step - first_step
                    piece = min(every, steps - done)
                    found = session.call(train, job, plan, piece, pacing, begin, True)
                    if done + piece == steps:
                        return Survived(found, plan, begin, losses, why)
                    begin = found[0].checkpoint
                    losses += found[0].report.losses
        except RankError as error:
            if why:
                raise
            why = str(error)
    raise AssertionError("a training neither ended nor lost a rank")
