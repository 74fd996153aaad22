"""Legality with messages that help, placement, and plan files."""

import dataclasses
import json

import pytest

from haap_rl.problem.errors import InputError, PlanError
from haap_rl.problem.placement import place
from haap_rl.problem.plan import Plan, Recompute, ReplicaGroup, Stage
from tests.builders import group, plan, problem, stage

GOOD = plan(stage(3, "fast", 2, 1, 1, "full", 2), stage(3, "slow", 1, 1, 1))


def test_a_legal_plan_passes():
    problem().validate(GOOD)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (plan(), ["no stages"]),
        (plan(stage(3, "fast"), stage(2, "slow")), ["5 units", "has 6", "+1"]),
        (plan(stage(1, "fast"), *(stage(1, "slow") for _ in range(4)), stage(1, "fast")), ["6 stages", "4 layers"]),
        (plan(stage(6, "fast"), m=3), ["num_microbatches=3", "global_batch_size=8"]),
        (plan(stage(6, "fast"), m=0), ["num_microbatches=0"]),
        (plan(stage(6, "fast", size=2)), ["2 samples", "which has 1"]),
        (plan(stage(6, "gpu")), ["stage 0", "'gpu'", "fast, slow"]),
        (plan(stage(6, "fast", tp=8)), ["use 8 devices of group 'fast'", "has 4", "lower tp or dp"]),
        (plan(stage(6, "fast", tp=3)), ["tp=3", "heads=16"]),
        (plan(stage(3, "fast", dp=4, size=1), stage(3, "fast", dp=4, size=1), m=2), ["8 devices", "has 4"]),
        (plan(stage(6, "fast", tp=0)), ["tp=0", "at least 1"]),
        (plan(stage(6, "fast", mode="full", recomputed=5)), ["5 layers in a stage of 4"]),
        (plan(stage(6, "fast", mode="none", recomputed=1)), ["'none' of 1"]),
        (plan(stage(6, "fast", mode="half", recomputed=1)), ["'half'", "selective"]),
        (plan(Stage(6, ())), ["no replicas"]),
        (plan(stage(0, "fast"), stage(6, "slow")), ["num_units=0"]),
        (plan(stage(6, "fast"), zero_stage=4), ["zero_stage=4", "0, 1, 2 or 3"]),
        (plan(stage(6, "fast"), zero_stage=-1), ["zero_stage=-1", "0, 1, 2 or 3"]),
        (plan(stage(6, "fast"), zero_stage=True), ["zero_stage=True"]),
        (plan(stage(6, "fast"), virtual_stages=2), ["virtual_stages=2 with 1 stages", "or use 1"]),
        (plan(stage(3, "fast"), stage(3, "slow"), virtual_stages=0), ["virtual_stages=0"]),
        (plan(stage(3, "fast"), stage(3, "slow"), virtual_stages=True), ["virtual_stages=True"]),
        (
            plan(stage(3, "fast", size=8), stage(3, "slow", size=8), m=1, virtual_stages=2),
            ["num_microbatches=1", "no multiple of the 2 stages", "virtual_stages to 1"],
        ),
        (
            plan(stage(2, "fast"), stage(4, "slow"), virtual_stages=2),
            ["stage 0 holds 1 layers", "virtual_stages=2 does not divide"],
        ),
        (
            plan(stage(3, "fast", mode="full", recomputed=1), stage(3, "slow"), virtual_stages=2),
            ["stage 0", "1 of its 2 layers", "virtual_stages=2"],
        ),
    ],
)
def test_an_illegal_plan_is_refused_with_field_value_and_rule(bad, words):
    with pytest.raises(PlanError) as error:
        problem().validate(bad)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("zero_stage", range(4))
def test_every_zero_stage_is_legal(zero_stage):
    problem().validate(dataclasses.replace(GOOD, zero_stage=zero_stage))


def test_interleaved_stages_are_legal():
    problem().validate(plan(stage(3, "fast"), stage(3, "slow"), virtual_stages=2))
    with_recompute = plan(stage(3, "fast", mode="full", recomputed=2), stage(3, "slow"), virtual_stages=2)
    problem().validate(with_recompute)


def test_tensor_parallelism_may_straddle_nodes():
    target = problem((group("fast", nodes=2, per_node=4),))
    wide = plan(stage(6, "fast", tp=8))
    target.validate(wide)
    ((where,),) = place(target.cluster, wide)
    assert (where.num_nodes, where.tp_nodes) == (2, 2)


def test_stages_on_mixed_device_types_are_legal():
    mixed = Stage(6, (ReplicaGroup("fast", 1, 2, 3), ReplicaGroup("slow", 2, 1, 2)))
    problem().validate(Plan((mixed,), 1))


def test_larger_groups_are_placed_first_and_equal_ones_in_pipeline_order():
    target = problem((group("fast", nodes=2, per_node=4),))
    mixed_sizes = plan(
        stage(2, "fast", 1, 1, 8), stage(1, "fast", 4, 1, 8), stage(1, "fast", 1, 2, 4), stage(2, "fast", 1, 1, 8), m=1
    )
    placed = [replicas[0] for replicas in place(target.cluster, mixed_sizes)]
    assert [where.first_device for where in placed] == [6, 0, 4, 7]
    assert [where.first_node for where in placed] == [1, 0, 1, 1]
    assert all(where.num_nodes == where.tp_nodes == 1 for where in placed)


def test_placement_says_which_replicas_straddle_nodes():
    target = problem((group("fast", nodes=2, per_node=3),))
    both = plan(stage(3, "fast", 2, 1, 8), stage(3, "fast", 2, 1, 8), m=1)
    first, second = (replicas[0] for replicas in place(target.cluster, both))
    assert (first.num_nodes, first.tp_nodes) == (1, 1)
    assert (second.first_device, second.num_nodes, second.tp_nodes) == (2, 2, 2)


@pytest.mark.parametrize("zero_stage", range(4))
@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_plan_file_round_trip(tmp_path, zero_stage, virtual_stages):
    path = tmp_path / "plan.json"
    written = dataclasses.replace(GOOD, zero_stage=zero_stage, virtual_stages=virtual_stages)
    path.write_text(json.dumps(problem().plan_to_json(written)))
    assert problem().load_plan(path) == written


def test_plan_file_names_units_and_schema():
    data = problem().plan_to_json(GOOD)
    assert data["schema"] == "haap_rl.plan/1"
    assert data["stages"][0]["replicas"][0]["microbatch_size_samples"] == 1
    assert data["problem"]["seq_len_tokens"] == 512


def change(data, path, value):
    data = json.loads(json.dumps(data))
    place_ = data
    for key in path[:-1]:
        place_ = place_[key]
    if value is None:
        del place_[path[-1]]
    else:
        place_[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("schema",), "haap_rl.plan/9", ["haap_rl.plan/9", "haap_rl.plan/1"]),
        (("problem", "cluster", "groups", 0, "num_nodes"), 7, ["made for cluster", "search again"]),
        (("problem", "model", "hidden"), 4096, ["made for model"]),
        (("problem", "seq_len_tokens"), 4096, ["seq_len_tokens"]),
        (("stages",), {}, ["must be a list"]),
        (("stages", 0, "num_units"), -1, ["num_units=-1"]),
        (("stages", 0, "num_units"), 1e400, ["num_units=inf"]),
        (("stages", 0, "num_units"), 3.5, ["num_units=3.5"]),
        (("stages", 0, "replicas", 0, "tp"), True, ["tp=True"]),
        (("stages", 0, "replicas", 0, "tp"), None, ["'tp' is missing"]),
        (("stages", 0, "recompute"), [], ["must be a JSON object"]),
        (("num_microbatchez",), 3, ["'num_microbatchez'", "did you mean 'num_microbatches'"]),
        (("sequence_parallel",), "yes", ["sequence_parallel"]),
        (("zero_stage",), True, ["zero_stage=True"]),
        (("virtual_stages",), 0, ["virtual_stages=0"]),
    ],
)
def test_a_bad_plan_file_is_refused_with_key_value_and_rule(path, value, words, tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(change(problem().plan_to_json(GOOD), path, value)))
    with pytest.raises(InputError) as error:
        problem().load_plan(file)
    assert all(word in str(error.value) for word in [*words, "plan.json"]), str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"plan"', "\x00", "[" * 100_000])
def test_what_is_not_a_plan_is_refused(text, tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(InputError, match=r"plan\.json"):
        problem().load_plan(file)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        problem().load_plan(tmp_path / "none.json")


def test_a_plan_for_another_cluster_is_refused():
    other = problem((group("fast", nodes=2), group("slow")))
    with pytest.raises(InputError, match="made for cluster"):
        other.plan_from_json(problem().plan_to_json(GOOD))


def test_recompute_defaults_to_none():
    assert Stage(1, ()).recompute == Recompute("none", 0)
    assert dataclasses.replace(GOOD, zero_stage=0).zero_stage == 0
