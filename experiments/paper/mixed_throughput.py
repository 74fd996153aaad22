"""Table: throughput on clusters of two to four device types, AutoHAAP over each baseline."""

from __future__ import annotations

from experiments.grid import Cell, Grid
from experiments.paper import throughput
from experiments.paper.table import Experiment, Table

KEY = "mixed_gain_pct"


def cells(experiment: Experiment) -> list[Cell]:
    return throughput.cells(experiment)


def table(experiment: Experiment, grid: Grid) -> Table:
    return throughput.table(experiment, grid, "Throughput, mixed device types", KEY)
