"""The rate that the paper proves, O(1/sqrt(nT)) for n ranks and T steps of SGD, on a convex toy."""

import numpy as np
import pytest
import torch

from haap_rl.mecefo.layers import LowRankLinear
from haap_rl.mecefo.projectors import right_singular_vectors

M, N, RANK, REFRESH_STEPS = 6, 5, 3, 50


def mean_squared_gradient(ranks, steps, seed):
    """Over training, of f(W) = E |W x - y|^2 / 2 with y = W* x + noise, a quarter of the ranks in a taker's mode."""
    generator = torch.Generator().manual_seed(seed)
    wanted = torch.randn(M, N, generator=generator)
    weight = torch.zeros(M, N, requires_grad=True)
    affected, total = ranks // 4, 0.0
    for step in range(steps):
        if step % REFRESH_STEPS == 0:
            projector = right_singular_vectors(weight, RANK)
        x = torch.randn(ranks, N, generator=generator)
        y = x @ wanted.T + 3.0 * torch.randn(ranks, M, generator=generator)
        exact = x[affected:] @ weight.T
        taken = LowRankLinear.apply(x[:affected], weight, None, projector)
        loss = (torch.cat((taken, exact)) - y).square().sum() / (2 * ranks)
        (gradient,) = torch.autograd.grad(loss, weight)
        total += float((weight.detach() - wanted).square().sum())  # the true gradient, as E x x^T = 1
        with torch.no_grad():
            weight -= 0.5 * (ranks / steps) ** 0.5 * gradient
    return total / steps


@pytest.mark.parametrize(("ranks", "steps"), [((4, 4, 4), (100, 200, 400)), ((4, 8, 16), (400, 400, 400))])
def test_gradients_fall_as_one_over_the_root_of_ranks_times_steps(ranks, steps):
    found = [
        np.mean([mean_squared_gradient(n, t, seed) for seed in range(3)]) for n, t in zip(ranks, steps, strict=True)
    ]
    slope = np.polyfit(np.log(np.multiply(ranks, steps)), np.log(found), 1)[0]
    assert -0.65 < slope < -0.35, found
