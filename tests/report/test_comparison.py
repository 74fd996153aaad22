"""`python -m haap_rl.report DIR...`: one run's page made again, or several compared; bad input is one line."""

import json
import shutil

import pytest
import yaml

from haap_rl.report.__main__ import main
from haap_rl.train import main as train
from tests.report.test_page import headings, parsed, words

SMALL = ["model=gpt3_350m", "cluster=v100x4_t4x4", "budget.evaluations=60"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with four records: a, b and c of one problem, a and c with one plan, and d of another problem."""
    folder = tmp_path_factory.mktemp("runs")
    assert train(["+search=autohaap", *SMALL, f"out={folder / 'a'}"]) == 0
    assert train(["+search=random", *SMALL, "seed=2", f"out={folder / 'b'}"]) == 0
    shutil.copytree(folder / "a", folder / "c")
    assert train(["+search=random", *SMALL, "problem.seq_len=1024", f"out={folder / 'd'}"]) == 0
    return folder


@pytest.fixture
def here(runs, tmp_path, monkeypatch):
    """An empty working directory with copies of the records."""
    shutil.copytree(runs, tmp_path / "runs")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def test_one_directory_remakes_its_own_page(here, capsys):
    page = here.parent / "runs" / "a" / "report.html"
    before = page.read_bytes()
    page.unlink()
    assert main(["../runs/a"]) == 0
    assert page.read_bytes() == before
    assert "report: ../runs/a/report.html" in capsys.readouterr().out
    assert main(["../runs/a", "out=new/other.html"]) == 0
    assert (here / "new" / "other.html").read_bytes() == before


def test_several_are_compared(here):
    assert main(["../runs/a", "../runs/b", "../runs/c"]) == 0
    tree = parsed((here / "report.html").read_text())
    assert headings(tree) == ["gpt3_350m on v100x4_t4x4"]
    shown = words(tree)
    assert "Run 1: autohaap, seed 0; 3: autohaap, seed 0" in shown  # one plan, drawn once
    assert "different problems" not in shown
    for run in "ab":
        result = json.loads((here.parent / "runs" / run / "result.json").read_text())
        assert f"{result['iteration_time_s']:.3f}" in shown
        assert f"{result['iteration_time_low_s']:.3f}" in shown
        assert f"{result['gap_to_lower_bound']:.1%}" in shown
        assert f"{result['tokens_per_s']:,.0f}" in shown


def test_runs_of_different_problems_are_not_mixed(here):
    assert main(["../runs/a", "../runs/d", "out=x.html"]) == 0
    tree = parsed((here / "x.html").read_text())
    assert "2 different problems: they differ in settings of the problem." in words(tree)
    assert len(headings(tree)) == 2


def test_a_run_without_a_plan_is_compared_too(here):
    record = here.parent / "runs" / "b"
    result = json.loads((record / "result.json").read_text())
    result.update(iteration_time_s=None, reason="nothing <fits>")
    (record / "result.json").write_text(json.dumps(result))
    (record / "plan.json").unlink()
    lines = (record / "trace.csv").read_text().splitlines()
    (record / "trace.csv").write_text(f"{lines[0]}\n60,,10,20,0.5\n")
    assert main(["../runs/a", "../runs/b"]) == 0
    assert "no plan, nothing <fits>" in words(parsed((here / "report.html").read_text()))
    assert main(["../runs/b"]) == 0
    assert "nothing <fits>" in words(parsed((record / "report.html").read_text()))


def broken(record, name, text):
    (record / name).write_text(text)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda r: shutil.rmtree(r), ["config.yaml cannot be read", "No such file"]),
        (lambda r: broken(r, "config.yaml", "- 1"), ["not a run's configuration"]),
        (lambda r: broken(r, "config.yaml", "model: {}\ncluster: {}\nproblem: {}\nspace: {}\nsearch: {}"), ["search"]),
        (lambda r: (r / "result.json").unlink(), ["result.json", "No such file"]),
        (lambda r: broken(r, "result.json", "{"), ["result.json", "is not JSON"]),
        (lambda r: broken(r, "result.json", "{}"), ["seed=None is not what a run writes"]),
        (lambda r: (r / "trace.csv").unlink(), ["trace.csv", "No such file"]),
        (lambda r: broken(r, "trace.csv", "a,b\n"), ["trace.csv", "first line"]),
        (lambda r: broken(r, "trace.csv", (r / "trace.csv").read_text() + "1,2\n"), ["trace.csv", "line "]),
        (lambda r: (r / "plan.json").unlink(), ["plan.json", "No such file"]),
        (lambda r: broken(r, "plan.json", "[]"), ["plan.json"]),
        (lambda r: broken(r, "profile.json", "{}"), ["profile.json"]),
    ],
)
def test_a_broken_record_is_one_line_with_status_2_and_nothing_written(here, capsys, harm, said):
    harm(here.parent / "runs" / "b")
    for arguments in (["../runs/a", "../runs/b", "out=x.html"], ["../runs/b", "out=x.html"]):
        assert main(arguments) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1, lines
        assert all(word in lines[0] for word in said), lines[0]
        assert list(here.iterdir()) == []


@pytest.mark.parametrize("value", ["true", "-1", "1e400", "NaN", '"x"', "[1]"])
@pytest.mark.parametrize("key", ["seed", "wall_time_s", "iteration_time_s", "lower_bound_s"])
def test_a_figure_that_is_none_is_named(here, capsys, key, value):
    path = here.parent / "runs" / "a" / "result.json"
    result = json.loads(path.read_text())
    path.write_text(json.dumps(result | {key: 0}).replace(f'"{key}": 0', f'"{key}": {value}'))
    assert main(["../runs/a", "out=x.html"]) == 2
    assert f"{key}=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "DIR..."),
        (["out=x.html"], "DIR..."),
        (["../runs/a", "out=x.pdf"], ".html"),
        (["../runs/a", "out=/proc/none/x.html"], "cannot be written"),
        (["../runs/a", "ou=x.html"], "ou=x.html"),
    ],
)
def test_bad_arguments_are_one_line(here, capsys, arguments, said):
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line
    assert list(here.iterdir()) == []


def test_help(capsys):
    assert main(["--help"]) == 0
    assert "DIR..." in capsys.readouterr().out


def test_a_setting_of_the_record_that_is_wrong_is_named(here, capsys):
    path = here.parent / "runs" / "a" / "config.yaml"
    config = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**config, "space": {**config["space"], "max_stages": 0}}))
    assert main(["../runs/a", "out=x.html"]) == 2
    assert "max_stages=0" in capsys.readouterr().err
