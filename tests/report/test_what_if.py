"""What a change would buy is the estimator's answer on the changed cluster, the same every time and never negative."""

import copy

import pytest

from haap_rl.cost.estimator import Estimator
from haap_rl.cost.profiles import MeasuredFor, Profile, UnitCell
from haap_rl.problem.cluster import GIB
from haap_rl.problem.plan import uniform_plan
from haap_rl.problem.presets import load_problem, preset, problem_from_config
from haap_rl.report import what_if as what_if_module
from haap_rl.report.what_if import changes, what_if
from haap_rl.search.base import Budget, load_searcher, run_search
from haap_rl.space.options import SpaceSpec

SPEC = SpaceSpec(num_microbatches=(16, 32), max_stages=4)
NAMES = ("gpt3_350m", "v100x4_t4x4")


@pytest.fixture(scope="module")
def case():
    """(problem, a good plan of it, what changes would buy)."""
    target = load_problem(*NAMES)
    found = run_search(load_searcher("autohaap"), target, Budget(evaluations=500), space=SPEC).plan
    return target, found, what_if(target, SPEC, found)


def changed(**edits):
    """The problem with a change of its second group, made in the cluster's file instead."""
    cluster = copy.deepcopy(preset("cluster", NAMES[1]))
    group = cluster["groups"][1]
    group["device"] = preset("device", group["device"])
    for key, edit in edits.items():
        holder = group["device"] if key in group["device"] else group
        holder[key] = edit(holder[key])
    return problem_from_config(preset("model", NAMES[0]), cluster, preset("problem", "default"))


def doubled(link):
    return {**link, "bandwidth_gb_per_s": 2 * link["bandwidth_gb_per_s"]}


@pytest.mark.parametrize(
    ("words", "edits"),
    [
        ("4 GiB more memory on every t4", {"memory_gib": lambda gib: gib + 4}),
        ("network of the nodes of t4", {"inter_node": doubled}),
        ("links inside the nodes of t4", {"intra_node": doubled}),
        ("one more node of t4", {"num_nodes": lambda nodes: nodes + 1}),
        (
            "t4 25% faster",
            {
                "peak_tflops": lambda peaks: {name: 1.25 * peak for name, peak in peaks.items()},
                "memory_bandwidth_gb_per_s": lambda rate: 1.25 * rate,
            },
        ),
    ],
)
def test_the_present_plan_is_priced_on_the_changed_cluster(case, words, edits):
    _, plan, found = case
    (gain,) = [gain for gain in found.gains if words in gain.text]
    assert gain.present_plan_s == pytest.approx(Estimator(changed(**edits))(plan).iteration_s, rel=1e-12)
    assert gain.best_s <= gain.present_plan_s


def test_no_gain_is_negative_and_the_largest_comes_first(case):
    target, plan, found = case
    assert found.present_s == Estimator(target)(plan).iteration_s
    assert found.searched_s <= found.present_s
    speedups = [found.speedup(gain) for gain in found.gains]
    assert min(speedups) >= 0
    assert speedups == sorted(speedups, reverse=True)
    assert speedups[0] > 0.01  # faster devices, or more of them
    assert found.not_asked == ""


def test_the_same_question_has_the_same_answer(case):
    target, plan, found = case
    assert what_if(target, SPEC, plan) == found


def test_what_a_longer_search_buys_is_not_counted_as_a_change_s_gain(case):
    target, _, found = case
    poor = uniform_plan(target, 1, 8, 1, 8, recompute="full")
    poorer = what_if(target, SPEC, poor)
    assert poorer.present_s > 1.2 * poorer.searched_s
    assert poorer.searched_s == pytest.approx(found.searched_s, rel=0.1)
    for gain in poorer.gains:
        assert poorer.speedup(gain) == max(0.0, poorer.searched_s / gain.best_s - 1)


def test_a_change_that_changes_nothing_buys_nothing_however_short_the_searches(case, monkeypatch):
    target, _, _ = case
    nothing = what_if_module.Change("nothing", target.cluster, True)
    monkeypatch.setattr(what_if_module, "changes", lambda *_: ([nothing] * 3, ""))
    monkeypatch.setattr(what_if_module, "EVALUATIONS", 40)
    found = what_if(target, SPEC, uniform_plan(target, 1, 8, 1, 8, recompute="full"))
    assert [found.speedup(gain) for gain in found.gains] == [0, 0, 0]
    assert {gain.best_s for gain in found.gains} == {found.searched_s}


def test_types_of_devices_are_asked_about_once_and_only_those_of_the_plan(case):
    target, plan, _ = case
    asked, _ = changes(target, plan)
    assert len({change.text for change in asked}) == len(asked)
    only_v100 = uniform_plan(target, 1, 4, 1, 8)
    assert not any(" t4" in change.text for change in changes(target, only_v100)[0])
    larger = load_problem("llama3_8b", "a100x8")
    asked, _ = changes(larger, uniform_plan(larger, 1, 1, 8, 1))
    more = [change.cluster.groups[0].device.memory_bytes / GIB for change in asked if "memory on" in change.text]
    assert more == [44, 50]
    assert not any("network" in change.text for change in asked)  # there is one node


def test_what_a_profile_measured_is_not_changed(case):
    target, plan, _ = case
    name = target.cluster.groups[0].device.name
    cells = (UnitCell(name, "layer", 1, 1, 0.010, 0.020),)
    profile = Profile("mine", MeasuredFor(), cells)
    asked, not_asked = changes(target, plan, profile)
    assert not any("faster, in FLOP/s" in change.text or "links inside" in change.text for change in asked)
    assert "measured" in not_asked
    found = what_if(target, SPEC, plan, profile)
    assert (
        found.present_s == Estimator(target, profile=profile)(plan).iteration_s != Estimator(target)(plan).iteration_s
    )
