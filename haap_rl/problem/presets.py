"""Presets: the YAML files of `conf/`, read without Hydra, and the Problem they make."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from haap_rl.problem.cluster import cluster_from_config
from haap_rl.problem.errors import InputError, check_keys
from haap_rl.problem.model import model_from_config
from haap_rl.problem.plan import Problem


def conf_dir() -> str:
    """Absolute path of `conf/`: inside the package (wheel) or beside it (checkout)."""
    here = Path(__file__).resolve().parents[1]
    for folder in (here / "conf", here.parent / "conf"):
        if (folder / "train.yaml").is_file():
            return str(folder)
    raise FileNotFoundError("haap_rl: no conf/train.yaml inside or beside the package; reinstall haap_rl")


def names(group: str) -> list[str]:
    """Sorted names of the presets in `conf/<group>/`."""
    return sorted(path.stem for path in Path(conf_dir(), group).glob("*.yaml"))


def preset(group: str, name: str) -> dict[str, Any]:
    """The mapping in `conf/<group>/<name>.yaml`. Raises InputError naming what is near."""
    if name not in names(group):
        near = difflib.get_close_matches(name, names(group), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InputError(f"{group}={name!r} is not known; {hint}choices: {', '.join(names(group))}")
    with open(Path(conf_dir(), group, f"{name}.yaml"), encoding="utf-8") as file:
        return dict(yaml.safe_load(file) or {})


def problem_from_config(model: Mapping[str, Any], cluster: Mapping[str, Any], settings: Mapping[str, Any]) -> Problem:
    """Problem from the three mappings of a composed configuration; `settings` are Problem's own fields."""
    check_keys("problem", settings, ("seq_len", "global_batch_size", "precision", "optimizer", "fused_attention"))
    return Problem(
        cluster=cluster_from_config(cluster, lambda name: preset("device", name)),
        model=model_from_config(model),
        **settings,
    )


def load_problem(model: str = "llama3_8b", cluster: str = "a100x8_v100x16", **settings: Any) -> Problem:
    """The Problem of two presets by name; `settings` override those of `conf/problem/default.yaml`."""
    settings = {**preset("problem", "default"), **settings}
    return problem_from_config(preset("model", model), preset("cluster", cluster), settings)
