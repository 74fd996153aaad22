"""What ends a step on one rank: gradients summed over replicas, the norm clipped, AdamW, weights handed round.

Replicas take unequal samples, so gradients are summed and never averaged: losses are divided by the tokens of the whole
batch beforehand. A stage's weights fall into pieces (`Routes.pieces`); the ranks that hold a piece form a group, which
keeps its sharded weights, and once more the whole ones, as one flat vector. With ZeRO-1 each of the group owns an equal
chunk of it: gradients are reduce-scattered, the chunk is updated, new weights are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from haap_rl.runtime.groups import Groups
from haap_rl.runtime.job import Job
from haap_rl.runtime.layers import TIED, Cut, shard, span
from haap_rl.runtime.routes import Place, Routes

# Llama 2's (Touvron et al. 2023, arXiv 2307.09288). With torch's epsilon of 1e-8, weights whose gradient is rounding
# alone (a key's bias) would move by it as far as any other.
BETAS, EPSILON = (0.9, 0.95), 1e-5
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("weights", "first_moment", "second_moment")


class Part(NamedTuple):
    """What a flat vector holds of one local parameter: `begin` to `end` along `dim`, or all of it (dim None)."""

    name: str
    dim: int | None
    begin: int
    end: int

    def of(self, tensor: Tensor) -> Tensor:
        return tensor if self.dim is None else tensor.narrow(self.dim, self.begin, self.end - self.begin)


class Piece:
    """One piece of a stage's weights on one of its holders, as a flat vector with the chunk that this rank updates.

    The chunk has values from the sum of the gradients to the end of the step only: weights are kept once.
    """

    def __init__(
        self, number: int, parts: list[Part], sharded: int, size: int, index: int, group: Any, chunk: nn.Parameter
    ) -> None:
        self.number, self.parts, self.group = number, parts, group
        self.sharded = sharded  # values of the vector before those of whole weights
        self.size, self.index = size, index  # of the group's ranks that share the updates; 1 without ZeRO
        self.chunk, self.width = chunk, chunk.numel()

    @property
    def begin(self) -> int:
        """Where the chunk begins in the vector."""
        return self.index * self.width

    def flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The vector of these tensors, filled up with zeros to equal chunks."""
        values = torch.cat([part.of(tensors[part.name]).reshape(-1) for part in self.parts])
        return nn.functional.pad(values, (0, self.size * self.width - values.numel()))

    def take(self, tensors: Mapping[str, Tensor], gradient: Tensor) -> None:
        """Give the chunk its values of these tensors, and its gradient."""
        self.chunk.data = self.flat(tensors)[self.begin :][: self.width].clone()
        self.chunk.grad = gradient

    def release(self) -> None:
        """Keep neither of them."""
        self.chunk.grad = None
        self.chunk.data = self.chunk.data.new_empty(0)

    def write(self, flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Put a vector's values where they belong in these tensors."""
        at = 0
        for part in self.parts:
            target = part.of(tensors[part.name])
            target.copy_(flat[at : at + target.numel()].view_as(target))
            at += target.numel()

    def whole(self, chunk: Tensor) -> Tensor:
        """The vector whose chunks the group's ranks have."""
        if self.size == 1:
            return chunk
        flat = chunk.new_empty(self.size * chunk.numel())
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(flat, chunk.contiguous(), group=self.group)
        return flat


class Updates:
    """The gradients and the optimiser of one rank's parameters."""

    def __init__(
        self,
        job: Job,
        routes: Routes,
        place: Place,
        parameters: dict[str, nn.Parameter],
        cuts: dict[str, Cut],
        groups: Groups,
        zero_stage: int,
    ) -> None:
        self.job, self.routes, self.place = job, routes, place
        self.parameters, self.cuts, self.groups = parameters, cuts, groups
        pieces = routes.pieces(place.stage)
        own = range(place.tp_index * pieces // place.tp, (place.tp_index + 1) * pieces // place.tp)
        self.pieces = [self._piece(number, pieces, zero_stage) for number in own]
        self.optimizer = torch.optim.AdamW(
            [piece.chunk for piece in self.pieces],
            lr=job.learning_rate,
            betas=BETAS,
            eps=EPSILON,
            weight_decay=job.weight_decay,
            foreach=False,
        )

    def _piece(self, number: int, pieces: int, zero_stage: int) -> Piece:
        holders = self.routes.holders(self.place.stage, number)
        sharded, whole = [], []
        for name, cut in self.cuts.items():
            if cut.dim is None:
                whole.append(Part(name, None, 0, 0))
            else:
                first = span(cut.shape[cut.dim], self.place.tp_index, self.place.tp)[0]
                begin, end = span(cut.shape[cut.dim], number, pieces)
                sharded.append(Part(name, cut.dim, begin - first, end - first))
        count = sum(part.of(self.parameters[part.name]).numel() for part in sharded)
        total = count + sum(self.parameters[part.name].numel() for part in whole)
        size = len(holders) if zero_stage else 1
        index = holders.index(self.place.rank) if zero_stage else 0
        width = -(-total // size)
        some = next(iter(self.parameters.values()))
        chunk = nn.Parameter(torch.empty(width, dtype=some.dtype, device=some.device))
        piece = Piece(number, sharded + whole, count, size, index, self.groups.of(holders), chunk)
        piece.release()
        return piece

    def _values(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    # ---------------------------------------------------------------------------------------- a step
    def gradients(self) -> dict[str, Tensor]:
        """This rank's sums over its own samples; zeros where nothing came."""
        return {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in self.parameters.items()
        }

    @property
    def ties(self) -> bool:
        """Whether this rank holds one of two copies of a tied embedding, on the first and the last stage."""
        tied = self.job.model.tied_embeddings and len(self.routes.stages) > 1
        return tied and self.place.stage in (0, len(self.routes.stages) - 1)

    def reduce(self) -> None:
        """Sum gradients over the replicas, into the chunks that this rank updates."""
        own, values = self.gradients(), self._values()
        for piece in self.pieces:
            flat = piece.flat(own)
            if piece.size > 1:
                chunk = flat.new_empty(piece.width)
                scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
                scatter(chunk, flat, group=piece.group)
                piece.take(values, chunk)
            else:
                if piece.group is not None:
                    dist.all_reduce(flat, group=piece.group)
                piece.take(values, flat)

    def tie(self) -> None:
        """Sum the gradient of a tied embedding over the first and the last stage.

        One replica of each stage then has all of it and the others nothing, so that the sum over replicas is right.
        """
        name = next(name for name in ("embedding.tokens", TIED) if name in self.parameters)
        parameter, cut, place = self.parameters[name], self.cuts[name], self.place
        total = torch.zeros(cut.shape, dtype=parameter.dtype, device=parameter.device)
        mine = shard(total, cut, place.tp_index, place.tp)
        if parameter.grad is not None:
            mine.copy_(parameter.grad)
        dist.all_reduce(total, group=self.groups.of(self.routes.outer_ranks))
        parameter.grad = mine if place.replica == 0 else torch.zeros_like(mine)

    def clip(self) -> None:
        """Scale the gradient to the job's largest norm, if it has one.

        Every value of the model counts once: sharded weights on each tensor-parallel rank, whole ones on one of them,
        replicas not again, and a tied embedding on the first stage.
        """
        if not self.job.clip_norm:
            return
        squares = torch.zeros((), dtype=torch.float64)
        for piece in self.pieces:
            if piece.size == 1 and self.place.replica:
                continue
            gradient = piece.chunk.grad
            assert gradient is not None
            keep = torch.ones_like(gradient, dtype=torch.bool)
            if piece.number:
                keep[max(0, piece.sharded - piece.begin) :] = False
            at = 0
            for part in piece.parts:
                length = part.of(self.parameters[part.name]).numel()
                if part.name == TIED:
                    keep[max(0, at - piece.begin) : max(0, at + length - piece.begin)] = False
                at += length
            squares += (gradient * keep).double().square().sum().cpu()
        dist.all_reduce(squares, group=self.groups.control(self.routes.num_ranks))
        norm = float(squares.sqrt())
        scale = min(1.0, self.job.clip_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        for piece in self.pieces:
            assert piece.chunk.grad is not None
            piece.chunk.grad.mul_(scale)

    def apply(self) -> None:
        """One step of AdamW on this rank's chunks."""
        self.optimizer.step()

    def gather(self) -> None:
        """New weights from the chunks of all holders; gradients are gone."""
        values = self._values()
        for piece in self.pieces:
            piece.write(piece.whole(piece.chunk.detach()), values)
            piece.release()
        for parameter in self.parameters.values():
            parameter.grad = None

    # --------------------------------------------------------------------------------------- the state
    @property
    def moment_bytes(self) -> int:
        """What the optimiser keeps from step to step."""
        return sum(self.optimizer.state[piece.chunk][key].nbytes for piece in self.pieces for key in MOMENTS)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """{kind: {name: this rank's shard}} of weights and moments."""
        found = {"weights": {name: value.clone() for name, value in self._values().items()}}
        for kind, key in zip(KINDS[1:], MOMENTS, strict=True):
            found[kind] = {name: torch.zeros_like(value) for name, value in self._values().items()}
            for piece in self.pieces:
                moment = self.optimizer.state[piece.chunk].get(key, piece.chunk.detach().new_zeros(piece.width))
                piece.write(piece.whole(moment), found[kind])
        return found

    def load(self, shards: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        """Take on shards as `state` returns them, after `step` steps."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(shards["weights"][name])
        for piece in self.pieces:
            vectors = [piece.flat(shards[kind])[piece.begin :][: piece.width].clone() for kind in KINDS[1:]]
            self.optimizer.state[piece.chunk] = {
                "step": torch.tensor(float(step)),
                **dict(zip(MOMENTS, vectors, strict=True)),
            }
