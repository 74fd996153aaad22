"""What training achieves while things fail: `python -m haap_rl.faults.simulate plan=FILE faults=NAME policy=[...]`.

An event simulation of one trace takes milliseconds; all policies meet the same traces. `markov.py` has the exact
expectation for few components.

What counts: when training goes on in a new set of components down, a dead time comes first: restart_s if it was
stopped before, else failure_s if something failed, else return_s. A change within it begins the new state's own dead
time. Every checkpoint_interval_s of training are followed by checkpoint_s of writing; a stop loses what was trained
since the last complete checkpoint, or since the restart. An interval of 0 means continuous checkpoints, which lose
and cost nothing; infinity means none. A dead time interrupts a checkpoint that is being written, which then goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Protocol

from haap_rl.faults.response import Response, Transitions
from haap_rl.faults.traces import Trace

RUNNING, DEGRADED, TRANSITION, STOPPED = "running", "degraded", "transition", "stopped"


class Reactions(Protocol):
    """One plan under one policy on one cluster; `down` holds indices into the trace's components."""

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
    """What was going on between two times; tokens_per_s while it trains, checkpoints not counted."""

    kind: str
    start_s: float
    end_s: float
    num_down: int
    tokens_per_s: float


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
    now_s = 0.0

    def until(end_s: float) -> None:
        """Let what is going on go on."""
        length_s = end_s - now_s
        if not response.runs:
            seconds["stopped"] += length_s
            spans.append(Span(STOPPED, now_s, end_s, len(down), 0.0))
            return
        idle_s = min(dead_s, length_s)
        if idle_s:
            seconds["restarts" if restarting else "transitions"] += idle_s
            spans.append(Span(TRANSITION, now_s, now_s + idle_s, len(down), 0.0))
        if length_s > idle_s:
            training.goes_on(length_s - idle_s, response)
            kind = RUNNING if response == healthy else DEGRADED
            spans.append(Span(kind, now_s + idle_s, end_s, len(down), response.tokens_per_s))

    for time_s, changes in groupby(trace.changes, key=lambda change: change.time_s):
        until(time_s)
        now_s = time_s
        failed = returned = frozenset[int]()
        for change in changes:
            if change.is_failure:
                failed |= {change.component}
            else:
                returned |= {change.component}
        down = (down - returned) | failed
        before, response = response, reactions(down)
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
