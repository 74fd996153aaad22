"""What training achieves while things fail: `python -m haap_rl.faults.simulate plan=FILE faults=NAME policy=[...]`.

An event simulation of one trace takes milliseconds; all policies meet the same traces. `markov.py` has the exact
expectation for few components. The command prints a table of the policies; with out=DIR it writes every figure
(simulate.json, runs.csv) and draws the first trace (timeline.png).

What counts: when training goes on in a new set of components down, a dead time comes first: restart_s if it was
stopped before, else failure_s if something failed, else return_s. A change within it begins the new state's own dead
time; one that makes no difference to the plan, as of an idle device, is not noticed. Every checkpoint_interval_s of
training are followed by checkpoint_s of writing; a stop loses what was trained since the last complete checkpoint, or
since the restart. An interval of 0 means continuous checkpoints, which lose and cost nothing; infinity means none. A
dead time interrupts a checkpoint that is being written, which then goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from haap_rl import configs
from haap_rl.faults.response import Response, Transitions
from haap_rl.problem.errors import InputError, check_keys, positive_float, positive_int, shown

if TYPE_CHECKING:
    from haap_rl.faults.model import Component, FailureModel
    from haap_rl.faults.traces import Trace
    from haap_rl.problem.cluster import Cluster
    from haap_rl.problem.plan import Plan, Problem

KEYS = ("model", "cluster", "problem", "estimator", "faults", "plan", "policy", "trace", "hours", "traces", "start")
STARTS = ("all_up", "stationary")
DRAWN_HOURS, MOST_HOURS = 720.0, 1e6
MOST_TRACES = 10_000
RUNNING, DEGRADED, TRANSITION, STOPPED = "running", "degraded", "transition", "stopped"


class Reactions(Protocol):
    """One plan under one policy on one cluster; `down` holds indices into the trace's components.

    The same object comes back for two sets between which there is no difference, to the plan and its policy.
    """

    transitions: Transitions

    def __call__(self, down: frozenset[int]) -> Response: ...


class Seconds(NamedTuple):
    """The horizon by what it went into; they add up to it."""

    trained: float = 0.0  # training that counts
    transitions: float = 0.0  # dead times after failures that are survived, and after returns
    restarts: float = 0.0  # dead times after having been stopped
    checkpoints: float = 0.0  # writing them
    lost: float = 0.0  # training that a stop undid
    stopped: float = 0.0  # waiting for repair


class Span(NamedTuple):
    """What was going on between two times: `kind`, one of the four.

    tokens_per_s: while it trains, checkpoints not counted. tokens: made in it, less those that its beginning lost, so
    that all spans together have the tokens that count.
    """

    kind: str
    start_s: float
    end_s: float
    num_down: int
    tokens_per_s: float
    tokens: float


class Run(NamedTuple):
    """What one trace brought under one policy.

    tokens: those that count. failure_free_tokens_per_s: with nothing down, checkpoints not counted. attention_lost,
    samples_lost: shares, of all attention gradients and of all samples, weighted by tokens.
    """

    tokens: float
    horizon_s: float
    failure_free_tokens_per_s: float
    seconds: Seconds
    num_failures: int
    num_stops: int
    num_out_of_memory: int
    attention_lost: float
    samples_lost: float
    spans: tuple[Span, ...]

    @property
    def tokens_per_s(self) -> float:
        """Goodput."""
        return self.tokens / self.horizon_s

    @property
    def relative(self) -> float:
        """Goodput as a share of the failure-free throughput."""
        return self.tokens_per_s / self.failure_free_tokens_per_s if self.failure_free_tokens_per_s else 0.0

    @property
    def effective_training_time_ratio(self) -> float:
        """Share of the time that is training that counts, however fast (ETTR of arXiv 2410.21680)."""
        return self.seconds.trained / self.horizon_s

    @property
    def mean_down(self) -> float:
        """Components down on average."""
        return sum(span.num_down * (span.end_s - span.start_s) for span in self.spans) / self.horizon_s

    @property
    def some_down(self) -> float:
        """Share of the time in which some component is down."""
        return sum(span.end_s - span.start_s for span in self.spans if span.num_down) / self.horizon_s


@dataclass(slots=True)
class _Made:
    """Training of one fate: its seconds, its tokens, and what was lost on the way, in tokens."""

    seconds: float = 0.0
    tokens: float = 0.0
    attention_lost: float = 0.0
    samples_dropped: float = 0.0

    def train(self, seconds: float, response: Response) -> None:
        tokens = seconds * response.tokens_per_s
        self.seconds += seconds
        self.tokens += tokens
        self.attention_lost += tokens * response.attention_lost
        if response.samples_lost < 1:  # else there are no tokens either
            self.samples_dropped += tokens * response.samples_lost / (1 - response.samples_lost)

    def add(self, other: _Made) -> None:
        self.seconds += other.seconds
        self.tokens += other.tokens
        self.attention_lost += other.attention_lost
        self.samples_dropped += other.samples_dropped


class _Training:
    """Training between stops, checkpoint after checkpoint."""

    def __init__(self, transitions: Transitions) -> None:
        self.interval_s, self.checkpoint_s = transitions.checkpoint_interval_s, transitions.checkpoint_s
        self.kept, self.pending, self.lost = _Made(), _Made(), _Made()
        self.checkpoints_s = 0.0
        self.to_train_s, self.to_write_s = self.interval_s, self.checkpoint_s

    def goes_on(self, seconds: float, response: Response) -> None:
        """Train and write checkpoints for so long."""
        if self.interval_s == 0:
            self.kept.train(seconds, response)
            return
        while seconds > 0:
            if self.to_train_s > 0:
                step = min(seconds, self.to_train_s)
                self.pending.train(step, response)
                self.to_train_s -= step
            else:
                step = min(seconds, self.to_write_s)
                self.checkpoints_s += step
                self.to_write_s -= step
            seconds -= step
            if self.to_train_s == 0 and self.to_write_s == 0:
                self.keeps()
                seconds -= self._whole_cycles(seconds, response)

    def _whole_cycles(self, seconds: float, response: Response) -> float:
        """Do as many whole cycles at once as fit into `seconds`, less one; the seconds they take."""
        cycle_s = self.interval_s + self.checkpoint_s
        cycles = max(0.0, seconds // cycle_s - 1)
        if cycles:
            self.kept.train(cycles * self.interval_s, response)
            self.checkpoints_s += cycles * self.checkpoint_s
        return cycles * cycle_s

    def keeps(self) -> None:
        """Keep what was trained since the last checkpoint."""
        self.kept.add(self.pending)
        self._starts_anew()

    def stops(self) -> None:
        """Lose it."""
        self.lost.add(self.pending)
        self._starts_anew()

    def _starts_anew(self) -> None:
        self.pending = _Made()
        self.to_train_s, self.to_write_s = self.interval_s, self.checkpoint_s


def simulate(trace: Trace, reactions: Reactions) -> Run:
    """What training achieves on one trace. What the last checkpoint does not hold at its end counts."""
    transitions = reactions.transitions
    training = _Training(transitions)
    healthy = reactions(frozenset())
    down = trace.down_at_start
    response = reactions(down)
    dead_s, restarting = 0.0, False  # it has been training before the trace begins, if it runs
    seconds = {"transitions": 0.0, "restarts": 0.0, "stopped": 0.0}
    spans: list[Span] = []
    num_stops = num_out_of_memory = 0
    now_s = told = 0.0

    def tell(kind: str, start_s: float, end_s: float, tokens_per_s: float = 0.0) -> None:
        nonlocal told
        tokens = training.kept.tokens + training.pending.tokens
        spans.append(Span(kind, start_s, end_s, len(down), tokens_per_s, tokens - told))
        told = tokens

    def until(end_s: float) -> None:
        """Let what is going on go on."""
        length_s = end_s - now_s
        if not response.runs:
            seconds["stopped"] += length_s
            tell(STOPPED, now_s, end_s)
            return
        idle_s = min(dead_s, length_s)
        if idle_s:
            seconds["restarts" if restarting else "transitions"] += idle_s
            tell(TRANSITION, now_s, now_s + idle_s)
        if length_s > idle_s:
            training.goes_on(length_s - idle_s, response)
            tell(RUNNING if response == healthy else DEGRADED, now_s + idle_s, end_s, response.tokens_per_s)

    for time_s, changes in groupby(trace.changes, key=lambda change: change.time_s):
        until(time_s)
        passed_s, now_s = time_s - now_s, time_s
        failed = returned = frozenset[int]()
        for change in changes:
            if change.is_failure:
                failed |= {change.component}
            else:
                returned |= {change.component}
        down = (down - returned) | failed
        before, response = response, reactions(down)
        if response is before:
            dead_s = max(0.0, dead_s - passed_s)
            continue
        if not response.runs:
            num_stops += before.runs
            num_out_of_memory += response.out_of_memory and not before.out_of_memory
            training.stops()
            continue
        restarting = not before.runs
        dead_s = transitions.restart_s if restarting else transitions.failure_s if failed else transitions.return_s
    until(trace.horizon_s)
    training.keeps()
    kept = training.kept
    return Run(
        tokens=kept.tokens,
        horizon_s=trace.horizon_s,
        failure_free_tokens_per_s=healthy.tokens_per_s,
        seconds=Seconds(
            trained=kept.seconds, checkpoints=training.checkpoints_s, lost=training.lost.seconds, **seconds
        ),
        num_failures=trace.num_failures,
        num_stops=num_stops,
        num_out_of_memory=num_out_of_memory,
        attention_lost=kept.attention_lost / kept.tokens if kept.tokens else 0.0,
        samples_lost=kept.samples_dropped / (kept.tokens + kept.samples_dropped) if kept.tokens else 0.0,
        spans=tuple(spans),
    )


# ------------------------------------------------------------------------------------------- the command
def command(config: dict[str, Any], _: Path) -> int:
    """Simulate the plan that `config` names under each policy and print a table; the exit status."""
    from rich.console import Console

    from haap_rl.faults.model import failure_model_from_config, mean_down, probability_any_down
    from haap_rl.problem.presets import problem_from_config
    from haap_rl.report.simulation import picture, runs_csv, simulation_table, summary, traces_line
    from haap_rl.tracking.record import check_writable, to_json_text, write_files

    check_keys("configuration", config, (*KEYS, "seed", "out"))
    policies = policies_of(config["policy"])
    failures = failure_model_from_config(config["faults"])
    problem = problem_from_config(config["model"], config["cluster"], config["problem"])
    plan = problem.load_plan(str(config["plan"]))
    traces = traces_of(config, failures, problem.cluster)
    components = traces[0].components
    if config["out"] is not None:
        check_writable(Path(str(config["out"])))
    reactions = reactions_of(config, problem, plan, policies, components)
    runs = {policy: [simulate(trace, react) for trace in traces] for policy, react in reactions.items()}

    console = Console(width=None if sys.stdout.isatty() else 150)
    hours = traces[0].horizon_s / 3600
    faults = failures.name if config["trace"] is None else Path(str(config["trace"])).name
    title = f"{problem.model.name} on {problem.cluster.name}, faults {faults}: {len(traces)} x {hours:g} h"
    console.print(title, style="bold", highlight=False, soft_wrap=True)
    console.print(simulation_table(runs))
    down, some_down = mean_down(components), probability_any_down(components)
    said = traces_line(len(components), next(iter(runs.values())))
    if config["trace"] is None:
        said += f"; in the long run {down:.2f} and {some_down:.1%}"
    console.print(said, highlight=False, soft_wrap=True)
    if config["out"] is not None:
        result = {
            "model": problem.model.name,
            "cluster": problem.cluster.name,
            "faults": config["faults"],
            "trace": config["trace"],
            "start": config["start"] if config["trace"] is None else None,
            "seed": config["seed"],
            "hours": hours,
            "traces": len(traces),
            "components": len(components),
            "long_run_down": down,
            "long_run_some_down": some_down,
            "policies": {policy: summary(some) for policy, some in runs.items()},
        }
        contents = {
            "simulate.json": to_json_text(result).encode(),
            "runs.csv": runs_csv(runs).encode(),
            "timeline.png": picture(title, {policy: some[0] for policy, some in runs.items()}),
        }
        write_files(Path(str(config["out"])), contents)
        console.print(f"written: {config['out']}", highlight=False, soft_wrap=True)
    return 0


def reactions_of(
    config: Mapping[str, Any], problem: Problem, plan: Plan, policies: Sequence[str], components: Sequence[Component]
) -> dict[str, Reactions]:
    """How `plan` goes on under each policy with the options in config["faults"]; one estimator prices them all.

    Raises InputError for a policy that is unknown, or that the plan cannot use.
    """
    from haap_rl.cost.profile_files import profile_from_config
    from haap_rl.faults.expected import with_best_interval
    from haap_rl.faults.reactions import Reactions as PolicyReactions
    from haap_rl.faults.settings import faults_from_config

    cached, profile = profile_from_config(config["estimator"])
    faults = faults_from_config(config["faults"])
    chosen = [faults.with_policy(policy).policy for policy in policies]
    for policy in chosen:
        policy.check(plan)
    estimator = faults.estimator(problem, cached, profile)
    return {policy.name: with_best_interval(PolicyReactions(estimator, plan, policy, components)) for policy in chosen}


def traces_of(config: Mapping[str, Any], failures: FailureModel, cluster: Cluster) -> list[Trace]:
    """The trace of the file, or as many as asked for, drawn from the hazards. Raises InputError."""
    import numpy as np

    from haap_rl.faults.traces import draw, read_trace

    hours, seed, start = config["hours"], config["seed"], config["start"]
    if hours is not None and positive_float("simulate", "hours", hours) > MOST_HOURS:
        raise InputError(f"simulate: hours={shown(hours)} must be at most {MOST_HOURS:g}")
    if config["trace"] is not None:
        return [read_trace(config["trace"], cluster, None if hours is None else 3600.0 * hours)]
    count = positive_int("simulate", "traces", config["traces"])
    if count > MOST_TRACES:
        raise InputError(f"simulate: traces={count} must be at most {MOST_TRACES}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise InputError(f"simulate: seed={shown(seed)} must be a whole number from 0; give for example seed=0")
    if start not in STARTS:
        raise InputError(f"simulate: start={shown(start)} is not known; choose one of {', '.join(STARTS)}")
    horizon_s = 3600.0 * (DRAWN_HOURS if hours is None else hours)
    components = failures.components(cluster)
    each = np.random.default_rng(seed).spawn(count)
    return [draw(components, horizon_s, rng, start == "stationary") for rng in each]


def policies_of(value: object) -> list[str]:
    """The policies named, each once. Raises InputError."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise InputError(f"simulate: policy={shown(value)} must be a name or a list, as policy=[restart,mecefo]")
    if len(set(names)) < len(names):
        raise InputError(f"simulate: policy={shown(value)} must name each policy once")
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status (see `haap_rl.configs`)."""
    return configs.run("simulate", command, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
