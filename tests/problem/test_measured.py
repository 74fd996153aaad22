"""Rows of measured runs: which are priced, what each becomes, what is assumed, and that no file breaks the reader."""

import csv
import io
import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from haap_rl.problem.errors import InputError
from haap_rl.problem.formats import measured
from haap_rl.problem.presets import preset

EXAMPLES = int(os.environ.get("HAAP_RL_FUZZ", "60"))
ROW = {
    **dict.fromkeys((*measured.COLUMNS, measured.RATE), ""),
    "row_id": "mine-1", "source_id": "mine", "model": "GPT 1B", "arch": "gpt", "layers": "24", "hidden": "2048",
    "heads": "16", "vocab": "50304", "seq_len": "1024", "gpu": "A100-80", "n_gpus": "16", "gpus_per_node": "8",
    "intra_node": "NVLink", "inter_node": "4 x 100 Gb/s RoCE per node", "gbs": "64", "mbs": "2", "tp": "2",
    "pp": "4", "dp": "2", "cp": "1", "recompute": "full", "precision": "fp16", "iter_time_s": "1.5",
    "hetero": "no", "status": "ok", "quality": "A",
}  # fmt: skip
MIXED = {
    "gpu": "V100+T4", "gpus_per_node": "4", "tp": "1", "pp": "4", "dp": "4", "hetero": "yes",
    "intra_node": "170 Gb/s on the 3 V100 nodes, 50 Gb/s on the T4 node (values in the script)",
    "inter_node": "10 Gb/s V100 nodes, 50 Gb/s T4 node (values in the script)",
}  # fmt: skip


def table(*rows, columns=tuple(ROW)):
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({**ROW, "row_id": f"mine-{i}", **row} for i, row in enumerate(rows, start=1))
    return text.getvalue()


def read(folder, content):
    path = folder / "runs.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return measured.read(path, lambda name: preset("device", name))


@pytest.fixture
def run(tmp_path):
    """The one run of a row that is the default one but for some cells."""

    def one(**cells):
        runs, malformed = read(tmp_path, table(cells))
        assert malformed == []
        return runs[0]

    return one


@pytest.fixture
def rule(tmp_path):
    """The rule that a row breaks."""

    def one(**cells):
        runs, malformed = read(tmp_path, table(cells))
        assert runs == []
        assert malformed[0].line == 2
        return malformed[0].rule

    return one


# ------------------------------------------------------------------------------------------- what it becomes
def test_a_full_row_becomes_its_problem_and_plan(run):
    made = run()
    problem, plan = made.problem, made.plan
    model, (group,) = problem.model, problem.cluster.groups
    assert (model.num_layers, model.hidden, model.heads, model.vocab) == (24, 2048, 16, 50304)
    assert (model.kv_heads, model.head_dim, model.ffn, model.gated_mlp) == (16, 128, 8192, False)
    assert (problem.seq_len, problem.global_batch_size, problem.precision) == (1024, 64, "fp16")
    assert (group.device.name, group.num_nodes, group.devices_per_node) == ("a100_80", 2, 8)
    assert problem.cluster.name == "a100_80 2x8"
    assert (group.inter_node.bandwidth_bytes_per_s, group.nics_per_node) == (50e9, 4)
    assert [stage.num_units for stage in plan.stages] == [7, 6, 6, 7]
    assert [stage.recompute.num_layers for stage in plan.stages] == [6, 6, 6, 6]
    assert {stage.recompute.mode for stage in plan.stages} == {"full"}
    assert [(r.tp, r.dp, r.microbatch_size) for stage in plan.stages for r in stage.replicas] == [(2, 2, 2)] * 4
    assert (plan.num_microbatches, plan.zero_stage, plan.sequence_parallel, plan.virtual_stages) == (16, 0, False, 1)
    assert (made.time_s, made.derived, made.ran, made.batch_stated, made.skipped) == (1.5, False, True, True, "")


def test_every_default_is_recorded(run):
    blank = ("heads", "ffn", "kv_heads", "vocab", "zero", "vpp", "seq_parallel", "precision", "recompute")
    made = run(**dict.fromkeys((*blank, "gpus_per_node", "intra_node", "inter_node"), ""))
    named = {text.partition("=")[0]: text.partition("=")[2].partition(" (")[0] for text in made.assumptions}
    assert named == {
        "heads": "16", "ffn": "8192", "kv_heads": "16", "vocab": "50257", "zero": "0", "vpp": "1",
        "seq_parallel": "no", "precision": "fp16", "recompute": "none", "fused_attention": "false",
        "gpus_per_node": "8", "intra_node": "300 GB/s", "inter_node": "200 GB/s per node",
    }  # fmt: skip


def test_what_a_row_states_is_not_an_assumption(run):
    made = run(ffn="8192", kv_heads="16", zero="0", vpp="1", seq_parallel="no", notes="FlashAttention")
    assert made.assumptions == ()
    assert made.problem.fused_attention


def test_a_gated_mlp_has_three_matrices_of_eight_thirds(run):
    model = run(arch="llama", hidden="4096", heads="32").problem.model
    assert (model.gated_mlp, model.ffn, model.norm, model.learned_positions) == (True, 11008, "rmsnorm", False)


def test_blank_heads_are_divisible_by_the_tensor_degree(run):
    assert run(hidden="3072", heads="", tp="8", pp="1").problem.model.heads == 24
    assert run(hidden="1280", heads="", tp="4", pp="2").problem.model.heads == 8  # 10 of 128 features do not divide


@pytest.mark.parametrize(
    ("text", "bytes_per_s", "nics"),
    [
        ("25 Gb/s", 25e9 / 8, 1),
        ("25 GB/s", 25e9, 1),
        ("up to 10 Gb/s, about 0.1 ms", 10e9 / 8, 1),
        ("1600 Gb/s per node RoCE (section title)", 200e9, 8),
        ("400 Gb/s per GPU RDMA", 8 * 50e9, 8),
        ("200 Gb/s HDR IB per NIC, 8 NICs per node (summary)", 200e9, 8),
        ("8 x 100 Gb/s NIC per node", 100e9, 8),
        ("4 x Omni-Path 100 links per node", 50e9, 4),
        ("4 Omni-Path links per node", 50e9, 4),
        ("Omni-Path; measured all-reduce busbw 54 Gb/s on 16 nodes", 200e9, 8),  # no link speed: the usual node
        ("0 Gb/s", 200e9, 8),
    ],
)
def test_network_speeds_in_every_notation(run, text, bytes_per_s, nics):
    (group,) = run(inter_node=text).problem.cluster.groups
    assert group.inter_node.bandwidth_bytes_per_s == pytest.approx(bytes_per_s)
    assert group.nics_per_node == nics


def test_a_stated_latency_is_taken(run):
    (group,) = run(inter_node="1 Gb/s, 50 ms (traffic control)").problem.cluster.groups
    assert group.inter_node.latency_s == pytest.approx(0.05)


def test_a_measured_speed_inside_the_node_is_taken_and_a_script_s_is_not(run):
    (group,) = run(intra_node="NVLink (measured all-reduce busbw ~124 GB/s on 1 node)").problem.cluster.groups
    assert group.intra_node.bandwidth_bytes_per_s == 124e9
    made = run(intra_node="150 GB/s (config value)")
    assert made.problem.cluster.groups[0].intra_node.bandwidth_bytes_per_s == 300e9
    assert "intra_node=300 GB/s (data sheet)" in made.assumptions


@pytest.mark.parametrize(
    ("label", "device"),
    [
        *(("A100", "a100_80"), ("a100_40gb", "a100_40"), ("a100_80gb", "a100_80"), ("A100-80 SXM", "a100_80")),
        *(("A100 PCIe", "a100_40_pcie"), ("A100-80 PCIe", "a100_80_pcie"), ("H100 SXM 96GB HBM2e", "h100_80")),
        *(("DGX-H100", "h100_80"), ("GH-96", "gh200_96"), ("GH200", "gh200_96"), ("V100 (DGX-2)", "v100_32")),
        *(("V100 (16 or 32 GB, see notes)", "v100_16"), ("H800-80", "h800_80"), ("H200", "h200")),
        *(("H20", "h20_96"), ("MI300 (192GB)", "mi300x"), ("RTX 3090", "rtx_3090"), ("L40S", "l40s")),
    ],
)
def test_labels_of_devices(run, label, device):
    assert run(gpu=label, precision="fp16").problem.cluster.groups[0].device.name == device


def test_an_unknown_device_is_skipped_by_name(run):
    assert run(gpu="Abacus 3000").skipped == "unknown device: 'Abacus 3000'"
    assert "unknown device" in run(gpu="A1000").skipped


def test_fewer_devices_than_a_node_and_nodes_that_are_not_full(run):
    assert run(n_gpus="4", tp="1", pp="2").problem.cluster.name == "a100_80 1x4"
    made = run(n_gpus="12", tp="2", pp="3", gpus_per_node="8")
    assert made.problem.cluster.name == "a100_80 1x8 + a100_80 1x4"
    assert "gpus_per_node=4 on the last node (12 do not fill nodes of 8)" in made.assumptions


def test_mixed_types_become_groups_in_the_order_of_ranks(run):
    made = run(**MIXED)
    v100, t4 = made.problem.cluster.groups
    assert made.problem.cluster.name == "v100_16 3x4 + t4 1x4"
    assert (v100.inter_node.bandwidth_bytes_per_s, t4.inter_node.bandwidth_bytes_per_s) == (1.25e9, 6.25e9)
    assert [stage.replicas[0].group for stage in made.plan.stages] == [v100.name] * 3 + [t4.name]


def test_mixed_node_shapes(run):
    made = run(gpus_per_node="2 nodes x4 + 8 nodes x1", hetero="network/node shape")
    assert [(g.num_nodes, g.devices_per_node) for g in made.problem.cluster.groups] == [(2, 4), (8, 1)]


def test_units_of_a_stage_plan_count_embedding_and_head(run):
    stages = [{"n_layers": n, "replicas": [{"gpus": "2xA100-80", "tp": 2}] * 2} for n in (5, 7, 7, 7)]
    made = run(stage_plan=json.dumps(stages))
    assert [stage.num_units for stage in made.plan.stages] == [5, 7, 7, 7]
    assert [stage.recompute.num_layers for stage in made.plan.stages] == [4, 7, 7, 6]


def test_a_stage_plan_places_mixed_devices_of_differing_tensor_degrees(run):
    stages = [
        {"n_layers": 18, "replicas": [{"gpus": "4xA100-80", "tp": 4}, {"gpus": "4xV100-16", "tp": 4}]},
        {"n_layers": 8, "replicas": [{"gpus": "2xV100-16", "tp": 2}] * 2},
    ]
    cells = {"gpu": "A100-80+V100-16", "gpus_per_node": "4", "n_gpus": "12", "tp": "4/2", "pp": "2", "hetero": "yes"}
    made = run(stage_plan=json.dumps(stages), **cells)
    assert made.problem.cluster.name == "a100_80 1x4 + v100_16 2x4"
    assert [[(r.group, r.tp, r.dp) for r in stage.replicas] for stage in made.plan.stages] == [
        [("a100_80_0", 4, 1), ("v100_16_1", 4, 1)],
        [("v100_16_1", 2, 2)],
    ]


def boundaries(*cuts):
    return json.dumps({"boundaries_over_30_units": cuts})


def test_boundaries_count_layers_between_pseudo_units(run):
    made = run(stage_plan=boundaries(0, 7, 14, 20, 30))
    assert [stage.num_units for stage in made.plan.stages] == [6, 7, 6, 7]  # layers 5, 7, 6, 6


def test_an_empty_stage_takes_a_layer_of_the_largest(run):
    made = run(stage_plan=boundaries(0, 1, 2, 20, 30))
    assert [stage.num_units for stage in made.plan.stages] == [1, 1, 17, 7]
    assert any("taken from the largest stage" in text for text in made.assumptions)


def test_a_stage_plan_of_another_model_gives_even_stages(run):
    stages = [{"n_layers": n, "replicas": [{"gpus": "2xA100-80", "tp": 2}] * 2} for n in (5, 7, 7, 6)]
    made = run(stage_plan=json.dumps(stages))
    assert [stage.num_units for stage in made.plan.stages] == [7, 6, 6, 7]
    assert "stage_plan=even (as given it does not hold 24 layers in 4 stages)" in made.assumptions


def test_layers_that_do_not_divide_fall_on_the_middle_stages(run):
    made = run(layers="26")
    assert [stage.num_units for stage in made.plan.stages] == [7, 7, 7, 7]
    assert "stage_plan=even (a remainder on the middle stages)" in made.assumptions


def test_interleaved_stages_where_they_divide_and_plain_ones_where_not(run):
    assert run(vpp="3").plan.virtual_stages == 3
    made = run(vpp="4")
    assert made.plan.virtual_stages == 1
    assert any(text.startswith("vpp=1") for text in made.assumptions)


@pytest.mark.parametrize(
    ("cell", "mode"),
    [
        *(
            ("full (checkpoint=True)", "full"),
            ("yes", "full"),
            ("none", "none"),
            ("selective (attention)", "selective"),
        ),
        *(("core_attn", "selective"), ("cheap ops only (norm + mlp activation)", "none"), ("", "none")),
    ],
)
def test_recompute(run, cell, mode):
    assert {stage.recompute.mode for stage in run(recompute=cell).plan.stages} == {mode}


def test_a_printed_rate_above_the_model_s_own_says_full_recompute(run):
    model = run().problem.model
    flops = (6 * model.num_parameters + 12 * 24 * 2048 * 1024) * 64 * 1024
    for share, mode in ((1.0, "none"), (4 / 3, "full"), (1.19, "none"), (1.21, "full")):
        made = run(recompute="", tflops_per_gpu=repr(share * flops / (16 * 1.5) / 1e12))
        assert {stage.recompute.mode for stage in made.plan.stages} == {mode}
        assert f"{share:.2f} of the model's" in " ".join(made.assumptions)


@pytest.mark.parametrize(
    ("zero", "stage", "framework"),
    [
        *(("", 0, "megatron"), ("no", 0, "megatron"), ("1 (distributed optimizer)", 1, "megatron")),
        *(("3", 3, "deepspeed"), ("FSDP FULL_SHARD (ZeRO-3)", 3, "fsdp"), ("FSDP SHARD_GRAD_OP (ZeRO-2)", 2, "fsdp")),
    ],
)
def test_zero_and_framework(run, zero, stage, framework):
    made = run(zero=zero)
    assert (made.plan.zero_stage, made.problem.framework) == (stage, framework)


def test_memory_without_a_batch_is_priced_but_says_that_the_batch_is_not_stated(run):
    made = run(gbs="", iter_time_s="", mem_gib="20.5", status="memory_only")
    assert not made.batch_stated
    assert (made.time_s, made.memory_gib) == (None, 20.5)
    assert made.plan.num_microbatches == 4


def test_what_ran_and_what_did_not(run):
    assert run(status="oom", iter_time_s="").ran is False
    assert run(status="failed_or_oom", iter_time_s="").ran is False
    made = run(status="memory_only", iter_time_s="", mem_gib="9", mem_kind="a memory requirement reported by the paper")
    assert made.ran is None
    assert run(notes="SUSPECT: a copy").suspect
    derived = run(iter_time_s="", derived_iter_time_s="2")
    assert (derived.time_s, derived.derived) == (2.0, True)


# ------------------------------------------------------------------------------------------------- skipped
@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"cp": "2", "n_gpus": "32"}, "context parallelism"),
        ({"ep": "8"}, "mixture of experts"),
        ({"arch": "moe", "precision": "MXFP8"}, "mixture of experts + fp8/fp4"),
        ({"recompute": "cheap ops only + offload 0.10"}, "offload"),
        ({"schedule": "GPipe, DP by Central PS DP-4"}, "schedule other than 1F1B"),
        ({"schedule": "zbv"}, "schedule other than 1F1B"),
        ({"model": "Llama LoRA"}, "LoRA"),
        ({"layers": "", "tp": ""}, "blank: layers tp"),
        ({"gbs": ""}, "blank: gbs"),
        ({"mbs": "", "precision": "fp8"}, "blank: mbs"),
        ({"iter_time_s": ""}, "neither time, memory nor a failure is given"),
    ],
)
def test_what_is_not_priced_is_skipped_with_its_feature_or_blank_column(run, cells, reason):
    made = run(**cells)
    assert (made.skipped, made.problem, made.plan, made.assumptions) == (reason, None, None, ())


def test_offload_of_nothing_is_no_offload(run):
    assert run(notes="activation offload ratio 0").skipped == ""


# ----------------------------------------------------------------------------------------------- malformed
@pytest.mark.parametrize(
    ("cells", "word"),
    [
        *(({"iter_time_s": text}, "iter_time_s") for text in ("NaN", "1e999", "-1", "0", "fast", "inf", "0x10")),
        *(({"layers": text}, "layers") for text in ("2.5", "-3", "1e14", "x", "7" * 5000)),
        *(({"tp": text}, "tp") for text in ("²", "0", "-1", "2/", "x", "9" * 5000)),
        *(({"gpus_per_node": text}, "gpus_per_node") for text in ("²", "0", "eight", "9" * 5000, "1 nodes x4")),
        ({"status": "fine"}, "status='fine'"),
        ({"quality": "D"}, "quality='D'"),
        ({"seq_parallel": "maybe"}, "seq_parallel"),
        ({"n_gpus": "64"}, "n_gpus=64"),
        ({"gbs": "1e8", "mbs": "1"}, "micro-batches"),
        ({"gbs": "400000", "vpp": "6"}, "micro-batches"),
        *(
            ({"stage_plan": text}, "stage_plan")
            for text in (
                *(
                    "[",
                    "7",
                    "null",
                    "[[]]",
                    "[]",
                    "{}",
                    "[NaN]",
                    "[" * 20000,
                    "9" * 5000,
                    '{"boundaries_over_30_units": 7}',
                ),
                *('{"boundaries_over_30_units": [0, 1e999]}', boundaries(0, 20, 7, 14, 30), '[{"n_layers": 26}]'),
                *('[{"n_layers": -1, "replicas": []}]', '[{"n_layers": 26, "replicas": []}]'),
                '[{"n_layers": 26, "replicas": [{"gpus": "4xA100-80", "tp": 2}]}]',
                '[{"n_layers": 26, "replicas": [{"gpus": "16xA100-80", "tp": 16}]}]',
            )
        ),
    ],
)
def test_a_malformed_cell_is_named_in_one_line(rule, cells, word):
    text = rule(**cells)
    assert word in text
    assert "\n" not in text
    assert len(text) < 300


def test_good_rows_are_read_beside_malformed_ones(tmp_path):
    good = table({}, {}, {"row_id": "mine-1"}, {"row_id": ""}, {"status": "?"}, {})
    lines = good.splitlines()
    lines[2] += ",more"
    runs, malformed = read(tmp_path, "\n".join(lines))
    assert [run.row_id for run in runs] == ["mine-1", "mine-6"]
    assert [(fault.line, fault.row_id) for fault in malformed] == [(3, "mine-2"), (4, "mine-1"), (5, ""), (6, "mine-5")]


def test_byte_order_marks_and_other_line_ends_change_nothing(tmp_path):
    text = table({}, {"gbs": "32"})
    expected = read(tmp_path, text)
    for content in ("\ufeff" + text, text.replace("\n", "\r\n"), text.replace("\n", "\r"), text + "\n\n"):
        assert read(tmp_path, content) == expected


@pytest.mark.parametrize(
    ("content", "word"),
    [
        *(
            (b"", "no column"),
            (b"\n\n", "no column"),
            (b"a,b\n1,2\n", "no column 'row_id'"),
            (b"\x89PNG\xff\x00", "UTF-8"),
        ),
        (table().encode(), "no rows"),
        (table({}).replace("heads", "heads,heads", 1).encode(), "is there twice"),
        (table({"notes": "x" * 200_000}).encode(), "not CSV"),
    ],
)
def test_an_unusable_file_is_one_line(tmp_path, content, word):
    with pytest.raises(InputError, match=word) as caught:
        read(tmp_path, content)
    assert "\n" not in str(caught.value)


def test_a_folder_or_a_missing_file_is_one_line(tmp_path):
    for path in (tmp_path, tmp_path / "none.csv"):
        with pytest.raises(InputError, match="measured runs"):
            measured.read(path, lambda name: preset("device", name))


def outcome(folder, content):
    """What a file gives: its runs, its malformed rows, and the line that refuses it as a whole."""
    try:
        return *read(folder, content), ""
    except InputError as error:
        return [], [], str(error)


HOSTILE = st.one_of(
    st.sampled_from(
        [
            *(
                "",
                "NaN",
                "1e999",
                "-1",
                "0",
                "1",
                "2",
                "1e15",
                "1_0",
                "٣",
                "²",
                "7" * 400,
                "inf",
                "\x00",
                "[red]",
                "2/4",
            ),
            *("A100 + T4", "0 nodes x4", "999999 nodes x999999", "full", "none", "8 x 0 Gb/s", "3 Gb/s per GPU"),
            *('[{"n_layers": 26, "replicas": [{"gpus": "16xA100-80", "tp": 16}]}]', "[" * 5000, boundaries(0, 30)),
        ]
    ),
    st.text(max_size=30),
)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cells=st.dictionaries(st.sampled_from(sorted(ROW)), HOSTILE, min_size=1, max_size=6), mixed=st.booleans())
def test_whatever_the_cells_hold_a_row_is_priced_skipped_or_named(tmp_path, cells, mixed):
    text = table({**(MIXED if mixed else {}), **cells})
    runs, malformed, refusal = outcome(tmp_path, text.encode("utf-8", "surrogatepass"))
    assert bool(refusal) != bool(runs or malformed)
    assert "\n" not in refusal
    assert all("\n" not in fault.rule for fault in malformed)
    for run in runs:
        assert (run.plan is None) == (run.problem is None) == bool(run.skipped)
        if run.plan is not None:
            run.problem.validate(run.plan)
            assert (
                sum(r.num_devices for stage in run.plan.stages for r in stage.replicas)
                == run.problem.cluster.num_devices
            )


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_bytes_change_the_file_is_read_or_refused_in_one_line(tmp_path, data):
    content = bytearray(table({}, MIXED, {"stage_plan": boundaries(0, 7, 14, 20, 30)}).encode())
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(content)))
        content[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    runs, malformed, refusal = outcome(tmp_path, bytes(content))
    assert bool(refusal) != bool(runs or malformed)
    assert "\n" not in refusal
