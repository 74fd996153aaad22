"""FlagScale: meshes by hand, its legality rules, what degrades and what is refused."""

from dataclasses import replace

import pytest
import yaml

from haap_rl.cost.estimator import Estimator
from haap_rl.export.flagscale import files, meshes_of, read
from haap_rl.export.targets import export_plan
from haap_rl.problem.errors import InputError
from tests.builders import group, plan, problem, stage


def sample(**changes):
    """Three stages on two meshes: tp 2 x dp 2 on the fast devices, tp 1 x dp 2 on the slow ones."""
    target = problem(model_changes={"num_layers": 8, **changes}, global_batch_size=32)
    one = plan(
        stage(4, "fast", 2, 2, 2, "full", 2), stage(4, "slow", 1, 2, 2), stage(2, "slow", 1, 2, 2, "full", 1), m=8
    )
    return target, one


def test_stages_of_one_group_tp_and_dp_are_one_mesh():
    target, one = sample()
    assert [(name, tuple(mesh)) for name, mesh in meshes_of(one)] == [
        ("fast", (2, 1, 1, 2, 1)),
        ("slow", (1, 1, 1, 2, 2)),
    ]
    config = yaml.safe_load(files(target, one)["train.yaml"])
    hetero = config["system"]["hetero"]
    assert hetero["hetero_process_meshes"] == [2, 1, 1, 2, 1, 1, 1, 1, 2, 2]
    assert hetero["hetero_pipeline_layer_split"] == [3, 4, 1]
    assert hetero["hetero_device_types"] == ["fast_device", "slow_device"]
    assert config["system"]["recompute_num_layers_per_stage_micro_batch"] == [[1, 8, 2], [1, 8, 0], [1, 8, 1]]
    assert config["system"]["recompute_granularity_per_stage_micro_batch"] == [[1, 8, 1], [1, 8, 0], [1, 8, 1]]
    assert config["model"]["micro_batch_size"] == 2


def test_the_hostfile_names_the_device_type_of_each_host():
    target, one = sample()
    assert files(target, one)["hostfile"] == "fast-0 slots=4 type=fast_device\nslow-0 slots=4 type=slow_device\n"


def test_a_type_that_comes_back_behind_another_has_a_name_of_its_own():
    target = problem((group("fast", nodes=2), group("slow")), {"num_layers": 8}, global_batch_size=32)
    one = plan(stage(4, "fast", 4, 1, 4), stage(2, "slow", 4, 1, 4), stage(4, "fast", 4, 1, 4), m=8)
    written = files(target, one)
    assert yaml.safe_load(written["train.yaml"])["system"]["hetero"]["hetero_device_types"] == [
        "fast_device",
        "slow_device",
        "fast_device.2",
    ]
    assert "fast-1 slots=4 type=fast_device.2" in written["hostfile"]
    assert read(target, written) == one
    back = {**written, "train.yaml": written["train.yaml"].replace("fast_device.2", "fast_device")}
    with pytest.raises(InputError, match="none may come back"):
        read(target, back)


def test_a_plan_with_tp_dp_and_recomputation_per_stage_is_exact():
    target, one = sample()
    result = export_plan(target, one, "flagscale", Estimator(target))
    assert result.exact
    assert read(target, result.files) == one


def test_different_dp_keeps_the_samples_of_a_micro_batch():
    target = problem(model_changes={"num_layers": 8}, global_batch_size=32)
    one = plan(stage(5, "fast", 1, 4, 1), stage(5, "slow", 2, 2, 2), m=8)
    result = export_plan(target, one, "flagscale", Estimator(target))
    assert result.exact
    assert yaml.safe_load(result.files["train.yaml"])["model"]["micro_batch_size"] == 1


def test_interleaved_stages_become_plain_ones_at_their_price():
    target = problem(model_changes={"num_layers": 8}, global_batch_size=32)
    one = plan(stage(5, "fast", 1, 1, 4), stage(5, "slow", 1, 1, 4), virtual_stages=2)
    result = export_plan(target, one, "flagscale", Estimator(target))
    assert [(loss.field, loss.plan_value, loss.written_value) for loss in result.losses] == [
        ("virtual_stages", "2", "1")
    ]
    assert result.iteration_s == Estimator(target)(replace(one, virtual_stages=1)).iteration_s


def test_the_attention_core_of_some_stages_becomes_whole_layers_or_nothing():
    target, _ = sample()
    one = plan(stage(5, "fast", mode="selective", recomputed=4, size=4), stage(5, "slow", size=4))
    result = export_plan(target, one, "flagscale", Estimator(target))
    assert [loss.field for loss in result.losses] == ["stage 0 recompute"]
    everywhere = plan(
        stage(5, "fast", mode="selective", recomputed=4, size=4),
        stage(5, "slow", mode="selective", recomputed=4, size=4),
    )
    assert export_plan(target, everywhere, "flagscale", Estimator(target)).exact


def test_meshes_of_different_tp_are_given_sequence_parallelism():
    target, one = sample()
    result = export_plan(target, replace(one, sequence_parallel=False), "flagscale", Estimator(target))
    assert [loss.field for loss in result.losses] == ["sequence_parallel"]


@pytest.mark.parametrize(
    ("one", "changes", "message"),
    [
        (plan(stage(1, "fast", size=4), stage(9, "slow", size=4)), {}, "stage 0 num_units=1 .* counts layers"),
        (
            plan(stage(5, "fast", 2, 1, 4), stage(5, "slow", 1, 1, 4)),
            {"tied_embeddings": True},
            "tp 2 and 1: tied embeddings need one tp",
        ),
        (
            plan(stage(4, "fast", 1, 2, 2), stage(2, "slow", 1, 1, 4), stage(4, "fast", 1, 2, 2)),
            {},
            "fast-0: a hostfile names a host once",
        ),
    ],
)
def test_what_flagscale_cannot_do_is_refused_with_field_and_rule(one, changes, message):
    target, _ = sample(**changes)
    with pytest.raises(InputError, match=message):
        export_plan(target, one, "flagscale", Estimator(target))


def test_a_mixed_stage_without_room_on_one_group_is_refused():
    target = problem((group("fast", per_node=2), group("slow", per_node=2)), {"num_layers": 4}, global_batch_size=8)
    mixed = replace(stage(6, "fast"), replicas=(*stage(6, "fast", 2).replicas, *stage(6, "slow", 2).replicas))
    one = plan(mixed, m=4)
    result = export_plan(target, one, "flagscale", Estimator(target))  # half of the devices will do
    assert result.written.stages[0].replicas[0].num_devices == 2
    taken = plan(replace(mixed, num_units=3), stage(1, "fast", 1, 1, 2), stage(2, "slow", 1, 1, 2), m=4)
    narrow = (group("fast", per_node=3), group("slow", per_node=3))
    crowded = problem(narrow, {"num_layers": 4}, global_batch_size=8)
    assert export_plan(crowded, taken, "flagscale", Estimator(crowded)).losses


def changed(*path, to):
    """A corruption: another value at a place of train.yaml; None takes it away."""

    def corrupt(written):
        config = yaml.safe_load(written["train.yaml"])
        part = config
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = to
        return {**written, "train.yaml": yaml.safe_dump(config)}

    return corrupt


HETERO = ("system", "hetero")
MESHES = (*HETERO, "hetero_process_meshes")
CORRUPTIONS = {
    "four numbers for a mesh": (changed(*MESHES, to=[2, 1, 2, 1, 1, 1, 2, 2]), "five numbers"),
    "pp of meshes": (changed(*MESHES, to=[2, 1, 1, 2, 1, 1, 1, 1, 2, 1]), "must add up to 3 stages"),
    "pipeline size": (changed("system", "pipeline_model_parallel_size", to=4), "add up to 4 stages"),
    "a layer split too short": (changed(*HETERO, "hetero_pipeline_layer_split", to=[4, 4]), "each of the 3 stages"),
    "a layer lost": (changed(*HETERO, "hetero_pipeline_layer_split", to=[3, 3, 1]), "add up to num_layers=8"),
    "dp that does not divide": (changed(*MESHES, to=[2, 1, 1, 2, 1, 1, 1, 1, 3, 2]), "dp 3: it must divide dp_0"),
    "expert parallelism": (changed(*MESHES, to=[2, 1, 2, 2, 1, 1, 1, 1, 2, 2]), "cp 1, ep 2"),
    "context parallelism": (changed(*MESHES, to=[2, 2, 1, 2, 1, 1, 1, 1, 2, 2]), "cp 2, ep 1"),
    "virtual stages": (changed("system", "num_layers_per_virtual_pipeline_stage", to=1), "no virtual stages"),
    "a type too few": (changed(*HETERO, "hetero_device_types", to=["fast_device"]), "each of the 2 meshes"),
    "types exchanged": (
        changed(*HETERO, "hetero_device_types", to=["slow_device", "fast_device"]),
        "of these hosts they are",
    ),
    "an unknown current type": (changed(*HETERO, "hetero_current_device_type", to="h100"), "it is one of the types"),
    "no sequence parallelism": (changed("system", "sequence_parallel", to=False), "meshes of different tp need it"),
    "a standalone embedding": (changed(*HETERO, "standalone_embedding_stage", to=True), "meshes exclude it"),
    "tied embeddings": (changed("model", "untie_embeddings_and_output_weights", to=False), "says the opposite"),
    "rows without granularity": (
        changed("system", "recompute_granularity", to="selective"),
        "rows per stage need full",
    ),
    "a row too few": (changed("system", "recompute_method_per_stage_micro_batch", to=[[1, 8, 1]]), "each of the 3"),
    "a row of other micro-batches": (
        changed("system", "recompute_method_per_stage_micro_batch", to=[[1, 8, 1], [1, 4, 1], [1, 8, 1]]),
        "a row is [1, 8, value]",
    ),
    "more recomputed than there is": (
        changed("system", "recompute_num_layers_per_stage_micro_batch", to=[[1, 8, 4], [1, 8, 0], [1, 8, 1]]),
        "stage 0 cannot do it",
    ),
    "another batch": (changed("model", "global_batch_size", to=24), "the problem has 32"),
    "words for numbers": (changed("model", "micro_batch_size", to="two"), "at least 1"),
    "no meshes": (changed("system", "hetero", to=None), "must be a mapping"),
    "no YAML": (lambda w: {**w, "train.yaml": "a: [b"}, "it is not YAML"),
    "fewer hosts": (lambda w: {**w, "hostfile": w["hostfile"].splitlines()[0] + "\n"}, "the meshes need 8"),
}


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_a_corrupted_export_is_refused_in_one_line_with_field_and_rule(kind):
    corrupt, message = CORRUPTIONS[kind]
    target, one = sample()
    written = files(target, one)
    assert read(target, written) == one
    with pytest.raises(InputError) as error:
        read(target, corrupt(written))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_tied_embeddings_on_meshes_of_different_dp_are_reduced_in_part():
    target, _ = sample(tied_embeddings=True)
    one = plan(stage(5, "fast", 1, 4, 1), stage(5, "slow", 1, 2, 2), m=8)
    written = files(target, one)
    assert read(target, written) == one
    corrupt = changed(*HETERO, "use_partial_reduce_for_shared_embedding", to=False)
    with pytest.raises(InputError, match="use_partial_reduce_for_shared_embedding"):
        read(target, corrupt(written))
    uneven = plan(stage(5, "fast", 1, 3, 1), stage(5, "slow", 1, 2, 1), m=8)
    six = replace(target, global_batch_size=48)
    uneven = replace(uneven, stages=(stage(5, "fast", 1, 3, 2), stage(5, "slow", 1, 2, 3)))
    with pytest.raises(InputError, match="to be multiples"):
        export_plan(six, uneven, "flagscale", Estimator(six))
