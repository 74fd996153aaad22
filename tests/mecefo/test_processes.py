"""Real processes: one is killed, its neighbour takes over, it returns, and training is as in the simulation."""

import contextlib
import math
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from haap_rl.mecefo.checkpoint import Checkpoints
from haap_rl.mecefo.failures import Cell, Grid, Outage, Restart, Restarted, Schedule
from haap_rl.mecefo.job import CharacterPretraining
from haap_rl.mecefo.options import MecefoOptions
from haap_rl.mecefo.pretrain import pretrain
from haap_rl.mecefo.processes import train_in_processes

STEPS = 14
JOB = CharacterPretraining(steps=STEPS, samples=2, length=32)
TIMEOUT_S = 20.0


def simulated(schedule, options, ranks=3, every=STEPS):
    """Losses and weights of the same training on simulated ranks."""
    checkpoints = Checkpoints(every)
    found = pretrain(JOB, Grid(ranks), schedule, options, checkpoints=checkpoints)
    return found.losses, checkpoints.last()[0]["model"]


def all_equal(weights):
    first, *others = weights.values()
    return all(torch.equal(first[name], other[name]) for other in others for name in first)


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("options", [MecefoOptions(rank=8, refresh_steps=3), MecefoOptions(rank=8, takeover="spread")])
def test_a_killed_rank_is_taken_over_from_and_returns(options):
    seen: dict[int, set[int]] = {}
    schedule = Schedule((Outage(Cell(1, 0), 4, 9),))
    run = train_in_processes(
        JOB, 3, STEPS, schedule, options, timeout_s=TIMEOUT_S, watch=lambda step, pids: seen.update({step: set(pids)})
    )
    assert [(g.members, g.begin, g.behind) for g in run.generations] == [
        ((0, 1, 2), 0, ()),
        ((0, 2), 4, ()),
        ((0, 1, 2), 9, (1,)),
    ]
    assert [len(seen[step]) for step in range(1, STEPS + 1)] == [3] * 4 + [2] * 5 + [3] * 5

    losses, weights = simulated(schedule, options)
    assert all(map(math.isfinite, run.losses))
    assert run.losses == pytest.approx(losses, abs=1e-4)
    assert sorted(run.weights) == [0, 1, 2]
    assert all_equal(run.weights)
    assert all(torch.allclose(run.weights[1][name], weights[name], atol=1e-4) for name in weights)
    assert not multiprocessing.active_children()


def test_neighbours_that_die_in_one_step_are_taken_over_from_and_return_one_after_the_other():
    schedule = Schedule((Outage(Cell(1, 0), 3, 9), Outage(Cell(2, 0), 3, 6), Outage(Cell(0, 0), 5, 5)))
    options = MecefoOptions(rank=8, refresh_steps=4)
    run = train_in_processes(JOB, 4, STEPS, schedule, options, timeout_s=TIMEOUT_S)
    assert {g.begin: g.members for g in run.generations} == {
        0: (0, 1, 2, 3),
        3: (0, 3),
        6: (0, 2, 3),
        9: (0, 1, 2, 3),
    }
    losses, weights = simulated(schedule, options, 4)
    assert run.losses == pytest.approx(losses, abs=1e-4)
    assert all_equal(run.weights)
    assert all(torch.allclose(run.weights[2][name], weights[name], atol=1e-4) for name in weights)


def test_without_failures_processes_are_data_parallelism_bit_for_bit():
    run = train_in_processes(JOB, 2, 3, Schedule(), MecefoOptions(rank=8), timeout_s=TIMEOUT_S)
    model = JOB.model()
    optimizer = JOB.optimizer(model)
    for step in range(3):
        own = []
        for rank in range(2):
            model.zero_grad()
            JOB.loss(model, JOB.batch(step, rank)).backward()
            own.append([p.grad for p in model.parameters()])
        for parameter, first, second in zip(model.parameters(), *own, strict=True):
            parameter.grad = (first + second) / 2
        JOB.update(model, optimizer, step)
    assert len(run.generations) == 1
    assert all(torch.equal(run.weights[1][name], weight) for name, weight in model.state_dict().items())


def test_a_rank_killed_by_somebody_else_at_any_time_stays_away_and_the_others_end_equal():
    victims = []

    def kill(step, pids):
        if step == 5 and not victims:
            victims.append(pids[2])
            os.kill(pids[2], signal.SIGKILL)

    run = train_in_processes(JOB, 3, STEPS, Schedule(), MecefoOptions(rank=8), timeout_s=TIMEOUT_S, watch=kill)
    assert run.generations[-1].members == (0, 1)
    assert len(run.losses) == STEPS
    assert all(map(math.isfinite, run.losses))
    assert sorted(run.weights) == [0, 1]
    assert all_equal(run.weights)
    assert not is_running(victims[0])


def test_a_rank_that_hangs_is_taken_for_dead():
    def stop(step, pids):
        if step == 5 and 1 in pids:
            os.kill(pids[1], signal.SIGSTOP)

    run = train_in_processes(JOB, 2, STEPS, Schedule(), MecefoOptions(rank=8), timeout_s=4.0, watch=stop)
    assert run.generations[-1].members == (0,)
    assert len(run.losses) == STEPS
    assert not multiprocessing.active_children()


NOBODY_LEFT = Schedule((Outage(Cell(0, 0), 4, 9), Outage(Cell(1, 0), 4, 7)))


def assert_as_simulated(run, schedule, options, ranks, every):
    losses, weights = simulated(schedule, options, ranks, every)
    assert run.losses == pytest.approx(losses, abs=1e-4)
    assert sorted(run.weights) == list(range(ranks))
    assert all_equal(run.weights)
    assert all(torch.allclose(run.weights[0][name], weights[name], atol=1e-4) for name in weights)


def test_when_nobody_is_left_training_waits_for_repair_and_goes_on_from_the_last_checkpoint():
    pids: dict[int, set[int]] = {}
    run = train_in_processes(
        JOB,
        2,
        STEPS,
        NOBODY_LEFT,
        MecefoOptions(rank=8, refresh_steps=4),
        timeout_s=TIMEOUT_S,
        watch=lambda step, now: pids.setdefault(step, set()).update(now.values()),
        checkpoints=Checkpoints(3),
    )
    assert [(g.members, g.begin, g.behind) for g in run.generations] == [
        ((0, 1), 0, ()),
        ((1,), 3, ()),
        ((0, 1), 5, (0,)),
    ]
    assert run.timeline.restarts == (Restarted(failed=4, failed_clock=4, step=3, clock=7),)
    assert len(pids[4]) == 3  # step 3 was done by the first two, and by the one that came back
    assert_as_simulated(run, NOBODY_LEFT, MecefoOptions(rank=8, refresh_steps=4), 2, 3)
    assert not any(is_running(pid) for step in pids for pid in pids[step])
    assert not multiprocessing.active_children()


def test_an_overload_ends_the_ranks_that_live_if_so_asked():
    """At clock 5 rank 0 is left alone; rank 2 is back at 7, rank 1 at 9, which is step 5, or 8 with new projectors."""
    schedule = Schedule((Outage(Cell(1, 0), 4, 9), Outage(Cell(2, 0), 5, 7)))
    options = MecefoOptions(rank=8, refresh_steps=4, on_overload="restart", return_rule="refresh_boundary")
    run = train_in_processes(JOB, 3, STEPS, schedule, options, timeout_s=TIMEOUT_S, checkpoints=Checkpoints(3))
    assert [(g.members, g.begin) for g in run.generations] == [
        ((0, 1, 2), 0),
        ((0, 2), 4),
        ((0, 2), 3),
        ((0, 1, 2), 8),
    ]
    assert run.timeline.restarts == (Restarted(5, 5, 3, 7),)
    assert_as_simulated(run, schedule, options, 3, 3)


def test_where_nobody_is_left_and_nobody_will_be_back_training_ends():
    def kill(step, pids):
        if step == 5:
            for pid in pids.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    with pytest.raises(Restart, match="no live cell is left in a stage, and no repair lets training be done"):
        train_in_processes(JOB, 2, STEPS, Schedule(), MecefoOptions(rank=8), timeout_s=TIMEOUT_S, watch=kill)
    assert not multiprocessing.active_children()


def test_a_training_that_was_ended_goes_on_from_its_file(tmp_path):
    def stop(step, pids):
        if step == 8:
            raise KeyboardInterrupt

    options = MecefoOptions(rank=8, refresh_steps=4)
    settings = {"checkpoints": Checkpoints(3, tmp_path / "training", {"seed": 0}), "timeout_s": TIMEOUT_S}
    with pytest.raises(KeyboardInterrupt):
        train_in_processes(JOB, 2, STEPS, NOBODY_LEFT, options, watch=stop, **settings)
    run = train_in_processes(JOB, 2, STEPS, NOBODY_LEFT, options, **settings)
    assert [g.begin for g in run.generations] == [6]
    assert (run.timeline.lost, run.timeline.waited) == (1, 3)
    assert_as_simulated(run, NOBODY_LEFT, options, 2, 3)


ENDLESS = """
from haap_rl.mecefo.processes import *
from haap_rl.mecefo.job import CharacterPretraining

def say(step, pids):
    if step == 2:
        print(*pids.values(), flush=True)

if __name__ == "__main__":
    job = CharacterPretraining(steps=10**6, samples=1, length=16)
    train_in_processes(job, 2, 10**6, Schedule(), MecefoOptions(rank=8), watch=say)
"""


def test_no_rank_outlives_a_driver_that_is_killed(tmp_path):
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # nobody is left to clear it up
    driver = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment)
    pids = driver.stdout.readline().split()
    assert len(pids) == 2
    driver.kill()
    driver.communicate(timeout=TIMEOUT_S)  # which returns when the last process that inherited its output has ended


@dataclass(frozen=True, slots=True)
class Faulty(CharacterPretraining):
    """A job with a mistake in it."""

    def loss(self, model, batch):
        raise ArithmeticError("a mistake of the job's own")


def test_a_mistake_in_the_job_is_reported_and_no_failure_to_live_with():
    with pytest.raises(RuntimeError, match="a mistake of the job's own"):
        train_in_processes(Faulty(), 2, STEPS, Schedule(), MecefoOptions(rank=8), timeout_s=TIMEOUT_S)
    assert not multiprocessing.active_children()


def test_outages_of_later_stages_are_refused():
    with pytest.raises(ValueError, match="a process is a whole replica"):
        train_in_processes(JOB, 2, STEPS, Schedule((Outage(Cell(0, 1), 1, 2),)), MecefoOptions(rank=8))
