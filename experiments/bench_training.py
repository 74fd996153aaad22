"""How fast do the batched environments step, and where does the time of training a policy go?

    python -m experiments.bench_training out=results/bench_training          a minute on one core
    python -m experiments.bench_training out=/tmp/try quick=true             seconds, to see that it works

Steps are with features and masks, by random legal actions whose choice is not counted; PPO trains from scratch on the
default problem with the settings of conf/search/ under a profiler, which itself takes some of the time. Absolute
figures are of the machine; shares and ratios carry over. Written: table.md, summary.json.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from haap_envs.batched import BatchedEnv, ConstructVecEnv, PartitionVecEnv
from haap_rl import configs
from haap_rl.problem.errors import yes_or_no
from haap_rl.problem.presets import load_problem
from haap_rl.search.base import Budget, Objective, load_searcher, run_search
from haap_rl.tracking.record import to_json_text, write_files

OPTIONS = {"out": None, "quick": False}
ENVIRONMENTS: dict[str, tuple[Callable[[Objective, int], BatchedEnv], int]] = {
    "haap_rl/Construct-v0": (lambda objective, n: ConstructVecEnv([objective], n), 256),
    "haap_rl/Partition-v0": (PartitionVecEnv, 32),
}
# what is shown of a profile -> (file, function) whose time, with all it calls, it is
PARTS = {
    "all": ("ppo_mask.py", "learn"),
    "environment": ("batched.py", "step_wait"),
    "network, choosing": ("candidate_policy.py", "forward"),
    "network, learning": ("candidate_policy.py", "evaluate_actions"),
    "gradients": ("~", "<method 'run_backward' of 'torch._C._EngineBase' objects>"),
    "optimiser": ("adam.py", "step"),
    "buffer": ("buffers.py", "get"),
}


def steps_per_s(environments: BatchedEnv, steps: int) -> float:
    """Environment steps a second, the best of three repetitions."""
    rng, best = np.random.default_rng(0), 0.0
    environments.seed(0)
    environments.reset()
    for _ in range(3):
        seconds = 0.0
        for _ in range(max(1, steps // environments.num_envs)):
            masks = environments.masks()
            actions = (rng.random(masks.shape) * masks).argmax(1)
            began = time.perf_counter()
            environments.step(actions)
            environments.env_method("action_masks")
            seconds += time.perf_counter() - began
        best = max(best, max(1, steps // environments.num_envs) * environments.num_envs / seconds)
    return best


def profile(evaluations: int) -> dict[str, float]:
    """Seconds by part of PPO's training from scratch, and evaluations a second."""
    torch.set_num_threads(1)
    searcher, profiler = load_searcher("ppo"), cProfile.Profile()
    run_search(searcher, load_problem(), Budget(100), seed=0)  # everything is loaded then
    profiler.enable()
    result = run_search(searcher, load_problem(), Budget(evaluations), seed=0)
    profiler.disable()
    found = {}
    for part, (file, function) in PARTS.items():
        found[part] = sum(
            entry[3]
            for (path, _, name), entry in pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]
            if Path(path).name == file and name == function
        )
    return {**found, "evaluations_per_s": result.evaluations / result.wall_time_s}


def table(summary: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines = ["| environment | steps/s on one core |", "|---|---|"]
    lines += [f"| `{name}` batched | {steps:,.0f} |" for name, steps in summary["steps_per_s"].items()]
    seconds = dict(summary["training"])
    rate, whole = seconds.pop("evaluations_per_s"), seconds.pop("all")
    lines += ["", f"PPO from scratch: {rate:,.0f} plans/s. Of its time:", "", "| part | share |", "|---|---|"]
    lines += [f"| {part} | {each / whole:.0%} |" for part, each in seconds.items()]
    lines.append(f"| the rest | {1 - sum(seconds.values()) / whole:.0%} |")
    return "\n".join(lines) + "\n"


def bench(options: dict[str, Any]) -> int:
    """Measure and write the files; the exit status."""
    quick = yes_or_no("bench_training", "quick", options["quick"])
    summary = {
        "steps_per_s": {
            name: steps_per_s(make(Objective(load_problem()), 8 if quick else n), 200 if quick else 40_000)
            for name, (make, n) in ENVIRONMENTS.items()
        },
        "training": profile(100 if quick else 5000),
    }
    texts = {"summary.json": to_json_text(summary), "table.md": table(summary)}
    write_files(Path(str(options["out"])), {name: content.encode() for name, content in texts.items()})
    print(texts["table.md"])
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    return configs.run_with_options(bench, dict(OPTIONS), sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
