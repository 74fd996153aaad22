"""Seconds of one operator on one device: plain scalar functions.

A kernel takes the longer of its arithmetic and its memory traffic (roofline: Williams et al. 2009). Tensor
parallelism enters through the per-device sizes that the caller passes.
"""

from __future__ import annotations


def gemm_s(
    tokens: float,
    inputs: float,
    outputs: float,
    peak_flops: float,
    efficiency: float,
    half_size: float,
    bytes_per_s: float,
    bytes_per_value: float,
) -> float:
    """Seconds of a (tokens x inputs) by (inputs x outputs) matrix product; `bytes_per_s` is the reachable bandwidth.

    compute = 2 M K N / (peak e_max) * (1 + a/M)(1 + a/K)(1 + a/N): each small dimension wastes part of its tiles.
    """
    flops = 2.0 * tokens * inputs * outputs
    waste = (1.0 + half_size / tokens) * (1.0 + half_size / inputs) * (1.0 + half_size / outputs)
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
    half_size: float,
    bytes_per_s: float,
    bytes_per_value: float,
) -> float:
    """Seconds of scores, softmax and context for `tokens` queries on `heads` heads of one device.

    Arithmetic: 4 tokens s d per head for the two products; a fused causal kernel does half of it (Dao 2023), separate
    kernels do the whole square. Traffic of separate kernels, in passes over the tokens x s x heads scores: written,
    read and written by the softmax, read for the context; dropout reads, writes and keeps a mask (1 byte).
    """
    scores = tokens * seq_len * heads
    flops = 4.0 * scores * head_dim * (0.5 if fused else 1.0)
    waste = (1.0 + half_size / head_dim) * (1.0 + half_size / seq_len)
    moved = 4.0 * tokens * heads * head_dim * bytes_per_value
    if not fused:
        moved += 4.0 * scores * bytes_per_value
        if dropout:
            moved += scores * (2.0 * bytes_per_value + 1.0)
    if fused:
        return max(flops / (peak_flops * efficiency) * waste, moved / bytes_per_s)
    # separate kernels do not overlap: products on the tensor cores, then softmax through memory
    return flops / (peak_flops * efficiency) * waste + moved / bytes_per_s


def elementwise_s(tokens: float, values_moved: float, bytes_per_s: float, bytes_per_value: float) -> float:
    """Seconds of a kernel that only streams `values_moved` values per token through memory."""
    return tokens * values_moved * bytes_per_value / bytes_per_s


def optimizer_step_s(num_parameters: float, bytes_per_parameter: float, bytes_per_s: float) -> float:
    """Seconds of the optimiser step over `num_parameters` of one device: it streams its state through memory."""
    return num_parameters * bytes_per_parameter / bytes_per_s
