"""The units of a GPT- or Llama-like model as one tensor-parallel rank holds them, with collectives.

A weight is known by its name in the whole model (`layer.3.query`), whatever stage or rank it lies on, and by how tensor
parallelism cuts it (`Cut`): `shard` and `unshard` need no more. Column-parallel products have their input's gradient
summed over the ranks, row-parallel ones their output (Shoeybi et al. 2019, Megatron-LM).

Dropout masks are drawn per sample from generators seeded by what the sample is, so that a loss depends neither on how
samples are sliced nor on tp.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from haap_rl.problem.model import Model
from haap_rl.runtime.job import DROPOUT, Job


# ------------------------------------------------------------------------------------------- weights
class Cut(NamedTuple):
    """A weight of the whole model: its shape, and the dim that tensor parallelism divides (None: whole everywhere)."""

    shape: tuple[int, ...]
    dim: int | None


def span(size: int, index: int, parts: int) -> tuple[int, int]:
    """Begin and end of the index-th of `parts` near-equal parts; those of a multiple of `parts` nest in them."""
    return size * index // parts, size * (index + 1) // parts


def shard(whole: Tensor, cut: Cut, index: int, tp: int) -> Tensor:
    """The part of a whole weight that rank `index` of `tp` holds."""
    if cut.dim is None:
        return whole
    begin, end = span(cut.shape[cut.dim], index, tp)
    return whole.narrow(cut.dim, begin, end - begin)


def unshard(parts: Sequence[Tensor], cut: Cut) -> Tensor:
    """The whole weight from the parts of all tensor-parallel ranks, in order."""
    return parts[0] if cut.dim is None else torch.cat(list(parts), dim=cut.dim)


def initial(name: str, cut: Cut, job: Job) -> Tensor:
    """A whole weight's first values, which depend on its name and the job's seed only."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{job.seed} {name}".encode()))
    values = torch.randn(cut.shape, generator=generator, dtype=torch.float64)
    if name.endswith("norm.weight"):
        values = 1.0 + 0.1 * values
    elif len(cut.shape) > 1:
        values = values / math.sqrt(cut.shape[1])
    else:
        values = 0.1 * values  # biases too differ from zero, so that one that is lost or doubled is seen
    return values.to(job.torch_dtype)


# --------------------------------------------------------------------------------- tensor parallelism
class TensorParallel:
    """The tensor-parallel ranks of one replica, as one of them sees it; counts its seconds in collectives.

    around: what to do while a collective lasts, as a context.
    """

    def __init__(
        self,
        index: int = 0,
        size: int = 1,
        group: Any = None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.index, self.size, self.group, self.around = index, size, group, around
        self.collective_s = 0.0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def largest(self, values: Tensor) -> Tensor:
        """The largest over the ranks, in place."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Tensor, operation: Any) -> Tensor:
        if self.size == 1:
            return values
        start = time.perf_counter()
        with self.around():
            dist.all_reduce(values, operation, group=self.group)
        self.collective_s += time.perf_counter() - start
        return values


class _Copied(torch.autograd.Function):
    """The input of column-parallel products: itself; its gradient is the sum of the ranks'."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: TensorParallel) -> Tensor:
        ctx.ranks = ranks
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum(gradients[0].contiguous().clone()), None


class _Summed(torch.autograd.Function):
    """The output of row-parallel products: the sum of the ranks'; each rank's part has the same gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: TensorParallel) -> Tensor:
        return ranks.sum(values.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def copied(values: Tensor, ranks: TensorParallel) -> Tensor:
    return values if ranks.size == 1 else cast(Tensor, _Copied.apply(values, ranks))  # type: ignore[no-untyped-call]


def summed(values: Tensor, ranks: TensorParallel) -> Tensor:
    return values if ranks.size == 1 else cast(Tensor, _Summed.apply(values, ranks))  # type: ignore[no-untyped-call]


# -------------------------------------------------------------------------------------------- dropout
class Masks:
    """Dropout of one unit on one replica's samples: a generator per sample, drawn from at each place in turn.

    What is recomputed must see the same masks: take `state()` before the first time and `restore` it before the second.
    """

    def __init__(self, job: Job) -> None:
        self.p = DROPOUT if job.model.dropout else 0.0
        self._seed = job.seed
        self._generators: list[torch.Generator] = []

    def begin(self, step: int, unit: int, samples: range) -> None:
        """Seed for one unit's forward pass over samples of the global batch."""
        if self.p:
            names = (f"{self._seed} {step} {unit} {sample}" for sample in samples)
            self._generators = [torch.Generator().manual_seed(zlib.crc32(name.encode())) for name in names]

    def state(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def restore(self, state: Sequence[Tensor]) -> None:
        for generator, saved in zip(self._generators, state, strict=True):
            generator.set_state(saved)

    def drop(self, values: Tensor, whole: int = 0, begin: int = 0) -> Tensor:
        """`values` (samples, ...) with a share p dropped and the rest scaled up.

        whole, begin: where dim 1 is a part of `whole` heads that begins at `begin`; masks are drawn for all of them.
        """
        if not self.p:
            return values
        shape = (whole or values.shape[1], *values.shape[2:])
        drawn = [torch.rand(shape, generator=generator) for generator in self._generators]
        kept = torch.stack(drawn)[:, begin : begin + values.shape[1]] >= self.p
        return values * kept.to(values.device, values.dtype) / (1.0 - self.p)


# ---------------------------------------------------------------------------------------------- units
class Unit(nn.Module):
    """A unit with weights by name; `cuts` says what each is in the whole model."""

    def __init__(self, job: Job, ranks: TensorParallel, prefix: str) -> None:
        super().__init__()
        self.job, self.ranks, self.prefix = job, ranks, prefix
        self.cuts: dict[str, Cut] = {}

    def weight(self, name: str, shape: tuple[int, ...], dim: int | None = None) -> nn.Parameter:
        """A parameter that starts as the job says, this rank's shard of it."""
        full, cut = f"{self.prefix}.{name}", Cut(shape, dim)
        self.cuts[full] = cut
        return nn.Parameter(shard(initial(full, cut, self.job), cut, self.ranks.index, self.ranks.size).clone())

    def named(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by their names in the whole model."""
        return {f"{self.prefix}.{name}": parameter for name, parameter in self.named_parameters()}


class Norm(nn.Module):
    """LayerNorm or RMSNorm, whole on every rank."""

    def __init__(self, unit: Unit, name: str) -> None:
        super().__init__()
        model = unit.job.model
        self.weight = unit.weight(f"{name}.weight", (model.hidden,))
        self.bias = unit.weight(f"{name}.bias", (model.hidden,)) if model.norm == "layernorm" else None

    def forward(self, hidden: Tensor) -> Tensor:
        if self.bias is None:
            return functional.rms_norm(hidden, self.weight.shape, self.weight)
        return functional.layer_norm(hidden, self.weight.shape, self.weight, self.bias)


class Embedding(Unit):
    """Token ids (samples, seq_len) -> hidden states (samples, seq_len, hidden); the vocabulary is divided by tp."""

    def __init__(self, job: Job, ranks: TensorParallel) -> None:
        super().__init__(job, ranks, "embedding")
        model = job.model
        self.tokens = self.weight("tokens", (model.vocab, model.hidden), 0)
        self.positions = (
            self.weight("positions", (model.max_positions, model.hidden)) if model.learned_positions else None
        )

    def forward(self, ids: Tensor, masks: Masks) -> Tensor:
        local, inside = _own_vocabulary(ids, self.job.model, self.ranks)
        hidden = summed(self.tokens[local] * inside[..., None].to(self.tokens.dtype), self.ranks)
        if self.positions is not None:
            hidden = hidden + self.positions[: ids.shape[1]]
        return masks.drop(hidden)


class Layer(Unit):
    """Hidden states (samples, seq_len, hidden) -> the same shape: attention and MLP, each after a norm, residuals.

    recompute_core: the attention core is computed again in the backward pass (selective recomputation).
    """

    def __init__(self, job: Job, ranks: TensorParallel, number: int, recompute_core: bool = False) -> None:
        super().__init__(job, ranks, f"layer.{number}")
        model = job.model
        self.recompute_core = recompute_core
        self.attention_norm, self.mlp_norm = Norm(self, "attention_norm"), Norm(self, "mlp_norm")
        h, q, kv, ffn = model.hidden, model.query_size, model.kv_size, model.ffn
        self.query, self.key = self.weight("query", (q, h), 0), self.weight("key", (kv, h), 0)
        self.value, self.out = self.weight("value", (kv, h), 0), self.weight("out", (h, q), 1)
        self.up, self.down = self.weight("up", (ffn, h), 0), self.weight("down", (h, ffn), 1)
        self.gate = self.weight("gate", (ffn, h), 0) if model.gated_mlp else None
        bias = model.biases
        self.query_bias = self.weight("query_bias", (q,), 0) if bias else None
        self.key_bias = self.weight("key_bias", (kv,), 0) if bias else None
        self.value_bias = self.weight("value_bias", (kv,), 0) if bias else None
        self.up_bias = self.weight("up_bias", (ffn,), 0) if bias else None
        self.gate_bias = self.weight("gate_bias", (ffn,), 0) if bias and model.gated_mlp else None
        self.out_bias = self.weight("out_bias", (h,)) if bias else None  # whole: added once, after the sum
        self.down_bias = self.weight("down_bias", (h,)) if bias else None

    def forward(self, hidden: Tensor, masks: Masks) -> Tensor:
        normed = copied(self.attention_norm(hidden), self.ranks)
        q = functional.linear(normed, self.query, self.query_bias)
        k = functional.linear(normed, self.key, self.key_bias)
        v = functional.linear(normed, self.value, self.value_bias)
        context = recomputed(self.attend, masks, q, k, v) if self.recompute_core else self.attend(masks, q, k, v)
        hidden = hidden + masks.drop(self._row(context, self.out, self.out_bias))
        normed = copied(self.mlp_norm(hidden), self.ranks)
        wide = functional.linear(normed, self.up, self.up_bias)
        if self.gate is None:
            wide = functional.gelu(wide)
        else:
            wide = functional.silu(functional.linear(normed, self.gate, self.gate_bias)) * wide
        return hidden + masks.drop(self._row(wide, self.down, self.down_bias))

    def _row(self, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A row-parallel product: the sum over the ranks, then the bias, once."""
        total = summed(functional.linear(values, weight), self.ranks)
        return total if bias is None else total + bias

    def attend(self, masks: Masks, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention core of this rank's heads: (samples, seq_len, own features) each -> the context."""
        model, (samples, length, width) = self.job.model, q.shape
        heads = width // model.head_dim
        q, k, v = (part.view(samples, length, -1, model.head_dim).transpose(1, 2) for part in (q, k, v))
        if not model.learned_positions:
            q, k = _rotated(q), _rotated(k)
        if k.shape[1] != heads:
            k, v = (part.repeat_interleave(heads // part.shape[1], dim=1) for part in (k, v))
        if self.job.fused_attention and not masks.p:
            context = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
            scores = (q @ k.transpose(-2, -1) / math.sqrt(model.head_dim)).masked_fill(future, float("-inf"))
            begin = span(model.heads, self.ranks.index, self.ranks.size)[0]
            context = masks.drop(scores.softmax(dim=-1), model.heads, begin) @ v
        return context.transpose(1, 2).reshape(samples, length, width)


class Head(Unit):
    """Hidden states and target ids -> the sum of the tokens' losses: final norm, logits divided by tp, cross-entropy.

    tokens: the embedding's weight where both are tied and on one stage.
    """

    def __init__(self, job: Job, ranks: TensorParallel, tokens: nn.Parameter | None = None) -> None:
        super().__init__(job, ranks, "head")
        model = job.model
        self.norm = Norm(self, "norm")
        if tokens is not None:
            self.logits = tokens
        elif model.tied_embeddings:  # a copy of the embedding, on another stage
            cut = Cut((model.vocab, model.hidden), 0)
            first = initial("embedding.tokens", cut, job)
            self.cuts[TIED] = cut
            self.logits = nn.Parameter(shard(first, cut, ranks.index, ranks.size).clone())
        else:
            self.logits = self.weight("logits", (model.vocab, model.hidden), 0)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = functional.linear(copied(self.norm(hidden), self.ranks), self.logits)
        # vocabulary-parallel cross-entropy: logsumexp of all logits less the target's
        highest = self.ranks.largest(logits.detach().amax(dim=-1))
        total = (logits - highest[..., None]).exp().sum(dim=-1)
        local, inside = _own_vocabulary(targets, self.job.model, self.ranks)
        chosen = logits.gather(-1, local[..., None])[..., 0] * inside.to(logits.dtype)
        both = summed(torch.stack((total, chosen)), self.ranks)
        return (both[0].log() + highest - both[1]).sum()

    def named(self) -> dict[str, nn.Parameter]:
        found = super().named()
        if self.job.model.tied_embeddings:
            weight = found.pop("head.logits")
            if TIED in self.cuts:
                found[TIED] = weight
        return found


TIED = "head.tied"  # the last stage's copy of the embedding's weight


def recomputed(core: Callable[..., Tensor], masks: Masks, *inputs: Tensor) -> Tensor:
    """core(masks, *inputs), computed again in the backward pass, with the same masks."""
    state = masks.state()

    def again(*values: Tensor) -> Tensor:
        masks.restore(state)
        return core(masks, *values)

    return cast(Tensor, checkpoint(again, *inputs, use_reentrant=False, preserve_rng_state=False))


def _own_vocabulary(ids: Tensor, model: Model, ranks: TensorParallel) -> tuple[Tensor, Tensor]:
    """Ids as rows of this rank's part of the vocabulary (0 where they are not in it), and whether they are."""
    begin, end = span(model.vocab, ranks.index, ranks.size)
    inside = (ids >= begin) & (ids < end)
    return torch.where(inside, ids - begin, 0), inside


def _rotated(values: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021) in the two-halves form of Llama."""
    half = values.shape[-1] // 2
    steps = torch.arange(half, device=values.device, dtype=torch.float64) / half
    angles = torch.arange(values.shape[-2], device=values.device, dtype=torch.float64)[:, None] * 10_000.0**-steps
    cos, sin = angles.cos().to(values.dtype), angles.sin().to(values.dtype)
    first, second = values[..., :half], values[..., half : 2 * half]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned, values[..., 2 * half :]), dim=-1) if values.shape[-1] % 2 else turned


def build_unit(
    job: Job, ranks: TensorParallel, number: int, recompute: str = "none", tokens: nn.Parameter | None = None
) -> Unit:
    """Unit `number` of the model (0 the embedding, then the layers, then the head) as one rank holds it."""
    if number == 0:
        return Embedding(job, ranks)
    if number == job.model.num_layers + 1:
        return Head(job, ranks, tokens)
    return Layer(job, ranks, number - 1, recompute == "selective")
