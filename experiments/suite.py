"""The instances that searchers are compared on: models x clusters on which random search is far off, with certificates.

    python -m experiments.suite                       remakes experiments/suite.json, some minutes on one core
    python -m experiments.suite only=2 out=/tmp/x     the first two, to see that it works

Chosen from some eighty combinations of a model and a cluster of 8 to 64 devices, homogeneous and mixed, because random
search is more than 5 % above the proven optimum at 10,000 evaluations there (median of three seeds); cases that random
search solves tell searchers apart no better than chance. `UNSEEN` were chosen alike, on device types that no other
instance has. For a trained policy, `INSTANCES` lie in the split `test` of conf/instances and `UNSEEN` in
`unseen_devices`. `TUNING` names those on which settings of searchers were chosen; nothing about them is reported. They
share models and device types with `INSTANCES`, never both model and cluster, and none of them is for training.
suite.json keeps, for each instance, what the exact search proved, and how far off random search was.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from haap_rl import configs
from haap_rl.cost.estimator import fingerprint
from haap_rl.problem.errors import InputError, positive_int
from haap_rl.problem.formats.files import read_json_object
from haap_rl.problem.instances import Instance
from haap_rl.problem.instances import cluster_of as cluster_of  # experiments/scale.py has clusters of its own
from haap_rl.problem.plan import Stage
from haap_rl.problem.presets import preset
from haap_rl.search.base import Budget, load_searcher, run_search
from haap_rl.search.certificate import problem_key
from haap_rl.space.options import SpaceSpec
from haap_rl.tracking.record import to_json_text, write_files

FILE = Path(__file__).with_suffix(".json")
SCHEMA = "haap_rl.suite/1"
COMMAND = "python -m experiments.suite"
EVALUATIONS = 10**9  # the walk's steps end a proof, not its plans
NODES = 1_000_000_000  # steps of the walk; some twenty seconds
RANDOM_EVALUATIONS, RANDOM_SEEDS = 10_000, (0, 1, 2)
OPTIONS = {"out": str(FILE.parent), "only": 0}


@cache
def spec() -> SpaceSpec:
    """The declared space of every instance: that of conf/space/default.yaml."""
    return SpaceSpec.from_config(preset("space", "default"))


INSTANCES = (
    Instance.of("gpt3_2_6b", (("rtx_4090", 2, 4),)),
    Instance.of("gpt3_2_6b", (("a10g", 1, 4), ("rtx_4090", 1, 4))),
    Instance.of("gpt3_2_6b", (("rtx_3090", 2, 4),)),
    Instance.of("gpt3_2_6b", (("a10g", 2, 4),)),
    Instance.of("gpt3_6_7b", (("rtx_4090", 4, 4),)),
    Instance.of("llama3_8b", (("rtx_4090", 4, 4),)),
    Instance.of("gpt3_6_7b", (("a10g", 4, 4),)),
    Instance.of("llama3_8b", (("a10g", 4, 4),)),
    Instance.of("gpt3_6_7b", (("rtx_3090", 2, 4), ("a10g", 2, 4))),
    Instance.of("gpt3_2_6b", (("rtx_3090", 2, 4), ("a10g", 2, 4))),
    Instance.of("llama3_8b", (("a10g", 2, 4), ("t4", 2, 4), ("rtx_3090", 2, 4))),
    Instance.of("llama3_8b", (("v100_32", 1, 8), ("a10g", 4, 4))),
    Instance.of("gpt3_13b", (("v100_32", 1, 8), ("a10g", 4, 4))),
    Instance.of("gpt3_13b", (("a100_40", 1, 8), ("v100_16", 1, 8), ("t4", 2, 4))),
    Instance.of("llama3_8b", (("a100_40", 1, 8), ("v100_16", 1, 8), ("l40s", 1, 8))),
    Instance.of("gpt3_13b", (("a100_40", 1, 8), ("v100_16", 1, 8), ("l40s", 1, 8))),
    Instance.of("gpt3_13b", (("a10g", 8, 4),)),
    Instance.of("llama2_13b", (("a10g", 8, 4),)),
    Instance.of("gpt3_13b", (("v100_16", 2, 8), ("t4", 4, 4))),
    Instance.of("llama2_13b", (("a100_40", 1, 8), ("a10g", 6, 4))),
    Instance.of("llama2_70b", (("a100_80", 2, 8), ("v100_32", 4, 8))),
    Instance.of("llama3_70b", (("h100_80", 2, 8), ("a100_40", 4, 8))),
    Instance.of("llama2_70b", (("a100_40", 4, 8), ("v100_32", 2, 8))),
    Instance.of("gpt3_13b", (("v100_32", 2, 8), ("t4", 8, 4))),
    Instance.of("llama2_13b", (("v100_32", 2, 8), ("t4", 8, 4))),
    Instance.of("llama3_70b", (("h100_80", 4, 8), ("a100_80", 4, 8))),
    Instance.of("llama2_70b", (("a100_40", 8, 8),)),
    Instance.of("llama2_70b", (("v100_32", 8, 8),)),
    Instance.of("gpt3_13b", (("v100_16", 8, 8),)),
)
UNSEEN = (  # on device types of their own
    Instance.of("gpt3_6_7b", (("l4", 2, 8),)),
    Instance.of("llama3_8b", (("a6000", 4, 4),)),
    Instance.of("llama3_8b", (("a10", 2, 4), ("l4", 1, 8))),
    Instance.of("llama3_8b", (("a40", 2, 4), ("a10", 2, 4))),
    Instance.of("llama3_8b", (("a10", 2, 4), ("p100_16", 1, 8))),
    Instance.of("llama2_13b", (("a40", 2, 4), ("l4", 1, 8))),
    Instance.of("llama2_13b", (("h800_80", 1, 8), ("h20_96", 1, 8))),
    Instance.of("gpt3_2_6b", (("h20_96", 1, 8), ("l4", 2, 8))),
    Instance.of("gpt3_13b", (("a6000", 2, 4), ("a10", 4, 4))),
    Instance.of("llama2_13b", (("a6000", 2, 4), ("l4", 2, 8))),
    Instance.of("llama2_70b", (("mi250x", 2, 4), ("a40", 4, 4))),
    Instance.of("llama3_70b", (("h200", 1, 8), ("h20_96", 2, 8))),
    Instance.of("gpt3_6_7b", (("a40", 2, 4), ("a10", 2, 4), ("l4", 1, 8))),
    Instance.of("gpt3_6_7b", (("a6000", 2, 4), ("a10", 2, 4), ("p100_16", 1, 8))),
    Instance.of("gpt3_13b", (("h800_80", 1, 8), ("h20_96", 1, 8), ("a6000", 2, 4))),
    Instance.of("llama2_13b", (("l4", 2, 8), ("p100_16", 2, 8))),
    Instance.of("llama2_70b", (("h800_80", 2, 8), ("mi250x", 4, 4))),
    Instance.of("llama3_70b", (("mi300x", 1, 8), ("h20_96", 3, 8))),
    Instance.of("llama3_70b", (("h200", 2, 8), ("h800_80", 4, 8))),
)
TUNING = (
    Instance.of("gpt3_2_6b", (("a10g", 2, 4), ("rtx_4090", 2, 4))),
    Instance.of("gpt3_6_7b", (("a10g", 2, 4), ("rtx_4090", 2, 4))),
    Instance.of("gpt3_13b", (("a100_40", 1, 8), ("v100_16", 2, 8))),
    Instance.of("llama3_8b", (("a100_40", 1, 8), ("v100_16", 2, 8))),
    Instance.of("gpt3_6_7b", (("a100_40", 1, 8), ("v100_16", 1, 8), ("l40s", 1, 8))),
    Instance.of("gpt3_13b", (("v100_32", 1, 8), ("t4", 4, 4))),
    Instance.of("gpt3_13b", (("a100_40", 2, 8), ("v100_16", 2, 8))),
    Instance.of("llama2_13b", (("a100_40", 2, 8), ("v100_16", 2, 8))),
)


class Certified(NamedTuple):
    """What is known of an instance: the best time known, and what no plan can beat."""

    instance: Instance
    iteration_time_s: float
    lower_bound_s: float
    proven_optimal: bool


def certified(instances: Sequence[Instance] = INSTANCES) -> list[Certified]:
    """`instances` with what suite.json says of them. Raises InputError if it is stale, broken or another one."""
    data = read_json_object(FILE, "suite")
    where = f"suite file {FILE.name!r}"
    if data.get("schema") != SCHEMA or not isinstance(data.get("instances"), dict):
        raise InputError(f"{where}: it is not one of schema {SCHEMA}; remake it: {COMMAND}")
    if data.get("estimator_fingerprint") != fingerprint():
        raise InputError(f"{where}: it is stale, made with another estimator; remake it: {COMMAND}")
    entries = data["instances"]
    missing = [instance.name for instance in instances if instance.name not in entries]
    if missing:
        raise InputError(f"{where}: {missing[0]!r} is not in it; remake it: {COMMAND}")
    for instance in instances:
        if entries[instance.name].get("problem") != problem_key(instance.problem(), spec()):
            raise InputError(f"{where}: {instance.name!r} was made for another problem or space; remake it: {COMMAND}")
    keys = ("iteration_time_s", "lower_bound_s", "proven_optimal")
    return [Certified(instance, *(entries[instance.name][key] for key in keys)) for instance in instances]


def certify(instance: Instance) -> dict[str, Any]:
    """What the exact search proves about an instance, and how far random search is from it."""
    exact = load_searcher("exact", {"nodes": NODES})
    result = run_search(exact, instance.problem(), Budget(EVALUATIONS), seed=0, space=spec())
    if result.estimate is None or result.plan is None:
        raise InputError(f"suite: {instance.name}: {result.reason}")
    best_s = result.estimate.iteration_s
    certificate = json.loads(result.artifacts["certificate.json"])
    random = [
        run_search(load_searcher("random"), instance.problem(), Budget(RANDOM_EVALUATIONS), seed, spec()).estimate
        for seed in RANDOM_SEEDS
    ]
    gaps = [estimate.iteration_s / best_s - 1 if estimate else None for estimate in random]
    return {
        "devices": instance.num_devices,
        "iteration_time_s": best_s,
        "lower_bound_s": result.lower_bound_s,
        "proven_optimal": result.proven_optimal,
        "random_gap_at_10000": gaps,
        **{key: certificate[key] for key in ("solves", "states", "nodes", "plans_completed", "problem")},
        "num_microbatches": result.plan.num_microbatches,
        "plan": [_shown(stage) for stage in result.plan.stages],
    }


def _shown(stage: Stage) -> str:
    """A stage in one line: units, device group, tp x dp, micro-batch size, recomputation."""
    on = " + ".join(f"{r.group} tp{r.tp} dp{r.dp} of {r.microbatch_size}" for r in stage.replicas)
    return f"{stage.num_units} units on {on}, {stage.recompute.mode} recomputed"


def make(options: dict[str, Any]) -> int:
    """Prove every instance and write suite.json; the exit status."""
    chosen: Sequence[Instance] = INSTANCES + UNSEEN
    if options["only"] != 0:
        chosen = chosen[: positive_int("suite", "only", options["only"])]
    entries = {}
    for number, instance in enumerate(chosen, 1):
        entry = entries[instance.name] = certify(instance)
        gap = entry["iteration_time_s"] / entry["lower_bound_s"] - 1
        random = np.median([1e9 if value is None else value for value in entry["random_gap_at_10000"]])
        print(
            f"{number:2d} of {len(chosen)}: {instance.name}: {entry['iteration_time_s']:.4f} s, proven gap {gap:.2%}, "
            f"random {random:.1%} off",
            flush=True,
        )
    data = {"schema": SCHEMA, "command": COMMAND, "estimator_fingerprint": fingerprint(), "instances": entries}
    write_files(Path(str(options["out"])), {FILE.name: to_json_text(data).encode()})
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    return configs.run_with_options(make, dict(OPTIONS), sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
