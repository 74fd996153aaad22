"""torchtitan 0.3: a Python config function, with every module of the model on exactly one part.

A function and not flags: its command line cannot carry a list of lists, and cuts one without a word. What is not
listed in `module_fqns_per_model_part` its splitter drops, also without a word, so coverage is checked here.

What it can say: any layers per stage, embedding and head on stages of their own, interleaved stages on one mesh;
one tp, one dp and one micro-batch size; no recomputation or all of every layer (its selective mode keeps products and
attention, which is another thing than the attention core). Of ZeRO: 0 (replicated) and, in a pipeline, 1: there
torch.distributed.pipelining keeps a part's gradients whole until its last micro-batch, and its gathered weights too
(`_PipelineStageBase.backward_maybe_with_nosync`); without a pipeline 2 and 3. Where nothing is shared (dp 1) the policy
for gathered weights only records the plan's stage.
"""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import Any, NoReturn

from haap_rl.cost.estimator import Estimator
from haap_rl.export.base import Files, Target, checked, layers_of, printable, recomputed, refused
from haap_rl.export.ranks import (
    HOSTFILE,
    RANKS,
    TORCHRUN,
    check_places,
    hostfile,
    launches,
    rank_table,
    ranks_csv,
    read_hosts,
    visible,
)
from haap_rl.export.uniform import Degrees, degrees, merged, nearest_uniform, stages_of
from haap_rl.problem.errors import InputError, shown
from haap_rl.problem.model import model_from_config
from haap_rl.problem.plan import Plan, Problem
from haap_rl.problem.presets import preset

NAME, CONFIG, SCRIPT = "torchtitan", "haap_plan.py", "run.sh"
EMBEDDING, NORM, HEAD = "tok_embeddings", "norm", "lm_head"  # names of 0.3.0; before, the head was `output`
# config functions of torchtitan.models.llama3.config_registry, by our name of the model
KNOWN_MODELS = ("llama3_8b", "llama3_70b", "llama3_405b")
PRECISIONS = {"bf16": "bfloat16", "fp32": "float32"}
SCHEDULES = {False: "1F1B", True: "Interleaved1F1B"}
# ZeRO stage -> policy for gathered weights, without and with a pipeline; 0 is replication
ALONE = {0: "default", 2: "never", 3: "always"}
PIPELINED = {0: "default", 1: "never"}

Settings = dict[str, Any]  # of one part of the configuration


# ------------------------------------------------------------------------------------- the nearest plan
def serves(problem: Problem) -> None:
    """Raise InputError for a precision or a model that torchtitan has not."""
    model = problem.model
    if problem.precision not in PRECISIONS:
        refused(
            NAME,
            "problem.precision",
            problem.precision,
            "it trains in bf16 or fp32; set problem.precision, and search again",
        )
    llama = {
        "norm": "rmsnorm",
        "learned_positions": False,
        "biases": False,
        "gated_mlp": True,
        "tied_embeddings": False,
    }
    for field, value in llama.items():
        if getattr(model, field) != value:
            rule = f"its decoders have {field}={str(value).lower()}"
            refused(NAME, f"model.{field}", str(getattr(model, field)).lower(), rule)


def nearest(problem: Problem, plan: Plan, estimator: Estimator) -> Plan:
    """The plan itself if torchtitan can say it, else the best one near it. Raises InputError with field and rule."""
    serves(problem)
    if len(plan.stages) > 1 and plan.num_microbatches < len(plan.stages):
        rule = f"its schedules need one for each of the {len(plan.stages)} stages"
        refused(NAME, "num_microbatches", plan.num_microbatches, rule)
    for part, names in enumerate(model_parts(plan)):
        if not names:
            refused(NAME, f"virtual_stages={plan.virtual_stages}, part", part, "a part must hold a module")
    return nearest_uniform(NAME, problem, plan, estimator, _settings)


def _settings(plan: Plan, any_recompute: bool) -> list[Plan]:
    shaped = replace(plan, stages=tuple(map(merged, plan.stages)))
    zeros = _policies(plan)
    modes = [_all_recomputed(shaped, whole) for whole in (False, True)]
    return [
        replace(mode, zero_stage=zero)
        for zero in ([plan.zero_stage] if plan.zero_stage in zeros else zeros)
        for mode in ([shaped] if shaped in modes and not any_recompute else modes)
    ]


def _policies(plan: Plan) -> dict[int, str]:
    return PIPELINED if len(plan.stages) > 1 else ALONE


def _all_recomputed(plan: Plan, whole: bool) -> Plan:
    """The plan with all or none of its layers computed again."""
    pairs = zip(plan.stages, layers_of(plan), strict=True)
    return replace(plan, stages=tuple(recomputed(stage, "full", layers * whole) for stage, layers in pairs))


# ------------------------------------------------------------------------------------------- writing
def files(problem: Problem, plan: Plan) -> dict[str, str]:
    """haap_plan.py, run.sh, hostfile and ranks.csv of a plan that torchtitan can say."""
    shape = degrees(plan)
    if shape is None:
        raise AssertionError("torchtitan: the plan cannot be said")
    table = rank_table(problem.cluster, plan)
    runs = launches(table)
    stages = len(plan.stages)
    training = {
        # without a pipeline the micro-batches are steps of gradient accumulation
        "local_batch_size": shape.microbatch_size * (plan.num_microbatches if stages > 1 else 1),
        "global_batch_size": problem.global_batch_size,
        "seq_len": problem.seq_len,
        "mixed_precision_param": PRECISIONS[problem.precision],
        "disable_cuda_graphs": stages > 1,  # they exclude pipelines
    }
    shares = plan.zero_stage > 0
    parallelism = {
        "data_parallel_replicate_degree": 1 if shares else shape.dp,
        "data_parallel_shard_degree": shape.dp if shares else 1,
        "fsdp_reshard_after_forward": _policies(plan)[plan.zero_stage],
        "tensor_parallel_degree": shape.tp,
        "enable_sequence_parallel": plan.sequence_parallel,
        "pipeline_parallel_degree": stages,
        "pipeline_parallel_schedule": SCHEDULES[plan.virtual_stages > 1],
        "pipeline_parallel_microbatch_size": shape.microbatch_size,
    }
    again = any(stage.recompute.num_layers for stage in plan.stages)
    name = problem.model.name
    known = f"from torchtitan.models.llama3.config_registry import {name} as base"
    own = f"from haap_base import base  # yours: returns the Trainer.Config of a model like {printable(name)}"
    text = _CONFIG.format(
        model=printable(name),
        cluster=printable(problem.cluster.name),
        base=known if name in KNOWN_MODELS and problem.model == model_from_config(preset("model", name)) else own,
        training="\n".join(f"    config.training.{key} = {value!r}" for key, value in training.items()),
        parallelism="\n".join(f"        {key}={value!r}," for key, value in parallelism.items()),
        parts="\n".join(f"            {names!r}," for names in model_parts(plan)),
        checkpointing="FullAC.Config()" if again else "None",
    )
    script = _SCRIPT.format(devices=visible(runs), torchrun=TORCHRUN, first=runs[0].host)
    return {CONFIG: text, SCRIPT: script, HOSTFILE: hostfile(runs), RANKS: ranks_csv(table)}


def model_parts(plan: Plan) -> list[list[str]]:
    """Modules of every part: chunk 0 of every stage, then chunk 1 of every stage, and so on."""
    last, chunks = len(plan.stages) - 1, plan.virtual_stages
    parts, layer = [], 0
    for c in range(chunks):
        for i, layers in enumerate(layers_of(plan)):
            count = layers // chunks
            names = [EMBEDDING] if i == 0 and c == 0 else []
            names += [f"layers.{k}" for k in range(layer, layer + count)]
            layer += count
            parts.append(names + ([NORM, HEAD] if i == last and c == chunks - 1 else []))
    return parts


_CONFIG = '''\
"""torchtitan 0.3 trains {model} on {cluster} by a plan of haap_rl: run.sh beside this file starts it."""

from torchtitan.config import ParallelismConfig
from torchtitan.distributed.activation_checkpoint import FullAC
{base}


def haap_plan():
    config = base()
{training}
    config.parallelism = ParallelismConfig(
{parallelism}
        module_fqns_per_model_part=[
{parts}
        ],
    )
    config.activation_checkpoint = {checkpointing}
    return config
'''

_SCRIPT = """\
#!/usr/bin/env bash
# On the host of line K of `hostfile` (from 0; a host on several lines runs it as often):
#   MASTER_ADDR={first} bash run.sh K [further options of torchtitan]
# Host names stand for nodes of the plan's device groups: replace them, keep their order.
set -euo pipefail

DEVICES=({devices})

LAUNCH=${{1:?which line of hostfile, from 0}}
shift
export PYTHONPATH="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)${{PYTHONPATH:+:$PYTHONPATH}}"
{torchrun}  -m torchtitan.train --module haap_plan --config haap_plan "$@"
"""


# ------------------------------------------------------------------------------------------- reading
def read(problem: Problem, written: Files) -> Plan:
    """The plan in haap_plan.py and hostfile. Raises InputError, naming the rule, for what would not train it."""
    training, parallelism, again = _parts_of(written[CONFIG])
    size = _count(parallelism, "pipeline_parallel_microbatch_size")
    tp, pp = (_count(parallelism, f"{kind}_parallel_degree") for kind in ("tensor", "pipeline"))
    copies, shards = (_count(parallelism, f"data_parallel_{kind}_degree") for kind in ("replicate", "shard"))
    parts = parallelism.get("module_fqns_per_model_part")
    layers, chunks = read_parts(parts, problem.model.num_layers, pp)
    if parallelism.get("pipeline_parallel_schedule") != SCHEDULES[chunks > 1]:
        rule = f"{chunks} parts per pipeline rank run by {SCHEDULES[chunks > 1]}"
        _wrong("pipeline_parallel_schedule", parallelism.get("pipeline_parallel_schedule"), rule)
    policies = {policy: stage for stage, policy in (PIPELINED if pp > 1 else ALONE).items()}
    policy = parallelism.get("fsdp_reshard_after_forward")
    if policy not in policies:
        _wrong("fsdp_reshard_after_forward", shown(policy), f"of a plan it is one of {', '.join(policies)}")
    shares = policies[policy] > 0
    if (copies > 1 and (shards > 1 or shares)) or (shards > 1 and not shares):
        _wrong("data_parallel_shard_degree", shards, f"beside replicas={copies} and {policy!r} it is no ZeRO stage")
    dp = copies * shards
    steps = problem.global_batch_size // (size * dp) if pp > 1 else 1
    for key, value in (
        ("local_batch_size", size * steps),
        ("global_batch_size", problem.global_batch_size),
        ("seq_len", problem.seq_len),
        ("mixed_precision_param", PRECISIONS.get(problem.precision)),
        ("disable_cuda_graphs", pp > 1),
    ):
        if training.get(key) != value:
            _wrong(f"training.{key}", shown(training.get(key)), f"of this plan it is {value!r}")
    if problem.global_batch_size % (size * dp):
        _wrong("pipeline_parallel_microbatch_size", size, f"times dp={dp} it must divide global_batch_size")
    of_rank = read_hosts(problem.cluster, written[HOSTFILE], f"{NAME}: {HOSTFILE}")
    if len(of_rank) != tp * dp * pp:
        _wrong(HOSTFILE, f"{len(of_rank)} slots", f"tp={tp} x dp={dp} x pp={pp} need {tp * dp * pp}")
    sequence = parallelism.get("enable_sequence_parallel")
    if not isinstance(sequence, bool):
        _wrong("enable_sequence_parallel", shown(sequence), "it is True or False")
    plan = Plan(
        stages_of(f"{NAME}: {HOSTFILE}", of_rank, Degrees(tp, dp, size), layers),
        problem.global_batch_size // (size * dp),
        policies[policy],
        sequence,
        chunks,
    )
    plan = checked(problem, _all_recomputed(plan, again), f"{NAME}: {CONFIG}")
    devices = re.findall(r"^DEVICES=\(([^)\n]*)\)$", written[SCRIPT], re.MULTILINE)
    check_places(problem.cluster, plan, NAME, written[HOSTFILE], devices[0] if len(devices) == 1 else "")
    return plan


def read_parts(parts: object, num_layers: int, pp: int) -> tuple[list[int], int]:
    """(layers of each stage, chunks) of a list of module lists. Raises InputError unless every module of the model is
    there once, in order, and parts of one stage have equally many layers."""
    if not isinstance(parts, list) or not all(isinstance(part, list) for part in parts):
        _wrong("module_fqns_per_model_part", shown(parts), "it is a list of lists of module names")
    names = [name for part in parts for name in part]
    model = [EMBEDDING, *(f"layers.{k}" for k in range(num_layers)), NORM, HEAD]
    if names != model:
        missing = [name for name in model if name not in names]
        strange = [name for name in names if name not in model]
        twice = [name for name in model if names.count(name) > 1]
        for found, rule in (
            (missing, "is missing, and torchtitan would train without it"),
            (strange, "is no module of the model"),
            (twice, "is there twice"),
        ):
            if found:
                _wrong("module_fqns_per_model_part", shown(found[0]), rule)
        _wrong("module_fqns_per_model_part", shown(names), "the modules must be in the model's order")
    if not parts or len(parts) % pp or not all(parts):
        _wrong("module_fqns_per_model_part", f"{len(parts)} parts", f"they fill {pp} ranks equally, none empty")
    counts = [sum(name.startswith("layers.") for name in part) for part in parts]
    for i in range(pp):
        if len(set(counts[i::pp])) != 1:
            _wrong("module_fqns_per_model_part", f"{counts[i::pp]} layers", f"the parts of rank {i} must be alike")
    chunks = len(parts) // pp
    return [counts[i] * chunks for i in range(pp)], chunks


def _parts_of(text: str) -> tuple[Settings, Settings, bool]:
    """(training, parallelism, whether layers are computed again), of literals only: nothing is executed."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        raise InputError(f"{NAME}: {CONFIG}: it is not Python; write it again") from None
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "haap_plan"]
    if len(functions) != 1:
        _wrong(CONFIG, "haap_plan", f"it must be one function, not {len(functions)}")
    training: Settings = {}
    parallelism: Settings | None = None
    again: bool | None = None
    for node in functions[0].body:
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target = ast.unparse(node.targets[0])
        if target.startswith("config.training."):
            _add(training, target.removeprefix("config.training."), node.value)
        elif target == "config.parallelism" and isinstance(node.value, ast.Call) and not node.value.args:
            parallelism = {}
            for keyword in node.value.keywords:
                _add(parallelism, str(keyword.arg), keyword.value)
        elif target == "config.activation_checkpoint":
            kinds = {"None": False, "FullAC.Config()": True}
            again = kinds.get(ast.unparse(node.value))
            if again is None:
                _wrong("activation_checkpoint", ast.unparse(node.value), f"of a plan it is {' or '.join(kinds)}")
    if parallelism is None or again is None:
        _wrong(CONFIG, "haap_plan", "it must set config.parallelism and config.activation_checkpoint")
    return training, parallelism, again


def _add(settings: Settings, key: str, value: ast.expr) -> None:
    if key in settings:
        _wrong(key, ast.unparse(value), "it is set twice")
    try:
        settings[key] = ast.literal_eval(value)
    except ValueError:
        _wrong(key, ast.unparse(value)[:80], "it must be written out")


def _count(settings: Settings, key: str) -> int:
    value = settings.get(key)
    if type(value) is not int or value < 1:
        _wrong(key, shown(value), "it must be a whole number of at least 1")
    return value


def _wrong(field: str, value: object, rule: str) -> NoReturn:
    raise InputError(f"{NAME}: {field}={value}: {rule}")


TARGET = Target(serves, nearest, files, read)
