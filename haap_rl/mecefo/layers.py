"""MeCeFO's three techniques on single layers: what a taker's backward pass leaves out. Forward values never change.

Notation: y = x W^T with x (tokens, n), W (m, n); V1 (n, r) the leading right singular vectors of W.
Source: MeCeFO, arXiv 2510.16415.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from haap_rl.mecefo.options import Recompute

Run = Callable[..., Any]


def _always() -> bool:
    return True


def skip_backward(function: Run, when: Callable[[], bool] = _always) -> Run:
    """Technique I: `function` with its value but without a backward pass, whenever `when()` holds.

    Nothing is kept for it, its weights get no gradient, and none passes to its input: a residual around it carries all.
    """

    @functools.wraps(function)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not when():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return forward


class LowRankLinear(torch.autograd.Function):
    """Technique III: a linear layer whose weight gradient is projected, and whose input gradient is exact.

    G_W = (G_y^T (x V1)) V1^T in place of G_y^T x: 2brn + 2brm + 2rmn FLOPs for b tokens in place of 2bmn, and r values
    kept per token in place of n. Exact where V1 is square, r = n.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, projector: Tensor) -> Tensor:
        """x (..., n), weight (m, n), bias (m) or None, projector (n, r) -> (..., m)."""
        ctx.save_for_backward(x.reshape(-1, x.shape[-1]) @ projector.to(x.dtype), weight, projector)
        return F.linear(x, weight, bias)  # the very call of nn.Linear: bit-equal

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """Gradients of x, weight and bias."""
        (grad_y,) = grad_outputs
        projected, weight, projector = ctx.saved_tensors
        rows = grad_y.reshape(-1, grad_y.shape[-1])
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        return (
            grad_y @ weight.to(grad_y.dtype) if of_x else None,
            (rows.T @ projected.to(rows.dtype)).to(weight.dtype) @ projector.T if of_weight else None,
            rows.sum(0) if of_bias else None,
            None,
        )


def degraded_ffn(
    x: Tensor,
    norm: Run,
    mlp: nn.Module,
    projectors: Mapping[str, Tensor],
    recompute: Recompute | Literal["none"],
) -> Tensor:
    """down(act(gate(norm(x))) * up(norm(x))) with techniques II and III; x (..., hidden) -> (..., hidden).

    mlp         a module with gate_proj, up_proj, down_proj and act_fn, as in Hugging Face's LLaMA
    projectors  V1 of those of gate, up and down that get a low-rank weight gradient
    recompute   `whole` keeps x alone. `gate_up` keeps x, and beside it the r values per token of a projected down,
                and never runs down again. The random state is kept, so that dropout draws the same units again.
    """

    def linear(name: str, z: Tensor) -> Tensor:
        layer: Any = getattr(mlp, f"{name}_proj")
        if name not in projectors:
            return layer(z)  # type: ignore[no-any-return]
        return LowRankLinear.apply(z, layer.weight, layer.bias, projectors[name])  # type: ignore[no-untyped-call,no-any-return]

    def inside(x: Tensor) -> Tensor:
        normed = norm(x)
        return mlp.act_fn(linear("gate", normed)) * linear("up", normed)  # type: ignore[operator,no-any-return]

    def ffn(x: Tensor) -> Tensor:
        return linear("down", inside(x))

    if recompute == "none":
        return ffn(x)
    if recompute == "gate_up" and "down" in projectors:
        return linear("down", checkpoint(inside, x, use_reentrant=False))
    # An exact down needs its input again but not its output: torch stops recomputing as soon as it has the former
    with set_checkpoint_early_stop(recompute == "gate_up"):
        return checkpoint(ffn, x, use_reentrant=False)  # type: ignore[no-any-return]
