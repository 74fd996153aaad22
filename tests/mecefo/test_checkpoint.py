"""Where failures cannot be lived with, training goes on from its last checkpoint; a file outlives the training."""

import pytest
import torch

from haap_rl.mecefo import pretrain as command
from haap_rl.mecefo.checkpoint import Checkpoints, Training
from haap_rl.mecefo.failures import UNBROKEN, Cell, Grid, Outage, Restart, Restarted, Schedule
from haap_rl.mecefo.job import CharacterPretraining
from haap_rl.mecefo.options import MecefoOptions
from haap_rl.mecefo.parallel import FaultyDataParallel
from haap_rl.mecefo.pretrain import pretrain

STEPS = 10
JOB = CharacterPretraining(steps=STEPS, samples=1, length=16)
OPTIONS = MecefoOptions(rank=8, refresh_steps=2)


def trained(schedule, grid, options=OPTIONS, every=3, policy="mecefo"):
    """What `pretrain` says, and the final weights."""
    checkpoints = Checkpoints(every)
    found = pretrain(JOB, grid, schedule, options, policy=policy, checkpoints=checkpoints)
    return found, checkpoints.last()[0]["model"]


def by_hand(schedule, grid, options=OPTIONS, policy="mecefo"):
    """Losses and weights of a training that is never restarted."""
    model = JOB.model()
    optimizer, losses = JOB.optimizer(model), []
    parallel = FaultyDataParallel(model, JOB.loss, grid, schedule, options, policy=policy)
    for step in range(STEPS):
        losses.append(parallel.backward([JOB.batch(step, rank) for rank in range(grid.ranks)], step))
        JOB.update(model, optimizer, step)
    return losses, model.state_dict()


def assert_same(found, right):
    (run, weights), (losses, right_weights) = found, right
    assert run.losses == losses
    assert all(torch.equal(weights[name], right_weights[name]) for name in right_weights)


def test_after_a_dead_stage_training_goes_on_from_the_last_checkpoint_when_a_cell_of_it_is_back():
    """Clock 0 to 4: steps 0 to 4. At 5 stage 1 is dead, until 8: steps 3 and 4 are done again, and all others."""
    dead = (Outage(Cell(0, 1), 5, 8), Outage(Cell(1, 1), 2, 11))
    others = (Outage(Cell(0, 0), 4, 5), Outage(Cell(1, 0), 12, 13))  # the first is of a step that is lost
    found = trained(Schedule((*dead, *others)), Grid(2, 2))
    assert found[0].timeline.restarts == (Restarted(failed=5, failed_clock=5, step=3, clock=8),)
    assert (found[0].timeline.lost, found[0].timeline.waited) == (2, 3)
    as_steps = Schedule((Outage(Cell(1, 1), 2, 3), Outage(Cell(1, 1), 3, 6), Outage(Cell(1, 0), 7, 8)))
    assert_same(found, by_hand(as_steps, Grid(2, 2)))


def test_an_overload_restarts_if_so_asked():
    options = MecefoOptions(rank=8, on_overload="restart")
    schedule = Schedule((Outage(Cell(0, 0), 4, 9), Outage(Cell(1, 0), 4, 6)))
    found = trained(schedule, Grid(4), options)
    assert found[0].timeline.restarts == (Restarted(4, 4, 3, 6),)
    assert_same(found, by_hand(Schedule((Outage(Cell(0, 0), 3, 6),)), Grid(4), options))


def test_dropping_replicas_restarts_when_none_is_left():
    schedule = Schedule((Outage(Cell(0, 0), 1, 3), Outage(Cell(1, 1), 1, 3)))
    found = trained(schedule, Grid(2, 2), policy="drop_replica")
    assert found[0].timeline.restarts == (Restarted(1, 1, 0, 3),)
    assert_same(found, by_hand(Schedule(), Grid(2, 2), policy="drop_replica"))


def test_restarts_follow_each_other_and_the_clock_counts_all_of_them():
    dead = [Outage(Cell(0, 0), start, start + 2) for start in (2, 5, 12)]
    found = trained(Schedule(tuple(dead)), Grid(1))
    assert found[0].timeline.restarts == (Restarted(2, 2, 0, 4), Restarted(1, 5, 0, 7), Restarted(5, 12, 3, 14))
    assert found[0].timeline.clock(STEPS) == STEPS + found[0].timeline.lost + found[0].timeline.waited
    assert_same(found, by_hand(Schedule(), Grid(1)))


def test_training_ends_where_failures_outpace_repair():
    outages = tuple(Outage(Cell(0, 0), start, start + 2) for start in range(2, 1000, 4))
    with pytest.raises(Restart, match=r"100 steps, 10 times its own: 0 of 10 are in the last checkpoint"):
        trained(Schedule(outages), Grid(1))
    assert trained(Schedule(outages), Grid(1), every=1)[0].timeline.lost == 0


def test_a_checkpoint_is_a_copy():
    def training():
        model = JOB.model()
        parallel = FaultyDataParallel(model, JOB.loss, Grid(1), Schedule(), OPTIONS)
        return parallel, Training(model, JOB.optimizer(model), parallel.degradable.projectors)

    def go_on(parallel, found):
        found.losses.append(parallel.backward([JOB.batch(found.step, 0)], found.step))
        JOB.update(found.model, found.optimizer, found.step)

    (parallel, found), checkpoints = training(), Checkpoints(2)
    go_on(parallel, found)
    checkpoints.keep(found, UNBROKEN, STEPS)
    assert checkpoints.last() is None  # not due
    go_on(parallel, found)
    checkpoints.keep(found, UNBROKEN, STEPS)
    weights = {name: weight.clone() for name, weight in found.model.state_dict().items()}
    go_on(parallel, found)
    _, other = training()
    checkpoints.restore(other)
    assert other.losses == found.losses[:2]
    assert all(torch.equal(weights[name], weight) for name, weight in other.model.state_dict().items())
    assert not torch.equal(found.model.state_dict()["lm_head.weight"], weights["lm_head.weight"])
    assert other.optimizer.state_dict()["state"][0]["step"] == 2


# ------------------------------------------------------------------------------------------ the command's file
ARGUMENTS = ["steps=20", "samples=1", "length=16", "ranks=2", "failure_steps=3", "recovery_steps=4", "error_steps=3"]
ARGUMENTS += ["checkpoint_steps=4"]


@pytest.fixture
def stopped(monkeypatch):
    """Lets training be interrupted before a step; the step is done when it is begun again."""
    at = []
    batch = CharacterPretraining.batch

    def interrupted(job, step, rank):
        if step in at:
            at.remove(step)
            raise KeyboardInterrupt
        return batch(job, step, rank)

    monkeypatch.setattr(CharacterPretraining, "batch", interrupted)
    return at


def test_a_training_that_was_killed_goes_on_and_ends_with_the_same_figures(tmp_path, stopped, capsys):
    assert command.main(ARGUMENTS) == 0
    whole = capsys.readouterr().out
    assert "restarts from a checkpoint:" in whole
    arguments = [*ARGUMENTS, f"checkpoint={tmp_path / 'training'}"]
    for step in (1, 10, 19):
        stopped.append(step)
        assert command.main(arguments) == 130
    capsys.readouterr()
    for _ in range(2):  # and once more, from the checkpoint of the last step
        assert command.main(arguments) == 0
        assert capsys.readouterr().out == whole
    assert [path.name for path in tmp_path.iterdir()] == ["training"]


@pytest.mark.parametrize("damage", ["empty", "short", "shorter", "flipped"])
def test_a_damaged_file_is_refused_in_one_line(tmp_path, damage, capsys):
    path = tmp_path / "training"
    arguments = ["steps=1", *ARGUMENTS[1:], f"checkpoint={path}"]
    assert command.main(arguments) == 0
    whole = path.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    path.write_bytes({"empty": b"", "short": whole[:-1], "shorter": whole[:40], "flipped": flipped}[damage])
    capsys.readouterr()
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert error == f"mecefo: checkpoint={path} is no whole checkpoint; delete it to begin anew, or give another file\n"


def test_a_file_of_another_training_or_none_that_can_be_is_refused_in_one_line(tmp_path, capsys):
    path = tmp_path / "training"
    assert command.main([*ARGUMENTS[1:], "steps=1", f"checkpoint={path}"]) == 0
    for arguments, says in (
        ([f"checkpoint={path}", "steps=2"], "is of another training, with steps=1, not 2"),
        ([f"checkpoint={path}", "steps=1", "seed=4"], "is of another training, with seed=0, not 4"),
        ([f"checkpoint={path}", "steps=1", "rank=4"], "is of another training, with rank=8, not 4"),
        ([f"checkpoint={tmp_path}", "steps=1"], "cannot be read: Is a directory"),
        ([f"checkpoint={tmp_path / 'no' / 'folder'}", "steps=1"], "cannot be written; give a file in a folder"),
        (["checkpoint_steps=0", "steps=1"], "mecefo: checkpoint_steps=0 leaves nothing to do"),
    ):
        capsys.readouterr()
        assert command.main([*ARGUMENTS[1:-1], "checkpoint_steps=4", *arguments]) == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1
