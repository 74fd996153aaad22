"""Projectors span the leading right singular vectors, and are refreshed when they are due."""

import pytest
import torch

from haap_rl.mecefo.options import MecefoOptions
from haap_rl.mecefo.projectors import ProjectorStore, right_singular_vectors

METHODS = ("svd", "eigh", "randomized")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(12, 30), (30, 12)])
def test_columns_are_orthonormal_and_of_the_asked_number(method, shape):
    for rank in (1, 5, 12, shape[1]):
        found = right_singular_vectors(torch.randn(*shape), rank, method)
        assert found.shape == (shape[1], rank)
        assert torch.allclose(found.T @ found, torch.eye(rank), atol=1e-4)


def test_methods_agree_where_the_spectrum_falls():
    weight = torch.randn(30, 20, generator=torch.Generator().manual_seed(0)) * 0.5 ** torch.arange(20)
    spaces = [v @ v.T for v in (right_singular_vectors(weight, 3, method) for method in METHODS)]
    assert all(torch.allclose(space, spaces[0], atol=1e-3) for space in spaces)


def test_no_method_draws_from_torchs_own_random_state():
    before = torch.random.get_rng_state()
    first, second = (right_singular_vectors(torch.ones(9, 9).tril(), 2, "randomized", seed=3) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_projectors_are_refreshed_every_tau_steps_and_not_between():
    weight = torch.randn(6, 8)
    store = ProjectorStore({"gate": weight}, MecefoOptions(rank=2, refresh_steps=5))
    refreshed = []
    for step in range(12):
        weight += 0.1 * torch.randn(6, 8)
        if store.refresh(step):
            refreshed.append(step)
            assert torch.equal(store["gate"], right_singular_vectors(weight, 2))
    assert refreshed == [0, 5, 10]


def test_a_copied_store_is_refreshed_no_earlier_than_the_one_it_was_copied_from():
    options = MecefoOptions(rank=2, refresh_steps=5)
    old, new = (ProjectorStore({"gate": torch.randn(6, 8)}, options) for _ in range(2))
    old.refresh(3)
    new.load(old.state())
    assert not new.refresh(4)
    assert torch.equal(new["gate"], old["gate"])


def test_a_rank_larger_than_the_matrix_is_refused_in_one_line():
    with pytest.raises(ValueError, match="mecefo") as refused:
        ProjectorStore({"layers.0.mlp.down_proj": torch.zeros(64, 172)}, MecefoOptions(rank=65))
    assert str(refused.value) == (
        "mecefo: rank=65 is larger than the matrix layers.0.mlp.down_proj of 64 x 172; give rank=64 or less, or leave "
        "it out of low_rank"
    )
