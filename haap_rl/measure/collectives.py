"""Collectives among processes of this machine: nccl on CUDA devices, one each; gloo on the CPU."""

from __future__ import annotations

import datetime
import json
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from haap_rl.cost.profiles import OPERATIONS, CollectiveCell, Operation, Timing
from haap_rl.measure.cells import interquartile_range, is_out_of_memory
from haap_rl.problem.errors import InputError

TIMEOUT_S = 120


def measure_collectives(
    name: str, kind: str, ranks: int, sizes_bytes: tuple[int, ...], warmup: int, repeats: int
) -> list[CollectiveCell]:
    """One cell per operation that the backend has, each over `sizes_bytes`; the slowest rank counts.

    Sizes that do not fit in memory are left out, and so is an operation of which none fits. Raises InputError where the
    system or the library ends a rank for want of memory.
    name: what the cells call the device; kind: "cuda" or "cpu".
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = spawn(  # type: ignore[no-untyped-call]
            _rank, (ranks, kind, folder, sizes_bytes, warmup, repeats), nprocs=ranks, join=False, daemon=True
        )
        try:
            while not processes.join(timeout=1.0):
                pass
        except ProcessExitedException as error:
            if error.signal_name != "SIGKILL":  # which is how Linux ends a process for want of memory
                raise
            raise InputError(_too_large(ranks)) from None
        except ProcessRaisedException as error:
            if not is_out_of_memory(error):
                raise
            raise InputError(_too_large(ranks)) from None
        finally:
            for process in processes.processes:
                if process.is_alive():
                    process.terminate()
                process.join()
        found = json.loads(Path(folder, "timings.json").read_text(encoding="utf-8"))
    return [
        CollectiveCell(name, operation, ranks, True, tuple(Timing(*timing) for timing in found[operation]))
        for operation in OPERATIONS
        if found[operation]
    ]


def _too_large(ranks: int) -> str:
    return f"ranks={ranks}: a process was ended for want of memory; measure smaller sizes_mib into another out=FILE"


def _rank(
    rank: int, ranks: int, kind: str, folder: str, sizes_bytes: tuple[int, ...], warmup: int, repeats: int
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its ranks
    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    found: dict[str, list[tuple[int, float, float]]] = {operation: [] for operation in OPERATIONS}
    for operation in OPERATIONS:
        for size in sizes_bytes:
            values = max(1, size // 4 // ranks) * ranks  # 32-bit, and divisible among the ranks
            tensors = _tensors(values, ranks, device)
            if tensors is None:  # nor do the larger ones
                break
            whole, shard = tensors
            try:
                seconds = _rounds(_work(operation, whole, shard), device, warmup, repeats)
            except RuntimeError as error:  # also NotImplementedError
                if "support" not in str(error):  # gloo lacks some operations in some versions: not measured
                    raise
                break
            found[operation].append((values * 4, statistics.median(seconds), interquartile_range(seconds)))
    if rank == 0:
        Path(folder, "timings.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _tensors(values: int, ranks: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The whole and a rank's shard of it; None on every rank where they do not fit on one."""
    found = None
    try:
        found = torch.zeros(values, device=device), torch.zeros(values // ranks, device=device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    fits = torch.tensor(float(found is not None), device=device)
    dist.all_reduce(fits, dist.ReduceOp.MIN)
    return found if fits > 0 else None


def _work(operation: Operation, whole: torch.Tensor, shard: torch.Tensor) -> Callable[[], object]:
    if operation == "all_reduce":
        return lambda: dist.all_reduce(whole)
    # torch renames them: all_gather_into_tensor and reduce_scatter_tensor in older versions
    if operation == "all_gather":
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return lambda: gather(whole, shard)
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return lambda: scatter(shard, whole)


def _rounds(work: Callable[[], object], device: torch.device, warmup: int, repeats: int) -> list[float]:
    """Seconds of each round on the slowest rank; all of them begin together."""
    rounds = []
    for i in range(warmup + repeats):
        dist.barrier()
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        if i >= warmup:
            rounds.append(float(seconds))
    return rounds
