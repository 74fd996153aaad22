"""Profiles in files: our own JSON, written and read, and a reader per foreign table; `load_profile` tells them apart.

Own format "haap_rl.profile/1": see `docs/profiles.md` and `problem/schemas/profile.schema.json`. Foreign formats:

Aceso operators    Liu et al., EuroSys 2024 (microsoft/SuperScaler, MIT), the published tables joined into one CSV with
                   the columns of ACESO_COLUMNS. Times in us, memory in MiB.
Aceso collectives  the same source, rows of "Aceso V100-32 node" of a CSV with the columns of COMM_COLUMNS.
Sailor layers      Strati et al., SOSP 2025 (eth-easl/sailor, MIT), one CSV with the columns of SAILOR_COLUMNS.
Metis              Um et al., USENIX ATC 2024 (SamsungLabs/Metis, README.md): a folder of files
                   DeviceType.NAME_tpN_bsM.json.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from haap_rl.cost.profiles import (
    DIMENSIONS,
    OPERATIONS,
    UNITS,
    CollectiveCell,
    Grid,
    MeasuredFor,
    Profile,
    Timing,
    UnitCell,
)
from haap_rl.problem.cluster import PRECISIONS
from haap_rl.problem.errors import LARGEST_NUMBER, InputError, check_keys, label, positive_float, positive_int, shown
from haap_rl.problem.formats.files import read_json_object, read_text
from haap_rl.problem.model import Unit

SCHEMA = "haap_rl.profile/1"
MIB = 2**20
LARGEST_CSV_BYTES = 16 * MIB
SECONDS = ("forward_s", "backward_s", "update_s", "forward_iqr_s", "backward_iqr_s", "update_iqr_s", "attention_s")
BYTES = ("activation_bytes", "weights_bytes", "peak_bytes")

ACESO_COLUMNS = ("model", "mbs", "tp", "tp_algo", "op", "fwd_us", "bwd_us", "weights_MB", "activations_MB")
ACESO_EMBEDDING, ACESO_HEAD = ("encoder-embedding",), ("final-layernorm", "gpt-post-process")
ACESO_ATTENTION = tuple(f"enc-attention-{part}" for part in ("score", "softmax", "dropout", "context"))
ACESO_LAYER_OPERATORS = 13
ACESO_DEVICE = "v100_32"
COMM_COLUMNS = ("source_cluster", "what", "n_gpus", "size", "value")
COMM_CLUSTER = "Aceso V100-32 node"
NOT_MEASURED_MS = 1e9
SAILOR_COLUMNS = ("model", "gpu", "mbs", "tp", "role", "fwd_s", "bwd_s", "update_s")
SAILOR_ROLES: Mapping[str, Unit] = {"embedding(first)": "embedding", "mid": "layer", "head(last)": "head"}
SAILOR_DEVICES = {"GH-96": "gh200_96"}
METIS_FILE = re.compile(r"DeviceType\.(?P<device>[\w-]{1,50})_tp(?P<tp>\d{1,4})_bs(?P<size>\d{1,6})\.json")
MOST_METIS_FILES = 4096


class Dimensions(NamedTuple):
    """What a foreign table was measured for, by its name of the model."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq_len: int | None


# search/aceso_utils.py of microsoft/SuperScaler (gpt_configs)
ACESO_MODELS = {
    "350M": Dimensions(1024, 16, 16, 4096, 51200, 2048),
    "1_3B": Dimensions(2048, 32, 32, 8192, 51200, 2048),
    "2_6B": Dimensions(2560, 32, 32, 10240, 51200, 2048),
    "6_7B": Dimensions(4096, 32, 32, 16384, 51200, 2048),
    "13B": Dimensions(5120, 40, 40, 20480, 51200, 2048),
}
# training_config_opt_350.json and training_config_gpt_neo27.json of eth-easl/sailor; OPT-30: arXiv 2205.01068, Table 1,
# and its tokenizer; LLAMA-3-8: arXiv 2407.21783, Table 3
SAILOR_MODELS = {
    "OPT-350": Dimensions(1024, 16, 16, 4096, 50272, 2048),
    "GPT-Neo-2.7": Dimensions(2560, 32, 32, 10240, 128256, 2048),
    "OPT-30": Dimensions(7168, 56, 56, 28672, 50272, None),
    "LLAMA-3-8": Dimensions(4096, 32, 8, 14336, 128256, None),
}


def load_profile(path: object, model: object = None, collectives: object = None) -> Profile:
    """The profile in the file or folder `path`, whatever its format. Raises InputError naming file, key and way out.

    model        which one, where a table holds several
    collectives  a second file whose measured collectives are added
    """
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise InputError(f"profile: path={shown(path)} must be the name of a file or folder")
    profile = _load(Path(path), model)
    if collectives is None:
        return profile
    other = load_profile(collectives)
    if not other.collectives:
        raise InputError(f"{other.where}: it holds no collectives; drop estimator.profile_collectives")
    return replace(
        profile,
        collectives=(*profile.collectives, *other.collectives),
        assumptions=(*profile.assumptions, *(a for a in other.assumptions if a not in profile.assumptions)),
    )


def profile_from_config(config: Mapping[str, Any]) -> tuple[bool, Profile | None]:
    """(cached, profile or None) from the mapping of a `conf/estimator/*.yaml`."""
    check_keys("estimator", config, ("cached", "profile", "profile_model", "profile_collectives"))
    cached, profile = config["cached"], config["profile"]
    if not isinstance(cached, bool):
        raise InputError(f"estimator: cached={shown(cached)} must be true or false")
    if profile is not None:
        return cached, load_profile(profile, config["profile_model"], config["profile_collectives"])
    for key in ("profile_model", "profile_collectives"):
        if config[key] is not None:
            raise InputError(f"estimator: {key}={shown(config[key])} without a profile; give estimator.profile=FILE")
    return cached, None


def _load(path: Path, model: object) -> Profile:
    try:
        folder, single = path.is_dir(), METIS_FILE.fullmatch(path.name) is not None
    except (OSError, ValueError):
        folder = single = False
    if folder or single:
        return _refuse_model(_metis(path), model)
    text = read_text(path, "profile", LARGEST_CSV_BYTES)
    if text.lstrip().startswith("{"):
        return _refuse_model(profile_from_json(read_json_object(path, "profile"), str(path)), model)
    columns = [column.strip() for column in text[:4096].split("\n", 1)[0].split(",")]
    where = f"profile {str(path)!r}"
    if set(ACESO_COLUMNS) <= set(columns):
        return _aceso(where, str(path), _rows(where, text, ACESO_COLUMNS), model)
    if set(SAILOR_COLUMNS) <= set(columns):
        return _sailor(where, str(path), _rows(where, text, SAILOR_COLUMNS), model)
    if set(COMM_COLUMNS) <= set(columns):
        return _refuse_model(_aceso_collectives(where, str(path), _rows(where, text, COMM_COLUMNS)), model)
    raise InputError(
        f"{where}: its format is none that is known (our JSON, Aceso or Sailor tables, a Metis folder); "
        "write one with python -m haap_rl.profile"
    )


def _refuse_model(profile: Profile, model: object) -> Profile:
    if model is not None:
        raise InputError(f"{profile.where}: it holds one model, profile_model={shown(model)} chooses none; drop it")
    return profile


# ----------------------------------------------------------------------------------------- our own JSON
def profile_to_json(profile: Profile) -> dict[str, Any]:
    """The profile as plain JSON data; what was not measured is left out."""
    for_ = profile.measured_for
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "name": profile.name,
        "measured_for": {
            "model": dict(for_.dimensions),
            "seq_len_tokens": for_.seq_len,
            "precision": for_.precision,
            "fused_attention": for_.fused_attention,
            "sequence_parallel": for_.sequence_parallel,
            "collectives_included": for_.collectives_included,
        },
        "library": profile.library,
        "date": profile.date,
        "source": profile.source,
        "assumptions": list(profile.assumptions),
        "units": [_cell_to_json(cell) for cell in profile.units],
        "collectives": [
            {
                **{key: getattr(cell, key) for key in ("device", "operation", "ranks", "inside_node")},
                "timings": [
                    {"bytes": t.num_bytes, "seconds": t.seconds, **({} if t.iqr_s is None else {"iqr_s": t.iqr_s})}
                    for t in cell.timings
                ],
            }
            for cell in profile.collectives
        ],
    }
    if profile.grid is not None:
        data["grid"] = {
            "tp": list(profile.grid.tp),
            "microbatch_size_samples": list(profile.grid.microbatch_size),
            "ranks": list(profile.grid.ranks),
            "sizes_bytes": list(profile.grid.sizes_bytes),
            "warmup": profile.grid.warmup,
            "repeats": profile.grid.repeats,
        }
    return data


def _cell_to_json(cell: UnitCell) -> dict[str, Any]:
    values = {key: getattr(cell, key) for key in (*SECONDS, *BYTES) if getattr(cell, key) is not None}
    return {
        "device": cell.device,
        "unit": cell.unit,
        "tp": cell.tp,
        "microbatch_size_samples": cell.microbatch_size,
        "out_of_memory": cell.out_of_memory,
        **values,
    }


def write_profile(profile: Profile, path: Path) -> None:
    """Write `profile` to `path`, complete or not at all. Raises InputError if it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(profile_to_json(profile), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise InputError(
            f"out={str(path)!r}: the profile cannot be written ({error.strerror}); choose another file"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


def profile_from_json(data: Mapping[str, Any], file: str = "") -> Profile:
    """The profile in the JSON object `data`, every key checked. Raises InputError naming `file` and key."""
    where = f"profile {file!r}" if file else "profile"
    if data.get("schema") != SCHEMA:
        raise InputError(f"{where}: schema={shown(data.get('schema'))} must be {SCHEMA!r}; is it a profile?")
    check_keys(
        where,
        data,
        ("schema", "name", "measured_for", "units", "collectives"),
        ("library", "date", "source", "assumptions", "grid"),
    )
    texts = {key: data.get(key, "") for key in ("library", "date", "source")}
    for key, value in texts.items():
        if not isinstance(value, str) or len(value) > 500 or not value.isprintable():
            raise InputError(f"{where}: {key}={shown(value)} must be one line of text")
    units = tuple(
        _cell_from_json(f"{where}: units.{i}", entry) for i, entry in enumerate(_list(where, "units", data["units"]))
    )
    collectives = tuple(
        _collective_from_json(f"{where}: collectives.{i}", entry)
        for i, entry in enumerate(_list(where, "collectives", data["collectives"]))
    )
    keys = [cell[:4] for cell in units]
    _refuse_twice(where, "units", keys)
    _refuse_twice(where, "collectives", [cell[:4] for cell in collectives])
    assumptions = tuple(
        label(where, f"assumptions.{i}", text[:100]) and text
        for i, text in enumerate(_strings(where, "assumptions", data.get("assumptions", [])))
    )
    return Profile(
        name=label(where, "name", data["name"]),
        measured_for=_measured_for(f"{where}: measured_for", data["measured_for"]),
        units=units,
        collectives=collectives,
        **texts,
        assumptions=assumptions,
        grid=_grid(f"{where}: grid", data["grid"]) if "grid" in data else None,
        file=file,
    )


def _refuse_twice(where: str, what: str, keys: Sequence[object]) -> None:
    seen: set[object] = set()
    for i, key in enumerate(keys):
        if key in seen:
            raise InputError(f"{where}: {what}.{i} is there twice; keep one of the two")
        seen.add(key)


def _measured_for(where: str, data: object) -> MeasuredFor:
    data = _mapping(where, data)
    check_keys(
        where,
        data,
        ("model",),
        ("seq_len_tokens", "precision", "fused_attention", "sequence_parallel", "collectives_included"),
    )
    model = _mapping(f"{where}: model", data["model"])
    check_keys(f"{where}: model", model, (), DIMENSIONS)
    dimensions: list[tuple[str, int | str | bool]] = []
    for key, value in model.items():
        if key in ("gated_mlp", "biases", "dropout"):
            dimensions.append((key, _bool(where, f"model.{key}", value)))
        elif key == "norm":
            dimensions.append((key, label(where, "model.norm", value)))
        else:
            dimensions.append((key, positive_int(where, f"model.{key}", value)))
    seq_len, precision, fused = (data.get(key) for key in ("seq_len_tokens", "precision", "fused_attention"))
    if precision is not None and precision not in PRECISIONS:
        raise InputError(f"{where}: precision={shown(precision)} must be one of {', '.join(PRECISIONS)}")
    return MeasuredFor(
        dimensions=tuple(dimensions),
        seq_len=None if seq_len is None else positive_int(where, "seq_len_tokens", seq_len),
        precision=precision,
        fused_attention=None if fused is None else _bool(where, "fused_attention", fused),
        sequence_parallel=_bool(where, "sequence_parallel", data.get("sequence_parallel", False)),
        collectives_included=_bool(where, "collectives_included", data.get("collectives_included", False)),
    )


def _cell_from_json(where: str, data: object) -> UnitCell:
    data = _mapping(where, data)
    check_keys(where, data, ("device", "unit", "tp", "microbatch_size_samples"), (*SECONDS, *BYTES, "out_of_memory"))
    if data["unit"] not in UNITS:
        raise InputError(f"{where}: unit={shown(data['unit'])} must be one of {', '.join(UNITS)}")
    values: dict[str, Any] = {}
    for key in SECONDS:
        if data.get(key) is not None:
            value = data[key]
            spread = key.endswith("_iqr_s") and value == 0 and not isinstance(value, bool)  # may well be
            values[key] = 0.0 if spread else positive_float(where, key, value)
    for key in BYTES:
        if data.get(key) is not None:
            values[key] = positive_int(where, key, data[key])
    return UnitCell(
        device=label(where, "device", data["device"]),
        unit=data["unit"],
        tp=positive_int(where, "tp", data["tp"]),
        microbatch_size=positive_int(where, "microbatch_size_samples", data["microbatch_size_samples"]),
        out_of_memory=_bool(where, "out_of_memory", data.get("out_of_memory", False)),
        **values,
    )


def _collective_from_json(where: str, data: object) -> CollectiveCell:
    data = _mapping(where, data)
    check_keys(where, data, ("device", "operation", "ranks", "inside_node", "timings"))
    if data["operation"] not in OPERATIONS:
        raise InputError(f"{where}: operation={shown(data['operation'])} must be one of {', '.join(OPERATIONS)}")
    timings = []
    for i, entry in enumerate(_list(where, "timings", data["timings"])):
        place = f"{where}: timings.{i}"
        entry = _mapping(place, entry)
        check_keys(place, entry, ("bytes", "seconds"), ("iqr_s",))
        iqr = entry.get("iqr_s")
        timings.append(
            Timing(
                positive_int(place, "bytes", entry["bytes"]),
                positive_float(place, "seconds", entry["seconds"]),
                None if iqr is None else (0.0 if iqr == 0 else positive_float(place, "iqr_s", iqr)),
            )
        )
    if not timings:
        raise InputError(f"{where}: timings holds nothing; give at least one, or leave the collective out")
    _refuse_twice(where, "timings", [timing.num_bytes for timing in timings])
    ranks = positive_int(where, "ranks", data["ranks"])
    if ranks == 1:
        raise InputError(f"{where}: ranks=1 is no collective; give at least 2")
    return CollectiveCell(
        label(where, "device", data["device"]),
        data["operation"],
        ranks,
        _bool(where, "inside_node", data["inside_node"]),
        tuple(sorted(timings)),
    )


def _grid(where: str, data: object) -> Grid:
    data = _mapping(where, data)
    check_keys(where, data, ("tp", "microbatch_size_samples", "ranks", "sizes_bytes", "warmup", "repeats"))
    lists = [
        tuple(positive_int(where, key, value) for value in _list(where, key, data[key]))
        for key in ("tp", "microbatch_size_samples", "ranks", "sizes_bytes")
    ]
    return Grid(*lists, *(positive_int(where, key, data[key]) for key in ("warmup", "repeats")))  # type: ignore[arg-type]


def _mapping(where: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: {shown(value)} must be a JSON object")
    return value


def _list(where: str, key: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{where}: {key}={shown(value)} must be a list")
    return value


def _strings(where: str, key: str, value: object) -> list[str]:
    texts = _list(where, key, value)
    for i, text in enumerate(texts):
        if not isinstance(text, str) or not 1 <= len(text) <= 500 or not text.isprintable():
            raise InputError(f"{where}: {key}.{i}={shown(text)} must be one line of text")
    return texts


def _bool(where: str, key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{where}: {key}={shown(value)} must be true or false")
    return value


# ------------------------------------------------------------------------------------------------ tables
def _rows(where: str, text: str, columns: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """(line, row) of a CSV text. Raises InputError for a row that is cut short, and for none at all."""
    reader = csv.DictReader(io.StringIO(text), restkey="")
    rows = []
    try:
        for row in reader:
            if any(row.get(column) is None for column in columns):
                raise InputError(f"{where}: line {reader.line_num} is cut short; is the file complete?")
            rows.append((reader.line_num, {column: row[column] for column in columns}))
    except csv.Error as error:
        raise InputError(f"{where}: line {reader.line_num} is not CSV ({error}); is it the right file?") from None
    if not rows:
        raise InputError(f"{where}: it has no rows; is the file complete?")
    return rows


def _number(where: str, line: int, key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) <= LARGEST_NUMBER:
        raise InputError(f"{where}: line {line}: {key}={shown(text)} must be a number; correct it")
    return value


def _count(where: str, line: int, key: str, text: str) -> int:
    return positive_int(f"{where}: line {line}", key, _number(where, line, key, text))


def _chosen(where: str, model: object, known: Sequence[str]) -> str:
    """The model of a table: the one asked for, or its only one."""
    if model is None and len(known) == 1:
        return known[0]
    if str(model) not in known:
        given = "no model is chosen" if model is None else f"profile_model={shown(model)} is not in it"
        raise InputError(f"{where}: {given}; choose one with estimator.profile_model={'|'.join(known)}")
    return str(model)


def _stated(dimensions: Dimensions) -> tuple[tuple[str, int | str | bool], ...]:
    return tuple((key, value) for key, value in dimensions._asdict().items() if key != "seq_len")


def _models_of(where: str, rows: list[tuple[int, dict[str, str]]], known: Mapping[str, Dimensions]) -> list[str]:
    models = list(dict.fromkeys(row["model"] for _, row in rows))
    for name in models:
        if name not in known:
            raise InputError(
                f"{where}: model {shown(name)} is none of {', '.join(known)}; its dimensions are not known"
            )
    return models


def _aceso(where: str, file: str, rows: list[tuple[int, dict[str, str]]], model: object) -> Profile:
    """Sums over the operators of each unit; see `Profile.assumptions` of what comes back."""
    name = _chosen(where, model, _models_of(where, rows, ACESO_MODELS))
    # (tp, size, algorithm, unit) -> sums of forward us, backward us, weights MiB, activations MiB, attention forward us
    sums: dict[tuple[int, int, str, Unit], list[float]] = {}
    operators: dict[tuple[int, int, str, Unit], list[str]] = {}
    for line, row in rows:
        if row["model"] != name:
            continue
        unit: Unit = "embedding" if row["op"] in ACESO_EMBEDDING else "head" if row["op"] in ACESO_HEAD else "layer"
        key = (_count(where, line, "tp", row["tp"]), _count(where, line, "mbs", row["mbs"]), row["tp_algo"], unit)
        values = [
            _number(where, line, column, row[column]) for column in ("fwd_us", "bwd_us", "weights_MB", "activations_MB")
        ]
        if row["op"] in operators.setdefault(key, []):
            raise InputError(f"{where}: line {line}: operator {shown(row['op'])} is there twice; keep one")
        operators[key].append(row["op"])
        values.append(values[0] if row["op"] in ACESO_ATTENTION else 0.0)
        total = sums.setdefault(key, [0.0, 0.0, 0.0, 0.0, 0.0])
        for i, value in enumerate(values):
            # a cell of 0 us was not measured: then neither is the sum
            total[i] = math.nan if i < 2 and value <= 0 else total[i] + value
    counts = {"embedding": len(ACESO_EMBEDDING), "layer": ACESO_LAYER_OPERATORS, "head": len(ACESO_HEAD)}
    cells = []
    for tp, size, unit in sorted({(tp, size, unit) for tp, size, _, unit in sums}):
        found = [
            total
            for (t, s, algorithm, u), total in sums.items()
            if (t, s, u) == (tp, size, unit)
            and (tp == 1 or algorithm == "0")
            and len(operators[t, s, algorithm, u]) == counts[unit]  # an operator that is missing is not free
            and not math.isnan(total[0] + total[1])
        ]
        if found:
            forward_us, backward_us, weights, activations, attention_us = min(found, key=lambda t: t[0] + t[1])
            cells.append(
                UnitCell(
                    ACESO_DEVICE,
                    unit,
                    tp,
                    size,
                    forward_us * 1e-6,
                    backward_us * 1e-6,
                    attention_s=attention_us * 1e-6 or None,
                    activation_bytes=round(activations * MIB) or None,
                    weights_bytes=round(weights * MIB) or None,
                )
            )
    return Profile(
        name=f"Aceso V100 operators {name}",
        measured_for=MeasuredFor(
            (*_stated(ACESO_MODELS[name]), ("gated_mlp", False)), ACESO_MODELS[name].seq_len, "fp16", False
        ),
        units=tuple(cells),
        source="Aceso (EuroSys 2024), microsoft/SuperScaler",
        assumptions=(
            "Aceso operators: a unit takes the sum of its operators, each measured alone; at tp 1 of the cheaper of "
            "the two splits, above of split 0, which is Megatron's, whose collectives the estimator adds",
            "Aceso operators: measured without sequence parallelism; a layer keeps what its operators kept one by one, "
            "which is an upper estimate",
        ),
        file=file,
    )


def _aceso_collectives(where: str, file: str, rows: list[tuple[int, dict[str, str]]]) -> Profile:
    tables: dict[tuple[str, int], dict[int, float]] = {}
    for line, row in rows:
        if row["source_cluster"] != COMM_CLUSTER or row["what"] not in OPERATIONS:
            continue
        ranks, ms = _count(where, line, "n_gpus", row["n_gpus"]), _number(where, line, "value", row["value"])
        size = _count(where, line, "size", row["size"]) * MIB * (ranks if row["what"] == "all_gather" else 1)
        if 0 < ms < NOT_MEASURED_MS and ranks > 1:
            tables.setdefault((row["what"], ranks), {})[size] = ms * 1e-3
    if not tables:
        raise InputError(f"{where}: it has no collectives of {COMM_CLUSTER!r}; is it the right file?")
    return Profile(
        name="Aceso V100 collectives",
        measured_for=MeasuredFor(),
        collectives=tuple(
            CollectiveCell(
                ACESO_DEVICE, operation, ranks, True, tuple(Timing(size, s) for size, s in sorted(table.items()))
            )
            for operation in OPERATIONS
            for (what, ranks), table in sorted(tables.items())
            if what == operation
        ),
        source="Aceso (EuroSys 2024), microsoft/SuperScaler",
        assumptions=(
            "Aceso collectives: sizes are in MiB, the unit of the operators they are looked up for; that of an "
            "all-gather is a shard; where times fall with size they are averaged",
        ),
        file=file,
    )


def _sailor(where: str, file: str, rows: list[tuple[int, dict[str, str]]], model: object) -> Profile:
    name = _chosen(where, model, _models_of(where, rows, SAILOR_MODELS))
    cells = []
    for line, row in rows:
        if row["model"] != name:
            continue
        if row["role"] not in SAILOR_ROLES:
            raise InputError(
                f"{where}: line {line}: role={shown(row['role'])} must be one of {', '.join(SAILOR_ROLES)}"
            )
        seconds = [_number(where, line, column, row[column]) for column in ("fwd_s", "bwd_s", "update_s")]
        forward_s, backward_s, update_s = (value if value > 0 else None for value in seconds)
        cells.append(
            UnitCell(
                SAILOR_DEVICES.get(row["gpu"]) or label(where, "gpu", row["gpu"]).lower().replace("-", "_"),
                SAILOR_ROLES[row["role"]],
                _count(where, line, "tp", row["tp"]),
                _count(where, line, "mbs", row["mbs"]),
                forward_s,
                backward_s,
                update_s,
            )
        )
    _refuse_twice(where, "cells", [cell[:4] for cell in cells])
    seq_len = SAILOR_MODELS[name].seq_len
    unstated = "precision is not stated" if seq_len else "precision and sequence length are not stated"
    return Profile(
        name=f"Sailor layers {name}",
        measured_for=MeasuredFor(_stated(SAILOR_MODELS[name]), seq_len, None, None, False, True),
        units=tuple(sorted(cells, key=lambda cell: cell[:4])),
        source="Sailor (SOSP 2025), eth-easl/sailor",
        assumptions=(
            f"Sailor layers: {unstated}: the problem's; dimensions are those of the model's published configuration",
            "Sailor layers: tensor-parallel times hold their collectives (the embedding takes longer with tp); cells "
            "of 0 were not measured",
        ),
        file=file,
    )


def _metis(path: Path) -> Profile:
    """The profile of a folder of Metis files, or of one of them."""
    folder = path if path.is_dir() else path.parent
    where = f"profile {str(path)!r}"
    try:
        names = sorted(entry for entry in os.listdir(path)) if path.is_dir() else [path.name]
    except OSError as error:
        raise InputError(f"{where}: cannot be read ({error.strerror}); check the path") from None
    found = [(name, matched) for name in names if (matched := METIS_FILE.fullmatch(name))]
    if not found or len(found) > MOST_METIS_FILES:
        raise InputError(
            f"{where}: holds {len(found)} files DeviceType.NAME_tpN_bsM.json, as Metis calls them; give their folder"
        )
    cells: list[UnitCell] = []
    models: dict[str, str] = {}
    for name, matched in found:
        file = folder / name
        tp, size = (positive_int(where, key, int(matched[key])) for key in ("tp", "size"))
        device = matched["device"].lower().replace("-", "_")
        data = read_json_object(file, "Metis profile")
        cells += _metis_cells(f"Metis profile {str(file)!r}", data, device, tp, size)
        model = _mapping(f"Metis profile {str(file)!r}: model", data.get("model", {}))
        models[shown(model.get("model_name", "?"))] = name
    if len(models) > 1:
        raise InputError(
            f"{where}: its files are of several models ({', '.join(models)}); keep one model's in a folder"
        )
    return Profile(
        name=f"Metis {path.name}"[:100] if f"Metis {path.name}".isprintable() else "Metis",
        measured_for=MeasuredFor(collectives_included=True),
        units=tuple(sorted(cells, key=lambda cell: cell[:4])),
        source="Metis profile files (format of SamsungLabs/Metis)",
        assumptions=(
            "Metis files: dimensions, sequence length, precision and attention are not stated: the problem's",
            "Metis files: a layer's time is not divided: one third is forward, two thirds backward; the first entry is "
            "the embedding, the last the head, a layer the median of the others",
            "Metis files: tensor-parallel times hold their collectives; memory is a peak with optimiser, kept but not "
            "used",
        ),
        file=str(path),
    )


def _metis_cells(where: str, data: Mapping[str, Any], device: str, tp: int, size: int) -> list[UnitCell]:
    times = _mapping(f"{where}: execution_time", data.get("execution_time"))
    memory = _mapping(f"{where}: execution_memory", data.get("execution_memory", {}))
    totals_ms = _numbers(f"{where}: execution_time", "layer_compute_total_ms", times.get("layer_compute_total_ms"))
    peaks_mb = _numbers(f"{where}: execution_memory", "layer_memory_total_mb", memory.get("layer_memory_total_mb", []))
    if len(totals_ms) < 3:
        raise InputError(
            f"{where}: execution_time: layer_compute_total_ms has {len(totals_ms)} entries; it needs the embedding, at "
            "least one layer and the head"
        )
    if peaks_mb and len(peaks_mb) != len(totals_ms):
        raise InputError(f"{where}: layer_memory_total_mb has {len(peaks_mb)} entries, the times {len(totals_ms)}")
    cells = []
    for unit, part in (("embedding", slice(0, 1)), ("layer", slice(1, -1)), ("head", slice(-1, None))):
        measured = [value for value in totals_ms[part] if value > 0]  # 0 is not measured, never free
        peaks = [value for value in peaks_mb[part] if value > 0]
        total_s = 1e-3 * statistics.median(measured) if measured else None
        cells.append(
            UnitCell(
                device,
                unit,  # type: ignore[arg-type]
                tp,
                size,
                total_s / 3.0 if total_s is not None else None,
                total_s * 2.0 / 3.0 if total_s is not None else None,
                peak_bytes=max(1, round(statistics.median(peaks) * MIB)) if peaks else None,
            )
        )
    return cells


def _numbers(where: str, key: str, value: object) -> list[float]:
    if not isinstance(value, list) or len(value) > 100_000:
        raise InputError(f"{where}: {key}={shown(value)} must be a list of numbers")
    for i, number in enumerate(value):
        if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) <= LARGEST_NUMBER:
            raise InputError(f"{where}: {key}.{i}={shown(number)} must be a number")
    return [float(number) for number in value]
