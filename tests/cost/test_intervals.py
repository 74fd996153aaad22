"""What is said about how wrong an estimate may be: classes, intervals, and where they are shown."""

import dataclasses
import json
import math

import pytest

from haap_rl import estimate as command
from haap_rl.cost.calibration import DEFAULT, architecture_name, interval_class, load, parameters
from haap_rl.cost.estimator import Estimator
from haap_rl.problem.cluster import Cluster, DeviceType, Link
from haap_rl.problem.errors import InputError
from haap_rl.problem.plan import Plan, ReplicaGroup, Stage
from haap_rl.report.tables import plan_lines, summary_lines
from haap_rl.search.base import Budget, load_searcher, run_search
from haap_rl.space.options import SpaceSpec
from haap_rl.tracking.record import result_to_json
from tests.builders import PLAIN, group, plan, problem, room, stage

KNOWN = dataclasses.replace(PLAIN, intervals=(("ampere node", 0.1), ("node", 0.2), ("rdma", 0.3), ("all", 0.5)))


def cluster(inter_gb, between_gb=None):
    groups = tuple(group(name, nodes=2, per_node=4, inter_gb=inter_gb, memory_gb=room(40)) for name in ("a100", "v100"))
    target = problem(groups)
    if between_gb is not None:
        link = Link(1e-5, between_gb * 1e9)
        target = dataclasses.replace(target, cluster=Cluster("linked", groups, (("a100", "v100", link),)))
    return target


NODE = plan(stage(3, "a100", 2, 1, 1), stage(3, "a100", 2, 1, 1))
NODES = plan(stage(3, "a100", 2, 2, 1), stage(3, "a100", 2, 2, 1), m=4)
TWO_KINDS = plan(stage(3, "a100", 2, 1, 1), stage(3, "v100", 2, 1, 1))
MIXED_STAGE = Plan((Stage(6, (ReplicaGroup("a100", 1, 1, 1), ReplicaGroup("v100", 1, 1, 1))),), 4)


@pytest.mark.parametrize(
    ("target", "candidate", "narrow"),
    [
        (cluster(25), NODE, "ampere node"),
        (cluster(1), NODE, "ampere node"),  # the network is not used
        (cluster(25), NODES, "ampere rdma"),
        (cluster(12), NODES, "ampere rdma"),
        (cluster(6), NODES, "ampere ethernet"),
        (cluster(1), NODES, "ampere ethernet"),
        (cluster(25), TWO_KINDS, "mixed rdma"),
        (cluster(25, between_gb=1), TWO_KINDS, "mixed ethernet"),
        (cluster(25), MIXED_STAGE, "mixed rdma"),
        (problem(), plan(stage(6, "fast", 4)), "other node"),
    ],
)
def test_the_class_of_a_plan_is_its_devices_and_its_slowest_network(target, candidate, narrow):
    assert interval_class(target, candidate) == (narrow, narrow.split()[1])


def test_the_narrowest_class_that_is_known_counts():
    widths = [Estimator(cluster(25), calibration=KNOWN)(one).half_width for one in (NODE, NODES)]
    assert widths == [0.1, 0.3]
    # of a device that no run exists of, no network's class says anything
    assert Estimator(problem(), calibration=KNOWN)(plan(stage(6, "fast"))).half_width == 0.5
    assert Estimator(cluster(1), calibration=KNOWN)(NODES).half_width == 0.5
    some = dataclasses.replace(PLAIN, intervals=(("rdma", 0.3),))
    assert Estimator(cluster(1), calibration=some)(NODES).half_width is None


def test_the_interval_contains_the_estimate_and_is_none_where_nothing_is_known():
    known, plain = (Estimator(cluster(25), calibration=constants)(NODES) for constants in (KNOWN, PLAIN))
    low, high = known.interval_s
    assert low < known.iteration_s < high
    assert high / known.iteration_s == pytest.approx(math.exp(0.3))
    assert known.iteration_s / low == pytest.approx(math.exp(0.3))
    assert plain.half_width is plain.interval_s is None
    assert dataclasses.replace(known, half_width=None) == plain  # it changes nothing else


def test_tables_say_it_where_it_is_known():
    known, plain = (Estimator(cluster(25), calibration=constants)(NODES) for constants in (KNOWN, PLAIN))
    low, high = known.interval_s
    wanted = f"iteration {known.iteration_s:.3f} s (90 % interval {low:.3f}-{high:.3f} s), "
    assert plan_lines(known, 0.0)[0].startswith(wanted)
    assert plan_lines(plain, 0.0)[0].startswith(f"iteration {plain.iteration_s:.3f} s, ")


def test_a_search_keeps_it_for_its_summary_and_record():
    result = run_search(load_searcher("random"), cluster(25), Budget(3), space=SpaceSpec(num_microbatches=(4,)))
    for half_width in (0.25, None):
        known = dataclasses.replace(result, estimate=dataclasses.replace(result.estimate, half_width=half_width))
        record = result_to_json({"search": {"name": "random"}, "space": {}}, cluster(25), known)
        ends = [record["iteration_time_low_s"], record["iteration_time_high_s"]]
        assert ends == (list(known.estimate.interval_s) if half_width else [None, None])
        assert ("90 % interval" in summary_lines(known)[0]) == (half_width is not None)
    nothing = dataclasses.replace(result, estimate=None, plan=None)
    record = result_to_json({"search": {"name": "random"}, "space": {}}, cluster(25), nothing)
    assert record["iteration_time_low_s"] is record["iteration_time_high_s"] is None


@pytest.mark.parametrize("known", [True, False])
def test_the_estimate_command_prints_and_writes_it(tmp_path, monkeypatch, capsys, known):
    constants = dataclasses.replace(DEFAULT, intervals=(("all", 0.25),) if known else ())
    monkeypatch.setattr(
        command, "Estimator", lambda *given, **named: Estimator(*given, **{"calibration": constants, **named})
    )
    monkeypatch.chdir(tmp_path)
    assert command.main(["tp=2", "pp=3", "dp=4", "microbatch=1", "recompute=full", "out=out"]) == 0
    written = json.loads((tmp_path / "out" / "estimate.json").read_text())
    ends = (written["iteration_time_low_s"], written["iteration_time_high_s"])
    factor = math.exp(0.25)
    seconds = written["iteration_time_s"]
    assert ends == (pytest.approx((seconds / factor, seconds * factor)) if known else (None, None))
    assert ("90 % interval" in capsys.readouterr().out) == known


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("a100_80", "ampere"), ("a10g", "ampere"), ("rtx_3090", "ampere"), ("h20_96", "hopper"), ("gh200_96", "hopper"),
        ("ascend910", "other"), ("habana_gaudi", "other"), ("b200", "other"), ("t4", "turing"), ("v100_16", "volta"),
    ],
)  # fmt: skip
def test_a_device_is_of_the_generation_its_name_says_and_else_of_none(name, architecture):
    assert architecture_name(DeviceType(name, (("fp16", 1e14),), 10**10, 1e12)) == architecture


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ampere.gemm_efficiency", 0, "must be a finite number above 0"),
        ("ampere.gemm_efficiency", 50, "must be between 0 and 1"),
        ("ethernet.contention", 1, "leaves no bandwidth"),
        ("megatron.send_blocking", 3, "must be between 0 and 1"),
        ("collective_s", -1, "must be a finite number above 0"),
        ("collective_s", True, "must be a finite number above 0"),
    ],
)
def test_constants_that_cannot_be_are_refused(tmp_path, name, value, words):
    file = tmp_path / "constants.json"
    constants = {**parameters(DEFAULT), name: value}
    file.write_text(json.dumps({"schema": "haap_rl.calibration/1", "constants": constants, "intervals": {}}))
    with pytest.raises(InputError, match=words):
        load(file)


def test_an_interval_beyond_reason_is_refused(tmp_path):
    file = tmp_path / "constants.json"
    data = {"schema": "haap_rl.calibration/1", "constants": parameters(DEFAULT), "intervals": {"all": 1e6}}
    file.write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"intervals\.all"):
        load(file)
