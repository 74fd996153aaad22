"""Drawn traces have the distributions they are asked for; traces of others become ours, or one line says why not."""

import itertools
import json
import math
import statistics

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from haap_rl.faults.model import Component
from haap_rl.faults.traces import Change, draw, read_bamboo, read_sailor, read_trace
from haap_rl.problem.cluster import Cluster
from haap_rl.problem.errors import InputError
from tests.builders import group
from tests.faults.scripted import device

TWO_GROUPS = Cluster(
    "two", (group("fast", nodes=1, per_node=2), group("slow", nodes=2, per_node=1))
)  # 3 nodes, 4 devices
BAMBOO = "0,add,node1\n0,add,node2\n0,add,node3\n1500,remove,node2\n4000,add,node4\n9000,remove,node1\n"
SAILOR = [{"Time": 0, "GPUs": 4}, {"Time": 63, "GPUs": 4}, {"Time": 126.0, "GPUs": 2}, {"Time": 189, "GPUs": 3}]


def bamboo(tmp_path, text):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def sailor(tmp_path, entries):
    path = tmp_path / "trace.json"
    path.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    return path


# ------------------------------------------------------------------------------------------- at random
def test_equal_seeds_give_equal_traces():
    mine = [device(i) for i in range(5)]
    one, same, other = (draw(mine, 1e6, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert one == same != other


def test_one_more_component_changes_no_other():
    mine = [device(i) for i in range(3)]
    few = draw(mine, 1e6, np.random.default_rng(0), stationary=True)
    more = draw([*mine, device(3)], 1e6, np.random.default_rng(0), stationary=True)
    assert few.changes == tuple(change for change in more.changes if change.component < 3)
    assert few.down_at_start == more.down_at_start - {3}


def test_a_longer_horizon_continues_a_trace():
    short, long = (draw([device()], horizon_s, np.random.default_rng(0)).changes for horizon_s in (1e5, 1e7))
    assert len(short) > 5
    assert short == long[: len(short)]


@pytest.mark.parametrize("stationary", [False, True])
def test_components_fail_and_return_by_turns_in_order_of_time(stationary):
    trace = draw([device(i, mtbf_s=2e3) for i in range(6)], 1e5, np.random.default_rng(0), stationary)
    assert list(trace.changes) == sorted(trace.changes)
    assert all(0 < change.time_s < 1e5 for change in trace.changes)
    for i in range(6):
        turns = [change.is_failure for change in trace.changes if change.component == i]
        assert turns[0] == (i not in trace.down_at_start)
        assert all(a != b for a, b in itertools.pairwise(turns))
    assert stationary == bool(trace.down_at_start)


def durations(component, count=20_000):
    """Times in service and times down of one long trace."""
    changes = draw([component], count * (component.mtbf_s + component.recovery_s), np.random.default_rng(0)).changes
    steps = np.diff([0.0, *(change.time_s for change in changes)])
    return steps[0::2], steps[1::2]


@pytest.mark.parametrize("shape", [0.7, 1.0, 2.0])
def test_times_in_service_are_weibull_with_the_component_s_mean(shape):
    up, down = durations(device(mtbf_s=100.0, recovery_s=7.0, shape=shape))
    relative_variance = math.gamma(1 + 2 / shape) / math.gamma(1 + 1 / shape) ** 2 - 1
    assert up.mean() == pytest.approx(100, rel=4 * math.sqrt(relative_variance / len(up)))
    assert up.var() / up.mean() ** 2 == pytest.approx(relative_variance, rel=0.1)
    assert down.mean() == pytest.approx(7, rel=4 / math.sqrt(len(down)))
    assert down.std() == pytest.approx(7, rel=0.05)


def test_a_fixed_recovery_is_fixed():
    _, down = durations(device(mtbf_s=100.0, recovery_s=7.0, fixed_recovery=True), 500)
    assert down == pytest.approx(np.full(len(down), 7.0), abs=1e-6)


@pytest.mark.parametrize(
    "kind", [{}, {"shape": 0.6}, {"shape": 2.0, "fixed_recovery": True}], ids=["exponential", "weibull", "fixed"]
)
def test_a_stationary_trace_is_at_its_long_run_average_from_the_start(kind):
    many = [device(i, mtbf_s=100.0, recovery_s=50.0, **kind) for i in range(3000)]
    trace = draw(many, 40.0, np.random.default_rng(5), stationary=True)
    down, at = len(trace.down_at_start), {}
    for change in trace.changes:
        down += 1 if change.is_failure else -1
        at[int(change.time_s / 10)] = down
    for share in (len(trace.down_at_start) / 3000, *(value / 3000 for value in at.values())):
        assert share == pytest.approx(1 / 3, abs=4 * math.sqrt(2 / 9 / 3000))


def test_all_are_up_at_the_start_unless_asked():
    assert not draw([device(i, mtbf_s=1.0) for i in range(50)], 1e3, np.random.default_rng(0)).down_at_start


def test_a_trace_of_too_many_changes_is_refused():
    with pytest.raises(InputError, match=r"2e\+08 changes are to be expected in .* hours"):
        draw([device(mtbf_s=9.0, recovery_s=1.0)], 1e9, np.random.default_rng(0))


# --------------------------------------------------------------------------------------------- Bamboo's
def test_bamboo_s_trace_by_hand(tmp_path):
    trace = read_bamboo(bamboo(tmp_path, BAMBOO), TWO_GROUPS)
    assert [(c.domain, c.group, c.first_device, c.num_devices) for c in trace.components] == [
        ("node", 0, 0, 2),
        ("node", 1, 0, 1),
        ("node", 1, 1, 1),
    ]
    # node4 is a new instance and takes the node that node2 left
    assert trace.changes == (Change(1.5, 1, True), Change(4.0, 1, False), Change(9.0, 0, True))
    assert (trace.horizon_s, trace.down_at_start) == (9.0, frozenset())


def test_nodes_that_nobody_adds_at_the_start_are_down(tmp_path):
    trace = read_bamboo(bamboo(tmp_path, "0,add,a\n7000,add,b\n"), TWO_GROUPS)
    assert trace.down_at_start == {1, 2}
    assert trace.changes == (Change(7.0, 1, False),)


def test_pooled_rates_are_those_of_the_trace(tmp_path):
    trace = read_trace(bamboo(tmp_path, BAMBOO), TWO_GROUPS, horizon_s=10.0)
    # node 0 is down from 9 to 10, node 1 from 1.5 to 4: 3.5 s down, 26.5 s up, 2 failures
    assert {(c.mtbf_s, c.recovery_s) for c in trace.components} == {(13.25, 1.75)}
    assert (trace.horizon_s, len(trace.changes)) == (10.0, 3)
    cut = read_trace(bamboo(tmp_path, BAMBOO), TWO_GROUPS, horizon_s=2.0)
    assert cut.changes == (Change(1.5, 1, True),)
    assert {(c.mtbf_s, c.recovery_s) for c in cut.components} == {(5.5, 0.5)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no line; write lines like '0,add,node1'"),
        ("0,add,a\n0,add\n", "line 2 '0,add' is not 'milliseconds,add|remove,node'"),
        ("0,add,a\n5,drop,a\n", "line 2 '5,drop,a' is not"),
        ("0,add,\n", "line 1 '0,add,' is not"),
        ("timestamp,count\n", "line 1 'timestamp,count' is not"),
        ("0,add,a\n-5,remove,a\n", "line 2: milliseconds='-5' must be a whole number"),
        ("0,add,a\n1e3,remove,a\n", "line 2: milliseconds='1e3' must be a whole number"),
        ("0,add,a\n" + "9" * 400 + ",remove,a\n", "line 2: milliseconds='999"),
        ("0,add,a\n9,remove,a\n8,add,b\n", "line 3: 8 ms comes after 9 ms; sort the lines"),
        ("0,add,a\n5,add,a\n", "line 2: add of node 'a', which is there already"),
        ("0,add,a\n5,remove,b\n", "line 2: remove of node 'b', which is not there"),
        ("0,add,a\n0,add,b\n0,add,c\n1,add,d\n", "line 4: 4 nodes are there, but cluster 'two' has 3"),
        ("0,add,a\n", "all of it is at time 0; a trace must last"),
    ],
)
def test_a_bad_bamboo_trace_is_named_by_its_line(tmp_path, text, said):
    with pytest.raises(InputError) as error:
        read_bamboo(bamboo(tmp_path, text), TWO_GROUPS)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


# --------------------------------------------------------------------------------------------- Sailor's
def test_sailor_s_trace_by_hand(tmp_path):
    trace = read_sailor(sailor(tmp_path, [*SAILOR, {"Time": 300, "GPUs": 3}]), TWO_GROUPS)
    assert [(c.domain, c.group, c.first_device) for c in trace.components] == [
        ("device", 0, 0),
        ("device", 0, 1),
        ("device", 1, 0),
        ("device", 1, 1),
    ]
    # the first so many are there
    assert trace.changes == (Change(126.0, 2, True), Change(126.0, 3, True), Change(189.0, 2, False))
    assert (trace.horizon_s, trace.down_at_start) == (300.0, frozenset())


def test_a_static_trace_has_no_failures(tmp_path):
    trace = read_trace(sailor(tmp_path, [{"Time": 0, "GPUs": 2}, {"Time": 1_000_000_000, "GPUs": 2}]), TWO_GROUPS)
    assert (trace.changes, trace.down_at_start) == ((), frozenset({2, 3}))
    assert all(c.unavailability == 0 and c.failure_rate == 0 for c in trace.components)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ("", "is not JSON"),
        ("{}", "not a list like"),
        ("[]", "not a list like"),
        ([1], "entry 0: 1 must be an object like"),
        ([{"Time": 0}], "entry 0: key 'GPUs' is missing"),
        ([{"Time": 0, "GPUs": 1, "GPU": 2}], "entry 0: unknown key 'GPU'; did you mean 'GPUs'?"),
        ([{"Time": 5, "GPUs": 1}], "entry 0: Time=5 must be 0 in the first entry"),
        ([*SAILOR, {"Time": 10, "GPUs": 1}], "entry 4: Time=10 does not come after 189; sort"),
        ([*SAILOR, {"Time": 189, "GPUs": 1}], "entry 4: Time=189 does not come after 189"),
        ([{"Time": 0, "GPUs": 5}], "entry 0: GPUs=5, but cluster 'two' has 4 devices"),
        ([{"Time": 0, "GPUs": -1}], "entry 0: GPUs=-1 must be a whole number from 0"),
        ([{"Time": 0, "GPUs": 2.0}], "entry 0: GPUs=2.0 must be"),
        ([{"Time": 0, "GPUs": True}], "entry 0: GPUs=True must be"),
        ('[{"Time": 0, "GPUs": 1}, {"Time": NaN, "GPUs": 1}]', "entry 1: Time=nan must be seconds"),
        ('[{"Time": 0, "GPUs": 1}, {"Time": 1e400, "GPUs": 1}]', "entry 1: Time=inf must be seconds"),
        ([{"Time": 0, "GPUs": 1}], "all of it is at time 0; a trace must last"),
    ],
)
def test_a_bad_sailor_trace_is_named_by_its_entry(tmp_path, entries, said):
    with pytest.raises(InputError) as error:
        read_sailor(sailor(tmp_path, entries), TWO_GROUPS)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", ["trace.txt", "trace", 3, None, "", "missing.csv", "missing.json"])
def test_a_file_of_no_known_kind_is_refused(path):
    with pytest.raises(InputError):
        read_trace(path, TWO_GROUPS)


PIECES = [
    b"",
    b"0",
    b"-1",
    b"1e999",
    b"NaN",
    b"9" * 400,
    b",",
    b"\n",
    b"\r\n",
    b"\x00",
    b"\xff",
    b'"',
    b"[",
    b"{",
    b"add",
    b"remove",
]


@st.composite
def mutated(draw_, seed):
    data = bytearray(seed)
    for _ in range(draw_(st.integers(1, 4))):
        start = draw_(st.integers(0, len(data)))
        data[start : start + draw_(st.integers(0, 6))] = draw_(st.sampled_from(PIECES))
    return bytes(data)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
@pytest.mark.parametrize(
    ("suffix", "seed"), [(".csv", BAMBOO.encode()), (".json", json.dumps(SAILOR).encode())], ids=["bamboo", "sailor"]
)
def test_whatever_a_file_holds_it_is_a_trace_or_one_line(tmp_path, suffix, seed, data):
    path = tmp_path / f"fuzz{suffix}"
    path.write_bytes(data.draw(mutated(seed)))
    said, trace = "", None
    try:
        trace = read_trace(path, TWO_GROUPS)
    except InputError as error:
        said = str(error)
    assert "\n" not in said
    if trace is not None:
        up = set(range(len(trace.components))) - trace.down_at_start
        for change in trace.changes:
            assert 0 < change.time_s < trace.horizon_s
            assert change.is_failure == (change.component in up)
            (up.remove if change.is_failure else up.add)(change.component)


def test_the_mean_number_down_is_little_s():
    mine = [Component("device", 0, i, 1, mtbf_s=900.0, recovery_s=100.0) for i in range(20)]
    averages = []
    for rng in np.random.default_rng(1).spawn(50):
        trace = draw(mine, 1e4, rng, stationary=True)
        since, down, area = 0.0, len(trace.down_at_start), 0.0
        for change in (*trace.changes, Change(trace.horizon_s, 0, False)):
            area += down * (change.time_s - since)
            since, down = change.time_s, down + (1 if change.is_failure else -1)
        averages.append(area / trace.horizon_s)
    assert statistics.fmean(averages) == pytest.approx(2.0, abs=3 * statistics.stdev(averages) / math.sqrt(50))
