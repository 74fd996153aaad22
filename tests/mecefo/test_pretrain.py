"""The command, the text and the model that is trained on it."""

import hashlib

import pytest
import torch

from haap_rl.mecefo import pretrain
from haap_rl.mecefo.corpus import ALPHABET, corpus, text
from haap_rl.mecefo.failures import Cell, Grid, Outage, Schedule
from haap_rl.mecefo.job import CharacterPretraining
from haap_rl.mecefo.options import MecefoOptions

SHORT = ["steps=3", "samples=1", "length=16"]


def test_the_text_is_the_same_everywhere():
    """On every Python and machine; changing the grammar changes what earlier figures were trained on."""
    found = text(10_000, 0)
    assert found.startswith("kate found the green drum in the kitchen. she took it from the kitchen, and gave it to ")
    assert hashlib.sha256(found.encode()).hexdigest()[:16] == "a4dbb6472340146b"
    assert set(found) <= set(ALPHABET)
    assert len(found) >= 10_000
    assert corpus(10_000, 0).shape == (10_000,)


def test_seeds_make_texts_and_models():
    assert text(1000, 0) != text(1000, 1)
    first, again, other = (CharacterPretraining(seed=seed).model().state_dict() for seed in (0, 0, 1))
    name = "layers.0.mlp.up_proj.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])


def test_making_a_model_or_a_batch_leaves_torchs_random_state_alone():
    before = torch.random.get_rng_state()
    job = CharacterPretraining()
    job.model()
    job.batch(3, 1)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_batch_depends_on_step_and_rank_alone():
    job = CharacterPretraining()
    assert torch.equal(job.batch(3, 1), job.batch(3, 1))
    assert not torch.equal(job.batch(3, 1), job.batch(3, 2))
    assert not torch.equal(job.batch(3, 1), job.batch(4, 1))
    assert job.batch(0, 0).shape == (job.samples, job.length + 1)


def test_equal_seeds_give_equal_figures_and_looking_at_errors_changes_none():
    job = CharacterPretraining(steps=4, samples=1, length=16)
    schedule = Schedule((Outage(Cell(0, 0), 1, 3),))
    first, again, unwatched = (
        pretrain.pretrain(job, Grid(3, 2), schedule, MecefoOptions(rank=8), error_steps=every) for every in (1, 1, 0)
    )
    assert first == again
    assert (first.perplexity, first.losses) == (unwatched.perplexity, unwatched.losses)
    assert [error > 0 for _, error in first.errors] == [False, True, True, False]


def test_the_command_says_what_came_of_it(capsys):
    assert pretrain.main([*SHORT, "cells_down=1"]) == 0
    said = capsys.readouterr().out
    assert "held-out perplexity" in said
    assert "relative gradient error: mean" in said
    assert pretrain.main([*SHORT, "failure_steps=2", "recovery_steps=1", "error_steps=0"]) == 0
    assert pretrain.main([*SHORT, "policy=drop_replica", "low_rank=[gate,up]", "takeover=spread"]) == 0
    assert pretrain.main(["--help"]) == 0
    assert "low_rank=" in capsys.readouterr().out


def test_the_command_runs_real_processes(capsys):
    assert pretrain.main([*SHORT, "processes=true", "ranks=2", "cells_down=1", "redraw_steps=2"]) == 0
    assert "process groups" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        (
            "rank=40",
            "mecefo: rank=40 is larger than the matrix layers.0.mlp.gate_proj of 88 x 32; give rank=32 or less",
        ),
        ("rank=many", "mecefo: rank='many' cannot be read; give for example rank=8"),
        ("speed=1", "mecefo: 'speed=1' is not an option; options: seed, steps"),
        ("steps=0", "mecefo: steps=0 leaves nothing to do"),
        ("seed=-1", "mecefo: seed=-1 must be a number from 0"),
        ("low_rank=[gate,query]", "mecefo: low_rank=('gate', 'query') must be a list of some of gate, up, down"),
        ("cells_down=15", "mecefo: cells_down=15 would leave a stage of the grid 8 x 2 without a live cell"),
        ("ranks=0", "mecefo: a grid of 0 x 2 has no cell"),
        ("ranks=100000000", "mecefo: ranks=100000000 must be a number from 0 to 1,024; give ranks=8"),
        ("heads=3", "mecefo: hidden=32 must be a multiple of twice heads=3"),
        ("policy=drop", "mecefo: policy='drop' must be one of mecefo, drop_replica"),
        ("takeover=nearest", "mecefo: takeover='nearest' must be one of ring, most_slack, spread"),
        ("processes=perhaps", "mecefo: processes='perhaps' cannot be read; give for example processes=false"),
    ],
)
def test_bad_input_is_one_line(argument, says, capsys):
    assert pretrain.main([*SHORT, argument]) == 2
    error = capsys.readouterr().err
    assert error.startswith(says)
    assert error.count("\n") == 1


def test_failures_that_outpace_repair_are_said_in_one_line(capsys):
    arguments = ["ranks=2", "stages=1", "failure_steps=1", "recovery_steps=50", "steps=20", "samples=1", "length=16"]
    assert pretrain.main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("mecefo: stage 0: no live cell is left in a stage, and no repair lets training be done")
    assert error.count("\n") == 1
