"""Grids of searches: every cell is a file of its own, and cells run in processes here or on a Ray cluster.

    rows = run_grid(cells, Path("results/cells"), processes(2))

A cell is a search on a problem for some seeds, described by plain data; its file, one CSV row per seed, is written when
all of its seeds are done and never half. So an interrupted grid runs only what is missing, and which runner it had, how
many workers, or whether one of them died does not show in the files, time columns aside.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import os
import signal
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from haap_rl.cost.estimator import fingerprint
from haap_rl.problem.errors import InputError, positive_int
from haap_rl.problem.presets import load_problem
from haap_rl.runtime.orphans import end_with_parent
from haap_rl.search.base import Budget, load_searcher, run_search
from haap_rl.space.options import SpaceSpec
from haap_rl.tracking.record import write_files

ROOT = Path(__file__).resolve().parents[1]
MOST_PROCESSES = 256  # of one machine
ATTEMPTS = 3  # workers that a cell may cost before it is given up
TIMES = ("seconds", "trace_seconds")  # the only columns in which two runs of one grid differ
Row = dict[str, str]
Rows = list[Row]


@dataclass(frozen=True, slots=True)
class Cell:
    """One search on one problem, for some seeds: all that its figures depend on.

    method      what tables call it
    search      `name` and hyper-parameters, as in conf/search
    problem, space   as in conf/problem and conf/space, complete
    cached      the estimator's memo (`estimator.cached`)
    """

    model: str
    cluster: str
    method: str
    search: Mapping[str, Any]
    evaluations: int
    seeds: tuple[int, ...]
    problem: Mapping[str, Any]
    space: Mapping[str, Any]
    cached: bool = True

    @property
    def config_hash(self) -> str:
        """Twelve hexadecimal digits of everything above."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def file_name(self) -> str:
        words = "".join(c if c.isalnum() else "_" for c in self.method)
        return f"{self.model}-{self.cluster}-{words}-{self.config_hash}.csv"

    def __str__(self) -> str:
        return f"{self.method}, {self.model} on {self.cluster}"


@cache
def version() -> str:
    """Version of the package and of its code: results of other code are not gone on from."""
    digest = hashlib.sha256(fingerprint().encode())
    for room in ("problem", "cost", "space", "search"):
        for path in sorted((ROOT / "haap_rl" / room).rglob("*.py")):
            digest.update(path.read_bytes())
    return f"{metadata.version('haap_rl')}+{digest.hexdigest()[:12]}"


def run_cell(cell: Cell) -> Rows:
    """Run a cell; a row for each seed. A problem that cannot be planned so has rows that say why."""
    problem = load_problem(cell.model, cell.cluster, **cell.problem)
    spec = SpaceSpec.from_config(dict(cell.space))
    rows = []
    for seed in cell.seeds:
        figures: dict[str, Any] = {}
        try:
            settings = dict(cell.search)
            searcher = load_searcher(settings.pop("name"), settings)
            result = run_search(searcher, problem, Budget(cell.evaluations), seed, spec, cached=cell.cached)
        except InputError as error:
            figures = {"reason": str(error)}
        else:
            best, points = result.estimate, [p for p in result.trace if p.best_iteration_time_s is not None]
            figures = {
                "iteration_time_s": "" if best is None else repr(best.iteration_s),
                "tokens_per_s": "" if best is None else repr(best.tokens_per_s),
                "lower_bound_s": repr(result.lower_bound_s),
                "proven_optimal": result.proven_optimal,
                "evaluations": result.evaluations,
                "operator_evaluations": result.operator_evaluations,
                "operator_evaluations_avoided": result.operator_evaluations_avoided,
                "pruning_factor": "" if result.pruning.factor is None else repr(result.pruning.factor),
                "stopped_by": result.stopped_by,
                "reason": result.reason,
                "notes": " | ".join(result.notes),
                "trace": " ".join(f"{p.evaluations}:{p.best_iteration_time_s!r}" for p in points),
                "seconds": f"{result.wall_time_s:.6f}",
                "trace_seconds": " ".join(f"{p.seconds:.6f}" for p in points),
            }
        facts = {"model": cell.model, "cluster": cell.cluster, "method": cell.method, "seed": seed}
        facts |= {"budget": cell.evaluations, "config_hash": cell.config_hash, "version": version()}
        rows.append({key: str({**facts, **figures}.get(key, "")) for key in COLUMNS})
    return rows


COLUMNS = (
    "model", "cluster", "method", "seed", "budget", "config_hash", "version", "iteration_time_s", "tokens_per_s",
    "lower_bound_s", "proven_optimal", "evaluations", "operator_evaluations", "operator_evaluations_avoided",
    "pruning_factor", "stopped_by", "reason", "notes", "trace", *TIMES,
)  # fmt: skip


# ----------------------------------------------------------------------------------------------- files
def csv_text(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = COLUMNS) -> str:
    """Rows as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def stored_rows(cell: Cell, folder: Path) -> Rows | None:
    """The rows of a cell that was run; None where its file is missing, broken, or of other settings or code."""
    try:
        with (folder / cell.file_name).open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error):
        return None
    right = [str(seed) for seed in cell.seeds] == [row.get("seed") for row in rows] and all(
        tuple(row) == COLUMNS and row["config_hash"] == cell.config_hash and row["version"] == version() for row in rows
    )
    return rows if right else None


# --------------------------------------------------------------------------------------------- runners
@dataclass
class Lost:
    """Why a cell has no rows."""

    reason: str


Run = Callable[[Cell], Rows]
Runner = Callable[[Run, Sequence[Cell]], Iterator[tuple[Cell, Rows | Lost]]]  # cells as they are done, in any order


def processes(number: int) -> Runner:
    """A runner of so many processes of this machine; one that dies is replaced, and what was running is run again.

    Which cell killed it is not known, so those that were running then are run again one by one.
    """

    def run_all(run: Run, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Rows | Lost]]:
        waiting, suspects, deaths = list(cells), list[Cell](), Counter[str]()
        while waiting or suspects:
            alone = bool(suspects)
            queue, most = ([suspects.pop()], 1) if alone else (waiting, min(number, len(waiting)))
            pool = _pool(most)
            running: dict[Future[Rows], Cell] = {}
            try:
                while queue or running:
                    while queue and len(running) < most:
                        running[pool.submit(run, queue[0])] = queue[0]
                        del queue[0]
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        rows = future.result()
                        yield running.pop(future), rows
            except BrokenProcessPool:
                for cell in [*running.values(), *(queue if alone else ())]:
                    deaths[cell.config_hash] += 1
                    if deaths[cell.config_hash] < ATTEMPTS:
                        suspects.append(cell)
                    else:
                        yield cell, Lost(f"its worker died {ATTEMPTS} times")
                running.clear()
            finally:
                if running:  # interrupted: what is half done need not be finished
                    for process in list(pool._processes or {}):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(process, signal.SIGTERM)
                pool.shutdown(cancel_futures=True)

    return run_all


def _pool(number: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(number, get_context("spawn"), end_with_parent)


def ray(address: str, workers: int | None = None) -> Runner:
    """A runner on a Ray cluster: `auto` for the one this machine belongs to, `local` to start one, or its address.

    workers: CPUs of a cluster that is started. The checkout must lie at the same path on every node. Raises
    InputError where Ray is not installed or there is no such cluster.
    """

    def run_all(run: Run, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Rows | Lost]]:
        try:
            import ray as library
        except ImportError:
            raise InputError("runner=ray: Ray is not installed; pip install 'haap_rl[ray]'") from None
        path = os.pathsep.join([str(ROOT), str(ROOT / "envs")])
        settings: dict[str, Any] = {"log_to_driver": False, "runtime_env": {"env_vars": {"PYTHONPATH": path}}}
        if address == "local":
            settings |= {"num_cpus": workers, "include_dashboard": False, "object_store_memory": 80 * 2**20}
        else:
            settings["address"] = address
        try:
            _check_reachable(address)
            library.init(**settings)
        except (OSError, ValueError, RuntimeError) as error:
            raise InputError(
                f"runner.address={address}: there is no such Ray cluster ({type(error).__name__}); start one with "
                "`ray start --head`, or use runner.address=local"
            ) from None
        try:
            task = library.remote(num_cpus=1, max_retries=ATTEMPTS - 1)(run)
            running = {task.remote(cell): cell for cell in cells}
            while running:
                (done,), _ = library.wait(list(running), num_returns=1)
                cell = running.pop(done)
                try:
                    yield cell, library.get(done)
                except library.exceptions.WorkerCrashedError:
                    yield cell, Lost(f"its worker died {ATTEMPTS} times")
        finally:
            library.shutdown()

    return run_all


def _check_reachable(address: str) -> None:
    """Raise OSError or ValueError if nobody listens at HOST:PORT, where Ray itself would try for minutes."""
    if address not in ("auto", "local"):
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=5).close()


# ------------------------------------------------------------------------------------------------ grid
@dataclass
class Grid:
    """What a grid gave: the rows of every cell, and why some have none."""

    rows: dict[str, Rows] = field(default_factory=dict)  # by the cell's hash
    lost: dict[str, str] = field(default_factory=dict)

    def of(self, cell: Cell) -> Rows:
        """Rows of a cell, one for each seed; none where it was lost."""
        return self.rows.get(cell.config_hash, [])

    def reason(self, cell: Cell) -> str:
        """Why a cell has no plan; empty where it has."""
        rows = self.of(cell)
        if not rows:
            return self.lost.get(cell.config_hash, "not run")
        return "" if any(row["iteration_time_s"] for row in rows) else rows[0]["reason"]


def run_grid(
    cells: Sequence[Cell],
    folder: Path,
    runner: Runner,
    told: Callable[[str], None] = lambda line: None,
    run: Run = run_cell,
) -> Grid:
    """Run what is missing of `cells` and keep it in `folder`; told: is handed a line whenever a cell is done."""
    found, missing = Grid(), list[Cell]()
    for cell in {cell.config_hash: cell for cell in cells}.values():
        rows = stored_rows(cell, folder)
        if rows is None:
            missing.append(cell)
        else:
            found.rows[cell.config_hash] = rows
    total, clock = len(found.rows) + len(missing), Clock(missing)
    if found.rows:
        told(f"{len(found.rows)} of {total} cells were there")
    for number, (cell, result) in enumerate(runner(run, missing) if missing else (), 1):
        if isinstance(result, Lost):
            found.lost[cell.config_hash] = result.reason
        else:
            write_files(folder, {cell.file_name: csv_text(result).encode()})
            found.rows[cell.config_hash] = result
        clock.done(cell, result)
        told(f"{total - len(missing) + number} of {total}: {cell}: {_outcome(result)}; {_time_left(clock.left_s())}")
    return found


class Clock:
    """How long a grid will take: a cell takes as long as the others of its search did, or as all did on average."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._started = time.perf_counter()
        self._left = {cell.config_hash: str(cell.search.get("name")) for cell in cells}
        self._spent: dict[str, list[float]] = {}

    def done(self, cell: Cell, result: Rows | Lost) -> None:
        seconds = [] if isinstance(result, Lost) else [float(row["seconds"] or 0.0) for row in result]
        self._spent.setdefault(self._left.pop(cell.config_hash), []).append(sum(seconds))

    def left_s(self) -> float:
        """Seconds, at the pace so far."""
        every = [seconds for cells in self._spent.values() for seconds in cells]
        left = sum(statistics.fmean(self._spent.get(name, every)) for name in self._left.values())
        return (time.perf_counter() - self._started) * left / max(1e-9, sum(every))


def _outcome(result: Rows | Lost) -> str:
    if isinstance(result, Lost):
        return result.reason
    times = [float(row["iteration_time_s"]) for row in result if row["iteration_time_s"]]
    return f"{min(times):.4f} s" if times else f"no plan ({result[0]['reason']})"


def _time_left(seconds: float) -> str:
    return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"


def runner_of(name: object, number: object, address: object) -> Runner:
    """The runner that `runner=`, `runner.processes=` and `runner.address=` describe. Raises InputError."""
    count = positive_int("runner", "processes", number)
    if count > MOST_PROCESSES:
        raise InputError(f"runner: processes={count} must be at most {MOST_PROCESSES}; give fewer, or runner=ray")
    if name == "processes":
        return processes(count)
    if name == "ray":
        return ray(str(address), count)
    raise InputError(f"runner={name!r} is not known; choose processes or ray")
