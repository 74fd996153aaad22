"""Data parallelism with failures, simulated in one process: replicas hold equal weights, so one model serves all.

parallel = FaultyDataParallel(model, Llama.loss, Grid(8, 2), schedule, MecefoOptions(rank=8))
parallel.backward(batches, step)    # in place of loss.backward(), for any optimiser
optimizer.step()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from haap_rl.mecefo.aggregate import Part, aggregate
from haap_rl.mecefo.blocks import DegradableModel
from haap_rl.mecefo.failures import UNBROKEN, Cell, Grid, Restart, Schedule, Timeline, affected
from haap_rl.mecefo.options import MecefoOptions, Techniques

Loss = Callable[[Any, Tensor], Tensor]  # mean loss of a model on a batch
Policy = Literal["mecefo", "drop_replica"]


class FaultyDataParallel:
    """Gradients that a grid with failures would compute for a model.

    loss        of the model on a batch, a mean over its samples
    techniques  of takers; all three of MeCeFO's by default
    policy      `mecefo`, or `drop_replica`: the samples of a replica with a dead cell are lost, the others exact

    Weights before the first block belong to the first stage, those after the last block to the last. Replicas in equal
    states share one backward pass over their joint batch; where nothing is down that is plain training on the global
    batch, bit for bit.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        grid: Grid,
        schedule: Schedule,
        options: MecefoOptions,
        techniques: Techniques | None = None,
        policy: Policy = "mecefo",
    ) -> None:
        if policy not in get_args(Policy):
            raise ValueError(f"mecefo: policy={policy!r} must be one of {', '.join(get_args(Policy))}")
        self.model, self.loss, self.grid, self.schedule, self.options = model, loss, grid, schedule, options
        self.policy = policy
        self.degradable = DegradableModel(model, options, techniques)
        self.stages = stages_of(self.degradable, grid)

    def backward(self, batches: Sequence[Tensor], step: int, timeline: Timeline = UNBROKEN) -> float:
        """Set `.grad` of all weights as `step` computes them from each rank's samples; the mean loss.

        Raises Restart where failures cannot be lived with.
        """
        self.degradable.projectors.refresh(step)
        loss, gradients = self.gradients(batches, self.schedule.down(step, self.options, timeline))
        for name, parameter in self.model.named_parameters():
            parameter.grad = gradients.get(name)
        return loss

    def gradients(self, batches: Sequence[Tensor], down: frozenset[Cell]) -> tuple[float, dict[str, Tensor | None]]:
        """Mean loss and averaged gradients while some cells are down; what is in `.grad` stays.

        Projectors are used as they are.
        """
        if len(batches) != self.grid.ranks:
            raise ValueError(f"mecefo: {len(batches)} batches for {self.grid.ranks} ranks; give one for each")
        ranks, at_stage = self.live_with(down)
        alike: dict[tuple[bool, ...], list[int]] = {}
        for rank in ranks:
            alike.setdefault(tuple(rank in hit for hit in at_stage), []).append(rank)
        without_skip = set()
        if self.options.empty_set == "use_degraded":
            without_skip = {stage for stage, hit in enumerate(at_stage) if len(hit) == self.grid.ranks}

        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        parts: dict[str, list[Part]] = {name: [] for name in named}
        losses = 0.0
        for state, members in alike.items():
            self._degrade(state, without_skip)
            loss = self.loss(self.model, torch.cat([batches[rank] for rank in members]))
            found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
            losses += float(loss.detach()) * (len(members) / len(ranks))
            for name, gradient in zip(named, found, strict=True):
                parts[name].append(Part(gradient, len(members), state[self.stages[name]]))
        self.degradable.degrade(())
        return losses, {
            name: aggregate(parts[name], weight, self.degradable.is_skipped(name), self.options)
            for name, weight in named.items()
        }

    def live_with(self, down: frozenset[Cell]) -> tuple[list[int], list[frozenset[int]]]:
        """The ranks whose samples count while cells are down, and per stage those whose task is in a taker's mode.

        Raises Restart where failures cannot be lived with.
        """
        ranks = list(range(self.grid.ranks))
        if self.policy == "drop_replica":
            ranks = [rank for rank in ranks if all(cell.rank != rank for cell in down)]
            if not ranks:
                raise Restart("every replica has a dead cell")
            down = frozenset()
        return ranks, affected(down, self.grid, self.options)

    def _degrade(self, degraded: Sequence[bool], without_skip: set[int]) -> None:
        """Let the layers of some stages run in a taker's mode."""
        layers = range(len(self.degradable.blocks))
        stage = {layer: self.grid.stage_of(layer, len(layers)) for layer in layers}
        self.degradable.degrade(
            {layer for layer in layers if degraded[stage[layer]]},
            {layer for layer in layers if stage[layer] in without_skip},
        )


def stages_of(model: DegradableModel, grid: Grid) -> dict[str, int]:
    """The stage of every weight: its block's; the first for those before the first block, else the last."""
    found: dict[str, int] = {}
    stage = 0
    for name, _ in model.model.named_parameters():
        layer = model.layer_of(name)
        if layer is not None:
            found[name] = grid.stage_of(layer, len(model.blocks))
            stage = grid.stages - 1
        else:
            found[name] = stage
    return found
