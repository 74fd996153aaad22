"""Tables for the terminal: a plan stage by stage, and what a search found and took."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from haap_rl.cost.estimate import Estimate
from haap_rl.cost.profiles import Profile
from haap_rl.export.base import Loss
from haap_rl.problem.cluster import GIB
from haap_rl.problem.plan import Plan, Problem
from haap_rl.search.base import SearchResult


def plan_table(problem: Problem, plan: Plan, estimate: Estimate) -> Table:
    """One row per replica group of each stage: devices, layers, parallelism, memory, time, share of the longest."""
    title = f"{problem.model.name} on {problem.cluster.name}, {plan.num_microbatches} micro-batches"
    if plan.virtual_stages > 1:
        title += f", each stage in {plan.virtual_stages} interleaved chunks"
    table = Table(title=title)
    for name in ("stage", "devices", "layers", "tp", "dp", "batch", "recompute", "memory GiB", "fwd+bwd ms", "load"):
        table.add_column(name, justify="left" if name in ("devices", "recompute") else "right")
    slowest = max(estimate.loads_s)
    last = len(plan.stages) - 1
    for i, (stage, time, groups) in enumerate(zip(plan.stages, estimate.stages, estimate.memory, strict=True)):
        layers = stage.num_units - (i == 0) - (i == last)
        extra = ("E+" if i == 0 else "") + str(layers) + ("+H" if i == last else "")
        for replica, memory in zip(stage.replicas, groups, strict=True):
            used, has = memory.used_bytes / GIB, memory.capacity_bytes / GIB
            table.add_row(
                str(i),
                f"{replica.num_devices} {replica.group}",
                extra,
                str(replica.tp),
                str(replica.dp),
                str(replica.microbatch_size),
                stage.recompute.mode,
                f"{used:.1f} of {has:.0f}" + ("" if memory.missing_bytes == 0 else " !"),
                f"{1e3 * time.busy_s:.1f}",
                f"{estimate.loads_s[i] / slowest:.0%}",
            )
    return table


def time_table(estimate: Estimate) -> Table:
    """Milliseconds per micro-batch (the last two: per iteration); the parts are inside forward and backward.

    "sharding" is the traffic of sharded weights and gradients; where stages interleave, a send is one chunk's.
    """
    table = Table(title="time of each stage, ms")
    parts_inside = ("recompute", "tensor parallel", "sharding", "blocked by sends", "send to next")
    columns = ("stage", "forward", "backward", *parts_inside)
    for name in (*columns, "gradient sync", "optimiser"):
        table.add_column(name, justify="right")
    for i, stage in enumerate(estimate.stages):
        once = (stage.gradient_sync_s, stage.optimizer_s)
        parts = (stage.recompute_s, stage.tensor_parallel_s, stage.sharding_s, stage.blocked_s, stage.send_s)
        seconds = (stage.forward_s, stage.backward_s, *parts, *once)
        table.add_row(str(i), *(f"{1e3 * value:.2f}" for value in seconds))
    return table


def memory_table(estimate: Estimate) -> Table:
    """GiB on a device of each replica group of each stage, by part, at its peak.

    "cached" is what the allocator holds besides, which it gives back where memory is short.
    """
    table = Table(title="memory of one device, GiB")
    parts = ("weights", "grads", "optim.", "activ.", "logits", "recomp.", "reserved", "cached")
    for name in ("stage", "group", *parts, "used", "has", "missing"):
        table.add_column(name, justify="left" if name == "group" else "right")
    for i, groups in enumerate(estimate.memory):
        for group in groups:
            sizes = (
                group.weights_bytes,
                group.gradients_bytes,
                group.optimizer_bytes,
                group.activations_bytes,
                group.logits_bytes,
                group.recompute_bytes,
                group.reserved_bytes,
                group.cached_bytes,
                group.used_bytes,
                group.capacity_bytes,
                group.missing_bytes,
            )
            table.add_row(str(i), group.group, *(f"{size / GIB:.2f}" for size in sizes))
    return table


def loss_table(target: str, losses: Sequence[Loss]) -> Table:
    """What a trainer cannot say of a plan, what stands there instead, and the price of all of it together."""
    table = Table(title=f"what {target} cannot say")
    for name in ("field", "the plan", "as written", "iteration s", "fits"):
        table.add_column(name, justify="right" if name == "iteration s" else "left")
    for loss in losses:
        fits = "yes" if loss.fits else "no"
        table.add_row(loss.field, loss.plan_value, loss.written_value, f"{loss.iteration_s:.3f}", fits)
    return table


def plan_lines(estimate: Estimate, lower_bound_s: float) -> list[str]:
    """How fast a plan is, what holds it up, and how far it is from the proven bound of the space."""
    stage, resource = estimate.bottleneck
    between = ""
    if estimate.interval_s is not None:
        low, high = estimate.interval_s
        between = f" (90 % interval {low:.3f}-{high:.3f} s)"
    lines = [
        f"iteration {estimate.iteration_s:.3f} s{between}, {estimate.tokens_per_s:,.0f} tokens/s, bubble "
        f"{estimate.bubble:.1%}, bottleneck stage {stage} ({resource})"
    ]
    if not estimate.fits:
        lines.append(f"it does not fit: {estimate.bytes_missing / GIB:.2f} GiB are missing, see memory")
    if 0 < lower_bound_s < math.inf:
        gap = estimate.iteration_s / lower_bound_s - 1
        lines.append(f"no plan of this space is faster than {lower_bound_s:.3f} s (proven): gap {gap:.1%}")
    return lines


def profile_lines(profile: Profile | None, gaps: Sequence[str]) -> list[str]:
    """What the times were measured by, what its reader had to assume, and what it had to leave to the curves."""
    if profile is None:
        return []
    return [
        f"times measured by profile {profile.name} ({profile.checksum})",
        *(f"assumed: {assumption}" for assumption in profile.assumptions),
        *(f"not measured: {gap}" for gap in gaps),
    ]


def summary_lines(result: SearchResult) -> list[str]:
    """What was found, how good it is at least, and what the search took."""
    if result.estimate is not None:
        lines = plan_lines(result.estimate, result.lower_bound_s)
        if result.proven_optimal:
            lines.append("it is a proven optimum of this space")
    else:
        lines = [f"no plan: {result.reason}"]
    lines += result.notes
    pruned = result.pruning
    if pruned.factor is not None:
        lines.append(
            f"memory prunes the space {pruned.factor:,.1f}-fold: {pruned.plans_that_fit:.3g} of {pruned.plans:.3g} "
            "plans fit (counted exactly)"
        )
    computed, avoided = result.operator_evaluations, result.operator_evaluations_avoided
    per_plan = result.operator_evaluations_avoided_per_plan
    lines.append(
        f"{result.evaluations:,} plans priced in {result.wall_time_s:.1f} s ({result.stopped_by}); {computed:,} "
        f"operator latencies computed, {share(avoided, computed):.2%} avoided against no memo, "
        f"{share(per_plan, computed):.2%} against each distinct one once per plan"
    )
    return [*lines, *profile_lines(result.profile, result.profile_gaps)]


def share(avoided: int, computed: int) -> float:
    """Avoided latencies as a fraction of those that would have been computed."""
    return avoided / (avoided + computed) if avoided + computed else 0.0
