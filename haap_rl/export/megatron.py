"""Megatron-LM: flags, a pipeline layout string, and a script that starts every process where the plan puts it.

What it can say: any layers per stage, embedding and head on stages of their own, interleaved stages, stages on any
devices; one tp, one dp and one micro-batch size; recomputation as one setting of the job (nothing, the attention core
of every layer, or whole layers: all, or the first N of every chunk); ZeRO-0 and 1.

The layout (docs.nvidia.com, megatron-core, pipeline_parallel_layout): E embedding, t layer, L final norm, head and
loss; `|` separates stages, chunk after chunk; `x*N` and `(...)*N` repeat. megatron-core reads twice as many stages
as there are pipeline ranks as two chunks per rank without a word, and its command line refuses a number of chunks
beside a layout, so the script states both and compares them before it starts anything.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, NoReturn

from haap_rl.cost.estimator import Estimator
from haap_rl.export.base import Files, Target, any_problem, checked, layers_of, printable, recomputed
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
from haap_rl.problem.plan import Plan, Problem

NAME, SCRIPT = "megatron", "run.sh"
EMBEDDING, LAYER, LOSS = "E", "t", "L"
LARGEST_LAYOUT = 100_000  # letters, repetitions written out

Flags = dict[str, str | None]  # flag -> value, None for a switch


class JobRecompute(NamedTuple):
    """Recomputation of the whole job; num_layers: of every chunk of a stage, as far as it has so many (mode full)."""

    mode: str
    num_layers: int = 0


# ------------------------------------------------------------------------------------- the nearest plan
def nearest(problem: Problem, plan: Plan, estimator: Estimator) -> Plan:
    """The plan itself if Megatron-LM can say it, else the best one near it. Raises InputError if none is legal."""
    return nearest_uniform(NAME, problem, plan, estimator, _settings)


def _settings(plan: Plan, any_recompute: bool) -> list[Plan]:
    shaped = replace(plan, stages=tuple(map(merged, plan.stages)), zero_stage=min(plan.zero_stage, 1))
    if job_recompute(shaped) is not None and not any_recompute:
        return [shaped]
    return [with_recompute(shaped, setting) for setting in _recomputations(shaped)]


def job_recompute(plan: Plan) -> JobRecompute | None:
    """The one setting that recomputes what the plan does; None where there is none."""
    return next((setting for setting in _recomputations(plan) if with_recompute(plan, setting) == plan), None)


def with_recompute(plan: Plan, setting: JobRecompute) -> Plan:
    """The plan with that setting in every stage."""
    mode, most = setting
    chunks = plan.virtual_stages
    stages = []
    for stage, layers in zip(plan.stages, layers_of(plan), strict=True):
        counts = {"none": 0, "selective": layers, "full": min(most, layers // chunks) * chunks}
        stages.append(recomputed(stage, mode, counts[mode]))
    return replace(plan, stages=tuple(stages))


def _recomputations(plan: Plan) -> Iterator[JobRecompute]:
    """The settings near a plan: nothing, the attention cores, whole layers as many as one of its stages has or all."""
    yield JobRecompute("none")
    yield JobRecompute("selective")
    counts = {stage.recompute.num_layers // plan.virtual_stages for stage in plan.stages}
    for count in sorted((counts | {_longest_chunk(plan)}) - {0}):
        yield JobRecompute("full", count)


def _longest_chunk(plan: Plan) -> int:
    return max(layers_of(plan)) // plan.virtual_stages


# ------------------------------------------------------------------------------------------- writing
def files(problem: Problem, plan: Plan) -> dict[str, str]:
    """run.sh, hostfile and ranks.csv of a plan that Megatron-LM can say."""
    table = rank_table(problem.cluster, plan)
    runs = launches(table)
    text = _SCRIPT.format(
        model=printable(problem.model.name),
        cluster=printable(problem.cluster.name),
        pp=len(plan.stages),
        vpp=plan.virtual_stages,
        layout=layout(plan),
        devices=visible(runs),
        torchrun=TORCHRUN,
        first=runs[0].host,
        plan=_lines(_plan_flags(problem, plan)),
        model_flags=_lines(_model_flags(problem)),
    )
    return {SCRIPT: text, HOSTFILE: hostfile(runs), RANKS: ranks_csv(table)}


def layout(plan: Plan) -> str:
    """The pipeline layout string: chunk 0 of every stage, then chunk 1 of every stage, and so on."""
    last, chunks = len(plan.stages) - 1, plan.virtual_stages
    parts = []
    for c in range(chunks):
        for i, layers in enumerate(layers_of(plan)):
            count = layers // chunks
            part = EMBEDDING if i == 0 and c == 0 else ""
            part += "" if count == 0 else LAYER if count == 1 else f"{LAYER}*{count}"
            parts.append(part + (LOSS if i == last and c == chunks - 1 else ""))
    return "|".join(parts)


def _plan_flags(problem: Problem, plan: Plan) -> Flags:
    shape, setting = degrees(plan), job_recompute(plan)
    if shape is None or setting is None:
        raise AssertionError("megatron: the plan cannot be said")
    flags: Flags = {
        "--tensor-model-parallel-size": str(shape.tp),
        "--pipeline-model-parallel-size": "$PP",
        "--pipeline-model-parallel-layout": "$LAYOUT",
        "--micro-batch-size": str(shape.microbatch_size),
        "--global-batch-size": str(problem.global_batch_size),
    }
    if plan.zero_stage:
        flags["--use-distributed-optimizer"] = None
    if plan.sequence_parallel:
        flags["--sequence-parallel"] = None
    if setting.mode != "none":
        flags["--recompute-granularity"] = setting.mode
    if setting.mode == "full":
        whole = setting.num_layers >= _longest_chunk(plan)
        flags["--recompute-method"] = "uniform" if whole else "block"
        flags["--recompute-num-layers"] = "1" if whole else str(setting.num_layers)
    return flags


def _model_flags(problem: Problem) -> Flags:
    model = problem.model
    flags: Flags = {
        "--num-layers": str(model.num_layers),
        "--hidden-size": str(model.hidden),
        "--num-attention-heads": str(model.heads),
        "--kv-channels": str(model.head_dim),
        "--ffn-hidden-size": str(model.ffn),
        "--seq-length": str(problem.seq_len),
        "--max-position-embeddings": str(max(model.max_positions, problem.seq_len)),
        "--position-embedding-type": "learned_absolute" if model.learned_positions else "rope",
        "--normalization": "LayerNorm" if model.norm == "layernorm" else "RMSNorm",
        "--optimizer": problem.optimizer,
        "--attention-backend": "flash" if problem.fused_attention else "unfused",
    }
    if model.kv_heads != model.heads:
        flags["--group-query-attention"] = None
        flags["--num-query-groups"] = str(model.kv_heads)
    switches = {
        "--swiglu": model.gated_mlp,
        "--disable-bias-linear": not model.biases,
        "--untie-embeddings-and-output-weights": not model.tied_embeddings,
        f"--{problem.precision}": problem.precision != "fp32",
    }
    flags.update((flag, None) for flag, wanted in switches.items() if wanted)
    if not model.dropout:
        flags.update({"--attention-dropout": "0.0", "--hidden-dropout": "0.0"})
    return flags


def _lines(flags: Flags) -> str:
    words = [flag if value is None else f'{flag} "{value}"' for flag, value in flags.items()]
    return "\n".join(f"  {word}" for word in words)


_SCRIPT = """\
#!/usr/bin/env bash
# Megatron-LM trains {model} on {cluster} by a plan of haap_rl.
# On the host of line K of `hostfile` (from 0; a host on several lines runs it as often):
#   MASTER_ADDR={first} bash run.sh K pretrain_gpt.py --tokenizer-type ... --data-path ... [further flags]
# Host names stand for nodes of the plan's device groups: replace them, keep their order.
set -euo pipefail

PP={pp}
VPP={vpp}
LAYOUT='{layout}'
DEVICES=({devices})
PLAN=(
{plan}
)
MODEL=(
{model_flags}
)

bars=${{LAYOUT//[^|]/}}
if (( ${{#bars}} + 1 != PP * VPP )); then
  echo "run.sh: LAYOUT has $(( ${{#bars}} + 1 )) stages, not PP=$PP times VPP=$VPP" >&2
  exit 2
fi
LAUNCH=${{1:?which line of hostfile, from 0}}
SCRIPT=${{2:?the training script, pretrain_gpt.py}}
shift 2
export CUDA_DEVICE_MAX_CONNECTIONS=1
{torchrun}  "$SCRIPT" "${{PLAN[@]}}" "${{MODEL[@]}}" "$@"
"""


# ------------------------------------------------------------------------------------------- reading
def read(problem: Problem, written: Files) -> Plan:
    """The plan in run.sh and hostfile. Raises InputError, naming the rule, for what Megatron-LM would not take or
    would take for something else."""
    variables = _variables(written[SCRIPT])
    flags = _checked_flags(problem, variables)
    tp = _count(flags, "--tensor-model-parallel-size")
    size = _count(flags, "--micro-batch-size")
    pp, vpp = (_number(name, variables[name]) for name in ("PP", "VPP"))
    layers = read_layout(variables["LAYOUT"], problem.model.num_layers, pp, vpp)
    if not problem.model.allows_tp(tp):
        _wrong("--tensor-model-parallel-size", tp, f"it must divide heads={problem.model.heads}, kv_heads and ffn")
    of_rank = read_hosts(problem.cluster, written[HOSTFILE], f"{NAME}: {HOSTFILE}")
    if len(of_rank) % (tp * pp):
        _wrong(HOSTFILE, f"{len(of_rank)} slots", f"they must be a multiple of tp={tp} x pp={pp}")
    dp = len(of_rank) // (tp * pp)
    if _count(flags, "--global-batch-size") != problem.global_batch_size:
        _wrong("--global-batch-size", flags["--global-batch-size"], f"the problem has {problem.global_batch_size}")
    if problem.global_batch_size % (size * dp):
        _wrong("--micro-batch-size", size, f"times dp={dp} it must divide --global-batch-size")
    plan = Plan(
        stages_of(f"{NAME}: {HOSTFILE}", of_rank, Degrees(tp, dp, size), layers),
        problem.global_batch_size // (size * dp),
        int("--use-distributed-optimizer" in flags),
        "--sequence-parallel" in flags,
        vpp,
    )
    plan = checked(problem, with_recompute(plan, _read_recompute(flags, plan)), f"{NAME}: {SCRIPT}")
    check_places(problem.cluster, plan, NAME, written[HOSTFILE], variables["DEVICES"])
    return plan


def read_layout(text: str, num_layers: int, pp: int, vpp: int) -> list[int]:
    """Layers of each stage, all of its chunks together. Raises InputError for a layout that is not pp times vpp stages
    of the model's units in order, with equally many layers in every chunk of a stage."""
    parts = expanded(text).split("|")
    units = "".join(parts)
    for letter in units:
        if letter not in (EMBEDDING, LAYER, LOSS):
            _wrong("layout", shown(text), f"letter {letter!r} is none of E, t, L, which such a model has")
    for letter, what in ((EMBEDDING, "embedding"), (LOSS, "head and loss")):
        if units.count(letter) != 1:
            _wrong("layout", shown(text), f"{letter} ({what}) must stand there once, not {units.count(letter)} times")
    if units[0] != EMBEDDING or units[-1] != LOSS:
        _wrong("layout", shown(text), "E comes before every layer and L behind them")
    if units.count(LAYER) != num_layers:
        _wrong("layout", shown(text), f"it has {units.count(LAYER)} layers, the model {num_layers}")
    if len(parts) != pp * vpp:
        silent = "; megatron-core would take it for interleaved stages" if len(parts) % pp == 0 else ""
        _wrong("layout", shown(text), f"it has {len(parts)} stages, not pp={pp} x vpp={vpp}{silent}")
    counts = [part.count(LAYER) for part in parts]
    for i in range(pp):
        if len(set(counts[i::pp])) != 1:
            _wrong("layout", shown(text), f"the chunks of stage {i} have {counts[i::pp]} layers; they must be alike")
    return [counts[i] * vpp for i in range(pp)]


def expanded(text: str) -> str:
    """A layout with its repetitions written out. Raises InputError where it is malformed."""
    where = shown(text)
    text = re.sub(r"[,\s]", "", text)
    for pattern in (r"\(([^()]+)\)\*([0-9]{1,5})", r"([A-Za-z])\*([0-9]{1,5})"):
        while found := re.search(pattern, text, re.ASCII):
            if int(found[2]) < 1:
                _wrong("layout", where, f"{found[0]} repeats nothing; leave it out")
            if len(text) + len(found[1]) * int(found[2]) > LARGEST_LAYOUT:
                _wrong("layout", where, f"it stands for more than {LARGEST_LAYOUT} letters")
            text = text[: found.start()] + found[1] * int(found[2]) + text[found.end() :]
    for letter in text:
        if letter in "()*" or letter.isdigit():
            _wrong("layout", where, f"{letter!r} does not belong to x*N or (...)*N")
    return text


def _read_recompute(flags: Flags, plan: Plan) -> JobRecompute:
    mode = flags.get("--recompute-granularity") or "none"
    method, count = (flags.get(f"--recompute-{key}") for key in ("method", "num-layers"))
    if mode not in ("none", "selective", "full"):
        _wrong("--recompute-granularity", mode, "it is selective or full")
    if mode != "full":
        if method is not None or count is not None:
            _wrong("--recompute-method", method, "method and num-layers belong to --recompute-granularity full")
        return JobRecompute(mode)
    number = _count(flags, "--recompute-num-layers")
    if method == "uniform":
        if number != 1:
            _wrong("--recompute-num-layers", number, "with --recompute-method uniform only 1 keeps each layer's input")
        return JobRecompute(mode, _longest_chunk(plan))
    if method != "block":
        _wrong("--recompute-method", method, "it is uniform or block")
    if number > _longest_chunk(plan):
        _wrong("--recompute-num-layers", number, f"no stage has so many layers; {_longest_chunk(plan)} are all")
    return JobRecompute(mode, number)


def _checked_flags(problem: Problem, variables: Mapping[str, str]) -> Flags:
    """PLAN as flags, once MODEL is what the problem's model needs."""
    model, wanted = _flags(variables["MODEL"]), _model_flags(problem)
    for flag in dict.fromkeys([*wanted, *model]):
        if flag not in wanted or flag not in model or wanted[flag] != model[flag]:
            need = wanted.get(flag, "left out") if flag in wanted else "left out"
            _wrong(flag, model.get(flag, "left out"), f"the model of the problem needs {need or 'it'}")
    known = {"--use-distributed-optimizer": False, "--sequence-parallel": False}
    known |= dict.fromkeys((f"--recompute-{key}" for key in ("granularity", "method", "num-layers")), True)
    required = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "pipeline-model-parallel-layout")
    needed = [f"--{key}" for key in (*required, "micro-batch-size", "global-batch-size")]
    known |= dict.fromkeys(needed, True)
    flags = _flags(variables["PLAN"])
    for flag, value in flags.items():
        if flag not in known or known[flag] != (value is not None):
            _wrong(flag, value, "no flag of a plan is written so")
    for flag in needed:
        if flag not in flags:
            _wrong(flag, "nothing", "it must be stated")
    for flag, variable in (("--pipeline-model-parallel-size", "$PP"), ("--pipeline-model-parallel-layout", "$LAYOUT")):
        if flags[flag] != variable:
            _wrong(flag, flags[flag], f"it is {variable}, which the script checks")
    return flags


def _flags(text: str) -> Flags:
    words = shlex.split(text)
    flags: Flags = {}
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if not word.startswith("--"):
            continue
        if word in flags:
            _wrong(word, flags[word], "it is there twice; the trainer would take the last one")
        flags[word] = None if after.startswith("--") else after
    if len(words) != len(flags) + sum(value is not None for value in flags.values()):
        _wrong(SCRIPT, shown(text[:80]), "a flag takes one value")
    return flags


def _variables(text: str) -> dict[str, str]:
    """What the script assigns before it does anything."""
    found: dict[str, str] = {}
    for name, pattern in {
        **dict.fromkeys(("PP", "VPP"), r"(.+)"),
        "LAYOUT": r"'([^'\n]*)'",
        "DEVICES": r"\(([^)\n]*)\)",
        **dict.fromkeys(("PLAN", "MODEL"), r"\(\n(.*?)\n\)"),
    }.items():
        matches = re.findall(
            rf"^{name}={pattern}$", text, re.MULTILINE | (re.DOTALL if name in ("PLAN", "MODEL") else 0)
        )
        if len(matches) != 1:
            _wrong(SCRIPT, name, f"it must be assigned once, not {len(matches)} times")
        found[name] = matches[0]
    return found


def _count(flags: Flags, flag: str) -> int:
    return _number(flag, flags.get(flag))


def _number(name: str, value: str | None) -> int:
    if value is None or not re.fullmatch(r"[1-9][0-9]{0,14}", value, re.ASCII):
        _wrong(name, shown(value), "it must be a whole number of at least 1")
    return int(value)


def _wrong(field: str, value: object, rule: str) -> NoReturn:
    raise InputError(f"{NAME}: {field}={value}: {rule}")


TARGET = Target(any_problem, nearest, files, read)
