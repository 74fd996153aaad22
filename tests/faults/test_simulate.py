"""What a trace brings under a policy: by hand, by law, and through the command."""

import csv
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from haap_rl.faults import simulate as module
from haap_rl.faults.model import FailureModel, failure_model_from_config
from haap_rl.faults.response import Response, Transitions
from haap_rl.faults.simulate import (
    DEGRADED,
    RUNNING,
    TRANSITION,
    Seconds,
    main,
    policies_of,
    simulate,
    traces_of,
)
from haap_rl.faults.simulate import (
    STOPPED as STOPPED_KIND,
)
from haap_rl.faults.traces import Change, Trace, draw
from haap_rl.problem.errors import InputError
from haap_rl.problem.plan import uniform_plan
from haap_rl.problem.presets import load_problem, preset
from tests.faults.scripted import FREE, STOPPED, Scripted, device

FAIL, BACK = True, False
V100X8 = load_problem(cluster="v100x8").cluster


def trace(*changes, horizon_s=100.0, down_at_start=()):
    ordered = tuple(Change(*change) for change in changes)
    count = 1 + max((change.component for change in ordered), default=0)
    return Trace(tuple(device(i) for i in range(count)), ordered, horizon_s, frozenset(down_at_start))


def restarting(down):
    return STOPPED if down else Response(10.0)


def slower(down):
    return Response(10.0 - 2 * len(down), attention_lost=0.25 * len(down))


# -------------------------------------------------------------------------------------------- by hand
def test_a_trace_of_three_events_by_hand():
    # 0-30 trains at 10; 30 one fails: 5 s dead, then 15 s at 8; 50 another: 5 s dead, 15 s at 6;
    # 70 the first is back: 2 s dead, 28 s at 8
    dead = Transitions(failure_s=5.0, return_s=2.0, restart_s=99.0, checkpoint_s=0.0, checkpoint_interval_s=0.0)
    run = simulate(trace((30.0, 0, FAIL), (50.0, 1, FAIL), (70.0, 0, BACK)), Scripted(slower, dead))
    assert run.tokens == 300 + 15 * 8 + 15 * 6 + 28 * 8
    assert run.seconds == Seconds(trained=88.0, transitions=12.0)
    assert (run.num_failures, run.num_stops, run.num_out_of_memory) == (2, 0, 0)
    assert run.attention_lost == pytest.approx((120 * 0.25 + 90 * 0.5 + 224 * 0.25) / run.tokens)
    assert [(s.kind, s.start_s, s.end_s, s.num_down, s.tokens) for s in run.spans] == [
        (RUNNING, 0.0, 30.0, 0, 300.0),
        (TRANSITION, 30.0, 35.0, 1, 0.0),
        (DEGRADED, 35.0, 50.0, 1, 120.0),
        (TRANSITION, 50.0, 55.0, 2, 0.0),
        (DEGRADED, 55.0, 70.0, 2, 90.0),
        (TRANSITION, 70.0, 72.0, 1, 0.0),
        (DEGRADED, 72.0, 100.0, 1, 224.0),
    ]


def test_a_stop_loses_what_no_checkpoint_holds():
    # cycles of 10 s training and 2 s writing: checkpoints are complete at 12 and 24; 30 fails: 6 s are lost;
    # 40 back: 7 s of restart, then 10 s training, 2 s writing, and so on: 47-57, 59-69, 71-81, 83-93, 95-100
    cycle = Transitions(0.0, 0.0, restart_s=7.0, checkpoint_s=2.0, checkpoint_interval_s=10.0)
    run = simulate(trace((30.0, 0, FAIL), (40.0, 0, BACK)), Scripted(restarting, cycle))
    assert run.seconds == Seconds(trained=65.0, restarts=7.0, checkpoints=12.0, lost=6.0, stopped=10.0)
    assert run.tokens == 650.0
    assert run.num_stops == 1
    assert run.effective_training_time_ratio == 0.65
    assert [s.tokens for s in run.spans if s.kind == STOPPED_KIND] == [-60.0]


def test_a_stop_while_a_checkpoint_is_written_loses_its_training():
    cycle = Transitions(0.0, 0.0, 0.0, checkpoint_s=2.0, checkpoint_interval_s=10.0)
    run = simulate(trace((11.5, 0, FAIL), horizon_s=20.0), Scripted(restarting, cycle))
    assert run.seconds == Seconds(lost=10.0, checkpoints=1.5, stopped=8.5)
    assert run.tokens == 0.0
    assert simulate(trace((12.0, 0, FAIL), horizon_s=20.0), Scripted(restarting, cycle)).tokens == 100.0


def test_a_dead_time_interrupts_the_writing_of_a_checkpoint():
    cycle = Transitions(5.0, 5.0, 0.0, checkpoint_s=4.0, checkpoint_interval_s=10.0)
    # writing from 10, broken off at 11, goes on from 16 to 19; then 1 s of training
    run = simulate(trace((11.0, 0, FAIL), horizon_s=20.0), Scripted(slower, cycle))
    assert run.seconds == Seconds(trained=11.0, transitions=5.0, checkpoints=4.0)


def test_a_change_within_a_dead_time_begins_its_own():
    dead = Transitions(failure_s=10.0, return_s=3.0, restart_s=20.0, checkpoint_s=0.0, checkpoint_interval_s=0.0)
    run = simulate(trace((50.0, 0, FAIL), (55.0, 1, FAIL), (58.0, 0, BACK)), Scripted(slower, dead))
    assert run.seconds == Seconds(trained=89.0, transitions=11.0)  # 5 of 10, 3 of 10, 3 of 3


def test_a_restart_comes_after_a_stop_whatever_ended_it():
    dead = Transitions(failure_s=1.0, return_s=2.0, restart_s=20.0, checkpoint_s=0.0, checkpoint_interval_s=0.0)
    run = simulate(trace((50.0, 0, FAIL), (60.0, 0, BACK)), Scripted(restarting, dead))
    assert run.seconds == Seconds(trained=70.0, restarts=20.0, stopped=10.0)


def test_never_a_checkpoint_loses_all_since_the_restart():
    never = Transitions(0.0, 0.0, 0.0, checkpoint_s=5.0, checkpoint_interval_s=math.inf)
    run = simulate(trace((90.0, 0, FAIL), (95.0, 0, BACK)), Scripted(restarting, never))
    assert run.seconds == Seconds(trained=5.0, lost=90.0, stopped=5.0)


def test_changes_at_one_time_are_one_transition():
    dead = Transitions(failure_s=4.0, return_s=1.0, restart_s=0.0, checkpoint_s=0.0, checkpoint_interval_s=0.0)
    run = simulate(trace((50.0, 0, FAIL), (50.0, 1, FAIL), (60.0, 0, BACK), (60.0, 1, BACK)), Scripted(slower, dead))
    assert run.seconds == Seconds(trained=95.0, transitions=5.0)


def test_out_of_memory_counts_once_until_it_ends():
    full = Response(0.0, reason="does not fit", out_of_memory=True)
    run = simulate(
        trace((10.0, 0, FAIL), (20.0, 1, FAIL), (30.0, 0, BACK), (40.0, 1, BACK), (50.0, 1, FAIL)),
        Scripted(lambda down: full if down else Response(1.0)),
    )
    assert (run.num_out_of_memory, run.num_stops) == (2, 2)


def test_dropped_samples_are_counted_against_all():
    run = simulate(
        trace((50.0, 0, FAIL)), Scripted(lambda down: Response(5.0, samples_lost=0.5) if down else Response(10.0))
    )
    # 500 tokens, then 250 that count and 250 that were dropped
    assert run.samples_lost == 0.25
    assert run.tokens == 750.0


def test_what_is_down_at_the_start_costs_no_transition():
    dead = Transitions(5.0, 5.0, 5.0, 0.0, 0.0)
    run = simulate(trace(down_at_start={0}), Scripted(slower, dead))
    assert (run.tokens, run.seconds) == (800.0, Seconds(trained=100.0))
    assert run.relative == 0.8


# ---------------------------------------------------------------------------------------------- by law
TIMES = st.floats(0.0, 50.0)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), TIMES, TIMES, TIMES, TIMES, st.sampled_from([0.0, 0.5, 7.0, 60.0, 1e3, math.inf]))
def test_seconds_and_tokens_add_up(seed, failure_s, return_s, restart_s, checkpoint_s, interval_s):
    mine = [device(i, mtbf_s=400.0, recovery_s=100.0) for i in range(4)]
    drawn = draw(mine, 5e3, np.random.default_rng(seed), stationary=True)
    cycle = Transitions(failure_s, return_s, restart_s, checkpoint_s, interval_s)
    run = simulate(drawn, Scripted(lambda down: STOPPED if len(down) > 1 else slower(down), cycle))
    assert math.fsum(run.seconds) == pytest.approx(drawn.horizon_s, rel=1e-12)
    assert all(value >= 0 for value in run.seconds)
    assert math.fsum(span.tokens for span in run.spans) == pytest.approx(run.tokens, rel=1e-9, abs=1e-6)
    edges = [0.0, *(span.end_s for span in run.spans)]
    assert edges == [*(span.start_s for span in run.spans), drawn.horizon_s]
    assert run.tokens <= run.seconds.trained * 10.0 * (1 + 1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 30.0]))
def test_more_failures_never_bring_more_tokens(seed, interval_s):
    mine = [device(i, mtbf_s=400.0, recovery_s=100.0) for i in range(5)]
    more = draw(mine, 5e3, np.random.default_rng(seed))
    fewer = Trace(more.components, tuple(c for c in more.changes if c.component < 4), more.horizon_s)
    reactions = Scripted(
        lambda down: STOPPED if len(down) > 1 else slower(down), FREE._replace(checkpoint_interval_s=interval_s)
    )
    if interval_s == 0:
        assert simulate(more, reactions).tokens <= simulate(fewer, reactions).tokens * (1 + 1e-12)
    assert simulate(more, reactions).seconds.stopped >= simulate(fewer, reactions).seconds.stopped


def test_a_short_interval_costs_no_time_to_simulate():
    cycle = Transitions(0.0, 0.0, 0.0, checkpoint_s=1e-3, checkpoint_interval_s=9e-3)
    run = simulate(trace(horizon_s=1e7), Scripted(slower, cycle))
    assert run.seconds.trained == pytest.approx(9e6, rel=1e-9)


# ------------------------------------------------------------------------------------------ the command
@pytest.fixture
def plan(tmp_path):
    problem = load_problem("gpt3_350m", "v100x8")
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(problem.plan_to_json(uniform_plan(problem, 1, 2, 4, 1))))
    return path


@pytest.fixture
def scripted(monkeypatch):
    """The command without real policies: `restart` stops for anything, others get slower."""

    def reactions_of(config, problem, plan, policies, components):
        assert len(plan.stages) == 2
        seconds = Transitions(20.0, 10.0, 300.0, 30.0, 600.0)
        return {name: Scripted(restarting if name == "restart" else slower, seconds) for name in policies}

    monkeypatch.setattr(module, "reactions_of", reactions_of)


WORDS = ["model=gpt3_350m", "cluster=v100x8", "faults=mecefo_high", "faults.recovery_h=1", "hours=24"]


def test_every_figure_printed_is_in_the_files_which_equal_seeds_make_again(plan, scripted, tmp_path, capsys):
    out, again = tmp_path / "out", tmp_path / "again"
    for directory in (out, again):
        assert main([*WORDS, f"plan={plan}", "policy=[restart,mecefo]", "traces=3", f"out={directory}"]) == 0
    for name in ("simulate.json", "runs.csv", "timeline.png"):
        assert (out / name).read_bytes() == (again / name).read_bytes()
    printed = capsys.readouterr().out
    result = json.loads((out / "simulate.json").read_text())
    assert list(result["policies"]) == ["restart", "mecefo"]
    for figures in result["policies"].values():
        assert f"{figures['of_failure_free']['mean']:.1%}" in printed
        assert figures["of_failure_free"]["low"] < figures["of_failure_free"]["mean"]
        shares = [value["mean"] for name, value in figures.items() if name.endswith("_share")]
        assert math.fsum(shares) == pytest.approx(1)
    with open(out / "runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["policy"], row["trace"]) for row in rows] == [(p, t) for p in ("restart", "mecefo") for t in "012"]
    assert [row["failures"] for row in rows[:3]] == [row["failures"] for row in rows[3:]]  # the same traces
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_a_trace_in_a_file_is_simulated_once(plan, scripted, tmp_path, capsys):
    path = tmp_path / "gpus.json"
    path.write_text('[{"Time": 0, "GPUs": 8}, {"Time": 3600, "GPUs": 6}, {"Time": 7200, "GPUs": 6}]')
    assert main([*WORDS[:2], f"plan={plan}", "policy=mecefo", f"trace={path}"]) == 0
    printed = capsys.readouterr().out
    assert "faults gpus.json: 1 x 2 h" in printed
    assert "±" not in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["policy=[]"], "policy=[] must be a name or a list"),
        (["faults=rsc1", "faults.recovery_h=null"], "give faults.recovery_h=2"),
        (["faults.recovery=1"], "did you mean 'faults.recovery_h'?"),
        (["faults=mecefo_hi"], "did you mean 'mecefo_high'?"),
        (["trace=a.txt"], "must end in .csv (Bamboo's) or .json (Sailor's)"),
    ],
)
def test_bad_settings_are_one_line_and_status_2(plan, scripted, capsys, words, said):
    assert main([*WORDS, f"plan={plan}", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("policy", [[], ["mecefo", "mecefo"], {"mecefo": 1}, None, [1]])
def test_policies_are_a_name_or_a_list_of_names(policy):
    assert policies_of("mecefo") == ["mecefo"]
    with pytest.raises(InputError, match="policy="):
        policies_of(policy)


DRAWN = {"hours": 10, "seed": 0, "start": "all_up", "trace": None, "traces": 2}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hours": 0}, "hours=0 must be a finite number above 0"),
        ({"hours": math.nan}, "hours=nan must be a finite number above 0"),
        ({"hours": 1e9}, "hours=1000000000.0 must be at most 1e+06"),
        ({"traces": 0}, "traces=0 must be a whole number of at least 1"),
        ({"traces": 100_000}, "traces=100000 must be at most 10000"),
        ({"seed": -1}, "seed=-1 must be a whole number from 0"),
        ({"seed": 0.5}, "seed=0.5 must be a whole number from 0"),
        ({"start": "cold"}, "start='cold' is not known; choose one of all_up, stationary"),
    ],
)
def test_traces_that_cannot_be_drawn_are_refused(change, said):
    with pytest.raises(InputError) as error:
        traces_of({**DRAWN, **change}, FailureModel("none"), V100X8)
    assert said in str(error.value)


def test_traces_do_not_depend_on_how_many_are_drawn():
    failures = failure_model_from_config({**preset("faults", "mecefo_high"), "recovery_h": 1})
    few, many = (traces_of({**DRAWN, "traces": count}, failures, V100X8) for count in (2, 4))
    assert few == many[:2]


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from haap_rl.faults.simulate import main; status = main(['--help']); "
        "sys.exit(status or bool({'torch', 'numba', 'scipy', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "python -m haap_rl.faults.simulate plan=FILE" in done.stdout


def test_what_makes_no_difference_to_the_plan_is_not_noticed():
    # 0 works, 1 is idle: it fails at 10 and 32, within the dead time 30 to 35 after 0 has failed
    dead = Transitions(failure_s=5.0, return_s=2.0, restart_s=99.0, checkpoint_s=0.0, checkpoint_interval_s=0.0)
    up, degraded = Response(10.0), Response(8.0)
    reactions = Scripted(lambda down: degraded if 0 in down else up, dead)
    run = simulate(trace((10.0, 1, FAIL), (20.0, 1, BACK), (30.0, 0, FAIL), (32.0, 1, FAIL)), reactions)
    assert run.tokens == 300 + 65 * 8
    assert run.seconds == Seconds(trained=95.0, transitions=5.0)
    assert run.num_failures == 3
