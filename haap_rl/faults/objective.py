"""Expected throughput as what searchers rank plans by, and what it is traded against.

    python -m haap_rl.train +search=ga objective=expected_throughput faults=mecefo_high faults.policy=mecefo

The score is the seconds that an iteration takes on average over all failures, transitions and stops, which is never
less than the iteration time of the healthy plan: bounds on that hold for it too.
"""

from __future__ import annotations

from typing import Any

from haap_rl.cost.profiles import Profile
from haap_rl.faults.cost import FaultEstimator
from haap_rl.faults.expected import Counts, Expected, expected_throughput
from haap_rl.faults.model import Component
from haap_rl.faults.policy import Policy, Restart, StagePolicy
from haap_rl.faults.reactions import Reactions
from haap_rl.faults.settings import Faults
from haap_rl.faults.tradeoff import FRONT, Tradeoff, front_csv
from haap_rl.problem.errors import InputError, shown
from haap_rl.problem.plan import Plan, Problem

LEAST_SHARE = 1e-6  # of the failure-free throughput that a plan which never runs is taken to have, to stay finite


class ExpectedThroughput:
    """The scorer (`search.base.Scorer`) of one search. Raises InputError for failures that are a trace.

    front   (trade-off, plan) of the plans scored that no other one beats in all three figures, in the order found
    """

    def __init__(self, faults: Faults) -> None:
        if faults.model.trace is not None:
            raise InputError(
                f"faults: trace={shown(faults.model.trace)} is one course of events, of which there is no expectation; "
                "use faults.trace=null, or python -m haap_rl.faults.simulate for a plan"
            )
        self.faults = faults
        self.front: list[tuple[Tradeoff, Plan]] = []
        self._estimator: FaultEstimator | None = None
        self._components: tuple[Component, ...] = ()
        self._counts: Counts | None = None
        self._restart = Restart(faults.constants, faults.options)
        self._restart_counts: Counts | None = None

    def estimator(self, problem: Problem, cached: bool, profile: Profile | None) -> FaultEstimator:
        """The estimator of the search. Raises InputError if the failure model does not suit the cluster."""
        self._components = self.faults.model.components(problem.cluster)
        self._estimator = self.faults.estimator(problem, cached, profile)
        if isinstance(self.faults.policy, StagePolicy):
            self._counts = Counts(self._estimator, self.faults.policy, self.faults.least_probability)
        self._restart_counts = Counts(self._estimator, self._restart, self.faults.least_probability)
        return self._estimator

    def policy(self, plan: Plan) -> Policy:
        """The policy that a plan is priced under; one that the chosen policy cannot be used with is restarted."""
        try:
            self.faults.policy.check(plan)
        except InputError:
            return self._restart
        return self.faults.policy

    def expected(self, plan: Plan) -> Expected:
        """What a plan is worth. The search counts the operators of its plans itself: none is counted again here."""
        estimator, policy = self._estimator, self.policy(plan)
        assert estimator is not None
        counts = estimator.operators_requested, estimator.operators_distinct
        computed = estimator.operators_computed
        reactions = Reactions(estimator, plan, policy, self._components)
        found = expected_throughput(reactions, self._restart_counts if policy is self._restart else self._counts)
        estimator.operators_requested, estimator.operators_distinct = counts
        if not estimator.cached:
            estimator.operators_computed = computed
        return found

    def seconds(self, plan: Plan) -> float:
        """Seconds of an iteration on average."""
        assert self._estimator is not None
        expected = self.expected(plan)
        self._offer(Tradeoff(expected.failure_free, expected.tokens_per_s, expected.fidelity), plan)
        tokens = self._estimator.problem.tokens_per_iteration
        return tokens / max(expected.tokens_per_s, LEAST_SHARE * expected.failure_free)

    def _offer(self, point: Tradeoff, plan: Plan) -> None:
        if any(known == point or point.beaten_by(known) for known, _ in self.front):
            return
        self.front = [(known, other) for known, other in self.front if not known.beaten_by(point)]
        self.front.append((point, plan))

    def facts(self, plan: Plan) -> dict[str, Any]:
        """The expectation with its bounds and every assumption behind it, as JSON data."""
        expected, policy = self.expected(plan), self.policy(plan)
        return {
            "faults": self.faults.model.name,
            "policy": self.faults.policy.name,
            "policy_used": policy.name,
            "exact_gradients": policy.exact,
            "expected_tokens_per_s": expected.tokens_per_s,
            "expected_tokens_per_s_low": expected.lower,
            "expected_tokens_per_s_high": expected.upper,
            "failure_free_tokens_per_s": expected.failure_free,
            "gradient_fidelity": expected.fidelity,
            "stopped_share": expected.stopped,
            "stops_per_hour": 3600 * expected.stops_per_s,
            # JSON knows no infinity: never
            "checkpoint_interval_s": expected.interval_s if expected.interval_s < float("inf") else None,
            "states": expected.states,
            "method": expected.method,
            "mecefo": {
                name: _plain(getattr(self.faults.options, name)) for name in type(self.faults.options).__slots__
            },
            "constants": {name: getattr(self.faults.constants, name) for name in type(self.faults.constants).__slots__},
        }

    def lines(self, plan: Plan) -> list[str]:
        """The expectation in words."""
        expected, policy = self.expected(plan), self.policy(plan)
        how = "an interval of 95 %" if expected.method == "draws" else "proven"
        lines = [
            f"under {self.faults.model.name} with policy {policy.name}: {expected.tokens_per_s:,.0f} tokens/s expected "
            f"({how}: {expected.lower:,.0f} to {expected.upper:,.0f}), {expected.share:.1%} of "
            f"{expected.failure_free:,.0f} without failures; stopped {expected.stopped:.2%} of the time"
        ]
        if policy is not self.faults.policy:
            lines.append(f"policy {self.faults.policy.name} cannot be used with this plan, which is restarted instead")
        if not policy.exact:
            lines.append(f"attention gradients computed: {expected.fidelity:.1%}")
        if len(self.front) > 1:
            lines.append(f"{len(self.front)} plans trade throughput without failures against that under them: {FRONT}")
        return lines

    def artifacts(self) -> dict[str, bytes]:
        """The front as CSV, the plans best by expected throughput first."""
        best_first = sorted(self.front, key=lambda item: -item[0].expected)
        text = front_csv((point, [plan.num_microbatches, describe(plan)]) for point, plan in best_first)
        return {FRONT: text.encode()}


def describe(plan: Plan) -> str:
    """A plan's stages in one cell of a table: units x replicas of tp devices, and what is recomputed."""
    stages = []
    for stage in plan.stages:
        replicas = " + ".join(f"{group.dp}x tp{group.tp} {group.group}" for group in stage.replicas)
        again = "" if stage.recompute.mode == "none" else f" {stage.recompute.mode}"
        stages.append(f"{stage.num_units} on {replicas}{again}")
    return " | ".join(stages)


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
