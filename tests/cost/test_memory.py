"""Memory of one layer under each recompute mode, by hand, and the laws of tensor parallelism and ZeRO."""

import itertools

from haap_rl.cost import memory
from tests.builders import model

TOKENS, SEQ = 2048, 2048  # one sequence


def layer(mode, tp=1, sequence_parallel=False, fused=False, **changes):
    gpt = model(hidden=2048, heads=16, kv_heads=16, head_dim=128, ffn=8192, **changes)
    return memory.layer_activation_bytes(gpt, TOKENS, SEQ, tp, sequence_parallel, fused, mode, 2)


def test_gpt_layer_is_34_sbh_plus_5_as2b():
    # Korthikanti et al. 2022, equation 2, s = 2048, b = 1, h = 2048, a = 16
    assert layer("none") == 34 * 2048 * 2048 + 5 * 16 * 2048 * 2048 == 478_150_656


def test_selective_recompute_drops_the_scores():
    assert layer("selective") == 34 * 2048 * 2048 == 142_606_336


def test_full_recompute_keeps_the_input_only():
    assert layer("full") == 2 * 2048 * 2048 == 8_388_608


def test_tensor_parallel_divides_all_but_ten_sbh_and_sequence_parallel_those_too():
    # equation 2: sbh (10 + 24/t) + 5 a s^2 b / t; equation 4: everything / t
    assert layer("none", tp=4) == 2048 * 2048 * (10 + 24 // 4) + 5 * 16 * 2048 * 2048 // 4
    assert layer("none", tp=4, sequence_parallel=True) == layer("none") // 4


def test_fused_attention_keeps_no_scores():
    assert layer("none", fused=True) == layer("selective")


def test_gated_mlp_without_dropout_by_hand():
    # per token: 8h for norms and matmul inputs; q 2h, k and v 2h/4 each, context 2h; gate, up and product 2 x 3 ffn
    kept = memory.layer_activation_bytes(
        model(hidden=64, heads=8, kv_heads=2, head_dim=8, ffn=256, gated_mlp=True, dropout=False),
        10, 10, 1, False, True, "none", 2,
    )  # fmt: skip
    assert kept == 10 * (8 * 64 + 2 * (64 + 2 * 16) + 2 * 64 + 6 * 256)


def test_state_bytes_per_parameter():
    unit = memory.unit_memory(model(), "layer", 512, 512, 1, 4, 0, True, False, "none", 2, 8)
    assert (unit.weights, unit.gradients, unit.optimizer) == tuple(unit.parameters * k for k in (2, 4, 12))
    zero = memory.unit_memory(model(), "layer", 512, 512, 1, 4, 1, True, False, "none", 2, 8)
    # a quarter of the state and of the fp32 copy of the reduced gradients that the step works on
    assert zero.optimizer == unit.parameters * (12 + 4) // 4
    single = memory.unit_memory(model(), "layer", 512, 512, 1, 1, 0, True, False, "none", 4, 8)
    assert (single.weights, single.optimizer) == (unit.parameters * 4, unit.parameters * 8)


def test_head_holds_logits_and_tied_head_no_weight():
    head = memory.unit_memory(model(), "head", 512, 512, 1, 1, 1, True, False, "none", 2, 8)
    assert head.working == 512 * 32000 * 8
    fused = memory.unit_memory(model(), "head", 512, 512, 1, 1, 1, True, False, "none", 2, memory.FUSED_LOGIT_BYTES)
    assert fused.working == head.working / 2
    tied = memory.unit_memory(model(), "tied_head", 512, 512, 1, 1, 1, True, False, "none", 2, 8)
    assert tied.weights == 2 * 2 * 1024  # the final norm alone
    assert tied.working == head.working


def test_more_tensor_parallel_never_needs_more_memory():
    for mode, sequence_parallel, kv_heads in itertools.product(
        ("none", "selective", "full"), (True, False), (16, 4, 1)
    ):
        parts = [
            memory.unit_memory(
                model(kv_heads=kv_heads), "layer", 512, 512, tp, 1, 1, sequence_parallel, False, mode, 2, 8
            )
            for tp in (1, 2, 4, 8)
        ]
        for wide, narrow in itertools.pairwise(parts):
            assert narrow.weights <= wide.weights
            assert narrow.activation <= wide.activation


def test_repeated_key_value_heads_are_counted():
    # tp 8 with two key-value heads: each device holds one of them, so the eight hold eight
    few = model(kv_heads=2, biases=False)
    divided, replicated = few.unit_parameters("layer")
    per_device = memory.unit_parameters(few, "layer", 8)
    assert per_device == (divided + 6 * 64 * 2 * 1024) // 8 + replicated
