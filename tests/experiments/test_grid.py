"""Grids: what is kept, what is run again, and that neither the runner nor a worker's death shows in the files."""

import csv
import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import grid
from haap_rl.problem.errors import InputError
from tests import grid_cells
from tests.grid_cells import cell

RUNNERS = {"processes": lambda: grid.processes(2), "ray": lambda: grid.ray("local", 2)}
SEARCHES = [cell(), cell("gpt3_1_3b"), cell("gpt3_350m", (0,), evaluations=60)]


def here(run, cells):
    """A runner without processes."""
    for each in cells:
        yield each, run(each)


def without_times(folder):
    """{file: its rows without what a clock gave}."""
    found = {}
    for path in sorted(folder.glob("*.csv")):
        with path.open() as file:
            found[path.name] = [
                {key: value for key, value in row.items() if key not in grid.TIMES} for row in csv.DictReader(file)
            ]
    return found


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A folder with real searches, run one after the other."""
    folder = tmp_path_factory.mktemp("grid")
    grid.run_grid(SEARCHES, folder, here)
    return folder


@pytest.mark.parametrize("name", RUNNERS)
def test_every_runner_gives_the_same_files_and_outlives_its_workers(searched, tmp_path, monkeypatch, name):
    """One grid per runner: real searches, and a cell whose worker is killed in the middle."""
    monkeypatch.setenv("RAY_worker_niceness", "0")  # beside other tests a nice worker would wait for minutes
    killed, lines = cell(marker=str(tmp_path / "killed")), []
    found = grid.run_grid([killed, *SEARCHES], tmp_path / "cells", RUNNERS[name](), lines.append, run=grid_cells.dying)
    assert (tmp_path / "killed").exists()
    assert found.of(killed) == grid_cells.rows_of(killed)
    for each in SEARCHES:
        assert [row["seed"] for row in found.of(each)] == [str(seed) for seed in each.seeds]
        assert found.reason(each) == ""
    files = without_times(tmp_path / "cells")
    assert len(files.pop(killed.file_name)) == 2
    assert files == without_times(searched)
    assert len(lines) == 4
    assert lines[-1].startswith("4 of 4: ")


def test_a_cell_that_kills_every_worker_is_given_up_with_a_reason(tmp_path):
    deadly, good = cell(deadly=True), cell(marker=str(tmp_path))
    found = grid.run_grid([deadly, good], tmp_path / "cells", grid.processes(2), run=grid_cells.dying)
    assert found.of(good)
    assert found.of(deadly) == []
    assert found.reason(deadly) == "its worker died 3 times"


def test_workers_end_with_the_command_even_if_it_is_killed(tmp_path):
    marker = tmp_path / "worker"
    code = (
        "from pathlib import Path\n"
        "from experiments import grid\n"
        "from tests import grid_cells\n"
        f"cells = [grid_cells.cell(marker={str(marker)!r})]\n"
        "if __name__ == '__main__':\n"
        "    grid.run_grid(cells, Path('cells'), grid.processes(1), run=grid_cells.sleeping)\n"
    )
    (tmp_path / "command.py").write_text(code)
    places = os.pathsep.join([str(grid.ROOT), str(grid.ROOT / "envs")])
    command = subprocess.Popen([sys.executable, "command.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": places})
    try:
        wait_until(lambda: marker.exists() and marker.read_text())
        worker = Path("/proc", marker.read_text())
        assert worker.exists()
    finally:
        command.kill()
        command.wait()
    wait_until(lambda: not worker.exists())


def wait_until(holds):
    """Wait for something that another process does."""
    for _ in range(1200):
        if holds():
            return
        time.sleep(0.1)
    raise AssertionError("it never was so")


def test_an_interrupted_grid_runs_only_what_is_missing_and_ends_with_equal_files(searched, tmp_path):
    def interrupted(run, cells):
        for number, each in enumerate(cells):
            if number == 1:
                raise KeyboardInterrupt
            yield each, run(each)

    with pytest.raises(KeyboardInterrupt):
        grid.run_grid(SEARCHES, tmp_path, interrupted)
    assert len(list(tmp_path.glob("*.csv"))) == 1
    ran = []

    def watched(run, cells):
        ran.extend(cells)
        yield from here(run, cells)

    grid.run_grid(SEARCHES, tmp_path, watched)
    assert ran == SEARCHES[1:]
    assert without_times(tmp_path) == without_times(searched)
    grid.run_grid(SEARCHES, tmp_path, watched)
    assert len(ran) == 2


@pytest.mark.parametrize("change", ["broken", "cut", "other code"])
def test_a_file_that_cannot_be_trusted_is_made_again(tmp_path, monkeypatch, change):
    each = cell()
    (path,) = (tmp_path / each.file_name,)
    grid.run_grid([each], tmp_path, here, run=grid_cells.at_once)
    assert grid.stored_rows(each, tmp_path) is not None
    text = path.read_text()
    if change == "broken":
        path.write_bytes(b"\xff\x00")
    elif change == "cut":
        path.write_text(text[: len(text) // 2])
    else:
        monkeypatch.setattr(grid, "version", lambda: "0+000000000000")
    assert grid.stored_rows(each, tmp_path) is None


def test_time_left_is_judged_by_the_cells_of_the_same_search(monkeypatch):
    now = iter([0.0, 8.0, 20.0])
    monkeypatch.setattr(grid.time, "perf_counter", lambda: next(now))
    cells = [cell(seeds=(n,), name=name) for n, name in enumerate(["ga", "ppo", "ga", "ppo"])]
    clock = grid.Clock(cells)
    clock.done(cells[0], grid_cells.rows_of(cells[0], seconds="4.0"))
    assert clock.left_s() == pytest.approx(8.0 / 4.0 * 12.0)  # every one like the first
    clock.done(cells[1], grid_cells.rows_of(cells[1], seconds="36.0"))
    assert clock.left_s() == pytest.approx(20.0 / 40.0 * (4.0 + 36.0))


def test_a_cell_is_known_by_everything_that_its_figures_depend_on():
    each = cell()
    hashes = {each.config_hash}
    for change in (
        {"model": "gpt3_1_3b"}, {"cluster": "a100x8"}, {"evaluations": 51}, {"seeds": (0,)}, {"cached": False},
        {"search": {"name": "random", "x": 1}}, {"problem": {}}, {"space": {}}, {"method": "another"},
    ):  # fmt: skip
        hashes.add(dataclasses.replace(each, **change).config_hash)
    assert len(hashes) == 10


def test_a_search_that_cannot_be_made_has_a_reason_instead_of_a_plan(tmp_path):
    bad = cell(nonsense=1)
    found = grid.run_grid([bad, cell("llama3_405b", (0,))], tmp_path, here)
    assert "nonsense" in found.reason(bad)
    assert "llama3_405b" in found.reason(cell("llama3_405b", (0,)))


@pytest.mark.parametrize(
    ("name", "number", "words"),
    [
        ("mpi", 2, "processes or ray"),
        ("processes", 0, "processes"),
        ("ray", "many", "whole number"),
        ("processes", 10**12, "at most 256"),
    ],
)
def test_a_bad_runner_is_one_line(name, number, words):
    with pytest.raises(InputError, match=words):
        grid.runner_of(name, number, "auto")


@pytest.mark.parametrize("address", ["auto", "127.0.0.1:1", "nowhere", "127.0.0.1:99999"])
def test_no_ray_cluster_is_one_line(tmp_path, monkeypatch, address):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(InputError, match="ray start --head") as raised:
        grid.run_grid([cell()], tmp_path, grid.runner_of("ray", 1, address))
    assert "\n" not in str(raised.value)
