"""Plan Aceso's published case with Aceso's own measured operators and collectives, and set the two side by side.

    python -m experiments.aceso_profile data=DIR out=DIR       some seconds on one core

The case: GPT-3 1.3B (24 layers, hidden 2048, sequence 2048), global batch 512, fp16, four V100 of one node, 12,000 MB
each. DIR of `data` holds profiles_aceso_v100_ops.csv and comm_measured.csv, which are not part of this project.
Written: runs.csv (one row per variant), parts.csv (what the time of the found plan is made of), table.md, summary.json.

Variants: the 12,000 MB are all of the device's memory, of which our model keeps a reserve; or what a plan may use, as
in Aceso, whose own limit holds its own reserve. The optimiser state divided among replicas (ZeRO-1), or not, as there.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from haap_rl import configs
from haap_rl.cost.calibration import DEFAULT, with_parameters
from haap_rl.cost.estimate import Estimate
from haap_rl.cost.estimator import Estimator, fingerprint
from haap_rl.cost.profile_files import MIB, load_profile
from haap_rl.cost.profiles import Profile
from haap_rl.problem.cluster import Cluster, DeviceGroup, Link, device_from_config
from haap_rl.problem.errors import InputError, positive_int
from haap_rl.problem.model import model_from_config
from haap_rl.problem.plan import Plan, Problem, Recompute, RecomputeMode, ReplicaGroup, Stage
from haap_rl.problem.presets import preset
from haap_rl.search.base import Budget, SearchResult, load_searcher, run_search
from haap_rl.space.options import SpaceSpec
from haap_rl.tracking.record import to_json_text, write_files

OPTIONS = {"data": None, "out": None, "evaluations": 1000, "proof": 20_000}
OPERATORS, COLLECTIVES, MODEL = "profiles_aceso_v100_ops.csv", "comm_measured.csv", "1_3B"
LIMIT_BYTES = 12_000 * MIB
DEVICES, GLOBAL_BATCH, LAYERS = 4, 512, 24
MICROBATCHES = (16, 32, 64, 128, 256, 512)
# what Aceso's search prints for this case with these tables (its own prediction), and the seconds that it takes
ACESO_PREDICTED_S, ACESO_SEARCH_S = 58.76, 127.0
# read in search/aceso_cost_model.py of microsoft/SuperScaler (commit a692fa6); ours in haap_rl/cost
DIFFERENCES = (
    ("iteration", "sum of the stages' times + (micro-batches - 1) x the slowest", "exact 1F1B recurrence"),
    ("gradient synchronisation", "not priced", "reduce-scatter and all-gather, measured tables, partly hidden"),
    ("optimiser step", "not priced", "bytes per parameter over the memory bandwidth, both fitted"),
    ("host time", "not priced beside the operators", "per micro-batch and stage, and per iteration, both fitted"),
    (
        "transfers",
        "bytes over a measured rate, in full in both stages' time",
        "alpha-beta, a fitted share of it in both stages",
    ),
    ("tensor and data degrees", "per operator", "per stage"),
    ("recompute", "per operator", "selective or full, of all of a stage's layers in the declared space"),
    (
        "optimiser state",
        "weights, gradients, main copy and moments: 16 bytes per parameter",
        "18 bytes per parameter, or 6 + 16/dp with ZeRO-1",
    ),
    ("activations", "operators one by one, some counted as shared by an option", "operators one by one, all counted"),
    ("reserve", "largest reserved column of the operators, inside the limit", "fitted: context and communicators"),
)


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    usable: bool  # the limit is what a plan may use, not all of the memory
    zero_stage: int


VARIANTS = (
    Variant("limit is the memory, ZeRO-1", False, 1),
    Variant("limit is the memory, ZeRO-0", False, 0),
    Variant("limit is usable, ZeRO-1", True, 1),
    Variant("limit is usable, ZeRO-0", True, 0),
)


def problem(memory_bytes: int) -> Problem:
    """The published case on V100s with so much memory."""
    device = replace(device_from_config(preset("device", "v100_32")), memory_bytes=memory_bytes)
    # links of DGX-1 (conf/cluster/v100x32.yaml); collectives are measured, these price the sends between stages
    group = DeviceGroup("v100", device, 1, DEVICES, Link(20e-6, 150e9), Link(50e-6, 50e9))
    model = model_from_config(preset("model", "gpt3_1_3b"))
    return Problem(Cluster("v100x4", (group,)), model, seq_len=2048, global_batch_size=GLOBAL_BATCH, precision="fp16")


def memory_bytes(variant: Variant) -> int:
    """Memory at which LIMIT_BYTES are all there is, or all that a plan may use."""
    if not variant.usable:
        return LIMIT_BYTES
    return LIMIT_BYTES + int(DEFAULT.framework("megatron").reserve_bytes)


def spec(variant: Variant) -> SpaceSpec:
    sizes = tuple(n for n in (1, 2, 4) if n <= DEVICES)
    return SpaceSpec(MICROBATCHES, max_stages=DEVICES, max_tp=DEVICES, group_sizes=sizes, zero_stage=variant.zero_stage)


def run(variant: Variant, data: Path, evaluations: int, proof: int) -> tuple[dict[str, Any], Problem, SearchResult]:
    """Figures of one variant: the timed heuristic search from reading the tables on, and an exact one beside it."""
    started = time.perf_counter()
    profile = load_profile(data / OPERATORS, MODEL, data / COLLECTIVES)
    target = problem(memory_bytes(variant))
    found = run_search(load_searcher("autohaap"), target, Budget(evaluations), 0, spec(variant), profile=profile)
    total_s = time.perf_counter() - started
    exact = run_search(load_searcher("exact"), target, Budget(proof), 0, spec(variant), profile=profile)
    if found.plan is None or found.estimate is None or exact.estimate is None:
        raise InputError(f"aceso_profile: {variant.name}: {found.reason or exact.reason}; give more evaluations")
    finer = finer_recompute(Estimator(target, profile=profile), variant.zero_stage)
    row = {
        "variant": variant.name,
        "evaluations": found.evaluations,
        "evaluations_until_best": found.trace[-2].evaluations if len(found.trace) > 1 else found.evaluations,
        "search_s": found.wall_time_s,
        "seconds_with_reading_bound_and_count": total_s,
        "predicted_s": found.estimate.iteration_s,
        "over_aceso_prediction": found.estimate.iteration_s / ACESO_PREDICTED_S - 1,
        "lower_bound_s": found.lower_bound_s,
        "exact_s": exact.estimate.iteration_s,
        "exact_is_proven": exact.proven_optimal,
        "exact_search_s": exact.wall_time_s,
        "by_aceso_formula_s": by_aceso_formula(found.estimate),
        "finer_recompute_s": finer[1].iteration_s if finer else None,
        "finer_recompute_by_aceso_formula_s": by_aceso_formula(finer[1]) if finer else None,
        "finer_recompute_plan": described(finer[0], finer[1]) if finer else None,
        "num_microbatches": found.plan.num_microbatches,
        "plan": described(found.plan, found.estimate),
        "not_measured": list(found.profile_gaps),
    }
    return row, target, found


def by_aceso_formula(estimate: Estimate) -> float:
    """Seconds of the iteration from our stage times by Aceso's formula: no synchronisation, no optimiser step."""
    busy = [stage.busy_s for stage in estimate.stages]
    return sum(busy) + (estimate.num_microbatches - 1) * max(busy)


def described(plan: Plan, estimate: Estimate) -> list[str]:
    """One line per stage."""
    last = len(plan.stages) - 1
    lines = []
    for i, (stage, seconds, memory) in enumerate(zip(plan.stages, estimate.stages, estimate.memory, strict=True)):
        replica = stage.replicas[0]
        layers = stage.num_units - (i == 0) - (i == last)
        lines.append(
            f"{layers} layers{', embedding' * (i == 0)}{', head' * (i == last)}: tp {replica.tp}, dp {replica.dp}, "
            f"micro-batch {replica.microbatch_size}, {stage.recompute.mode} recompute of {stage.recompute.num_layers}, "
            f"{1e3 * seconds.busy_s:.1f} ms, {memory[0].used_bytes / MIB:,.0f} MiB"
        )
    return lines


def parts(target: Problem, found: SearchResult, proof: int) -> list[dict[str, Any]]:
    """What the found plan's time would be without each thing that Aceso does not price, one after the other.

    Then by the curves alone; last the best plan if memory were no limit, which is what memory can cost at all.
    """
    if found.plan is None or found.estimate is None or found.profile is None:
        return []
    estimate = found.estimate
    no_host = with_parameters(DEFAULT, {"megatron.host_microbatch_s": 0.0})
    bare = Estimator(target, calibration=no_host, profile=found.profile)(found.plan)
    curves = Estimator(target)(found.plan)
    roomy = problem(80 * 2**30)
    best = run_search(load_searcher("exact"), roomy, Budget(proof), 0, spec(VARIANTS[0]), profile=found.profile)
    free_s = best.estimate.iteration_s if best.estimate is not None else math.nan
    return [
        {"what": "as predicted", "seconds": estimate.iteration_s},
        {"what": "without gradient synchronisation and optimiser step", "seconds": estimate.makespan_s},
        {"what": "and without host time per micro-batch", "seconds": bare.makespan_s},
        {"what": "and by Aceso's formula for the iteration", "seconds": by_aceso_formula(bare)},
        {"what": "with the estimator's curves instead of the profile", "seconds": curves.iteration_s},
        {"what": "the best plan were each memory 80 GiB", "seconds": free_s},
    ]


# ------------------------------------------------------------------ what per-layer recompute would give
def finer_recompute(estimator: Estimator, zero_stage: int) -> tuple[Plan, Estimate] | None:
    """The best pipeline of equal dp, tp 1 and nearly even layers whose stages recompute as few layers as fit.

    Outside the declared space, whose stages recompute all layers or none; nearer to Aceso, which chooses operators.
    """
    best: tuple[Plan, Estimate] | None = None
    for stages, m in itertools.product((4, 2, 1), (512, 256)):
        dp = DEVICES // stages
        size = GLOBAL_BATCH // m
        if size % dp:
            continue
        for layers in even_splits(stages):
            plan = least_recompute(estimator, layers, ReplicaGroup("v100", 1, dp, size // dp), m, zero_stage)
            estimate = None if plan is None else estimator(plan)
            if plan is not None and estimate is not None and (best is None or estimate.rank < best[1].rank):
                best = plan, estimate
    return best if best is not None and best[1].fits else None


def even_splits(stages: int) -> Iterator[tuple[int, ...]]:
    """Layers of each stage, within two of even."""
    mean = LAYERS // stages
    for front in itertools.product(range(mean - 2, mean + 3), repeat=stages - 1):
        if abs(LAYERS - sum(front) - mean) <= 2:
            yield (*front, LAYERS - sum(front))


def least_recompute(
    estimator: Estimator, layers: Sequence[int], replicas: ReplicaGroup, m: int, zero_stage: int
) -> Plan | None:
    """The plan with, stage by stage, the recompute that fits at the least time; None where a stage does not fit."""

    def plan(choice: Sequence[Recompute]) -> Plan:
        last = len(layers) - 1
        return Plan(
            tuple(
                Stage(n + (i == 0) + (i == last), (replicas,), recompute)
                for i, (n, recompute) in enumerate(zip(layers, choice, strict=True))
            ),
            m,
            zero_stage=zero_stage,
        )

    best: list[tuple[float, Recompute] | None] = [None] * len(layers)
    modes: tuple[RecomputeMode, ...] = ("selective", "full")
    for mode, count in itertools.product(modes, range(max(layers) + 1)):
        choice = [Recompute(mode, min(count, n)) if count else Recompute() for n in layers]
        estimate = estimator(plan(choice))
        for i, (stage, memory) in enumerate(zip(estimate.stages, estimate.memory, strict=True)):
            if memory[0].missing_bytes == 0 and (best[i] is None or stage.busy_s < best[i][0]):  # type: ignore[index]
                best[i] = stage.busy_s, choice[i]
    chosen = [pair[1] for pair in best if pair is not None]
    return plan(chosen) if len(chosen) == len(layers) else None


# ----------------------------------------------------------------------------------------------- output
def csv_text(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: " | ".join(v) if isinstance(v, list) else v for key, v in row.items()} for row in rows)
    return text.getvalue()


def table(rows: Sequence[dict[str, Any]], made_of: Sequence[dict[str, Any]]) -> str:
    """The comparison as Markdown."""
    lines = [
        "| variant | search s | with reading, bound, count s | predicted s | over Aceso's | exact s | by layer s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        exact = f"{row['exact_s']:.2f}{' (proven)' if row['exact_is_proven'] else ''}"
        finer = "-" if row["finer_recompute_s"] is None else f"{row['finer_recompute_s']:.2f}"
        lines.append(
            f"| {row['variant']} | {row['search_s']:.2f} | {row['seconds_with_reading_bound_and_count']:.2f} | "
            f"{row['predicted_s']:.2f} | {row['over_aceso_prediction']:+.1%} | {exact} | {finer} |"
        )
    lines += [
        "",
        f"Aceso prints {ACESO_PREDICTED_S} s as its own prediction, found in {ACESO_SEARCH_S:.0f} s.",
        "",
        "| the found plan of the first variant | seconds |",
        "|---|---|",
        *(f"| {part['what']} | {part['seconds']:.2f} |" for part in made_of),
        "",
        "| subject | Aceso's cost model | here |",
        "|---|---|---|",
        *(f"| {subject} | {theirs} | {ours} |" for subject, theirs, ours in DIFFERENCES),
    ]
    return "\n".join(lines) + "\n"


def compare(options: dict[str, Any]) -> int:
    """Run every variant and write the files; the exit status."""
    data, out = Path(str(options["data"])), Path(str(options["out"]))
    evaluations, proof = (positive_int("aceso_profile", key, options[key]) for key in ("evaluations", "proof"))
    results = [run(variant, data, evaluations, proof) for variant in VARIANTS]
    rows = [row for row, _, _ in results]
    made_of = parts(*results[0][1:], proof)
    profile = results[0][2].profile
    summary = {
        "case": "GPT-3 1.3B, 4 V100 in one node, 12,000 MB each, global batch 512, fp16, sequence 2,048",
        "aceso_predicted_s": ACESO_PREDICTED_S,
        "aceso_search_s": ACESO_SEARCH_S,
        "runs": rows,
        "parts_of_the_first": made_of,
        "differences": [dict(zip(("subject", "aceso", "here"), line, strict=True)) for line in DIFFERENCES],
        "profile": facts(profile) if profile is not None else None,
        "variants": [asdict(variant) for variant in VARIANTS],
        "estimator": fingerprint(profile=profile),
        "cores": os.cpu_count(),
    }
    texts = {
        "runs.csv": csv_text(rows),
        "parts.csv": csv_text(made_of),
        "table.md": table(rows, made_of),
        "summary.json": to_json_text(summary),
    }
    write_files(out, {name: text.encode("utf-8") for name, text in texts.items()})
    print(texts["table.md"])
    for row in rows:
        print(f"{row['variant']}, {row['num_microbatches']} micro-batches:")
        print("\n".join(f"  {line}" for line in row["plan"]))
    print(f"written: {out}")
    return 0


def facts(profile: Profile) -> dict[str, Any]:
    return {"name": profile.name, "checksum": profile.checksum, "assumptions": list(profile.assumptions)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; the exit status."""
    return configs.run_with_options(compare, OPTIONS, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
