"""Gradients of a grid with failures: N as the paper has it, and nothing of it where nothing is down."""

import pytest
import torch

from haap_rl.mecefo.aggregate import Part, aggregate, relative_error
from haap_rl.mecefo.blocks import DegradableModel
from haap_rl.mecefo.failures import Cell, Grid, Outage, Restart, Schedule
from haap_rl.mecefo.llama import Llama, LlamaShape
from haap_rl.mecefo.options import MecefoOptions, Techniques
from haap_rl.mecefo.parallel import FaultyDataParallel

SHAPE = LlamaShape(30, 16, 24, layers=2, heads=2, kv_heads=2)
EXACTLY = Techniques("none", False)  # with no low-rank matrix: the neighbour does both without approximation
Q0, GATE0, Q1 = "layers.0.self_attn.q_proj.weight", "layers.0.mlp.gate_proj.weight", "layers.1.self_attn.q_proj.weight"


def batches(ranks, step=0):
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(0, 30, (2, 9), generator=generator) for _ in range(ranks)]


def parallel(ranks, stages=1, outages=(), techniques=None, policy="mecefo", **options):
    options = MecefoOptions(**{"rank": 4, **options})
    schedule = Schedule(tuple(outages))
    return FaultyDataParallel(Llama(SHAPE), Llama.loss, Grid(ranks, stages), schedule, options, techniques, policy)


def down(*cells):
    """An outage of cells (rank, stage) during steps 0 to 9."""
    return [Outage(Cell(*cell), 0, 10) for cell in cells]


def backward(found, step=0):
    found.backward(batches(found.grid.ranks, step), step)
    return {name: parameter.grad for name, parameter in found.model.named_parameters()}


def gradient_of(batch, options=None):
    """A rank's own gradient, every layer in a taker's mode where there are options."""
    model = Llama(SHAPE)
    if options is not None:
        taker = DegradableModel(model, options)
        taker.projectors.refresh(0)
        taker.degrade(range(2))
    model.loss(batch).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def trained(found, optimizer, steps=6):
    for step in range(steps):
        backward(found, step)
        optimizer.step()
    return found.model.state_dict()


def make_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("outages", [(), (Outage(Cell(1, 0), 2, 2),), (Outage(Cell(1, 1), 6, 9),)])
@pytest.mark.parametrize("policy", ["mecefo", "drop_replica"])
def test_training_without_failures_is_plain_training_bit_for_bit(outages, policy):
    """None at all, one that is over within a step, one after training."""
    plain = Llama(SHAPE)
    optimizer = make_adamw(plain)
    for step in range(6):
        optimizer.zero_grad()
        plain.loss(torch.cat(batches(3, step))).backward()
        optimizer.step()
    found = parallel(3, 2, outages, policy=policy)
    got = trained(found, make_adamw(found.model))
    assert all(torch.equal(got[name], right) for name, right in plain.state_dict().items())


def test_the_mean_loss_is_that_of_plain_training_whatever_fails():
    exact = Llama(SHAPE).loss(torch.cat(batches(4))).item()
    for outages in ((), down((0, 0)), down((0, 0), (2, 1))):
        assert parallel(4, 2, outages).backward(batches(4), 0) == pytest.approx(exact, rel=1e-6)


def test_a_neighbour_that_does_both_exactly_loses_nothing():
    right = backward(parallel(4, 2))
    got = backward(parallel(4, 2, down((0, 0), (2, 1)), EXACTLY, low_rank=()))
    assert relative_error(got, right) < 1e-6


def test_attention_is_averaged_over_unaffected_ranks_and_the_rest_over_all():
    """One stage, rank 0 dead: its neighbour 1 runs both tasks; N = {2, 3}."""
    got, given = backward(parallel(4, 1, down((0, 0)))), batches(4)
    takers = [gradient_of(given[rank], MecefoOptions(rank=4)) for rank in (0, 1)]
    others = [gradient_of(given[rank]) for rank in (2, 3)]
    assert takers[0][Q0] is None
    assert torch.allclose(got[Q0], (others[0][Q0] + others[1][Q0]) / 2, atol=1e-7)
    assert torch.allclose(got[GATE0], sum(g[GATE0] for g in (*takers, *others)) / 4, atol=1e-7)


def test_other_weights_can_be_averaged_over_unaffected_ranks_too():
    got, given = backward(parallel(4, 1, down((0, 0)), ffn_average="unaffected")), batches(4)
    others = [gradient_of(given[rank]) for rank in (2, 3)]
    assert all(torch.allclose(got[name], (others[0][name] + others[1][name]) / 2, atol=1e-7) for name in got)


def test_a_failure_concerns_its_own_stage():
    """Rank 0 dead in the last stage: the first stage's attention still counts ranks 0 and 1."""
    got = backward(parallel(4, 2, down((0, 1))))
    healthy = backward(parallel(4, 2))
    dropped = backward(parallel(4, 2, down((0, 0), (1, 0)), policy="drop_replica"))
    assert torch.allclose(got[Q1], dropped[Q1], atol=1e-7)  # N of the last stage is {2, 3}
    assert torch.allclose(got["lm_head.weight"], healthy["lm_head.weight"], atol=1e-6)  # behind all that is skipped
    assert not torch.allclose(got[Q0], dropped[Q0], atol=1e-7)


@pytest.mark.parametrize("empty_set", ["freeze", "zero", "use_degraded"])
def test_where_no_rank_is_unaffected(empty_set):
    """Two replicas, one failure: N is empty."""
    got = backward(parallel(2, 1, down((0, 0)), empty_set=empty_set))[Q0]
    if empty_set == "freeze":
        assert got is None
    elif empty_set == "zero":
        assert torch.equal(got, torch.zeros(16, 16))
    else:  # affected ranks skip nothing then
        options = MecefoOptions(rank=4)
        taker = DegradableModel(model := Llama(SHAPE), options)
        taker.projectors.refresh(0)
        taker.degrade(range(2), without_skip=range(2))
        model.loss(torch.cat(batches(2))).backward()
        assert torch.equal(got, model.layers[0].self_attn.q_proj.weight.grad)
        assert float(got.norm()) > 0


@pytest.mark.parametrize(
    "make",
    [
        lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
        lambda weights: torch.optim.AdamW(weights, lr=1e-2),
        lambda weights: torch.optim.RMSprop(weights, lr=1e-3),
        lambda weights: torch.optim.Adagrad(weights, lr=1e-2),
        lambda weights: torch.optim.NAdam(weights, lr=1e-2),
    ],
)
def test_any_optimiser_of_torch_trains_and_leaves_frozen_weights_alone(make):
    found = parallel(2, 1, down((0, 0)))
    before = {name: weight.clone() for name, weight in found.model.state_dict().items()}
    after = trained(found, make(found.model.parameters()))
    for name in before:
        frozen = "self_attn" in name or "input_layernorm" in name
        assert torch.equal(before[name], after[name]) == frozen, name


def test_zeros_let_weight_decay_go_on_and_freezing_does_not():
    def attention_after(empty_set):
        found = parallel(2, 1, down((0, 0)), empty_set=empty_set)
        return trained(found, make_adamw(found.model))[Q0]

    start = Llama(SHAPE).state_dict()[Q0]
    assert torch.equal(attention_after("freeze"), start)
    assert float(attention_after("zero").norm()) < float(start.norm())


def test_dropping_a_replica_averages_exactly_over_those_without_a_dead_cell():
    got, given = backward(parallel(4, 2, down((0, 0), (2, 1)), policy="drop_replica")), batches(4)
    right = gradient_of(torch.cat([given[1], given[3]]))
    assert all(torch.equal(got[name], right[name]) for name in right)
    with pytest.raises(Restart, match="every replica has a dead cell"):
        backward(parallel(2, 2, down((0, 0), (1, 1)), policy="drop_replica"))


def test_a_stage_that_is_all_dead_stops_training():
    with pytest.raises(Restart, match="stage 1: no live cell is left"):
        backward(parallel(2, 2, down((0, 1), (1, 1))))


def test_looking_at_other_failures_changes_no_gradient_that_is_there():
    found = parallel(4, 2, down((0, 0)))
    before = {name: grad.clone() for name, grad in backward(found).items()}
    found.gradients(batches(4), frozenset())
    assert all(torch.equal(before[name], p.grad) for name, p in found.model.named_parameters())


def test_what_is_not_known_is_refused():
    with pytest.raises(ValueError, match="policy='drop' must be one of mecefo, drop_replica"):
        parallel(2, policy="drop")
    with pytest.raises(ValueError, match="3 batches for 4 ranks; give one for each"):
        parallel(4).backward(batches(3), 0)


# ------------------------------------------------------------------------------------------ single weights
def parts(*given):
    return [Part(torch.full((2,), value), tasks, affected) for value, tasks, affected in given]


def test_the_mean_counts_tasks():
    given = parts((1.0, 3, False), (5.0, 1, True))
    weight = torch.zeros(2)
    assert aggregate(given, weight, False, MecefoOptions()).tolist() == [2.0, 2.0]
    assert aggregate(given, weight, True, MecefoOptions()).tolist() == [1.0, 1.0]


def test_relative_error_is_a_ratio_of_norms_in_which_nothing_counts_as_zero():
    exact = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0]), "c": None}
    assert relative_error(exact, exact) == 0.0
    assert relative_error({"a": torch.tensor([3.0]), "b": None, "c": None}, exact) == pytest.approx(0.8)
    assert relative_error({"a": torch.tensor([3.0]), "b": None, "c": None}, exact, ["a"]) == 0.0
