"""A run's configuration as the command line that makes it again."""

import copy
import shlex

import hydra
import pytest
from omegaconf import OmegaConf

from haap_rl.configs import command_line
from haap_rl.problem.presets import conf_dir, load_problem, names, preset

HOSTILE = """it's "all" <b>&amp;</b> ${x} \\${y} a\\b, [c]: {d}=e;f #g $(h) `i` é\\"""


def composed(words):
    """The configuration that a command line's words make, by Hydra itself."""
    with hydra.initialize_config_dir(conf_dir(), version_base="1.3"):
        config = OmegaConf.to_container(hydra.compose("train", words, return_hydra_config=False), resolve=False)
    config.pop("out")
    return OmegaConf.to_container(OmegaConf.create(config), resolve=True, throw_on_missing=True)


def without_source(node):
    if isinstance(node, dict):
        return {key: without_source(value) for key, value in node.items() if key != "source"}
    return [without_source(value) for value in node] if isinstance(node, list) else node


def same_again(config):
    """The command of `config`, once it was seen to make `config`."""
    command = command_line(config)
    start, *words = shlex.split(command)
    assert [start, *words[:2]] == ["python", "-m", "haap_rl.train"]
    assert without_source(composed(words[2:])) == without_source(config)
    return command


def test_presets_go_by_name():
    assert same_again(composed(["+search=ga", "model=gpt3_350m", "seed=3"])) == (
        "python -m haap_rl.train +search=ga model=gpt3_350m cluster=a100x8_v100x16 seed=3"
    )


@pytest.mark.parametrize("search", names("search"))
def test_every_searcher_s_setting_is_found_again(search):
    same_again(composed([f"+search={search}", "budget.seconds=2.5", "budget.evaluations=null"]))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["space.num_microbatches=[16,32]", "space.recompute=[none]"], "'space.num_microbatches=[16,32]'"),
        (["problem.seq_len=1024", "+problem.launch_blocking=true"], "++problem.launch_blocking=true"),
        (["cluster.groups.0.num_nodes=2"], "cluster=a100x8_v100x16 cluster.groups.0.num_nodes=2"),
        (["cluster.groups.1.inter_node.bandwidth_gb_per_s=1.5e-3"], "bandwidth_gb_per_s=0.0015"),
        (["model.tied_embeddings=true", "model.ffn=100"], "model.tied_embeddings=true"),
        (["search.learning_rate=1e-5", "certificate=a/b c.json"], "'certificate='"),
        (["estimator.profile=p.json", "estimator.cached=false"], "estimator.profile=p.json"),
    ],
)
def test_what_differs_is_said(words, said):
    assert said in same_again(composed(["+search=ppo", *words]))


def test_models_and_clusters_of_files_are_written_out():
    config = composed(["+search=random"])
    config["model"] = {**config["model"], "name": "mine", "hidden": 1024}
    group = copy.deepcopy(config["cluster"]["groups"][0])
    group.pop("nics_per_node")
    group["device"] = {**preset("device", "t4"), "name": "odd 1"}
    config["cluster"] = {"name": "lab", "groups": [group] * 3}
    command = same_again(config)
    assert "model.name=mine" in command
    assert "~cluster.links" in command


def test_no_name_breaks_out_of_its_quotes():
    config = composed(["+search=random"])
    for name in (HOSTILE, "null", "1e5", "a: b", "x'", "'", "\\'", "${z}", " "):
        config["model"]["name"] = config["cluster"]["name"] = config["cluster"]["groups"][0]["name"] = name
        same_again(config)


def test_a_searcher_of_another_package_is_written_out():
    config = {**composed(["+search=random"]), "search": {"name": "hill_climb", "patience": 5}}
    assert "+search=hill_climb" in command_line(config)
    assert "search.patience=5" in command_line(config)


def test_the_default_problem_is_the_default_configuration():
    config = composed(["+search=random"])
    assert (config["model"]["name"], config["cluster"]["name"]) == (
        load_problem().model.name,
        load_problem().cluster.name,
    )
