"""Does training converge while devices fail? A tiny LLaMA on simulated ranks, scenarios, several seeds, intervals.

    python -m experiments.mecefo out=results/mecefo     this, with the rest of experiments/mecefo

Grid of 8 replicas x 2 stages, 16 cells; the set of cells that are down is drawn anew every 50 steps, when projectors
are refreshed too. Cells down at any time: low 1, mid 2, high 4. The paper's Table 1 has on average 2, 3 and 4 of 32
(Little's law), so that `low` is its low (1/16 of the cells), `mid` its high (1/8), and `high` is twice that, for the
trend to be seen.

none                  nothing fails
low, mid, high        MeCeFO, all three techniques
drop_replica_*        the samples of a replica with a dead cell are lost, the others exact
skip_only_*           technique I alone: attention has no backward pass on takers
recompute_low_rank_*  techniques II and III alone
skip_ffn_*            the FFN's backward pass is left out instead of attention's, which the paper finds far worse

Perplexity is per character, of held-out text, after equally many steps. Seeds draw weights, samples and failures; runs
of one seed have the same, whatever the scenario, so a rise over `none` is of pairs. Intervals are Student's, 95 %.
Gradient error = ||MeCeFO's - failure-free|| / ||failure-free||, of the same weights and samples, every 10 steps.
A toy of two layers trained for some hundred steps: orders may hold elsewhere, sizes need not.
"""

from __future__ import annotations

import csv
import hashlib
import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.stored import stored
from haap_rl import mecefo
from haap_rl.mecefo.failures import Grid, redrawn
from haap_rl.mecefo.job import CharacterPretraining
from haap_rl.mecefo.options import MecefoOptions, Techniques
from haap_rl.mecefo.parallel import Policy
from haap_rl.mecefo.pretrain import pretrain
from haap_rl.report.intervals import interval
from haap_rl.tracking.record import write_files

Figures = dict[str, Any]
MECEFO = Techniques()


@dataclass(frozen=True, slots=True)
class Scenario:
    """What fails, and what is done about it."""

    cells_down: int = 0
    policy: Policy = "mecefo"
    techniques: Techniques = MECEFO
    low_rank: bool = True


@dataclass(frozen=True, slots=True)
class Size:
    """How large the experiment is."""

    seeds: int
    steps: int
    samples: int  # per rank and step
    length: int  # characters each
    scenarios: tuple[str, ...]


LEVELS = {"low": 1, "mid": 2, "high": 4}
SCENARIOS = {
    "none": Scenario(),
    **{level: Scenario(cells) for level, cells in LEVELS.items()},
    **{f"drop_replica_{level}": Scenario(cells, "drop_replica") for level, cells in LEVELS.items()},
    **{
        f"{name}_{level}": replace(scenario, cells_down=LEVELS[level])
        for name, scenario in {
            "skip_only": Scenario(techniques=Techniques("attention", False), low_rank=False),
            "recompute_low_rank": Scenario(techniques=Techniques("none")),
            "skip_ffn": Scenario(techniques=Techniques("ffn")),
        }.items()
        for level in ("mid", "high")
    },
}
GRID = Grid(ranks=8, stages=2)
TOY = MecefoOptions(rank=8)  # of 32 and 88: 64 would be more than there is
REDRAWN_STEPS, ERROR_STEPS, LEARNING_RATE = 50, 10, 3e-3
MARGIN = 1.015  # of perplexity, within which seeds differ
FULL = Size(seeds=5, steps=400, samples=4, length=64, scenarios=tuple(SCENARIOS))
QUICK = Size(seeds=3, steps=120, samples=2, length=48, scenarios=("none", *LEVELS, "drop_replica_mid"))


# ------------------------------------------------------------------------------------------ runs
@cache
def version() -> str:
    """Digest of the code that is tried: results of other code are not gone on from."""
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(Path(mecefo.__path__[0]).glob("*.py")):
        if path.name != "processes.py":  # nothing here runs it
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def options_of(scenario: Scenario) -> MecefoOptions:
    """MeCeFO's options in a scenario."""
    return TOY if scenario.low_rank else replace(TOY, low_rank=())


def train(name: str, seed: int, size: Size) -> Figures:
    """Figures of one run: perplexity, gradient errors as (step, norm ratio), seconds."""
    began, scenario = time.perf_counter(), SCENARIOS[name]
    job = CharacterPretraining(seed, size.steps, size.samples, size.length, LEARNING_RATE)
    rng = np.random.default_rng(seed)
    schedule = redrawn(GRID, scenario.cells_down, REDRAWN_STEPS, size.steps, rng)
    found = pretrain(
        job,
        GRID,
        schedule,
        options_of(scenario),
        scenario.techniques,
        scenario.policy,
        ERROR_STEPS if scenario.cells_down else 0,
    )
    return {"perplexity": found.perplexity, "errors": found.errors, "seconds": time.perf_counter() - began}


def runs_of(out: Path, size: Size) -> dict[str, list[Figures]]:
    """{scenario: figures of each seed}; runs that have a file are not run again."""
    folder = out / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # or sums would depend on the machine's cores
    found: dict[str, list[Figures]] = {name: [] for name in size.scenarios}
    for seed in range(size.seeds):
        for name in size.scenarios:
            settings = {
                "scenario": asdict(SCENARIOS[name]),
                "seed": seed,
                "size": {key: getattr(size, key) for key in ("steps", "samples", "length")},
                "version": version(),
            }
            path = folder / f"convergence-{name}-{size.steps}-{seed}.json"
            found[name].append(stored(path, settings, partial(train, name, seed, size)))
        print(f"convergence: seed {seed + 1} of {size.seeds}", flush=True)
    return found


# ------------------------------------------------------------------------------------------ figures
def summarise(runs: Mapping[str, Sequence[Figures]], size: Size) -> Figures:
    """The keys of summary.json that are of convergence."""
    perplexity = {name: [run["perplexity"] for run in each] for name, each in runs.items()}
    within = {name: interval(sample) for name, sample in perplexity.items()}
    base = perplexity["none"]
    rise = {
        name: interval([100 * (x / y - 1) for x, y in zip(sample, base, strict=True)])
        for name, sample in perplexity.items()
        if name != "none"
    }
    pairs = [(level, f"drop_replica_{level}") for level in LEVELS]
    pairs += [(f"skip_ffn_{level}", f"skip_only_{level}") for level in LEVELS]
    against = {
        f"{name} over {other}": interval(
            [100 * (x / y - 1) for x, y in zip(perplexity[name], perplexity[other], strict=True)]
        )
        for name, other in pairs
        if name in perplexity and other in perplexity
    }
    errors = {name: [[error for _, error in run["errors"]] for run in each] for name, each in runs.items()}
    return {
        "perplexity": {name: figures[0] for name, figures in within.items()},
        "perplexity_interval_95": {name: figures[1:] for name, figures in within.items()},
        "rise_pct": {name: figures[0] for name, figures in rise.items()},
        "rise_interval_95_pct": {name: figures[1:] for name, figures in rise.items()},
        "monotone_within_margin": all(
            within[less][0] <= MARGIN * within[more][0] for less, more in zip(("none", *LEVELS), LEVELS, strict=False)
        ),
        "difference_pct": {pair: figures[0] for pair, figures in against.items()},
        "difference_interval_95_pct": {pair: figures[1:] for pair, figures in against.items()},
        "no_worse_than_drop_replica": {
            level: against[pair][1] <= 0
            for level in LEVELS
            if (pair := f"{level} over drop_replica_{level}") in against
        },
        "gradient_error_mean": {name: float(np.mean(each)) for name, each in errors.items() if name != "none"},
        "gradient_error_max": {name: float(np.max(each)) for name, each in errors.items() if name != "none"},
        "assumptions": {
            "options": asdict(TOY),
            "grid": {"ranks": GRID.ranks, "stages": GRID.stages},
            "cells_down": {name: SCENARIOS[name].cells_down for name in runs},
            "redrawn_steps": REDRAWN_STEPS,
            "model": asdict(CharacterPretraining().shape),
            "learning_rate": LEARNING_RATE,
            "seeds": size.seeds,
            **{key: getattr(size, key) for key in ("steps", "samples", "length")},
        },
    }


def table(summary: Figures) -> str:
    """The figures as Markdown."""
    used = summary["assumptions"]
    lines = [
        "## Convergence",
        "",
        f"Perplexity per character of held-out text after {used['steps']} steps, mean of {used['seeds']} seeds with "
        "its 95 % interval; the rise is over the same seed without failures.",
        "",
        "| scenario | cells down of 16 | perplexity | rise, % | gradient error, mean | largest |",
        "|---|---|---|---|---|---|",
    ]
    for name, mean in summary["perplexity"].items():
        low, high = summary["perplexity_interval_95"][name]
        cells = [name, str(used["cells_down"][name]), f"{mean:.4f} ({low:.4f} to {high:.4f})"]
        if name == "none":
            cells += ["-"] * 3
        else:
            low, high = summary["rise_interval_95_pct"][name]
            cells.append(f"{summary['rise_pct'][name]:.1f} ({low:.1f} to {high:.1f})")
            cells += [f"{summary[f'gradient_error_{what}'][name]:.3f}" for what in ("mean", "max")]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Differences in perplexity, of the same seeds and failures:", ""]
    lines += ["| scenario | difference, % | the first is |", "|---|---|---|"]
    for pair, mean in summary["difference_pct"].items():
        low, high = summary["difference_interval_95_pct"][pair]
        verdict = "worse" if low > 0 else "better" if high < 0 else "not told apart"
        lines.append(f"| {pair} | {mean:.1f} ({low:.1f} to {high:.1f}) | {verdict} |")
    options = ", ".join(f"{key} {value}" for key, value in used["options"].items())
    lines += [
        "",
        f"Options: {options}.",
        "The paper's rises, 1.6 to 2.2 % at its high, are of other models and data, and of tens of thousands of steps.",
    ]
    return "\n".join(lines) + "\n"


def csv_texts(runs: Mapping[str, Sequence[Figures]]) -> dict[str, str]:
    """convergence.csv, a row per scenario and seed; gradient_errors.csv, a row per step looked at."""
    runs_text, errors_text = io.StringIO(), io.StringIO()
    writer = csv.writer(runs_text, lineterminator="\n")
    writer.writerow(["scenario", "seed", "perplexity", "gradient_error_mean", "gradient_error_max", "seconds"])
    each_error = csv.writer(errors_text, lineterminator="\n")
    each_error.writerow(["scenario", "seed", "step", "gradient_error"])
    for name, here in runs.items():
        for seed, run in enumerate(here):
            errors = [error for _, error in run["errors"]]
            facts = [repr(float(np.mean(errors))), repr(max(errors))] if errors else ["", ""]
            writer.writerow([name, seed, repr(run["perplexity"]), *facts, f"{run['seconds']:.3f}"])
            each_error.writerows([name, seed, step, repr(error)] for step, error in run["errors"])
    return {"convergence.csv": runs_text.getvalue(), "gradient_errors.csv": errors_text.getvalue()}


# ------------------------------------------------------------------------------------------ pictures
def draw(summary: Figures, runs: Mapping[str, Sequence[Figures]]) -> dict[str, bytes]:
    """perplexity.png, a bar per scenario; gradient_error.png, error over training."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    def png(figure: Figure) -> bytes:
        content = io.BytesIO()
        figure.savefig(content, dpi=110, format="png")
        return content.getvalue()

    figure = Figure(figsize=(8.0, 0.6 + 0.32 * len(runs)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    names = list(runs)
    kinds = {"none": "C7", "drop": "C1", "skip": "C2", "reco": "C2"}
    for row, name in enumerate(names):
        mean, (low, high) = summary["perplexity"][name], summary["perplexity_interval_95"][name]
        color = kinds.get(name[:4], "C0")
        axes.errorbar(mean, row, xerr=[[mean - low], [high - mean]], fmt="o", color=color, capsize=3)
        axes.plot([run["perplexity"] for run in runs[name]], [row] * len(runs[name]), "|", color=color, alpha=0.6)
    axes.axvline(summary["perplexity"]["none"], color="C7", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(names)), [f"{name} ({summary['assumptions']['cells_down'][name]})" for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("held-out perplexity per character: mean, 95 % interval, seeds (cells down of 16)")
    axes.spines[["top", "right"]].set_visible(False)
    pictures = {"perplexity.png": png(figure)}

    figure = Figure(figsize=(7.0, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for level in (level for level in LEVELS if level in runs):
        steps = [step for step, _ in runs[level][0]["errors"]]
        errors = np.array([[error for _, error in run["errors"]] for run in runs[level]])
        label = f"{level}: {LEVELS[level]} of 16 cells down"
        (line,) = axes.plot(steps, errors.mean(0), label=label)
        axes.fill_between(steps, errors.min(0), errors.max(0), color=line.get_color(), alpha=0.15, linewidth=0)
    axes.axhline(0.6, color="C7", linewidth=0.8, linestyle=":", label="0.6, below which the paper's runs stayed")
    axes.set_xlabel("step")
    axes.set_ylabel("relative gradient error (norm ratio)\nmean and range of seeds")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return pictures | {"gradient_error.png": png(figure)}


def run(out: Path, quick: bool) -> tuple[Figures, str]:
    """Run what is missing and write CSV files and pictures; keys of summary.json, and Markdown."""
    size = QUICK if quick else FULL
    runs = runs_of(out, size)
    summary = summarise(runs, size)
    write_files(out, {name: text.encode() for name, text in csv_texts(runs).items()} | draw(summary, runs))
    return summary, table(summary)
