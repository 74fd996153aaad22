"""Price a plan you already have: `python -m haap_rl.estimate plan=FILE`, or degrees of a uniform plan.

Prints time and memory by part, the bottleneck, the gap to the proven bound, and which single change would help most.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from haap_rl import configs
from haap_rl.cost.estimator import Estimator, fingerprint
from haap_rl.problem.errors import InputError, check_keys
from haap_rl.problem.plan import RECOMPUTE_MODES, Plan, Problem, uniform_plan
from haap_rl.problem.presets import problem_from_config

if TYPE_CHECKING:
    from haap_rl.space.options import SpaceSpec

DEGREES = ("tp", "pp", "dp", "microbatch")
SETTINGS = ("model", "cluster", "space", "problem", "estimator")
KEYS = (*SETTINGS, "plan", *DEGREES, "recompute", "zero_stage", "sequence_parallel", "out")


class Advice(NamedTuple):
    """The single change that helps most; iteration_s None where none helps or the plan is outside the space."""

    text: str
    iteration_s: float | None


def estimate(config: dict[str, Any], _: Path) -> int:
    """Price the plan that `config` names and print what it costs; the exit status.

    Raises InputError where the plan cannot be read or is not legal; a plan that does not fit is priced all the same.
    """
    from rich.console import Console

    from haap_rl.cost.profile_files import profile_from_config
    from haap_rl.report.tables import memory_table, plan_lines, plan_table, profile_lines, time_table
    from haap_rl.space.bound import lower_bound
    from haap_rl.space.options import SpaceSpec
    from haap_rl.tracking.record import profile_facts, to_json_text, write_files

    check_keys("configuration", config, KEYS)
    problem = problem_from_config(config["model"], config["cluster"], config["problem"])
    spec = SpaceSpec.from_config(config["space"])
    plan = plan_from_config(problem, config)
    cached, profile = profile_from_config(config["estimator"])
    estimator = Estimator(problem, cached, profile=profile)
    cost, gaps = estimator(plan), estimator.gaps(plan)
    bound = lower_bound(problem, spec, profile)
    advice = best_single_change(problem, spec, estimator, plan)

    console = Console(width=None if sys.stdout.isatty() else 120)
    for table in (plan_table(problem, plan, cost), time_table(cost), memory_table(cost)):
        console.print(table)
    lines = [*plan_lines(cost, bound.seconds), advice.text, *profile_lines(profile, gaps)]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    if config["out"] is not None:
        result = {
            "model": problem.model.name,
            "cluster": problem.cluster.name,
            "iteration_time_s": cost.iteration_s,
            "iteration_time_low_s": cost.interval_s[0] if cost.interval_s else None,
            "iteration_time_high_s": cost.interval_s[1] if cost.interval_s else None,
            "tokens_per_s": cost.tokens_per_s,
            "fits": cost.fits,
            "bytes_missing": cost.bytes_missing,
            "bubble": cost.bubble,
            "bottleneck": list(cost.bottleneck),
            "lower_bound_s": bound.seconds if bound.num_microbatches is not None else None,
            "best_single_change": advice.text,
            "best_single_change_iteration_time_s": advice.iteration_s,
            "space": config["space"],
            "profile": profile_facts(profile, gaps),
            "estimator_fingerprint": fingerprint(profile=profile),
        }
        out = Path(str(config["out"]))
        texts = {"plan.json": problem.plan_to_json(plan), "estimate.json": result}
        write_files(out, {name: to_json_text(data).encode() for name, data in texts.items()})
        console.print(f"written: {out}", highlight=False, soft_wrap=True)
    return 0


def plan_from_config(problem: Problem, config: dict[str, Any]) -> Plan:
    """The plan of the file or of the degrees, whichever is given. Raises InputError if it is both or neither."""
    degrees = {key: config[key] for key in DEGREES}
    if config["plan"] is not None:
        for key, value in degrees.items():
            if value is not None:
                raise InputError(f"estimate: {key}={value!r} beside plan={config['plan']!r}; give one or the other")
        return problem.load_plan(str(config["plan"]))
    for key, value in degrees.items():
        if value is None:
            raise InputError(f"estimate: {key} is not given; give plan=FILE, or all of tp= pp= dp= microbatch=")
    if config["recompute"] not in RECOMPUTE_MODES:
        raise InputError(f"estimate: recompute={config['recompute']!r} is not one of {', '.join(RECOMPUTE_MODES)}")
    if not isinstance(config["sequence_parallel"], bool):
        raise InputError(f"estimate: sequence_parallel={config['sequence_parallel']!r} must be true or false")
    tp, pp, dp, microbatch = degrees.values()
    return uniform_plan(
        problem, tp, pp, dp, microbatch, config["recompute"], config["zero_stage"], config["sequence_parallel"]
    )


def best_single_change(problem: Problem, spec: SpaceSpec, estimator: Estimator, plan: Plan) -> Advice:
    """The best of all legal moves of the space on this plan, where it is a plan of the space."""
    from haap_rl.space import moves
    from haap_rl.space.space import Space
    from haap_rl.space.target import home, sayable

    try:
        space = Space(problem, home(problem, spec, plan), estimator)
        genome = space.genome(plan)
    except InputError as error:
        return Advice(f"no single change tried: {error}", None)
    before = estimator(plan)
    changes = [(move, moves.apply(space, genome, move)) for move in moves.edits(space)]
    plans = [(space.plan(changed), move) for move, changed in changes if changed is not None]
    says = sayable(problem, spec, estimator)
    priced = [(estimator(other), move) for other, move in plans if says is None or says(other)]
    if not priced or min(priced, key=lambda item: item[0].rank)[0].rank >= before.rank:
        return Advice("no single change of the space helps", None)
    after, move = min(priced, key=lambda item: item[0].rank)
    what = moves.describe(space, genome, move)
    gain = f"{after.iteration_s:.3f} s, {1 - after.iteration_s / before.iteration_s:.1%} less"
    if not before.fits:
        gain = f"it then {'fits' if after.fits else 'misses less memory'}, {after.iteration_s:.3f} s"
    return Advice(f"the single change that helps most: {what} ({gain})", after.iteration_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status (see `haap_rl.configs`)."""
    return configs.run("estimate", estimate, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
