"""The page of a run: sound HTML that needs nothing else, with its pictures told in words, small, and never lost."""

import dataclasses
import json
import re
import shlex
import warnings

import html5lib
import pytest
import yaml

from haap_rl.cost.estimator import Estimator
from haap_rl.problem.plan import uniform_plan
from haap_rl.problem.presets import load_problem, preset
from haap_rl.report import page
from haap_rl.report.page import Run, read_run, run_page, write_report
from haap_rl.report.what_if import Gain, WhatIf
from haap_rl.search.base import TracePoint
from haap_rl.space.options import SpaceSpec
from haap_rl.tracking.record import Record
from haap_rl.train import main
from tests.builders import plan, problem, random_plans, stage

SMALL = ["model=gpt3_350m", "cluster=v100x4_t4x4", "budget.evaluations=120"]
SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = '</title></svg><script>alert("1")</script>&lt;\''


def parsed(text):
    """The page as a tree. Fails where a strict parser of HTML 5 would complain, or the page needs another file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = html5lib.HTMLParser(strict=True).parse(text)
    assert not re.search(r"https?:|src=|href=|url\(|@import|<script|<link|<iframe|\bon\w+=", text)
    assert len(text.encode()) < 1_000_000
    for picture in tree.iter(f"{SVG}svg"):
        assert picture.get("role") == "img"
        assert picture.get("aria-label")
        assert picture.find(f"{SVG}desc").text
    return tree


def headings(tree):
    return [node.text for node in tree.iter("{http://www.w3.org/1999/xhtml}h2")]


def words(tree):
    return "".join(tree.itertext())


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """The directory of a run's record."""
    directory = tmp_path_factory.mktemp("page") / "record"
    assert main(["+search=autohaap", *SMALL, f"out={directory}"]) == 0
    return directory


@pytest.fixture
def asked(monkeypatch):
    """What-ifs answered at once."""
    gains = (Gain("a faster <one>", 1.5, 1.0), Gain("no use", 2.0, 2.0))
    monkeypatch.setattr(page, "what_if", lambda *_: WhatIf(2.2, 2.0, gains, ""))


def run_of(target, chosen, **changes):
    """A run that found `chosen`, whatever it took."""
    config = {
        "search": {"name": "random"},
        "model": preset("model", "llama3_8b"),
        "cluster": preset("cluster", "a100x8"),
        "seed": 0,
    }
    trace = (TracePoint(1, None, 0, 0, 0.0), TracePoint(2, 3.0, 0, 0, 0.1), TracePoint(90, 2.0, 0, 0, 1.0))
    facts = {
        "seed": 0,
        "evaluations": 90,
        "wall_time_s": 1.0,
        "iteration_time_s": 2.0,
        "lower_bound_s": 1.0,
        "proven_optimal": False,
        "stopped_by": "budget",
        "reason": "",
        "notes": (),
        "fingerprint": "x",
    }
    known = Record(None, config, target, SpaceSpec(), None, chosen, trace, **{**facts, **changes})
    return Run(known, None if chosen is None else Estimator(target)(chosen), ())


def test_every_run_leaves_a_page_with_its_plan_its_time_its_memory_its_search_and_its_command(record):
    text = (record / "report.html").read_text()
    tree = parsed(text)
    assert headings(tree) == [
        "Cluster and plan", "One iteration", "Memory", "What limits the plan", "What one change would buy", "Search",
        "The same again",
    ]  # fmt: skip
    result = json.loads((record / "result.json").read_text())
    shown = words(tree)
    for seconds in ("iteration_time_s", "iteration_time_low_s", "iteration_time_high_s", "lower_bound_s"):
        assert f"{result[seconds]:.3f}" in shown
    assert f"{result['tokens_per_s']:,.0f}" in shown
    assert len(list(tree.iter(f"{SVG}svg"))) == 4


def test_the_page_is_made_again_from_the_record_alone(record, tmp_path):
    before = (record / "report.html").read_bytes()
    (record / "report.html").unlink()
    assert write_report(record) == record / "report.html"
    assert (record / "report.html").read_bytes() == before


def test_the_command_makes_the_same_plan_again(record, tmp_path):
    (command,) = re.findall(r"<code>(python -m haap_rl\.train [^<]*)</code>", (record / "report.html").read_text())
    assert main([*shlex.split(command)[3:], f"out={tmp_path / 'again'}"]) == 0
    assert (tmp_path / "again" / "plan.json").read_bytes() == (record / "plan.json").read_bytes()


def test_a_run_without_a_plan_says_why(asked):
    reason = "no plan that was tried fits; the closest misses <1 GiB"
    run = run_of(load_problem(), None, iteration_time_s=None, lower_bound_s=None, reason=reason)
    tree = parsed(run_page(run))
    assert reason in words(tree)
    assert headings(tree) == ["Cluster", "Search", "The same again"]


def test_any_plan_has_a_sound_page(asked):
    target = problem()
    for chosen in random_plans(target, 12, seed=3):
        parsed(run_page(run_of(target, chosen)))
    parsed(run_page(run_of(target, plan(stage(6, "fast")), lower_bound_s=None)))


def test_a_plan_that_no_longer_fits_is_shown_with_what_is_missing(asked):
    target = load_problem("llama3_8b", "a100x8")
    tree = parsed(run_page(run_of(target, uniform_plan(target, 1, 1, 8, 16))))
    assert "are missing" in words(tree)
    assert "What one change would buy" not in headings(tree)


def test_the_largest_cases_stay_small(asked):
    target = load_problem("gpt3_175b", "h100x512_a100x512")
    wide = uniform_plan(target, 8, 16, 8, 1)
    text = run_page(run_of(target, wide))
    parsed(text)
    deep = uniform_plan(load_problem("gpt3_175b", "h100x64"), 4, 16, 1, 1)
    assert deep.num_microbatches == 128
    parsed(run_page(run_of(load_problem("gpt3_175b", "h100x64"), deep)))
    group = target.cluster.groups[0]
    huge = dataclasses.replace(
        target, cluster=dataclasses.replace(target.cluster, groups=(dataclasses.replace(group, num_nodes=20_000),))
    )
    text = run_page(run_of(huge, uniform_plan(huge, 8, 96, 128, 1)))
    parsed(text)


def test_names_are_text_whatever_they_hold(tmp_path):
    cluster = preset("cluster", "v100x4_t4x4")
    cluster["name"] = HOSTILE
    cluster["groups"][0]["name"] = HOSTILE + "0"
    cluster["groups"][1]["device"] = {**preset("device", "t4"), "name": HOSTILE + "1"}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(cluster))
    files = ["cluster=file", f"cluster.path={tmp_path / 'c.yaml'}", "cluster.format=yaml"]
    assert main(["+search=random", "model=gpt3_350m", *files, "budget.evaluations=9", f"out={tmp_path / 'r'}"]) == 0
    tree = parsed((tmp_path / "r" / "report.html").read_text())
    assert HOSTILE in words(tree)
    run = read_run(tmp_path / "r")
    hostile = dataclasses.replace(run.record, notes=("\0\ud800\x85<b>", HOSTILE), reason=HOSTILE)
    parsed(run_page(run._replace(record=hostile)))


def test_gains_are_listed_and_what_buys_nothing_is_named(asked):
    target = load_problem("gpt3_350m", "v100x4_t4x4")
    shown = words(parsed(run_page(run_of(target, uniform_plan(target, 1, 8, 1, 8, recompute="full")))))
    assert "a faster <one>" in shown
    assert "+100.0%" in shown
    assert "A longer search alone buys 10.0%" in shown
    assert re.search(r"Nothing[^:]*: no use\.", shown)


def test_a_record_of_another_estimator_says_so(record):
    run = read_run(record)
    assert "another version of the estimator" not in run_page(run)
    other = dataclasses.replace(run.record, fingerprint="0")
    assert "another version of the estimator" in run_page(run._replace(record=other))
