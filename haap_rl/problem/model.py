"""A decoder-only transformer as the planner sees it: units in order, and the operators of each unit.

Units: unit 0 is the embedding, units 1..L are the transformer layers, unit L+1 is the final norm with the head and
the loss. A pipeline stage is a run of consecutive units. A head that shares its weight with the embedding on the same
stage is the unit "tied_head": the same work, no weight of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, NamedTuple

from haap_rl.problem.errors import InputError, check_keys, label, positive_int, shown

Unit = Literal["embedding", "layer", "head", "tied_head"]
Split = Literal["column", "row", "tensor", "sequence"]


class Operator(NamedTuple):
    """One kernel of a unit's forward pass, per token and before tensor parallelism divides it.

    kind     "gemm": a matrix product from `inputs` to `outputs` features; "attention": scores, softmax and context
             over `inputs` query and `outputs` key features; "elementwise": reads `inputs` and writes `outputs` values
    split    what tensor parallelism divides: a gemm's outputs ("column") or inputs ("row"), everything ("tensor"),
             or nothing unless sequence parallelism is on ("sequence")
    """

    name: str
    kind: Literal["gemm", "attention", "elementwise"]
    inputs: int
    outputs: int
    split: Split


@dataclass(frozen=True, slots=True)
class Model:
    """Dimensions of a GPT- or Llama-like model; all counts, no sequence length (that is the problem's)."""

    name: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated_mlp: bool
    vocab: int
    max_positions: int
    learned_positions: bool
    norm: Literal["layernorm", "rmsnorm"]
    tied_embeddings: bool
    biases: bool
    dropout: bool

    def __post_init__(self) -> None:
        where = f"model {self.name!r}"
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int":
                positive_int(where, field.name, value)
            elif field.type == "bool" and not isinstance(value, bool):
                raise InputError(f"{where}: {field.name}={shown(value)} must be true or false")
        if self.norm not in ("layernorm", "rmsnorm"):
            raise InputError(f"{where}: norm={shown(self.norm)} must be 'layernorm' or 'rmsnorm'")
        if self.heads % self.kv_heads:
            raise InputError(
                f"{where}: heads={self.heads} must be a multiple of kv_heads={self.kv_heads} (grouped-query attention)"
            )

    @property
    def num_units(self) -> int:
        """Layers plus the embedding and the head."""
        return self.num_layers + 2

    @property
    def query_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Features of the keys; the values have as many."""
        return self.kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Trainable parameters of the whole model, tied embeddings counted once."""
        layers = self.num_layers * sum(self.unit_parameters("layer"))
        head = self.unit_parameters("tied_head" if self.tied_embeddings else "head")
        return sum(self.unit_parameters("embedding")) + layers + sum(head)

    def allows_tp(self, tp: int) -> bool:
        """Whether tensor parallelism can divide the model by `tp`; key-value heads may be repeated instead."""
        heads_divide = self.heads % tp == 0 and (self.kv_heads % tp == 0 or tp % self.kv_heads == 0)
        return heads_divide and self.ffn % tp == 0

    def vocab_per_rank(self, tp: int) -> int:
        """Rows of the embedding on one tensor-parallel rank: equal parts, padded to 128 rows (Megatron-LM).

        Alone, a rank has the vocabulary as it is: published runs at tp 1 behave so (docs/accuracy.md). Where a trainer
        pads there too, give the padded size as `vocab`.
        """
        return self.vocab if tp == 1 else -(-self.vocab // (128 * tp)) * 128

    def unit_parameters(self, unit: Unit) -> tuple[int, int]:
        """(parameters that tensor parallelism divides, parameters that every tensor-parallel rank holds)."""
        h, q, kv = self.hidden, self.query_size, self.kv_size
        norm = 2 * h if self.norm == "layernorm" else h
        if unit == "embedding":
            return self.vocab * h, self.max_positions * h if self.learned_positions else 0
        if unit in ("head", "tied_head"):
            return self.vocab * h if unit == "head" else 0, norm
        mlp_in = (2 if self.gated_mlp else 1) * self.ffn
        divided = h * (q + 2 * kv) + q * h + h * mlp_in + self.ffn * h
        replicated = 2 * norm
        if self.biases:
            divided += q + 2 * kv + mlp_in
            replicated += 2 * h
        return divided, replicated

    def operators(self, unit: Unit) -> tuple[Operator, ...]:
        """Operators of one unit's forward pass, in order, without the tensor-parallel collectives."""
        return _operators(self, unit)


@cache
def _operators(model: Model, unit: Unit) -> tuple[Operator, ...]:
    h, q, kv = model.hidden, model.query_size, model.kv_size
    if unit == "embedding":
        return (Operator("embedding", "elementwise", h, h, "sequence"),)
    if unit in ("head", "tied_head"):
        return (
            Operator("final_norm", "elementwise", h, h, "sequence"),
            Operator("head", "gemm", h, model.vocab, "column"),
            # 16-bit logits to fp32, then maximum and exponential with its sum: about two reads and two writes
            Operator("cross_entropy", "elementwise", 2 * model.vocab, 2 * model.vocab, "tensor"),
        )
    mlp_in = (2 if model.gated_mlp else 1) * model.ffn
    return (
        Operator("attention_norm", "elementwise", h, h, "sequence"),
        Operator("qkv", "gemm", h, q + 2 * kv, "column"),
        Operator("attention", "attention", q, kv, "tensor"),
        Operator("attention_out", "gemm", q, h, "row"),
        Operator("attention_residual", "elementwise", 2 * h, h, "sequence"),
        Operator("mlp_norm", "elementwise", h, h, "sequence"),
        Operator("mlp_in", "gemm", h, mlp_in, "column"),
        Operator("activation", "elementwise", mlp_in, model.ffn, "tensor"),
        Operator("mlp_out", "gemm", model.ffn, h, "row"),
        Operator("mlp_residual", "elementwise", 2 * h, h, "sequence"),
    )


def model_from_config(config: Mapping[str, Any]) -> Model:
    """Model from the mapping of a `conf/model/*.yaml`. Raises InputError for missing, unknown or impossible keys."""
    where = f"model {shown(config.get('name', '?'))}"
    names = [field.name for field in fields(Model)]
    check_keys(where, config, names, ("source",))
    values: dict[str, Any] = {}
    for field in fields(Model):
        value = config[field.name]
        values[field.name] = positive_int(where, field.name, value) if field.type == "int" else value
    return Model(**{**values, "name": label(where, "name", config["name"])})
