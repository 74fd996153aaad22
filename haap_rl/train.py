"""The entry point: `python -m haap_rl.train +search=ppo` -> problem -> search -> record and table.

Reading order of the package: this file, problem/plan.py, cost/estimator.py, search/base.py, one searcher.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from haap_rl import configs
from haap_rl.problem.errors import InputError, check_keys
from haap_rl.problem.presets import names, preset

if TYPE_CHECKING:
    from rich.console import Console

    from haap_rl.cost.profiles import Profile
    from haap_rl.faults.objective import ExpectedThroughput
    from haap_rl.problem.plan import Problem
    from haap_rl.search.base import SearchResult

KEYS = (
    "model",
    "cluster",
    "budget",
    "space",
    "estimator",
    "objective",
    "faults",
    "search",
    "problem",
    "tracking",
    "certificate",
    "seed",
    "out",
)


def train(config: dict[str, Any], directory: Path) -> int:
    """Run the search that `config` describes, write its record and report into `directory`, print the plan; the status.

    0 a plan was found, 1 none that fits was tried, 130 interrupted (with what was found so far recorded).
    Raises InputError for a bad configuration and where no plan can fit; nothing is written then.
    """
    from rich.console import Console

    from haap_rl.cost.profile_files import profile_from_config
    from haap_rl.problem.presets import problem_from_config, resolved
    from haap_rl.report.progress import SearchProgress
    from haap_rl.report.tables import plan_table, summary_lines
    from haap_rl.search.base import Budget, Objective, load_searcher, run_search
    from haap_rl.search.certificate import load_certificate
    from haap_rl.space.bound import lower_bound
    from haap_rl.space.options import SpaceSpec
    from haap_rl.tracking import tracker_from_config, write_record

    check_keys("configuration", config, KEYS, ("experiment",))
    config = {key: value for key, value in config.items() if key != "experiment"}  # what else its table holds
    check_keys("budget", config["budget"], ("evaluations", "seconds"))
    # what a file says goes into the record, not its path: the file may move
    model, cluster = resolved(config["model"], config["cluster"])
    config = {**config, "model": dict(model), "cluster": dict(cluster)}
    problem = problem_from_config(config["model"], config["cluster"], config["problem"])
    spec = SpaceSpec.from_config(config["space"])
    budget = Budget(**config["budget"])
    seed = _seed(config["seed"])
    cached, profile = profile_from_config(config["estimator"])
    scorer = _scorer(config["objective"], config["faults"])
    under_failures = None if scorer else _under_failures(problem, config["faults"], cached, profile)
    parameters = dict(config["search"])
    searcher = load_searcher(parameters.pop("name"), parameters)
    certificate = None
    if config["certificate"] is not None:
        certificate = load_certificate(config["certificate"], problem, spec, remake_command(config), profile)
    proven_s = 0.0 if certificate is None else certificate.lower_bound_s
    tracker = tracker_from_config(config, directory)

    console = Console(width=None if sys.stdout.isatty() else 120)
    with tracker:
        with SearchProgress(console, config["search"]["name"], budget.evaluations) as progress:

            def on_progress(objective: Objective) -> None:
                progress(objective)
                tracker.progress(objective)

            result = run_search(
                searcher,
                problem,
                budget,
                seed,
                spec,
                on_progress,
                cached,
                tracker.log,
                tracker.start,
                profile,
                proven_s,
                scorer,
            )
        if result.stopped_by == "infeasible":
            raise InputError(result.reason)
        if certificate is not None:
            result = certificate.beside(result, lower_bound(problem, spec, profile).seconds)
        if under_failures is not None:
            result = _with_failures(result, under_failures)
        write_record(directory, config, problem, result)
        tracker.finish(problem, result)
    if result.plan is not None and result.estimate is not None:
        console.print(plan_table(problem, result.plan, result.estimate))
    for line in summary_lines(result):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"record: {directory}", highlight=False, soft_wrap=True)
    interrupted = not _reported(directory, console)
    if interrupted or result.stopped_by == "interrupted":
        return 130
    return 0 if result.plan is not None else 1


def _reported(directory: Path, console: Console) -> bool:
    """Write the report beside the record and say so; False if Ctrl-C ended that, which costs nothing else."""
    from haap_rl.report.page import write_report

    try:
        console.print(f"report: {write_report(directory)}", highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        command = shlex.join(["python", "-m", "haap_rl.report", str(directory)])
        console.print(f"report: interrupted; {command} writes it", highlight=False, soft_wrap=True)
        return False
    return True


def remake_command(config: Mapping[str, Any]) -> str:
    """The command that makes the certificate of a run's problem, space and profile."""
    from haap_rl.search.certificate import ABLATIONS

    return configs.command_line(
        {
            "search": preset("search", "exact"),
            **{group: config[group] for group in ("model", "cluster", "problem")},
            "space": {**config["space"], **ABLATIONS},
            "estimator": {**config["estimator"], "cached": True},
        }
    )


def _scorer(objective: Mapping[str, Any], faults: Mapping[str, Any]) -> ExpectedThroughput | None:
    """What plans are ranked by; None: their iteration time. Raises InputError."""
    check_keys("objective", objective, ("name",))
    known = names("objective")
    if objective["name"] not in known:
        raise InputError(f"objective={objective['name']!r} is not known; choose one of {', '.join(known)}")
    if objective["name"] == "iteration_time":
        return None
    from haap_rl.faults.objective import ExpectedThroughput
    from haap_rl.faults.settings import faults_from_config

    if not faults.get("hazards"):
        raise InputError(
            f"objective=expected_throughput: faults={faults.get('name')} never fails; give one of "
            f"{', '.join(f'faults={name}' for name in names('faults') if name != 'none')}"
        )
    return ExpectedThroughput(faults_from_config(faults))


def _under_failures(
    problem: Problem, faults: Mapping[str, Any], cached: bool, profile: Profile | None
) -> ExpectedThroughput | None:
    """What says how a plan does that was found without a thought of failures; None where there are none."""
    if not faults.get("hazards"):
        return None
    from haap_rl.faults.objective import ExpectedThroughput
    from haap_rl.faults.settings import faults_from_config

    scorer = ExpectedThroughput(faults_from_config(faults))
    scorer.estimator(problem, cached, profile)
    return scorer


def _with_failures(result: SearchResult, scorer: ExpectedThroughput) -> SearchResult:
    """The result with what its plan is worth under failures, or why that is not known."""
    if result.plan is None:
        return result
    try:
        facts, lines = scorer.facts(result.plan), scorer.lines(result.plan)
    except InputError as error:
        return replace(result, notes=(*result.notes, str(error)))
    return replace(result, notes=(*result.notes, *lines), scored=facts)


def _seed(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"seed={value!r} must be a whole number of at least 0; give for example seed=0")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status (see `haap_rl.configs`)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not configs.names_search(arguments):
        print("haap_rl: no search was named; choose one:", file=sys.stderr)
        for name in names("search"):
            print(f"  python -m haap_rl.train +search={name} {' '.join(arguments)}".rstrip(), file=sys.stderr)
        return 2
    return configs.run("train", train, arguments)


if __name__ == "__main__":
    sys.exit(main())
