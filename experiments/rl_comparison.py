"""What is a trained policy worth beside searchers? Problems that it has never met, many seeds, intervals.

    python -m experiments.rl_comparison out=results/rl policies=runs/train_policy     six hours on two cores
    python -m experiments.rl_comparison out=/tmp/try quick=true                       minutes, to see that it works

policies     the out of `python -m haap_rl.train_policy seeds=[0,1,2,3,4]`, whose seed-N/policy.npz are compared, run s
             with the (s mod their number)-th; or `pretrained`, the shipped one, which is one training seed only
methods      names of METHODS; the budgets that each is reported at are there
most         no run has more evaluations
ablations    name:directory,...: trainings with one thing off, `full` one with nothing off and the same settings

Every run is one file under out/runs/, so the same command goes on where it was stopped. Written at the end: runs.csv
(a row per split, instance, method and seed), table.md, instances.md, summary.json, curves.png, profile.png.

Instances are those of `experiments/suite.py`: split `test` has models and clusters, `unseen_devices` device types too,
that no policy was trained on. Gap = iteration time / best one known of the instance (its certificate's, or what any run
here found) - 1. One run per instance and seed goes to its largest budget; what it had found before is read off its
trace. Seconds are the search's own on this machine, from its first table of the problem on, the network's included;
what is loaded and compiled before is not.

Figures: interquartile mean (IQM) with its 95 % interval by stratified bootstrap (Agarwal et al. 2021): seeds are drawn
anew within each instance. Where several trained policies are compared, training seeds are drawn first, the same ones
for every instance, then runs within each, so that the interval covers training anew. Two methods are compared by the
interval of the difference of their IQMs, a run without a plan counting as a gap of NO_PLAN %: `better` below 0, `worse`
above, else `not worse`. Methods that use the same policies are compared with the same training seeds drawn.

Break-even: with g the IQM gap of policy_sampled at 96 evaluations, a searcher from scratch needs S evaluations on
average (over all runs) until its gap is at most g, a run that never gets there counting with its whole budget. With the
least S of FROM_SCRATCH and T training evaluations (mean over training seeds; the teacher's exact searches are not among
them), it is the least whole n for which T + 96 n < S n.
"""

from __future__ import annotations

import csv
import io
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, fields
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from experiments import suite
from experiments.search_quality import OPTIMAL, draw_curves, interquartile_mean, resampled_means
from experiments.stored import kept, stored
from experiments.tuning import NO_PLAN
from haap_rl import configs
from haap_rl.cost.estimator import fingerprint
from haap_rl.problem.errors import InputError, check_keys, positive_int, yes_or_no
from haap_rl.problem.instances import Instance
from haap_rl.problem.presets import preset
from haap_rl.runtime.orphans import end_with_parent
from haap_rl.search.base import Budget, Objective, load_searcher, run_search
from haap_rl.search.candidate_policy import PRETRAINED, SHIPPED, load_policy
from haap_rl.search.certificate import problem_key
from haap_rl.space.options import SpaceSpec
from haap_rl.tracking.record import to_json_text, write_files

Floats = npt.NDArray[np.float64]
Figures = dict[str, Any]
BUDGETS = (6, 96, 100, 1000, 10_000, 100_000)
SPLITS = {"test": suite.INSTANCES, "unseen_devices": suite.UNSEEN}
TITLES = {"test": "held-out models and clusters", "unseen_devices": "unseen device types"}


class Search(NamedTuple):
    """A searcher with the settings of conf/search/, but for `changes`; `most` evaluations at most."""

    searcher: str
    most: int = BUDGETS[-1]
    policy: bool = False  # whether it is given a trained policy
    changes: Mapping[str, Any] = {}


class Method(NamedTuple):
    """What is reported of a search, and at which budgets. `first`: what its first batch found, whatever its size."""

    search: str
    budgets: tuple[int, ...] = BUDGETS
    first: bool = False


SEARCHES = {
    "policy_propose": Search("ppo", 1000, True, {"mode": "propose"}),
    "policy_polish": Search("ppo", 10_000, True, {"mode": "polish"}),
    "policy_adapt": Search("ppo", 1000, True, {"mode": "train"}),
    "ga_policy": Search("ga", policy=True),
    "ppo": Search("ppo", 1000),  # trained anew for each instance: its network costs more than its plans
    "ppo_partition": Search("ppo_partition", 1000),
    **{name: Search(name) for name in ("ga", "annealing", "autohaap", "random")},
}
METHODS = {
    "policy_greedy": Method("policy_propose", (6,), first=True),  # a plan per feasible number of micro-batches
    "policy_sampled": Method("policy_propose", (96, 1000)),
    "policy_polish": Method("policy_polish", (6, 96, 1000, 10_000)),
    "policy_adapt": Method("policy_adapt", (6, 96, 1000)),
    **{name: Method(name) for name in ("ga_policy", "ppo", "ppo_partition", "ga", "annealing", "autohaap", "random")},
}
TEST_ONLY = ("policy_adapt", "ga_policy", "ppo", "ppo_partition")  # slow, and nothing new about unseen devices
FROM_SCRATCH = ("ga", "annealing", "autohaap")
POLISH, SAMPLED, POLICY_EVALUATIONS = "policy_polish", "policy_sampled", 96
COMPARED_TO = 10_000  # evaluations up to which policy_polish is compared with each other method
PROVEN_WITHIN = 0.001  # relative width of a certificate that counts as proven
PROFILED, TAUS = (96, 1000), np.logspace(-3, 2, 51)  # evaluations, gaps in %
QUICK = {"instances": 2, "seeds": 2, "most": 1000}
SAY_EVERY_S = 20.0
OPTIONS = {
    "out": None,
    "policies": PRETRAINED,
    "seeds": 10,
    "quick": False,
    "methods": ",".join(METHODS),
    "processes": 2,
    "most": BUDGETS[-1],
    "ablations": "",
}


# ------------------------------------------------------------------------------------------ policies
class Policy(NamedTuple):
    """A trained policy: its file, the file's digest, and how it was trained."""

    path: Path
    digest: str
    facts: Figures


def policies_of(key: str, where: str, out: Path) -> list[Policy]:
    """The policies of a training's directory, or the shipped one, copied to `out`; a training may still go on."""
    files = {PRETRAINED: SHIPPED} if where == PRETRAINED else {}
    for path in sorted(Path(where).glob("seed-*/policy.npz"), key=lambda path: (len(path.parent.name), path)):
        files[str(path)] = path
    if not files:
        raise InputError(
            f"rl_comparison: {key}={where!r}: there is no seed-N/policy.npz in it; give the out of "
            f"python -m haap_rl.train_policy, or {PRETRAINED}"
        )
    found = []
    for name, path in files.items():
        load_policy(name)  # to be refused by its own name
        content = path.read_bytes()
        digest = sha256(content).hexdigest()
        copy = out / "policies" / f"{digest[:16]}.npz"
        write_files(copy.parent, {copy.name: content})
        found.append(Policy(copy, digest, load_policy(str(copy))[1]))
    return found


class Part(NamedTuple):
    """Runs that are reported together: of some methods on some instances, in one space."""

    instances: list[suite.Certified]
    policies: list[Policy]
    methods: tuple[str, ...]
    space: SpaceSpec

    @property
    def searches(self) -> list[str]:
        """Those that the methods need."""
        return list(dict.fromkeys(METHODS[name].search for name in self.methods))


def methods_on(split: str, methods: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the methods that a split is used for; all of them where it would be none."""
    kept_ones = tuple(name for name in methods if split == "test" or name not in TEST_ONLY)
    return kept_ones or methods


def ablations_of(text: str, instances: list[suite.Certified], out: Path) -> dict[str, Part]:
    """{name: its policies alone, in their own space} of name:directory,...; `full` first."""
    found: dict[str, Part] = {}
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        name, colon, where = entry.partition(":")
        if not colon or not name.isidentifier() or name in found:
            raise InputError(f"rl_comparison: ablations: {entry!r} is not a new name:directory; give masks:runs/masks")
        policies = policies_of(f"ablations: {name}", where, out)
        switches = policies[0].facts.get("space", {})
        check_keys(f"rl_comparison: ablations: {name}: space", switches, (), [f.name for f in fields(SpaceSpec)])
        space = SpaceSpec.from_config({**preset("space", "default"), **switches})
        found[name] = Part(instances, policies, ("policy_greedy", SAMPLED), space)
    return dict(sorted(found.items(), key=lambda item: item[0] != "full"))


# ------------------------------------------------------------------------------------------ runs
class Task(NamedTuple):
    """One run, kept in the file `path`."""

    path: Path
    name: str  # of SEARCHES
    policy: Policy | None
    instance: Instance
    space: SpaceSpec
    seed: int
    evaluations: int

    @property
    def settings(self) -> dict[str, Any]:
        """Of the searcher, but for where the policy is."""
        search = SEARCHES[self.name]
        found = {**preset("search", search.searcher), **search.changes}
        return {key: value for key, value in found.items() if key not in ("name", "policy")}

    @property
    def key(self) -> dict[str, Any]:
        """All that the run depends on."""
        return {
            "searcher": SEARCHES[self.name].searcher,
            "settings": self.settings,
            "policy": self.policy and self.policy.digest,
            "instance": self.instance.name,
            "problem": _problem_key(self.instance, self.space),
            "space": json.loads(json.dumps(asdict(self.space))),
            "estimator": fingerprint(),
            "seed": self.seed,
            "evaluations": self.evaluations,
        }


@cache
def _problem_key(instance: Instance, space: SpaceSpec) -> str:
    return problem_key(instance.problem(), space)


class Watch:
    """Notes how large a search's first batch was, and when it had priced how many plans."""

    def __init__(self) -> None:
        self.first: list[float] | None = None  # evaluations, seconds
        self.seconds_at: dict[str, float] = {}
        self._waiting = list(BUDGETS)

    def __call__(self, objective: Objective) -> None:
        if self.first is None:
            self.first = [objective.evaluations, objective.seconds]
        while self._waiting and objective.evaluations >= self._waiting[0]:
            self.seconds_at[str(self._waiting.pop(0))] = objective.seconds


def search(task: Task) -> Figures:
    """Figures of one run: every improvement, and the seconds it took to reach each budget."""
    began, watch = time.perf_counter(), Watch()
    policy = {} if task.policy is None else {"policy": str(task.policy.path)}
    searcher = load_searcher(SEARCHES[task.name].searcher, {**task.settings, **policy})
    budget = Budget(task.evaluations)
    result = run_search(searcher, task.instance.problem(), budget, task.seed, task.space, on_progress=watch)
    if result.stopped_by == "interrupted":
        raise KeyboardInterrupt
    trace: list[tuple[int, float]] = []
    for point in result.trace:
        found_s = point.best_iteration_time_s
        if found_s is not None and (not trace or found_s < trace[-1][1]):
            trace.append((point.evaluations, found_s))
    return {
        "trace": trace,
        "first": watch.first,
        "seconds_at": watch.seconds_at,
        "evaluations": result.evaluations,
        "seconds": result.wall_time_s,
        "took_s": time.perf_counter() - began,  # with what is loaded and bounded before
    }


def perform(task: Task) -> Figures:
    """Figures of a run, from its file or else run now."""
    return stored(task.path, task.key, partial(search, task))


def tasks_of(part: Part, folder: Path, seed: int, most: int) -> list[Task]:
    """The runs of one seed, in order of search and instance."""
    found = []
    for name in part.searches:
        evaluations = min(most, SEARCHES[name].most)
        policy = part.policies[seed % len(part.policies)] if SEARCHES[name].policy else None
        for number, entry in enumerate(part.instances):
            path = folder / f"{name}-{number:02d}-{seed}-{evaluations}.json"
            found.append(Task(path, name, policy, entry.instance, part.space, seed, evaluations))
    return found


class Progress:
    """Says from time to time how many runs are done, and how long the others may take."""

    def __init__(self, tasks: Sequence[Task], processes: int) -> None:
        self._total, self._done, self._processes = len(tasks), 0, processes
        self._waiting: dict[str, int] = {}
        self._took: dict[str, list[float]] = {}
        self._said = time.monotonic()
        for task in tasks:
            self._waiting[task.name] = self._waiting.get(task.name, 0) + 1

    def told(self, task: Task, figures: Figures, fresh: bool) -> None:
        """Take note of a finished run; `fresh`: not from an earlier command."""
        self._done += 1
        self._waiting[task.name] -= 1
        self._took.setdefault(task.name, []).append(figures["took_s"])
        if fresh and (time.monotonic() - self._said > SAY_EVERY_S or self._done == self._total):
            self._said = time.monotonic()
            print(f"{self._done} of {self._total} runs, seed {task.seed}, {task.name}; {self.left()}", flush=True)

    def left(self) -> str:
        """How long the waiting runs may take."""
        seconds = sum(n * float(np.mean(self._took[name])) for name, n in self._waiting.items() if name in self._took)
        unknown = any(n for name, n in self._waiting.items() if name not in self._took)
        return f"{'more than ' * unknown}{seconds / self._processes / 60:.0f} minutes left"


def run_all(tasks: Sequence[Task], processes: int) -> dict[Path, Figures]:
    """Figures of every run by its file; runs already on disk are not run again."""
    found: dict[Path, Figures] = {}
    progress, waiting = Progress(tasks, processes), []
    for task in tasks:
        figures = kept(task.path, task.key)
        if figures is None:
            waiting.append(task)
        else:
            found[task.path] = figures
            progress.told(task, figures, fresh=False)
    print(f"{len(tasks)} runs, of which {len(found)} are there", flush=True)
    for folder in {task.path.parent for task in waiting}:
        folder.mkdir(parents=True, exist_ok=True)
    if not waiting:
        return found
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(waiting)), context, end_with_parent) as executor:
        futures = {executor.submit(perform, task): task for task in waiting}
        try:
            for future in as_completed(futures):
                task = futures[future]
                found[task.path] = future.result()
                progress.told(task, found[task.path], fresh=True)
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            raise
    return found


# ------------------------------------------------------------------------------------------ figures
class Results(NamedTuple):
    """The runs of a part: figures by search, [instance][seed], and the best time known of each instance."""

    part: Part
    runs: dict[str, list[list[Figures]]]
    known_s: list[float]
    most: int

    def budgets(self, method: str) -> list[int]:
        """Those that the method is reported at."""
        most = min(self.most, SEARCHES[METHODS[method].search].most)
        return [budget for budget in METHODS[method].budgets if budget <= most]

    def groups(self, method: str) -> int:
        """Training seeds of the method; 1 where it has none."""
        return len(self.part.policies) if SEARCHES[METHODS[method].search].policy else 1

    def methods(self) -> list[str]:
        """Those that have a budget to be reported at."""
        return [name for name in self.part.methods if self.budgets(name)]

    def gaps(self, method: str, budget: int) -> Floats:
        """(instances, seeds) gaps in %, infinity where there was no plan."""
        found = [[best_s(run, METHODS[method], budget) for run in here] for here in self.runs[METHODS[method].search]]
        gaps: Floats = 100 * (np.array(found) / np.array(self.known_s)[:, None] - 1)
        return gaps

    def widths(self) -> list[float]:
        """How far the best time known of each instance may be from the optimum, in %."""
        return [
            100 * (known / certified.lower_bound_s - 1)
            for known, certified in zip(self.known_s, self.part.instances, strict=True)
        ]


def best_s(run: Figures, method: Method, budget: int) -> float:
    """Best iteration time of a run within a budget; infinity where there was no plan."""
    evaluations = run["first"][0] if method.first and run["first"] else budget
    times = [found_s for at, found_s in run["trace"] if at <= evaluations]
    return float(times[-1]) if times else math.inf


def seconds_at(run: Figures, method: Method, budget: int) -> float:
    """Seconds until a run had used a budget."""
    if method.first and run["first"]:
        return float(run["first"][1])
    return float(run["seconds_at"].get(str(budget), run["seconds"]))


def finite(value: float) -> float | None:
    """The value; None where it is infinite or none, which JSON has no word for."""
    return float(value) if math.isfinite(value) else None


def best_known(instances: Sequence[suite.Certified], runs: Sequence[list[list[Figures]]]) -> list[float]:
    """Best iteration time of each instance, by its certificate or any of the runs."""
    return [
        min([entry.iteration_time_s, *(run["trace"][-1][1] for each in runs for run in each[i] if run["trace"])])
        for i, entry in enumerate(instances)
    ]


def figures_of(gaps: Floats, groups: int) -> Figures:
    """IQM with its interval, mean and worst of (instances, seeds) gaps in %, and shares of all runs."""
    with np.errstate(invalid="ignore"):  # infinities
        low, high = np.percentile(resampled_means(gaps, groups), (2.5, 97.5))
    return {
        "iqm_gap_pct": finite(interquartile_mean(gaps)),
        "low": finite(low),
        "high": finite(high),
        "mean": finite(gaps.mean()),
        "worst": finite(gaps.max()),
        "share_optimal": float((gaps <= 100 * OPTIMAL).mean()),
        "share_without_plan": float(np.isinf(gaps).mean()),
    }


def by_figure(results: Results, rows: Sequence[int]) -> Figures:
    """{figure: {method: {budget: value}}} over some of the instances."""
    found: Figures = {}
    for method in results.methods():
        for budget in results.budgets(method):
            for figure, value in figures_of(results.gaps(method, budget)[rows], results.groups(method)).items():
                found.setdefault(figure, {}).setdefault(method, {})[str(budget)] = value
    return found


def median_seconds(results: Results) -> Figures:
    """{method: {budget: median seconds until it was used}}."""
    return {
        method: {
            str(budget): float(np.median([seconds_at(run, METHODS[method], budget) for here in runs for run in here]))
            for budget in results.budgets(method)
        }
        for method in results.methods()
        for runs in [results.runs[METHODS[method].search]]
    }


def verdict(one: Floats, other: Floats, groups: tuple[int, int]) -> Figures:
    """Difference of the IQMs of two methods' gaps, one - other in %, its interval, and what that says of the one."""
    one, other = np.minimum(one, NO_PLAN), np.minimum(other, NO_PLAN)
    means = resampled_means(one, groups[0]) - resampled_means(other, groups[1], stream=1)
    low, high = np.percentile(means, (2.5, 97.5))
    return {
        "difference_pct": interquartile_mean(one) - interquartile_mean(other),
        "low": float(low),
        "high": float(high),
        "verdict": "better" if high < 0 else "worse" if low > 0 else "not worse",
    }


def polish_against(results: Results) -> Figures:
    """{method: {budget: verdict on policy_polish against it}}."""
    found: Figures = {}
    methods = results.methods()
    for method in [name for name in methods if name != POLISH and POLISH in methods]:
        for budget in results.budgets(method):
            if budget in results.budgets(POLISH) and budget <= COMPARED_TO:
                one, other = results.gaps(POLISH, budget), results.gaps(method, budget)
                groups = results.groups(POLISH), results.groups(method)
                found.setdefault(method, {})[str(budget)] = verdict(one, other, groups)
    return found


def profile(results: Results) -> Figures:
    """{budget: {method: share of runs with a gap of at most each of TAUS}}."""
    return {
        str(budget): {
            method: [float((results.gaps(method, budget) <= tau).mean()) for tau in TAUS]
            for method in results.methods()
            if budget in results.budgets(method)
        }
        for budget in PROFILED
    }


def instances_after(training: float, with_policy: float, from_scratch: float) -> int | None:
    """Least n with training + n * with_policy < n * from_scratch, all in evaluations; None if there is none."""
    if from_scratch <= with_policy:
        return None
    return math.floor(training / (from_scratch - with_policy)) + 1


def break_even(results: Results, training: float | None) -> Figures:
    """The break-even number of instances, as the module defines it, and what it is made of."""
    found: Figures = {"instances": None, "policy_iqm_gap_pct": None, "from_scratch": {}}
    if SAMPLED not in results.methods() or POLICY_EVALUATIONS not in results.budgets(SAMPLED):
        return found
    gap = interquartile_mean(results.gaps(SAMPLED, POLICY_EVALUATIONS))
    found["policy_iqm_gap_pct"] = finite(gap)
    for name in FROM_SCRATCH:
        if name in results.methods() and math.isfinite(gap):
            needed = [_evaluations_until(run, known * (1 + gap / 100)) for known, run in _with_known(results, name)]
            found["from_scratch"][name] = {
                "evaluations": float(np.mean([n for n, _ in needed])),
                "share_that_got_there": float(np.mean([reached for _, reached in needed])),
            }
    if found["from_scratch"] and training is not None:
        least = min(row["evaluations"] for row in found["from_scratch"].values())
        found["instances"] = instances_after(training, POLICY_EVALUATIONS, least)
    return found


def _with_known(results: Results, name: str) -> list[tuple[float, Figures]]:
    return [(known, run) for known, here in zip(results.known_s, results.runs[name], strict=True) for run in here]


def _evaluations_until(run: Figures, limit_s: float) -> tuple[int, bool]:
    """(evaluations until a run had a plan of at most so many seconds, whether it had one before it ended)."""
    at = next((at for at, found_s in run["trace"] if found_s <= limit_s), None)
    return (run["evaluations"], False) if at is None else (at, True)


def ablation_figures(runs: dict[str, Results]) -> Figures:
    """{name: figures of policy_greedy and policy_sampled, and `full` compared with it at 96 evaluations}."""
    found: Figures = {}
    for name, results in runs.items():
        found[name] = by_figure(results, range(len(results.known_s)))
        at = POLICY_EVALUATIONS
        if name != "full" and "full" in runs and at in results.budgets(SAMPLED):
            full = runs["full"]
            groups = full.groups(SAMPLED), results.groups(SAMPLED)
            found[name]["full_against_it"] = verdict(full.gaps(SAMPLED, at), results.gaps(SAMPLED, at), groups)
    return found


def summarise(splits: dict[str, Results], ablations: dict[str, Results], policies: Sequence[Policy]) -> Figures:
    """Every figure of the tables."""
    summary: Figures = {}
    evaluations = [policy.facts.get("training_evaluations") for policy in policies]
    training = None if None in evaluations else float(np.mean(np.array(evaluations, float)))
    for split, results in splits.items():
        widths = results.widths()
        proven = [i for i, width in enumerate(widths) if width <= 100 * PROVEN_WITHIN]
        summary[split] = {
            **by_figure(results, range(len(widths))),
            "instances": len(widths),
            "seeds": len(next(iter(results.runs.values()))[0]),
            "widest_certificate_pct": max(widths),
            "better_than_certificate": sum(
                known < entry.iteration_time_s * (1 - 1e-9)
                for known, entry in zip(results.known_s, results.part.instances, strict=True)
            ),
            "proven": {"instances": len(proven), **(by_figure(results, proven) if proven else {})},
            "median_seconds": median_seconds(results),
            "polish_against": polish_against(results),
            "profile": profile(results),
            "break_even": break_even(results, training),
        }
    return {
        **summary,
        "training_evaluations": None if training is None else round(training),
        "break_even_instances": summary["test"]["break_even"]["instances"],
        "training": [
            {"policy": policy.digest[:16], **{key: policy.facts.get(key) for key in (
                "seed", "training_evaluations", "teacher_examples", "training_instances", "settings")}}
            for policy in policies
        ],
        "profile_taus_pct": TAUS.tolist(),
        "ablations": ablation_figures(ablations),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------ as text
def shown(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def ranged(figures: Figures, method: str, budget: str) -> str:
    """IQM with its interval."""
    middle, low, high = (figures[key][method][budget] for key in ("iqm_gap_pct", "low", "high"))
    return shown(middle) + ("" if low is None or high is None else f" ({low:.3f} to {high:.3f})")


def overview(summary: Figures) -> list[str]:
    """The IQMs alone: a row per split and method, a column per budget."""
    lines = [
        f"| split | method | {' | '.join(f'{budget:,}' for budget in BUDGETS)} |",
        "|" + "---|" * (2 + len(BUDGETS)),
    ]
    for split in TITLES:
        for method, row in summary[split]["iqm_gap_pct"].items():
            cells = [shown(row[str(budget)]) if str(budget) in row else "" for budget in BUDGETS]
            lines.append(f"| {split} | {method} | {' | '.join(cells)} |")
    return lines


def split_table(figures: Figures, seconds: Figures) -> list[str]:
    """A row per method and budget."""
    lines = [
        "| method | evaluations | IQM (95 % interval) | mean | worst | at the optimum | no plan | seconds, median |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for method, row in figures["iqm_gap_pct"].items():
        for budget in row:
            mean, worst, optimal, without = (
                figures[key][method][budget] for key in ("mean", "worst", "share_optimal", "share_without_plan")
            )
            lines.append(
                f"| {method} | {int(budget):,} | {ranged(figures, method, budget)} | {shown(mean, 2)} | "
                f"{shown(worst, 2)} | {optimal:.0%} | {without:.0%} | {seconds[method][budget]:.3g} |"
            )
    return lines


def verdicts_table(against: Figures) -> list[str]:
    """A row per method and budget that policy_polish is compared at."""
    lines = [
        "| policy_polish against | evaluations | difference of IQMs, % (95 % interval) | policy_polish is |",
        "|---|---|---|---|",
    ]
    for method, row in against.items():
        for budget, found in row.items():
            lines.append(
                f"| {method} | {int(budget):,} | {found['difference_pct']:.3f} ({found['low']:.3f} to "
                f"{found['high']:.3f}) | {found['verdict']} |"
            )
    return lines


def training_text(summary: Figures) -> list[str]:
    """What training cost, and after how many instances it has paid."""
    lines = ["| training seed | training evaluations | teacher's examples |", "|---|---|---|"]
    for row in summary["training"]:
        counts = [row[key] for key in ("training_evaluations", "teacher_examples")]
        cells = ["-" if count is None else f"{count:,}" for count in counts]
        lines.append(f"| {row['seed']} | {' | '.join(cells)} |")
    lines += [
        "",
        f"Evaluations that a searcher from scratch needs on average to reach the policy's gap at {POLICY_EVALUATIONS}",
        "evaluations (share of its runs that do; the others count with their whole budget), and the number of",
        "instances after which training has paid:",
        "",
        f"| split | the policy's IQM gap, % | {' | '.join(FROM_SCRATCH)} | break-even, instances |",
        "|" + "---|" * (3 + len(FROM_SCRATCH)),
    ]
    for split in TITLES:
        found = summary[split]["break_even"]
        needed = [found["from_scratch"].get(name) for name in FROM_SCRATCH]
        cells = ["-" if x is None else f"{x['evaluations']:,.0f} ({x['share_that_got_there']:.0%})" for x in needed]
        after = "never" if found["instances"] is None else f"{found['instances']:,}"
        lines.append(f"| {split} | {shown(found['policy_iqm_gap_pct'])} | {' | '.join(cells)} | {after} |")
    return lines


def ablations_table(ablations: Figures) -> list[str]:
    """A row per ablation: its policies alone, without search."""
    columns = [("policy_greedy", "6"), (SAMPLED, "96"), (SAMPLED, "1000")]
    lines = [
        "| training | greedy, IQM gap, % | sampled, 96 | sampled, 1,000 | full - this, 96 | full is |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in ablations.items():
        cells = [ranged(row, *at) if at[1] in row["iqm_gap_pct"].get(at[0], {}) else "-" for at in columns]
        found, compared = row.get("full_against_it"), ["-", "-"]
        if found is not None:
            compared = [f"{found['difference_pct']:.3f} ({found['low']:.3f} to {found['high']:.3f})", found["verdict"]]
        lines.append(f"| {name} | {' | '.join([*cells, *compared])} |")
    return lines


def table(summary: Figures) -> str:
    """The comparison as Markdown."""
    number = len(summary["training"])
    lines = [
        f"Gap to the best plan known, %. {number} training seed{'s' * (number > 1)}"
        + ("." if number > 1 else " only: intervals do not cover training anew."),
        "",
        *overview(summary),
        "",
        "Seconds are the search's own: the problem's tables (about the same for every method) and the network, which",
        "is most of what a policy takes, are included; loading torch and compiling are not.",
    ]
    for split, title in TITLES.items():
        figures = summary[split]
        proven = figures["proven"]
        lines += [
            "",
            f"## {split}: {title}",
            "",
            f"{figures['instances']} instances, {figures['seeds']} seeds; the best plan known is at most "
            f"{figures['widest_certificate_pct']:.2f} % above the optimum. On {figures['better_than_certificate']} "
            "instances it is better than the exact search's.",
            "",
            *split_table(figures, figures["median_seconds"]),
            "",
            f"The best plans of {proven['instances']} of them are proven to {100 * PROVEN_WITHIN:g} %"
            + (":" if 0 < proven["instances"] < figures["instances"] else "."),
        ]
        if 0 < proven["instances"] < figures["instances"]:
            lines += ["", *split_table(proven, figures["median_seconds"])]
        if figures["polish_against"]:
            lines += ["", *verdicts_table(figures["polish_against"])]
    lines += ["", "## Training", "", *training_text(summary)]
    if summary["ablations"]:
        lines += ["", "## Trained with one thing off, on the test split", "", *ablations_table(summary["ablations"])]
    return "\n".join(lines) + "\n"


def instances_table(splits: dict[str, Results]) -> str:
    """What each instance is, and the median gap of each method at its largest budget."""
    lines = []
    for split, results in splits.items():
        methods = results.methods()
        last = {method: results.gaps(method, results.budgets(method)[-1]) for method in methods}
        heads = [f"{method} at {results.budgets(method)[-1]:,}" for method in methods]
        lines += [
            f"## {split}",
            "",
            f"| instance | devices | best known, s | certificate's width, % | {' | '.join(heads)} |",
            "|" + "---|" * (4 + len(methods)),
        ]
        for i, (entry, width) in enumerate(zip(results.part.instances, results.widths(), strict=True)):
            medians = [f"{np.median(last[method][i]):.2f}" for method in methods]
            lines.append(
                f"| {entry.instance.name} | {entry.instance.num_devices} | {results.known_s[i]:.4f} | {width:.2f} | "
                f"{' | '.join(medians)} |"
            )
        lines.append("")
    return "\n".join(lines)


def runs_csv(splits: dict[str, Results]) -> str:
    """One row per split, instance, method and seed."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    heads = [f"{what}_at_{budget}" for what in ("best_s", "seconds") for budget in BUDGETS]
    writer.writerow(["split", "instance", "method", "seed", "training_seed", "evaluations", "seconds", *heads])
    for split, results in splits.items():
        for name in results.methods():
            method, budgets = METHODS[name], results.budgets(name)
            for entry, here in zip(results.part.instances, results.runs[method.search], strict=True):
                for seed, run in enumerate(here):
                    of_policy = seed % len(results.part.policies) if SEARCHES[method.search].policy else ""
                    cells = [
                        finite(figure(run, method, budget)) if budget in budgets else None
                        for figure in (best_s, seconds_at)
                        for budget in BUDGETS
                    ]
                    facts = [run["evaluations"], run["seconds"]]
                    writer.writerow([split, entry.instance.name, name, seed, of_policy, *facts, *cells])
    return text.getvalue()


# ------------------------------------------------------------------------------------------ as pictures
def draw(summary: Figures, path: Path) -> None:
    """IQM against evaluations with intervals, both splits side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    both = figure.subplots(1, 2, sharey=True)
    shown = [method for method in METHODS if any(method in summary[split]["iqm_gap_pct"] for split in TITLES)]
    for axes, (split, title) in zip(both, TITLES.items(), strict=True):
        found = summary[split]
        rows = {
            method: [
                (int(budget), middle, found["low"][method][budget], found["high"][method][budget])
                for budget, middle in row.items()
                if found["high"][method][budget] is not None
            ]
            for method, row in found["iqm_gap_pct"].items()
        }
        # every method of either split in its place, so that it has one colour in both pictures
        draw_curves(axes, {method: rows.get(method, []) for method in shown})
        axes.set_title(title, fontsize=10)
    both[1].set_ylabel("")
    handles, labels = both[0].get_legend_handles_labels()
    both[1].legend(handles, labels, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=110)


def draw_profile(summary: Figures, path: Path) -> None:
    """Share of runs within each gap, a picture per split and budget."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 7.0), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(TITLES), len(PROFILED), sharex=True, sharey=True, squeeze=False)
    order = list(METHODS)
    for across, (split, title) in zip(grid, TITLES.items(), strict=True):
        for axes, budget in zip(across, PROFILED, strict=True):
            for method, shares in summary[split]["profile"][str(budget)].items():
                color = order.index(method)
                axes.plot(TAUS, shares, "-" if color < 10 else "--", color=f"C{color}", label=method)
            axes.set_xscale("log")
            axes.set_title(f"{title}, {budget:,} evaluations", fontsize=10)
            axes.spines[["top", "right"]].set_visible(False)
        across[0].set_ylabel("share of runs within the gap")
    for axes in grid[-1]:
        axes.set_xlabel("gap, %")
    grid[0][0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


# ------------------------------------------------------------------------------------------ the command
def results_of(parts: dict[str, Part], tasks: dict[str, list[Task]], found: dict[Path, Figures], most: int) -> Any:
    """{part: Results} of tasks that came seed by seed; what is known of an instance is known to every part."""
    runs: dict[str, dict[str, list[list[Figures]]]] = {}
    for key, part in parts.items():
        runs[key], count = {}, len(part.instances)
        for name in part.searches:
            figures = [found[task.path] for task in tasks[key] if task.name == name]
            runs[key][name] = [figures[i::count] for i in range(count)]
    return {
        key: Results(part, runs[key], best_known(part.instances, [
            each for other in parts if parts[other].instances is part.instances for each in runs[other].values()
        ]), most)
        for key, part in parts.items()
    }  # fmt: skip


def write(out: Path, splits: dict[str, Results], summary: Figures) -> None:
    """Every file of the comparison."""
    texts = {
        "summary.json": to_json_text(summary),
        "table.md": table(summary),
        "instances.md": instances_table(splits),
        "runs.csv": runs_csv(splits),
    }
    write_files(out, {name: content.encode() for name, content in texts.items()})
    draw(summary, out / "curves.png")
    draw_profile(summary, out / "profile.png")
    print("\n".join(overview(summary)))
    print(f"written: {out / 'table.md'} and others beside it")


def parts_of(options: dict[str, Any], out: Path) -> dict[str, Part]:
    """The splits, and the ablations of the first of them."""
    names = [name.strip() for name in str(options["methods"]).split(",")]
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise InputError(f"rl_comparison: methods: {unknown[0]!r} is not one of {', '.join(METHODS)}")
    methods = tuple(name for name in METHODS if name in names)
    count = QUICK["instances"] if yes_or_no("rl_comparison", "quick", options["quick"]) else None
    certified = {split: suite.certified(instances)[:count] for split, instances in SPLITS.items()}
    policies = policies_of("policies", str(options["policies"]), out)
    if len(policies) > options["seeds"]:
        print(f"only {options['seeds']} of the {len(policies)} training seeds are used; give seeds={len(policies)}")
    ablations = ablations_of(str(options["ablations"] or ""), certified["test"], out)
    splits = {
        split: Part(entries, policies[: options["seeds"]], methods_on(split, methods), suite.spec())
        for split, entries in certified.items()
    }
    return splits | {f"ablation-{name}": part for name, part in ablations.items()}


def compare(options: dict[str, Any]) -> int:
    """Run what is missing and write the files; the exit status."""
    for key in ("seeds", "processes", "most"):
        options[key] = positive_int("rl_comparison", key, options[key])
    if options["quick"] is True:
        options |= {key: min(options[key], QUICK[key]) for key in ("seeds", "most")}
    if options["most"] < BUDGETS[0]:
        raise InputError(f"rl_comparison: most={options['most']} must be at least {BUDGETS[0]}, the smallest budget")
    out = Path(str(options["out"]))
    parts = parts_of(options, out)
    tasks: dict[str, list[Task]] = {key: [] for key in parts}
    ordered: list[Task] = []  # seed by seed, so that early figures are of all methods
    for seed in range(options["seeds"]):
        for key, part in parts.items():
            tasks[key] += (new := tasks_of(part, out / "runs" / key, seed, options["most"]))
            ordered += new
    try:
        found = run_all(ordered, options["processes"])
    except KeyboardInterrupt:
        print("interrupted; the same command goes on with the runs that are missing", file=sys.stderr)
        return 130
    results = results_of(parts, tasks, found, options["most"])
    splits = {key: results[key] for key in SPLITS}
    ablations = {key.removeprefix("ablation-"): each for key, each in results.items() if key not in SPLITS}
    write(out, splits, summarise(splits, ablations, parts["test"].policies))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    return configs.run_with_options(compare, dict(OPTIONS), sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
