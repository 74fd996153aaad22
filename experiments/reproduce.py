"""The paper's tables in one command.

    python -m experiments.reproduce                     everything; one night on two cores
    python -m experiments.reproduce quick=true          everything with few evaluations and seeds, some minutes
    python -m experiments.reproduce table=mixed_throughput
    python -m experiments.reproduce runner=ray runner.address=auto     on a Ray cluster (docs/scale_out.md)

Every cell that is finished is kept as DIR/cells/*.csv, so the same command goes on where it stopped and runs only what
is missing; cells of other settings or other code are run anew. From them are made: a CSV, a Markdown table and, where
there is one, a picture of each table, results.md with all of them, and summary.json.

docs=DIR: results.md and the pictures also go there, and into the README beside it the headline table.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from experiments.grid import csv_text, run_grid, runner_of, version
from experiments.paper import equal_budgets, homogeneous_throughput, ideas, mixed_throughput, search_efficiency
from experiments.paper.table import Experiment, Table, load, published
from haap_rl import configs
from haap_rl.problem.errors import InputError, yes_or_no
from haap_rl.tracking.record import to_json_text, write_files

TABLES: dict[str, ModuleType] = {
    "homogeneous_throughput": homogeneous_throughput,
    "mixed_throughput": mixed_throughput,
    "search_efficiency": search_efficiency,
    "ideas": ideas,
    "equal_budgets": equal_budgets,
}
ALL = "all"
OPTIONS = {
    "table": ALL,
    "quick": False,
    "out": "results",
    "docs": "none",
    "runner": "processes",
    "runner.processes": 2,
    "runner.address": "auto",
}
BEGIN, END = "<!-- made by experiments.reproduce: begin -->", "<!-- made by experiments.reproduce: end -->"


def reproduce(options: Mapping[str, Any]) -> int:
    """Run what is missing and write the tables; the exit status."""
    names = list(TABLES) if options["table"] == ALL else [str(name).strip() for name in _listed(options["table"])]
    for name in names:
        if name not in TABLES:
            raise InputError(f"table={name!r} is not known; choose {ALL} or of {', '.join(TABLES)}")
    quick, out = yes_or_no("reproduce", "quick", options["quick"]), Path(str(options["out"]))
    runner = runner_of(options["runner"], options["runner.processes"], options["runner.address"])
    experiments = {name: load(name, quick) for name in names}
    cells = [cell for name, experiment in experiments.items() for cell in TABLES[name].cells(experiment)]
    folder = out / "cells"
    try:
        grid = run_grid(cells, folder, runner, lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        kept = len(list(folder.glob("*.csv")))
        print(f"interrupted; cells kept in {folder}: {kept}; the same command goes on from them")
        return 130
    tables = {name: TABLES[name].table(experiment, grid) for name, experiment in experiments.items()}
    text = results_text(tables, experiments, quick)
    figures = summary(tables, quick)
    files = {"results.md": text, "summary.json": to_json_text(figures)}
    for name, table in tables.items():
        files[f"{name}.md"] = f"{table.markdown}\n"
        files[f"{name}.csv"] = csv_text([{key: row[key] for key in table.columns} for row in table.rows], table.columns)
    write_files(out, {name: content.encode() for name, content in files.items()})
    for name, table in tables.items():
        if table.draw is not None:
            table.draw(out / f"{name}.png")
    if options["docs"] not in ("none", None):
        publish(out, Path(str(options["docs"])), tables, figures)
    print(text)
    print(f"written: {out}")
    return 0


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else str(value).split(",")


def summary(tables: Mapping[str, Table], quick: bool) -> dict[str, Any]:
    """The headline figures, and under each table's name its own."""
    throughput = [tables[name].summary for name in ("homogeneous_throughput", "mixed_throughput") if name in tables]
    head: dict[str, Any] = {"quick": quick, "version": version()}
    for name, key in (
        ("homogeneous_throughput", homogeneous_throughput.KEY),
        ("mixed_throughput", mixed_throughput.KEY),
        ("search_efficiency", search_efficiency.KEY),
    ):
        if name in tables:
            head[key] = tables[name].summary[key]
    if throughput:
        gaps = [
            float(row["gap_to_bound_pct"])
            for name in ("homogeneous_throughput", "mixed_throughput")
            if name in tables
            for row in tables[name].rows
            if row["method"] == "autohaap" and row["gap_to_bound_pct"]
        ]
        head["cells"] = sum(each["cells"] for each in throughput)
        head["cells_where_a_baseline_wins"] = sum(len(each["cells_where_a_baseline_wins"]) for each in throughput)
        head["gap_to_bound_pct"] = {"median": statistics.median(gaps), "max": max(gaps)} if gaps else None
    return {**head, "tables": {name: table.summary for name, table in tables.items()}}


def results_text(tables: Mapping[str, Table], experiments: Mapping[str, Experiment], quick: bool) -> str:
    """All tables as one page."""
    command = "python -m experiments.reproduce" + (" quick=true" if quick else "")
    parts = [
        "# The paper's tables",
        f"Made by `{command}` (version {version()}); not edited by hand. All seconds and tokens/s are our estimator's "
        "([accuracy.md](accuracy.md)); what is published is named as such, with its source "
        "(`experiments/paper/paper_values.yaml`). AutoHAAP's own clusters and baselines are not public, so the "
        "comparison is reproduced, not the digits.",
    ]
    for name, table in tables.items():
        experiment = experiments[name]
        parts.append(f"## {table.title}")
        parts.append(
            f"`conf/experiment/{name}.yaml`: {experiment.evaluations:,} evaluations, seeds "
            f"{', '.join(map(str, experiment.seeds))}. One cell: `python -m haap_rl.train +experiment={name} "
            "+search=autohaap model=NAME cluster=NAME`."
        )
        parts.append(table.markdown)
        if table.draw is not None:
            parts.append(f"![{table.title}]({name}.png)")
    return "\n\n".join(parts) + "\n"


def headline(found: Mapping[str, Any]) -> str:
    """The README's table from the figures of `summary`: our ranges beside the abstract's."""
    paper = published()["autohaap"]
    gap, efficiency = found["gap_to_bound_pct"], found[search_efficiency.KEY]
    every = [row[end] for row in efficiency.values() if row for end in ("min", "max")]
    lines = ["| AutoHAAP against the baselines | here, estimated | its abstract |", "|---|---|---|"]
    for title, key in (("one device type", homogeneous_throughput.KEY), ("mixed device types", mixed_throughput.KEY)):
        ours, (low, high) = found[key], paper[key]
        lines.append(
            f"| throughput, {title} | {ours['min']:+,.1f} to {ours['max']:+,.1f} % (median {ours['median']:+,.1f} %) | "
            f"+{low} to +{high} % |"
        )
    low, high = paper[search_efficiency.KEY]
    lines += [
        f"| search cost | {min(every):.2g} to {max(every):,.0f} x | {low} to {high} x |",
        f"| gap to the proven bound | median {gap['median']:.2f} %, at most {gap['max']:.2f} % | - |",
    ]
    return "\n".join(lines)


def publish(out: Path, docs: Path, tables: Mapping[str, Table], figures: Mapping[str, Any]) -> None:
    """Copy the page and its pictures to `docs`, and put the headline table into the README beside it.

    Raises InputError where tables are missing or the README has no place for it; nothing is written then.
    """
    missing = [name for name in TABLES if name not in tables]
    if missing:
        raise InputError(f"docs={str(docs)!r}: the page needs every table, {missing[0]} is missing; use table={ALL}")
    readme = docs.parent / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InputError(
            f"{str(readme)!r}: the lines {BEGIN!r} and {END!r} are not in it; put them where the table goes"
        )
    files = {f"{name}.png": (out / f"{name}.png").read_bytes() for name, table in tables.items() if table.draw}
    write_files(docs, {"results.md": (out / "results.md").read_bytes(), **files})
    write_files(readme.parent, {readme.name: f"{before}{BEGIN}\n{headline(figures)}\n{END}{after}".encode()})


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    return configs.run_with_options(reproduce, dict(OPTIONS), sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
