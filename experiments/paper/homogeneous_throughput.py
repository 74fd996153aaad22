"""Table: throughput on clusters of one device type, AutoHAAP over each baseline."""

from __future__ import annotations

from experiments.grid import Cell, Grid
from experiments.paper import throughput
from experiments.paper.table import Experiment, Table, markdown, median_s, published, shown

KEY = "homogeneous_gain_pct"


def cells(experiment: Experiment) -> list[Cell]:
    return throughput.cells(experiment)


def table(experiment: Experiment, grid: Grid) -> Table:
    made = throughput.table(experiment, grid, "Throughput, one device type", KEY)
    return made._replace(markdown=f"{made.markdown}\n\n{beside_published(experiment, grid)}")


def beside_published(experiment: Experiment, grid: Grid) -> str:
    """Measured speedups of Alpa and Aceso over Megatron-LM on V100, and what the estimator makes of ours."""
    facts = published()["gpt3_on_v100"]
    lines = []
    for fact in facts["cells"]:
        pair = (fact["model"], fact["cluster"])
        if pair not in experiment.pairs:
            continue
        times = {
            name: median_s(grid.of(throughput.baseline(experiment, pair, name)[0]))
            for name in ("megatron", "alpa", "aceso")
        }
        times["autohaap"] = median_s(grid.of(throughput.autohaap(experiment, pair)))
        base = times["megatron"]

        def over(time_s: float | None, base: float | None = base) -> str:
            return shown(None if base is None or time_s is None else base / time_s, "", 2)

        lines.append(
            [*pair, f"{fact['alpa_over_megatron']:.2f}", over(times["alpa"]), f"{fact['aceso_over_megatron']:.2f}",
             over(times["aceso"]), over(times["autohaap"])]
        )  # fmt: skip
    header = ["model", "cluster", "Alpa, published", "Alpa-like, ours", "Aceso, published", "Aceso-like, ours",
              "AutoHAAP, ours"]  # fmt: skip
    return (
        f"Speedup over Megatron-LM, published (measured) beside ours (estimated). {facts['source']}.\n\n"
        f"{markdown(header, lines)}\n\n"
        "The two differ for reasons that can be named: theirs run on other code (Alpa on XLA, Aceso and Megatron-LM on "
        "PyTorch) and with Megatron-LM settings that are not published, ours all on the same estimated one; Aceso "
        "recomputes single operators, here a stage recomputes all layers or none; and their Megatron-LM grid is a "
        "person's, ours is complete, which leaves less to gain."
    )
