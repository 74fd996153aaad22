"""Settings of every searcher, chosen with the same effort on the same training instances by random search.

    python -m experiments.tuning out=results/tuning                     some ten minutes on one core
    python -m experiments.tuning out=/tmp/try trials=2 instances=2        half a minute, to see that it works

Instances are drawn from the split `train` of conf/instances, more than EASY devices each; nothing of a test split is
looked at. Per searcher the first trial is conf/search/, the others are drawn from SPACES. A trial is one run to the
largest of BUDGETS (or what `search_quality.MOST` leaves a slow searcher) per instance and seed; what it had found at
each budget is read off its trace. Gap = iteration time / best one known of the instance among all runs - 1.

    score = geometric mean, over the budgets, of the interquartile mean of the gap over instances and seeds

so that halving the gap at a large budget is worth as much as halving it at a small one. Interquartile means below FLOOR
count as FLOOR, a run without a plan as NO_PLAN. Two more steps, for the best of many trials owes much to its luck:

    final   the first trial and the FINALISTS best others again, with other and more seeds
    check   the best of these and the first trial on twice as many other instances, with those seeds

Only what is better than the first trial in both is `chosen`. Seeds are 1000 and up, which are not reported.

Each run is one file under out/runs/, so an interrupted tuning goes on where it stopped. Written at the end: trials.csv
(a row per step and trial), table.md, best.json.
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
FINALISTS = 4  # besides the first trial
FINAL_SEEDS, CHECK_INSTANCES = 2, 2  # for each seed and each instance of the tuning; the check has those seeds too
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
}  # of random nothing can be set; ppo would take hours: its settings were tried by hand, on `suite.TUNING`
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


def best_known(runs: Sequence[Run], times: Sequence[list[float | None]], before: dict[str, float]) -> dict[str, float]:
    """Best iteration time of each instance by name, over these runs and what was known before."""
    known = dict(before)
    for run, best_s in zip(runs, times, strict=True):
        known[run.instance.name] = min([known.get(run.instance.name, math.inf), *(t for t in best_s if t is not None)])
    return known


def scored(
    runs: Sequence[Run], times: Sequence[list[float | None]], known: dict[str, float]
) -> dict[str, list[dict[str, Any]]]:
    """{searcher: its trials in their order, each with settings, score and IQM gap in % at each budget}."""
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


def finalists(entries: Sequence[dict[str, Any]]) -> list[Settings]:
    """The settings of the first trial, then those of the FINALISTS best others."""
    others = sorted(entries[1:], key=lambda entry: entry["score"])[:FINALISTS]
    return [entry["settings"] for entry in (entries[0], *others)]


def best_two(entries: Sequence[dict[str, Any]]) -> list[Settings]:
    """The settings of the first trial, and of the one with the lowest score if that is another."""
    best = min(entries, key=lambda entry: entry["score"])
    return [entries[0]["settings"]] + [best["settings"]] * (best is not entries[0])


def chosen(
    tuned: dict[str, list[dict[str, Any]]],
    final: dict[str, list[dict[str, Any]]],
    checked: dict[str, list[dict[str, Any]]],
) -> dict[str, Any]:
    """Per searcher: the first trial and the best one of the final, both there and in the check; settings to use."""
    found = {}
    for searcher, entries in checked.items():
        default, best = entries[0], entries[-1]
        in_final = [next(e for e in final[searcher] if e["settings"] == entry["settings"]) for entry in (default, best)]
        found[searcher] = {
            "trials": len(tuned[searcher]),
            "default": default["settings"],
            "best": best["settings"],
            **{
                f"{step}_{figure}": {"default": pair[0][figure], "best": pair[1][figure]}
                for step, pair in (("final", in_final), ("check", (default, best)))
                for figure in ("score", "iqm_gap_pct")
            },
            "chosen": min(entries, key=lambda entry: entry["score"])["settings"],
        }
    return found


def table(found: dict[str, Any], instances: int, seeds: int) -> str:
    """The outcome as Markdown: a row per searcher."""
    budgets = " / ".join(f"{budget:,}" for budget in BUDGETS)
    lines = [
        f"Settings drawn, on {instances} training instances; the final has {FINAL_SEEDS * seeds} other seeds",
        "each, the check other instances too. Gap to the best plan known, IQM in %, at",
        f"{budgets} evaluations.",
        "",
        "| searcher | trials | default, final | best, final | default, check | best, check | chosen |",
        "|---|---|---|---|---|---|---|",
    ]
    for searcher, row in found.items():
        cells = [
            " / ".join(f"{gap:.3f}" for gap in row[f"{step}_iqm_gap_pct"][which])
            for step in ("final", "check")
            for which in ("default", "best")
        ]
        changed = [f"{key} {value}" for key, value in row["chosen"].items() if value != row["default"][key]]
        lines.append(f"| {searcher} | {row['trials']} | {' | '.join(cells)} | {', '.join(changed) or 'default'} |")
    return "\n".join(lines) + "\n"


def trials_csv(steps: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """One row per step, searcher and trial."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", "searcher", "score", *(f"iqm_gap_pct_at_{budget}" for budget in BUDGETS), "settings"])
    for step, found in steps.items():
        for searcher, entries in found.items():
            for entry in entries:
                gaps = entry["iqm_gap_pct"] + [""] * (len(BUDGETS) - len(entry["iqm_gap_pct"]))
                writer.writerow([step, searcher, entry["score"], *gaps, json.dumps(entry["settings"])])
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
    drawn = pool((1 + CHECK_INSTANCES) * instances)

    known: dict[str, float] = {}

    def run_all(step: str, settings: dict[str, list[Settings]], on: Sequence[Instance], seeds: range) -> Any:
        """What `scored` says of these settings on these instances."""
        runs = [
            Run(name, values, instance, seed, out / "runs" / f"{step}-{name}-{trial:02d}-{number:02d}-{seed}.json")
            for name, several in settings.items()
            for trial, values in enumerate(several)
            for number, instance in enumerate(on)
            for seed in seeds
        ]
        times = []
        for run, best_s in zip(runs, executor.map(best_times, runs), strict=True):
            times.append(best_s)
            if len(times) % (len(on) * len(seeds)) == 0:
                print(f"{step}: {run.searcher}, {len(times)} of {len(runs)} runs", flush=True)
        known.update(best_known(runs, times, known))
        return scored(runs, times, known)

    drawn = pool((1 + CHECK_INSTANCES) * instances)
    mine, others = drawn[:instances], drawn[instances:]
    first = range(FIRST_SEED, FIRST_SEED + seeds)
    more = range(first.stop, first.stop + FINAL_SEEDS * seeds)
    with ProcessPoolExecutor(workers, get_context("spawn")) as executor:
        tuned = run_all("tuning", {name: trials(name, count) for name in names}, mine, first)
        final = run_all("final", {name: finalists(entries) for name, entries in tuned.items()}, mine, more)
        checked = run_all("check", {name: best_two(entries) for name, entries in final.items()}, others, more)
    found = chosen(tuned, final, checked)
    texts = {
        "trials.csv": trials_csv({"tuning": tuned, "final": final, "check": checked}),
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
