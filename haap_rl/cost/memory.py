"""Bytes on one device, per unit of the model: weights, gradients, optimiser state, activations.

Whole bytes in integer arithmetic, so that tables and estimator agree exactly. Mixed-precision Adam keeps 2 bytes of
weight, 4 of gradient (Megatron-LM accumulates in fp32) and 12 of optimiser state (fp32 master and two moments) per
parameter (Rajbhandari et al. 2020, ZeRO); plain fp32 keeps 4, 4 and 8. Activations follow Korthikanti et al. 2022
(arXiv 2205.05198).
"""

from __future__ import annotations

from typing import NamedTuple

from haap_rl.problem.model import Model, Unit

GRADIENT_BYTES = 4
MOMENTS_BYTES = 8
MASTER_BYTES = 4  # fp32 copy of a 16-bit weight
LOGIT_BYTES = 8  # 16-bit logits, their fp32 copy that the loss works on in place, and the 16-bit gradient
FUSED_LOGIT_BYTES = 4  # 16-bit logits and gradient: a fused cross-entropy (FlashAttention's, llm-foundry's default)
# fp32 copy of a replica's share of the reduced gradients, which ZeRO-1 and 2 make for the optimiser step (DeepSpeed,
# stage_1_and_2.py, single_partition_of_fp32_groups)
GRADIENT_SHARE_BYTES = 4
# ZeRO-3 has the whole weights of two layers at a time, one computed and one prefetched, and the gradient of one
WHOLE_LAYERS = 3


class UnitMemory(NamedTuple):
    """Bytes of one unit on one device; `activation` is per micro-batch in flight, `working` is needed once."""

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activation: int
    working: int


def unit_parameters(model: Model, unit: Unit, tp: int) -> int:
    """Parameters of one unit on one of tp devices; key and value heads are repeated where tp exceeds them."""
    divided, replicated = model.unit_parameters(unit)
    if unit == "layer" and tp > model.kv_heads:
        divided += (tp - model.kv_heads) * model.head_dim * 2 * (model.hidden + (1 if model.biases else 0))
    return _ceil(divided, tp) + replicated


def layer_activation_bytes(
    model: Model, tokens: int, seq_len: int, tp: int, sequence_parallel: bool, fused: bool, mode: str, value_bytes: int
) -> int:
    """Bytes that one layer keeps from forward to backward for `tokens` tokens, on one of tp devices.

    Per token, with 2-byte values (Korthikanti et al., equations 1-4): 8h for two norms and two matmul inputs and 2h
    of dropout masks, whole on every rank or divided with sequence parallelism; divided by tp always: q, k, v and the
    context 2(q + 2kv) + 2q, the MLP 4 ffn (6 ffn gated), and the scores, 2 a s for the softmax output plus 3 a s for
    the dropped-out copy and its mask: 34 sbh + 5 a s^2 b for GPT at tp 1. `fused` kernels and selective
    recompute keep no scores; full recompute keeps the layer's input only.
    """
    h, q, kv = model.hidden, model.query_size, model.kv_size
    shared = tp if sequence_parallel else 1
    if mode == "full":
        return _ceil(tokens * h * value_bytes, shared)
    kept = 4 * h * value_bytes + (2 * h if model.dropout else 0)
    divided = (2 * q + 2 * kv) * value_bytes + (3 if model.gated_mlp else 2) * model.ffn * value_bytes
    if not fused and mode == "none":
        divided += model.heads * seq_len * (value_bytes + (value_bytes + 1 if model.dropout else 0))
    return _ceil(tokens * kept, shared) + _ceil(tokens * divided, tp)


def unit_memory(
    model: Model,
    unit: Unit,
    tokens: int,
    seq_len: int,
    tp: int,
    dp: int,
    zero_stage: int,
    sequence_parallel: bool,
    fused: bool,
    mode: str,
    value_bytes: int,
    logit_bytes: int,
) -> UnitMemory:
    """UnitMemory of one unit on one device of a stage with `dp` replicas, for micro-batches of `tokens` per replica."""
    parameters = unit_parameters(model, unit, tp)
    shared = tp if sequence_parallel else 1
    working = 0
    if unit == "embedding":
        activation = _ceil(tokens * model.hidden, shared) if model.dropout else 0  # the dropout mask
    elif unit != "layer":
        activation = _ceil(tokens * 2 * model.hidden * value_bytes, shared)  # inputs of the norm and of the matmul
        working = _ceil(tokens * model.vocab * logit_bytes, tp)
    else:
        activation = layer_activation_bytes(model, tokens, seq_len, tp, sequence_parallel, fused, mode, value_bytes)
        # the backward pass of one layer holds its complete activations once more while it recomputes them
        complete = layer_activation_bytes(model, tokens, seq_len, tp, sequence_parallel, fused, "none", value_bytes)
        working = complete - activation if mode != "none" else 0
    state = MOMENTS_BYTES + (MASTER_BYTES if value_bytes == 2 else 0)
    gradient_bytes = GRADIENT_BYTES
    if zero_stage in (1, 2) and value_bytes == 2:
        state += GRADIENT_SHARE_BYTES
    if zero_stage >= 3:  # gradients are scattered in the values' own precision, 16 bytes per parameter in all
        gradient_bytes = value_bytes
        working += WHOLE_LAYERS * parameters * value_bytes
    return UnitMemory(
        parameters=parameters,
        weights=_ceil(parameters * value_bytes, dp if zero_stage >= 3 else 1),
        gradients=_ceil(parameters * gradient_bytes, dp if zero_stage >= 2 else 1),
        optimizer=_ceil(parameters * state, dp if zero_stage >= 1 else 1),
        activation=activation,
        working=working,
    )


def _ceil(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
