"""The loop's figures by hand, its plans, and one plan from search to a run; all of it takes minutes."""

import json
from types import SimpleNamespace

import pytest

from experiments import plan_to_run
from experiments.plan_to_run import (
    SIZES,
    SLOWER,
    UNIFORM,
    _run,
    described,
    draw,
    draw_errors,
    plans_to_run,
    problem_here,
    run_plan,
    summary,
    table_rows,
    text,
)
from haap_rl.cost.estimator import Estimator
from haap_rl.cost.profiles import UNITS, MeasuredFor, Profile, UnitCell
from haap_rl.problem.plan import Plan, ReplicaGroup, Stage
from haap_rl.runtime.compare import expected_held, expected_in_flight
from haap_rl.runtime.device import imposed
from haap_rl.runtime.job import tiny
from haap_rl.runtime.session import Session
from haap_rl.runtime.training import one_process

PROBLEM = problem_here()
NAMED = {
    "mean_error_pct", "worst_error_pct", "pairs_in_order_pct", "regret_pct", "max_loss_difference", "replay_error_pct",
    "gain_over_uniform_pct", "overrun_share",
}  # fmt: skip


def profile(layer_s=0.002):
    cells = [
        UnitCell(name, unit, tp, size, seconds, 2 * seconds)
        for name, factor in SLOWER.items()
        for unit in UNITS
        for tp in (1, 2)
        for size in SIZES
        for seconds in [factor * layer_s * size / tp]
    ]
    return Profile("by hand", MeasuredFor(seq_len=PROBLEM.seq_len, precision="fp32"), tuple(cells))


def fake(name, predicted_s, measured_s, overrun=0.0, stages=2):
    plan = Plan(tuple(Stage(6, (ReplicaGroup("fast", 1, 1, 6),)) for _ in range(stages)), 4)
    measured = SimpleNamespace(
        iteration_s=measured_s, replay_error=0.01, overrun_share=overrun, in_flight=expected_in_flight(stages, 4)
    )
    estimate = SimpleNamespace(iteration_s=predicted_s)
    return SimpleNamespace(
        name=name, plan=plan, estimate=estimate, measured=measured, loss_difference=1e-7,
        error=predicted_s / measured_s - 1, memory_errors=[-0.02, 0.06], tries=2,
    )  # fmt: skip


def test_the_figures_by_hand():
    slower = fake("uniform, one kind", 4.0, 4.0)
    found = summary([fake("ours", 1.0, 1.25, 0.01), fake("uniform", 1.5, 2.0), slower, fake("other", 1.51, 1.0)])
    assert found.keys() >= NAMED
    assert found["mean_error_pct"] == pytest.approx((20 + 25 + 0 + 51) / 4)
    assert found["worst_error_pct"] == pytest.approx(51)
    assert (found["mean_memory_error_pct"], found["worst_memory_error_pct"]) == (4, 6)
    # uniform and other are predicted within 2 % of each other; of the five pairs left four are in order
    assert (found["pairs"], found["pairs_in_order_pct"]) == (5, 80)
    assert found["regret_pct"] == pytest.approx(25)
    assert found["gain_over_uniform_pct"] == pytest.approx(60)
    assert found["predicted_gain_over_uniform_pct"] == pytest.approx(50)
    assert found["replay_error_pct"] == pytest.approx(1)
    assert found["overrun_share"] == 0.01
    assert found["disturbed_runs"] == 4
    assert found["in_flight_as_predicted"]


def test_eight_different_plans_are_chosen_and_ours_is_predicted_to_be_the_fastest():
    plans = plans_to_run(PROBLEM, profile())
    assert list(plans) == ["ours", *UNIFORM, *(f"other {k}" for k in range(1, 6))]
    assert len(set(plans.values())) == 8
    estimator = Estimator(PROBLEM, profile=profile())
    times = [estimator(plan).iteration_s for plan in plans.values()]
    assert min(times) == times[0]
    for name in UNIFORM:
        assert len({(r.tp, r.dp, r.microbatch_size) for s in plans[name].stages for r in s.replicas}) == 1


def test_of_disturbed_runs_the_calmest_counts(monkeypatch):
    seen = iter([(0.2, 0), (0.06, 0), (0.04, 0), (0.01, 0), (0.2, 0), (0.06, 0), (0.1, 0), (0.01, 0.03), (0.03, 0.01)])

    def once(*_):
        spread, overrun_share = next(seen)
        return {"measured": {"spread": spread, "overrun_share": overrun_share}}

    monkeypatch.setattr(plan_to_run, "_run_once", once)
    kept = [run_plan(None, None, None, None, 3, ()) for _ in range(4)]
    found = [(run["measured"]["spread"], run["tries"]) for run in kept]
    assert found == [(0.04, 3), (0.01, 1), (0.06, 3), (0.03, 2)]


def test_a_plan_is_run_kept_as_json_and_drawn(tmp_path):
    plan = Plan((Stage(8, (ReplicaGroup("fast", 1, 1, 6),)), Stage(4, (ReplicaGroup("slow", 1, 1, 6),))), 4)
    PROBLEM.validate(plan)
    estimator, job = Estimator(PROBLEM, profile=profile(0.0005)), tiny(PROBLEM)
    with Session(2) as session:
        data = run_plan(session, job, plan, imposed(estimator, plan), 2, one_process(job, 2)[0])
    run = _run("ours", plan, estimator(plan), expected_held(PROBLEM, job, plan), json.loads(json.dumps(data)))
    assert run.loss_difference <= 1e-5
    assert run.measured.in_flight == (2, 1)
    assert all(abs(error) < 0.3 for error in run.memory_errors)
    runs = [run, *(run._replace(name=name) for name in UNIFORM)]
    figures = summary(runs)
    assert figures["gain_over_uniform_pct"] == 0
    assert described(plan) == "m=4; 8: fast tp1 dp1 x6 -> 4: slow tp1 dp1 x6"
    assert described(plan) in text(runs, figures)
    assert table_rows(runs)[0]["in_flight"] == "2 1"
    draw(runs, tmp_path / "timelines.png")
    draw_errors(runs, tmp_path / "errors.png")
    assert (tmp_path / "timelines.png").stat().st_size > 10_000
