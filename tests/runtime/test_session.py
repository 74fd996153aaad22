"""Whatever goes wrong, one line names it, and no process stays behind."""

import multiprocessing
import os
import socket
import time
from multiprocessing import connection
from pathlib import Path

import pytest

from haap_rl.problem.errors import InputError
from haap_rl.runtime import session as session_module
from haap_rl.runtime.session import RankError, Session
from haap_rl.runtime.training import train
from tests.runtime import planted
from tests.runtime.plans import GPT, PLANS, job, plan, problem, stage

JOB = job(problem(GPT))
TP_2 = plan(stage(6, ("a", 2, 1, 6)))


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "zombie" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")


def all_gone(pids, within_s=20.0):
    until = time.monotonic() + within_s
    while time.monotonic() < until and any(map(is_running, pids)):
        time.sleep(0.1)
    return not any(map(is_running, pids))


def test_a_rank_that_dies_is_named_and_all_are_ended():
    with Session(3, timeout_s=20.0) as session:
        pids = session.pids
        with pytest.raises(RankError) as error:
            session.call(planted.die_in_backward, 1, JOB, PLANS["three stages"], 2)
    assert "rank 1 (stage 1) in 'backward' of micro-batch 1" in str(error.value)
    assert "SIGKILL" in str(error.value)
    assert "\n" not in str(error.value)
    assert all_gone(pids)


def test_a_rank_that_hangs_is_named_not_those_that_wait_for_it():
    with Session(3, timeout_s=3.0) as session:
        pids = session.pids
        with pytest.raises(RankError, match=r"rank 1 \(stage 1\) in 'forward' of micro-batch 0: nothing for 3 s"):
            session.call(planted.hang_in_forward, 1, JOB, PLANS["three stages"], 2)
    assert all_gone(pids)


def test_a_tensor_parallel_peer_that_stops_is_named_though_its_peer_waits_as_long():
    named = pytest.raises(RankError, match=r"rank 1 \(stage 0\) in .*: nothing for 4 s")
    with Session(2, timeout_s=4.0) as session, named:
        session.call(planted.stop_itself, 1, JOB, TP_2, 200)


def test_a_tensor_parallel_peer_that_dies_is_named_also_where_another_speaks_first(monkeypatch):
    slow = connection.wait
    monkeypatch.setattr(session_module.connection, "wait", lambda *given: (time.sleep(0.5), slow(*given))[1])
    with Session(2, timeout_s=20.0) as session, pytest.raises(RankError, match=r"rank 1 .* by signal SIGKILL"):
        session.call(planted.die_in_backward, 1, JOB, TP_2, 2)


def test_a_port_is_free_again_when_a_session_is_over():
    with Session(1) as first:
        port = first._store.port
    with Session(1, port=port) as second:
        assert second.call(divide_not) == [1]


def divide_not(member):
    return member.world_size


def test_an_error_of_our_own_is_reported_whole():
    with Session(1) as session, pytest.raises(RuntimeError, match="ZeroDivisionError"):
        session.call(divide)


def divide(member):
    return 1 // (member.world_size - 1)


def test_a_plan_of_more_ranks_than_processes_is_one_line():
    with Session(1) as session, pytest.raises(InputError, match="needs 3 ranks and there are processes=1"):
        session.call(train, JOB, PLANS["three stages"], 1)


def test_a_port_in_use_is_one_line():
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"port={port} cannot be used"):
            Session(1, port=port)


def drive(pipe):
    with Session(2) as session:
        pipe.send(session.pids)
        session.call(wait)


def wait(member):
    time.sleep(1000)


def test_no_process_stays_behind_when_the_driver_is_killed():
    """Ctrl-C is with the command line's tests."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    driver = context.Process(target=drive, args=(theirs,))
    driver.start()
    assert ours.poll(60)
    pids = ours.recv()
    assert len(pids) == 2
    assert all(map(is_running, pids))
    driver.kill()
    driver.join(20)
    assert all_gone([driver.pid, *pids])
