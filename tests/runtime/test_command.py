"""`python -m haap_rl.runtime`: what it writes, and one line for whatever is wrong."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from haap_rl.problem.plan import Plan, Recompute, ReplicaGroup, Stage
from haap_rl.problem.presets import load_problem
from haap_rl.runtime import results
from haap_rl.runtime.__main__ import main
from haap_rl.runtime.job import check_runs, tiny
from haap_rl.runtime.results import against_one_process, finite_or_none
from haap_rl.runtime.training import Checkpoint

ROOT = Path(__file__).resolve().parents[2]
WHOLE = load_problem("gpt3_350m", "v100x4_t4x4", global_batch_size=8)
PROBLEM = replace(WHOLE, model=replace(WHOLE.model, num_layers=4))
PLAN = Plan(
    (
        Stage(4, (ReplicaGroup("v100", 2, 1, 4),), Recompute("full", 3)),
        Stage(2, (ReplicaGroup("t4", 1, 1, 3), ReplicaGroup("t4", 1, 1, 1))),
    ),
    2,
)
GIVEN = ("model=gpt3_350m", "cluster=v100x4_t4x4", "problem.global_batch_size=8", "model.num_layers=4")


@pytest.fixture
def two_ranks(tmp_path):
    """A plan of as few processes as can be."""
    plan = Plan((Stage(4, (ReplicaGroup("v100", 1, 1, 4),)), Stage(2, (ReplicaGroup("t4", 1, 1, 4),))), 2)
    path = tmp_path / "two_ranks.json"
    path.write_text(json.dumps(PROBLEM.plan_to_json(plan)))
    return path


@pytest.fixture
def plan_file(tmp_path):
    PROBLEM.validate(PLAN)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PROBLEM.plan_to_json(PLAN)))
    return path


def test_a_plan_is_run_checked_kept_and_gone_on_with(plan_file, tmp_path, capsys):
    out, kept = tmp_path / "out", tmp_path / "training.pt"
    assert main([f"plan={plan_file}", *GIVEN, "steps=2", "check=true", f"out={out}", f"save={kept}"]) == 0
    printed = capsys.readouterr().out
    assert "losses differ by at most" in printed
    assert "step 2 of 2: loss " in printed
    result = json.loads((out / "runtime.json").read_text())
    assert result["max_loss_difference"] <= 1e-5
    assert result["in_flight"] == result["predicted_in_flight"] == [2, 1]
    assert {row["part"] for row in result["parts"]} >= {"forward", "backward", "gradient sync", "optimiser"}
    memory = [(stage["predicted"], stage["measured"]) for stage in result["memory_bytes"]]
    assert all(predicted[part] == measured[part] for predicted, measured in memory for part in ("weights", "gradients"))
    trace = json.loads((out / "trace.json").read_text())["traceEvents"]
    assert {entry["tid"] for entry in trace} == {0, 1, 2, 3}
    # goes on where it stopped, with times imposed and as one process would
    more = ["steps=1", "check=true", f"out={out}", f"load={kept}", "device=imposed", "time_scale=0.5"]
    assert main([f"plan={plan_file}", *GIVEN, *more]) == 0
    again = json.loads((out / "runtime.json").read_text())
    assert again["max_loss_difference"] <= 1e-5
    assert again["losses"] != result["losses"][:1]
    assert again["predicted_iteration_time_s"] == pytest.approx(0.5 * result["predicted_iteration_time_s"])


def test_what_is_not_finite_is_neither_right_nor_hidden():
    nan = math.nan
    weights = {"a": torch.zeros(2), "b": torch.zeros(2)}
    small = tiny(PROBLEM)
    broken = Checkpoint(3, {"weights": {**weights, "b": torch.full((2,), nan)}})

    def against(losses, checkpoint):
        with patch.object(results, "one_process", lambda *_: ([6.0, 5.0, 4.0], weights)):
            return against_one_process(small, losses, checkpoint, None)

    assert against([6.0, 5.0, 4.0], Checkpoint(3, {"weights": weights})) == ((6.0, 5.0, 4.0), 0.0, 0.0, True)
    for losses, checkpoint in (([6.0, nan, 4.0], Checkpoint(3, {"weights": weights})), ([6.0, 5.0, 4.0], broken)):
        found = against(losses, checkpoint)
        assert not found.good
        assert "NOT trained right" in found.line()
        assert None in (finite_or_none(found.apart), finite_or_none(found.weights_apart))


def test_a_training_that_diverges_says_so_and_is_written(two_ranks, tmp_path, capsys):
    kept, out = tmp_path / "training.pt", tmp_path / "out"
    given = [f"plan={two_ranks}", *GIVEN, "steps=1", f"out={out}"]
    assert main([*given, f"save={kept}"]) == 0
    wild = torch.load(kept, weights_only=True)
    wild["weights"]["layer.0.query"] *= 1e38
    torch.save(wild, kept)
    assert main([*given, f"load={kept}"]) == 1
    assert "the loss of step 1 is not finite" in capsys.readouterr().out
    assert json.loads((out / "runtime.json").read_text())["losses"] == [None]


def test_the_plan_of_the_documentation_can_be_run():
    plan = WHOLE.load_plan(ROOT / "docs" / "runtime_plan.json")
    check_runs(tiny(WHOLE), plan)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model=gpt3_1_3b"], "was made for model"),
        (["processes=3"], "needs 4 ranks and there are processes=3"),
        (["size=huge"], "size='huge' is not one of tiny, full"),
        (["device=fast"], "device='fast' is not one of native, imposed, dilated"),
        (["dtype=fp8"], "dtype='fp8'"),
        (["steps=0"], "steps=0"),
        (["port=70000"], "port=70000"),
        (["load=/nowhere/none.pt"], "No such file"),
        (["processes=1000"], "use at most 128"),
        (["dtype=[1]"], "dtype=[1] is not one of"),
        (["timeout_s=1e30"], "must be from 1 to 1e+06 seconds"),
        (["device=imposed", "time_scale=1000"], "would take for a hang; lower time_scale"),
        (["device=dilated", "dilation=1e14"], "dilation=1e+14 must be at most"),
        (["save=''"], "save='' must be the name of a file"),
        (["save=/"], "save='/' must be the name of a file"),
        (["save=/proc/x/y"], "save='/proc/x'"),
        (["then=[a]"], "must be the name of a file"),
        (["every=nan"], "every=nan"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(plan_file, tmp_path, capsys, arguments, words):
    out = tmp_path / "out"
    keys = {argument.split("=")[0] for argument in arguments}
    given = [argument for argument in GIVEN if argument.split("=")[0] not in keys]
    assert main([f"plan={plan_file}", *given, *arguments, f"out={out}"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not out.exists() or not list(out.iterdir())


def test_a_port_in_use_and_a_checkpoint_cut_short_are_one_line(plan_file, tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main([f"plan={plan_file}", *GIVEN, f"port={port}", f"out={tmp_path / 'out'}"]) == 2
    assert "most likely it is in use" in capsys.readouterr().err
    broken = tmp_path / "training.pt"
    broken.write_bytes(b"PK\x03\x04 and no more")
    assert main([f"plan={plan_file}", *GIVEN, f"load={broken}", f"out={tmp_path / 'out'}"]) == 2
    assert "it is cut short, damaged or no checkpoint" in capsys.readouterr().err


def children(pid):
    """All processes under one, by /proc."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(path.parent.name)] = int(fields[1])
    found, last = {pid}, set()
    while found != last:
        last, found = found, found | {child for child, parent in parents.items() if parent in found}
    return found - {pid}


def hear_interrupts():
    """In the background a shell lets its children ignore them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_ends_all_ranks(two_ranks, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "envs")])}
    command = [
        sys.executable, "-m", "haap_rl.runtime", f"plan={two_ranks}", *GIVEN, "steps=100000", f"out={tmp_path / 'out'}",
    ]  # fmt: skip
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=hear_interrupts)
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until and len(children(run.pid)) < 3:  # ranks, and who starts them
            time.sleep(0.2)
        started = children(run.pid)
        assert len(started) >= 3
        time.sleep(1.0)
        run.send_signal(signal.SIGINT)
        _, error = run.communicate(timeout=30)
        assert run.returncode == 130
        assert error.strip().splitlines()[-1] == "haap_rl: interrupted; all ranks were ended"
        until = time.monotonic() + 20
        while time.monotonic() < until and any(Path(f"/proc/{pid}").exists() for pid in started):
            time.sleep(0.2)
        assert not any(Path(f"/proc/{pid}").exists() for pid in started)
    finally:
        run.kill()  # whatever went wrong above; its ranks end with it


@pytest.fixture
def handlers():
    """The agent of torchrun sets its own handlers of signals."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


def test_under_torchrun(two_ranks, tmp_path, handlers):
    """By the agent that the command `torchrun` starts, with processes that have torch loaded already."""
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=3, run_id="one", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        start_method="forkserver", logs_specs=DefaultLogsSpecs(str(tmp_path / "logs"), Std.ALL),
    )  # fmt: skip
    out = tmp_path / "out"
    arguments = [f"plan={two_ranks}", *GIVEN, "steps=1", "timeout_s=30", "check=true", f"out={out}"]
    assert elastic_launch(config, main)(arguments) == {0: 0, 1: 0, 2: 0}  # one is not needed
    printed = "".join(path.read_text() for path in tmp_path.glob("logs/**/stdout.log"))
    assert printed.count("losses differ by at most") == 1
    assert json.loads((out / "runtime.json").read_text())["ranks"] == 2
