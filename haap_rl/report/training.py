"""Curves of a policy's training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw(points: Mapping[int, Sequence[Any]], path: Path) -> None:
    """Validation gaps of each seed against rounds (`training.trainer.Point`), as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for color, (seed, each) in enumerate(points.items()):
        rounds = range(1, len(each) + 1)
        axes.plot(rounds, [p.greedy_iqm_pct for p in each], color=f"C{color}", label=f"seed {seed}, most likely plans")
        axes.plot(rounds, [p.sampled_iqm_pct for p in each], "--", color=f"C{color}", label=f"seed {seed}, 96 plans")
    cloning = sum(point.phase == "cloning" for point in next(iter(points.values())))
    axes.axvline(cloning + 0.5, color="0.7", linewidth=1)
    axes.text(cloning + 0.6, axes.get_ylim()[1], "PPO", va="top", color="0.4", fontsize=9)
    axes.set_yscale("log")
    axes.set_xlabel("round of training")
    axes.set_ylabel("validation: gap to the teacher, % (IQM)", fontsize=9)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
