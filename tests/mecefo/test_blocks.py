"""MeCeFO on blocks of LLaMA's shape: values never change, and what is kept and computed is what the formulas say.

h hidden, f FFN width, r rank; per token and layer.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from haap_rl.mecefo.blocks import DegradableModel
from haap_rl.mecefo.llama import Llama, LlamaShape, RMSNorm
from haap_rl.mecefo.options import FFN_MATRICES, MecefoOptions, Techniques

H, F_, R = 32, 88, 4
TOKENS = torch.randint(0, 50, (4, 33), generator=torch.Generator().manual_seed(0))
NUM_TOKENS = 4 * 32
ALL_MODES = [
    (techniques, low_rank, recompute)
    for techniques in (Techniques(s, r) for s in ("attention", "ffn", "none") for r in (True, False))
    for low_rank in (FFN_MATRICES, ("gate", "up"), ("down",), ())
    for recompute in ("gate_up", "whole")
]


def llama(layers=2, **changes):
    return Llama(LlamaShape(50, H, F_, layers, heads=4, kv_heads=4, **changes))


def degraded(model, options, techniques=None, without_skip=()):
    """The model with every block in a taker's mode."""
    found = DegradableModel(model, options, techniques)
    found.projectors.refresh(0)
    found.degrade(range(len(found.blocks)), without_skip)
    return model


def gradients(model, loss):
    names, weights = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, weights, allow_unused=True), strict=True))


@pytest.mark.parametrize(("techniques", "low_rank", "recompute"), ALL_MODES)
def test_the_loss_is_bit_equal_in_every_mode(techniques, low_rank, recompute):
    options = MecefoOptions(rank=R, low_rank=low_rank, ffn_recompute=recompute)
    exact, taker = llama().loss(TOKENS), degraded(llama(), options, techniques).loss(TOKENS)
    assert torch.equal(exact, taker)


def test_a_healthy_block_has_bit_equal_gradients():
    plain, wrapped = llama(), llama()
    DegradableModel(wrapped, MecefoOptions(rank=R))
    right, got = (gradients(model, model.loss(TOKENS)) for model in (plain, wrapped))
    assert all(torch.equal(got[name], right[name]) for name in right)


def test_parameters_and_state_dict_are_the_models_own():
    model = llama()
    before = list(model.state_dict())
    degraded(model, MecefoOptions(rank=R))
    assert list(model.state_dict()) == before


@pytest.mark.parametrize("recompute", ["gate_up", "whole"])
def test_recomputing_changes_no_gradient(recompute):
    right, got = llama(), llama()
    degraded(right, MecefoOptions(low_rank=()), Techniques("none", False))
    degraded(got, MecefoOptions(low_rank=(), ffn_recompute=recompute), Techniques("none", True))
    right, got = (gradients(model, model.loss(TOKENS)) for model in (right, got))
    assert all(torch.equal(got[name], right[name]) for name in right)


@pytest.mark.parametrize("recompute", ["gate_up", "whole"])
def test_at_full_rank_of_gate_and_up_gradients_are_exact(recompute):
    plain = llama()
    full = degraded(
        llama(), MecefoOptions(rank=H, low_rank=("gate", "up"), ffn_recompute=recompute), Techniques("none")
    )
    right, got = (gradients(model, model.loss(TOKENS)) for model in (plain, full))
    assert max(float((got[n] - right[n]).norm() / right[n].norm()) for n in right) < 1e-5


def test_a_skipped_branch_has_no_gradient_and_the_rest_has():
    for skip, parts in (("attention", ("self_attn", "input_layernorm")), ("ffn", ("mlp", "post_attention_layernorm"))):
        model = degraded(llama(), MecefoOptions(rank=R), Techniques(skip))
        for name, gradient in gradients(model, model.loss(TOKENS)).items():
            assert (gradient is None) == any(f".{part}." in name for part in parts), name


def test_a_layer_without_skip_has_every_gradient():
    model = degraded(llama(), MecefoOptions(rank=R), without_skip=(1,))
    missing = {name.split(".")[1] for name, g in gradients(model, model.loss(TOKENS)).items() if g is None}
    assert missing == {"0"}


# ------------------------------------------------------------------------------------------ what is kept
def values_kept(model):
    """Numbers that autograd keeps for the backward pass, weights and projectors not counted."""
    total = 0

    def pack(tensor):
        nonlocal total
        projector = tuple(tensor.shape) in ((H, R), (F_, R))
        if tensor.is_floating_point() and not isinstance(tensor, nn.Parameter) and not projector:
            total += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.loss(TOKENS)
    return total


def kept_per_layer(options, techniques):
    """Per token: what a layer more costs."""
    two, three = (values_kept(degraded(llama(layers), options, techniques)) for layers in (2, 3))
    return (three - two) / NUM_TOKENS


@pytest.mark.parametrize(
    ("low_rank", "recompute", "kept"),
    [((), "gate_up", H), ((), "whole", H), (FFN_MATRICES, "whole", H), (FFN_MATRICES, "gate_up", H + R)],
)
def test_a_taker_keeps_its_ffns_input_alone_and_r_values_of_a_projected_down(low_rank, recompute, kept):
    options = MecefoOptions(rank=R, low_rank=low_rank, ffn_recompute=recompute)
    assert kept_per_layer(options, Techniques()) == kept


def test_each_technique_keeps_less():
    none = MecefoOptions(rank=R, low_rank=())
    exact = kept_per_layer(none, Techniques("none", False))
    skip = kept_per_layer(none, Techniques("attention", False))
    low_rank = kept_per_layer(MecefoOptions(rank=R), Techniques("attention", False))
    everything = kept_per_layer(MecefoOptions(rank=R), Techniques())
    assert exact > skip > low_rank > everything
    assert exact > 2 * 5 * everything  # two tasks of a taker keep less than a fifth of one healthy task


# ------------------------------------------------------------------------------------------ what is computed
def flops_per_layer(options, techniques):
    """Per token, forward and backward: what a layer more costs. The counter does not see fused attention's scores."""

    def flops(layers):
        model = degraded(llama(layers), options, techniques)
        with FlopCounterMode(display=False) as counter:
            model.loss(TOKENS).backward()
        return counter.get_total_flops()

    return (flops(3) - flops(2)) / NUM_TOKENS


A, FFN = 8 * H * H, 6 * H * F_  # forward FLOPs, of attention without scores


@pytest.mark.parametrize(("recompute", "rerun"), [("gate_up", 4 * H * F_), ("whole", 6 * H * F_)])
def test_flops_of_a_recomputed_ffn(recompute, rerun):
    found = flops_per_layer(MecefoOptions(low_rank=(), ffn_recompute=recompute), Techniques())
    assert found == A + 3 * FFN + rerun


@pytest.mark.parametrize(("recompute", "rerun"), [("gate_up", 4 * H * F_), ("whole", 6 * H * F_)])
def test_flops_of_all_three_techniques(recompute, rerun):
    """a + 2F + rec + lr, and the projections that run twice because they lie in what is recomputed."""
    found = flops_per_layer(MecefoOptions(rank=R, ffn_recompute=recompute), Techniques())
    low_rank = 6 * R * (H + F_) + 6 * R * H * F_ / NUM_TOKENS
    again = {"gate_up": 2 * 2 * R * H, "whole": 2 * 2 * R * H + 2 * R * F_}[recompute]
    assert found == A + 2 * FFN + rerun + low_rank + again


# ------------------------------------------------------------------------------------------ other people's blocks
class Elsewhere(nn.Module):
    """A block with Hugging Face's names and call, its own attention, dropout, and a tuple as its result."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(H, H) for _ in range(4))

        def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
            scale = position_embeddings[0]
            q, k, v = self.q_proj(hidden_states) * scale, self.k_proj(hidden_states), self.v_proj(hidden_states)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, dropout_p=0.2)
            return self.o_proj(mixed), None

    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = nn.Linear(H, F_), nn.Linear(H, F_), nn.Linear(F_, H)
            self.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.3))

        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    def __init__(self, as_tuple):
        super().__init__()
        self.as_tuple = as_tuple
        self.self_attn, self.mlp = self.Attention(), self.MLP()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(H), RMSNorm(H)

    def forward(self, hidden_states, attention_mask=None, position_embeddings=None, use_cache=False):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(
            hidden_states=hidden_states, attention_mask=attention_mask, position_embeddings=position_embeddings
        )
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = residual + self.mlp(self.post_attention_layernorm(hidden_states))
        return (hidden_states,) if self.as_tuple else hidden_states


@pytest.mark.parametrize("as_tuple", [True, False])
@pytest.mark.parametrize("recompute", ["gate_up", "whole"])
@pytest.mark.parametrize("low_rank", [("gate", "up"), ()])
def test_a_foreign_block_with_dropout_recomputes_what_it_computed(as_tuple, recompute, low_rank):
    torch.manual_seed(1)
    block = Elsewhere(as_tuple)
    x, mask = torch.randn(3, 9, H), torch.ones(9, 9, dtype=torch.bool).tril()

    def value():
        torch.manual_seed(5)
        out = block(x, attention_mask=mask, position_embeddings=(torch.full((9, H), 0.5), None))
        torch.randn(3)  # the random state moves on between forward and backward
        return out[0] if as_tuple else out

    right_value = value()
    right = gradients(block, right_value.square().sum())
    degraded(block, MecefoOptions(rank=H, low_rank=low_rank, ffn_recompute=recompute), Techniques("none"))
    got_value = value()
    assert torch.equal(got_value, right_value)
    got = gradients(block, got_value.square().sum())
    assert max(float((got[name] - right[name]).norm() / (right[name].norm() + 1e-3)) for name in right) < 1e-5


def test_a_model_of_another_shape_is_refused_in_one_line():
    with pytest.raises(ValueError, match="mecefo: Linear has no block with input_layernorm, self_attn"):
        DegradableModel(nn.Linear(2, 2), MecefoOptions())


def test_a_rank_larger_than_the_ffns_matrices_is_refused_in_one_line():
    with pytest.raises(ValueError, match=r"rank=33 is larger than the matrix layers\.0\.mlp\.gate_proj of 88 x 32"):
        DegradableModel(llama(), MecefoOptions(rank=33))


def test_grouped_queries_are_taken_too():
    shape = LlamaShape(50, H, F_, 2, heads=4, kv_heads=2)
    right, got = Llama(shape), degraded(Llama(shape), MecefoOptions(rank=R))
    assert torch.equal(right.loss(TOKENS), got.loss(TOKENS))
    with pytest.raises(ValueError, match="hidden=30 must be a multiple of twice heads=4"):
        LlamaShape(50, 30, heads=4)
