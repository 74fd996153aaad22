"""FlagScale's heterogeneous training: the one stock trainer with tp and dp per stage.

Its YAML lists process meshes, runs of stages with the same device type, tp and dp. What it can say besides: any
layers per stage (at least one), whole layers recomputed in any number per stage, ZeRO-0 and 1. What it cannot: two
device types in one stage, unequal samples, the attention core recomputed in some stages only, interleaved stages, an
embedding or head on a stage of its own.

Legality is checked here, because there is no package to ask: the rules are those of `FSTrainArguments` (FlagScale
`train/arguments_fs.py`, flagos-ai, 2025-26). Rows of `recompute_*_per_stage_micro_batch` are [stages, micro-batches,
value]; granularity 1 is on, method 1 is "block", the first N layers of the stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple, NoReturn

import yaml

from haap_rl.cost.estimator import Estimator
from haap_rl.export.base import Files, Target, any_problem, best, checked, layers_of, on, recomputed, refused
from haap_rl.export.ranks import (
    HOSTFILE,
    RANKS,
    Launch,
    hostfile,
    launches,
    rank_table,
    ranks_csv,
    read_hosts,
)
from haap_rl.export.uniform import merged
from haap_rl.problem.errors import InputError, PlanError, shown
from haap_rl.problem.plan import Plan, Problem, Recompute, ReplicaGroup, Stage

NAME, CONFIG = "flagscale", "train.yaml"
PER_STAGE = {key: f"recompute_{key}_per_stage_micro_batch" for key in ("granularity", "method", "num_layers")}


class Mesh(NamedTuple):
    """pp consecutive stages of dp replicas of tp devices each; cp and ep are 1 in every plan."""

    tp: int
    cp: int
    ep: int
    dp: int
    pp: int


# ------------------------------------------------------------------------------------- the nearest plan
def nearest(problem: Problem, plan: Plan, estimator: Estimator) -> Plan:
    """The plan itself if FlagScale can say it, else the best one near it. Raises InputError with field and rule."""
    for i, layers in enumerate(layers_of(plan)):
        if layers < 1:
            rule = "hetero_pipeline_layer_split counts layers, of which every stage has one; move one there"
            refused(NAME, f"stage {i} num_units", plan.stages[i].num_units, rule)
    stages = tuple(map(merged, plan.stages))
    near = replace(plan, stages=stages, zero_stage=min(plan.zero_stage, 1), virtual_stages=1)
    for i, stage in enumerate(near.stages):
        if len(stage.replicas) > 1:
            found = best(estimator, (_with(near, i, on(stage, (one,))) for one in _meshes_for(problem, near, i)))
            if found is None:
                groups = " + ".join(replica.group for replica in stage.replicas)
                rule = "a mesh has one device type and equal samples, and no device group has room for the whole stage"
                refused(NAME, f"stage {i} replicas", groups, rule)
            near = found
    if len({stage.replicas[0].tp for stage in near.stages}) > 1 and not near.sequence_parallel:
        near = replace(near, sequence_parallel=True)  # FlagScale asks for it where tp differs
    near = _recomputation(near, estimator)
    try:
        problem.validate(near)
    except PlanError as error:
        raise InputError(f"{NAME}: the plan as it could be written is not legal: {error}") from None
    _check_meshes(problem, near)
    return near


def _with(plan: Plan, i: int, stage: Stage) -> Plan:
    return replace(plan, stages=(*plan.stages[:i], stage, *plan.stages[i + 1 :]))


def _meshes_for(problem: Problem, plan: Plan, i: int) -> Iterator[ReplicaGroup]:
    """One replica group in place of the several of stage i: any device group with room, its own tps, every dp."""
    samples = problem.global_batch_size // plan.num_microbatches
    own = plan.stages[i].replicas
    for group in problem.cluster.groups:
        others = (r for k, stage in enumerate(plan.stages) if k != i for r in stage.replicas if r.group == group.name)
        room = group.num_devices - sum(replica.num_devices for replica in others)
        for tp in sorted({replica.tp for replica in own}):
            for dp in range(1, min(samples, room // tp) + 1):
                if samples % dp == 0:
                    yield ReplicaGroup(group.name, tp, dp, samples // dp)


def _recomputation(plan: Plan, estimator: Estimator) -> Plan:
    """The plan with whole layers recomputed per stage, or the attention cores of all; the best one near it."""
    everywhere = [recomputed(s, "selective", layers) for s, layers in zip(plan.stages, layers_of(plan), strict=True)]
    if all(stage.recompute.mode != "selective" for stage in plan.stages) or list(plan.stages) == everywhere:
        return plan
    near = plan
    for i, stage in enumerate(plan.stages):
        if stage.recompute.mode == "selective":
            ways = (recomputed(stage, mode, stage.recompute.num_layers) for mode in ("none", "full"))
            near = best(estimator, (_with(near, i, way) for way in ways)) or near
    found = best(estimator, [near, replace(plan, stages=tuple(everywhere))])
    return near if found is None else found


# ------------------------------------------------------------------------------------------- writing
def files(problem: Problem, plan: Plan) -> dict[str, str]:
    """train.yaml, hostfile and ranks.csv of a plan that FlagScale can say."""
    table = rank_table(problem.cluster, plan)
    runs = launches(table)
    types = device_types(problem, plan)
    meshes = [i for i, (_, mesh) in enumerate(meshes_of(plan)) for _ in range(mesh.pp)]  # of each stage
    type_of = {rank.host: types[meshes[rank.stage]] for rank in table}
    text = _HEAD + yaml.safe_dump(_config(problem, plan, types), sort_keys=False, default_flow_style=None, width=110)
    return {CONFIG: text, HOSTFILE: hostfile(runs, [type_of[run.host] for run in runs]), RANKS: ranks_csv(table)}


_HEAD = """\
# FlagScale, by a plan of haap_rl: the parts of conf/train/*.yaml that say the plan; add data, optimizer and the rest.
# Hosts in the order of `hostfile`; replace their names, keep their order.
# hetero_current_device_type is that of the first mesh; on other hosts it is the type of their line in `hostfile`.
"""


def device_types(problem: Problem, plan: Plan) -> list[str]:
    """The type of each mesh: its device's name, numbered where that name comes back behind another.

    FlagScale orders processes by where their type stands first in the list (`RankMapper`), so it must not come back.
    """
    kinds = {group.name: _kind(group.device.name) for group in problem.cluster.groups}
    types: list[str] = []
    for kind, run in groupby(kinds[group] for group, _ in meshes_of(plan)):
        name, number = kind, 2
        while name in types:
            name, number = f"{kind}.{number}", number + 1
        types += [name for _ in run]
    return types


def _config(problem: Problem, plan: Plan, types: Sequence[str]) -> dict[str, Any]:
    model, meshes = problem.model, meshes_of(plan)
    first = plan.stages[0].replicas[0]
    hetero: dict[str, Any] = {
        "enable_hetero": True,
        "hetero_pipeline_layer_split": layers_of(plan),
        "hetero_process_meshes": [number for _, mesh in meshes for number in mesh],
        "hetero_device_types": list(types),
        "hetero_current_device_type": types[0],
        "standalone_embedding_stage": False,
        "use_partial_reduce_for_shared_embedding": model.tied_embeddings and meshes[0][1].dp != meshes[-1][1].dp,
    }
    system: dict[str, Any] = {
        "tensor_model_parallel_size": first.tp,
        "pipeline_model_parallel_size": len(plan.stages),
        "sequence_parallel": plan.sequence_parallel,
        "use_distributed_optimizer": plan.zero_stage == 1,
        "ckpt_format": "torch",  # the distributed format lacks meshes of different tp (FlagScale issue 319)
        **_recompute_config(plan),
        "precision": {} if problem.precision == "fp32" else {problem.precision: True},
        "hetero": hetero,
    }
    return {
        "system": system,
        "model": {
            "num_layers": model.num_layers,
            "hidden_size": model.hidden,
            "ffn_hidden_size": model.ffn,
            "num_attention_heads": model.heads,
            "num_query_groups": model.kv_heads,
            "kv_channels": model.head_dim,
            "seq_length": problem.seq_len,
            "max_position_embeddings": max(model.max_positions, problem.seq_len),
            "untie_embeddings_and_output_weights": not model.tied_embeddings,
            "micro_batch_size": first.microbatch_size,
            "global_batch_size": problem.global_batch_size,
        },
    }


def meshes_of(plan: Plan) -> list[tuple[str, Mesh]]:
    """(device group, mesh) of each run of stages that are alike, front to back."""
    replicas = [stage.replicas[0] for stage in plan.stages]
    runs = groupby(replicas, key=lambda replica: (replica.group, replica.tp, replica.dp))
    return [(group, Mesh(tp, 1, 1, dp, len(list(run)))) for (group, tp, dp), run in runs]


def _recompute_config(plan: Plan) -> dict[str, Any]:
    if any(stage.recompute.mode == "selective" for stage in plan.stages):
        return {"recompute_granularity": "selective"}
    counts = [stage.recompute.num_layers for stage in plan.stages]
    if not any(counts):
        return {}
    m = plan.num_microbatches
    return {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": max(counts),  # of stages that have no row; every stage has one
        PER_STAGE["granularity"]: [[1, m, int(count > 0)] for count in counts],
        PER_STAGE["method"]: [[1, m, 1] for _ in counts],
        PER_STAGE["num_layers"]: [[1, m, count] for count in counts],
    }


def _kind(device: str) -> str:
    """A device type as a word of the hostfile."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in device)


# ------------------------------------------------------------------------------------------- reading
def read(problem: Problem, written: Files) -> Plan:
    """The plan in train.yaml and hostfile. Raises InputError, naming the rule, for what FlagScale would not take."""
    try:
        config = yaml.safe_load(written[CONFIG])
    except yaml.YAMLError:
        raise InputError(f"{NAME}: {CONFIG}: it is not YAML; write it again") from None
    system, model = _mapping(config, "system"), _mapping(config, "model")
    hetero = _mapping(system, "hetero")
    numbers = _counts(hetero, "hetero_process_meshes")
    if not numbers or len(numbers) % 5:
        _wrong("hetero_process_meshes", numbers, "it has five numbers (tp, cp, ep, dp, pp) for each mesh")
    meshes = [Mesh(*numbers[k : k + 5]) for k in range(0, len(numbers), 5)]
    split = _counts(hetero, "hetero_pipeline_layer_split")
    _check_rules(problem, system, model, meshes, split)
    size, batch = _count(model, "micro_batch_size"), _count(model, "global_batch_size")
    samples = size * meshes[0].dp
    if batch != problem.global_batch_size or batch % samples:
        _wrong("global_batch_size", batch, f"the problem has {problem.global_batch_size}, a multiple of {samples}")
    of_rank = read_hosts(problem.cluster, written[HOSTFILE], f"{NAME}: {HOSTFILE}")
    needed = sum(mesh.tp * mesh.dp * mesh.pp for mesh in meshes)
    if len(of_rank) != needed:
        _wrong(HOSTFILE, f"{len(of_rank)} slots", f"the meshes need {needed}")
    stages: list[Stage] = []
    rank = 0
    for mesh in meshes:
        for _ in range(mesh.pp):
            names = set(of_rank[rank : rank + mesh.tp * mesh.dp])
            rank += mesh.tp * mesh.dp
            if len(names) != 1:
                _wrong("hetero_process_meshes", list(mesh), f"its ranks are on {', '.join(sorted(names))}")
            i = len(stages)
            units = split[i] + (i == 0) + (i == len(split) - 1)
            stages.append(Stage(units, (ReplicaGroup(names.pop(), mesh.tp, mesh.dp, samples // mesh.dp),)))
    m = batch // samples
    again = _read_recompute(system, split, m)
    plan = Plan(
        tuple(Stage(stage.num_units, stage.replicas, mode) for stage, mode in zip(stages, again, strict=True)),
        m,
        int(_flag(system, "use_distributed_optimizer")),
        _flag(system, "sequence_parallel"),
    )
    checked(problem, plan, f"{NAME}: {CONFIG}")
    types = device_types(problem, plan)
    if hetero["hetero_device_types"] != types or hetero["hetero_current_device_type"] != types[0]:
        rule = f"of these hosts they are {types}, and none may come back behind another"
        _wrong("hetero_device_types", hetero["hetero_device_types"], rule)
    runs = launches(rank_table(problem.cluster, plan))
    _check_hosts(runs)
    if written[HOSTFILE] != files(problem, plan)[HOSTFILE]:
        _wrong(HOSTFILE, shown(written[HOSTFILE][:80]), "hosts, slots or types are not those the plan was priced with")
    return plan


def _check_rules(
    problem: Problem, system: Mapping[str, Any], model: Mapping[str, Any], meshes: Sequence[Mesh], split: Sequence[int]
) -> None:
    """Raise InputError for the first rule of FlagScale's argument checks that is broken."""
    hetero = system["hetero"]
    pp = _count(system, "pipeline_model_parallel_size")
    if sum(mesh.pp for mesh in meshes) != pp:
        _wrong("hetero_process_meshes", sum(mesh.pp for mesh in meshes), f"their pp must add up to {pp} stages")
    if len(split) != pp:
        _wrong("hetero_pipeline_layer_split", split, f"it has one number for each of the {pp} stages")
    if sum(split) != problem.model.num_layers or _count(model, "num_layers") != problem.model.num_layers:
        _wrong("hetero_pipeline_layer_split", split, f"it must add up to num_layers={problem.model.num_layers}")
    samples = meshes[0].dp * _count(model, "micro_batch_size")
    for mesh in meshes:
        if samples % mesh.dp:
            _wrong("hetero_process_meshes", f"dp {mesh.dp}", f"it must divide dp_0 x micro_batch_size={samples}")
        if (mesh.cp, mesh.ep) != (1, 1):
            _wrong("hetero_process_meshes", f"cp {mesh.cp}, ep {mesh.ep}", "they are 1 in every mesh of a plan")
    for key in ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"):
        if system.get(key) is not None:
            _wrong(key, system[key], "meshes have no virtual stages")
    types = hetero.get("hetero_device_types")
    if not isinstance(types, list) or len(types) != len(meshes):
        _wrong("hetero_device_types", shown(types), f"it names one type for each of the {len(meshes)} meshes")
    if hetero.get("hetero_current_device_type") not in types:
        _wrong("hetero_current_device_type", shown(hetero.get("hetero_current_device_type")), "it is one of the types")
    if _flag(hetero, "standalone_embedding_stage") or not _flag(hetero, "enable_hetero"):
        _wrong("standalone_embedding_stage", True, "meshes exclude it, and need enable_hetero")
    if _flag(model, "untie_embeddings_and_output_weights") == problem.model.tied_embeddings:
        _wrong("untie_embeddings_and_output_weights", problem.model.tied_embeddings, "the model says the opposite")
    _check_ends(problem, meshes, hetero.get("use_partial_reduce_for_shared_embedding"))
    if len({mesh.tp for mesh in meshes}) > 1 and not _flag(system, "sequence_parallel"):
        _wrong("sequence_parallel", False, "meshes of different tp need it")


def _check_ends(problem: Problem, meshes: Sequence[Mesh], partial: object) -> None:
    """The rule of tied embeddings, which first and last mesh reduce together."""
    first, last = meshes[0], meshes[-1]
    if not problem.model.tied_embeddings:
        return
    if first.tp != last.tp:
        _wrong(
            "hetero_process_meshes",
            f"tp {first.tp} and {last.tp}",
            "tied embeddings need one tp in first and last; give both ends one tp",
        )
    if first.dp % last.dp and last.dp % first.dp:
        rule = "tied embeddings need the dp of first and last mesh to be multiples; change one of them"
        _wrong("hetero_process_meshes", f"dp {first.dp} and {last.dp}", rule)
    if first.dp != last.dp and partial is not True:
        rule = "tied embeddings on meshes of different dp need it"
        _wrong("use_partial_reduce_for_shared_embedding", partial, rule)


def _check_hosts(runs: Sequence[Launch]) -> None:
    hosts = [run.host for run in runs]
    for host in hosts:
        if hosts.count(host) > 1:
            rule = f"a hostfile names a host once, and stages between those of {host} run elsewhere"
            _wrong(HOSTFILE, host, rule)


def _check_meshes(problem: Problem, plan: Plan) -> None:
    """Raise InputError for a plan of meshes that FlagScale would not take."""
    meshes = [mesh for _, mesh in meshes_of(plan)]
    _check_ends(problem, meshes, True)
    _check_hosts(launches(rank_table(problem.cluster, plan)))


def _read_recompute(system: Mapping[str, Any], split: Sequence[int], m: int) -> list[Recompute]:
    mode = system.get("recompute_granularity")
    rows = {key: system.get(name) for key, name in PER_STAGE.items()}
    if mode != "full":
        if mode not in (None, "selective") or any(row is not None for row in rows.values()):
            _wrong("recompute_granularity", mode, "it is selective or full, and rows per stage need full")
        return [Recompute() if mode is None else Recompute("selective", layers) for layers in split]
    values: dict[str, list[int]] = {}
    for key, name in PER_STAGE.items():
        given = rows[key]
        if not isinstance(given, list) or len(given) != len(split):
            _wrong(name, shown(given), f"it has one row for each of the {len(split)} stages")
        for row in given:
            if not isinstance(row, list) or len(row) != 3 or row[:2] != [1, m] or type(row[2]) is not int:
                _wrong(name, shown(row), f"a row is [1, {m}, value]: one stage, all micro-batches")
        values[key] = [row[2] for row in given]
    again = []
    for i, (on_, method, count) in enumerate(zip(*values.values(), strict=True)):
        if on_ not in (0, 1) or method != 1 or not 0 <= count <= split[i] or (on_ == 1) != (count > 0):
            _wrong(PER_STAGE["num_layers"], count, f"with granularity {on_} and method {method} stage {i} cannot do it")
        again.append(Recompute("full", count) if count else Recompute())
    return again


def _mapping(config: object, key: str) -> dict[str, Any]:
    part = config.get(key) if isinstance(config, dict) else None
    if not isinstance(part, dict):
        _wrong(key, shown(part), "it must be a mapping")
    return part


def _counts(config: Mapping[str, Any], key: str) -> list[int]:
    value = config.get(key)
    if not isinstance(value, list) or not all(type(number) is int and number > 0 for number in value):
        _wrong(key, shown(value), "it must be a list of whole numbers of at least 1")
    return value


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        _wrong(key, shown(value), "it must be a whole number of at least 1")
    return value


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if not isinstance(value, bool):
        _wrong(key, shown(value), "it must be true or false")
    return value


def _wrong(field: str, value: object, rule: str) -> NoReturn:
    raise InputError(f"{NAME}: {field}={value}: {rule}")


TARGET = Target(any_problem, nearest, files, read)
