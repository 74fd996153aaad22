"""Plans found on expected throughput against plans found as if nothing failed: a small problem, and what is written."""

import json

import pytest

from experiments import expected_throughput as experiment
from experiments.expected_throughput import Case

SMALL = ("gpt3_1_3b", "v100x4_t4x4")


@pytest.fixture(scope="module")
def compared():
    """One case with few plans."""
    return experiment.compare(Case(*SMALL, "mecefo", 0, 60))


def test_the_plan_found_on_expected_throughput_is_never_worse_by_it(compared):
    assert compared["gain_pct"] >= 0
    assert compared["seeing_tokens_per_s"] >= compared["blind_tokens_per_s"]
    assert compared["blind_failure_free"] >= compared["seeing_failure_free"] * (
        1 - 1e-9
    )  # that is what it was found by
    for name in ("blind", "seeing"):
        assert compared[f"{name}_lower"] <= compared[f"{name}_tokens_per_s"] <= compared[f"{name}_upper"]


def test_both_plans_meet_the_same_traces(compared):
    assert len(compared["simulated_gains_pct"]) == experiment.TRACES
    again = experiment.compare(Case(*SMALL, "mecefo", 0, 60))
    assert {k: v for k, v in again.items() if k != "seconds"} == {k: v for k, v in compared.items() if k != "seconds"}


@pytest.fixture
def small(monkeypatch):
    """The command on one problem, with figures that take no search."""
    monkeypatch.setattr(experiment, "PROBLEMS", (SMALL,))
    monkeypatch.setattr(experiment, "ProcessPoolExecutor", Here)
    asked = []

    def compare(case):
        asked.append(case)
        worth = {
            "tokens_per_s": 80.0,
            "lower": 79.0,
            "upper": 81.0,
            "failure_free": 100.0,
            "fidelity": 0.9,
            "stopped": 0.0,
        }
        blind = {f"blind_{key}": value for key, value in worth.items()}
        seeing = {f"seeing_{key}": value for key, value in {**worth, "tokens_per_s": 90.0, "lower": 89.0}.items()}
        return {
            **blind,
            **seeing,
            "gain_pct": 12.5,
            "gain_at_least_pct": 100 * (89 / 81 - 1),
            "blind_gap_to_bound_pct": 0.0,
            "failure_free_cost_pct": 5.0,
            "simulated_gains_pct": [11.0, None, 13.0],
            "front": [[100.0, 80.0, 0.9], [95.0, 90.0, 1.0]],
            "seconds": 1.0,
        }

    monkeypatch.setattr(experiment, "compare", compare)
    return asked


class Here:
    """A pool of this process."""

    def __init__(self, *settings):
        self.map = map

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def test_every_figure_is_in_a_file_and_a_second_run_runs_nothing(tmp_path, small, capsys):
    assert experiment.main([f"out={tmp_path}", "quick=true"]) == 0
    assert len(small) == len(experiment.POLICIES)
    summary = json.loads((tmp_path / "summary.json").read_text())
    name = " on ".join(SMALL)
    assert summary["clusters_better"] == {"mecefo": [name], "recycle": [name]}
    assert summary["never_worse"] == {"mecefo": True, "recycle": True}
    gain = summary["gain_pct"]["mecefo"][name]
    assert (gain["simulated"], gain["traces"], gain["traces_without_blind"]) == (12.0, 3, 1)
    assert "better by proven bounds in every seed on 1 of 1 problems" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "expected_throughput.csv").read_text().splitlines()) == 1 + len(experiment.POLICIES)
    assert experiment.main([f"out={tmp_path}", "quick=true"]) == 0
    assert len(small) == len(experiment.POLICIES)


def test_bad_options_are_refused_in_one_line(tmp_path, capsys):
    for argument in ("processes=0", "processes=1e12", "quick=maybe", "speed=1"):
        assert experiment.main([f"out={tmp_path}", argument]) == 2
        assert capsys.readouterr().err.count("\n") == 1
