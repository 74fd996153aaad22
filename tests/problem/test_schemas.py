"""The shipped JSON Schemas accept every preset and written plan, and refuse what the readers refuse."""

import copy
import json
from pathlib import Path

import jsonschema
import pytest

import haap_rl.problem
from haap_rl.problem.plan import Plan, ReplicaGroup, Stage
from haap_rl.problem.presets import load_problem, names, preset

SCHEMAS = Path(haap_rl.problem.__file__).parent / "schemas"


def validator(name):
    schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def written_plan():
    """A plan as a run writes it: two stages on the default case."""
    problem = load_problem()
    stages = (Stage(17, (ReplicaGroup("a100", 8, 1, 2),)), Stage(17, (ReplicaGroup("v100", 8, 2, 1),)))
    plan = Plan(stages, 64)
    problem.validate(plan)
    return json.loads(json.dumps(problem.plan_to_json(plan)))


@pytest.mark.parametrize("group", ["model", "cluster"])
def test_every_preset_is_valid(group):
    for name in names(group):
        validator(group).validate(preset(group, name))


def test_every_device_is_valid_inside_a_cluster():
    cluster = preset("cluster", "a100x8")
    for name in names("device"):
        cluster["groups"][0]["device"] = preset("device", name)
        validator("cluster").validate(cluster)


def test_a_written_plan_is_valid():
    validator("plan").validate(written_plan())
    for zero_stage in range(4):
        validator("plan").validate({**written_plan(), "zero_stage": zero_stage, "virtual_stages": 4})


@pytest.mark.parametrize(
    ("group", "path", "value"),
    [
        ("model", ("hidden",), 0),
        ("model", ("hidden",), 1.5),
        ("model", ("biases",), "no"),
        ("model", ("norm",), "batchnorm"),
        ("model", ("experts",), 8),
        ("cluster", ("groups",), []),
        ("cluster", ("groups", 0, "num_nodes"), -1),
        ("cluster", ("groups", 0, "device"), {"name": "x"}),
        ("cluster", ("groups", 0, "inter_node"), {"latency_us": 1}),
        ("cluster", ("links",), [{"between": ["a"], "latency_us": 1, "bandwidth_gb_per_s": 1}]),
        ("plan", ("schema",), "haap_rl.plan/0"),
        ("plan", ("stages",), []),
        ("plan", ("stages", 0, "recompute", "mode"), "some"),
        ("plan", ("stages", 0, "replicas", 0, "tp"), 0),
        ("plan", ("zero_stage",), 4),
        ("plan", ("zero_stage",), -1),
        ("plan", ("virtual_stages",), 0),
        ("plan", ("virtual_stages",), 1.5),
        ("cluster", ("groups", 0, "nics_per_node"), 0),
        ("plan", ("comment",), "x"),
    ],
)
def test_a_wrong_file_is_refused(group, path, value):
    good = {"model": preset("model", "llama3_8b"), "cluster": preset("cluster", "a100x8"), "plan": written_plan()}
    data = copy.deepcopy(good[group])
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert not validator(group).is_valid(data)


@pytest.mark.parametrize("group", ["model", "cluster", "plan"])
def test_no_required_key_can_be_left_out(group):
    data = {"model": preset("model", "llama3_8b"), "cluster": preset("cluster", "a100x8"), "plan": written_plan()}[
        group
    ]
    for key in data:
        if key not in ("source", "links"):
            assert not validator(group).is_valid({k: v for k, v in data.items() if k != key}), key
