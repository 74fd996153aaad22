"""torchtitan: module lists that cover the model, read back as text and as Python, corruptions refused."""

import os
import sys
import types
from dataclasses import replace

import pytest

from haap_rl.cost.estimator import Estimator
from haap_rl.export.targets import export_plan
from haap_rl.export.torchtitan import files, model_parts, read
from haap_rl.problem.errors import InputError
from haap_rl.problem.model import model_from_config
from haap_rl.problem.presets import preset
from tests.builders import plan, problem, stage
from tests.export.plans import LLAMA, in_bf16, uniform_random, wide_problem


def sample(**settings):
    """A Llama of eight layers and a plan of three stages that torchtitan can say."""
    target = in_bf16(problem(model_changes={"num_layers": 8, **LLAMA}, global_batch_size=16))
    return target, plan(stage(4, "fast", 1, 2), stage(3, "fast", 1, 2), stage(3, "slow", 1, 2), **settings)


class Stub(types.SimpleNamespace):
    """A dataclass of torchtitan that takes what it is given."""


def executed(text, monkeypatch):
    """The configuration that the written function makes, with stubs in torchtitan's place."""
    config = Stub(training=Stub(), parallelism=None, activation_checkpoint="untouched")
    modules = {
        "torchtitan.config": {"ParallelismConfig": Stub},
        "torchtitan.distributed.activation_checkpoint": {"FullAC": types.SimpleNamespace(Config=lambda: "full")},
        "torchtitan.models.llama3.config_registry": {"llama3_8b": lambda: config},
        "haap_base": {"base": lambda: config},
    }
    for name in ("torchtitan", "torchtitan.distributed", "torchtitan.models", "torchtitan.models.llama3", *modules):
        module = types.ModuleType(name)
        vars(module).update(modules.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    space = {}
    exec(compile(text, "haap_plan.py", "exec"), space)
    return space["haap_plan"]()


def test_the_modules_of_a_plan_by_hand():
    assert model_parts(plan(stage(3, "fast"), stage(1, "fast"))) == [
        ["tok_embeddings", "layers.0", "layers.1"],
        ["norm", "lm_head"],
    ]
    assert model_parts(plan(stage(3, "fast"), stage(3, "fast"), virtual_stages=2)) == [
        ["tok_embeddings", "layers.0"],
        ["layers.1"],
        ["layers.2"],
        ["layers.3", "norm", "lm_head"],
    ]


def test_uniform_plans_with_all_or_no_layers_recomputed_are_exact_and_cover_the_model():
    target = wide_problem()
    estimator, exact = Estimator(target), 0
    for one in uniform_random(target, 150, seed=4):
        if one.num_microbatches < len(one.stages) or not all(model_parts(one)):
            continue
        result = export_plan(target, one, "torchtitan", estimator)
        names = [name for part in model_parts(result.written) for name in part]
        assert names == ["tok_embeddings", *(f"layers.{k}" for k in range(32)), "norm", "lm_head"]
        exact += result.exact
    assert exact > 15


@pytest.mark.parametrize("interleaved", [1, 2])
def test_the_written_function_runs_and_says_the_plan(monkeypatch, interleaved):
    target = replace(sample()[0], global_batch_size=24)
    even = (stage(5, "fast", 1, 2, 2), stage(5, "slow", 1, 2, 2))
    one = plan(*even, m=6, virtual_stages=interleaved)
    written = files(target, one)
    config = executed(written["haap_plan.py"], monkeypatch)
    parallel = vars(config.parallelism)
    assert parallel == {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": 2,
        "fsdp_reshard_after_forward": "never",
        "tensor_parallel_degree": 1,
        "enable_sequence_parallel": True,
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "Interleaved1F1B" if interleaved == 2 else "1F1B",
        "pipeline_parallel_microbatch_size": 2,
        "module_fqns_per_model_part": model_parts(one),
    }
    assert vars(config.training) == {
        "local_batch_size": 12,
        "global_batch_size": 24,
        "seq_len": 512,
        "mixed_precision_param": "bfloat16",
        "disable_cuda_graphs": True,
    }
    assert config.activation_checkpoint is None
    assert read(target, written) == one


def test_a_single_stage_accumulates_gradients_and_shares_weights_by_its_zero_stage(monkeypatch):
    target, _ = sample()
    for zero, policy in ((0, "default"), (2, "never"), (3, "always")):
        one = plan(stage(10, "fast", 1, 4, 1), m=4, zero_stage=zero)
        written = files(target, one)
        config = executed(written["haap_plan.py"], monkeypatch)
        assert config.training.local_batch_size == 1
        assert config.training.global_batch_size == 16
        assert config.parallelism.fsdp_reshard_after_forward == policy
        assert read(target, written) == one


def test_layers_recomputed_and_a_known_model(monkeypatch):
    target, _ = sample()
    known = replace(target, model=model_from_config(preset("model", "llama3_8b")))
    full = [stage(17, "fast", mode="full", recomputed=16), stage(17, "slow", mode="full", recomputed=16)]
    text = files(known, plan(*full, m=16))["haap_plan.py"]
    assert "from torchtitan.models.llama3.config_registry import llama3_8b as base" in text
    assert executed(text, monkeypatch).activation_checkpoint == "full"
    # of another size it is not torchtitan's, whose other layers would be dropped without a word
    shorter = replace(known, model=replace(known.model, num_layers=16))
    less = [stage(9, "fast", mode="full", recomputed=8), stage(9, "slow", mode="full", recomputed=8)]
    assert "from haap_base import base" in files(shorter, plan(*less, m=16))["haap_plan.py"]


def test_the_attention_core_alone_is_not_its_selective_mode_and_becomes_all_or_nothing():
    target, _ = sample()
    some = [stage(5, "fast", mode="selective", recomputed=4), stage(5, "slow", mode="selective", recomputed=4)]
    result = export_plan(target, plan(*some, m=16), "torchtitan", Estimator(target))
    assert [loss.field for loss in result.losses] == ["stage 0 recompute", "stage 1 recompute"]
    assert {loss.written_value for loss in result.losses} == {"none"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"precision": "fp16"}, "problem.precision=fp16 cannot be written: it trains in bf16 or fp32"),
        ({"norm": "layernorm"}, "model.norm=layernorm"),
        ({"learned_positions": True}, "model.learned_positions=true"),
        ({"tied_embeddings": True}, "model.tied_embeddings=true"),
        ({"m": 2}, "num_microbatches=2 .* one for each of the 3 stages"),
    ],
)
def test_what_torchtitan_cannot_train_is_refused_with_field_and_rule(change, message):
    target, one = sample()
    if "precision" in change:
        target = replace(target, precision="fp16")
    elif "m" in change:
        target = replace(target, global_batch_size=4)
        one = replace(one, num_microbatches=2)
    else:
        target = replace(target, model=replace(target.model, **change))
    with pytest.raises(InputError, match=message):
        export_plan(target, one, "torchtitan", Estimator(target))


def replaced(before, after, name="haap_plan.py"):
    return lambda written: {**written, name: written[name].replace(before, after, 1)}


CORRUPTIONS = {
    "a layer left out": (replaced("'layers.1', ", ""), "'layers.1': is missing, and torchtitan would train without"),
    "a layer twice": (replaced("'layers.1', ", "'layers.1', 'layers.1', "), "'layers.1': is there twice"),
    "a layer that is not there": (replaced("'layers.2'", "'layers.2', 'layers.9'"), "'layers.9': is no module"),
    "the head's older name": (replaced("'lm_head'", "'output'"), "'lm_head': is missing"),
    "layers in another order": (replaced("'layers.1', 'layers.2'", "'layers.2', 'layers.1'"), "in the model's order"),
    "no embedding": (replaced("'tok_embeddings', ", ""), "'tok_embeddings': is missing"),
    "parts for other ranks": (replaced("pipeline_parallel_degree=3", "pipeline_parallel_degree=2"), "fill 2 ranks"),
    "an interleaved schedule": (replaced("'1F1B'", "'Interleaved1F1B'"), "1 parts per pipeline rank run by 1F1B"),
    "whatever sharding there is": (replaced("'never'", "'default'"), "is no ZeRO stage"),
    "always gathered again": (replaced("'never'", "'always'"), "it is one of default, never"),
    "left-over ranks": (replaced("shard_degree=2", "shard_degree=-1"), "at least 1"),
    "another batch": (replaced("local_batch_size = 8", "local_batch_size = 4"), "training.local_batch_size"),
    "another length": (replaced("seq_len = 512", "seq_len = 1024"), "training.seq_len"),
    "CUDA graphs": (replaced("disable_cuda_graphs = True", "disable_cuda_graphs = False"), "disable_cuda_graphs"),
    "a selective mode": (replaced("config.activation_checkpoint = None", "config.activation_checkpoint = X()"), "X()"),
    "a computed degree": (replaced("tensor_parallel_degree=1", "tensor_parallel_degree=1 + 1"), "must be written out"),
    "no function": (replaced("def haap_plan", "def plan"), "one function, not 0"),
    "no Python": (replaced("def haap_plan():", "def haap_plan(:"), "it is not Python"),
    "other devices": (replaced("DEVICES=(0,1,2,3", "DEVICES=(0,1,3,2", "run.sh"), "with which the plan was priced"),
    "a host too many": (lambda w: {**w, "hostfile": w["hostfile"] + "slow-0 slots=2\n"}, "need 6"),
}


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_a_corrupted_export_is_refused_in_one_line_with_field_and_rule(kind):
    corrupt, message = CORRUPTIONS[kind]
    target, one = sample()
    written = files(target, one)
    assert read(target, written) == one
    changed = corrupt(written)
    assert changed != written
    with pytest.raises(InputError) as error:
        read(target, changed)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_torchtitan_itself_knows_every_field(monkeypatch):
    """With torchtitan's `config/configs.py` at HAAP_RL_TORCHTITAN, its own dataclass takes what is written."""
    path = os.environ.get("HAAP_RL_TORCHTITAN")
    if path is None:
        pytest.skip("HAAP_RL_TORCHTITAN does not name torchtitan's config/configs.py (its package is too large for CI)")
    import importlib.util

    spec = importlib.util.spec_from_file_location("torchtitan_configs", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "torchtitan_configs", module)
    spec.loader.exec_module(module)
    target = wide_problem()
    for one in uniform_random(target, 200, seed=7):
        if job_is_said(one):
            config = executed(files(target, one)["haap_plan.py"], monkeypatch)
            taken = module.ParallelismConfig(**vars(config.parallelism))
            assert taken.module_fqns_per_model_part == model_parts(one)
            module.TrainingConfig(**vars(config.training))


def job_is_said(one):
    return all(model_parts(one)) and {s.recompute.mode for s in one.stages} == {"none"}
