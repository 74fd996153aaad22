"""The subspaces of low-rank weight gradients: leading right singular vectors of the weights, refreshed now and then."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from haap_rl.mecefo.options import MecefoOptions, ProjectorMethod

OVERSAMPLING, POWER_STEPS = 8, 2  # of randomized subspace iteration (Halko, Martinsson, Tropp 2011)


@torch.no_grad()
def right_singular_vectors(weight: Tensor, rank: int, method: ProjectorMethod = "svd", seed: int = 0) -> Tensor:
    """The `rank` leading right singular vectors of weight (m, n), as columns (n, rank); rank at most n.

    Vectors beyond the m-th span what W maps to zero; with them a projection can reach all of n dimensions although
    m < n. seed: of `randomized`, which leaves torch's own random state alone.
    """
    m, n = weight.shape
    found: Tensor
    w = weight if weight.dtype == torch.float64 else weight.float()
    if method == "svd":
        found = torch.linalg.svd(w, full_matrices=rank > m)[2][:rank].T
    elif method == "eigh":
        found = torch.linalg.eigh(w.T @ w)[1].flip(-1)[:, :rank]
    else:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(m, min(rank + OVERSAMPLING, n), generator=generator, dtype=w.dtype).to(w.device)
        basis = torch.linalg.qr(w.T @ drawn)[0]
        for _ in range(POWER_STEPS):
            basis = torch.linalg.qr(w.T @ (w @ basis))[0]
        found = basis @ torch.linalg.svd(w @ basis, full_matrices=True)[2][:rank].T
    return found.to(weight.dtype).contiguous()


class ProjectorStore:
    """V1 of some matrices by name, of the weights as they were at the last step divisible by `refresh_steps`.

    Every replica refreshes, healthy or not: a take-over at any step then finds the same projectors everywhere.
    Raises ValueError for a rank above what a matrix has.
    """

    def __init__(self, weights: Mapping[str, Tensor], options: MecefoOptions) -> None:
        for name, weight in weights.items():
            if options.rank > min(weight.shape):
                raise ValueError(
                    f"mecefo: rank={options.rank} is larger than the matrix {name} of {weight.shape[0]} x "
                    f"{weight.shape[1]}; give rank={min(weight.shape)} or less, or leave it out of low_rank"
                )
        self._weights, self._options = dict(weights), options
        self._found: dict[str, Tensor] = {}
        self._window = -1  # step // refresh_steps of the last refresh

    def __getitem__(self, name: str) -> Tensor:
        return self._found[name]

    def refresh(self, step: int) -> bool:
        """Compute the projectors anew if that is due before `step`; whether it was."""
        window = step // self._options.refresh_steps
        if window == self._window:
            return False
        self._window = window
        for number, (name, weight) in enumerate(self._weights.items()):
            seed = step * len(self._weights) + number
            self._found[name] = right_singular_vectors(weight, self._options.rank, self._options.projector, seed)
        return True

    def state(self) -> tuple[int, dict[str, Tensor]]:
        """What a returning replica copies."""
        return self._window, dict(self._found)

    def load(self, state: tuple[int, dict[str, Tensor]]) -> None:
        """Take over what `state()` of a peer gave."""
        self._window, found = state
        self._found = dict(found)
