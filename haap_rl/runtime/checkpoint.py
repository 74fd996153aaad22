"""A training in a file: weights and moments by the names they have in the whole model, so that any plan can go on."""

from __future__ import annotations

import io
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from haap_rl.problem.errors import InputError, shown
from haap_rl.runtime.job import Job
from haap_rl.runtime.layers import TIED, TensorParallel, build_unit
from haap_rl.runtime.training import Checkpoint
from haap_rl.runtime.updates import KINDS

SCHEMA = "haap_rl.checkpoint/1"
MOST_STEPS = 2**31


def checkpoint_bytes(checkpoint: Checkpoint, job: Job) -> bytes:
    """The content of a checkpoint's file."""
    content = io.BytesIO()
    facts = {"schema": SCHEMA, "model": asdict(job.model), "step": checkpoint.step, **checkpoint.state}
    torch.save(facts, content)
    return content.getvalue()


def load_checkpoint(path: Path, job: Job) -> Checkpoint:
    """The checkpoint in a file. Raises InputError where it cannot be read, is cut short or is of another model."""
    where = f"checkpoint {str(path)!r}"
    try:
        facts = _read(path)
    except OSError as error:
        raise InputError(f"{where}: {error.strerror or 'cannot be read'}; give load=FILE of an earlier save=") from None
    except Exception:  # whatever broken bytes make torch's reader raise
        raise InputError(f"{where}: it is cut short, damaged or no checkpoint; save it again") from None
    if not isinstance(facts, dict) or facts.get("schema") != SCHEMA:
        found = facts.get("schema") if isinstance(facts, dict) else type(facts).__name__
        raise InputError(f"{where}: schema={shown(found)} is not {SCHEMA!r}; save it again with this version")
    if facts.get("model") != asdict(job.model):
        model = facts.get("model")
        name = shown(model.get("name")) if isinstance(model, dict) else "no model"
        raise InputError(
            f"{where}: it is of {name}, another model or size than {job.model.name!r} as it is run; load it with the "
            "model and size it was saved with"
        )
    wanted = shapes(job)
    for kind in KINDS:
        _check(where, kind, facts.get(kind), wanted, job)
    step = facts.get("step")
    if type(step) is not int or not 0 <= step < MOST_STEPS:
        raise InputError(f"{where}: step={shown(step)} must be a whole number from 0 to 2^31 - 1; save it again")
    return Checkpoint(step, {kind: facts[kind] for kind in KINDS})


def _read(path: Path) -> Any:
    """What torch saved. Raises whatever torch and zipfile do, the latter for a byte that changed since."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of other formats before it refuses them
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:
                raise zipfile.BadZipFile
        return torch.load(path, map_location="cpu", weights_only=True)


def _check(where: str, kind: str, found: object, wanted: Mapping[str, tuple[int, ...]], job: Job) -> None:
    tensors: Mapping[Any, Any] = found if isinstance(found, dict) else {}
    for name in (*wanted, *tensors):
        tensor = tensors.get(name)
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else None
        if shape != wanted.get(name):
            raise InputError(
                f"{where}: {kind} of {shown(name)} have shape {shown(shape)}, model {job.model.name!r} as it is run "
                f"has {shown(wanted.get(name))}; load it with the model and size it was saved with"
            )
    for name, tensor in tensors.items():
        if tensor.dtype != job.torch_dtype:
            raise InputError(f"{where}: it is of {tensor.dtype}; run with dtype={str(tensor.dtype).split('.')[-1]}")
        if not bool(tensor.isfinite().all()):
            raise InputError(f"{where}: {kind} of {shown(name)} are not finite; load a checkpoint before they were")


def shapes(job: Job) -> dict[str, tuple[int, ...]]:
    """The shape of every weight of the whole model, by name."""
    found = {}
    with torch.device("meta"):
        for number in range(job.model.num_units):
            found.update(
                {
                    name: cut.shape
                    for name, cut in build_unit(job, TensorParallel(), number).cuts.items()
                    if name != TIED
                }
            )
    return found
