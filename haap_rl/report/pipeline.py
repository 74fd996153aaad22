"""A picture of a plan: who computes what when, and where each device's memory goes.

python -m haap_rl.report.pipeline record=runs/ppo-... out=plan.png
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from haap_rl import configs
from haap_rl.cost.estimate import Estimate, StageMemory
from haap_rl.cost.estimator import Estimator
from haap_rl.problem.cluster import GIB
from haap_rl.problem.errors import InputError
from haap_rl.problem.plan import Plan, Problem
from haap_rl.tracking import recorded_plan, recorded_profile

PICTURES = (".png", ".pdf", ".svg")
FORWARD, BACKWARD, TAIL = "#4878a8", "#e1974c", "#8c8c8c"
PALEST = 0.45  # opacity of the last of several interleaved chunks; the first is solid
TIMES = (("forward", FORWARD), ("backward", BACKWARD), ("gradient sync, optimiser", TAIL))
MEMORY_PARTS = (
    ("weights, gradients", "#5b4b8a"),
    ("optimiser", "#9a8bc4"),
    ("activations", "#4f9d69"),
    ("logits, recompute", "#c44e52"),
    ("reserved", "#d0d0d0"),
    ("cached by the allocator", "#ececec"),
)


def draw_plan(problem: Problem, plan: Plan, estimate: Estimate, path: Path) -> None:
    """Write a picture (format by the suffix of `path`) of the plan's timeline and of the memory of each stage.

    Where stages interleave, later chunks are paler.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    stages = len(plan.stages)
    figure = Figure(figsize=(12, 2.5 + 0.42 * stages), layout="constrained")
    FigureCanvasAgg(figure)
    timeline, memory = figure.subplots(1, 2, width_ratios=(3, 1), sharey=True)

    ends = [0.0] * stages
    for slot in estimate.timeline():
        ends[slot.stage] = max(ends[slot.stage], slot.end_s)
        color = FORWARD if slot.is_forward else BACKWARD
        opacity = 1.0 - (1.0 - PALEST) * slot.chunk / max(1, plan.virtual_stages - 1)
        timeline.broken_barh(
            [(slot.start_s, slot.end_s - slot.start_s)],
            (slot.stage - 0.4, 0.8),
            facecolors=(color, opacity),
            edgecolors="white",
            linewidth=min(0.4, 20.0 / (plan.num_microbatches * plan.virtual_stages)),
        )
    for i, stage in enumerate(estimate.stages):
        timeline.broken_barh([(ends[i], stage.tail_s)], (i - 0.4, 0.8), facecolors=TAIL)
    timeline.set_yticks(range(stages), [_label(plan, i) for i in range(stages)])
    timeline.set_ylim(stages - 0.4, -0.6)
    timeline.set_xlim(0, estimate.iteration_s)
    timeline.set_xlabel("seconds" if plan.virtual_stages == 1 else "seconds (paler: a later chunk of the stage)")
    timeline.set_title(
        f"{problem.model.name} on {problem.cluster.name}: {estimate.iteration_s:.2f} s per iteration, "
        f"{estimate.tokens_per_s:,.0f} tokens/s, bubble {estimate.bubble:.0%}",
        fontsize=10,
    )
    for axes, parts_of, columns in ((timeline, TIMES, 3), (memory, MEMORY_PARTS, 2)):  # beneath, so that no bar hides
        handles = [Patch(color=color, label=name) for name, color in parts_of]
        axes.legend(
            handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.5 / stages - 0.05), ncols=columns,
            fontsize=8, frameon=False,
        )  # fmt: skip

    for i, groups in enumerate(estimate.memory):
        height = 0.8 / len(groups)
        for j, group in enumerate(groups):
            left = 0.0
            for size, (_, color) in zip(memory_parts(group), MEMORY_PARTS, strict=True):
                memory.broken_barh([(left, size / GIB)], (i - 0.4 + j * height, height), facecolors=color)
                left += size / GIB
            capacity = group.capacity_bytes / GIB
            memory.plot([capacity, capacity], [i - 0.4 + j * height, i - 0.4 + (j + 1) * height], color="black")
    memory.set_xlabel("GiB per device (line: what it has)")
    memory.set_xlim(left=0)
    memory.set_title("memory", fontsize=10)
    for axes in (timeline, memory):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def memory_parts(group: StageMemory) -> tuple[int, ...]:
    """Bytes of each of MEMORY_PARTS on a device of a replica group; together what is used."""
    return (
        group.weights_bytes + group.gradients_bytes,
        group.optimizer_bytes,
        group.activations_bytes,
        max(group.logits_bytes, group.recompute_bytes),
        group.reserved_bytes,
        group.cached_bytes,
    )


def _label(plan: Plan, i: int) -> str:
    stage = plan.stages[i]
    layers = stage.num_units - (i == 0) - (i == len(plan.stages) - 1)
    devices = " + ".join(f"{r.num_devices} {r.group} (tp {r.tp}, dp {r.dp})" for r in stage.replicas)
    return f"{layers} layers on {devices}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the plan of a run's record; the exit status."""

    def draw(options: dict[str, object]) -> int:
        out = Path(str(options["out"]))
        if out.suffix not in PICTURES:
            raise InputError(f"out={str(out)!r} must end in one of {', '.join(PICTURES)}")
        record = Path(str(options["record"]))
        problem, plan = recorded_plan(record)
        draw_plan(problem, plan, Estimator(problem, profile=recorded_profile(record))(plan), out)
        print(f"picture: {out}")
        return 0

    return configs.run_with_options(
        draw, {"record": None, "out": "plan.png"}, sys.argv[1:] if arguments is None else arguments
    )


if __name__ == "__main__":
    sys.exit(main())
