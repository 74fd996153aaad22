"""Machine code and its cache: one folder, shared by processes that start together, or none where nothing is writable.

Each test runs Python anew with a cache folder of its own, on one tiny function instead of the kernels.
"""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from haap_rl.cost import compiling
from haap_rl.problem.presets import load_problem
from haap_rl.search.base import Objective
from haap_rl.space.options import SpaceSpec

ROOT = Path(__file__).resolve().parents[2]
SMALL = SpaceSpec(num_microbatches=(16, 32), max_stages=2, max_tp=1, group_sizes=(2, 4), recompute=("none", "full"))
TINY = """
from haap_rl.cost.compiling import cache_folder, jit, ready

@jit
def twice(x):
    return 2.0 * x

ready("tiny", lambda: twice(1.0))
print(twice(21.0), cache_folder())
"""
PRICE = """
from tests.cost.test_compiling import first_prices
print(*map(float.hex, first_prices()))
"""


def first_prices():
    """Seconds of a few plans of a small problem."""
    objective = Objective(load_problem("gpt3_350m", "v100x4_t4x4"), space=SMALL)
    return objective.many(objective.space.draws(np.random.default_rng(0), 3)).iteration_s.tolist()


@pytest.fixture
def start(tmp_path):
    """Starts Python on `text`, a file, with a cache below `cache` and other variables; the process."""

    def run(text, cache, **variables):
        script = tmp_path / "script.py"
        script.write_text(text)
        known = {key: value for key, value in os.environ.items() if not key.startswith("NUMBA_")}
        variables = {**known, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache), **variables}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, str(script)], cwd=tmp_path, env=variables, stdout=pipe, stderr=pipe, text=True
        )

    return run


def finished(process):
    """(words on standard output, lines on standard error) of a process that succeeded."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.split(), err.splitlines()


def test_the_cache_is_where_the_user_keeps_caches_and_compiling_is_said_once(start, tmp_path):
    (value, folder), said = finished(start(TINY, tmp_path / "cache"))
    assert value == "42.0"
    assert Path(folder).parent == tmp_path / "cache" / "haap_rl"
    assert len(said) == 1
    assert said[0].startswith("haap_rl: compiling the tiny kernels once for this machine")
    kept = sorted(Path(folder).rglob("*.nb*"))
    assert kept
    assert finished(start(TINY, tmp_path / "cache")) == (["42.0", folder], [])
    assert sorted(Path(folder).rglob("*.nb*")) == kept
    assert not (tmp_path / "__pycache__").exists()


def test_without_a_writable_cache_everything_works_and_nothing_is_kept(start, tmp_path):
    (tmp_path / "file").touch()
    for _ in range(2):
        words, said = finished(start(TINY, tmp_path / "file" / "cache"))
        assert words == ["42.0", "None"]
        assert len(said) == 1
        assert "for this run" in said[0]


def test_processes_that_start_together_compile_once(start, tmp_path):
    slow = TINY.replace("twice(1.0)", "(twice(1.0), __import__('time').sleep(0.5))")
    processes = [start(slow, tmp_path / "cache") for _ in range(2)]
    results = [finished(process) for process in processes]
    assert results[0][0] == results[1][0]
    assert sum(len(said) for _, said in results) == 1


def test_plain_python_gives_the_prices_of_machine_code(start, tmp_path):
    words, said = finished(start(PRICE, tmp_path / "cache", NUMBA_DISABLE_JIT="1"))
    assert [float.fromhex(word) for word in words] == first_prices()
    assert not said
    assert not list(tmp_path.rglob("*.done"))  # nothing was compiled, so whoever compiles must still say so


def test_where_files_cannot_be_locked_there_is_no_cache(monkeypatch, tmp_path):
    def refuse(*_):
        raise OSError("no locks available")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    find = compiling.cache_folder.__wrapped__
    assert find() is not None
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert find() is None


def test_a_cache_that_another_process_has_locked_is_used(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    find = compiling.cache_folder.__wrapped__
    with (find() / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert find() is not None
