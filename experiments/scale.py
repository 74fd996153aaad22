"""Plans for a thousand and for four thousand devices: the heuristic's plan, its gap to the bounds, time and memory.

    python -m experiments.scale out=results/scale             a few minutes on one core
    python -m experiments.scale out=/tmp/try quick=true       the heuristic alone, 2,000 evaluations

Cases: GPT-3 175B (96 layers) on 512 H100 + 512 A100, and Llama-3 405B (126 layers) on 1,536 H100 + 1,536 A100 + 1,024
L40S, 4,096 devices of three types. Beside the heuristic in the whole declared space, whose bound is the linear
program's, the exact search proves a bound for plans in coarser device units (16 and 64). Each case runs in a process of
its own, so that its peak memory is its own. Written: summary.json, table.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments import suite
from haap_rl import configs
from haap_rl.problem.errors import InputError, positive_int, yes_or_no
from haap_rl.problem.plan import Problem
from haap_rl.problem.presets import preset, problem_from_config
from haap_rl.search.base import Budget, load_searcher, run_search
from haap_rl.space.options import SpaceSpec
from haap_rl.tracking.record import to_json_text, write_files

OPTIONS = {"out": None, "quick": False, "evaluations": 10_000}


class Case(NamedTuple):
    """A model on device groups (device, nodes of 8), a batch, and the device unit in which the exact search works."""

    model: str
    groups: tuple[tuple[str, int], ...]
    global_batch_size: int
    max_stages: int
    unit: int

    @property
    def name(self) -> str:
        return f"{self.model} on {' + '.join(f'{8 * nodes} {device}' for device, nodes in self.groups)}"

    def problem(self) -> Problem:
        settings = {
            **preset("problem", "default"),
            "global_batch_size": self.global_batch_size,
            "seq_len": 4096 if self.model.startswith("llama") else 2048,
            "precision": "bf16",
            "fused_attention": True,
        }
        cluster = suite.cluster_of("large", tuple((device, nodes, 8) for device, nodes in self.groups))
        return problem_from_config(preset("model", self.model), cluster, settings)

    def spec(self, unit: int = 1) -> SpaceSpec:
        counts = tuple(m for m in (8, 16, 32, 64, 128, 256) if self.global_batch_size % m == 0)
        sizes = tuple(size for size in preset("space", "default")["group_sizes"] if size % unit == 0)
        return SpaceSpec(num_microbatches=counts, max_stages=self.max_stages, group_sizes=sizes)


CASES = {
    "1024": Case("gpt3_175b", (("h100_80", 64), ("a100_80", 64)), 1536, 16, 16),
    "4096": Case("llama3_405b", (("h100_80", 192), ("a100_80", 192), ("l40s", 128)), 2048, 16, 64),
}


def run_case(name: str, searcher: str, evaluations: int) -> dict[str, Any]:
    """Figures of one search, everything from the start of the process on counted."""
    import resource

    started = time.perf_counter()
    case = CASES[name]
    parameters = {"nodes": 1_000_000} if searcher == "exact" else {}  # the bound; walks do not end at this size
    spec = case.spec(case.unit if searcher == "exact" else 1)
    result = run_search(load_searcher(searcher, parameters), case.problem(), Budget(evaluations), 0, spec)
    if result.estimate is None or result.plan is None:
        raise InputError(f"scale: {case.name}: {result.reason}")
    return {
        "case": case.name,
        "searcher": searcher,
        "device_unit": case.unit if searcher == "exact" else 1,
        "iteration_time_s": result.estimate.iteration_s,
        "lower_bound_s": result.lower_bound_s,
        "gap_to_lower_bound": result.gap_to_lower_bound,
        "stages": len(result.plan.stages),
        "num_microbatches": result.plan.num_microbatches,
        "devices_used": sum(r.num_devices for stage in result.plan.stages for r in stage.replicas),
        "evaluations": result.evaluations,
        "search_s": result.wall_time_s,
        "total_s": time.perf_counter() - started,
        "peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "notes": list(result.notes),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The searches as Markdown."""
    lines = [
        "| case | search | device unit | iteration, s | bound, s | gap | stages | devices used | search, s | total, s "
        "| peak memory, GiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['case']} | {row['searcher']} | {row['device_unit']} | {row['iteration_time_s']:.3f} | "
            f"{row['lower_bound_s']:.3f} | {row['gap_to_lower_bound']:.1%} | {row['stages']} | {row['devices_used']:,} "
            f"| {row['search_s']:.1f} | {row['total_s']:.1f} | {row['peak_memory_gib']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def scale(options: dict[str, Any]) -> int:
    """Run every search in a process of its own and write the files; the exit status."""
    evaluations = positive_int("scale", "evaluations", options["evaluations"])
    searchers: Sequence[str] = ("autohaap", "exact")
    if yes_or_no("scale", "quick", options["quick"]):
        evaluations, searchers = 2000, ("autohaap",)
    rows = []
    for name in CASES:
        for searcher in searchers:
            call = f"scale.run_case({name!r}, {searcher!r}, {evaluations})"
            code = f"import json; from experiments import scale; print(json.dumps({call}))"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            if done.returncode:
                raise InputError(f"scale: {name} {searcher}: {done.stderr.strip().splitlines()[-1]}")
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{name} {searcher}: {rows[-1]['iteration_time_s']:.3f} s", flush=True)
    text = table(rows)
    texts = {"summary.json": to_json_text({"searches": rows}), "table.md": text}
    write_files(Path(str(options["out"])), {name: content.encode() for name, content in texts.items()})
    print(text)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    return configs.run_with_options(scale, dict(OPTIONS), sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
