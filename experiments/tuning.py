"""Settings of every searcher, chosen with the same effort on the same training instances by random search.

    python -m experiments.tuning out=results/tuning                     some eight minutes on one core
    python -m experiments.tuning out=/tmp/try trials=2 instances=2        half a minute, to see that it works

Instances are drawn from the split `train` of conf/instances, more than EASY devices each; nothing of a test split is
looked at. Per searcher the first trial is conf/search/, the others are drawn from SPACES. A trial is one run to the
largest of BUDGETS (or what `search_quality.MOST` leaves a slow searcher) per instance and seed; what it had found at
each budget is read off its trace. Gap = iteration time / best one known of the instance among all runs - 1.

    score = geometric mean, over the budgets, of the interquartile mean of the gap over instances and seeds

so that halving the gap at a large budget is worth as much as halving it at a small one. Interquartile means below FLOOR
count as FLOOR, a run without a plan as NO_PLAN. The best trial is then held against the first one on as many other
instances with more seeds, the check: only if it is better there too is it `chosen`. Seeds are 1000 and up, which are
not reported.

Each run is one file under out/runs/, so an interrupted tuning goes on where it stopped. Written at the end: trials.csv
(a row per trial and draw of instances), table.md, best.json.
"""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import search_quality, suite
from experiments.stored import stored
from haap_rl import configs
from haap_rl.cost.estimator import fingerprint
from haap_rl.problem.errors import InputError, positive_int
from haap_rl.problem.instances import Instance, draw_pool, load_instances
from haap_rl.problem.plan import Problem
from haap_rl.problem.presets import preset
from haap_rl.search.base import Budget, load_searcher, run_search
from haap_rl.space.bound import lower_bound
from haap_rl.tracking.record import to_json_text, write_files

BUDGETS = (1000, 10_000)
FIRST_SEED = 1000
EASY = 8  # devices: random search solves most instances of so few
FLOOR, NO_PLAN = 0.1, 1000.0  # %
CHECK_SEEDS = 3  # of the check for each seed of the tuning
SPACES: dict[str, dict[str, tuple[Any, ...]]] = {
    "ga": {
        "population": (20, 30, 60, 100, 150),
        "crossover": (0.2, 0.5, 0.8),
        "mutations": (0.7, 1.0, 1.5, 2.5, 4.0),
        "tournament": (2, 3, 5),
        "relief": (0.0, 0.2, 0.35, 0.5, 0.65, 0.8),
        "regular": (0.0, 0.25, 0.5, 0.75),
        "patience": (5, 10, 20, 40),
    },
    "annealing": {
        "start": (0.005, 0.01, 0.02, 0.04, 0.08),
        "end": (0.0002, 0.0005, 0.001, 0.002),
        "cycle": (300, 750, 1500, 3000),
        "chains": (1, 2, 4, 8),
        "starts": (10, 25, 50, 100),
    },
    "autohaap": {
        "starts": (30, 60, 100, 150, 200),
        "width": (3, 5, 10, 20, 40),
        "patience": (0.003, 0.01, 0.03, 0.1, 0.3),
    },
}  # of random nothing can be set
OPTIONS = {"out": None, "trials": 24, "instances": 12, "seeds": 1, "searchers": ",".join(SPACES), "workers": 2}

Settings = dict[str, Any]


class Run(NamedTuple):
    """One run: the trial of a searcher on an instance with a seed, kept in the file `path`."""

    searcher: str
    settings: Settings
    instance: Instance
    seed: int
    path: Path

    @property
    def evaluations(self) -> int:
        return search_quality.MOST.get(self.searcher, BUDGETS[-1])


def best_times(run: Run) -> list[float | None]:
    """Best iteration time of a run at each budget it reaches, from its file or else run now."""
    key = {
        "searcher": run.searcher,
        "settings": run.settings,
        "instance": run.instance.name,
        "seed": run.seed,
        "evaluations": run.evaluations,
        "estimator": fingerprint(),
    }
    found: list[float | None] = stored(run.path, key, partial(_search, run))["best_s"]
    return found


def _search(run: Run) -> dict[str, Any]:
    searcher = load_searcher(run.searcher, run.settings)
    result = run_search(searcher, run.instance.problem(), Budget(run.evaluations), run.seed, suite.spec())
    best: list[float | None] = []
    for budget in BUDGETS:
        times = [p.best_iteration_time_s for p in result.trace if p.evaluations <= budget]
        if budget <= run.evaluations:
            best.append(times[-1] if times else None)
    return {"best_s": best}


def trials(searcher: str, count: int) -> list[Settings]:
    """Different settings of a searcher: those of conf/search/ first, the others drawn."""
    default = {key: value for key, value in preset("search", searcher).items() if key != "name"}
    space = SPACES[searcher]
    rng = np.random.default_rng([*searcher.encode()])
    found = [default]
    for _ in range(1000 * count):
        if len(found) == count:
            break
        drawn = default | {key: values[rng.integers(len(values))] for key, values in space.items()}
        if drawn not in found:
            found.append(drawn)
    return found


def pool(count: int) -> tuple[Instance, ...]:
    """`count` training instances on which some plan fits."""
    instances = load_instances(preset("instances", "default")).split("train")
    larger = [instance for instance in instances if instance.num_devices > EASY]
    found = draw_pool(larger, count, FIRST_SEED, _fits)
    if len(found) < count:
        raise InputError(f"tuning: instances: only {len(found)} training instances fit; lower instances")
    return found


def _fits(problem: Problem) -> bool:
    return math.isfinite(lower_bound(problem, suite.spec()).seconds)


def scored(runs: Sequence[Run], times: Sequence[list[float | None]]) -> dict[str, list[dict[str, Any]]]:
    """{searcher: its trials in their order, each with settings, score and IQM gap in % at each budget}."""
    known: dict[str, float] = {}
    for run, best_s in zip(runs, times, strict=True):
        known[run.instance.name] = min([known.get(run.instance.name, math.inf), *(t for t in best_s if t is not None)])
    gaps: dict[tuple[str, str], list[list[float]]] = {}
    for run, best_s in zip(runs, times, strict=True):
        row = [NO_PLAN if t is None else 100 * (t / known[run.instance.name] - 1) for t in best_s]
        gaps.setdefault((run.searcher, json.dumps(run.settings)), []).append(row)
    found: dict[str, list[dict[str, Any]]] = {}
    for (searcher, settings), rows in gaps.items():
        middle = [search_quality.interquartile_mean(np.array(column)) for column in zip(*rows, strict=True)]
        score = math.exp(float(np.mean([math.log(max(FLOOR, gap)) for gap in middle])))
        entry = {"settings": json.loads(settings), "score": score, "iqm_gap_pct": middle}
        found.setdefault(searcher, []).append(entry)
    return found


def best_of(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The trial with the lowest score, the first one where several are alike."""
    return min(entries, key=lambda entry: entry["score"])


def chosen(tuned: dict[str, list[dict[str, Any]]], checked: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Per searcher: default and best trial on both draws of instances, and the settings to use."""
    found = {}
    for searcher, entries in tuned.items():
        best = best_of(entries)
        default_check, best_check = checked[searcher][0], checked[searcher][-1]
        better = best_check["score"] < default_check["score"]
        found[searcher] = {
            "trials": len(entries),
            "default": entries[0]["settings"],
            "best": best["settings"],
            "tuning_score": {"default": entries[0]["score"], "best": best["score"]},
            "check_score": {"default": default_check["score"], "best": best_check["score"]},
            "tuning_iqm_gap_pct": {"default": entries[0]["iqm_gap_pct"], "best": best["iqm_gap_pct"]},
            "check_iqm_gap_pct": {"default": default_check["iqm_gap_pct"], "best": best_check["iqm_gap_pct"]},
            "chosen": best["settings"] if better else entries[0]["settings"],
        }
    return found


def table(found: dict[str, Any], instances: int, seeds: int) -> str:
    """The outcome as Markdown: a row per searcher."""
    budgets = " / ".join(f"{budget:,}" for budget in BUDGETS)
    lines = [
        f"Random search over settings on {instances} training instances, {seeds} seed(s) each; the check is on as many "
        f"others, {CHECK_SEEDS * seeds} seeds each. Gap to the best plan known, IQM in %, at {budgets} evaluations.",
        "",
        "| searcher | trials | default | best trial | default, check | best trial, check | chosen |",
        "|---|---|---|---|---|---|---|",
    ]
    for searcher, row in found.items():
        cells = [
            " / ".join(f"{gap:.3f}" for gap in row[f"{draw}_iqm_gap_pct"][trial])
            for draw in ("tuning", "check")
            for trial in ("default", "best")
        ]
        changed = [f"{key} {value}" for key, value in row["chosen"].items() if value != row["default"][key]]
        lines.append(f"| {searcher} | {row['trials']} | {' | '.join(cells)} | {', '.join(changed) or 'default'} |")
    return "\n".join(lines) + "\n"


def trials_csv(draws: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """One row per draw of instances, searcher and trial."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["draw", "searcher", "score", *(f"iqm_gap_pct_at_{budget}" for budget in BUDGETS), "settings"])
    for draw, found in draws.items():
        for searcher, entries in found.items():
            for entry in entries:
                gaps = entry["iqm_gap_pct"] + [""] * (len(BUDGETS) - len(entry["iqm_gap_pct"]))
                writer.writerow([draw, searcher, entry["score"], *gaps, json.dumps(entry["settings"])])
    return text.getvalue()


def tune(options: dict[str, Any]) -> int:
    """Run what is missing and write the files; the exit status."""
    count, instances, seeds, workers = (
        positive_int("tuning", key, options[key]) for key in ("trials", "instances", "seeds", "workers")
    )
    names = [name.strip() for name in str(options["searchers"]).split(",")]
    unknown = [name for name in names if name not in SPACES]
    if unknown:
        raise InputError(f"tuning: searchers: {unknown[0]!r} is not one of {', '.join(SPACES)}")
    out = Path(str(options["out"]))
    (out / "runs").mkdir(parents=True, exist_ok=True)
    drawn = pool(2 * instances)

    def run_all(draw: str, settings: dict[str, list[Settings]], on: Sequence[Instance], seeds: int) -> Any:
        runs = [
            Run(name, values, instance, seed, out / "runs" / f"{draw}-{name}-{trial:02d}-{number:02d}-{seed}.json")
            for name, several in settings.items()
            for trial, values in enumerate(several)
            for number, instance in enumerate(on)
            for seed in range(FIRST_SEED, FIRST_SEED + seeds)
        ]
        times = []
        for run, best_s in zip(runs, executor.map(best_times, runs), strict=True):
            times.append(best_s)
            if len(times) % (instances * seeds) == 0:
                print(f"{draw}: {run.searcher}, {len(times)} of {len(runs)} runs", flush=True)
        return scored(runs, times)

    with ProcessPoolExecutor(workers, get_context("spawn")) as executor:
        tuned = run_all("tuning", {name: trials(name, count) for name in names}, drawn[:instances], seeds)
        best = {name: [rows[0]["settings"], best_of(rows)["settings"]] for name, rows in tuned.items()}
        for pair in best.values():
            if pair[0] == pair[1]:
                del pair[1]
        checked = run_all("check", best, drawn[instances:], CHECK_SEEDS * seeds)
    found = chosen(tuned, checked)
    texts = {
        "trials.csv": trials_csv({"tuning": tuned, "check": checked}),
        "table.md": table(found, instances, seeds),
        "best.json": to_json_text({"instances": [instance.name for instance in drawn], "searchers": found}),
    }
    write_files(out, {name: content.encode() for name, content in texts.items()})
    print(texts["table.md"])
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    return configs.run_with_options(tune, dict(OPTIONS), sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
