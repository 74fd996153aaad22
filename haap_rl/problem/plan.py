"""The question (Problem) and an answer (Plan): which units go where, and what makes a plan legal.

Legality is not feasibility: a plan that overflows a device's memory is legal, and the estimator says that it does
not fit. `Problem.validate` is the only legality check there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path
from typing import Any, Literal

from haap_rl.problem.cluster import PRECISIONS, Cluster
from haap_rl.problem.errors import InputError, PlanError, check_keys, label, positive_int, shown
from haap_rl.problem.formats.files import read_json_object
from haap_rl.problem.model import Model

PLAN_SCHEMA = "haap_rl.plan/1"
RecomputeMode = Literal["none", "selective", "full"]
RECOMPUTE_MODES: tuple[RecomputeMode, ...] = ("none", "selective", "full")
FRAMEWORKS = ("megatron", "deepspeed", "huggingface", "fsdp")


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """dp data-parallel replicas of one stage, each on tp devices of one device group.

    microbatch_size: samples that each replica takes of every micro-batch (Megatron's --micro-batch-size).
    """

    group: str
    tp: int
    dp: int
    microbatch_size: int

    @property
    def num_devices(self) -> int:
        return self.tp * self.dp


@dataclass(frozen=True, slots=True)
class Recompute:
    """What is computed again in the backward pass: the attention core or whole layers, in `num_layers` of a stage."""

    mode: RecomputeMode = "none"
    num_layers: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """A run of consecutive units and the replicas that hold it; several replica groups where device types mix."""

    num_units: int
    replicas: tuple[ReplicaGroup, ...]
    recompute: Recompute = Recompute()


@dataclass(frozen=True, slots=True)
class Plan:
    """Stages front to back. Unit ranges follow from the counts, so gaps and overlaps cannot be written.

    zero_stage: what the data-parallel replicas divide among them: 0 nothing, 1 the optimiser state, 2 the gradients
    too, 3 the weights too (ZeRO, FSDP).
    sequence_parallel: Megatron's, in every stage with tp > 1. virtual_stages: chunks per stage (1 = plain 1F1B, more
    = interleaved: chunk c of stage i is the c-th of the stage's layer runs, each as long).
    """

    stages: tuple[Stage, ...]
    num_microbatches: int
    zero_stage: int = 1
    sequence_parallel: bool = True
    virtual_stages: int = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """Train `model` on `cluster`: one optimiser step over global_batch_size sequences of seq_len tokens.

    fused_attention: FlashAttention-like kernels that never store the score matrix.
    framework: whose code trains it: megatron, deepspeed (its pipeline around Megatron-LM's layers), huggingface (the
    library's own modules, whose elementwise kernels are not fused) or fsdp. They differ in host time, in what they
    overlap, in kernel fusion and in the bytes of the gradients they exchange.
    launch_blocking: the host waits for every kernel (CUDA_LAUNCH_BLOCKING=1, a setting for debugging).
    """

    cluster: Cluster
    model: Model
    seq_len: int = 2048
    global_batch_size: int = 128
    precision: str = "fp16"
    optimizer: str = "adam"
    fused_attention: bool = False
    framework: str = "megatron"
    launch_blocking: bool = False

    def __post_init__(self) -> None:
        positive_int("problem", "seq_len", self.seq_len)
        positive_int("problem", "global_batch_size", self.global_batch_size)
        if self.precision not in PRECISIONS:
            raise InputError(f"problem: precision={self.precision!r} is not one of {', '.join(PRECISIONS)}")
        if self.optimizer != "adam":
            raise InputError(f"problem: optimizer={self.optimizer!r} is not supported; use optimizer=adam")
        for name in ("fused_attention", "launch_blocking"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"problem: {name}={getattr(self, name)!r} must be true or false")
        if self.framework not in FRAMEWORKS:
            raise InputError(f"problem: framework={self.framework!r} is not one of {', '.join(FRAMEWORKS)}")
        if self.model.learned_positions and self.seq_len > self.model.max_positions:
            raise InputError(
                f"problem: seq_len={self.seq_len} is longer than the {self.model.max_positions} learned positions of "
                f"model {self.model.name!r}; lower problem.seq_len or raise model.max_positions"
            )
        for group in self.cluster.groups:
            group.device.peak(self.precision)

    @property
    def tokens_per_iteration(self) -> int:
        return self.global_batch_size * self.seq_len

    # ---------------------------------------------------------------------------------------- legality
    def validate(self, plan: Plan) -> None:
        """Return if `plan` is legal for this problem; raise PlanError with field, value, rule and a way out if not."""
        if not plan.stages:
            raise PlanError("plan: it has no stages; give at least one")
        model, batch = self.model, self.global_batch_size
        if len(plan.stages) > model.num_layers:
            raise PlanError(
                f"plan: {len(plan.stages)} stages for the {model.num_layers} layers of model {model.name!r}; "
                f"use at most {model.num_layers} stages"
            )
        if plan.num_microbatches < 1 or batch % plan.num_microbatches:
            raise PlanError(
                f"plan: num_microbatches={plan.num_microbatches} does not divide global_batch_size={batch}; "
                f"choose a divisor of {batch}"
            )
        if type(plan.zero_stage) is not int or plan.zero_stage not in range(4):
            raise PlanError(f"plan: zero_stage={plan.zero_stage} is not known; use 0, 1, 2 or 3")
        if type(plan.virtual_stages) is not int or plan.virtual_stages != 1:
            self._validate_interleaving(plan)
        units = sum(stage.num_units for stage in plan.stages)
        if units != model.num_units:
            raise PlanError(
                f"plan: the stages hold {units} units but model {model.name!r} has {model.num_units} (embedding, "
                f"{model.num_layers} layers, head); change num_units of a stage by {model.num_units - units:+d}"
            )
        samples = batch // plan.num_microbatches
        used = dict.fromkeys((group.name for group in self.cluster.groups), 0)
        for index, stage in enumerate(plan.stages):
            layers = stage.num_units - (index == 0) - (index == len(plan.stages) - 1)
            self._validate_stage(f"plan: stage {index}", stage, layers, plan, samples, used)
        for group in self.cluster.groups:
            if used[group.name] > group.num_devices:
                raise PlanError(
                    f"plan: the stages use {used[group.name]} devices of group {group.name!r}, which has "
                    f"{group.num_devices}; lower tp or dp of a stage there, or move one to another group"
                )

    def _validate_interleaving(self, plan: Plan) -> None:
        """Megatron-LM's conditions for interleaved stages."""
        chunks, stages = plan.virtual_stages, len(plan.stages)
        if type(chunks) is not int or chunks < 1 or stages < 2:
            raise PlanError(
                f"plan: virtual_stages={chunks} with {stages} stages; interleave 2 or more stages, or use 1"
            )
        if plan.num_microbatches % stages:
            raise PlanError(
                f"plan: num_microbatches={plan.num_microbatches} is no multiple of the {stages} stages, as interleaved "
                "stages need; change one of them or set virtual_stages to 1"
            )
        for index, stage in enumerate(plan.stages):
            layers = stage.num_units - (index == 0) - (index == stages - 1)
            if layers % chunks:
                raise PlanError(
                    f"plan: stage {index} holds {layers} layers, which virtual_stages={chunks} does not divide; "
                    "give each stage a multiple of it"
                )
            if stage.recompute.num_layers % chunks:
                raise PlanError(
                    f"plan: stage {index} recomputes {stage.recompute.num_layers} of its {layers} layers, which "
                    f"virtual_stages={chunks} does not divide; recompute equally many in each chunk"
                )

    def _validate_stage(
        self, where: str, stage: Stage, layers: int, plan: Plan, samples: int, used: dict[str, int]
    ) -> None:
        """Check one stage that holds `layers` layers and add its devices to `used` (device group name -> devices)."""
        model = self.model
        if stage.num_units < 1:
            raise PlanError(f"{where}: num_units={stage.num_units} must be at least 1; drop the stage instead")
        if not stage.replicas:
            raise PlanError(f"{where}: it has no replicas; give at least one replica group")
        mode, recomputed = stage.recompute.mode, stage.recompute.num_layers
        if mode not in RECOMPUTE_MODES:
            raise PlanError(f"{where}: recompute mode {shown(mode)} is not one of {', '.join(RECOMPUTE_MODES)}")
        if not 0 <= recomputed <= layers or (mode == "none") != (recomputed == 0):
            raise PlanError(
                f"{where}: recompute {mode!r} of {recomputed} layers in a stage of {layers}; "
                "give 0 layers with 'none', else between 1 and the layers of the stage"
            )
        taken = 0
        for replica in stage.replicas:
            tp, dp, size = replica.tp, replica.dp, replica.microbatch_size
            if replica.group not in used:
                raise PlanError(
                    f"{where}: unknown device group {replica.group!r}; cluster {self.cluster.name!r} has "
                    f"{', '.join(used)}"
                )
            if tp < 1 or dp < 1 or size < 1:
                raise PlanError(f"{where}: tp={tp}, dp={dp} and microbatch_size={size} must each be at least 1")
            if not model.allows_tp(tp):
                raise PlanError(
                    f"{where}: tp={tp} does not divide heads={model.heads}, kv_heads={model.kv_heads} and "
                    f"ffn={model.ffn} of model {model.name!r}; choose a tp that does"
                )
            if tp > 1 and plan.sequence_parallel and self.seq_len % tp:
                raise PlanError(
                    f"{where}: tp={tp} does not divide seq_len={self.seq_len}, which sequence_parallel needs; "
                    "choose another tp or set sequence_parallel to false"
                )
            taken += dp * size
            used[replica.group] += replica.num_devices
        if taken != samples:
            raise PlanError(
                f"{where}: its replicas take {taken} samples of each micro-batch, which has {samples} "
                f"(global_batch_size={self.global_batch_size} / num_microbatches={plan.num_microbatches}); "
                "the sum of dp x microbatch_size must be equal to that"
            )

    # -------------------------------------------------------------------------------------- plan files
    def plan_to_json(self, plan: Plan) -> dict[str, Any]:
        """`plan` as plain JSON data, with what is needed to see later which problem it was made for."""
        return {
            "schema": PLAN_SCHEMA,
            "problem": self._identity(),
            "num_microbatches": plan.num_microbatches,
            "zero_stage": plan.zero_stage,
            "sequence_parallel": plan.sequence_parallel,
            "virtual_stages": plan.virtual_stages,
            "stages": [
                {
                    "num_units": stage.num_units,
                    "recompute": {"mode": stage.recompute.mode, "num_layers": stage.recompute.num_layers},
                    "replicas": [
                        {
                            "group": replica.group,
                            "tp": replica.tp,
                            "dp": replica.dp,
                            "microbatch_size_samples": replica.microbatch_size,
                        }
                        for replica in stage.replicas
                    ],
                }
                for stage in plan.stages
            ],
        }

    def load_plan(self, path: str | Path) -> Plan:
        """The legal plan in the JSON file `path`.

        Raises InputError if the file cannot be read, is not JSON, has another schema or was made for another cluster
        or model, and PlanError if the plan in it is not legal here.
        """
        where = f"plan file {str(path)!r}"
        return self.plan_from_json(read_json_object(path, "plan file"), where)

    def plan_from_json(self, data: object, where: str = "plan") -> Plan:
        """The legal plan in JSON data of schema haap_rl.plan/1; raises as `load_plan` does."""
        data = _object(where, "plan", data)
        if data.get("schema") != PLAN_SCHEMA:
            raise InputError(
                f"{where}: schema={shown(data.get('schema'))} is not {PLAN_SCHEMA!r}; "
                "write the plan again with this version"
            )
        keys = ("schema", "problem", "num_microbatches", "zero_stage", "sequence_parallel", "virtual_stages", "stages")
        check_keys(where, data, keys)
        self._check_identity(where, _object(where, "problem", data["problem"]))
        if not isinstance(data["stages"], list):
            raise InputError(f"{where}: stages={shown(data['stages'])} must be a list")
        if not isinstance(data["sequence_parallel"], bool):
            raise InputError(f"{where}: sequence_parallel={shown(data['sequence_parallel'])} must be true or false")
        plan = Plan(
            stages=tuple(_stage_from_json(f"{where}: stages.{i}", stage) for i, stage in enumerate(data["stages"])),
            num_microbatches=positive_int(where, "num_microbatches", data["num_microbatches"]),
            zero_stage=_count(where, "zero_stage", data["zero_stage"]),
            sequence_parallel=data["sequence_parallel"],
            virtual_stages=positive_int(where, "virtual_stages", data["virtual_stages"]),
        )
        self.validate(plan)
        return plan

    def _identity(self) -> dict[str, Any]:
        """What a plan file must agree with: whole numbers and names only, so that it survives JSON."""
        return {
            "model": {"name": self.model.name, "num_layers": self.model.num_layers, "hidden": self.model.hidden},
            "cluster": {
                "name": self.cluster.name,
                "groups": [
                    {
                        "name": group.name,
                        "device": group.device.name,
                        "num_nodes": group.num_nodes,
                        "devices_per_node": group.devices_per_node,
                    }
                    for group in self.cluster.groups
                ],
            },
            "seq_len_tokens": self.seq_len,
            "global_batch_size_samples": self.global_batch_size,
        }

    def _check_identity(self, where: str, given: Mapping[str, Any]) -> None:
        for key, mine in self._identity().items():
            if given.get(key) != mine:
                raise InputError(
                    f"{where}: it was made for {key} {shown(given.get(key))}, this problem has {shown(mine)}; "
                    "load it with the problem it was made for, or search again"
                )


def uniform_plan(
    problem: Problem,
    tp: int,
    pp: int,
    dp: int,
    microbatch_size: int,
    recompute: RecomputeMode = "none",
    zero_stage: int = 1,
    sequence_parallel: bool = True,
) -> Plan:
    """The plan that Megatron-LM makes of these degrees: pp stages alike, even layers, devices in the cluster's order.

    A stage that falls on the border of two device groups has replicas on both. Raises PlanError if it is not legal.
    """
    degrees = {"tp": tp, "pp": pp, "dp": dp, "microbatch": microbatch_size}
    tp, pp, dp, microbatch_size = (positive_int("uniform plan", key, value) for key, value in degrees.items())
    samples = microbatch_size * dp
    if problem.global_batch_size % samples:
        raise PlanError(
            f"uniform plan: microbatch={microbatch_size} x dp={dp} does not divide global_batch_size="
            f"{problem.global_batch_size}; choose a microbatch and dp whose product does"
        )
    room = sum(group.num_devices // tp for group in problem.cluster.groups)
    if pp * dp > room:
        raise PlanError(
            f"uniform plan: pp={pp} x dp={dp} replicas of tp={tp} devices, but cluster {problem.cluster.name!r} has "
            f"room for {room}; lower one of them"
        )
    every_place = (name for group in problem.cluster.groups for name in repeat(group.name, group.num_devices // tp))
    places = list(islice(every_place, pp * dp))  # device group of each tensor-parallel replica
    layers = even_layers(problem.model.num_layers, pp) if pp <= problem.model.num_layers else (0,) * pp
    stages = []
    for i, count in enumerate(layers):
        names = places[i * dp : (i + 1) * dp]
        replicas = tuple(ReplicaGroup(name, tp, names.count(name), microbatch_size) for name in dict.fromkeys(names))
        again = Recompute(recompute, 0 if recompute == "none" else count)
        stages.append(Stage(count + (i == 0) + (i == pp - 1), replicas, again))
    plan = Plan(tuple(stages), problem.global_batch_size // samples, zero_stage, sequence_parallel)
    problem.validate(plan)
    return plan


def even_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers per stage, a remainder on the middle stages (the outer ones hold embedding and head)."""
    each, rest = divmod(num_layers, num_stages)
    first = (num_stages - rest) // 2
    return tuple(each + (first <= i < first + rest) for i in range(num_stages))


def _stage_from_json(where: str, data: object) -> Stage:
    data = _object(where, "stage", data)
    check_keys(where, data, ("num_units", "recompute", "replicas"))
    recompute = _object(where, "recompute", data["recompute"])
    check_keys(f"{where}.recompute", recompute, ("mode", "num_layers"))
    if not isinstance(data["replicas"], list):
        raise InputError(f"{where}: replicas={shown(data['replicas'])} must be a list")
    replicas = []
    for index, entry in enumerate(data["replicas"]):
        place = f"{where}.replicas.{index}"
        entry = _object(place, "replica group", entry)
        check_keys(place, entry, ("group", "tp", "dp", "microbatch_size_samples"))
        replicas.append(
            ReplicaGroup(
                group=label(place, "group", entry["group"]),
                tp=positive_int(place, "tp", entry["tp"]),
                dp=positive_int(place, "dp", entry["dp"]),
                microbatch_size=positive_int(place, "microbatch_size_samples", entry["microbatch_size_samples"]),
            )
        )
    return Stage(
        num_units=positive_int(where, "num_units", data["num_units"]),
        replicas=tuple(replicas),
        recompute=Recompute(recompute["mode"], _count(where, "recompute.num_layers", recompute["num_layers"])),
    )


def _object(where: str, key: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{where}: {key} must be a JSON object, not {type(value).__name__}")
    return value


def _count(where: str, key: str, value: object) -> int:
    """A whole number that may be 0."""
    if type(value) is not int or value < 0:
        raise InputError(
            f"{where}: {key}={shown(value)} must be a whole number of at least 0; give for example {key}=1"
        )
    return value
