"""Megatron-LM: layouts by hand, corruptions caught before megatron-core sees them, and megatron-core's own class."""

import os
import re
import subprocess

import pytest

from haap_rl.cost.estimator import Estimator
from haap_rl.export.megatron import (
    JobRecompute,
    expanded,
    files,
    job_recompute,
    layout,
    read,
    read_layout,
    with_recompute,
)
from haap_rl.export.targets import export_plan
from haap_rl.problem.errors import InputError
from tests.builders import model, plan, problem, stage
from tests.export.plans import uniform_random, wide_problem

GPT = {"num_layers": 8}


def sample():
    """A problem and a plan of four stages that Megatron-LM can say."""
    target = problem(model_changes=GPT, global_batch_size=16)
    stages = (stage(4, "fast", 1, 2), stage(2, "fast", 1, 2), stage(2, "slow", 1, 2), stage(2, "slow", 1, 2))
    return target, with_recompute(plan(*stages), JobRecompute("full", 1))


# ------------------------------------------------------------------------------------------- by hand
def test_a_layout_has_a_part_per_stage_with_the_embedding_first_and_the_head_last():
    assert layout(sample()[1]) == "Et*3|t*2|t*2|tL"
    assert layout(plan(stage(1, "fast"), stage(3, "fast"), stage(2, "fast"))) == "E|t*3|tL"
    assert layout(plan(stage(6, "fast"))) == "Et*4L"


def test_interleaved_stages_come_chunk_after_chunk():
    assert layout(plan(stage(5, "fast"), stage(3, "fast"), virtual_stages=2)) == "Et*2|t|t*2|tL"


@pytest.mark.parametrize(
    ("text", "stages"),
    [("Et*3|(tt|)*2,tL", "Ettt|tt|tt|tL"), ("E|(t|)*2L", "E|t|t|L"), ("(Et)*1|tL", "Et|tL"), ("E t | L", "Et|L")],
)
def test_repetitions_are_written_out_as_the_documentation_has_them(text, stages):
    assert expanded(text) == stages


def test_a_setting_of_the_job_is_what_all_stages_agree_on():
    _, one = sample()
    assert job_recompute(one) == JobRecompute("full", 1)
    assert job_recompute(with_recompute(one, JobRecompute("full", 3))) == JobRecompute("full", 3)
    assert [s.recompute.num_layers for s in with_recompute(one, JobRecompute("full", 2)).stages] == [2, 2, 2, 1]
    assert job_recompute(with_recompute(one, JobRecompute("selective"))) == JobRecompute("selective")
    assert job_recompute(plan(stage(3, "fast", mode="full", recomputed=1), stage(3, "slow"))) is None


def test_all_layers_recomputed_is_uniform_and_some_is_block():
    target, one = sample()
    some = files(target, one)["run.sh"]
    every = files(target, with_recompute(one, JobRecompute("full", 3)))["run.sh"]
    assert '--recompute-method "block"\n  --recompute-num-layers "1"' in some
    assert '--recompute-method "uniform"\n  --recompute-num-layers "1"' in every


# ---------------------------------------------------------------------------------------- corruptions
def replaced(before, after, name="run.sh"):
    return lambda written: {**written, name: written[name].replace(before, after, 1)}


CORRUPTIONS = {
    "an unknown letter": (replaced("Et*3|", "Ex*3|"), "letter 'x' is none of E, t, L"),
    "an MTP layer": (replaced("tL'", "tmL'"), "letter 'm'"),
    "a layer too many": (replaced("t*2|t*2", "t*3|t*2"), "it has 9 layers, the model 8"),
    "a layer too few": (replaced("Et*3", "Et*2"), "it has 7 layers, the model 8"),
    "a decoder before the embedding": (replaced("Et*3", "tEt*2"), "E comes before every layer"),
    "a decoder behind the head": (replaced("tL'", "Lt'"), "L behind them"),
    "no embedding": (replaced("Et*3", "t*3"), "E .embedding. must stand there once, not 0"),
    "no head": (replaced("tL'", "t'"), "L .head and loss. must stand there once, not 0"),
    "two embeddings": (replaced("Et*3", "EEt*3"), "not 2 times"),
    "a stage less": (replaced("|tL'", "tL'"), "it has 3 stages, not pp=4 x vpp=1"),
    "twice the stages, silently interleaved": (
        replaced("'Et*3|t*2|t*2|tL'", "'Et|t|t|t|t|t|t|tL'"),
        "it has 8 stages, not pp=4 x vpp=1; megatron-core would take it for interleaved stages",
    ),
    "half the pipeline ranks, silently interleaved": (replaced("PP=4", "PP=2"), "would take it for interleaved"),
    "chunks that differ": (replaced("PP=4\nVPP=1", "PP=2\nVPP=2"), "the chunks of stage 0 have .3, 2. layers"),
    "a stray digit": (replaced("t*2|", "t2|"), "'2' does not belong to"),
    "an open bracket": (replaced("t*2|", "(t*2|"), "'.' does not belong to"),
    "no repetition": (replaced("|tL'", "t|t*0L'"), "t.0 repeats nothing"),
    "a repetition without end": (replaced("t*2|", "t*99999(t*99999)*99999|"), "more than 100000 letters"),
    "tp that does not divide the heads": (
        replaced('parallel-size "1"', 'parallel-size "3"'),
        "--tensor-model-parallel-size=3: it must divide heads=16",
    ),
    "tp that leaves no whole replicas": (replaced('parallel-size "1"', 'parallel-size "4"'), "a multiple of tp=4 x pp"),
    "tp 0": (replaced('parallel-size "1"', 'parallel-size "0"'), "at least 1"),
    "a micro-batch that does not divide the batch": (replaced('batch-size "1"', 'batch-size "3"'), "times dp=2"),
    "another batch": (replaced('global-batch-size "16"', 'global-batch-size "32"'), "the problem has 16"),
    "another model": (replaced('hidden-size "1024"', 'hidden-size "2048"'), "the model of the problem needs 1024"),
    "layers that the layout does not have": (replaced('--num-layers "8"', '--num-layers "9"'), "needs 8"),
    "a flag twice": (replaced("  --sequence", '  --micro-batch-size "2"\n  --sequence'), "it is there twice"),
    "an unknown flag": (replaced("--sequence-parallel", "--sequence-paralel"), "no flag of a plan"),
    "a flag left out": (replaced('  --micro-batch-size "1"\n', ""), "it must be stated"),
    "first and last stage beside a layout": (
        replaced("  --sequence", '  --decoder-first-pipeline-num-layers "3"\n  --sequence'),
        "no flag of a plan",
    ),
    "a method without granularity": (replaced('  --recompute-granularity "full"\n', ""), "belong to"),
    "an unknown method": (replaced('method "block"', 'method "blocks"'), "it is uniform or block"),
    "more recomputed than there is": (replaced('recompute-num-layers "1"', 'recompute-num-layers "4"'), "3 are all"),
    "units of recomputation": (
        replaced('"block"\n  --recompute-num-layers "1"', '"uniform"\n  --recompute-num-layers "2"'),
        "only 1 keeps each layer's input",
    ),
    "a host twice": (
        replaced("fast-0 slots=4", "fast-0 slots=4\nfast-0 slots=4", "hostfile"),
        "times dp=3 it must divide",
    ),
    "a host on two lines": (
        replaced("fast-0 slots=4", "fast-0 slots=2\nfast-0 slots=2", "hostfile"),
        "line 1 must be 'fast-0 slots=4', with which the plan was priced",
    ),
    "other devices": (replaced("DEVICES=(0,1,2,3", "DEVICES=(0,1,3,2"), "with which the plan was priced"),
    "no layout": (replaced("LAYOUT=", "LAYUOT="), "assigned once, not 0 times"),
}


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_a_corrupted_export_is_refused_in_one_line_with_field_and_rule(kind):
    corrupt, message = CORRUPTIONS[kind]
    target, one = sample()
    written = files(target, one)
    assert read(target, written) == one
    changed = corrupt(written)
    assert changed != written
    with pytest.raises(InputError, match=message) as error:
        read(target, changed)
    assert str(error.value).startswith("megatron: ")
    assert "\n" not in str(error.value)


def test_the_layout_is_checked_against_ranks_and_chunks_alike():
    assert read_layout("Et|t|t|tL", 4, 2, 2) == [2, 2]
    with pytest.raises(InputError, match="take it for interleaved"):
        read_layout("Et|t|t|tL", 4, 2, 1)


# ---------------------------------------------------------------------------------------- the script
def launch(folder, number, **variables):
    """Run run.sh with a torchrun that prints its arguments and devices, one a line."""
    stub = folder / "bin" / "torchrun"
    stub.parent.mkdir(exist_ok=True)
    stub.write_text('#!/bin/bash\necho "$CUDA_VISIBLE_DEVICES"\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    environment = {"PATH": f"{stub.parent}:{os.environ['PATH']}", "MASTER_ADDR": "host", **variables}
    command = ["bash", str(folder / "run.sh"), str(number), "pretrain_gpt.py", "--mock-data"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)


def test_the_script_starts_each_launch_with_its_devices_and_flags(tmp_path):
    target = problem(model_changes={"num_layers": 6})
    one = plan(stage(2, "fast", 2), stage(3, "slow", 2), stage(3, "fast", 2))
    written = files(target, one)
    (tmp_path / "run.sh").write_text(written["run.sh"])
    for number, devices in enumerate(("0,1", "0,1", "2,3")):
        ran = launch(tmp_path, number)
        assert ran.returncode == 0, ran.stderr
        visible, *words = ran.stdout.splitlines()
        assert visible == devices
        for flag, value in (
            ("--nnodes", "3"),
            ("--node-rank", str(number)),
            ("--nproc-per-node", "2"),
            ("--pipeline-model-parallel-size", "3"),
            ("--pipeline-model-parallel-layout", "Et|t*3|t*2L"),
            ("--tensor-model-parallel-size", "2"),
        ):
            assert words[words.index(flag) + 1] == value
        assert words[-1] == "--mock-data"


def test_the_script_starts_nothing_where_stages_would_be_interleaved_silently(tmp_path):
    target, one = sample()
    (tmp_path / "run.sh").write_text(files(target, one)["run.sh"].replace("PP=4", "PP=2"))
    ran = launch(tmp_path, 0)
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert "LAYOUT has 4 stages, not PP=2 times VPP=1" in ran.stderr


# ------------------------------------------------------------------------------------- megatron-core
def test_uniform_plans_are_exact():
    target = wide_problem()
    estimator = Estimator(target)
    for one in uniform_random(target, 100, seed=1):
        result = export_plan(target, one, "megatron", estimator)
        assert result.exact
        assert result.written == one


def test_megatron_core_takes_every_exact_export_with_equal_counts_per_stage():
    reason = "megatron-core is not installed; pip install 'haap_rl[export-check]'"
    module = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout", reason=reason)
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_config import TransformerConfig

    target = wide_problem(kv_heads=4)
    m, ranks = target.model, set()
    for one in uniform_random(target, 600, seed=2):
        text, chunks, pp = layout(one), one.virtual_stages, len(one.stages)
        flags = files(target, one)["run.sh"]
        assert f"LAYOUT='{text}'" in flags
        theirs = module.PipelineParallelLayerLayout.from_str(text, pp)
        theirs.validate_layer_layout(num_layers=m.num_layers, mtp_num_layers=None)
        assert theirs.virtual_pipeline_model_parallel_size == chunks
        for i, a_stage in enumerate(one.stages):
            counts = [part.count(LayerType.decoder) for part in theirs.layout[i]]
            layers = a_stage.num_units - (i == 0) - (i == pp - 1)
            assert counts == [layers // chunks] * chunks
            held = [kind for part in theirs.layout[i] for kind in part]
            assert held.count(LayerType.embedding) == (i == 0)
            assert held.count(LayerType.loss) == (i == pp - 1)
        setting = job_recompute(one)
        tp = one.stages[0].replicas[0].tp
        method = re.search(r'--recompute-method "(\w+)"', flags)
        number = re.search(r'--recompute-num-layers "(\d+)"', flags)
        TransformerConfig(
            num_layers=m.num_layers,
            hidden_size=m.hidden,
            num_attention_heads=m.heads,
            num_query_groups=m.kv_heads,
            tensor_model_parallel_size=tp,
            sequence_parallel=one.sequence_parallel and tp > 1,
            pipeline_model_parallel_size=pp,
            pipeline_model_parallel_layout=text,
            pipeline_dtype="bf16",
            recompute_granularity=None if setting.mode == "none" else setting.mode,
            recompute_method=method and method[1],
            recompute_num_layers=number and int(number[1]),
        )
        ranks.add(pp)
    assert ranks == set(range(2, 17))


def test_a_model_flag_for_every_dimension_that_differs():
    small = files(problem(model_changes={"num_layers": 4}), plan(stage(6, "fast")))["run.sh"]
    assert '--position-embedding-type "learned_absolute"' in small
    assert "--group-query-attention" not in small
    grouped = wide_problem(kv_heads=4)
    one = next(uniform_random(grouped, 1))
    text = files(grouped, one)["run.sh"]
    for flag in ('--num-query-groups "4"', "--swiglu", "--disable-bias-linear", "--bf16", '--hidden-dropout "0.0"'):
        assert flag in text
    assert model().heads == 16
