"""Splits of instances share nothing that would let a policy see what it is tested on; pools are drawn evenly."""

import copy
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from haap_rl.cost.estimator import Estimator
from haap_rl.problem.errors import InputError
from haap_rl.problem.instances import SPLITS, Instance, draw_pool, load_instances
from haap_rl.problem.presets import conf_dir, load_problem, preset
from haap_rl.space.options import SpaceSpec
from haap_rl.space.space import Space

INSTANCES = load_instances(preset("instances", "default"))


def device_sets(split):
    return {frozenset(device for device, _, _ in groups) for groups in INSTANCES.splits[split].clusters}


def models(split):
    return {model.name for model in INSTANCES.splits[split].models}


def fits(problem):
    return bool(
        Space(problem, SpaceSpec.from_config(preset("space", "default")), Estimator(problem)).feasible_microbatches
    )


def tiny(**changes):
    """Four splits of one model and one cluster each, with some keys replaced: {"train.models": [...]}."""
    config = {
        "train": {"models": ["gpt3_1_3b"], "clusters": [[["t4", 1, 4]], [["t4", 1, 4], ["a10g", 1, 4]]]},
        "validation": {"models": ["llama2_7b"], "clusters": [[["a10g", 1, 4]]]},
        "test": {"models": ["llama3_8b"], "clusters": [[["a100_40", 1, 8]]]},
        "unseen_devices": {"models": ["llama3_8b"], "clusters": [[["l4", 1, 8]]]},
    }
    for split in config.values():
        split["global_batch_sizes"] = [64, 128]
    for path, value in changes.items():
        split, _, key = path.partition(".")
        if key:
            config[split][key] = value
        else:
            config[split] = value
    return config


def test_no_two_splits_share_a_model_or_a_set_of_device_types():
    for one, other in combinations(SPLITS, 2):
        assert not device_sets(one) & device_sets(other), (one, other)
        if {one, other} != {"test", "unseen_devices"}:
            assert not models(one) & models(other), (one, other)
    assert models("unseen_devices") == models("test")


def test_device_types_of_unseen_devices_are_in_no_other_split():
    seen = frozenset().union(*(types for split in SPLITS[:3] for types in device_sets(split)))
    unseen = frozenset().union(*device_sets("unseen_devices"))
    assert not seen & unseen
    assert len(unseen) == 10


def test_training_spans_the_sizes_that_are_tested():
    trained, tested = INSTANCES.splits["train"], INSTANCES.splits["test"]
    sizes = sorted(model.num_parameters for model in trained.models)
    most = max(model.num_parameters for model in tested.models if model.num_layers < 80)
    assert sizes[0] < min(model.num_parameters for model in tested.models) < most < sizes[-1]
    assert {model.tied_embeddings for model in trained.models} == {True, False}
    assert any(model.kv_heads < model.heads for model in trained.models)
    assert {4, 8, 12, 16, 24, 32, 48} <= {instance.num_devices for instance in INSTANCES.split("train")}
    assert {len(groups) for groups in trained.clusters} == {1, 2, 3}
    seen = frozenset().union(*device_sets("train"))
    assert frozenset().union(*device_sets("test")) <= seen
    assert frozenset().union(*device_sets("validation")) <= seen


@pytest.mark.parametrize("split", SPLITS)
def test_a_split_is_every_combination_under_a_name_of_its_own(split):
    instances, parts = INSTANCES.split(split), INSTANCES.splits[split]
    assert len(instances) == len(parts.models) * len(parts.clusters) * len(parts.global_batch_sizes)
    assert len({instance.name for instance in instances}) == len(set(instances)) == len(instances)
    assert instances == load_instances(preset("instances", "default")).split(split)


@pytest.mark.parametrize(("split", "least"), [("validation", 0.7), ("test", 0.6), ("unseen_devices", 0.7)])
def test_most_instances_fit_in_memory(split, least):
    instances = INSTANCES.split(split)[::5]
    assert sum(fits(instance.problem()) for instance in instances) >= least * len(instances)


def test_an_instance_is_the_problem_of_the_presets_it_names():
    instance = Instance.of("llama3_8b", (("a100_40", 1, 8), ("v100_16", 2, 8)))
    assert (instance.name, instance.num_devices) == ("llama3_8b on 8 a100_40 + 16 v100_16", 24)
    problem = instance.problem()
    same = load_problem("llama3_8b", "a100x8_v100x16")
    assert problem.model == same.model
    assert (problem.seq_len, problem.global_batch_size, problem.precision) == (2048, 128, "fp16")
    assert [group.device for group in problem.cluster.groups] == [group.device for group in same.cluster.groups]
    assert Instance(instance.model, instance.groups, 64).problem().global_batch_size == 64
    assert Instance(instance.model, instance.groups, 64).name == f"{instance.name}, batch 64"


def test_hydra_reads_the_same_instances():
    """Its YAML reader is another one, and the file has merged keys."""
    read = OmegaConf.to_container(OmegaConf.load(Path(conf_dir(), "instances", "default.yaml")))
    assert load_instances(read) == INSTANCES


def test_a_pool_is_drawn_by_its_seed_and_uses_every_cluster_equally():
    instances = INSTANCES.split("train")
    clusters = len(INSTANCES.splits["train"].clusters)
    pool = draw_pool(instances, 3 * clusters, 0, lambda problem: True)
    assert len(set(pool)) == len(pool) == 3 * clusters
    assert set(Counter(instance.groups for instance in pool).values()) == {3}
    of_a_model = Counter(instance.model for instance in pool).values()
    assert max(of_a_model) - min(of_a_model) <= 1
    of_a_size = Counter(instance.global_batch_size for instance in pool).values()
    assert max(of_a_size) - min(of_a_size) <= 0.1 * len(pool)
    assert draw_pool(instances, 3 * clusters, 0, lambda problem: True) == pool
    assert draw_pool(instances, 20, 0, lambda problem: True) == pool[:20]
    assert draw_pool(instances, 20, 1, lambda problem: True) != pool[:20]


def test_a_pool_holds_only_what_fits_and_at_most_what_there_is():
    instances = INSTANCES.split("validation")
    asked = Counter()

    def small(problem):
        asked[problem] += 1
        return problem.model.name in ("gpt3_1_3b", "llama2_7b")

    pool = draw_pool(instances, 1000, 0, small)
    assert len(pool) == 2 * len(INSTANCES.splits["validation"].clusters)
    assert {instance.model.name for instance in pool} == {"gpt3_1_3b", "llama2_7b"}
    assert set(asked.values()) == {1}
    assert len(asked) == len(instances)
    with pytest.raises(InputError, match=r"none of the 90 given fits.*smaller models"):
        draw_pool(instances, 4, 0, lambda problem: False)
    with pytest.raises(InputError, match="count=0"):
        draw_pool(instances, 0, 0, small)


def test_a_training_pool_has_instances_that_barely_fit():
    spec = SpaceSpec.from_config(preset("space", "default"))
    pool = draw_pool(INSTANCES.split("train"), 40, 0, fits)
    assert len(pool) == 40
    tight = 0
    for instance in pool:
        problem = instance.problem()
        space = Space(problem, spec, Estimator(problem))
        tight += len(space.feasible_microbatches) < sum(
            problem.global_batch_size % m == 0 for m in spec.num_microbatches
        )
    assert 3 <= tight <= 20


SHAPE = {**preset("model", "llama3_8b"), "name": "llama_by_another_name"}


@pytest.mark.parametrize(("changes", "words"), [
    ({"train.models": ["llama3_8b"]}, ["train and test", "model 'llama3_8b'", "drop it"]),
    ({"train.models": [SHAPE]}, ["train and test", "'llama_by_another_name', called 'llama3_8b' there"]),
    ({"unseen_devices.models": ["gpt3_1_3b"]}, ["train and unseen_devices", "model 'gpt3_1_3b'"]),
    ({"train.clusters": [[["a10g", 2, 4]]]}, ["train and validation", "a cluster of a10g", "whatever the numbers"]),
    ({"test.clusters": [[["a10g", 2, 4], ["t4", 3, 8]]]}, ["train and test", "a cluster of a10g + t4"]),
    ({"unseen_devices.clusters": [[["l4", 1, 8], ["t4", 1, 4]]]}, ["train and unseen_devices", "device type 't4'"]),
    ({"train.clusters": []}, ["train: clusters=[]", "at least one", "for example"]),
    ({"test.models": []}, ["test: models=[]", "at least one"]),
    ({"test.global_batch_sizes": 128}, ["test: global_batch_sizes=128", "list"]),
    ({"test.global_batch_sizes": [0]}, ["test: global_batch_sizes=0", "at least 1"]),
    ({"test.global_batch_sizes": [64, 64]}, ["test: global_batch_sizes holds 64 twice"]),
    ({"train.models": ["gpt3_1_3b", "gpt3_1_3b"]}, ["train: models holds 'gpt3_1_3b' twice"]),
    ({"train.models": [SHAPE, {**SHAPE, "name": "other"}]}, ["train: models", "differ in nothing but name"]),
    ({"train.models": ["gpt3_1_3"]}, ["train: model='gpt3_1_3'", "did you mean 'gpt3_1_3b'"]),
    ({"train.models": [7]}, ["train: models: 7", "name of one of conf/model"]),
    ({"train.models": [{**SHAPE, "name": "llama2_70b"}]}, ["train: model 'llama2_70b'", "rename it"]),
    ({"train.models": [{**SHAPE, "hidden": -1}]}, ["train: model", "hidden=-1"]),
    ({"train.models": [{**preset("model", "gpt3_1_3b"), "name": "short", "max_positions": 512}]},
     ["train: short on", "seq_len=2048"]),
    ({"train.clusters": [[["t5", 1, 4]]]}, ["train: cluster", "device='t5' is not known"]),
    ({"train.clusters": [[["t4", 0, 4]]]}, ["train: cluster", "nodes=0"]),
    ({"train.clusters": [[["t4", 1]]]}, ["train: cluster", "[device, nodes, devices per node]"]),
    ({"train.clusters": [["t4", 1, 4]]}, ["train: cluster", "[device, nodes, devices per node]"]),
    ({"train.clusters": [[["t4", 1, 4], ["t4", 2, 4]]]}, ["train: ", "'t4'", "twice"]),
    ({"train.clusters": [[["t4", 1, 8]], [["t4", 2, 4]]]}, ["train: clusters holds '8 t4' twice"]),
    ({"train.seeds": [1]}, ["train: unknown key 'seeds'"]),
    ({"train": None}, ["train: None must be a mapping"]),
    ({"tests": {}}, ["unknown key 'tests'", "did you mean 'test'"]),
])  # fmt: skip
def test_a_bad_file_of_instances_is_refused_in_one_line(changes, words):
    load_instances(tiny())
    with pytest.raises(InputError) as error:
        load_instances(copy.deepcopy(tiny(**changes)))
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith("instances: ")
    assert all(word in text for word in words), text


def test_a_missing_split_and_an_unknown_one_are_named():
    config = tiny()
    del config["validation"]
    with pytest.raises(InputError, match="key 'validation' is missing"):
        load_instances(config)
    with pytest.raises(InputError, match=r"split='tests' is not known; choose one of train, validation, test"):
        INSTANCES.split("tests")
