"""Write a plan for a trainer: `python -m haap_rl.export plan=FILE to=megatron|torchtitan|flagscale|ranks out=DIR`.

Prints whether the files are exact, or a table of what they cannot say and what that costs. Status 2, and nothing
written, where the trainer cannot be told a plan near it that fits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from haap_rl import configs
from haap_rl.cost.estimator import Estimator, fingerprint
from haap_rl.export.base import Export
from haap_rl.export.targets import export_plan
from haap_rl.problem.errors import InputError, check_keys, shown
from haap_rl.problem.plan import Problem
from haap_rl.problem.presets import problem_from_config

KEYS = ("model", "cluster", "problem", "estimator", "plan", "to", "out")
PLAN, FACTS = "plan.json", "export.json"


def write(config: dict[str, Any], directory: Path) -> int:
    """Export the plan that `config` names, print what is lost, write the files; the exit status.

    directory: where to write in a sweep, in which `out` names none.

    Raises InputError where the plan cannot be read, is not legal, or cannot be written for the target.
    """
    from rich.console import Console

    from haap_rl.cost.profile_files import profile_from_config
    from haap_rl.report.tables import loss_table
    from haap_rl.tracking.record import check_writable, to_json_text, write_files

    check_keys("configuration", config, KEYS)
    problem = problem_from_config(config["model"], config["cluster"], config["problem"])
    plan = problem.load_plan(str(config["plan"]))
    cached, profile = profile_from_config(config["estimator"])
    exported = export_plan(problem, plan, config["to"], Estimator(problem, cached, profile=profile))
    out = config["out"]
    if out is None and directory.resolve() != Path.cwd():
        out = str(directory)
    if out is not None:
        if not isinstance(out, str) or not out:
            raise InputError(f"export: out={shown(out)} must be the name of a directory, or null to write nothing")
        check_writable(Path(out))

    console = Console(width=None if sys.stdout.isatty() else 120)
    if not exported.exact:
        console.print(loss_table(exported.target, exported.losses))
    for line in lines(exported):
        console.print(line, highlight=False, soft_wrap=True)
    if out is not None:
        facts = {**to_json(problem, exported), "estimator_fingerprint": fingerprint(profile=profile)}
        texts = {
            **exported.files,
            PLAN: to_json_text(problem.plan_to_json(exported.written)),
            FACTS: to_json_text(facts),
        }
        write_files(Path(out), {name: text.encode() for name, text in texts.items()})
        console.print(f"written: {out}: {', '.join(texts)}", highlight=False, soft_wrap=True)
    return 0


def lines(exported: Export) -> list[str]:
    """Whether the files are exact, and what the losses cost."""
    if exported.exact:
        said = [f"{exported.target}: exact, {exported.plan_s:.3f} s per iteration"]
        return said if exported.fits else [*said, "the plan does not fit in memory, and as written neither"]
    slower = exported.iteration_s / exported.plan_s - 1
    return [
        f"{exported.target}: not exact; as written {exported.iteration_s:.3f} s per iteration, the plan "
        f"{exported.plan_s:.3f} s ({slower:+.1%}); it fits"
    ]


def to_json(problem: Problem, exported: Export) -> dict[str, Any]:
    """The figures of an export as plain JSON data."""
    return {
        "target": exported.target,
        "model": problem.model.name,
        "cluster": problem.cluster.name,
        "exact": exported.exact,
        "plan_iteration_time_s": exported.plan_s,
        "iteration_time_s": exported.iteration_s,
        "fits": exported.fits,
        "losses": [
            {"field": loss.field, "plan": loss.plan_value, "written": loss.written_value} for loss in exported.losses
        ],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status (see `haap_rl.configs`)."""
    return configs.run("export", write, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
