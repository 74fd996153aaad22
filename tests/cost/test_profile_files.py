"""Profiles in files: our JSON comes back as it was, and each foreign table means what its source says."""

import copy
import json
import os
from pathlib import Path

import jsonschema
import pytest

import haap_rl.problem
from haap_rl.cost.estimator import Estimator, UnitKey
from haap_rl.cost.profile_files import (
    ACESO_MODELS,
    MIB,
    SAILOR_MODELS,
    load_profile,
    profile_from_json,
    profile_to_json,
    write_profile,
)
from haap_rl.cost.profiles import CollectiveCell, Grid, MeasuredFor, Profile, Timing, UnitCell
from haap_rl.problem.errors import InputError
from haap_rl.problem.presets import load_problem

DATA = Path(os.environ.get("HAAP_RL_DATA") or Path(__file__).resolve().parents[2] / "../shared/data")
OPERATORS, COLLECTIVES = DATA / "profiles_aceso_v100_ops.csv", DATA / "comm_measured.csv"
SAILOR = DATA / "profiles_sailor_layers.csv"
needs_data = pytest.mark.skipif(not OPERATORS.is_file(), reason=f"no published profiles in {DATA} (HAAP_RL_DATA)")


def whole_profile():
    """One with every key that a file can have."""
    stated = MeasuredFor(
        (("hidden", 1024), ("gated_mlp", False), ("norm", "layernorm"), ("vocab", 32000)), 512, "fp16", False, True
    )
    numbers = (0.01, 0.02, 0.003, 0.001, 0.0, 1e-5, 0.004, 1000, 2000, 3000)
    return Profile(
        "mine",
        stated,
        (UnitCell("a100_40", "layer", 1, 2, *numbers), UnitCell("a100_40", "head", 1, 64, out_of_memory=True)),
        (CollectiveCell("a100_40", "all_reduce", 2, True, (Timing(1024, 1e-4, 0.0), Timing(2048, 2e-4))),),
        "torch 2.13.0",
        "2025-01-31",
        "a test",
        ("a rank is measured alone",),
        Grid((1,), (2, 64), (2,), (1024, 2048), 3, 10),
    )


OPERATOR_NAMES = (
    *("encoder-embedding", "enc-1st-layernorm", "enc-attention-qkv", "enc-attention-score", "enc-attention-softmax"),
    *("enc-attention-dropout", "enc-attention-context", "enc-attention-dense", "enc-post-attention-dropout"),
    *("enc-2nd-layernorm", "enc-MLP-GEMM-1", "enc-MLP-gelu", "enc-MLP-GEMM-2", "enc-post-MLP-dropout"),
    *("final-layernorm", "gpt-post-process"),
)  # fmt: skip


def aceso_table(models=("1_3B",), without=(), changed=None):
    """Each operator takes 100 us forward, or 90 in split 1, and 200 backward; weights 1, activations 2 MiB."""
    lines = ["model,mbs,tp,tp_algo,op,fwd_us,bwd_us,input_MB,output_MB,weights_MB,activations_MB"]
    for model in models:
        for tp, algorithm, forward in ((1, 0, 100), (1, 1, 90), (2, 0, 60), (2, 1, 50)):
            for name in OPERATOR_NAMES:
                if (tp, name) not in without:
                    forward_us = (changed or {}).get((tp, name), forward)
                    lines.append(f"{model},1,{tp},{algorithm},{name},{forward_us},200,8,8,1,2")
    return "\n".join(lines) + "\n"


def collectives_table():
    return "\n".join(
        [
            "source_cluster,what,n_gpus,size,size_unit,fit,value,unit",
            "Aceso V100-32 node,all_reduce,2,4,MB,,0.5,ms",
            "Aceso V100-32 node,all_gather,4,3,MB,,0.7,ms",
            "Aceso V100-32 node,all_gather,4,544,MB,,1000000000.0,ms",
            "Aceso V100-32 node,all_to_all,4,3,MB,,0.7,ms",
            "Aceso V100-32 node,reduce_scatter,8,3,MB,,2,ms",
            'Sailor intra-node,V100-16,2,,,"[1, 2]",1e9,bytes/s',
        ]
    )


def sailor_table():
    return "\n".join(
        [
            "model,gpu,mbs,tp,n_layers_incl_embed_head,role,layer_index,fwd_s,bwd_s,update_s",
            "OPT-30,GH-96,1,1,50,embedding(first),0,0.001,0.0,-0.1",
            "OPT-30,GH-96,1,1,50,mid,25,0.01,0.02,0.003",
            "OPT-30,V100-16,2,7,50,head(last),49,0.03,0.06,0.003",
        ]
    )


def metis_profile(**times):
    """Made up: no figure of anybody's."""
    return {
        "model": {"model_name": "made up", "num_layers": 5, "parameters": {"total_parameters_bytes": 10}},
        "execution_time": {
            "total_time_ms": 50.0,
            "optimizer_time_ms": 5.0,
            "layer_compute_total_ms": [3.0, 30.0, 60.0, 33.0, 9.0],
            **times,
        },
        "execution_memory": {"total_memory_mb": 1000.0, "layer_memory_total_mb": [10.0, 20.0, 20.0, 30.0, 40.0]},
    }


@pytest.fixture
def written(tmp_path):
    """Writes text under a name and returns the path."""

    def write(text, name="profile"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if isinstance(text, str) else json.dumps(text))
        return path

    return write


# ----------------------------------------------------------------------------------------- our own JSON
def test_a_profile_that_is_written_comes_back_equal(tmp_path):
    path = tmp_path / "new" / "mine.json"
    write_profile(whole_profile(), path)
    assert load_profile(path) == whole_profile()
    assert load_profile(path).checksum == whole_profile().checksum
    assert [entry.name for entry in path.parent.iterdir()] == ["mine.json"]  # no temporary file is left
    bare = Profile("x", MeasuredFor())
    assert profile_from_json(json.loads(json.dumps(profile_to_json(bare)))) == bare


def test_a_write_that_fails_leaves_the_old_file_and_says_so(tmp_path, monkeypatch):
    path = tmp_path / "mine.json"
    write_profile(whole_profile(), path)
    before = path.read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(InputError, match="No space left on device"):
        write_profile(Profile("x", MeasuredFor()), path)
    assert path.read_bytes() == before


def schema():
    folder = Path(haap_rl.problem.__file__).parent / "schemas"
    data = json.loads((folder / "profile.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(data)
    return jsonschema.Draft202012Validator(data)


def test_what_is_written_is_valid_by_the_schema():
    schema().validate(json.loads(json.dumps(profile_to_json(whole_profile()))))


BAD = [
    (("schema",), "haap_rl.profile/0", ["schema='haap_rl.profile/0'"]),
    (("name",), "", ["name=''"]),
    (("extra",), 1, ["unknown key 'extra'"]),
    (("units",), {}, ["units={}", "list"]),
    (("assumptions",), ["a\nb"], ["assumptions.0"]),
    (("measured_for", "seq_len_tokens"), 0, ["seq_len_tokens=0"]),
    (("measured_for", "precision"), "fp8", ["precision='fp8'", "fp16"]),
    (("measured_for", "model", "hidden"), -1, ["model.hidden=-1"]),
    (("measured_for", "model", "experts"), 8, ["unknown key 'experts'"]),
    (("measured_for", "sequence_parallel"), "no", ["sequence_parallel='no'", "true or false"]),
    (("units", 0, "unit"), "tied_head", ["units.0", "unit='tied_head'", "layer"]),
    (("units", 0, "forward_s"), 0, ["units.0", "forward_s=0"]),
    (("units", 0, "forward_s"), -0.1, ["forward_s=-0.1"]),
    (("units", 0, "forward_ms"), 1.0, ["unknown key 'forward_ms'", "forward_s"]),
    (("units", 0, "activation_bytes"), 1.5, ["activation_bytes=1.5"]),
    (("units", 0, "microbatch_size_samples"), 0, ["microbatch_size_samples=0"]),
    (("units", 0, "out_of_memory"), 1, ["out_of_memory=1"]),
    (("collectives", 0, "operation"), "broadcast", ["collectives.0", "operation='broadcast'"]),
    (("collectives", 0, "ranks"), 1, ["ranks=1"]),
    (("collectives", 0, "timings"), [], ["timings"]),
    (("collectives", 0, "timings", 0, "seconds"), 0, ["timings.0", "seconds=0"]),
    (("grid", "tp"), [0], ["grid", "tp=0"]),
]


@pytest.mark.parametrize(("path", "value", "words"), BAD, ids=[".".join(map(str, path)) for path, _, _ in BAD])
def test_a_wrong_key_is_refused_in_one_line_by_reader_and_schema(written, path, value, words):
    data = json.loads(json.dumps(profile_to_json(whole_profile())))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(InputError) as error:
        load_profile(written(data))
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), str(error.value)
    if path != ("assumptions",):  # JSON Schema has no words for "one line"
        assert not schema().is_valid(data)


def test_a_cell_that_is_there_twice_is_refused(written):
    data = profile_to_json(whole_profile())
    for key in ("units", "collectives"):
        twice = copy.deepcopy(data)
        twice[key] += twice[key][:1]
        with pytest.raises(InputError, match=rf"{key}\.\d is there twice"):
            load_profile(written(json.dumps(twice)))


def test_what_no_reader_knows_is_said_in_one_line(written, tmp_path):
    for path, words in (
        (written("a,b\n1,2\n"), "none that is known"),
        (written("{", "cut"), "not JSON"),
        (written('{"schema": 1}', "other"), "schema=1"),
        (written("", "empty"), "none that is known"),
        (tmp_path / "absent", "cannot be read"),
        (tmp_path, "0 files DeviceType"),
        ("", "must be the name"),
        (None, "must be the name"),
    ):
        with pytest.raises(InputError, match=words):
            load_profile(path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        load_profile(tmp_path / "binary")


# ------------------------------------------------------------------------------------------------ Aceso
def cells(profile):
    return {(cell.unit, cell.tp, cell.microbatch_size): cell for cell in profile.units}


def test_aceso_units_are_sums_of_operators_of_the_cheaper_split_or_megatrons(written):
    found = cells(load_profile(written(aceso_table())))
    assert set(found) == {(unit, tp, 1) for unit in ("embedding", "layer", "head") for tp in (1, 2)}
    layer = found["layer", 1, 1]
    assert layer.forward_s == pytest.approx(13 * 90e-6)  # split 1 is cheaper, and at tp 1 that is all there is to it
    assert layer.backward_s == pytest.approx(13 * 200e-6)
    assert layer.attention_s == pytest.approx(4 * 90e-6)
    assert (layer.activation_bytes, layer.weights_bytes) == (26 * MIB, 13 * MIB)
    assert found["layer", 2, 1].forward_s == pytest.approx(13 * 60e-6)  # split 1 would need other collectives
    assert found["embedding", 1, 1].forward_s == pytest.approx(90e-6)
    assert found["head", 2, 1].forward_s == pytest.approx(2 * 60e-6)
    assert found["head", 2, 1].device == "v100_32"


def test_an_aceso_unit_with_an_operator_missing_or_zero_is_not_measured(written):
    gap = cells(load_profile(written(aceso_table(without={(2, "enc-MLP-gelu")}))))
    assert ("layer", 2, 1) not in gap
    assert ("head", 2, 1) in gap
    zero = cells(load_profile(written(aceso_table(changed={(1, "gpt-post-process"): 0}))))
    assert ("head", 1, 1) not in zero
    assert ("layer", 1, 1) in zero


def test_a_table_of_several_models_asks_which_one(written):
    path = written(aceso_table(("1_3B", "13B")))
    with pytest.raises(InputError, match=r"estimator.profile_model=1_3B\|13B"):
        load_profile(path)
    with pytest.raises(InputError, match="profile_model='2_6B' is not in it"):
        load_profile(path, "2_6B")
    assert dict(load_profile(path, "13B").measured_for.dimensions)["hidden"] == 5120
    with pytest.raises(InputError, match="chooses none"):
        load_profile(written(profile_to_json(whole_profile()), "own.json"), "13B")
    with pytest.raises(InputError, match="dimensions are not known"):
        load_profile(written(aceso_table(("7B",)), "other"))


def test_aceso_collectives_are_whole_buffers_in_bytes_and_1e9_ms_is_not_measured(written):
    found = {(cell.operation, cell.ranks): cell for cell in load_profile(written(collectives_table())).collectives}
    assert set(found) == {("all_reduce", 2), ("all_gather", 4), ("reduce_scatter", 8)}
    assert found["all_reduce", 2].timings == (Timing(4 * MIB, 0.5e-3),)
    assert found["all_gather", 4].timings == (Timing(4 * 3 * MIB, 0.7e-3),)  # the table gives a shard
    assert found["reduce_scatter", 8].timings == (Timing(3 * MIB, 2e-3),)


def test_collectives_of_a_second_file_are_added(written):
    operators, collectives = written(aceso_table(), "ops"), written(collectives_table(), "comm")
    both = load_profile(operators, collectives=collectives)
    assert len(both.units) == 6
    assert len(both.collectives) == 3
    assert len(both.assumptions) == 3
    with pytest.raises(InputError, match="holds no collectives"):
        load_profile(collectives, collectives=operators)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (aceso_table().replace(",200,8", ",fast,8", 1), "line 2: bwd_us='fast' must be a number"),
        (aceso_table().replace(",200,8", ",nan,8", 1), "bwd_us='nan'"),
        (aceso_table().replace("1_3B,1,1,0", "1_3B,1,0,0", 1), "line 2: tp=0"),
        (aceso_table() + "1_3B,1,1,0,enc-MLP-gelu,1,1,1,1,1,1\n", "'enc-MLP-gelu' is there twice"),
        (aceso_table() + "1_3B,1\n", "is cut short"),
        (aceso_table().splitlines()[0] + "\n", "has no rows"),
        (sailor_table().replace("mid", "middle"), "role='middle'"),
        (collectives_table().replace("V100-32 node", "V100-16 node"), "no collectives of"),
    ],
)
def test_a_table_that_is_damaged_says_where(written, text, words):
    with pytest.raises(InputError) as error:
        load_profile(written(text))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


# --------------------------------------------------------------------------------------- Sailor, Metis
def test_sailor_zeros_are_not_measured_and_what_is_not_stated_is_an_assumption(written):
    profile = load_profile(written(sailor_table()))
    found = cells(profile)
    embedding = found["embedding", 1, 1]
    assert (embedding.forward_s, embedding.backward_s, embedding.update_s) == (0.001, None, None)
    assert embedding.device == "gh200_96"
    assert (found["head", 7, 2].device, found["head", 7, 2].backward_s) == ("v100_16", 0.06)
    assert profile.measured_for.precision is None
    assert profile.measured_for.seq_len is None
    assert profile.measured_for.collectives_included
    assert any("precision and sequence length are not stated" in text for text in profile.assumptions)


def test_metis_files_of_a_folder_become_cells_and_say_how_a_time_was_divided(written, tmp_path):
    for device, tp, size in (("A100", 1, 1), ("A100", 2, 1), ("T4", 1, 4)):
        written(metis_profile(), f"metis/DeviceType.{device}_tp{tp}_bs{size}.json")
    written("not a profile", "metis/README")
    profile = load_profile(tmp_path / "metis")
    found = {(cell.device, cell.unit, cell.tp, cell.microbatch_size): cell for cell in profile.units}
    assert len(found) == 9
    layer = found["a100", "layer", 2, 1]
    assert layer.forward_s == pytest.approx(0.011)  # a third of the median, 33 ms
    assert layer.backward_s == pytest.approx(0.022)
    assert layer.peak_bytes == 20 * MIB
    assert layer.activation_bytes is None
    assert found["t4", "embedding", 1, 4].forward_s == pytest.approx(0.001)
    assert found["t4", "head", 1, 4].backward_s == pytest.approx(0.006)
    assert any("one third is forward" in text for text in profile.assumptions)
    single = load_profile(tmp_path / "metis" / "DeviceType.T4_tp1_bs4.json")
    assert {cell.device for cell in single.units} == {"t4"}


def test_metis_zeros_are_not_measured_and_damage_is_said(written, tmp_path):
    name = "m/DeviceType.A100_tp1_bs1.json"
    written(metis_profile(layer_compute_total_ms=[0, 30.0, 0, 33.0, 9.0]), name)
    found = cells(load_profile(tmp_path / "m"))
    assert found["embedding", 1, 1].forward_s is None
    assert found["layer", 1, 1].forward_s == pytest.approx(0.0105)
    for times, words in (
        ({"layer_compute_total_ms": [1.0, 2.0]}, "2 entries"),
        ({"layer_compute_total_ms": [1.0, 2.0, "x"]}, "layer_compute_total_ms.2='x'"),
        ({"layer_compute_total_ms": None}, "must be a list"),
        ({"layer_compute_total_ms": [1.0, 2.0, 3.0]}, "5 entries, the times 3"),
    ):
        written(metis_profile(**times), name)
        with pytest.raises(InputError, match=words):
            load_profile(tmp_path / "m")
    written(metis_profile(), name)
    written({**metis_profile(), "model": {"model_name": "another"}}, "m/DeviceType.A100_tp1_bs2.json")
    with pytest.raises(InputError, match="several models"):
        load_profile(tmp_path / "m")


# --------------------------------------------------------------------------------- the published tables
@needs_data
@pytest.mark.parametrize("model", ACESO_MODELS)
def test_the_published_aceso_tables_are_complete(model):
    profile = load_profile(OPERATORS, model, COLLECTIVES)
    assert len(profile.units) == 3 * 16  # tp and micro-batch of 1, 2, 4, 8
    assert len(profile.collectives) == 9
    assert sum(len(cell.timings) for cell in profile.collectives) == 9 * 163 - 69  # 69 of all-gather hold 1e9 ms
    assert all(cell.forward_s and cell.backward_s and cell.activation_bytes for cell in profile.units)


@needs_data
def test_the_published_aceso_figures_reach_the_estimator():
    problem = load_problem("gpt3_1_3b", "v100x32")
    estimator = Estimator(problem, profile=load_profile(OPERATORS, "1_3B", COLLECTIVES))
    time = estimator.unit_time(UnitKey("layer", 0, 1, 1, 1, True))
    assert time.forward_s == pytest.approx(5776.5e-6, abs=1e-7)  # sums of the 13 rows at tp 1, micro-batch 1, split 0
    assert time.backward_s == pytest.approx(9095.3e-6, abs=1e-7)
    assert estimator.unit_memory("layer", 1, 1, 1, "none", 1, True, 0).activation == pytest.approx(1048 * MIB, 1e-3)
    reduced = estimator.unit_time(UnitKey("layer", 0, 4, 1, 1, True)).tensor_parallel_s / 4
    assert 0.2e-3 < reduced < 0.4e-3  # 8 MiB among 4


@needs_data
@pytest.mark.parametrize(("model", "cells_with_times", "no_backward"), [("OPT-350", 387, 0), ("GPT-Neo-2.7", 168, 13)])
def test_the_published_sailor_table_is_read_whole(model, cells_with_times, no_backward):
    profile = load_profile(SAILOR, model)
    assert len(profile.units) == cells_with_times
    assert sum(cell.backward_s is None for cell in profile.units) == no_backward
    assert all(cell.forward_s for cell in profile.units)


@needs_data
def test_every_published_profile_says_what_it_was_measured_for():
    with pytest.raises(InputError, match="hidden=2560"):
        Estimator(load_problem("gpt3_1_3b", "v100x32"), profile=load_profile(SAILOR, "GPT-Neo-2.7"))
    with pytest.raises(InputError, match="precision=fp16"):
        Estimator(load_problem("gpt3_1_3b", "v100x32", precision="fp32"), profile=load_profile(OPERATORS, "1_3B"))
    assert set(SAILOR_MODELS) == {"OPT-350", "GPT-Neo-2.7", "OPT-30", "LLAMA-3-8"}
