"""The rank table: every process once, where `problem.placement` puts it, in the order that trainers number them."""

import csv
import io

import pytest

from haap_rl.export.ranks import Launch, hostfile, launches, rank_table, ranks_csv, read_hosts
from haap_rl.problem.cluster import Cluster
from haap_rl.problem.errors import InputError
from haap_rl.problem.placement import place
from tests.builders import group, plan, problem, stage
from tests.export.plans import any_plans


def test_every_process_has_a_device_of_its_own_and_sits_where_placement_says():
    for target, one in any_plans(60, seed=5):
        table = rank_table(target.cluster, one)
        assert [rank.rank for rank in table] == list(range(sum(r.num_devices for s in one.stages for r in s.replicas)))
        assert len({(rank.host, rank.device) for rank in table}) == len(table)
        assert [tuple(r[5:]) for r in table] == sorted(tuple(r[5:]) for r in table)  # stage, replica, tp index
        rest = list(table)
        for i, (a_stage, placed) in enumerate(zip(one.stages, place(target.cluster, one), strict=True)):
            for replica, where in zip(a_stage.replicas, placed, strict=True):
                mine, rest = rest[: replica.num_devices], rest[replica.num_devices :]
                assert {(r.stage, r.group) for r in mine} == {(i, replica.group)}
                assert len({r.node for r in mine}) == where.num_nodes
                assert min(r.node for r in mine) == where.first_node
                parts = [mine[k : k + replica.tp] for k in range(0, len(mine), replica.tp)]
                assert max(len({r.node for r in part}) for part in parts) == where.tp_nodes
                assert len({r.replica for r in mine}) == replica.dp
        assert not rest


def test_launches_number_the_processes_as_torchrun_does():
    for target, one in any_plans(60, seed=6):
        table = rank_table(target.cluster, one)
        numbered = [(run.host, device) for run in launches(table) for device in run.devices]
        assert numbered == [(rank.host, rank.device) for rank in table]


def test_a_host_whose_stages_are_not_neighbours_is_launched_twice():
    target = problem(model_changes={"num_layers": 6})
    one = plan(stage(2, "fast", tp=2), stage(3, "slow", tp=4), stage(3, "fast", tp=2))
    runs = launches(rank_table(target.cluster, one))
    assert runs == (Launch("fast-0", (0, 1)), Launch("slow-0", (0, 1, 2, 3)), Launch("fast-0", (2, 3)))
    assert hostfile(runs) == "fast-0 slots=2\nslow-0 slots=4\nfast-0 slots=2\n"


def test_the_table_as_csv_by_hand():
    target = problem()
    table = rank_table(target.cluster, plan(stage(3, "slow", tp=2), stage(3, "fast", dp=2)))
    rows = list(csv.reader(io.StringIO(ranks_csv(table))))
    assert rows[0] == ["rank", "host", "group", "node", "device", "stage", "replica", "tp_index"]
    assert rows[1:] == [
        ["0", "slow-0", "slow", "0", "0", "0", "0", "0"],
        ["1", "slow-0", "slow", "0", "1", "0", "0", "1"],
        ["2", "fast-0", "fast", "0", "0", "1", "0", "0"],
        ["3", "fast-0", "fast", "0", "1", "1", "1", "0"],
    ]


def test_groups_with_odd_names_have_hosts_with_plain_and_different_ones():
    cluster = Cluster("odd", (group("a b"), group("a-b"), group("a-b-g1"), group("a/b")))
    target = problem(cluster.groups, {"num_layers": 4})
    one = plan(*(stage(1 + (k in (0, 3)), g.name, tp=4) for k, g in enumerate(cluster.groups)))
    runs = launches(rank_table(target.cluster, one))
    assert len({run.host for run in runs}) == 4
    assert read_hosts(target.cluster, hostfile(runs), "hostfile") == [g.name for g in cluster.groups for _ in range(4)]


@pytest.mark.parametrize("line", ["fast-0", "fast-9 slots=1", "quick-0 slots=1", "fast-0 slots=9", "fast-0 slots=0"])
def test_a_line_of_a_hostfile_that_is_none_of_the_cluster_is_named(line):
    with pytest.raises(InputError, match="hostfile: line 2"):
        read_hosts(problem().cluster, f"fast-0 slots=1\n{line}\n", "hostfile")
