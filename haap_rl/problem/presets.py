"""Presets: the YAML files of `conf/` and a person's own files, read without Hydra, and the Problem they make."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from haap_rl.problem.cluster import cluster_from_config
from haap_rl.problem.errors import InputError, check_keys, label, shown
from haap_rl.problem.formats import hostfile, huggingface, metis, topo
from haap_rl.problem.formats.files import read_yaml_mapping
from haap_rl.problem.model import model_from_config
from haap_rl.problem.plan import Problem

FILE = "file"
MODEL_FORMATS = ("huggingface",)
CLUSTER_FORMATS = ("yaml", "hostfile", "metis", "topo")
# key of conf/cluster/file.yaml -> the formats that read it; elsewhere it would be silently ignored
READ_BY = {
    "device": ("hostfile", "metis", "topo"),
    "num_nodes": ("topo",),
    "hostfile": ("metis",),
    "intra_node": ("hostfile", "topo"),
    "inter_node": ("hostfile", "topo"),
}


def conf_dir() -> str:
    """Absolute path of `conf/`: inside the package (wheel) or beside it (checkout)."""
    here = Path(__file__).resolve().parents[1]
    for folder in (here / "conf", here.parent / "conf"):
        if (folder / "train.yaml").is_file():
            return str(folder)
    raise FileNotFoundError("haap_rl: no conf/train.yaml inside or beside the package; reinstall haap_rl")


def names(group: str) -> list[str]:
    """Sorted names of the presets in `conf/<group>/`.

    `file`, which stands for a person's own file, is none, nor is `_shared`, which presets have in common.
    """
    stems = (path.stem for path in Path(conf_dir(), group).glob("*.yaml"))
    return sorted(stem for stem in stems if stem != FILE and not stem.startswith("_"))


def choices(group: str) -> list[str]:
    """What `group=` can be on a command line: the presets, and `file` where a person's own file can be read."""
    return [*names(group), *([FILE] if Path(conf_dir(), group, f"{FILE}.yaml").is_file() else [])]


def preset(group: str, name: str) -> dict[str, Any]:
    """The mapping in `conf/<group>/<name>.yaml`. Raises InputError naming what is near."""
    if name not in names(group):
        near = difflib.get_close_matches(name, names(group), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InputError(f"{group}={name!r} is not known; {hint}choices: {', '.join(names(group))}")
    return _merged(group, name)


def _merged(group: str, name: str) -> dict[str, Any]:
    """The file of a group over the files that it shares with others, those in its Hydra list `defaults` with a `_`.

    A list of anything else (an experiment's, that chooses of other groups) stays as it is.
    """
    with open(Path(conf_dir(), group, f"{name}.yaml"), encoding="utf-8") as file:
        own = dict(yaml.safe_load(file) or {})
    shared = [entry for entry in own.get("defaults", []) if isinstance(entry, str) and entry != "_self_"]
    if not shared:
        return own
    own.pop("defaults")
    return {key: value for part in (*(_merged(group, entry) for entry in shared), own) for key, value in part.items()}


def resolved(model: Mapping[str, Any], cluster: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Model and cluster as presets write them: one that names a file (`path`) becomes what the file says.

    What comes back holds no path to read, so a record of it can be used when the file has moved. Raises InputError.
    """
    return (
        model_from_file(model) if "path" in model else model,
        cluster_from_file(cluster) if "path" in cluster else cluster,
    )


def model_from_file(config: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping of the model in the file that `config` (as `conf/model/file.yaml`) names."""
    check_keys("model", config, ("path",), ("format", "name"))
    _format("model", config, MODEL_FORMATS)
    model = huggingface.read(config["path"], config.get("name"))
    try:
        model_from_config(model)
    except InputError as error:
        raise InputError(f"model file {str(config['path'])!r}: {error}") from None
    return {**model, "source": {"file": _file_name(config["path"])}}


def cluster_from_file(config: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping of the cluster in the file that `config` (as `conf/cluster/file.yaml`) names."""
    check_keys("cluster", config, ("path",), ("format", "name", *READ_BY))
    path, device, links = config["path"], config.get("device"), (config.get("intra_node"), config.get("inter_node"))
    kind = _format("cluster", config, CLUSTER_FORMATS)
    for key, kinds in READ_BY.items():
        if config.get(key) is not None and kind not in kinds:
            raise InputError(
                f"cluster.{key}={shown(config[key])} is not read with cluster.format={kind}, only with "
                f"{' or '.join(kinds)}; drop it"
            )
    name = _cluster_name(config)
    num_nodes = 1 if config.get("num_nodes") is None else config["num_nodes"]
    if kind == "yaml":
        cluster = read_yaml_mapping(path, "cluster file")
        if config.get("name") is not None:
            cluster = {**cluster, "name": name}
    elif kind == "hostfile":
        cluster = hostfile.read(path, name, device, _device, *links)
    elif kind == "metis":
        cluster = metis.read(path, name, config.get("hostfile"), device, _device, names("device"))
    else:
        cluster = topo.read(path, name, device, _device, num_nodes, *links)
    try:
        cluster_from_config(cluster, _device)
    except InputError as error:
        raise InputError(f"cluster file {str(path)!r}: {error}") from None
    return {**cluster, "source": cluster.get("source") or {"file": _file_name(path)}}


def _device(name: str) -> Mapping[str, Any]:
    return preset("device", name)


def _format(group: str, config: Mapping[str, Any], known: tuple[str, ...]) -> str:
    kind = config.get("format") or known[0]
    if kind not in known:
        raise InputError(f"{group}.format={shown(kind)} is not known; choose one of {', '.join(known)}")
    return str(kind)


def _file_name(path: object) -> str:
    return Path(str(path)).name


def _cluster_name(config: Mapping[str, Any]) -> str:
    """The name given, else the file's."""
    if config.get("name") is not None:
        return label("cluster", "name", config["name"])
    stem = Path(str(config["path"])).stem
    return stem if 1 <= len(stem) <= 100 and stem.isprintable() else "cluster"


def problem_from_config(model: Mapping[str, Any], cluster: Mapping[str, Any], settings: Mapping[str, Any]) -> Problem:
    """Problem from the three mappings of a composed configuration; `settings` are Problem's own fields."""
    keys = ("seq_len", "global_batch_size", "precision", "optimizer", "fused_attention", "framework")
    check_keys("problem", settings, keys, ("launch_blocking",))
    model, cluster = resolved(model, cluster)
    return Problem(cluster=cluster_from_config(cluster, _device), model=model_from_config(model), **settings)


def load_problem(model: str = "llama3_8b", cluster: str = "a100x8_v100x16", **settings: Any) -> Problem:
    """The Problem of two presets by name; `settings` override those of `conf/problem/default.yaml`."""
    settings = {**preset("problem", "default"), **settings}
    return problem_from_config(preset("model", model), preset("cluster", cluster), settings)
