"""One cell of a profile: a unit at one tensor-parallel degree and micro-batch, timed and weighed on this device."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from haap_rl.cost.profiles import UnitCell
from haap_rl.measure.units import Embedding, Head, Layer
from haap_rl.problem.model import Unit
from haap_rl.problem.plan import Problem

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def measure_unit(
    problem: Problem, device: torch.device, name: str, unit: Unit, tp: int, size: int, warmup: int, repeats: int
) -> UnitCell:
    """Medians and spreads of `repeats` rounds after `warmup`, and bytes; a cell that says so if memory does not do.

    Host time counts: a round begins and ends with an idle device. name: what the cell calls the device.
    """
    cell = UnitCell(name, unit, tp, size)
    try:
        return _measured(cell, problem, device, warmup, repeats)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return cell._replace(out_of_memory=True)


def is_out_of_memory(error: Exception) -> bool:
    """Whether `error` is torch's way, on any device, of saying that there is not enough memory."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        words in text for words in ("out of memory", "can't allocate memory", "not enough memory")
    )


def _measured(cell: UnitCell, problem: Problem, device: torch.device, warmup: int, repeats: int) -> UnitCell:
    model, dtype = problem.model, DTYPES[problem.precision]
    peak = _Peak(device)
    module: nn.Module
    if cell.unit == "embedding":
        module = Embedding(model, cell.tp)
    elif cell.unit == "layer":
        module = Layer(model, cell.tp, problem.fused_attention)
    else:
        module = Head(model, cell.tp)
    module.to(device, dtype)
    shape = (cell.microbatch_size, problem.seq_len)
    ids = torch.randint(model.vocab_per_rank(cell.tp), shape, device=device)
    hidden = torch.randn(*shape, model.hidden, device=device, dtype=dtype)
    inputs: tuple[Tensor, ...] = (ids,) if cell.unit == "embedding" else (hidden.requires_grad_(),)
    inputs = (*inputs, ids) if cell.unit == "head" else inputs
    parameters = list(module.parameters())
    # mixed precision trains 32-bit copies, as Megatron-LM does
    masters = parameters if dtype == torch.float32 else [p.detach().float().requires_grad_() for p in parameters]
    optimizer = torch.optim.Adam(masters)

    def update() -> None:
        for master, parameter in zip(masters, parameters, strict=True):
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)

    rounds: list[tuple[float, float, float]] = []
    outputs: list[Tensor] = []
    gradients: list[Tensor] = []

    def forward() -> None:
        outputs.append(module(*inputs))

    def backward() -> None:
        torch.autograd.backward(outputs.pop(), gradients.pop())

    for _ in range(warmup + repeats):
        forward_s = _seconds(forward, device)
        gradients.append(torch.ones_like(outputs[0]))
        rounds.append((forward_s, _seconds(backward, device), _seconds(update, device)))
    peak_bytes = peak.read()
    attention_s = None
    if isinstance(module, Layer):
        projected = module.qkv(module.attention_norm(hidden)).detach().requires_grad_()
        cores = [_seconds(lambda: module.attend(projected), device) for _ in range(warmup + repeats)]
        attention_s = statistics.median(cores[warmup:])
    forward_times, backward_times, update_times = zip(*rounds[warmup:], strict=True)
    return cell._replace(
        forward_s=statistics.median(forward_times),
        backward_s=statistics.median(backward_times),
        update_s=statistics.median(update_times),
        forward_iqr_s=interquartile_range(forward_times),
        backward_iqr_s=interquartile_range(backward_times),
        update_iqr_s=interquartile_range(update_times),
        attention_s=attention_s,
        activation_bytes=_kept_bytes(module, inputs),
        weights_bytes=sum(p.numel() * p.element_size() for p in parameters),
        peak_bytes=peak_bytes,
    )


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that `work` takes, from an idle device to an idle device."""
    _wait(device)
    start = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interquartile_range(values: Sequence[float]) -> float:
    """Third less first quartile; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return third - first


def _kept_bytes(module: nn.Module, inputs: tuple[Tensor, ...]) -> int | None:
    """Bytes that autograd keeps of one forward pass, each storage once, parameters left out; None where nothing is."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = module(*inputs)  # alive until the count is made, so that no address is used twice
    total = sum(kept.values())
    del output
    return total or None


class _Peak:
    """Most bytes in use since it was made: torch's own count on CUDA; else the process's resident memory on Linux."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: int | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        else:
            try:
                Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to what is resident now
                self._before = _high_water_bytes()
            except OSError:
                self._before = None

    def read(self) -> int | None:
        """The bytes above those in use at the start; None where the system does not count them."""
        if self._before is None:
            return None
        now = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else _high_water_bytes()
        return now - self._before if now is not None and now > self._before else None


def _high_water_bytes() -> int | None:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
