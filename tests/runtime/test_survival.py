"""A training that loses a rank goes on under another plan, and its losses are those of one process."""

import socket

import pytest

from haap_rl.runtime import survival
from haap_rl.runtime.device import NATIVE
from haap_rl.runtime.session import RankError
from haap_rl.runtime.survival import train_in_pieces
from haap_rl.runtime.training import one_process
from tests.runtime import planted
from tests.runtime.plans import GPT, PLANS, job, plan, problem, stage

JOB = job(problem(GPT))
THREE = PLANS["three stages"]
TWO = plan(stage(3, ("a", 1, 1, 6)), stage(3, ("b", 1, 1, 6)))  # the device of the middle stage is gone


def pieces(plans, every=1, steps=4, port=0):
    return train_in_pieces(JOB, plans, (NATIVE, NATIVE), steps, every, None, "cpu", port, 20.0)


@pytest.fixture
def one_dies(monkeypatch):
    monkeypatch.setattr(survival, "train", planted.die_in_the_third_step)


def test_another_plan_goes_on_from_the_last_checkpoint(one_dies):
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        port = some.getsockname()[1]
    survived = pieces((THREE, TWO), port=port)
    assert "rank 1 (stage 1) in 'backward' of micro-batch 1" in survived.why
    assert survived.plan == TWO
    losses = [*survived.before, *survived.found[0].report.losses]
    alone, _ = one_process(JOB, 4)
    assert len(losses) == 4
    assert max(abs(a - b) for a, b in zip(losses, alone, strict=True)) <= 1e-5


def test_a_second_loss_ends_it(one_dies):
    with pytest.raises(RankError, match="rank 1"):
        pieces((THREE, THREE))
