"""Expected throughput as what searchers rank by: the contract, the front, the command, and room for take-overs."""

import csv
import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

from haap_rl.cost import schedule
from haap_rl.cost.estimator import Estimator
from haap_rl.faults.cost import Cell, FaultEstimator, Task, replica_samples
from haap_rl.faults.expected import by_sets, elements
from haap_rl.faults.model import FailureModel, Hazard
from haap_rl.faults.objective import ExpectedThroughput
from haap_rl.faults.policy import POLICIES, Constants, Down, part_of, policy_named, take_over
from haap_rl.faults.reactions import Reactions
from haap_rl.faults.settings import Faults, faults_from_config
from haap_rl.faults.tradeoff import COLUMNS, FIGURES, FRONT, Tradeoff, front_csv, read_front
from haap_rl.mecefo.options import MecefoOptions
from haap_rl.problem.errors import InputError
from haap_rl.problem.plan import uniform_plan
from haap_rl.problem.presets import load_problem, preset
from haap_rl.search.base import Budget, Objective, load_searcher, outside, run_search
from haap_rl.search.certificate import problem_key
from haap_rl.space import moves
from haap_rl.space.bound import lower_bound
from haap_rl.space.initial import pruning_report
from haap_rl.space.options import PROJECTOR_RANK, SpaceSpec
from haap_rl.space.space import Space
from haap_rl.train import main
from tests.builders import group, plan, problem, room, stage
from tests.space.enumerate_plans import every_plan

HOUR_S = 3600.0
OPTIONS = MecefoOptions(takeover="most_slack")
SPEC = SpaceSpec(num_microbatches=(2, 4), max_stages=3, max_tp=2, group_sizes=(1, 2), recompute=("none", "full"))
QUICK = ("random", "annealing", "ga", "autohaap")
SMALL = ["model=gpt3_350m", "cluster=v100x4_t4x4", "budget.evaluations=30"]


def small(usable_gb=2.4):
    groups = (
        group("fast", per_node=2, memory_gb=room(usable_gb)),
        group("slow", per_node=2, memory_gb=room(0.6 * usable_gb), tflops=40.0),
    )
    return problem(groups, {"num_layers": 4}, global_batch_size=8, seq_len=1024)


def faults(policy="mecefo", mtbf_h=20.0, trace=None, constants=None):
    constants = constants or Constants()
    hazards = (Hazard("device", recovery_s=2 * HOUR_S, mtbf_s=mtbf_h * HOUR_S),)
    return Faults(FailureModel("test", hazards, trace), policy_named(policy, OPTIONS, constants), OPTIONS, constants)


def found_by(name, scorer, evaluations=60, **settings):
    return run_search(load_searcher(name), small(), Budget(evaluations=evaluations), 3, SPEC, scorer=scorer, **settings)


def scorer_of(target, given=None, cached=True):
    scorer = ExpectedThroughput(given or faults())
    scorer.estimator(target, cached, None)
    return scorer


def without_seconds(result):
    return [dataclasses.replace(point, seconds=0.0) for point in result.trace]


@pytest.fixture(scope="module", params=QUICK)
def run(request):
    """(name, scorer, result) of a search by expected throughput."""
    scorer = ExpectedThroughput(faults())
    return request.param, scorer, found_by(request.param, scorer)


# ----------------------------------------------------------------------------------------- the contract
def test_the_same_seed_is_the_same_search(run):
    name, scorer, result = run
    other = ExpectedThroughput(faults())
    again = found_by(name, other)
    assert again.plan == result.plan
    assert without_seconds(again) == without_seconds(result)
    assert again.scored == result.scored
    assert other.front == scorer.front


def test_the_score_is_what_the_plan_is_worth_and_never_below_iteration_time_or_bound(run):
    _, _, result = run
    assert result.score_s == scorer_of(small()).seconds(result.plan)
    assert result.score_s > result.estimate.iteration_s
    assert result.score_s >= result.lower_bound_s == lower_bound(small(), SPEC).seconds
    assert result.estimate == Estimator(small())(result.plan)
    assert result.trace[-1].best_iteration_time_s == result.score_s
    assert result.gap_to_lower_bound == pytest.approx(result.score_s / result.lower_bound_s - 1)
    tokens = small().tokens_per_iteration
    assert tokens / result.score_s == pytest.approx(result.scored["expected_tokens_per_s"])


def test_the_front_has_no_plan_that_another_one_beats_and_has_the_best_by_expected_throughput(run):
    _, scorer, result = run
    points = [point for point, _ in scorer.front]
    for a, b in itertools.permutations(points, 2):
        assert not (all(y >= x for x, y in zip(a, b, strict=True)) and a != b)
    best = max(scorer.front, key=lambda item: item[0].expected)
    assert small().tokens_per_iteration / best[0].expected == pytest.approx(result.score_s)
    rows = list(csv.DictReader(result.artifacts[FRONT].decode().splitlines()))
    assert list(rows[0]) == list(COLUMNS)
    expected = [float(row["expected_tokens_per_s"]) for row in rows]
    assert expected == sorted(expected, reverse=True)
    assert expected[0] == pytest.approx(result.scored["expected_tokens_per_s"])
    assert len(rows) == len(points)


def test_what_is_recorded_is_json_and_says_under_which_assumptions(run):
    _, _, result = run
    facts = json.loads(json.dumps(result.scored, allow_nan=False))
    assert facts == dict(result.scored)
    assert facts["mecefo"] == {**dataclasses.asdict(OPTIONS), "low_rank": ["gate", "up", "down"]}
    assert facts["constants"] == dataclasses.asdict(Constants())
    assert (facts["faults"], facts["policy"], facts["exact_gradients"]) == (
        "test",
        "mecefo",
        facts["policy_used"] != "mecefo",
    )
    low, high = facts["expected_tokens_per_s_low"], facts["expected_tokens_per_s_high"]
    assert low <= facts["expected_tokens_per_s"] <= high <= facts["failure_free_tokens_per_s"] * (1 + 1e-12)
    assert any("tokens/s expected" in note for note in result.notes)


def test_it_trains_a_policy_too():
    first, again = (
        run_search(load_searcher("ppo"), small(), Budget(evaluations=40), 3, SPEC, scorer=ExpectedThroughput(faults()))
        for _ in range(2)
    )
    assert first.plan == again.plan
    assert first.score_s == again.score_s > first.estimate.iteration_s


@pytest.mark.parametrize("name", ["random", "autohaap"])
def test_without_the_memo_the_search_is_the_same(name):
    with_memo, without = (found_by(name, ExpectedThroughput(faults()), 24, cached=cached) for cached in (True, False))
    assert with_memo.plan == without.plan
    assert with_memo.score_s == pytest.approx(without.score_s, rel=1e-12)
    times = [[point.best_iteration_time_s for point in result.trace] for result in (with_memo, without)]
    assert times[0] == pytest.approx(times[1], rel=1e-12)


@pytest.mark.parametrize("cached", [True, False])
def test_operators_are_counted_as_in_a_search_by_iteration_time(cached):
    counts = []
    for scorer in (None, ExpectedThroughput(faults())):
        result = found_by("random", scorer, 20, cached=cached)
        counts.append((result.operator_evaluations + result.operator_evaluations_avoided, result.operator_evaluations))
    assert counts[0] == counts[1]  # of equal devices takers do more of the same


def test_incumbents_are_priced_first_and_the_result_is_no_worse():
    best = found_by("ga", ExpectedThroughput(faults()), 200)
    started = found_by("random", ExpectedThroughput(faults()), 5, incumbents=[best.plan])
    assert started.score_s <= best.score_s
    assert started.evaluations == 5
    assert started.trace[0].best_iteration_time_s == best.score_s
    # and without a scorer
    plain = run_search(load_searcher("random"), small(), Budget(evaluations=5), 3, SPEC, incumbents=[best.plan])
    assert plain.estimate.iteration_s <= best.estimate.iteration_s


def test_exact_search_refuses_in_one_line():
    with pytest.raises(InputError, match=r"search=exact proves iteration times, not expected throughput; use") as error:
        found_by("exact", ExpectedThroughput(faults()))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_scores_plans_and_plans_it_cannot_use_are_restarted(policy):
    scorer = scorer_of(small(8.0), faults(policy))
    alone = plan(stage(3, "fast", size=2), stage(3, "slow", size=2, mode="full", recomputed=2), m=4)
    wide = plan(stage(3, "fast", dp=2), stage(3, "slow", dp=2, mode="full", recomputed=2), m=4)
    for candidate in (alone, wide):
        facts = scorer.facts(candidate)
        json.dumps(facts, allow_nan=False)
        assert 0 < facts["expected_tokens_per_s"] < facts["failure_free_tokens_per_s"]
    used = scorer.facts(alone)["policy_used"]
    assert used == (policy if policy in ("restart", "spare", "bamboo") else "restart")
    assert any("cannot be used with this plan" in line for line in scorer.lines(alone)) == (used != policy)
    assert scorer.facts(alone)["exact_gradients"] or policy == used == "mecefo"
    assert scorer.facts(wide)["policy_used"] == policy


def test_a_score_is_the_sum_over_every_set_of_failures():
    scorer = scorer_of(small())
    wide = plan(stage(3, "fast", dp=2), stage(3, "slow", dp=2, mode="full", recomputed=2), m=4)
    estimator = FaultEstimator(small(), options=OPTIONS)
    components = faults().model.components(small().cluster)
    reactions = Reactions(estimator, wide, policy_named("mecefo", OPTIONS), components)
    expected = by_sets(reactions, elements(reactions)).tokens_per_s
    assert scorer.seconds(wide) == pytest.approx(small().tokens_per_iteration / expected, rel=1e-4)
    assert estimator.healthy(wide).fits


def test_a_plan_that_never_runs_has_a_finite_score():
    hopeless = faults("restart", mtbf_h=0.001, constants=Constants(restart_s=1e6))
    scorer = scorer_of(small(), hopeless)
    wide = plan(stage(3, "fast", dp=2), stage(3, "slow", dp=2, mode="full", recomputed=2), m=4)
    assert math.isfinite(scorer.seconds(wide))
    json.dumps(scorer.facts(wide), allow_nan=False)


def test_one_point_beats_another_if_it_is_as_good_in_all_and_better_in_one():
    point = Tradeoff(3.0, 2.0, 0.5)
    assert point.beaten_by(Tradeoff(3.0, 2.5, 0.5))
    assert not point.beaten_by(point)
    assert not point.beaten_by(Tradeoff(4.0, 1.0, 1.0))


def test_a_front_is_read_as_it_was_written(tmp_path):
    points = [Tradeoff(3.5, 2.0, 0.5), Tradeoff(3.0, 2.5, 1.0)]
    path = tmp_path / FRONT
    path.write_text(front_csv((point, [4, "3 on 2x tp1 fast | 3 on 1x tp1 slow"]) for point in points))
    assert read_front(path) == tuple(points)
    head = ",".join(FIGURES) + "\n"
    for text, words in (
        ("", "first line"),
        ("a,b\n", "first line"),
        (head + "1,2\n", "line 2 is not"),
        (head + "1,2,nan\n", "line 2 is not"),
        (head + "1,2,3\n1,x,3\n", "line 3 is not"),
    ):
        path.write_text(text)
        with pytest.raises(InputError) as error:
            read_front(path)
        assert words in str(error.value)
        assert "\n" not in str(error.value)


def test_a_trace_has_no_expectation():
    with pytest.raises(InputError, match=r"trace='events.csv' is one course of events.*use faults.trace=null") as error:
        ExpectedThroughput(faults(trace="events.csv"))
    assert "\n" not in str(error.value)


def test_settings_are_read_and_bad_ones_refused_in_one_line():
    config = preset("faults", "mecefo_high")
    read = faults_from_config(config)
    assert (read.policy.name, read.options.takeover, read.least_probability) == ("mecefo", "most_slack", 1e-5)
    assert read.with_policy("spare").policy.name == "spare"
    assert faults_from_config({"name": "x", "hazards": []}).constants == Constants()
    for changes, words in (
        ({"policy": "retry"}, "policy='retry'"),
        ({"least_probability": 0.5}, "least_probability=0.5"),
        ({"least_probability": True}, "least_probability=True"),
        ({"constants": {"detect_s": -1}}, "constants.detect_s=-1"),
        ({"mecefo": {"rank": 0}}, "rank=0"),
    ):
        with pytest.raises(InputError) as error:
            faults_from_config({**config, **changes})
        assert words in str(error.value)
        assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------- the command
@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from haap_rl.report import page
    from haap_rl.report.what_if import WhatIf

    monkeypatch.setattr(page, "what_if", lambda *_: WhatIf(1.0, 1.0, (), ""))
    return tmp_path


def complaint(capfd):
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("haap_rl: ")]
    assert len(lines) == 1, lines
    return lines[0]


def test_the_command_searches_by_expected_throughput(here, capsys):
    given = ["objective=expected_throughput", "faults=mecefo_high", "seed=3"]
    assert main(["+search=random", *SMALL, *given, "out=record"]) == 0
    printed = capsys.readouterr().out
    assert "under mecefo_high with policy mecefo" in printed
    result = json.loads((here / "record" / "result.json").read_text())
    assert result["objective"] == "expected_throughput"
    facts = result["expected_throughput"]
    assert result["score_s"] >= result["iteration_time_s"]
    target = load_problem("gpt3_350m", "v100x4_t4x4")
    assert facts["expected_tokens_per_s"] == pytest.approx(target.tokens_per_iteration / result["score_s"])
    rows = list(csv.DictReader((here / "record" / FRONT).open()))
    assert float(rows[0]["expected_tokens_per_s"]) == pytest.approx(facts["expected_tokens_per_s"])


def test_the_command_says_what_a_plan_of_another_objective_is_worth(here, capsys):
    assert main(["+search=random", *SMALL, "faults=mecefo_low", "faults.policy=recycle", "out=record"]) == 0
    assert "under mecefo_low with policy recycle" in capsys.readouterr().out
    result = json.loads((here / "record" / "result.json").read_text())
    assert result["objective"] == "iteration_time"
    assert result["score_s"] == result["iteration_time_s"]
    assert 0 < result["expected_throughput"]["expected_tokens_per_s"] < result["tokens_per_s"]
    assert not (here / "record" / FRONT).exists()


def test_the_report_says_under_which_policy(here, capsys):
    # unequal stages, of which the two policies that need whole pipelines make no use
    target = load_problem("gpt3_350m", "v100x8")
    units = target.model.num_units
    uneven = plan(stage(units // 2, "v100", dp=4, size=1), stage(units - units // 2, "v100", dp=2, size=2), m=32)
    target.validate(uneven)
    (here / "plan.json").write_text(json.dumps(target.plan_to_json(uneven)))
    given = ["+search=replay", "search.plan=plan.json", "model=gpt3_350m", "cluster=v100x8", "faults=mecefo_low"]
    for policy, said in (("bamboo", "restart, as bamboo cannot be used with this plan"), ("mecefo", "mecefo;")):
        assert main([*given, f"faults.policy={policy}", f"out={policy}"]) == 0
        assert f"met by policy {said}" in (here / policy / "report.html").read_text()
    assert "policy bamboo cannot be used with this plan, which is restarted instead" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["objective=expected_throughput"], "faults=none never fails; give one of faults="),
        (["objective=expected_throughput", "faults=rsc1"], "recovery_h"),
        (["faults=rsc1"], "recovery_h"),
        (["faults=mecefo_high", "faults.policy=retry"], "policy='retry'"),
        (["faults=mecefo_high", "faults.mecefo.rank=4096"], "rank=4096"),
        (["faults=mecefo_high", "faults.trace=events.csv"], "trace='events.csv' is one course of events"),
        (["objective=expected_throughput", "faults=mecefo_high", "faults.constants.step_lost=2"], "step_lost=2"),
    ],
)
def test_bad_failures_are_one_line_before_anything_is_searched(here, capfd, given, words):
    assert main(["+search=random", *SMALL, *given, "out=record"]) == 2
    assert words in complaint(capfd)
    assert not (here / "record").exists()


def test_a_plan_that_is_not_priced_under_failures_keeps_its_record(here, capsys):
    target = load_problem("gpt3_350m", "v100x8")
    sharded = dataclasses.replace(uniform_plan(target, pp=2, tp=1, dp=4, microbatch_size=1), zero_stage=2)
    (here / "plan.json").write_text(json.dumps(target.plan_to_json(sharded)))
    given = ["+search=replay", "search.plan=plan.json", "model=gpt3_350m", "cluster=v100x8", "faults=mecefo_low"]
    assert main([*given, "out=record"]) == 0
    assert "zero_stage=2 is not priced under failures" in capsys.readouterr().out
    assert json.loads((here / "record" / "result.json").read_text())["expected_throughput"] is None


# ----------------------------------------------------------------------------------- room for take-overs
ROOMY = {
    "num_microbatches": (2, 4),
    "max_stages": 3,
    "max_tp": 2,
    "group_sizes": (1, 2, 4),
    "recompute": ("none", "full"),
}


def survivors(take_over, survives=1, mixed=False, zero=1):
    """A space whose stages survive so many dead replicas, on devices with little memory."""
    groups = (
        group("fast", per_node=4, memory_gb=room(2.6)),
        group("slow", per_node=4, memory_gb=room(2.0), tflops=40.0),
    )
    target = problem(groups, {"num_layers": 5, "gated_mlp": True}, global_batch_size=16, seq_len=1024)
    spec = SpaceSpec(**ROOMY, survives=survives, take_over=take_over, mixed_stages=mixed, zero_stage=zero)
    return Space(target, spec, Estimator(target))


def drawn_and_moved(space, draws=12, steps=4):
    """Genomes drawn, and some moves away from them, by the readable code and by the kernels."""
    rng = np.random.default_rng(1)
    everything = moves.edits(space)
    for _ in range(draws):
        genome = space.draw(rng)
        for _ in range(steps):
            yield genome
            genome = moves.random_neighbour(space, genome, everything, rng) or genome
    for code in space.draws(rng, draws):
        yield space.genome_of(code)


@pytest.mark.parametrize("take_over_by", ["exact", "mecefo"])
@pytest.mark.parametrize(("survives", "mixed", "zero"), [(1, False, 1), (1, True, 1), (1, False, 0), (2, False, 1)])
def test_in_a_space_that_survives_failures_a_peer_holds_whatever_replicas_of_a_stage_are_dead(
    take_over_by, survives, mixed, zero
):
    space = survivors(take_over_by, survives, mixed, zero)
    estimator = FaultEstimator(space.problem, options=OPTIONS)
    tried = 0
    for candidate in {space.plan(genome) for genome in drawn_and_moved(space)}:
        assert outside(space, candidate) == ""
        assert estimator.healthy(candidate).fits
        for i, here in enumerate(candidate.stages):
            samples = replica_samples(here)
            assert len(samples) > survives
            part = part_of(estimator, candidate, i)
            for dead in itertools.combinations(range(len(samples)), survives):
                work = take_over(estimator, part, dead, OPTIONS, degraded=take_over_by == "mecefo")
                cells = estimator.stage_memory(i, work, part.keys, part.held)
                assert not any(cell.missing_bytes for cell in cells)
                tried += 1
    assert tried > 20


def test_whoever_takes_over_has_the_room_for_all_dead_ones():
    space = survivors("exact", 2)
    estimator = FaultEstimator(space.problem, options=OPTIONS)
    for genome in drawn_and_moved(space, draws=6):
        candidate = space.plan(genome)
        for i, here in enumerate(candidate.stages):
            part = part_of(estimator, candidate, i)
            largest, dp = max(part.samples), len(part.samples)
            held = schedule.in_flight(len(candidate.stages), i, candidate.num_microbatches)
            assert held == part.held
            for r, own in enumerate(part.samples):
                tasks = (Task(i, own), Task(i, largest), Task(i, largest))
                assert not estimator.cell_memory(i, r, tasks, part.keys, dp - 2, held).missing_bytes
            assert here.replicas


def survives_by_cells(estimator, candidate, survives, backward):
    """Whether each replica of each stage has room for as many of the largest tasks besides its own, cell by cell."""
    keys = estimator.keys(candidate)
    for i, here in enumerate(candidate.stages):
        samples, held = replica_samples(here), part_of(estimator, candidate, i).held
        left = len(samples) - survives
        if left < 1:
            return False
        for r, own in enumerate(samples):
            taken = (Task(i, own), *[Task(i, max(samples))] * survives)
            taker = tuple(task._replace(backward=backward) for task in taken)
            other = (Task(i, own),)
            if estimator.cell_memory(i, r, taker, keys, left, held).missing_bytes:
                return False
            if left > 1 and estimator.cell_memory(i, r, other, keys, left, held).missing_bytes:
                return False
    return True


@pytest.mark.parametrize("take_over_by", ["exact", "mecefo"])
def test_what_survives_its_count_its_bound_and_its_best_plan_are_those_of_brute_force(take_over_by):
    groups = (
        group("fast", per_node=3, memory_gb=room(3.2)),
        group("slow", per_node=2, memory_gb=room(2.2), tflops=40.0),
    )
    target = problem(groups, {"num_layers": 4}, global_batch_size=12, seq_len=1024)
    spec = SpaceSpec(
        (2, 4), max_stages=2, max_tp=1, group_sizes=(1, 2, 3), recompute=("none", "full"), survives=1,
        take_over=take_over_by,
    )  # fmt: skip
    space, estimator = Space(target, spec, Estimator(target)), FaultEstimator(target, options=OPTIONS)
    plans = [(space.plan(genome), estimate) for genome, estimate in every_plan(space)]
    fitting = [(candidate, estimate) for candidate, estimate in plans if estimate.fits]
    kept = [
        (candidate, estimate)
        for candidate, estimate in fitting
        if survives_by_cells(estimator, candidate, 1, take_over_by)
    ]
    assert 0 < len(kept) < len(fitting) < len(plans)
    inside = [candidate for candidate, _ in fitting if outside(space, candidate) == ""]
    assert inside == [candidate for candidate, _ in kept]
    report = pruning_report(target, spec)
    assert (report.plans, report.plans_that_fit) == (len(plans), len(kept))
    best = min(estimate.iteration_s for _, estimate in kept)
    assert lower_bound(target, spec).seconds <= best
    found = run_search(load_searcher("exact"), target, Budget(evaluations=10_000), 0, spec)
    assert found.estimate.iteration_s == best
    assert outside(space, found.plan) == ""


def test_reserving_room_never_lowers_the_bound_and_mecefo_never_needs_more_than_exact():
    bounds = {}
    for survives in (0, 1, 2):
        for take_over_by in ("exact", "mecefo"):
            space = survivors(take_over_by, survives)
            bounds[survives, take_over_by] = lower_bound(space.problem, space.spec).seconds
    for take_over_by in ("exact", "mecefo"):
        assert bounds[0, take_over_by] <= bounds[1, take_over_by] <= bounds[2, take_over_by]
    assert bounds[0, "exact"] == bounds[0, "mecefo"]
    assert bounds[1, "mecefo"] <= bounds[1, "exact"]


def test_a_plan_without_room_is_outside_the_space():
    space = survivors("exact", 1)
    free = survivors("exact", 0)
    lone = next(
        p
        for p in (free.plan(genome) for genome in drawn_and_moved(free))
        if any(len(replica_samples(s)) == 1 for s in p.stages)
    )
    assert outside(free, lone) == ""
    assert "no room for the work of 1 dead replicas (space.survives)" in outside(space, lone)


def test_what_nothing_survives_is_said():
    target = problem((group("fast", per_node=2),), global_batch_size=8)
    spec = SpaceSpec(**ROOMY, survives=3)
    result = run_search(load_searcher("random"), target, Budget(evaluations=5), 0, spec)
    assert result.stopped_by == "infeasible"
    assert "lower space.survives=3" in result.reason


def test_a_space_that_reserves_nothing_has_the_key_it_always_had():
    target = problem()
    plain, reserving = SpaceSpec(), SpaceSpec(survives=1)
    assert "survives" not in repr(plain)
    assert problem_key(target, plain) == problem_key(target, SpaceSpec(take_over="mecefo"))
    keys = {problem_key(target, spec) for spec in (plain, reserving, SpaceSpec(survives=1, take_over="mecefo"))}
    assert len(keys) == 3


def test_records_of_before_are_read_and_bad_values_refused_in_one_line():
    config = preset("space", "default")
    before = {key: value for key, value in config.items() if key not in ("survives", "take_over")}
    assert SpaceSpec.from_config(before) == SpaceSpec.from_config(config)
    for changes, words in (
        ({"survives": -1}, "survives=-1"),
        ({"survives": 1.0}, "survives=1.0"),
        ({"survives": True}, "survives=True"),
        ({"survives": 1000}, "survives=1000"),
        ({"take_over": "naive"}, "take_over='naive'"),
        ({"survive": 1}, "survive"),
        ({"survives": 1, "memory_aware_init": False}, "survives=1 is room in memory"),
    ):
        with pytest.raises(InputError) as error:
            SpaceSpec.from_config({**config, **changes})
        assert words in str(error.value)
        assert "\n" not in str(error.value)


def test_a_search_in_it_finds_a_plan_that_survives():
    space = survivors("mecefo", 1)
    result = run_search(load_searcher("autohaap"), space.problem, Budget(evaluations=60), 0, space.spec)
    estimator = FaultEstimator(space.problem, options=OPTIONS)
    reactions = Reactions(estimator, result.plan, policy_named("mecefo", OPTIONS), ())
    for i, here in enumerate(result.plan.stages):
        for r in range(len(replica_samples(here))):
            assert reactions.of(Down(frozenset({Cell(i, r)}))).runs


def test_the_rank_of_an_estimate_is_that_of_its_plans_score():
    scorer = ExpectedThroughput(faults())
    objective = Objective(small(), scorer=scorer)
    draws = [objective.space.plan(objective.space.draw(np.random.default_rng(seed))) for seed in range(4)]
    estimates = [objective(drawn) for drawn in draws]
    for drawn, estimate in zip(draws, estimates, strict=True):
        assert objective.rank(estimate) == (not estimate.fits, estimate.bytes_missing, scorer.seconds(drawn))
        assert Objective(small()).rank(estimate) == estimate.rank


def test_the_space_reserves_projectors_of_the_options_default_rank():
    assert MecefoOptions().rank == PROJECTOR_RANK


def test_a_space_in_parts_is_searched_on_expected_throughput_too_and_keeps_the_front():
    scorer = ExpectedThroughput(faults())
    limited = dataclasses.replace(SPEC, target="megatron")
    result = run_search(load_searcher("random"), small(), Budget(60), 0, limited, scorer=scorer)
    assert result.score_s == scorer_of(small()).seconds(result.plan)
    assert result.score_s >= result.lower_bound_s
    rows = result.artifacts[FRONT].decode().splitlines()
    assert len(rows) == 1 + len(scorer.front)
