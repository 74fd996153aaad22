"""The comparison of trained policies with searchers: figures by hand, a tiny run, restarts, refusals."""

import json
import math
import os

import numpy as np
import pytest
import torch

from experiments import rl_comparison, search_quality, suite
from haap_rl.search.candidate_policy import CandidateNetwork, policy_bytes
from haap_rl.space.construction import FEATURES

ALIKE = np.tile([1.0, 2.0, 3.0, 4.0], (3, 5))  # three instances, twenty seeds


def write_policies(directory, count, **facts):
    """A training's directory with random policies."""
    for seed in range(count):
        torch.manual_seed(seed)
        path = directory / f"seed-{seed}" / "policy.npz"
        path.parent.mkdir(parents=True)
        network = CandidateNetwork(len(FEATURES), 8)
        path.write_bytes(policy_bytes(network, {"seed": seed, "training_evaluations": 1000, **facts}))
    return directory


def on(split):
    """Every method that a split is used for."""
    return list(rl_comparison.methods_on(split, tuple(rl_comparison.METHODS)))


def results(runs, methods, known_s=(1.0,), policies=1, most=100_000):
    """Results of runs by search, [instance][seed]."""
    certified = suite.certified()[: len(known_s)]
    part = rl_comparison.Part(certified, [None] * policies, methods, suite.spec())
    return rl_comparison.Results(part, runs, list(known_s), most)


def run(*trace, evaluations=100_000, first=6):
    """Figures of a run with this trace of (evaluations, seconds of the best plan)."""
    return {
        "trace": trace,
        "first": [first, 0.5],
        "seconds_at": {"96": 2.0},
        "evaluations": evaluations,
        "seconds": 9.0,
    }


# ------------------------------------------------------------------------------------------ by hand
def test_training_has_paid_after_the_first_number_of_instances_that_makes_it_cheaper():
    assert rl_comparison.instances_after(1000, 96, 196) == 11  # at 10 both are equal
    assert rl_comparison.instances_after(1001, 96, 196) == 11
    assert rl_comparison.instances_after(0, 96, 97) == 1
    assert rl_comparison.instances_after(1000, 96, 96) is None
    assert rl_comparison.instances_after(1000, 96, 50) is None


def test_break_even_compares_with_the_searcher_that_needs_least_and_caps_at_its_budget():
    found = results(
        {
            "policy_propose": [[run((6, 1.5), (90, 1.1), (200, 1.0))] * 4],  # 10 % at 96 evaluations
            "ga": [[run((6, 1.5), (396, 1.05)), run((596, 1.1 - 1e-12))] * 2],
            "annealing": [[run((6, 1.2), evaluations=1000)] * 4],  # never gets there
        },
        ("policy_greedy", "policy_sampled", "ga", "annealing"),
    )
    figures = rl_comparison.break_even(found, training=40_000.0)
    assert figures["policy_iqm_gap_pct"] == pytest.approx(10.0)
    assert figures["from_scratch"]["ga"] == {"evaluations": 496.0, "share_that_got_there": 1.0}
    assert figures["from_scratch"]["annealing"] == {"evaluations": 1000.0, "share_that_got_there": 0.0}
    assert figures["instances"] == 101  # 40,000 / (496 - 96) = 100, and one more
    assert rl_comparison.break_even(found, training=None)["instances"] is None


@pytest.mark.parametrize(("shift", "words"), [(-2.0, "better"), (0.0, "not worse"), (2.0, "worse")])
def test_a_method_is_better_where_the_interval_of_the_difference_lies_below_nothing(shift, words):
    found = rl_comparison.verdict(ALIKE + shift, ALIKE, (1, 1))
    assert found["verdict"] == words
    assert found["difference_pct"] == pytest.approx(shift)
    assert found["low"] <= shift <= found["high"]


def test_a_method_without_plans_is_worse_than_one_that_has_some():
    found = rl_comparison.verdict(ALIKE, np.full_like(ALIKE, np.inf), (1, 1))
    assert found["verdict"] == "better"
    assert math.isfinite(found["difference_pct"])


def test_the_first_plans_are_what_the_first_batch_found_whatever_its_size():
    greedy, sampled = rl_comparison.METHODS["policy_greedy"], rl_comparison.METHODS["policy_sampled"]
    one = run((1, 1.5), (3, 1.4), (5, 1.3), (90, 1.2), (97, 1.1), first=4)
    assert rl_comparison.best_s(one, greedy, 6) == 1.4
    assert rl_comparison.best_s(one, sampled, 96) == 1.2
    assert rl_comparison.best_s(run((7, 1.0)), sampled, 6) == math.inf
    assert (rl_comparison.seconds_at(one, greedy, 6), rl_comparison.seconds_at(one, sampled, 96)) == (0.5, 2.0)
    assert rl_comparison.seconds_at(one, sampled, 1000) == 9.0


def test_an_interval_covers_training_anew_where_policies_differ_more_than_their_runs():
    gaps = np.tile([1.0, 5.0], (20, 5))  # of two policies in turn, each as good on every instance
    plain = np.percentile(search_quality.resampled_means(gaps), (2.5, 97.5))
    whole = search_quality.resampled_means(gaps, groups=2)
    assert plain[1] - plain[0] < 2.0
    assert set(np.unique(whole)) == {1.0, 3.0, 5.0}  # one policy twice, both, the other twice
    assert (whole == 3.0).mean() == pytest.approx(0.5, abs=0.05)
    assert (search_quality.resampled_means(gaps, groups=1) == search_quality.resampled_means(gaps)).all()


def test_groups_need_not_be_equally_large():
    gaps = np.tile(np.arange(5.0), (4, 1))
    means = search_quality.resampled_means(gaps, groups=3)
    assert np.isfinite(means).all()
    assert 0.0 <= means.min() < 1.0
    assert 3.0 < search_quality.resampled_means(gaps, groups=5).max() <= 4.0


def test_infinite_gaps_have_no_figures_that_json_has_no_word_for():
    figures = rl_comparison.figures_of(np.where(ALIKE > 3, np.inf, ALIKE), groups=1)
    assert (figures["mean"], figures["worst"], figures["share_without_plan"]) == (None, None, 0.25)
    assert figures["iqm_gap_pct"] == pytest.approx(2.5)
    json.dumps(figures, allow_nan=False)


# ------------------------------------------------------------------------------------------ the command
@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """(out, arguments) of a comparison of every method on one instance of each split, with an ablation."""
    root = tmp_path_factory.mktemp("rl_comparison")
    policies = write_policies(root / "trained", 2, teacher_examples=7)
    off = write_policies(root / "off", 1, space={"memory_aware_init": False, "num_microbatches": [32, 64]})
    arguments = [
        f"out={root / 'out'}", f"policies={policies}", "quick=true", "most=100", "processes=2",
        f"ablations=off:{off},full:{policies}",
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        splits = {split: instances[:1] for split, instances in rl_comparison.SPLITS.items()}
        patch.setattr(rl_comparison, "SPLITS", splits)
        assert rl_comparison.main(arguments) == 0
        yield root / "out", arguments


def test_the_summary_has_every_method_at_its_budgets_on_both_splits(compared):
    out, _ = compared
    summary = json.loads((out / "summary.json").read_text())
    for split in ("test", "unseen_devices"):
        for figure in ("iqm_gap_pct", "low", "high", "worst"):
            found = summary[split][figure]
            assert list(found) == on(split)
            assert list(found["policy_greedy"]) == ["6"]
            assert list(found["policy_sampled"]) == ["96"]
            assert list(found["policy_polish"]) == ["6", "96"]
            assert list(found["ga"]) == ["6", "96", "100"]
        if split == "test":
            assert (
                summary[split]["iqm_gap_pct"]["ga_policy"]["6"] == summary[split]["iqm_gap_pct"]["policy_greedy"]["6"]
            )
        assert (
            summary[split]["iqm_gap_pct"]["policy_polish"]["6"] >= summary[split]["iqm_gap_pct"]["policy_polish"]["96"]
        )
        assert set(summary[split]["polish_against"]) == set(on(split)) - {"policy_polish"}
        assert len(summary[split]["profile"]["96"]["random"]) == len(summary["profile_taus_pct"])
    assert summary["training_evaluations"] == 1000
    assert summary["break_even_instances"] is None or summary["break_even_instances"] > 0
    assert [row["seed"] for row in summary["training"]] == [0, 1]
    assert list(summary["ablations"]) == ["full", "off"]
    assert summary["ablations"]["full"]["iqm_gap_pct"] == {
        name: summary["test"]["iqm_gap_pct"][name] for name in ("policy_greedy", "policy_sampled")
    }


def test_the_tables_and_pictures_are_there(compared):
    out, _ = compared
    table = (out / "table.md").read_text()
    assert "2 training seeds." in table
    assert "| policy_polish against |" in table
    assert "\n| off | " in table
    instance = suite.INSTANCES[0].name
    assert f"\n| {instance} | 8 |" in (out / "instances.md").read_text()
    rows = (out / "runs.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * (len(on("test")) + len(on("unseen_devices")))
    assert f"test,{instance},policy_polish,1,1,100," in "\n".join(rows)
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in ("curves.png", "profile.png"))


def test_the_same_command_goes_on_and_ends_with_equal_files(compared):
    out, arguments = compared
    names = ("summary.json", "table.md", "instances.md", "runs.csv")
    files = {name: (out / name).read_bytes() for name in names}
    broken = out / "runs" / "test" / "random-00-0-100.json"
    times = json.loads(broken.read_text())["run"]["trace"]
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*.json")}
    assert rl_comparison.main(arguments) == 0
    assert files == {name: (out / name).read_bytes() for name in names}
    assert before == {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*.json")}
    broken.write_text("{")
    assert rl_comparison.main(arguments) == 0
    assert json.loads(broken.read_text())["run"]["trace"] == times
    assert [path for path, time in before.items() if path.stat().st_mtime_ns != time] == [broken]


def test_a_run_belongs_to_its_policy_its_space_and_its_budget(compared):
    out, _ = compared
    policies = rl_comparison.policies_of("policies", str(out.parent / "trained"), out)
    spec = suite.spec()
    part = rl_comparison.Part(suite.certified()[:1], policies, ("policy_sampled", "ga"), spec)
    propose, ga = rl_comparison.tasks_of(part, out, 3, 100)
    assert (propose.policy, ga.policy) == (policies[1], None)
    keys = [propose.key, propose._replace(policy=policies[0]).key, propose._replace(evaluations=99).key, ga.key]
    off = rl_comparison.ablations_of(f"off:{out.parent / 'off'}", part.instances, out)["off"]
    assert (off.space.memory_aware_init, off.space.num_microbatches) == (False, (32, 64))
    keys.append(propose._replace(space=off.space).key)
    assert len({json.dumps(key) for key in keys}) == len(keys)
    assert propose.key["policy"] == policies[1].digest
    assert str(out) not in json.dumps(propose.key)


@pytest.mark.parametrize(("arguments", "words"), [
    (["policies=nowhere"], "policies='nowhere': there is no seed-N/policy.npz"),
    (["methods=ga,gaa"], "'gaa' is not one of policy_greedy"),
    (["seeds=0"], "seeds=0"),
    (["most=5"], "most=5 must be at least 6"),
    (["quick=2"], "quick=2 must be true or false"),
    (["policies={trained}", "ablations=masks"], "'masks' is not a new name:directory"),
    (["policies={trained}", "ablations=masks:nowhere"], "ablations: masks='nowhere'"),
    (["policies={broken}"], "it is not a whole policy file"),
    (["policies={trained}", "ablations=strange:{strange}"], "unknown key 'stages'"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused_in_one_line(tmp_path, capsys, arguments, words):
    folders = {"trained": write_policies(tmp_path / "trained", 1), "broken": tmp_path / "broken"}
    folders["strange"] = write_policies(tmp_path / "strange", 1, space={"stages": 3})
    (folders["broken"] / "seed-0").mkdir(parents=True)
    (folders["broken"] / "seed-0" / "policy.npz").write_bytes(b"PK")
    arguments = [argument.format(**folders) for argument in arguments]
    assert rl_comparison.main([f"out={tmp_path / 'out'}", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not os.path.exists(tmp_path / "out" / "runs")
