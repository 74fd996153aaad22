"""Other tools' files become what a preset would be; what they cannot say is asked for, bad ones get one line."""

import json

import pytest
import yaml

from haap_rl.problem.cluster import cluster_from_config
from haap_rl.problem.errors import InputError
from haap_rl.problem.model import model_from_config
from haap_rl.problem.presets import cluster_from_file, load_problem, model_from_file, names, preset, problem_from_config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
NEOX = {
    **LLAMA,
    "model_type": "gpt_neox",
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "max_position_embeddings": 2048,
    "vocab_size": 50432,
}
OPT = {
    "model_type": "opt",
    "hidden_size": 4096,
    "ffn_dim": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "word_embed_proj_dim": 4096,
}
LLAMA3 = {
    **LLAMA,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
MISTRAL = {**LLAMA3, "model_type": "mistral", "vocab_size": 32000, "max_position_embeddings": 32768}
QWEN2 = {
    **LLAMA3,
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
QWEN3 = {
    **LLAMA3,
    "model_type": "qwen3",
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "head_dim": 128,
    "vocab_size": 151936,
}
GEMMA = {
    "model_type": "gemma",
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "vocab_size": 256000,
}
GEMMA_7B = {
    **GEMMA,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
GEMMA2 = {
    **GEMMA,
    "model_type": "gemma2",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262144,
}
PUBLISHED = {
    "gpt2": (GPT2, 124_439_808),
    "gpt2-xl": ({**GPT2, "n_embd": 1600, "n_layer": 48, "n_head": 25, "n_inner": None}, 1_557_611_200),
    "gpt-neox-20b": (NEOX, 20_554_567_680),
    "opt-6.7b": (OPT, 6_658_473_984),
    "Llama-2-7b": (LLAMA, 6_738_415_616),
    "Llama-2-70b": (
        {
            **LLAMA,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
        },
        68_976_648_192,
    ),
    "Llama-3-8B": (LLAMA3, 8_030_261_248),
    "Mistral-7B-v0.1": (MISTRAL, 7_241_732_096),
    "Qwen2-7B": (QWEN2, 7_615_616_512),
    "Qwen3-8B": (QWEN3, 8_190_735_360),
    "gemma-2b": (GEMMA, 2_506_172_416),
    "gemma-7b": (GEMMA_7B, 8_537_680_896),
    "gemma-2-2b": (GEMMA2, 2_614_341_888),
    "gemma-3-1b": (GEMMA3, 999_885_952),
}


@pytest.fixture
def write(tmp_path):
    """Write content (text, bytes or JSON data) to a file and return its path."""

    def write_file(content, name="file"):
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return str(path)

    return write_file


def refusal(read, *words):
    """The one line that `read` raises; it must hold every word."""
    with pytest.raises(InputError) as error:
        read()
    line = str(error.value)
    assert "\n" not in line
    assert len(line) < 1200, line
    assert all(word in line for word in words), line
    return line


# ------------------------------------------------------------------------------------------ Hugging Face
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_json_gives_the_published_parameter_count(write, name):
    config, parameters = PUBLISHED[name]
    model = model_from_config(model_from_file({"path": write(config, "config.json")}))
    assert model.num_parameters == pytest.approx(parameters, rel=1e-3)


def test_a_config_json_of_llama_3_is_the_preset(write):
    read = model_from_config(model_from_file({"path": write(LLAMA3), "name": "llama3_8b"}))
    assert read == model_from_config(preset("model", "llama3_8b"))


def test_families_differ_in_what_they_leave_out(write):
    def read(config):
        return model_from_config(model_from_file({"path": write(config)}))

    assert read(GPT2).learned_positions
    assert read(GPT2).tied_embeddings
    assert read(GPT2).dropout
    assert not read({**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}).dropout
    assert read(OPT).dropout
    assert read(GPT2).ffn == 4 * 768
    assert read(LLAMA).kv_heads == 32
    assert not read(LLAMA).biases
    assert read({**LLAMA, "attention_bias": True, "mlp_bias": True}).biases
    assert read(NEOX).biases
    assert not read(NEOX).dropout
    assert read(GEMMA).kv_heads == 1
    assert read(GEMMA_7B).query_size == 4096  # head_dim 256 x 16 heads, wider than hidden
    bare = {key: GEMMA3[key] for key in ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers")}
    assert (read(bare).vocab, read(bare).kv_heads, read(bare).max_positions) == (262208, 4, 131072)


def test_the_training_length_is_the_problems(write):
    model = model_from_file({"path": write(LLAMA3)})
    problem = problem_from_config(model, preset("cluster", "a100x8"), {**preset("problem", "default"), "seq_len": 512})
    assert (problem.seq_len, problem.model.max_positions) == (512, 8192)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mixtral"}, ["'mixtral'", "mixture of experts"]),
        ({"model_type": "qwen2_moe"}, ["'qwen2_moe'", "mixture of experts"]),
        ({"num_experts": 8}, ["mixture of experts"]),
        ({"num_local_experts": 8}, ["mixture of experts"]),
        ({"model_type": "t5", "is_encoder_decoder": True}, ["'t5'", "encoder-decoder"]),
        ({"model_type": "mamba"}, ["'mamba'", "supported are gpt2"]),
        ({"model_type": "gemma3", "text_config": {}}, ["text_config"]),
        ({"model_type": None}, ["model_type=None"]),
        ({"model_type": ["llama"]}, ["model_type=['llama']"]),
        ({"hidden_size": float("nan")}, ["hidden_size=nan"]),
        ({"hidden_size": float("inf")}, ["hidden_size=inf"]),
        ({"hidden_size": -4096}, ["hidden_size=-4096"]),
        ({"hidden_size": 4096.5}, ["hidden_size=4096.5"]),
        ({"hidden_size": "4096"}, ["hidden_size='4096'"]),
        ({"hidden_size": 10**400}, ["hidden_size=", "10^15"]),
        ({"hidden_size": 4100}, ["hidden_size=4100", "num_attention_heads=32"]),
        ({"num_key_value_heads": 5}, ["kv_heads=5"]),
        ({"vocab_size": None}, ["'vocab_size'", "missing"]),
        ({"tie_word_embeddings": "no"}, ["tie_word_embeddings='no'"]),
        ({"attention_dropout": 2}, ["attention_dropout=2"]),
    ],
)
def test_a_bad_config_json_is_refused_by_name(write, change, words):
    path = write({**LLAMA, **change})
    refusal(lambda: model_from_file({"path": path}), path, *words)


def test_opt_with_a_projection_is_refused(write):
    path = write({**OPT, "word_embed_proj_dim": 512})
    refusal(lambda: model_from_file({"path": path}), "word_embed_proj_dim=512", "hidden_size=4096")


# --------------------------------------------------------------------------------------- files in general
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"model_type": "llama",\n "hidden', ["line 2", "complete"]),
        ("[" * 100_000, ["too deeply"]),
        ("[1, 2]", ["not a JSON object"]),
        ("", ["line 1"]),
        (b"\xff\xfe\x00", ["line 1", "UTF-8"]),
        ('{"a": 1, "a": 2}', ["'a' is there twice"]),
        ('{"a": ' + "1" * 5000 + "}", ["digits"]),
        (" " * (2**22 + 1), ["4194305 bytes", "4194304"]),
    ],
)
def test_a_file_that_is_not_json_is_refused(write, content, words):
    path = write(content)
    refusal(lambda: model_from_file({"path": path}), path, *words)


def test_a_file_that_cannot_be_read_is_refused(tmp_path, write):
    refusal(lambda: model_from_file({"path": str(tmp_path / "none")}), "none", "No such file")
    refusal(lambda: model_from_file({"path": str(tmp_path)}), "is a directory")
    refusal(lambda: model_from_file({"path": "a\0b"}), "check the path")
    refusal(lambda: model_from_file({"path": 3}), "path=3")
    refusal(lambda: model_from_file({"path": "x", "format": "gguf"}), "model.format='gguf'", "huggingface")
    refusal(lambda: cluster_from_file({"path": "x", "format": "slurm"}), "cluster.format='slurm'", "hostfile")
    import os

    os.mkfifo(tmp_path / "pipe")
    refusal(lambda: model_from_file({"path": str(tmp_path / "pipe")}), "not a regular file")


# -------------------------------------------------------------------------------------------- cluster YAML
def test_a_cluster_yaml_is_read_as_a_preset(write):
    for name in names("cluster"):
        path = write(yaml.safe_dump(preset("cluster", name)))
        assert cluster_from_file({"path": path}) == preset("cluster", name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: x\ngroups: [", ["line 2", "YAML"]),
        ("- 1", ["not a mapping"]),
        ("a: &a [*a]", ["stand for"]),
        ("a: &a [1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\n"
         "c: &c [*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c]\ne: [*d,*d,*d,*d,*d,*d]", ["stand for"]),
        ("a: &a {x: 1}\nb: {<<: [*a, *a]}", ["line 2", "merge keys"]),
        ("a: 2001-99-99", ["quote it"]),
        ("a: !!python/object:os.system x", ["line 1"]),
        ("a: 1\x00", ["not YAML"]),
        ("[" * 5000, ["too deeply"]),
        ("#" * (2**18 + 1), ["262145 bytes"]),
        ("name: x\ngroups: []", ["no device groups"]),
        ("name: [x]\ngroups: []", ["name"]),
    ],
)  # fmt: skip
def test_a_bad_cluster_yaml_is_refused(write, text, words):
    path = write(text)
    refusal(lambda: cluster_from_file({"path": path}), path, *words)


# ------------------------------------------------------------------------------------------------ hostfile
def test_hosts_with_equal_slots_are_one_group(write):
    text = "# mine\n\nworker-1 slots=8\nworker-2\tslots=8  # the second\r\n"
    read = cluster_from_file({"path": write(text, "myhosts"), "format": "hostfile", "device": "a100_80"})
    cluster = cluster_from_config(read, None)
    same = cluster_from_config(preset("cluster", "a100_80x16"), lambda name: preset("device", name))
    (group,), (expected,) = cluster.groups, same.groups
    assert cluster.name == "myhosts"
    assert (group.device, group.num_nodes, group.devices_per_node) == (expected.device, 2, 8)
    assert (group.intra_node, group.inter_node) == (expected.intra_node, expected.inter_node)
    assert group.nics_per_node == expected.nics_per_node == 8


def test_hosts_with_other_slots_are_other_groups(write):
    path = write("a slots=8\nb slots=4\nc slots=8")
    inter = {"latency_us": 30, "bandwidth_gb_per_s": 12.5}
    read = cluster_from_file({"path": path, "format": "hostfile", "device": "v100_32", "inter_node": inter})
    assert [(g["name"], g["num_nodes"], g["devices_per_node"]) for g in read["groups"]] == [
        ("v100_32_x8", 2, 8),
        ("v100_32_x4", 1, 4),
    ]
    assert all(group["inter_node"] == inter for group in read["groups"])
    assert all("nics_per_node" not in group for group in read["groups"])  # a network that is given is one adapter
    links = {"intra_node": inter}
    read = cluster_from_file({"path": path, "format": "hostfile", "device": "v100_32", **links})
    assert all(group["nics_per_node"] == 4 for group in read["groups"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a slots=8\na slots=8", ["line 2", "'a'", "line 1"]),
        ("a slots=8\nb", ["line 2", "'b'", "slots=8"]),
        ("a slots=0", ["line 1", "slots=0"]),
        ("a slots=-1", ["line 1"]),
        ("a slots=99999", ["slots=99999", "1024"]),
        ("a slots=8 max_slots=8", ["line 1"]),
        ("# nothing\n", ["names no host"]),
    ],
)
def test_a_bad_hostfile_is_refused_by_line(write, text, words):
    path = write(text)
    refusal(lambda: cluster_from_file({"path": path, "format": "hostfile", "device": "t4"}), path, *words)


def test_a_key_that_a_format_does_not_read_is_refused(write):
    path = write("a slots=8")
    config = {"path": path, "format": "hostfile", "device": "t4"}
    refusal(lambda: cluster_from_file({**config, "num_nodes": 2}), "cluster.num_nodes=2", "topo")
    refusal(lambda: cluster_from_file({"path": path, "device": "t4"}), "cluster.device='t4'", "hostfile")
    refusal(lambda: cluster_from_file({"path": path}), "not a mapping", "cluster.format=hostfile")


def test_a_hostfile_needs_a_device(write):
    path = write("a slots=8")
    refusal(lambda: cluster_from_file({"path": path, "format": "hostfile"}), "cluster.device=")
    refusal(
        lambda: cluster_from_file({"path": path, "format": "hostfile", "device": "a100_8"}), "did you mean 'a100_80'"
    )
    bad = {"path": path, "format": "hostfile", "device": "t4", "inter_node": {"latency_us": 1}}
    refusal(lambda: cluster_from_file(bad), "cluster.inter_node", "bandwidth_gb_per_s")


# --------------------------------------------------------------------------------------------------- Metis
def metis_entry(kind, memory, inter=10, intra=50):
    return {"instance_type": kind, "inter_bandwidth": inter, "intra_bandwidth": intra, "memory": memory}


METIS = {
    "10.0.0.1": metis_entry("V100", 16),
    "10.0.0.2": metis_entry("P100", 15),
    "10.0.0.3": metis_entry("T4", 15, 312500000.0, 5312500000.0),
    "10.0.0.4": metis_entry("A100", 80),
    "10.0.0.5": metis_entry("A100", 80),
}


def test_a_metis_cluster_takes_links_and_memory_from_the_file_and_peaks_from_the_registry(write):
    write("10.0.0.1 slots=4\n10.0.0.4 slots=8\n10.0.0.5 slots=8\n10.0.0.2 4\n10.0.0.3 slots=4\n", "hostfile")
    cluster = cluster_from_config(
        cluster_from_file({"path": write(METIS, "clusterfile.json"), "format": "metis"}), None
    )
    assert [(g.name, g.num_nodes, g.devices_per_node) for g in cluster.groups] == [
        ("v100_16", 1, 4),
        ("a100_80", 2, 8),
        ("p100_16_15gib", 1, 4),
        ("t4_15gib", 1, 4),
    ]
    v100, a100, p100, t4 = cluster.groups
    assert a100.device.peak("bf16") == 312e12
    assert p100.device.memory_bytes == 15 * 2**30
    assert (v100.inter_node.bandwidth_bytes_per_s, v100.intra_node.bandwidth_bytes_per_s) == (10e9, 50e9)
    assert v100.nics_per_node == 1  # the file's network, not the usual one
    assert (t4.inter_node.bandwidth_bytes_per_s, t4.intra_node.bandwidth_bytes_per_s) == (0.3125e9, 5.3125e9)


def test_a_metis_hostfile_may_repeat_an_address_for_equal_nodes(write):
    hosts = write("10.0.0.4 slots=4\n10.0.0.4 slots=4\n", "nodes")
    read = cluster_from_file({"path": write(METIS, "c.json"), "format": "metis", "hostfile": hosts})
    assert [group["num_nodes"] for group in read["groups"]] == [2]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"memory": -1}, ["10.0.0.4", "memory=-1"]),
        ({"memory": 16384}, ["memory=16384", "GiB"]),
        ({"inter_bandwidth": float("nan")}, ["inter_bandwidth=nan"]),
        ({"intra_bandwidth": 50_000}, ["intra_bandwidth=50000", "bytes/s"]),
        ({"instance_type": "A1000"}, ["'A1000'", "cluster.device=NAME"]),
        ({"instance_type": 5}, ["instance_type=5"]),
        ({"speed": 5}, ["'speed'"]),
    ],
)
def test_a_bad_metis_cluster_is_refused_by_address_and_key(write, change, words):
    write("10.0.0.4 slots=4", "hostfile")
    path = write({**METIS, "10.0.0.4": {**METIS["10.0.0.4"], **change}}, "c.json")
    refusal(lambda: cluster_from_file({"path": path, "format": "metis"}), path, *words)


def test_a_metis_cluster_and_its_hostfile_belong_together(write, tmp_path):
    path = write(METIS, "c.json")
    refusal(lambda: cluster_from_file({"path": path, "format": "metis"}), "hostfile", "No such file")
    write("10.0.0.9 slots=4", "hostfile")
    refusal(lambda: cluster_from_file({"path": path, "format": "metis"}), "10.0.0.9", "no entry")
    write("10.0.0.4 slots=4", "hostfile")
    odd = write({"10.0.0.4": metis_entry("B9000", 64)}, "odd.json")
    read = cluster_from_file({"path": odd, "format": "metis", "device": "b200"})
    assert read["groups"][0]["device"]["peak_tflops"]["bf16"] == 2250


# ----------------------------------------------------------------------------------------------- topology
def topo_table(matrix, nics=(), affinity=True):
    """Text as nvidia-smi prints it: tabs, an underlined header, affinity columns, a legend."""
    gpus = [f"GPU{i}" for i in range(len(matrix))]
    head = [*gpus, *nics, *(["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"] if affinity else [])]
    lines = ["\t\x1b[4m" + "\t".join(head) + "\x1b[0m"]
    for gpu, row in zip(gpus, matrix, strict=True):
        near = ["PIX" for _ in nics]
        lines.append("\t".join([gpu, *row, *near, *(["0-31,64-95", "0", "\tN/A"] if affinity else [])]))
    for nic in nics:
        lines.append("\t".join([nic, *["SYS" for _ in gpus], *[" X " if other == nic else "NODE" for other in nics]]))
    return (
        "\n".join(lines)
        + "\n\nLegend:\n\n  X    = Self\n  NV#  = bonded set of # NVLinks\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
    )


def all_pairs(size, symbol):
    return [[" X " if i == j else symbol for j in range(size)] for i in range(size)]


# NVLink mesh of a DGX-1: each GPU is bonded with four others, six links in all
DGX1_ROWS = """
X NV1 NV1 NV2 NV2 SYS SYS SYS
NV1 X NV2 NV1 SYS NV2 SYS SYS
NV1 NV2 X NV2 SYS SYS NV1 SYS
NV2 NV1 NV2 X SYS SYS SYS NV1
NV2 SYS SYS SYS X NV1 NV1 NV2
SYS NV2 SYS SYS NV1 X NV2 NV1
SYS SYS NV1 SYS NV1 NV2 X NV2
SYS SYS SYS NV1 NV2 NV1 NV2 X
"""
DGX1 = [row.split() for row in DGX1_ROWS.strip().splitlines()]
TWO_PAIRS = [
    ["X", "NV4", "SYS", "SYS"],
    ["NV4", "X", "SYS", "SYS"],
    ["SYS", "SYS", "X", "NV4"],
    ["SYS", "SYS", "NV4", "X"],
]


@pytest.mark.parametrize(
    ("matrix", "device", "gb_per_s"),
    [
        (all_pairs(8, "NV18"), "h100_80", 450),  # behind switches: 18 links of 25
        (all_pairs(4, "NV4"), "a100_40", 300),  # four GPUs joined pairwise: 3 x 4 links of 25
        (DGX1, "v100_16", 150),  # a mesh: six links of 25
        (all_pairs(4, "SYS"), "t4", 16),
        (all_pairs(8, "PXB"), "a100_80", 31.5),  # no NVLink to be seen: PCIe 4
        (TWO_PAIRS, "rtx_3090", 31.5),  # bridged pairs do not join all four
    ],
)  # fmt: skip
def test_the_link_of_a_node_follows_from_the_topology(write, matrix, device, gb_per_s):
    text = "user@node:~$ nvidia-smi topo -m\n" + topo_table(matrix, ("NIC0", "mlx5_1"))
    config = {"path": write(text), "format": "topo", "device": device, "num_nodes": 2}
    (group,) = cluster_from_file(config)["groups"]
    assert (group["num_nodes"], group["devices_per_node"]) == (2, len(matrix))
    assert group["intra_node"]["bandwidth_gb_per_s"] == gb_per_s
    usual = preset("device", device)["node"]
    assert group["inter_node"] == usual["inter_node"]
    assert group.get("nics_per_node", 1) == usual.get("nics_per_node", 1)
    (given,) = cluster_from_file({**config, "inter_node": usual["inter_node"]})["groups"]
    assert "nics_per_node" not in given


def test_one_gpu_and_an_old_driver_are_a_node_too(write):
    for text in (topo_table([["X"]]), topo_table([["X", "SOC"], ["SOC", "X"]], ("mlx5_0",), affinity=False)):
        assert cluster_from_file({"path": write(text), "format": "topo", "device": "t4"})["groups"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (topo_table(all_pairs(2, "NV4x")), ["line 2", "GPU0-GPU1", "'NV4x'"]),
        (topo_table(all_pairs(2, "XYZ")), ["line 2", "'XYZ'"]),
        (topo_table([["X", "PIX"], ["PHB", "X"]]), []),
        (topo_table([["X", "NV2"], ["NV1", "X"]]), ["GPU1-GPU0", "differ"]),
        (topo_table([["NV1", "X"], ["X", "NV1"]]), ["line 2"]),
        ("\tGPU0\tMIG0\nGPU0\tX\tPIX\n", ["line 1", "MIG"]),
        ("\tGPU0\tGPU1\nGPU0\tX\tMIG\nGPU1\tMIG\tX", ["line 2", "MIG"]),
        ("\tGPU0\nGPU0\tX\nMIG0\tPIX\n", ["line 3", "MIG"]),
        ("\tGPU0\tGPU1\nGPU0\tX\tPIX\n", ["GPU1 is missing"]),
        ("\tGPU0\tGPU1\nGPU0\tX\n", ["line 2", "cut off"]),
        ("\tGPU0\tGPU2\nGPU0\tX\tPIX\n", ["line 1", "GPU1"]),
        ("\tGPU0\nGPU0\tX\nGPU0\tX\n", ["line 3", "twice"]),
        ("\tGPU0\t" + "7" * 5000 + "\nGPU0\tX\tY\n", ["line 1", "columns"]),
        ("Legend: nothing", ["nvidia-smi topo -m"]),
        (topo_table(all_pairs(2, "NV99")), ["NV99", "'v100_32' has 6"]),
    ],
)  # fmt: skip
def test_a_bad_topology_is_refused_by_line(write, text, words):
    path = write(text)
    config = {"path": path, "format": "topo", "device": "v100_32"}
    if not words:
        assert cluster_from_file(config)  # which PCIe symbol it is does not matter
        return
    refusal(lambda: cluster_from_file(config), path, *words)


def test_a_topology_needs_the_right_device(write):
    path = write(topo_table(all_pairs(2, "NV2")))
    refusal(lambda: cluster_from_file({"path": path, "format": "topo"}), "cluster.device=")
    refusal(lambda: cluster_from_file({"path": path, "format": "topo", "device": "t4"}), "'t4' has none")
    refusal(
        lambda: cluster_from_file({"path": path, "format": "topo", "device": "v100_32", "num_nodes": 0}), "num_nodes=0"
    )


def test_a_plan_file_is_opened_like_any_other(write):
    path = write("{")
    refusal(lambda: load_problem().load_plan(path), path, "line 1")
