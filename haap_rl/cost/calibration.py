"""The constants of the cost model, in one place: what they are, where their first values come from, and the fit.

`LITERATURE` holds the values before any fit: data sheets, published micro-benchmarks and the code of the frameworks
where a comment names them, else assumed (`docs/accuracy.md` says which were revised after a first look at the runs).
`DEFAULT` is what the package uses, fitted to published runs by `python -m experiments.fit_estimator` and kept in
`fitted.json` beside this file, with the rows used and what the fit left unexplained. A constant belongs to a device
architecture, to a kind of link, to a framework, or to all; never to a run or to a source of runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from haap_rl.problem.cluster import DeviceType, Link
from haap_rl.problem.errors import InputError, check_keys, positive_float, share, shown
from haap_rl.problem.formats.files import read_json_object
from haap_rl.problem.plan import Plan, Problem

Part = TypeVar("Part")

SCHEMA = "haap_rl.calibration/1"
LARGEST_HALF_WIDTH = 5.0  # of log seconds: a factor of 148
PARTS = ("architectures", "tiers", "frameworks")  # fields of Calibration that hold constants by name

NVLINK_BYTES_PER_S = 40e9  # a link inside a node at least as fast is NVLink or the like, else PCIe
RDMA_BYTES_PER_S = 12e9  # a node's network at least as fast (100 Gb/s) is InfiniBand or RoCE, else Ethernet and TCP
FAST_ETHERNET_BYTES_PER_S = 4e9  # cloud networks of 50 Gb/s and more are of a later generation than 1 to 25 Gb/s
# networks between nodes, slowest first, with the least bandwidth of a node's network of that kind
NETWORKS = (("ethernet", 0.0), ("fast_ethernet", FAST_ETHERNET_BYTES_PER_S), ("rdma", RDMA_BYTES_PER_S))
# device families, by the beginning of a preset's name -> architecture; any other device is "other"
ARCHITECTURES = (
    *(("v100", "volta"), ("t4", "turing")),
    *((family, "ampere") for family in ("a100", "a800", "a10", "a30", "a40", "a6000", "rtx_30")),
    *((family, "hopper") for family in ("h100", "h800", "h200", "h20", "gh200")),
)
OTHER = "other"


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the devices of one generation reach of their data sheet."""

    # Share of the peak of a very large matrix product. Published best matmuls: A100 271 of 312 TFLOP/s, H100 795 of
    # 989 (ml-engineering, "MAMF"); a training kernel stays somewhat below.
    gemm_efficiency: float
    # Share of the peak that the two products of attention reach: separate batched products, and a fused kernel
    # (Dao 2023, FlashAttention-2, figures 4-6: forward + backward 0.3-0.6 of the peak).
    attention_efficiency: float
    fused_attention_efficiency: float
    # Share of the nominal memory bandwidth that streaming kernels reach (BabelStream on A100 and V100: 0.8-0.9).
    memory_bandwidth_share: float
    # Share of its speed that a 16-bit product keeps when a size is no multiple of 8: it leaves the tensor cores where
    # the library has no other kernel (cuBLAS before 11, so Volta), else it only aligns badly (cuBLAS guide).
    unaligned_share: float


@dataclass(frozen=True, slots=True)
class Tier:
    """One kind of link. `efficiency`: share of the nominal bandwidth that collectives reach (nccl-tests bus bandwidth:
    NVLink 0.75-0.85, RDMA networks 0.5-0.9). `latency_scale`: of the link's nominal latency per message."""

    efficiency: float
    latency_scale: float
    # Share of the bandwidth lost with every doubling of the collective's rings that share one adapter.
    contention: float
    # Seconds that a transfer of less than `small_message_bytes` waits for an acknowledgement (Linux delays those of
    # TCP by up to 40 ms, TCP_DELACK_MIN, RFC 1122) before the next one fills its window.
    small_message_s: float


@dataclass(frozen=True, slots=True)
class Framework:
    """What differs between the runtimes that train."""

    host_layer_s: float  # host time to launch one layer's kernels, in each direction
    host_microbatch_s: float  # host time per stage and micro-batch outside the layers: data, schedule, p2p set-up
    host_iteration_s: float  # host time per iteration: optimiser launch, gradient norm, logging
    send_blocking: float  # share of a boundary transfer that also occupies both stages
    sync_hidden: float  # share of the gradient synchronisation hidden behind the last backward passes
    # Passes that its elementwise kernels and softmax make, against fused ones that read and write every value once.
    elementwise_passes: float
    # Bytes moved per parameter by a mixed-precision Adam step. One fused kernel: read fp32 master, both moments and
    # gradient, write master and moments, write the 16-bit weight (4 x 4 + 3 x 4 + 2).
    optimizer_bytes: float
    # Memory that is neither state nor activations: CUDA context, workspaces, buffers of the NCCL communicators (one set
    # per tensor-, pipeline- and data-parallel group).
    reserve_bytes: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """All constants. Mappings are (name, value) pairs, so that a Calibration can be hashed."""

    architectures: tuple[tuple[str, Architecture], ...]
    tiers: tuple[tuple[str, Tier], ...]
    frameworks: tuple[tuple[str, Framework], ...]
    # A dimension of this size halves the efficiency of a matrix product: a tile of 128 (CUTLASS, cuBLAS).
    gemm_half_size: float = 128.0  # of a weight
    gemm_half_tokens: float = 128.0
    # What one tensor-parallel collective takes besides its transfer: launch on the host, and on the device the wait
    # between the streams of compute and of communication.
    collective_s: float = 4e-5
    # Share of the sharded-weight traffic (ZeRO-3, FSDP) that prefetching hides behind the layers' compute.
    sharded_hidden: float = 0.7
    # Messages of one device smaller than this do not keep a TCP connection busy.
    small_message_bytes: float = 1.5e6
    # Gradient synchronisation is longer by this share for every doubling of the nodes it spans: stragglers.
    straggler_share: float = 0.02
    # What the caching allocator holds around activations and other buffers that come and go, as a share of them.
    fragmentation: float = 0.06
    # (class of problem and plan, half-width of the 90 % interval of log seconds), see `interval_class`
    intervals: tuple[tuple[str, float], ...] = ()

    def architecture(self, device: DeviceType) -> Architecture:
        return _named(self.architectures, architecture_name(device))

    def inside(self, link: Link) -> tuple[float, float]:
        """(latency in seconds, bytes per second) that a link inside a node really has."""
        tiers = (("pcie", 0.0), ("nvlink", NVLINK_BYTES_PER_S))
        return self._reached(tiers, link, 1.0)

    def between(self, link: Link, rings: float = 1.0) -> tuple[float, float]:
        """(latency in seconds, bytes per second of a node) that a network really has when `rings` share an adapter."""
        return self._reached(NETWORKS, link, rings)

    def _reached(self, tiers: tuple[tuple[str, float], ...], link: Link, rings: float) -> tuple[float, float]:
        """What a link reaches as one of its kind, and at least what it would reach as the fastest of a lesser kind.

        tiers: names, slowest first, with the least bandwidth of a link of that kind. Thus more bandwidth is never
        slower, whatever the constants are.
        """
        latency_s, bytes_per_s = math.inf, 0.0
        borders = [*(border for _, border in tiers[1:]), math.inf]
        for (name, least), most in zip(tiers, borders, strict=True):
            if link.bandwidth_bytes_per_s >= least:
                tier = _named(self.tiers, name)
                efficiency = tier.efficiency * (1.0 - tier.contention) ** math.log2(rings)
                latency_s = min(latency_s, link.latency_s * tier.latency_scale)
                bytes_per_s = max(bytes_per_s, min(link.bandwidth_bytes_per_s, most) * efficiency)
        return latency_s, bytes_per_s

    def small_message_s(self, link: Link) -> float:
        """Seconds that a small transfer over a network waits for an acknowledgement."""
        reached = [name for name, least in NETWORKS if link.bandwidth_bytes_per_s >= least]
        return min(_named(self.tiers, name).small_message_s for name in reached)

    def framework(self, name: str) -> Framework:
        return _named(self.frameworks, name)

    def half_width(self, problem: Problem, plan: Plan) -> float | None:
        """Half-width of the 90 % interval of the logarithm of a plan's seconds; None where nothing is known of it."""
        known = dict(self.intervals)
        narrow, network = interval_class(problem, plan)
        # the errors of a network's class are those of devices that runs exist of
        classes = (narrow, "all") if narrow.startswith(OTHER) else (narrow, network, "all")
        return next((known[name] for name in classes if name in known), None)


def _named(pairs: tuple[tuple[str, Part], ...], name: str) -> Part:
    for key, value in pairs:
        if key == name:
            return value
    raise KeyError(name)


def interval_class(problem: Problem, plan: Plan) -> tuple[str, str]:
    """The classes in which errors of the estimator are alike, the narrower first: devices and network, network.

    Devices: their architecture, or "mixed". Network: "node" where all fit in one, else the kind of the slowest network
    between nodes ("rdma" or "ethernet").
    """
    cluster = problem.cluster
    indices = sorted({cluster.index(replica.group) for stage in plan.stages for replica in stage.replicas})
    groups = [cluster.groups[index] for index in indices]
    devices = {architecture_name(group.device) for group in groups}
    used = sum(replica.num_devices for stage in plan.stages for replica in stage.replicas)
    if len(groups) == 1 and used <= groups[0].devices_per_node:
        network = "node"
    else:
        slowest = min(cluster.link(a, b).bandwidth_bytes_per_s for a in indices for b in indices)
        network = "rdma" if slowest >= RDMA_BYTES_PER_S else "ethernet"
    return f"{devices.pop() if len(devices) == 1 else 'mixed'} {network}", network


def architecture_name(device: DeviceType) -> str:
    """The generation of a device type, by its name; "other" where nothing is known of it."""
    return next((name for family, name in ARCHITECTURES if device.name.startswith(family)), OTHER)


def parameters(calibration: Calibration) -> dict[str, Any]:
    """Every constant by a dotted name, such as "volta.gemm_efficiency" or "gemm_half_size"."""
    values: dict[str, Any] = {}
    for field in fields(calibration):
        value = getattr(calibration, field.name)
        if field.name in PARTS:
            for name, part in value:
                for inner in fields(part):
                    values[f"{name}.{inner.name}"] = getattr(part, inner.name)
        elif field.name != "intervals":
            values[field.name] = value
    return values


def with_parameters(calibration: Calibration, values: Mapping[str, Any]) -> Calibration:
    """`calibration` with the constants in `values`, named as `parameters` names them."""
    changed: dict[str, Any] = {}
    for field in fields(calibration):
        value = getattr(calibration, field.name)
        if field.name == "intervals":
            continue
        if field.name in PARTS:
            changed[field.name] = tuple(
                (name, replace(part, **{f.name: values.get(f"{name}.{f.name}", getattr(part, f.name)) for f in inner}))
                for name, part, inner in ((name, part, fields(part)) for name, part in value)
            )
        else:
            changed[field.name] = values.get(field.name, value)
    return replace(calibration, **changed)


LITERATURE = Calibration(
    architectures=(
        ("volta", Architecture(0.75, 0.4, 0.28, 0.8, 0.2)),
        ("turing", Architecture(0.3, 0.25, 0.2, 0.75, 0.2)),
        ("ampere", Architecture(0.82, 0.45, 0.28, 0.85, 0.6)),
        ("hopper", Architecture(0.7, 0.4, 0.17, 0.85, 0.6)),
        ("other", Architecture(0.7, 0.4, 0.25, 0.8, 0.6)),
    ),
    tiers=(
        ("nvlink", Tier(0.8, 0.8, 0.01, 0.0)),
        ("pcie", Tier(0.25, 2.0, 0.01, 0.0)),
        ("rdma", Tier(0.7, 0.5, 0.05, 0.0)),
        ("fast_ethernet", Tier(0.7, 2.0, 0.1, 0.0)),
        ("ethernet", Tier(0.8, 2.0, 0.18, 0.04)),
    ),
    frameworks=(
        ("megatron", Framework(1.0e-3, 5e-4, 3e-3, 0.3, 0.2, 1.0, 28.0, 4.5e9)),
        ("deepspeed", Framework(1.2e-3, 5e-4, 1e-2, 0.1, 0.1, 1.0, 28.0, 4.5e9)),
        ("huggingface", Framework(1.2e-3, 1.0e-3, 1e-2, 0.2, 0.1, 2.7, 100.0, 4.5e9)),
        ("fsdp", Framework(1.0e-3, 1.0e-3, 5e-3, 0.2, 0.3, 1.5, 60.0, 1.5e9)),
    ),
)


def load(path: Path) -> Calibration:
    """The constants and intervals of a file that `experiments.fit_estimator` wrote. Raises InputError."""
    where = f"calibration file {str(path)!r}"
    data = read_json_object(path, "calibration file")
    if data.get("schema") != SCHEMA:
        raise InputError(f"{where}: schema={shown(data.get('schema'))} is not {SCHEMA!r}; write it again")
    known = parameters(LITERATURE)
    constants, intervals = data.get("constants"), data.get("intervals")
    if not isinstance(constants, dict) or not isinstance(intervals, dict):
        raise InputError(f"{where}: constants and intervals must be JSON objects; write it again")
    check_keys(f"{where}: constants", constants, (), known)
    if missing := [name for name in known if name not in constants]:
        raise InputError(f"{where}: constants lack {missing[0]!r} and {len(missing) - 1} more; fit them again")
    values = {name: _constant(where, name, value) for name, value in constants.items()}
    widths = tuple((str(name), _half_width(where, str(name), value)) for name, value in intervals.items())
    return replace(with_parameters(LITERATURE, values), intervals=widths)


def _constant(where: str, name: str, value: object) -> float:
    """A constant within what it can be: shares up to 1, what is divided by above 0."""
    key = f"constants.{name}"
    if name.endswith("contention") and value == 1:
        raise InputError(f"{where}: {key}=1 leaves no bandwidth; give less than 1")
    if name.endswith(("efficiency", "bandwidth_share", "unaligned_share")):
        positive_float(where, key, value)
    elif not name.endswith(("hidden", "blocking", "fragmentation", "contention")):
        return 0.0 if value == 0 and not isinstance(value, bool) else positive_float(where, key, value)
    return share(where, key, value)


def _half_width(where: str, name: str, value: object) -> float:
    width = positive_float(where, f"intervals.{name}", value)
    if width > LARGEST_HALF_WIDTH:
        raise InputError(f"{where}: intervals.{name}={shown(value)} is above {LARGEST_HALF_WIDTH:g}; fit it again")
    return width


FITTED = Path(__file__).with_name("fitted.json")
DEFAULT = load(FITTED)
