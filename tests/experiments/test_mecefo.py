"""The convergence experiment: a size that CI can train, killed runs that go on, and its files."""

import csv
import json
from dataclasses import replace
from itertools import pairwise

import pytest

from experiments.mecefo import __main__ as command
from experiments.mecefo import convergence
from experiments.mecefo.convergence import LEVELS, SCENARIOS, Size

CI = Size(seeds=3, steps=70, samples=1, length=32, scenarios=("none", *LEVELS, "drop_replica_mid"))
TINY = replace(CI, seeds=2, steps=2, scenarios=("none", *LEVELS, "drop_replica_low", "skip_only_mid"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Figures of the size for CI; some fifteen seconds."""
    runs = convergence.runs_of(tmp_path_factory.mktemp("mecefo"), CI)
    return convergence.summarise(runs, CI)


def test_perplexity_rises_with_the_share_of_cells_down_within_what_seeds_differ(trained):
    means = [trained["perplexity"][name] for name in ("none", "low", "mid", "high")]
    assert all(less <= 1.015 * more for less, more in pairwise(means))
    assert trained["monotone_within_margin"]
    assert means[0] < 10.0  # something was learnt: 29 characters


def test_the_gradient_error_grows_with_the_share_of_cells_down_and_stays_below_the_papers(trained):
    means = [trained["gradient_error_mean"][name] for name in LEVELS]
    assert 0 < means[0] < means[1] < means[2]
    assert means[1] < 0.6  # of at most 2 of 16 cells
    assert all(trained["gradient_error_mean"][name] <= trained["gradient_error_max"][name] for name in LEVELS)


def test_mecefo_is_no_worse_than_dropping_replicas(trained):
    assert trained["no_worse_than_drop_replica"] == {"mid": True}


@pytest.fixture
def tiny(monkeypatch):
    """The command at a size that takes seconds."""
    monkeypatch.setattr(convergence, "QUICK", TINY)
    trained = []
    train = convergence.train

    def counted(name, seed, size):
        trained.append((name, seed))
        return train(name, seed, size)

    monkeypatch.setattr(convergence, "train", counted)
    return trained


def without_seconds(text):
    rows = list(csv.DictReader(text.splitlines()))
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def test_a_killed_run_goes_on_and_ends_with_the_same_figures(tmp_path, tiny, monkeypatch, capsys):
    train, stop = convergence.train, 5

    def killed(name, seed, size):
        if len(tiny) == stop:
            raise KeyboardInterrupt
        return train(name, seed, size)

    arguments = [f"out={tmp_path / 'killed'}", "quick=true"]
    monkeypatch.setattr(convergence, "train", killed)
    assert command.main(arguments) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert not (tmp_path / "killed" / "summary.json").exists()

    monkeypatch.setattr(convergence, "train", train)
    assert command.main(arguments) == 0
    assert len(tiny) == len(set(tiny)) == TINY.seeds * len(TINY.scenarios)  # no run twice
    assert command.main([f"out={tmp_path / 'whole'}", "quick=true"]) == 0
    for name in ("summary.json", "gradient_errors.csv", "table.md"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    texts = [(tmp_path / where / "convergence.csv").read_text() for where in ("killed", "whole")]
    assert without_seconds(texts[0]) == without_seconds(texts[1])


def test_the_summary_says_what_was_found_and_with_which_options(tmp_path, tiny):
    assert command.main([f"out={tmp_path}", "quick=true"]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary["perplexity"]) == set(TINY.scenarios) < set(SCENARIOS)
    for name, mean in summary["perplexity"].items():
        low, high = summary["perplexity_interval_95"][name]
        assert low <= mean <= high
    assert set(summary["gradient_error_mean"]) == set(TINY.scenarios) - {"none"}
    options = summary["assumptions"]["convergence"]["options"]
    assert options["rank"] == 8
    assert options["empty_set"] == "freeze"
    assert set(summary["difference_pct"]) == {"low over drop_replica_low"}
    for name in ("perplexity.png", "gradient_error.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_scenarios_of_one_seed_share_weights_and_samples(tmp_path):
    """Nothing has been updated by failures before the first step, so that its exact gradients are the same."""
    size = replace(TINY, seeds=1, steps=1, scenarios=("none", "low", "drop_replica_low"))
    low, dropped = (convergence.train(name, 0, size) for name in size.scenarios[1:])
    assert low["errors"][0][0] == dropped["errors"][0][0] == 0
    assert convergence.train("low", 0, size)["perplexity"] == low["perplexity"]


def test_bad_options_are_refused_in_one_line(tmp_path, capsys):
    for arguments, says in (
        (["quick=maybe", f"out={tmp_path}"], "mecefo: quick='maybe' must be true or false"),
        (["speed=1", f"out={tmp_path}"], "'speed=1' is not an option"),
        ([], "out has no value"),
    ):
        assert command.main(arguments) == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1
