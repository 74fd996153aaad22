"""Cells and ways to run them for the tests of grids; a module of its own, so that workers can import it."""

import os
import signal
import time
from pathlib import Path

from experiments.grid import COLUMNS, Cell, run_cell, version
from haap_rl.problem.presets import preset


def cell(model="gpt3_350m", seeds=(0, 1), evaluations=50, **search):
    """A small cell; `search` are settings."""
    return Cell(
        model=model,
        cluster="v100x4_t4x4",
        method="random",
        search={"name": "random", **search},
        evaluations=evaluations,
        seeds=seeds,
        problem=preset("problem", "default"),
        space=preset("space", "default"),
    )


def rows_of(cell, **figures):
    """Rows as a run gives them, without a search."""
    facts = {"config_hash": cell.config_hash, "version": version(), "iteration_time_s": "1.5", **figures}
    return [{key: str({**facts, "seed": seed}.get(key, "")) for key in COLUMNS} for seed in cell.seeds]


def at_once(cell):
    """Without a search."""
    return rows_of(cell)


def dying(cell):
    """A worker that is killed in the middle: once by the cell that names a `marker`, always by one named `deadly`."""
    marker = cell.search.get("marker")
    if cell.search.get("deadly") or (marker and not Path(marker).exists()):
        if marker:
            Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return rows_of(cell) if marker else run_cell(cell)


def sleeping(cell):
    """A long search; tells its process in the file `marker`."""
    Path(cell.search["marker"]).write_text(str(os.getpid()))
    time.sleep(300)
    return rows_of(cell)
