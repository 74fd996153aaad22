"""A small LLaMA with the module names and call signatures of Hugging Face's, for experiments on a CPU.

RMSNorm before attention and FFN, rotary positions, grouped queries, SwiGLU, no biases (Touvron et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Positions = tuple[Tensor, Tensor]  # cosines and sines, each (tokens, head width)


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of a model; `hidden` is divisible by `heads`, and `heads` by `kv_heads`."""

    vocab: int
    hidden: int = 32
    ffn: int = 88
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2

    def __post_init__(self) -> None:
        if self.hidden % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError(
                f"mecefo: hidden={self.hidden} must be a multiple of twice heads={self.heads}, and heads one of "
                f"kv_heads={self.kv_heads}"
            )


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., hidden) -> (..., hidden)."""
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, 1e-6)


def rotated(x: Tensor, positions: Positions) -> Tensor:
    """Rotary embedding of x (batch, heads, tokens, width), halves as Hugging Face pairs them."""
    cos, sin = positions
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.width = shape.hidden // shape.heads
        self.q_proj = nn.Linear(shape.hidden, shape.heads * self.width, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * self.width, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * self.width, bias=False)
        self.o_proj = nn.Linear(shape.heads * self.width, shape.hidden, bias=False)

    def forward(
        self, hidden_states: Tensor, position_embeddings: Positions, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """(batch, tokens, hidden) -> the same, and no attention weights."""

        def heads(projection: nn.Linear) -> Tensor:
            return projection(hidden_states).unflatten(-1, (-1, self.width)).transpose(1, 2)  # type: ignore[no-any-return]

        q, k, v = heads(self.q_proj), heads(self.k_proj), heads(self.v_proj)
        mixed = F.scaled_dot_product_attention(
            rotated(q, position_embeddings),
            rotated(k, position_embeddings),
            v,
            attn_mask=attention_mask,
            is_causal=attention_mask is None,
            enable_gqa=True,
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(-2)), None


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)
        self.act_fn: nn.Module = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) -> (..., hidden)."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """One block."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden)
        self.post_attention_layernorm = RMSNorm(shape.hidden)

    def forward(
        self, hidden_states: Tensor, position_embeddings: Positions, attention_mask: Tensor | None = None
    ) -> Tensor:
        """(batch, tokens, hidden) -> the same."""
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """A decoder-only language model; equal seeds give equal weights, and torch's random state is left alone."""

    def __init__(self, shape: LlamaShape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
            self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.layers))
            self.norm = RMSNorm(shape.hidden)
            self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=0.02)  # as published LLaMA configurations have it

    def positions(self, tokens: int) -> Positions:
        """Rotary cosines and sines for `tokens` positions."""
        width = self.shape.hidden // self.shape.heads
        device = self.norm.weight.device
        frequencies = 10000.0 ** -(torch.arange(0, width, 2, device=device) / width)
        angles = torch.outer(torch.arange(tokens, device=device).float(), frequencies).repeat(1, 2)
        return angles.cos(), angles.sin()

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers (batch, tokens) -> logits (batch, tokens, vocab)."""
        hidden_states = self.embed_tokens(tokens)
        positions = self.positions(tokens.shape[1])
        for layer in self.layers:
            hidden_states = layer(hidden_states, position_embeddings=positions)
        return self.lm_head(self.norm(hidden_states))  # type: ignore[no-any-return]

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean next-token cross-entropy, in nats, of tokens (batch, length)."""
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
