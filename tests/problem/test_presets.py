"""Presets have sources, give the published sizes, and bad values are refused by name."""

import math

import pytest

from haap_rl.problem.cluster import cluster_from_config, device_from_config
from haap_rl.problem.errors import InputError
from haap_rl.problem.formats.nodes import usual_node
from haap_rl.problem.model import model_from_config
from haap_rl.problem.presets import load_problem, names, preset

EXACT = {
    "gpt3_1_3b": 1_317_642_240,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
}
NOMINAL = {"gpt3_350m": 350e6, "gpt3_2_6b": 2.6e9, "gpt3_6_7b": 6.7e9, "gpt3_13b": 13e9, "gpt3_175b": 175e9}


@pytest.mark.parametrize("name", names("model"))
def test_published_parameter_counts(name):
    parameters = model_from_config(preset("model", name)).num_parameters
    if name in EXACT:
        assert parameters == pytest.approx(EXACT[name], rel=1e-3)
    else:
        assert parameters == pytest.approx(NOMINAL[name], rel=0.05)


def numbers(config, key=""):
    """Keys under which a mapping holds numbers, nested ones as themselves."""
    if isinstance(config, dict):
        for name, value in config.items():
            if name != "source":
                yield from numbers(value, name)
    elif isinstance(config, list):
        for value in config:
            yield from numbers(value, key)
    elif isinstance(config, int | float) and not isinstance(config, bool):
        yield key


@pytest.mark.parametrize("group", ["model", "device", "cluster"])
def test_every_number_of_a_preset_has_a_source(group):
    assert names(group)
    for name in names(group):
        config = preset(group, name)
        sources = set(config["source"])
        if group == "device":
            sources |= {"fp16", "bf16", "fp32"} if "peak_tflops" in sources else set()
            sources |= {"links"} if "nvlink" in sources else set()
        if group in ("device", "cluster"):
            sources |= {"bandwidth_gb_per_s"} if {"intra_node", "inter_node"} <= sources else set()
            sources |= {"nics_per_node"} if "inter_node" in sources else set()  # "8 x 200 Gb/s InfiniBand"
        assert set(numbers(config)) <= sources, (group, name, set(numbers(config)) - sources)


def test_every_preset_loads():
    for model in names("model"):
        for cluster in names("cluster"):
            assert load_problem(model, cluster).global_batch_size == 128


def test_every_device_makes_a_device_type_and_says_in_which_node_it_comes():
    for name in names("device"):
        config = preset("device", name)
        assert device_from_config(config).name == name
        assert usual_node("test", config)["devices_per_node"] in (4, 8)
        old = name.split("_")[0] in ("v100", "p100", "t4")
        assert ("bf16" not in config["peak_tflops"]) == old, name


def with_key(config, path, value):
    import copy

    config = copy.deepcopy(config)
    place = config
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return config


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "many", None, True, 1.5])
def test_bad_counts_are_refused(value):
    for group, path in (("model", ("num_layers",)), ("cluster", ("groups", 0, "num_nodes"))):
        name = "llama3_8b" if group == "model" else "a100x8"
        bad = with_key(preset(group, name), path, value)
        with pytest.raises(InputError, match=path[-1]):
            model_from_config(bad) if group == "model" else cluster_from_config(bad, lambda n: preset("device", n))


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "wide", None, True])
def test_bad_sizes_are_refused(value):
    with pytest.raises(InputError, match="memory_gib"):
        device_from_config(with_key(preset("device", "t4"), ("memory_gib",), value))
    bad = with_key(preset("cluster", "a100x8"), ("groups", 0, "inter_node", "bandwidth_gb_per_s"), value)
    with pytest.raises(InputError, match="bandwidth_gb_per_s"):
        cluster_from_config(bad, lambda name: preset("device", name))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("groups",), [], ["no device groups"]),
        (("groups",), "a100", ["must be a list"]),
        (("groups", 0, "device"), "a100_39", ["a100_39", "a100_40"]),
        (("groups", 0, "nodes"), 3, ["'nodes'", "num_nodes"]),
        (("groups", 1, "name"), "a100", ["twice"]),
        (("groups", 0, "nics_per_node"), 0, ["nics_per_node=0"]),
        (("groups", 0, "nics_per_node"), 2.5, ["nics_per_node=2.5"]),
        (("links",), [{"between": ["a100", "b"], "latency_us": 1, "bandwidth_gb_per_s": 1}], ["'b'"]),
        (("links",), [{"between": ["a100", "a100"], "latency_us": 1, "bandwidth_gb_per_s": 1}], ["itself"]),
        (("links",), [{"between": ["a100"], "latency_us": 1, "bandwidth_gb_per_s": 1}], ["two device groups"]),
    ],
)
def test_a_bad_cluster_is_refused(path, value, words):
    bad = with_key(preset("cluster", "a100x8_v100x16"), path, value)
    with pytest.raises(InputError) as error:
        cluster_from_config(bad, lambda name: preset("device", name))
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"precision": "bf16"}, ["v100_16", "no bf16", "fp16"]),
        ({"precision": "int4"}, ["int4"]),
        ({"seq_len": 0}, ["seq_len=0"]),
        ({"seq_len": math.nan}, ["seq_len=nan"]),
        ({"global_batch_size": -8}, ["global_batch_size=-8"]),
        ({"optimizer": "sgd"}, ["sgd", "adam"]),
        ({"sequence": 3}, ["'sequence'"]),
        ({"fused_attention": "maybe"}, ["fused_attention"]),
        ({"framework": "horovod"}, ["framework='horovod'", "megatron, deepspeed, huggingface, fsdp"]),
    ],
)
def test_bad_problem_settings_are_refused(settings, words):
    with pytest.raises(InputError) as error:
        load_problem(**settings)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_learned_positions_limit_the_sequence():
    with pytest.raises(InputError, match="2048 learned positions"):
        load_problem("gpt3_1_3b", "a100x8", seq_len=4096)


def test_unknown_names_say_what_is_near():
    with pytest.raises(InputError, match="did you mean 'llama3_8b'"):
        load_problem(model="llama3_8")
