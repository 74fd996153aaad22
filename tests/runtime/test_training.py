"""Any plan trains as one process does, and a bug in any of its sums is seen."""

import math
import pickle
from dataclasses import replace
from functools import cache

import pytest
import torch

from haap_rl.problem.errors import InputError
from haap_rl.runtime.checkpoint import checkpoint_bytes, load_checkpoint
from haap_rl.runtime.compare import expected_held, expected_in_flight, fullest, measure
from haap_rl.runtime.device import NATIVE
from haap_rl.runtime.job import check_runs
from haap_rl.runtime.layers import Cut, shard, unshard
from haap_rl.runtime.training import WITHIN, one_process, train
from tests.runtime import planted
from tests.runtime.plans import GPT, LLAMA, PLANS, job, plan, problem, stage

STEPS = 10
# GPT with dropout, biases and learned positions; Llama with grouped queries, gates and rotary positions
PROBLEMS = {
    "float32": problem(GPT),
    "float64": problem(LLAMA),
    "tied": problem(replace(GPT, tied_embeddings=True)),
}
JOBS = {name: job(target, "float32" if name == "float32" else "float64") for name, target in PROBLEMS.items()}


@cache
def alone(name, steps=STEPS):
    return one_process(JOBS[name], steps)


def run(ranks, name, chosen, steps=STEPS, bug=planted.no_bug, begin=None):
    found = ranks.call(planted.train_with, bug, JOBS[name], chosen, steps, NATIVE, begin, True)
    return [trained.report for trained in found if trained.report], found[0].checkpoint


def apart(losses, name):
    return max(abs(a - b) for a, b in zip(losses, alone(name)[0], strict=False))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_trains_as_one_process_does(ranks, name, dtype):
    reports, checkpoint = run(ranks, dtype, PLANS[name])
    losses, weights = alone(dtype)
    found = checkpoint.state["weights"]
    assert found.keys() == weights.keys()
    weights_apart = max(float((found[key] - weights[key]).abs().max()) for key in weights)
    losses_apart = apart(reports[0].losses, dtype)
    print(f"\n{name}, {dtype}: losses apart {losses_apart:.1e}, weights {weights_apart:.1e}")
    assert losses_apart <= WITHIN[dtype].loss
    assert weights_apart <= WITHIN[dtype].weight
    assert all(report.losses == reports[0].losses for report in reports)
    # as many micro-batches in flight as the memory model has, on every rank
    expected = expected_in_flight(len(PLANS[name].stages), PLANS[name].num_microbatches)
    assert all(report.in_flight == expected[report.place.stage] for report in reports)
    # and as many bytes: of weights and gradients exactly, of moments but for equal chunks, of activations nearly
    held = measure(reports, PLANS[name].num_microbatches).held
    for predicted, measured in fullest(expected_held(PROBLEMS[dtype], JOBS[dtype], PLANS[name]), held):
        assert predicted[:2] == measured[:2]
        assert predicted.optimizer == pytest.approx(measured.optimizer, rel=0.1)
        assert -0.3 < predicted.activations / measured.activations - 1 < 0.01
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["other tp in one stage", "no ZeRO"])
def test_a_tied_embedding_is_one_weight_wherever_it_lies(ranks, name):
    reports, checkpoint = run(ranks, "tied", PLANS[name], 5)
    losses, weights = alone("tied", 5)
    assert reports[0].losses == pytest.approx(losses, rel=0, abs=1e-12)
    assert "head.logits" not in weights
    assert max(float((checkpoint.state["weights"][key] - weights[key]).abs().max()) for key in weights) <= 1e-10


@pytest.mark.parametrize(
    ("bug", "chosen"),
    [
        (planted.mean_for_sum, PLANS["dp 2 -> dp 3"]),
        (planted.swapped_slice, PLANS["dp 3 -> tp 2"]),
        (planted.no_sum_of_input_gradients, PLANS["tp 2 x dp 2 -> tp 1"]),
        (planted.no_sum_of_outputs, PLANS["tp 2 x dp 2 -> tp 1"]),
        (planted.other_masks_when_recomputed, PLANS["dp 2 -> dp 3"]),
        (planted.other_masks_when_recomputed, PLANS["four stages, selective"]),
    ],
)
def test_a_planted_bug_is_seen(ranks, bug, chosen):
    """Without it the same plans are within 1e-5 over twice as many steps (above)."""
    reports, _ = run(ranks, "float32", chosen, 3, bug)
    assert apart(reports[0].losses, "float32") > 20 * 1e-5


def test_a_mean_for_a_sum_is_not_seen_in_the_first_loss(ranks):
    """Why several steps are compared."""
    reports, _ = run(ranks, "float32", PLANS["dp 2 -> dp 3"], 1, planted.mean_for_sum)
    assert apart(reports[0].losses, "float32") <= 1e-5


@pytest.mark.parametrize(
    ("before", "after"), [("tp 2 -> dp 3 unequal", "four stages, selective"), ("no ZeRO", "other tp in one stage")]
)
def test_a_training_goes_on_under_another_plan(ranks, before, after):
    first, checkpoint = run(ranks, "float32", PLANS[before], 4)
    assert checkpoint.step == 4
    then, _ = run(ranks, "float32", PLANS[after], STEPS - 4, begin=checkpoint)
    assert apart([*first[0].losses, *then[0].losses], "float32") <= 1e-5


def test_one_process_goes_on_from_a_plan(ranks):
    first, checkpoint = run(ranks, "float32", PLANS["no ZeRO"], 4)
    losses, _ = one_process(JOBS["float32"], STEPS - 4, checkpoint)
    assert apart([*first[0].losses, *losses], "float32") <= 1e-5


def test_a_checkpoint_is_read_as_it_was_written_and_refused_elsewhere(ranks, tmp_path):
    _, checkpoint = run(ranks, "float32", PLANS["three stages"], 1)
    path, content = tmp_path / "training.pt", checkpoint_bytes(checkpoint, JOBS["float32"])
    path.write_bytes(content)
    again = load_checkpoint(path, JOBS["float32"])
    assert again.step == 1
    assert all(torch.equal(again.state[kind][n], t) for kind in again.state for n, t in checkpoint.state[kind].items())
    with pytest.raises(InputError, match="as it is run"):
        load_checkpoint(path, JOBS["float64"])
    with pytest.raises(InputError, match="dtype=float32"):
        load_checkpoint(path, replace(JOBS["float32"], dtype="float64"))
    changed = bytearray(content)
    changed[content.index(b"layer.3.query") + 200] ^= 1
    for damaged in (bytes(changed), pickle.dumps({"step": 1}), b""):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="damaged"):
            load_checkpoint(path, JOBS["float32"])
    other = replace(JOBS["float32"], model=replace(JOBS["float32"].model, name="another"))
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"it is of 'tiny_gpt', another model or size than 'another'"):
        load_checkpoint(path, other)
    for key, value, words in (("step", 10**20, "step=1000"), ("weights", {"embedding.tokens": 3}, "have shape None")):
        torch.save({**torch.load(path, weights_only=True), key: value}, path)
        with pytest.raises(InputError, match=words):
            load_checkpoint(path, JOBS["float32"])
        path.write_bytes(content)
    broken = torch.load(path, weights_only=True)
    broken["first_moment"]["embedding.tokens"][0] = math.inf
    torch.save(broken, path)
    with pytest.raises(InputError, match=r"first_moment of 'embedding.tokens' are not finite"):
        load_checkpoint(path, JOBS["float32"])
    for cut in (0, 10, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:cut])
        with pytest.raises(InputError, match="cut short"):
            load_checkpoint(path, JOBS["float32"])
    with pytest.raises(InputError, match="No such file"):
        load_checkpoint(tmp_path / "none.pt", JOBS["float32"])


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_shards_make_the_whole_again(tp):
    whole = torch.arange(60.0).view(10, 6)
    for cut in (Cut((10, 6), 0), Cut((10, 6), 1), Cut((10, 6), None)):
        assert torch.equal(unshard([shard(whole, cut, index, tp) for index in range(tp)], cut), whole)


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (replace(PLANS["three stages"], zero_stage=3), "zero_stage=3"),
        (replace(PLANS["three stages"], virtual_stages=2), "interleaved"),
    ],
)
def test_what_is_not_run_is_refused(chosen, words):
    with pytest.raises(InputError, match=words):
        check_runs(JOBS["float32"], chosen)


def test_a_plan_of_more_ranks_than_there_are_is_refused(ranks):
    large = plan(stage(6, ("a", 1, 6, 1), ("b", 1, 6, 1)), m=1)
    with pytest.raises(InputError, match="needs 12 ranks and there are processes=1"):
        train(_Alone(), JOBS["float32"], large, 1)


class _Alone:
    world_size = 1
