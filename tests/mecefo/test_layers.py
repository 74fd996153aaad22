"""The techniques on single layers: values stay, gradients are projected, and less is kept."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from haap_rl.mecefo.layers import LowRankLinear, skip_backward
from haap_rl.mecefo.projectors import right_singular_vectors

WIDE, TALL = (5, 7), (7, 5)  # (m, n) of W


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(sum(shape)))


def weight_gradient(x, weight, grad_y, projector):
    weight = weight.clone().requires_grad_()
    LowRankLinear.apply(x, weight, None, projector).backward(grad_y)
    return weight.grad


@pytest.mark.parametrize("shape", [WIDE, TALL])
@pytest.mark.parametrize("method", ["svd", "eigh", "randomized"])
def test_at_full_rank_the_gradient_is_the_functions_own(shape, method):
    weight, x, bias = drawn(*shape), drawn(2, 3, shape[1]), drawn(shape[0])
    projector = right_singular_vectors(weight, shape[1], method)
    inputs = [t.requires_grad_() for t in (x, weight, bias)]
    assert torch.autograd.gradcheck(lambda x, w, b: LowRankLinear.apply(x, w, b, projector), inputs)


def test_without_the_vectors_that_a_wide_matrix_maps_to_zero_it_is_not():
    weight, x = drawn(*WIDE).requires_grad_(), drawn(3, 7).requires_grad_()
    economy = torch.linalg.svd(weight.detach(), full_matrices=False)[2].T
    assert economy.shape == (7, 5)
    assert not torch.autograd.gradcheck(
        lambda x, w: LowRankLinear.apply(x, w, None, economy), (x, weight), raise_exception=False
    )


@pytest.mark.parametrize("shape", [WIDE, TALL])
def test_a_larger_rank_never_has_a_larger_error_and_the_full_one_has_none(shape):
    weight, x, grad_y = drawn(*shape), drawn(20, shape[1]), drawn(20, shape[0])
    exact = grad_y.T @ x
    errors = [
        float((weight_gradient(x, weight, grad_y, right_singular_vectors(weight, r)) - exact).norm())
        for r in range(1, shape[1] + 1)
    ]
    assert all(after <= before + 1e-12 for before, after in pairwise(errors))
    assert errors[0] > 0.1 * float(exact.norm())
    assert errors[-1] < 1e-12


def test_projecting_twice_is_projecting_once():
    weight, x, grad_y = drawn(*WIDE), drawn(20, 7), drawn(20, 5)
    projector = right_singular_vectors(weight, 3)
    once = weight_gradient(x, weight, grad_y, projector)
    assert torch.allclose(once @ projector @ projector.T, once, atol=1e-12)
    assert torch.allclose(weight_gradient(x @ projector @ projector.T, weight, grad_y, projector), once, atol=1e-12)


def test_the_value_and_the_gradient_of_input_and_bias_are_bit_equal_at_any_rank():
    layer = nn.Linear(7, 5)
    x = torch.randn(2, 3, 7, requires_grad=True)
    projector = right_singular_vectors(layer.weight, 1)
    exact, approximate = layer(x), LowRankLinear.apply(x, layer.weight, layer.bias, projector)
    assert torch.equal(exact, approximate)
    grad_y = torch.randn(2, 3, 5)
    for of in (x, layer.bias):
        got, right = (torch.autograd.grad(y, of, grad_y, retain_graph=True)[0] for y in (approximate, exact))
        assert torch.allclose(got, right, atol=1e-6)


def test_frozen_weights_cost_no_gradient():
    weight = torch.randn(5, 7)
    x = torch.randn(3, 7, requires_grad=True)
    LowRankLinear.apply(x, weight, None, right_singular_vectors(weight, 2)).sum().backward()
    assert weight.grad is None
    assert torch.allclose(x.grad, torch.ones(3, 5) @ weight, atol=1e-6)


def test_half_precision_weights_get_gradients_of_their_own_type():
    weight = torch.randn(5, 7, dtype=torch.bfloat16, requires_grad=True)
    projector = right_singular_vectors(weight, 2)
    LowRankLinear.apply(torch.randn(3, 7, dtype=torch.bfloat16), weight, None, projector).sum().backward()
    assert weight.grad.dtype == projector.dtype == torch.bfloat16


def test_a_skipped_function_has_its_value_but_no_backward_pass():
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    on = True
    forward = skip_backward(layer.forward, lambda: on)
    assert torch.equal(forward(x), layer(x))
    (x + forward(x)).sum().backward()
    assert layer.weight.grad is None
    assert torch.equal(x.grad, torch.ones(3, 4))  # the residual's alone
    on = False
    F.silu(forward(x)).sum().backward()
    assert layer.weight.grad is not None
