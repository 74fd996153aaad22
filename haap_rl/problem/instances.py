"""Instances to train, choose and test a planning policy on: models x clusters x global batch sizes, in four splits.

    instances = load_instances(preset("instances", "default"))
    instances.split("train")      every Instance of the split, in a fixed order
    draw_pool(instances.split("train"), 512, seed=0, fits=...)

What a policy is tested on it must never have met, not even in part, so no two splits share a model or a cluster
composition (the set of device types, whatever their numbers), but that `unseen_devices` asks the models of `test`
again, on device types of which no other split has one. `load_instances` holds this. Which instances fit in memory is
not known here; `draw_pool` is told by a predicate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np

from haap_rl.problem.cluster import Cluster, cluster_from_config
from haap_rl.problem.errors import InputError, check_keys, label, positive_int, shown
from haap_rl.problem.model import Model, model_from_config
from haap_rl.problem.plan import Problem
from haap_rl.problem.presets import names, preset

UNSEEN_DEVICES = "unseen_devices"
SPLITS = ("train", "validation", "test", UNSEEN_DEVICES)
SAME_MODELS = ("test", UNSEEN_DEVICES)  # the two splits that may have models in common
EXAMPLES = {
    "models": "models: [gpt3_2_6b]",
    "clusters": "clusters: [[[a100_40, 1, 8], [t4, 2, 4]]]",
    "global_batch_sizes": "global_batch_sizes: [128]",
}

Groups = tuple[tuple[str, int, int], ...]  # (device, nodes, devices of a node)


@dataclass(frozen=True, slots=True)
class Instance:
    """A model, the device groups of a cluster, and sequences per step; all else is as conf/problem/default.yaml."""

    model: Model
    groups: Groups
    global_batch_size: int

    @classmethod
    def of(cls, model: str, groups: Groups) -> Instance:
        """The Instance of a model preset, with the global batch size of conf/problem/default.yaml."""
        return cls(_model(model), groups, _settings()["global_batch_size"])

    @property
    def cluster_name(self) -> str:
        return " + ".join(f"{nodes * each} {device}" for device, nodes, each in self.groups)

    @property
    def name(self) -> str:
        """Model and cluster, and the global batch size where it is not the usual one."""
        usual = self.global_batch_size == _settings()["global_batch_size"]
        return f"{self.model.name} on {self.cluster_name}{'' if usual else f', batch {self.global_batch_size}'}"

    @property
    def num_devices(self) -> int:
        return sum(nodes * each for _, nodes, each in self.groups)

    def cluster(self) -> Cluster:
        return cluster_from_config(cluster_of(self.cluster_name.replace(" ", ""), self.groups), _device)

    def problem(self) -> Problem:
        return Problem(self.cluster(), self.model, **{**_settings(), "global_batch_size": self.global_batch_size})


@dataclass(frozen=True, slots=True)
class Split:
    """What the instances of a split are made of: every combination is one."""

    models: tuple[Model, ...]
    clusters: tuple[Groups, ...]
    global_batch_sizes: tuple[int, ...]

    def instances(self) -> tuple[Instance, ...]:
        """Every combination, cluster by cluster."""
        return tuple(
            Instance(model, groups, size)
            for groups in self.clusters
            for model in self.models
            for size in self.global_batch_sizes
        )


@dataclass(frozen=True, slots=True)
class Instances:
    """The four splits, known to be disjoint."""

    splits: Mapping[str, Split]

    def __post_init__(self) -> None:
        for one, other in combinations(self.splits, 2):
            _check_disjoint(one, self.splits[one], other, self.splits[other])

    def split(self, name: str) -> tuple[Instance, ...]:
        """Every instance of a split, in a fixed order. Raises InputError for an unknown name."""
        if name not in self.splits:
            raise InputError(f"instances: split={shown(name)} is not known; choose one of {', '.join(SPLITS)}")
        return self.splits[name].instances()


def cluster_of(name: str, groups: Groups) -> dict[str, Any]:
    """The mapping of a cluster of these groups, with the links of the node that each device usually comes in."""
    entries = []
    for device, nodes, each in groups:
        node = _device(device)["node"]
        links = {key: node[key] for key in ("intra_node", "inter_node", "nics_per_node") if key in node}
        entries.append({"name": device, "device": device, "num_nodes": nodes, "devices_per_node": each, **links})
    return {"name": name, "groups": entries}


def draw_pool(
    instances: Sequence[Instance], count: int, seed: int, fits: Callable[[Problem], bool]
) -> tuple[Instance, ...]:
    """`count` different instances for which `fits(problem)` holds, drawn by `seed`; fewer where there are no more.

    Rounds: in each, every cluster gives one instance, of the model and then of the batch size that was given least
    often so far. Clusters are thus used equally often, as far as enough instances fit on them. A smaller count gives
    the beginning of a larger one; `fits` is asked at most once per instance. Raises InputError if none fits.
    """
    count = positive_int("instances", "count", count)
    rng = np.random.default_rng(seed)
    waiting: dict[Groups, list[Instance]] = {}
    for i in rng.permutation(len(instances)):
        waiting.setdefault(instances[i].groups, []).append(instances[i])
    pool: list[Instance] = []
    models = dict.fromkeys((instance.model for instance in instances), 0)
    sizes = dict.fromkeys((instance.global_batch_size for instance in instances), 0)
    while waiting and len(pool) < count:
        for groups in list(waiting):
            left = waiting[groups]
            left.sort(key=lambda instance: (models[instance.model], sizes[instance.global_batch_size]))
            found = next((i for i, instance in enumerate(left) if fits(instance.problem())), None)
            if found is None:
                del waiting[groups]
                continue
            chosen = left[found]
            del left[: found + 1]  # those before it do not fit
            pool.append(chosen)
            models[chosen.model] += 1
            sizes[chosen.global_batch_size] += 1
            if len(pool) == count:
                break
    if not pool:
        raise InputError(
            f"instances: none of the {len(instances)} given fits in memory; add smaller models or larger clusters"
        )
    return tuple(pool)


def load_instances(config: Mapping[str, Any]) -> Instances:
    """Instances from the mapping of a `conf/instances/*.yaml`.

    Raises InputError for missing or unknown keys and bad values, an empty split, and splits that share what they must
    not share.
    """
    check_keys("instances", config, SPLITS)
    return Instances({name: _split(f"instances: {name}", config[name]) for name in SPLITS})


def _split(where: str, config: object) -> Split:
    if not isinstance(config, Mapping):
        raise InputError(f"{where}: {shown(config)} must be a mapping with models, clusters and global_batch_sizes")
    check_keys(where, config, ("models", "clusters", "global_batch_sizes"))
    models = [_own_model(where, value) for value in _list(where, config, "models")]
    clusters = [_groups(where, value) for value in _list(where, config, "clusters")]
    sizes = [positive_int(where, "global_batch_sizes", v) for v in _list(where, config, "global_batch_sizes")]
    _check_different(where, "models", [model.name for model in models])
    _check_different(where, "global_batch_sizes", sizes)
    shapes: dict[Model, str] = {}
    for model in models:
        like = shapes.setdefault(_shape(model), model.name)
        if like != model.name:
            raise InputError(
                f"{where}: models {like!r} and {model.name!r} differ in nothing but name; keep one of them"
            )
    # each model once and each cluster once: what makes a problem impossible lies in one of them
    rows = [Instance(models[0], groups, sizes[0]) for groups in clusters]
    for instance in [*rows, *(Instance(model, clusters[0], sizes[0]) for model in models)]:
        try:
            instance.problem()
        except InputError as error:
            raise InputError(f"{where}: {instance.name}: {error}") from None
    _check_different(where, "clusters", [instance.cluster_name for instance in rows])
    return Split(tuple(models), tuple(clusters), tuple(sizes))


def _list(where: str, config: Mapping[str, Any], key: str) -> list[Any]:
    value = config[key]
    if not isinstance(value, list) or not value:
        raise InputError(
            f"{where}: {key}={shown(value)} must be a list of at least one; give for example {EXAMPLES[key]}"
        )
    return value


def _own_model(where: str, value: object) -> Model:
    """The model of a preset's name, or of a mapping as in conf/model that is named like none of them."""
    try:
        if isinstance(value, str):
            return _model(value)
        if not isinstance(value, Mapping):
            raise InputError(f"models: {shown(value)} must be the name of one of conf/model or a mapping as there")
        model = model_from_config(value)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    if model.name in names("model"):
        raise InputError(
            f"{where}: model {model.name!r} is written out but named like one of conf/model; rename it, or give the "
            "name alone"
        )
    return model


def _groups(where: str, value: object) -> Groups:
    where = f"{where}: cluster {shown(value)}"
    if not isinstance(value, list) or not value or not all(isinstance(row, list) and len(row) == 3 for row in value):
        raise InputError(
            f"{where} must be a list of [device, nodes, devices per node]; give for example {EXAMPLES['clusters']}"
        )
    groups = []
    for device, nodes, each in value:
        device = label(where, "device", device)
        try:
            _device(device)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        groups.append((device, positive_int(where, "nodes", nodes), positive_int(where, "devices_per_node", each)))
    return tuple(groups)


def _check_different(where: str, key: str, values: Sequence[object]) -> None:
    twice = [value for i, value in enumerate(values) if value in values[:i]]
    if twice:
        raise InputError(f"{where}: {key} holds {shown(twice[0])} twice; keep one of them")


def _check_disjoint(one: str, mine: Split, other: str, theirs: Split) -> None:
    """Raise InputError where two splits share a model, a cluster composition or a device type that they must not."""
    where = f"instances: {one} and {other}"
    if {one, other} != set(SAME_MODELS):
        for model in mine.models:
            for its in theirs.models:
                if model.name == its.name or _shape(model) == _shape(its):
                    alike = "" if model.name == its.name else f", called {its.name!r} there"
                    raise InputError(
                        f"{where} share model {model.name!r}{alike}; a model belongs to one split: drop it from one"
                    )
    compositions = {_device_types(groups) for groups in mine.clusters}
    for groups in theirs.clusters:
        if _device_types(groups) in compositions:
            raise InputError(
                f"{where} both have a cluster of {' + '.join(sorted(_device_types(groups)))}; a set of device types "
                "belongs to one split, whatever the numbers: drop it from one"
            )
    if UNSEEN_DEVICES in (one, other):
        shared = frozenset().union(*compositions) & frozenset().union(*map(_device_types, theirs.clusters))
        if shared:
            raise InputError(
                f"{where} share device type {min(shared)!r}; those of {UNSEEN_DEVICES} may be in no other split: "
                "drop it from one"
            )


def _device_types(groups: Groups) -> frozenset[str]:
    return frozenset(device for device, _, _ in groups)


def _shape(model: Model) -> Model:
    """The model without its name."""
    return replace(model, name="-")


@cache  # a pool asks for thousands of problems, and reading YAML is slow
def _device(name: str) -> Mapping[str, Any]:
    return preset("device", name)


@cache
def _model(name: str) -> Model:
    return model_from_config(preset("model", name))


@cache
def _settings() -> dict[str, Any]:
    return preset("problem", "default")
