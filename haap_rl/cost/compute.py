"""Seconds of one operator on one device: plain scalar functions.

A kernel takes the longer of its arithmetic and its memory traffic (roofline: Williams et al. 2009). Tensor
parallelism enters through the per-device sizes that the caller passes.
"""

from __future__ import annotations

ALIGNMENT = 8  # values: 16-bit tensor cores take matrices whose sizes are multiples of 16 bytes (cuBLAS guide)


def gemm_s(
    tokens: float,
    inputs: float,
    outputs: float,
    peak_flops: float,
    efficiency: float,
    half_size: float,
    half_tokens: float,
    unaligned: float,
    bytes_per_s: float,
    bytes_per_value: float,
) -> float:
    """Seconds of a (tokens x inputs) by (inputs x outputs) matrix product; `bytes_per_s` is the reachable bandwidth.

    compute = 2 M K N / (peak e_max) * (1 + c/M)(1 + a/K)(1 + a/N): each small dimension wastes part of its tiles. A
    product whose K or N is no multiple of 8 reaches only the share `unaligned` of that.
    """
    flops = 2.0 * tokens * inputs * outputs
    waste = (1.0 + half_tokens / tokens) * (1.0 + half_size / inputs) * (1.0 + half_size / outputs)
    if inputs % ALIGNMENT != 0.0 or outputs % ALIGNMENT != 0.0:
        waste = waste / unaligned
    moved = bytes_per_value * (tokens * inputs + inputs * outputs + tokens * outputs)
    return max(flops / (peak_flops * efficiency) * waste, moved / bytes_per_s)


def attention_s(
    tokens: float,
    seq_len: float,
    heads: float,
    head_dim: float,
    fused: bool,
    dropout: bool,
    peak_flops: float,
    efficiency: float,
    unaligned: float,
    passes: float,
    bytes_per_s: float,
    bytes_per_value: float,
) -> float:
    """Seconds of scores, softmax and context for `tokens` queries on `heads` heads of one device.

    Arithmetic: 4 tokens s d per head for the two products; a fused causal kernel does half of it (Dao 2023), separate
    kernels do the whole square. Traffic of separate kernels, in passes over the tokens x s x heads scores: written,
    read and written by the softmax, read for the context; dropout reads, writes and keeps a mask (1 byte). `passes`
    times that where the softmax is not one kernel.
    """
    scores = tokens * seq_len * heads
    flops = 4.0 * scores * head_dim * (0.5 if fused else 1.0)
    arithmetic_s = flops / (peak_flops * efficiency)
    if head_dim % ALIGNMENT != 0.0:
        arithmetic_s = arithmetic_s / unaligned
    moved = 4.0 * tokens * heads * head_dim * bytes_per_value
    if fused:
        return max(arithmetic_s, moved / bytes_per_s)
    moved += 4.0 * scores * bytes_per_value
    if dropout:
        moved += scores * (2.0 * bytes_per_value + 1.0)
    # separate kernels do not overlap: products on the tensor cores, then softmax through memory
    return arithmetic_s + passes * moved / bytes_per_s


def elementwise_s(tokens: float, values_moved: float, bytes_per_s: float, bytes_per_value: float) -> float:
    """Seconds of a kernel that only streams `values_moved` values per token through memory."""
    return tokens * values_moved * bytes_per_value / bytes_per_s


def launched_s(device_s: float, host_s: float) -> float:
    """Seconds of a run of kernels that take `device_s` on the device and `host_s` to launch, queued ahead.

    (device^4 + host^4)^(1/4): the longer of the two where they differ, up to 19 % more where they are equal, for
    neither side is steady enough to hide the other completely.
    """
    longer, shorter = max(device_s, host_s), min(device_s, host_s)
    if shorter <= 0.0:
        return longer
    seconds: float = longer * (1.0 + (shorter / longer) ** 4.0) ** 0.25
    return seconds


def launched_one_by_one_s(device_s: float, host_s: float) -> float:
    """Seconds of the same where the host waits for every kernel (CUDA_LAUNCH_BLOCKING=1): nothing is queued ahead."""
    return device_s + host_s


def optimizer_step_s(num_parameters: float, bytes_per_parameter: float, bytes_per_s: float) -> float:
    """Seconds of the optimiser step over `num_parameters` of one device: it streams its state through memory."""
    return num_parameters * bytes_per_parameter / bytes_per_s
