"""docs/new_searcher.md does what it says, and searchers of installed packages are found or refused in one line."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from haap_rl.problem.errors import InputError
from haap_rl.search.base import load_searcher
from haap_rl.train import main
from tests.documented_searcher import NAME, ROOT, blocks, install, path_with, write_package

SMALL = ["model=gpt3_1_3b", "cluster=v100x4_t4x4"]


def run_line(line, folder, *site, **variables):
    """Run a shell line of the page, which must start with `python`, in `folder`, with environment variables."""
    program, *arguments = shlex.split(line)
    assert program == "python"
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**path_with(*site), **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )


def recorded(directory):
    return json.loads((directory / "runs" / NAME / "result.json").read_text())


@pytest.fixture
def package(tmp_path):
    """(folder of the package as the page lays it out, site folder in which it is installed)."""
    write_package(tmp_path / "package")
    install(tmp_path / "package", tmp_path / "site")
    return tmp_path / "package", tmp_path / "site"


def test_as_a_package_of_its_own(package):
    folder, site = package
    done = run_line(blocks()["in the package"], folder, site)
    assert done.returncode == 0, done.stderr
    assert recorded(folder)["searcher"] == NAME
    assert recorded(folder)["evaluations"] == 200

    near = run_line(
        f"python -m haap_rl.train +search=hill_clim {' '.join(SMALL)} hydra.searchpath=[file://conf]", folder
    )
    assert near.returncode == 2
    assert near.stderr == f"haap_rl: search=hill_clim is not known; did you mean '{NAME}'?\n"
    missing = run_line(f"python -m haap_rl.train +search={NAME} hydra.searchpath=[file://conf]", folder)
    assert missing.returncode == 2
    assert missing.stderr.count("\n") == 1
    assert "haap_rl.searchers" in missing.stderr


def test_inside_the_project(tmp_path):
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("haap_rl", "conf"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    (tmp_path / "haap_rl" / "search" / f"{NAME}.py").write_text(blocks()["hill_climb.py"])
    (tmp_path / "conf" / "search" / f"{NAME}.yaml").write_text(blocks()["hill_climb.yaml"])
    # a copy elsewhere would compile every kernel anew, which says nothing about the page: it runs as Python
    done = run_line(blocks()["in the project"], tmp_path, tmp_path, NUMBA_DISABLE_JIT="1")
    assert done.returncode == 0, done.stderr
    assert recorded(tmp_path)["searcher"] == NAME


def test_the_policy_is_read_back_as_the_page_says(tmp_path):
    trained = run_line("python -m haap_rl.train +search=ppo budget.evaluations=100 out=record", tmp_path)
    assert trained.returncode == 0, trained.stderr
    (tmp_path / "read_policy.py").write_text(blocks()["read_policy.py"])
    done = run_line("python read_policy.py record", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("its most likely plan: ")


def test_every_block_with_a_title_is_used():
    assert set(blocks()) == {
        "hill_climb.py", "hill_climb.yaml", "pyproject.toml", "read_policy.py", "in the project", "in the package",
    }  # fmt: skip


@pytest.mark.parametrize(("entry_points", "module", "words"), [
    ("mine = not_there_xyz:Searcher", "", ["'not_there_xyz:Searcher'", "ModuleNotFoundError", "package 'mine'"]),
    ("mine = broken_mine:Searcher", "import sys\nsys.nope\n", ["AttributeError", "nope"]),
    ("mine = broken_mine:Other", "class Searcher: pass\n", ["AttributeError", "Other"]),
    ("mine = broken_mine:Searcher", "class Searcher: pass\n", ["search method"]),
    ("mine = broken_mine:function", "def function(): pass\n", ["not a class"]),
    ("mine = broken mine", "", ["cannot be imported"]),
    ("other = broken_mine:Searcher", "", ["'mine' is not known", "other"]),
])  # fmt: skip
def test_a_broken_entry_point_is_one_line(tmp_path, monkeypatch, entry_points, module, words):
    site(tmp_path, "mine", entry_points, module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_mine", raising=False)
    with pytest.raises(InputError) as error:
        load_searcher("mine")
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "text", "words"), [
    ("nameless", "x: 1\n", ["search=nameless", "`name: nameless`"]),
    ("empty", "", ["search=empty", "'name'"]),
    ("other", "name: random\n", ["search.name='random'", "'other'"]),
    ("list", "- 1\n", ["not a searcher"]),
    ("broken", "name: [1\n", ["broken.yaml", "line 1"]),
    ("random_", "name: random_\n", ["'random_' is not known"]),
])  # fmt: skip
def test_a_bad_yaml_on_the_search_path_is_one_line(tmp_path, monkeypatch, capfd, name, text, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "search").mkdir(parents=True)
    (tmp_path / "conf" / "search" / f"{name}.yaml").write_text(text)
    assert main([f"+search={name}", "hydra.searchpath=[file://conf]", "out=record"]) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert all(word in lines[0] for word in words), lines[0]
    assert not (tmp_path / "record").exists()


def test_a_search_path_that_is_not_there_is_one_line(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(["+search=random", "hydra.searchpath=[file://not-there]", "out=record"]) == 2
    error = capfd.readouterr().err
    assert error.startswith("haap_rl: hydra.searchpath: not-there is not available.")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def site(folder: Path, package: str, entry_points: str, module: str = ""):
    """A distribution with one entry point and one module `broken_mine` in `folder`."""
    (folder / f"{package}-1.dist-info").mkdir(parents=True)
    (folder / f"{package}-1.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    (folder / f"{package}-1.dist-info" / "entry_points.txt").write_text(f"[haap_rl.searchers]\n{entry_points}\n")
    (folder / "broken_mine.py").write_text(module)


def test_two_packages_with_one_name_and_ours_that_cannot_be_replaced(tmp_path, monkeypatch):
    site(tmp_path / "a", "a", "mine = a:A\nrandom = a:A")
    site(tmp_path / "b", "b", "mine = b:B")
    for folder in ("a", "b"):
        monkeypatch.syspath_prepend(tmp_path / folder)
    with pytest.raises(InputError, match=r"several installed packages \(a:A, b:B\)"):
        load_searcher("mine")
    assert type(load_searcher("random")).__module__ == "haap_rl.search.random"
