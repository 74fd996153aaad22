"""MeCeFO put on a model whose blocks have the shape of Hugging Face's LLaMA, ours or any other's."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, nn

from haap_rl.mecefo.layers import Run, degraded_ffn, skip_backward
from haap_rl.mecefo.options import MecefoOptions, Techniques
from haap_rl.mecefo.projectors import ProjectorStore

BRANCHES = {"attention": ("input_layernorm", "self_attn"), "ffn": ("post_attention_layernorm", "mlp")}
INSIDE_MLP = ("gate_proj", "up_proj", "down_proj", "act_fn")


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """{name: block} of a model's LLaMA-shaped blocks, in order: x + self_attn(norm(x)), then x + mlp(norm(x)).

    Raises ValueError where there is none.
    """
    parts = [part for branch in BRANCHES.values() for part in branch]
    found = {
        name: module
        for name, module in model.named_modules()
        if all(hasattr(module, part) for part in parts) and all(hasattr(module.mlp, part) for part in INSIDE_MLP)
    }
    if not found:
        raise ValueError(
            f"mecefo: {type(model).__name__} has no block with {', '.join(parts)} and, in mlp, {', '.join(INSIDE_MLP)};"
            " give a model of LLaMA's shape"
        )
    return found


class DegradableBlock:
    """A block's switch between its exact backward pass and a taker's.

    The four parts of the block get a `forward` that obeys the switch; the block's own forward, whatever its signature
    and what it returns, its parameters and their names stay as they are. Copy a model before, never afterwards: the
    parts of a copy would go on using the weights of the original.
    """

    def __init__(
        self, block: Any, projector: Callable[[str], Tensor], options: MecefoOptions, techniques: Techniques
    ) -> None:
        self.degraded = False
        self.skips = True  # whether the degraded mode leaves out the backward pass of a branch
        recompute = options.ffn_recompute if techniques.recompute else "none"

        def skipping(branch: str) -> Callable[[], bool]:
            return lambda: self.degraded and self.skips and techniques.skip == branch

        for branch, parts in BRANCHES.items():
            for part in parts:
                module = getattr(block, part)
                module.forward = skip_backward(module.forward, skipping(branch))
        norm: Run = block.post_attention_layernorm.forward
        mlp: Run = block.mlp.forward

        def approximate() -> bool:
            return self.degraded and not skipping("ffn")()

        def norm_or_nothing(hidden_states: Tensor) -> Tensor:
            # the norm is recomputed with the FFN, so that one tensor is kept for both
            return hidden_states if approximate() else norm(hidden_states)

        def ffn(x: Tensor) -> Tensor:
            if not approximate():
                return mlp(x)  # type: ignore[no-any-return]
            return degraded_ffn(x, norm, block.mlp, {name: projector(name) for name in options.low_rank}, recompute)

        block.post_attention_layernorm.forward = norm_or_nothing
        block.mlp.forward = ffn


class DegradableModel:
    """A model whose blocks can each run in a taker's mode; healthy until told otherwise.

    projectors  to be refreshed before a step by whoever trains the model
    """

    def __init__(self, model: nn.Module, options: MecefoOptions, techniques: Techniques | None = None) -> None:
        techniques = techniques or Techniques()
        named = find_blocks(model)
        self.model, self.names = model, list(named)
        self.projectors = ProjectorStore(
            {
                f"{name}.mlp.{matrix}_proj": getattr(block.mlp, f"{matrix}_proj").weight
                for name, block in named.items()
                for matrix in options.low_rank
            },
            options,
        )
        self.blocks = [
            DegradableBlock(block, self._projector_of(name), options, techniques) for name, block in named.items()
        ]
        self._skipped = BRANCHES.get(techniques.skip, ())

    def _projector_of(self, name: str) -> Callable[[str], Tensor]:
        return lambda matrix: self.projectors[f"{name}.mlp.{matrix}_proj"]

    def degrade(self, layers: Collection[int], without_skip: Collection[int] = ()) -> None:
        """Let these blocks run in a taker's mode, those in `without_skip` without its skip, and all others exactly."""
        for layer, block in enumerate(self.blocks):
            block.degraded = layer in layers
            block.skips = layer not in without_skip

    def layer_of(self, parameter: str) -> int | None:
        """The block that a parameter belongs to; None if to none."""
        return next((i for i, name in enumerate(self.names) if parameter.startswith(f"{name}.")), None)

    def is_skipped(self, parameter: str) -> bool:
        """Whether a taker has no gradient of this parameter, which is of the branch that it skips."""
        layer = self.layer_of(parameter)
        if layer is None:
            return False
        return parameter.removeprefix(f"{self.names[layer]}.").split(".")[0] in self._skipped
