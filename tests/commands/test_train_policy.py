"""`haap_rl.train_policy`: twenty seconds of training better a policy; resumed, refused, interrupted."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from haap_envs.construct import Problems
from haap_rl import train_policy
from haap_rl.problem.instances import draw_pool, load_instances
from haap_rl.problem.presets import preset
from haap_rl.search.base import Budget, Objective, run_search
from haap_rl.search.candidate_policy import load_policy
from haap_rl.search.ppo import PPO
from haap_rl.space.options import SpaceSpec
from haap_rl.tracking import Tracker
from haap_rl.training import teacher
from haap_rl.training.trainer import Course, Settings, Trainer, validate

SPEC = SpaceSpec(num_microbatches=(16, 32), max_stages=4, max_tp=4, group_sizes=(2, 4, 8))
SMALL = [
    "space.num_microbatches=[16,32]", "space.max_stages=4", "space.max_tp=4", "space.group_sizes=[2,4,8]",
    "pool=3", "validation=2", "processes=1", "training.hidden=8", "training.cloning_rounds=1",
    "training.cloning_steps=5", "training.ppo_rounds=2",
    "training.ppo_updates=1", "training.num_envs=4", "training.num_steps=8", "training.batch_size=16",
]  # fmt: skip


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """(training, validation) problems with lessons in a small space."""
    path = tmp_path_factory.mktemp("lessons") / "lessons.jsonl"
    splits = load_instances(preset("instances", "default"))
    classes = []
    for split, count in (("train", 8), ("validation", 5)):
        pool = draw_pool(splits.split(split), count, 0, lambda problem: teacher.fits(SPEC, problem))
        lessons = teacher.lessons(pool, SPEC, path, 2, lambda done: None)
        classes.append(Course(Problems([instance.problem() for instance in pool], SPEC), lessons))
    return classes


def test_twenty_seconds_of_training_halve_the_gap_of_an_untrained_policy(taught, tmp_path):
    """The stated margin, for each of three seeds: median gap of the most likely plans on problems never trained on."""
    train, validation = taught
    settings = Settings(hidden=32, cloning_rounds=2, cloning_steps=120, cloning_batch=128, ppo_rounds=2,
                         ppo_updates=2, num_envs=16, num_steps=16)  # fmt: skip
    for seed in (0, 1, 2):
        torch.manual_seed(seed)
        before, _ = validate(settings.network(), validation, 0)
        trainer = Trainer(settings, seed, train, validation, tmp_path / f"{seed}.pt")
        after, sampled = validate(trainer.run(), validation, 0)
        assert np.median(after) < 0.5 * np.median(before), seed
        assert (sampled <= after).all()


def test_a_training_that_was_interrupted_ends_as_one_that_was_not(taught, tmp_path):
    train, validation = taught
    settings = Settings(hidden=8, cloning_rounds=1, cloning_steps=10,
                        ppo_rounds=2, ppo_updates=1, num_envs=4, num_steps=8, batch_size=16)  # fmt: skip
    whole = Trainer(settings, 5, train, validation, tmp_path / "whole.pt")
    whole.run()

    class Interrupted(Exception):
        pass

    def give_up(point):
        raise Interrupted

    for _ in range(len(whole.points)):
        with pytest.raises(Interrupted):
            Trainer(settings, 5, train, validation, tmp_path / "parts.pt", give_up).run()
    parts = Trainer(settings, 5, train, validation, tmp_path / "parts.pt")
    parts.run()
    assert parts.points == whole.points
    for name, value in whole.now.state_dict().items():
        torch.testing.assert_close(parts.now.state_dict()[name], value, rtol=0, atol=0)


def test_a_lesson_is_the_exact_plan_of_each_number_of_microbatches(taught):
    train, _ = taught
    for objective, lesson in zip(train.objectives, train.lessons, strict=True):
        assert lesson.examples
        for example in lesson.examples:
            assert example.iteration_s >= example.lower_bound_s * (1 - 1e-9)
            assert objective.space.holds(example.num_microbatches, example.options)


def test_the_command_trains_resumes_and_its_policy_plans(tmp_path, capsys):
    out = tmp_path / "policy"
    assert train_policy.main([*SMALL, "seeds=[0,1]", f"out={out}"]) == 0
    said = capsys.readouterr().out
    assert "best by validation: seed" in said
    assert {path.name for path in out.iterdir()} >= {"policy.npz", "curve.csv", "curve.png", "lessons.jsonl", "seed-1"}
    network, facts = load_policy(str(out / "policy.npz"))
    assert facts["training_instances"] == 3
    assert facts["training_evaluations"] > 0
    first = (out / "policy.npz").read_bytes()
    lessons = (out / "lessons.jsonl").read_text()
    assert train_policy.main([*SMALL, "seeds=[0,1]", f"out={out}"]) == 0  # all is there: nothing is trained
    assert "round" not in capsys.readouterr().out
    assert (out / "policy.npz").read_bytes() == first
    assert (out / "lessons.jsonl").read_text() == lessons
    problem = Objective(load_instances(preset("instances", "default")).split("validation")[0].problem()).problem
    result = run_search(PPO(policy=str(out / "policy.npz")), problem, Budget(200), 0, SPEC)
    assert result.plan is not None
    assert network.hidden == 8


def test_every_round_is_told_to_the_tracker(tmp_path, monkeypatch):
    told = []

    class Listening(Tracker):
        def point(self, values):
            told.append(dict(values))

    monkeypatch.setattr("haap_rl.tracking.tracker_from_config", lambda config, directory: Listening())
    assert train_policy.main([*SMALL, f"out={tmp_path / 'policy'}"]) == 0
    assert len(told) == 3  # one round of cloning, two of PPO
    assert "policy/seed_0/ppo_greedy_iqm_pct" in told[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["seeds=[]"], "seeds=[] must be a list"),
        (["seeds=[-1]"], "seeds: -1 must be a whole number"),
        (["training.hidden=0"], "training: hidden=0 must be"),
        (["training.hidden=1000000000"], "training: hidden=1000000000 must be at most 4096"),
        (["training.num_envs=1000000000000"], "training: num_envs=1000000000000 must be at most 10000"),
        (["training.blank=[speeed]"], "blank: 'speeed' is not a feature"),
        (["pool=0"], "pool=0 must be"),
        (["training.cloning_rounds=0", "training.ppo_rounds=0"], "cloning_rounds and ppo_rounds are both 0"),
        (["training.depth=3"], "unknown key 'training.depth'"),
        (["instances.train.models=[]"], "instances: train: models=[] must be a list of at least one"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, arguments, message):
    out = tmp_path / "policy"
    assert train_policy.main([*SMALL, f"out={out}", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_a_checkpoint_of_another_training_is_refused(taught, tmp_path):
    train, validation = taught
    settings = Settings(hidden=8, cloning_rounds=1, cloning_steps=2, ppo_rounds=0)
    path = tmp_path / "checkpoint.pt"
    Trainer(settings, 0, train, validation, path).run()
    with pytest.raises(ValueError, match="is of another training"):
        Trainer(settings, 1, train, validation, path).run()
    path.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="cannot be read"):
        Trainer(settings, 0, train, validation, path).run()


def test_a_line_of_a_lesson_that_was_cut_short_is_made_again(tmp_path):
    path = tmp_path / "lessons.jsonl"
    pool = draw_pool(load_instances(preset("instances", "default")).split("validation"), 2, 0,
                     lambda problem: teacher.fits(SPEC, problem))  # fmt: skip
    first = teacher.lessons(pool, SPEC, path, 1, lambda done: None)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][: len(lines[1]) // 2]]) + "\n")
    told = []
    assert teacher.lessons(pool, SPEC, path, 1, told.append) == first
    assert told == [1, 2]
    assert json.loads(path.read_text().splitlines()[-1])["name"] == pool[1].name


def test_help_is_quick_and_needs_no_torch():
    code = "import sys, haap_rl.train_policy as t; print('torch' in sys.modules, 'hydra' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.split() == ["False", "False"]
    assert Path(train_policy.__file__).name == "train_policy.py"


def test_an_interrupted_training_says_what_there_is(tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_policy, "_choose", interrupted)
    assert train_policy.main([*SMALL, f"out={tmp_path / 'policy'}"]) == 130
    assert "policies so far: " + str(tmp_path / "policy" / "seed-0" / "policy.npz") in capsys.readouterr().out
