"""The units of a model as torch modules, as one of `tp` tensor-parallel ranks holds them.

A rank's shard is the unit with its heads, MLP width and (padded) vocabulary divided by tp; norms, residuals and dropout
are whole, as without sequence parallelism. Its collectives are not in it: they are measured by themselves.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from haap_rl.problem.model import Model

DROPOUT = 0.1  # the share that GPT-3 like trainings drop (Megatron-LM's default)


def norm(model: Model) -> nn.Module:
    return nn.LayerNorm(model.hidden) if model.norm == "layernorm" else nn.RMSNorm(model.hidden)


class Embedding(nn.Module):
    """Token ids (batch, seq_len) -> hidden states; positions are added where the model learns them."""

    def __init__(self, model: Model, tp: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model.vocab_per_rank(tp), model.hidden)
        self.positions = nn.Embedding(model.max_positions, model.hidden) if model.learned_positions else None
        self.dropout = nn.Dropout(DROPOUT if model.dropout else 0.0)

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.tokens(ids)
        if self.positions is not None:
            hidden = hidden + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.dropout(hidden) if self.dropout.p else hidden


class Layer(nn.Module):
    """Hidden states (batch, seq_len, hidden) -> the same shape: attention and MLP, each after a norm, and residuals."""

    def __init__(self, model: Model, tp: int, fused_attention: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads = model.heads // tp, max(1, model.kv_heads // tp)
        self.head_dim, self.gated, self.fused = model.head_dim, model.gated_mlp, fused_attention
        self.rotary = not model.learned_positions
        self.p = DROPOUT if model.dropout else 0.0
        h, bias, ffn = model.hidden, model.biases, model.ffn // tp
        self.attention_norm, self.mlp_norm = norm(model), norm(model)
        self.qkv = nn.Linear(h, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=bias)
        self.attention_out = nn.Linear(self.heads * self.head_dim, h, bias=bias)
        self.mlp_in = nn.Linear(h, (2 if self.gated else 1) * ffn, bias=bias)
        self.mlp_out = nn.Linear(ffn, h, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self._drop(self.attention_out(self.attend(self.qkv(self.attention_norm(hidden)))))
        wide = self.mlp_in(self.mlp_norm(hidden))
        if self.gated:
            gate, wide = wide.chunk(2, dim=-1)
            wide = functional.silu(gate) * wide
        else:
            wide = functional.gelu(wide)
        return hidden + self._drop(self.mlp_out(wide))

    def _drop(self, values: Tensor) -> Tensor:
        return functional.dropout(values, self.p) if self.p else values

    def attend(self, qkv: Tensor) -> Tensor:
        """The attention core: projected queries, keys and values -> the context, whose heads lie side by side."""
        batch, length, _ = qkv.shape
        heads = qkv.view(batch, length, -1, self.head_dim).transpose(1, 2)  # (batch, heads, length, head_dim)
        q, k, v = torch.split(heads, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.rotary:
            q, k = _rotated(q), _rotated(k)
        if self.fused:
            context = functional.scaled_dot_product_attention(
                q, k, v, dropout_p=self.p, is_causal=True, enable_gqa=self.heads != self.kv_heads
            )
        else:
            if self.heads != self.kv_heads:
                k, v = (part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (k, v))
            scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
            future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
            context = self._drop(scores.masked_fill(future, float("-inf")).softmax(dim=-1)) @ v
        return context.transpose(1, 2).reshape(batch, length, -1)


def _rotated(values: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021) in the two-halves form of Llama."""
    half = values.shape[-1] // 2
    steps = torch.arange(half, device=values.device, dtype=torch.float32) / half
    angles = torch.arange(values.shape[-2], device=values.device, dtype=torch.float32)[:, None] * 10_000.0**-steps
    cos, sin = angles.cos().to(values.dtype), angles.sin().to(values.dtype)
    first, second = values[..., :half], values[..., half : 2 * half]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned, values[..., 2 * half :]), dim=-1) if values.shape[-1] % 2 else turned


class Head(nn.Module):
    """Hidden states and target ids -> the loss: final norm, logits and cross-entropy in 32 bits."""

    def __init__(self, model: Model, tp: int) -> None:
        super().__init__()
        self.norm = norm(model)
        self.logits = nn.Linear(model.hidden, model.vocab_per_rank(tp), bias=False)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(self.norm(hidden))
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
