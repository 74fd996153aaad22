"""What every table is made of: an experiment of `conf/experiment/`, its cells, and the rows that a grid gave them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from experiments.grid import Cell, Grid, Rows
from haap_rl.problem.errors import InputError, check_keys
from haap_rl.problem.formats.files import read_yaml_mapping
from haap_rl.problem.presets import preset

Pair = tuple[str, str]  # model, cluster
EVERYTHING = 10**9  # evaluations of a search that ends by itself
PROOF_STEPS = 100_000_000  # of the exact search in full mode; a tenth of it in quick mode


@dataclass(frozen=True, slots=True)
class Experiment:
    """One of conf/experiment/: which problems, how many evaluations, which seeds; never which search.

    problem, space   as in conf/problem and conf/space, complete
    few              evaluations where a plan is dear to price; 0: no such cells
    """

    name: str
    pairs: tuple[Pair, ...]
    problem: Mapping[str, Any]
    space: Mapping[str, Any]
    evaluations: int
    seeds: tuple[int, ...]
    few: int
    quick: bool

    def cell(
        self,
        pair: Pair,
        method: str,
        search: str,
        settings: Mapping[str, Any] | None = None,
        evaluations: int | None = None,
        seeds: Sequence[int] | None = None,
        space: Mapping[str, Any] | None = None,
        cached: bool = True,
    ) -> Cell:
        """A cell of this experiment: `search` of conf/search with `settings` over its own."""
        return Cell(
            model=pair[0],
            cluster=pair[1],
            method=method,
            search={**preset("search", search), **(settings or {})},
            evaluations=self.evaluations if evaluations is None else evaluations,
            seeds=self.seeds if seeds is None else tuple(seeds),
            problem=self.problem,
            space={**self.space, **(space or {})},
            cached=cached,
        )

    def exact(self, pair: Pair) -> Cell:
        """The proof beside a problem's plans: an optimum, or a bound where the steps did not do."""
        nodes = PROOF_STEPS // 10 if self.quick else PROOF_STEPS
        return self.cell(pair, "exact", "exact", {"nodes": nodes}, evaluations=EVERYTHING, seeds=[0])


def load(name: str, quick: bool = False) -> Experiment:
    """The experiment `name` of conf/experiment, in its quick form if asked for."""
    config = preset("experiment", name)
    where = f"experiment {name!r}"
    settings = config["experiment"]
    check_keys(where, settings, ("cells", "seeds", "quick"), ("few",))
    chosen = {**settings, "evaluations": config["budget"]["evaluations"], **(settings["quick"] if quick else {})}
    return Experiment(
        name=name,
        pairs=tuple((model, cluster) for model, cluster in chosen["cells"]),
        problem={**preset("problem", "default"), **config.get("problem", {})},
        space={**preset("space", "default"), **config.get("space", {})},
        evaluations=int(chosen["evaluations"]),
        seeds=tuple(chosen["seeds"]),
        few=int(chosen.get("few", 0)),
        quick=quick,
    )


@cache
def published() -> dict[str, Any]:
    """What is published: `paper_values.yaml`."""
    return dict(read_yaml_mapping(Path(__file__).with_name("paper_values.yaml"), "paper values"))


class Table(NamedTuple):
    """A finished table.

    columns, rows   for its CSV, deterministic but for columns named in `experiments.grid.TIMES` or ending in `seconds`
    summary         its keys of `summary.json`
    draw            writes its picture, where it has one
    """

    title: str
    markdown: str
    columns: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]
    draw: Callable[[Path], None] | None = None


# ------------------------------------------------------------------------------------- figures of rows
def times_s(rows: Rows) -> list[float]:
    """Iteration seconds of the seeds that found a plan."""
    return [float(row["iteration_time_s"]) for row in rows if row["iteration_time_s"]]


def median_s(rows: Rows) -> float | None:
    """Median over all seeds, one without a plan counting as worst; None where that is the median."""
    found = sorted(times_s(rows))
    middle = (len(rows) - 1) // 2  # of an even number the better one, which is a plan that exists
    return found[middle] if rows and middle < len(found) else None


def bound_s(grid: Grid, experiment: Experiment, pair: Pair) -> float:
    """Seconds that no plan of the space can beat, as the exact search proved. Raises InputError without its rows."""
    rows = grid.of(experiment.exact(pair))
    if not rows or not rows[0]["lower_bound_s"]:
        raise InputError(f"{experiment.name}: {pair[0]} on {pair[1]}: {grid.reason(experiment.exact(pair))}")
    return float(rows[0]["lower_bound_s"])


def tokens_per_s(experiment: Experiment, iteration_s: float) -> float:
    """Throughput of an iteration."""
    return float(experiment.problem["global_batch_size"] * experiment.problem["seq_len"] / iteration_s)


def trace(row: Mapping[str, str]) -> list[tuple[int, float, float]]:
    """(evaluations, best seconds so far, seconds of search) whenever the best improved."""
    points = (point.split(":") for point in row["trace"].split())
    clock = row["trace_seconds"].split()
    return [(int(n), float(best), float(at)) for (n, best), at in zip(points, clock, strict=True)]


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """{min, median, max}; None of nothing."""
    found = list(values)
    if not found:
        return None
    return {"min": min(found), "median": statistics.median(found), "max": max(found)}


def shown(value: float | None, unit: str = "", digits: int = 1, sign: bool = False) -> str:
    """A figure of a table; a dash where there is none."""
    if value is None:
        return "-"
    return f"{round(value, digits) + 0.0:{'+' if sign else ''},.{digits}f}{unit}"  # + 0.0: no "-0.0"


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
