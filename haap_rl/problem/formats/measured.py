"""Reader of published training runs: one CSV row each, with the layout that ran and what it took.

A row in scope becomes an ordinary Problem and Plan; every default that had to be used is listed with it. A row that
the estimator cannot price yet is kept with the reason; a row that breaks the schema is reported by its line. What a
row becomes depends on its cells alone, never on who published it.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from haap_rl.problem.cluster import Cluster, DeviceGroup, Link, device_from_config, link_from_config
from haap_rl.problem.errors import InputError, PlanError, shown
from haap_rl.problem.formats.files import MIB, read_text
from haap_rl.problem.formats.nodes import DeviceNamed, usual_node
from haap_rl.problem.model import Model
from haap_rl.problem.plan import (
    Plan,
    Problem,
    Recompute,
    RecomputeMode,
    ReplicaGroup,
    Stage,
    even_layers,
    uniform_plan,
)

TEXTS = (
    *("row_id", "source_id", "model", "arch", "gpu", "intra_node", "inter_node", "zero", "recompute", "notes"),
    *("seq_parallel", "precision", "schedule", "stage_plan", "hetero", "mem_kind", "gpus_per_node", "tp"),
)
# column -> the largest count that is taken: beyond it a row is a slip, and pricing it would take for ever
LARGEST = {
    "layers": 10_000,
    "hidden": 1_000_000,
    "n_gpus": 1_000_000,
    "pp": 10_000,
    "dp": 1_000_000,
    "gbs": 100_000_000,
}
COUNTS = (
    *("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "n_gpus", "gbs", "mbs", "pp", "dp"),
    *("cp", "ep", "vpp"),
)
NUMBERS = ("iter_time_s", "derived_iter_time_s", "mem_gib")
STATUSES = ("ok", "oom", "failed_or_oom", "memory_only")
COLUMNS = (*TEXTS, *COUNTS, *NUMBERS, "status", "quality")
RATE = "tflops_per_gpu"  # read where the file has it
NEEDED = ("layers", "hidden", "seq_len", "mbs", "tp", "pp", "dp")  # and gbs, where there is a time
LARGEST_FILE_BYTES = 64 * MIB
MOST_STEPS = 1_000_000  # stages x chunks of each x micro-batches
VOCAB = 50_257  # of a row that does not say: GPT-2's
USUAL_NODE_SIZE = 8
HUGGINGFACE_FAMILIES = ("opt-", "gpt-neo-")  # models that exist as modules of that library, not in Megatron-LM
RECOMPUTE_RATIO = 1.2  # printed FLOP rate over the model's; 4/3 with full recompute, 1 without, to some rounding
MANY_ADAPTERS_BYTES_PER_S = 50e9  # 400 Gb/s: a node with as much has it over the adapters that are usual
AMP_UNITS_BEFORE, AMP_UNITS_AFTER = 2, 4  # pseudo-units around the layers in the form "boundaries_over_30_units"

# label of a device, in small letters with dashes -> preset in conf/device; the longest that a label starts with wins
DEVICES = {
    "a100": "a100_80",  # the larger one where its memory is not stated: a run that ran had enough
    "a100-40": "a100_40",
    "a100-80": "a100_80",
    "a100-pcie": "a100_40_pcie",
    "a100-80-pcie": "a100_80_pcie",
    "a10": "a10",
    "a10g": "a10g",
    "a40": "a40",
    "a6000": "a6000",
    "a800": "a800_80",
    "b200": "b200",
    "dgx-b200": "b200",
    "dgx-h100": "h100_80",
    "gh": "gh200_96",
    "gh200": "gh200_96",
    "h100": "h100_80",
    "h100-pcie": "h100_80_pcie",
    "h200": "h200",
    "h20": "h20_96",
    "h800": "h800_80",
    "l4": "l4",
    "l40": "l40",
    "l40s": "l40s",
    "mi250": "mi250x",
    "mi300": "mi300x",
    "mi325": "mi325x",
    "mi355": "mi355x",
    "p100": "p100_16",
    "p100-pcie": "p100_16_pcie",
    "rtx-3090": "rtx_3090",
    "rtx-4090": "rtx_4090",
    "t4": "t4",
    "v100": "v100_16",
    "v100-32": "v100_32",
    "v100-32-pcie": "v100_32_pcie",
    "v100-(dgx-2)": "v100_32",
}


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One row. `problem` and `plan` are None exactly where `skipped` says why.

    time_s: seconds of one iteration, None where the source gives none; derived: computed from a printed rate.
    batch_stated: the row gives its global batch; where it does not, a prediction of its time means nothing.
    ran: it did not fail (a stated requirement that was never run counts as neither: None).
    assumptions: what the row leaves open and was filled in, as "column=value (why)".
    """

    row_id: str
    source_id: str
    time_s: float | None
    derived: bool
    memory_gib: float | None
    batch_stated: bool
    status: str
    ran: bool | None
    quality: str
    suspect: bool
    problem: Problem | None
    plan: Plan | None
    assumptions: tuple[str, ...]
    skipped: str
    file: str = ""  # where it stands
    line: int = 0


class Malformed(NamedTuple):
    """A row that breaks the schema: its line in the file, its row_id if it has one, and the rule."""

    line: int
    row_id: str
    rule: str


class _Skip(Exception):
    """A row outside what can be priced; the message is the reason."""


def read(
    path: str | Path, device_named: DeviceNamed, taken: Collection[str] = ()
) -> tuple[list[MeasuredRun], list[Malformed]]:
    """The rows of the CSV file `path`, and those that break the schema.

    device_named: returns the mapping of a registered device. taken: row_ids that other files hold already. Raises
    InputError where the file cannot be read or has no such columns.
    """
    where = f"measured runs {str(path)!r}"
    text = read_text(path, "measured runs", LARGEST_FILE_BYTES)
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""))
        header = list(reader.fieldnames or ())
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise InputError(f"{where}: it is not CSV ({error}); check that it is the right file") from None
    for column in COLUMNS:
        if header.count(column) != 1:
            fault = f"column {column!r} is there twice" if column in header else f"it has no column {column!r}"
            raise InputError(f"{where}: {fault}; needed once each are {', '.join(COLUMNS)}")
    if not rows:
        raise InputError(f"{where}: it has a header but no rows")
    devices = cache(device_named)
    runs: list[MeasuredRun] = []
    malformed: list[Malformed] = []
    seen = set(taken)
    for line, row in rows:
        row_id = (row.get("row_id") or "").strip()
        try:
            if not row_id or row_id in seen:
                raise InputError("row_id is blank" if not row_id else f"row_id {shown(row_id)} is there twice")
            seen.add(row_id)
            if None in row or None in row.values():
                raise InputError(f"it does not have the {len(header)} cells of the header")
            runs.append(replace(_run(_Row(row), devices), file=str(path), line=line))
        except InputError as error:
            malformed.append(Malformed(line, row_id, str(error)))
    return runs, malformed


class _Row:
    """The cells of a row, checked, and what had to be assumed where they are blank."""

    def __init__(self, cells: Mapping[str, str]) -> None:
        self.cells = {name: cells[name].strip() for name in COLUMNS}
        self.cells[RATE] = cells.get(RATE, "").strip()
        self.assumptions: list[str] = []
        self.counts = {name: self._number(name, whole=True) for name in COUNTS}
        self.numbers = {name: self._number(name) for name in (*NUMBERS, RATE)}
        for name, known in (("status", STATUSES), ("quality", ("A", "B", "C")), ("seq_parallel", ("yes", "no", ""))):
            if self[name] not in known:
                raise InputError(f"{name}={shown(self[name])} is not one of {', '.join(filter(None, known))}")

    def __getitem__(self, name: str) -> str:
        return self.cells[name]

    def _number(self, name: str, whole: bool = False) -> float | None:
        text = self.cells[name]
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        most = LARGEST.get(name, 10**9) if whole else 1e15
        if not (0 < value <= most) or (whole and value != int(value)):
            kind = "whole " if whole else ""
            raise InputError(f"{name}={shown(text)} must be a {kind}number above 0 and up to {most:,.0f}, or blank")
        return value

    @property
    def time_s(self) -> float | None:
        """Seconds of an iteration, printed or derived."""
        printed = self.numbers["iter_time_s"]
        return self.numbers["derived_iter_time_s"] if printed is None else printed

    def count(self, name: str, default: int | None = None, why: str = "") -> int:
        """A count; the default, noted, where it is blank; without a default the row is skipped."""
        value = self.counts[name]
        if value is not None:
            return int(value)
        if default is None:
            raise _Skip(f"blank: {name}")
        self.assume(name, default, why)
        return default

    def assume(self, name: str, value: object, why: str) -> None:
        self.assumptions.append(f"{name}={value} ({why})")


def _run(row: _Row, device_named: DeviceNamed) -> MeasuredRun:
    problem, plan, skipped = None, None, ""
    try:
        problem, plan = _problem_and_plan(row, device_named)
    except _Skip as reason:
        skipped = str(reason)
    except PlanError as error:
        skipped = f"not a legal plan here: {error}"
    failed = row["status"] in ("oom", "failed_or_oom")
    return MeasuredRun(
        row_id=row["row_id"],
        source_id=row["source_id"],
        time_s=row.time_s,
        derived=row.numbers["iter_time_s"] is None and row.time_s is not None,
        memory_gib=row.numbers["mem_gib"],
        batch_stated=row.counts["gbs"] is not None,
        status=row["status"],
        ran=False if failed else None if "requirement" in row["mem_kind"] else True,
        quality=row["quality"],
        suspect="SUSPECT" in row["notes"],
        problem=problem,
        plan=plan,
        assumptions=tuple(row.assumptions) if plan is not None else (),
        skipped=skipped,
    )


def _problem_and_plan(row: _Row, device_named: DeviceNamed) -> tuple[Problem, Plan]:
    _check_scope(row)
    pp, dp, mbs = row.count("pp"), row.count("dp"), row.count("mbs")
    tps = _tensor_degrees(row["tp"])
    stage_plan = _stage_plan(row, pp)
    if stage_plan is not None and stage_plan.replicas:
        num_devices = sum(tp for replicas in stage_plan.replicas for _, tp in replicas)
        stated = f"stage_plan uses {num_devices} devices"
    else:
        if len(tps) > 1:
            raise _Skip(f"tp={row['tp']} without a stage_plan that says where")
        num_devices = tps[0] * pp * dp
        stated = f"tp={tps[0]} x pp={pp} x dp={dp} makes {num_devices}"
    if row.count("n_gpus") != num_devices:
        raise InputError(f"{stated}, but n_gpus={row.count('n_gpus')}; they must be equal")
    batch = row.count("gbs", mbs * dp * pp, "one micro-batch per stage; no time is predicted for it")
    chunks = pp * int(row.counts["vpp"] or 1)
    if batch // (mbs * dp) * chunks > MOST_STEPS:
        raise InputError(f"gbs={batch}: {batch // (mbs * dp)} micro-batches in {chunks} chunks exceed {MOST_STEPS:,}")
    cluster = _cluster(row, stage_plan, device_named)
    problem = Problem(
        cluster=cluster,
        model=_model(row, max(tps)),
        seq_len=row.count("seq_len"),
        global_batch_size=batch,
        precision=_precision(row),
        fused_attention=_fused_attention(row),
        framework=_framework(row),
        launch_blocking="CUDA_LAUNCH_BLOCKING=1" in row["notes"],
    )
    return problem, _plan(row, problem, stage_plan, tps[0], pp, dp, mbs)


def _check_scope(row: _Row) -> None:
    """Skip a row with nothing to compare, with a blank cell that is needed, or with what is not priced yet."""
    if not (row.time_s or row.numbers["mem_gib"] or row["status"] in ("oom", "failed_or_oom")):
        raise _Skip("neither time, memory nor a failure is given")
    needed = (*NEEDED, "gbs") if row.time_s else NEEDED
    if blank := [column for column in needed if not row[column]]:
        raise _Skip("blank: " + " ".join(blank))
    features = []
    text = f"{row['recompute']}; {row['notes']}".lower()
    if (row.counts["cp"] or 1) != 1:
        features.append("context parallelism")
    if (row.counts["ep"] or 1) != 1 or "moe" in row["arch"].lower():
        features.append("mixture of experts")
    if re.search(r"fp8|fp4", row["precision"].lower()):
        features.append("fp8/fp4")
    if "model offload" in text or any(float(x) > 0 for x in re.findall(r"offload (?:ratio )?(\d+(?:\.\d+)?)", text)):
        features.append("offload")
    if re.search(r"gpipe|zb|zero.bubble|v-half|v-min", row["schedule"].lower()):
        features.append("schedule other than 1F1B")
    if "lora" in text or "lora" in row["model"].lower():
        features.append("LoRA")
    if features:
        raise _Skip(" + ".join(features))


def _tensor_degrees(text: str) -> list[int]:
    """The tensor-parallel degrees that a cell states: one, or several such as "2/4" in a mixed plan."""
    if not re.fullmatch(r"[1-9][0-9]{0,5}(?:\.0+)?(?:/[1-9][0-9]{0,5})*", text):
        raise InputError(f"tp={shown(text)} must be a whole number above 0, or several with '/' between them")
    return [int(float(part)) for part in text.split("/")]


def _model(row: _Row, tp: int) -> Model:
    arch, hidden = row["arch"].lower(), row.count("hidden")
    llama, mpt, bloom = "llama" in arch, "mpt" in arch, "bloom" in arch
    heads = row.count("heads", _usual_heads(hidden, tp), "hidden / 128, divisible by tp")
    ffn = round(8 / 3 * hidden / 256) * 256 if llama else 4 * hidden
    return Model(
        name=row["model"] or "unnamed",
        num_layers=row.count("layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=row.count("kv_heads", heads, "as many as heads"),
        head_dim=max(1, hidden // heads),
        ffn=row.count("ffn", max(1, ffn), "8/3 x hidden, gated" if llama else "4 x hidden"),
        gated_mlp=llama,
        vocab=row.count("vocab", VOCAB, "GPT-2's"),
        max_positions=row.count("seq_len"),
        learned_positions=not (llama or bloom),
        norm="rmsnorm" if llama else "layernorm",
        tied_embeddings=not llama,
        biases=not (llama or mpt),
        dropout=not (llama or mpt),
    )


def _usual_heads(hidden: int, tp: int) -> int:
    """Heads of 128 features, or of the next size up of which tp ranks can have equal numbers."""
    most = max(1, hidden // 128)
    heads = most - most % tp
    while heads > 0 and hidden % heads:
        heads -= tp
    return heads if heads > 0 else most


# ------------------------------------------------------------------------------------------------ cluster
class _Node(NamedTuple):
    """Some equal nodes: the source's label of their devices, how many, and how many devices each has."""

    label: str
    num_nodes: int
    size: int


def _cluster(row: _Row, stage_plan: _StagePlan | None, device_named: DeviceNamed) -> Cluster:
    """Groups of the row's devices, in the order of their ranks, named after their shape."""
    num_devices = row.count("n_gpus")
    nodes = _nodes(row, stage_plan, num_devices)
    if sum(node.num_nodes * node.size for node in nodes) != num_devices:
        raise InputError(
            f"gpus_per_node={shown(row['gpus_per_node'])}: the nodes do not add up to n_gpus={num_devices}"
        )
    groups = tuple(_group(row, node, position, device_named) for position, node in enumerate(nodes))
    shape = " + ".join(f"{group.device.name} {group.num_nodes}x{group.devices_per_node}" for group in groups)
    return Cluster(shape, groups)


def _nodes(row: _Row, stage_plan: _StagePlan | None, num_devices: int) -> list[_Node]:
    """The nodes in the order of their ranks."""
    if shape := re.findall(r"(\d{1,6}) nodes? x ?(\d{1,6})", row["gpus_per_node"]):
        return [_Node(row["gpu"], int(nodes), int(size)) for nodes, size in shape]
    size = USUAL_NODE_SIZE
    if re.fullmatch(r"[1-9][0-9]{0,5}(?:\.0+)?", row["gpus_per_node"]):
        size = int(float(row["gpus_per_node"]))
    elif row["gpus_per_node"]:
        raise InputError(
            f"gpus_per_node={shown(row['gpus_per_node'])} must be a whole number or 'N nodes x SIZE + ...'"
        )
    else:
        row.assume("gpus_per_node", size, "usual")
    if "+" not in row["gpu"]:
        return _filled(row, row["gpu"], num_devices, size)
    if stage_plan is not None and stage_plan.replicas:  # it says which devices each stage has
        devices: dict[str, int] = {}
        for replicas in stage_plan.replicas:
            for label, tp in replicas:
                devices[label] = devices.get(label, 0) + tp
        return [node for label, count in devices.items() for node in _filled(row, label, count, size)]
    nodes = []  # such as "V100+T4", links "170 Gb/s on the 3 V100 nodes, 50 Gb/s on the T4 node"
    for label in (label.strip() for label in row["gpu"].split("+")):
        found = re.search(rf"the (?:(\d{{1,6}}) )?{re.escape(label)} node", row["intra_node"])
        if found is None:
            raise _Skip(f"number of {label} nodes is not stated")
        nodes.append(_Node(label, int(found[1] or 1), size))
    return nodes


def _filled(row: _Row, label: str, num_devices: int, size: int) -> list[_Node]:
    """Nodes of `size`, and a last smaller one for what is left."""
    full, rest = divmod(num_devices, size)
    if full and rest:
        row.assume("gpus_per_node", f"{rest} on the last node", f"{num_devices} do not fill nodes of {size}")
    return [_Node(label, full, size)] * bool(full) + [_Node(label, 1, rest)] * bool(rest)


def _preset_name(label: str) -> str:
    """The preset of a device's label in a source. Skips the row where there is none."""
    text = re.sub(r"[\s_]+", "-", label.strip().lower())
    pcie = "-pcie" if "pcie" in text and "nvlink" not in text else ""
    text = text.replace("gb", "").replace("-sxm", "")
    names = []
    for key in DEVICES:  # what follows must not be more of the same number: h20 does not name an h200
        if text.startswith(key) and not text[len(key) :][:1].isdigit():
            names.append(key)
    if not names:
        raise _Skip(f"unknown device: {shown(label)}")
    name = max(names, key=len).removesuffix("-pcie")
    return DEVICES.get(name + pcie, DEVICES[name])


def _group(row: _Row, node: _Node, position: int, device_named: DeviceNamed) -> DeviceGroup:
    """Device type, links and network adapters of one kind of node."""
    config = device_named(_preset_name(node.label))
    usual = usual_node("measured runs", config)
    device = device_from_config(config)
    intra, inter = (link_from_config(key, usual[key]) for key in ("intra_node", "inter_node"))
    nics = int(usual.get("nics_per_node", 1))
    # what a script or a configuration assumes of a link inside a node is weaker than the device's data sheet
    if found := re.search(r"measured[^~]*~(\d{1,6}) GB/s", row["intra_node"]):
        intra = Link(intra.latency_s, float(found[1]) * 1e9)
    elif (found := re.search(r"NVLink \((\d{1,2}) links", row["intra_node"])) and "nvlink" in usual:
        intra = Link(intra.latency_s, int(found[1]) * float(usual["nvlink"]["bandwidth_gb_per_s"]) * 1e9)
    elif node.size > 1 and not re.search(r"nvlink|nvswitch", row["intra_node"].lower()):
        row.assume("intra_node", f"{intra.bandwidth_bytes_per_s / 1e9:g} GB/s", "data sheet")
    rate, given_nics = _network(row["inter_node"], node.label, node.size)
    if rate is not None:
        latency = re.search(r"(\d{1,6}(?:\.\d{1,6})?) ms", row["inter_node"])
        inter = Link(float(latency[1]) * 1e-3 if latency and float(latency[1]) > 0 else inter.latency_s, rate)
        nics = given_nics or (nics if rate >= MANY_ADAPTERS_BYTES_PER_S else 1)
    elif row.count("n_gpus") > node.size:
        row.assume("inter_node", f"{inter.bandwidth_bytes_per_s / 1e9:g} GB/s per node", "usual node")
    name = f"{device.name}_{position}"
    return DeviceGroup(name, device, node.num_nodes, node.size, intra, inter, min(nics, node.size))


def _network(text: str, label: str, size: int) -> tuple[float | None, int | None]:
    """(bytes per second of a node in one direction, adapters of a node) that a cell states; None where it does not.

    size: devices of the node, for speeds per device.
    """
    number, rate = r"(\d{1,6})", r"(\d{1,6}(?:\.\d{1,6})?)"
    unit = r"G(b/s|bps|bit/s|B/s)"
    if label and (found := re.search(rf"{rate} {unit}(?: on the)? {re.escape(label)} node", text)):
        return _positive(_bytes_per_s(found[1], found[2])), 1
    if found := re.search(rf"{number} x (?:Omni-Path )?{rate}(?: {unit})?", text):
        return _positive(int(found[1]) * _bytes_per_s(found[2], found[3])), int(found[1]) or None
    if found := re.search(rf"{number} Omni-Path links per node", text):  # of 100 Gb/s each
        return _positive(int(found[1]) * _bytes_per_s("100", None)), int(found[1]) or None
    if found := re.search(rf"{rate} {unit} [^,]*per NIC, {number} NICs", text):
        return _positive(int(found[3]) * _bytes_per_s(found[1], found[2])), int(found[3]) or None
    if "measured" not in text and (found := re.search(rf"{rate} {unit}(.*)", text)):
        each = _positive(_bytes_per_s(found[1], found[2]))
        per_device = each is not None and re.match(r"[^,;(]*per (?:GPU|device)", found[3], re.IGNORECASE)
        return (size * each, size) if per_device and each else (each, None)
    return None, None


def _bytes_per_s(rate: str, unit: str | None) -> float:
    """A rate in GB/s where the unit says so, else in Gb/s."""
    return float(rate) * 1e9 / (1 if unit == "B/s" else 8)


def _positive(value: float) -> float | None:
    return value if value > 0 else None


# --------------------------------------------------------------------------------------------------- plan
def _precision(row: _Row) -> str:
    text = row["precision"].lower()
    for name in ("bf16", "fp16", "fp32"):
        if name in text:
            return name
    row.assume("precision", "fp16", "16 bit")
    return "fp16"


def _fused_attention(row: _Row) -> bool:
    stated = "flashattention" in row["notes"].lower()
    fused = stated or "mpt" in row["arch"] or "llama" in row["arch"]
    if not stated:
        row.assume("fused_attention", str(fused).lower(), "by architecture and year")
    return fused


def _framework(row: _Row) -> str:
    schedule, zero = row["schedule"].lower(), row["zero"].lower()
    if "fsdp" in zero:
        return "fsdp"
    if row["model"].lower().startswith(HUGGINGFACE_FAMILIES):
        row.assume("framework", "huggingface", "its model is a class of that library")
        return "huggingface"
    return "deepspeed" if "deepspeed" in schedule or zero.startswith("3") or "zero-3" in schedule else "megatron"


def _zero_stage(row: _Row) -> int:
    text = row["zero"].lower()
    if not text and row.count("dp") > 1:
        row.assume("zero", 0, "not stated")
    if "in a node" in text:
        row.assume("zero", text[:1], "over all replicas")
    if "zero-2" in text:
        return 2
    if "fsdp" in text or "zero-3" in text or text.startswith("3"):
        return 3
    return int(text[0]) if text[:1] in ("1", "2") else 0


def _recompute(row: _Row, problem: Problem) -> RecomputeMode:
    text = row["recompute"].lower()
    if text.startswith(("full", "yes")):
        return "full"
    if text.startswith("selective") or "core_attn" in text:
        return "selective"
    if text == "none":
        return "none"
    if text:  # a list of cheap operators: the attention core, which is what costs memory, is not among them
        row.assume("recompute", "none", f"the nearest to {shown(row['recompute'])} that is priced")
        return "none"
    ratio = _printed_over_model_flops(row, problem)
    full = ratio is not None and ratio >= RECOMPUTE_RATIO
    why = "not stated" if ratio is None else f"the printed FLOP rate is {ratio:.2f} of the model's"
    row.assume("recompute", "full" if full else "none", why)
    return "full" if full else "none"


def _printed_over_model_flops(row: _Row, problem: Problem) -> float | None:
    """Printed FLOP rate over what the model alone needs in the measured time; 4/3 says that layers ran twice forward.

    Model: 6 P per token, and 12 L h s per token for attention, the score matrix whole (Narayanan et al. 2021).
    """
    printed, time_s, model = row.numbers[RATE], row.time_s, problem.model
    if printed is None or time_s is None:
        return None
    per_token = 6 * model.num_parameters + 12 * model.num_layers * model.hidden * problem.seq_len
    return printed * 1e12 * row.count("n_gpus") * time_s / (per_token * problem.tokens_per_iteration)


def _plan(row: _Row, problem: Problem, stage_plan: _StagePlan | None, tp: int, pp: int, dp: int, mbs: int) -> Plan:
    mode, zero_stage = _recompute(row, problem), _zero_stage(row)
    if not row["seq_parallel"] and row["tp"] != "1":
        row.assume("seq_parallel", "no", "not stated")
    sequence_parallel = row["seq_parallel"] == "yes"
    num_layers = problem.model.num_layers
    if stage_plan is None:
        layers = even_layers(num_layers, pp)
        if num_layers % pp:
            row.assume("stage_plan", "even", "a remainder on the middle stages")
    else:
        layers = _without_empty_stages(row, stage_plan.layers)
    if stage_plan is not None and stage_plan.replicas:
        replicas = [_replica_groups(problem.cluster, stage, mbs) for stage in stage_plan.replicas]
    else:
        replicas = [stage.replicas for stage in uniform_plan(problem, tp, pp, dp, mbs, sequence_parallel=False).stages]
    stages = []
    for i, (count, groups) in enumerate(zip(layers, replicas, strict=True)):
        again = Recompute(mode, count) if count and mode != "none" else Recompute()
        stages.append(Stage(count + (i == 0) + (i == pp - 1), groups, again))
    num_microbatches = problem.global_batch_size // (mbs * dp)
    plan = Plan(tuple(stages), num_microbatches, zero_stage, sequence_parallel, _virtual_stages(row, pp))
    if plan.virtual_stages > 1 and (num_microbatches % pp or any(count % plan.virtual_stages for count in layers)):
        row.assume("vpp", 1, f"{plan.virtual_stages} chunks do not divide the stages or micro-batches")
        plan = replace(plan, virtual_stages=1)
    problem.validate(plan)
    return plan


def _virtual_stages(row: _Row, pp: int) -> int:
    return row.count("vpp", 1, "not stated") if pp > 1 else 1


class _StagePlan(NamedTuple):
    """layers: of each stage. replicas: label of the devices and tp of each replica of each stage; empty if not said."""

    layers: tuple[int, ...]
    replicas: tuple[tuple[tuple[str, int], ...], ...]


def _stage_plan(row: _Row, pp: int) -> _StagePlan | None:
    """The stages that a row spells out, in either form; even stages where they contradict the row's other cells."""
    text = row["stage_plan"]
    if not text:
        return None
    form = "neither a list of stages nor boundaries_over_30_units"
    try:
        data = json.loads(text)
        if isinstance(data, list):  # units, embedding and head included
            units = [_whole(stage["n_layers"]) for stage in data]
            counts = [n - (i == 0) - (i == len(units) - 1) for i, n in enumerate(units)]
            replicas = tuple(tuple(map(_replica, stage["replicas"])) for stage in data)
        else:
            end = row.count("layers") + AMP_UNITS_BEFORE
            cuts = [_whole(cut) for cut in data["boundaries_over_30_units"]]
            whole = cuts[:1] == [0] and cuts[-1:] == [end + AMP_UNITS_AFTER]
            counts = [b - a for a, b in pairwise(min(max(cut, AMP_UNITS_BEFORE), end) for cut in cuts)] if whole else []
            replicas = ()
    except RecursionError:
        raise InputError(f"stage_plan={shown(text)} is nested too deeply") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise InputError(f"stage_plan={shown(text)} is {form}") from None
    if data == [] or min(counts, default=0) < 0 or not all(replicas):
        raise InputError(
            f"stage_plan={shown(text)} has no stages, or one with fewer than no layers or with no replicas"
        )
    if replicas and len(replicas) != pp:
        raise InputError(f"stage_plan has {len(replicas)} stages, but pp={pp}; they must be equal")
    if len(counts) != pp or sum(counts) != row.count("layers"):
        row.assume("stage_plan", "even", f"as given it does not hold {row.count('layers')} layers in {pp} stages")
        return _StagePlan(even_layers(row.count("layers"), pp), replicas)
    return _StagePlan(tuple(counts), replicas)


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST["layers"]:
        raise ValueError(value)
    return value


def _replica(entry: Mapping[str, Any]) -> tuple[str, int]:
    """(label, tp) of a replica such as {"gpus": "4xGH-96", "tp": 4}."""
    found = re.fullmatch(r"(\d{1,6})x(.{1,100})", entry["gpus"])
    if found is None or int(found[1]) != entry["tp"] or int(found[1]) < 1:
        raise ValueError(entry)
    return found[2], int(found[1])


def _replica_groups(cluster: Cluster, replicas: tuple[tuple[str, int], ...], mbs: int) -> tuple[ReplicaGroup, ...]:
    """The replicas of a stage on the cluster's groups, equal ones together; each takes mbs samples."""
    groups = []
    for label, tp in dict.fromkeys(replicas):
        device = _preset_name(label)
        where = next((group.name for group in cluster.groups if group.device.name == device), None)
        if where is None:
            raise InputError(f"stage_plan has devices {shown(label)}, which the cell gpu does not name")
        groups.append(ReplicaGroup(where, tp, replicas.count((label, tp)), mbs))
    return tuple(groups)


def _without_empty_stages(row: _Row, layers: tuple[int, ...]) -> tuple[int, ...]:
    """`layers` with one of the largest stage for each stage that would hold no unit at all."""
    counts = list(layers)
    for i in range(1, len(counts) - 1):  # the outer ones hold the embedding and the head
        if counts[i] == 0 and max(counts) > 1:
            counts[counts.index(max(counts))] -= 1
            counts[i] = 1
            row.assume("stage_plan", f"1 layer on stage {i}", "it holds none; taken from the largest stage")
    return tuple(counts)
