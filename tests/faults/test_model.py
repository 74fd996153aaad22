"""Hazards become components with the frequencies that their sources publish; what cannot be is refused in one line."""

import math

import hydra
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from haap_rl.faults.model import (
    Component,
    failure_model_from_config,
    mean_down,
    mean_number_down,
    mttf_h,
    probability_any_down,
    probability_any_down_poisson,
)
from haap_rl.faults.traces import whole_cluster
from haap_rl.problem.cluster import Cluster
from haap_rl.problem.errors import InputError
from haap_rl.problem.presets import conf_dir, load_problem, names, preset
from tests.builders import group

V100X32 = load_problem(cluster="v100x32").cluster
TWO_GROUPS = Cluster("two", (group("fast", nodes=2, per_node=4), group("slow", nodes=3, per_node=2)))


def model(*hazards, **more):
    return failure_model_from_config({"name": "mine", "hazards": list(hazards), **more})


def components(*hazards, on=TWO_GROUPS, **more):
    return model(*hazards, **more).components(on)


@pytest.mark.parametrize(
    ("scenario", "down", "poisson", "independent"),
    [("low", 2, 0.865, 0.873), ("mid", 3, 0.950, 0.957), ("high", 4, 0.982, 0.986)],
)
def test_mecefo_s_scenarios_have_two_three_and_four_of_32_down(scenario, down, poisson, independent):
    found = failure_model_from_config(preset("faults", f"mecefo_{scenario}")).components(V100X32)
    assert len(found) == 32
    assert mean_down(found) == pytest.approx(down, rel=1e-12)
    assert probability_any_down_poisson(down) == pytest.approx(poisson, abs=5e-4)
    assert probability_any_down(found) == pytest.approx(independent, abs=5e-4)
    assert probability_any_down(found) == pytest.approx(1 - (1 - down / 32) ** 32, rel=1e-12)


def test_little_s_law():
    assert [mean_number_down(*pair) for pair in ((2, 4), (1, 3), (0.5, 2))] == [2, 3, 4]


def test_published_times_between_failures():
    assert mttf_h(2048, 6.50) == pytest.approx(1.80, abs=5e-3)
    assert mttf_h(16_384, 6.50) == pytest.approx(0.23, abs=5e-3)
    assert (round(mttf_h(1, 6.50)), round(mttf_h(1, 2.34))) == (3692, 10256)


def test_llama_3_s_interruptions_give_its_preset():
    (hazard,) = preset("faults", "llama3")["hazards"]
    assert hazard["per_1000_node_days"] == pytest.approx(1000 * 419 / (2048 * 54), rel=1e-5)
    assert mttf_h(2048, hazard["per_1000_node_days"]) == pytest.approx(54 * 24 / 419, rel=1e-5)
    assert mttf_h(2048, 3.7887) == pytest.approx(3.09, abs=5e-3)


def test_one_failure_per_interval_in_the_long_run_counting_the_time_down():
    found = components({"domain": "node", "cluster_interval_h": 2, "recovery_h": 3})
    assert len(found) == 5
    assert {c.mtbf_s + c.recovery_s for c in found} == {5 * 2 * 3600.0}
    assert mean_down(found) == pytest.approx(3 / 2)


def test_components_are_devices_nodes_and_groups_node_after_node():
    rate = {"mtbf_h": 1, "recovery_h": 1}
    found = components(*({"domain": domain, **rate} for domain in ("device", "node", "group")))
    places = [(c.domain, c.group, c.first_device, c.num_devices) for c in found]
    assert places == [
        *(("device", 0, i, 1) for i in range(8)),
        *(("device", 1, i, 1) for i in range(6)),
        *(("node", 0, 0, 4), ("node", 0, 4, 4), ("node", 1, 0, 2), ("node", 1, 2, 2), ("node", 1, 4, 2)),
        *(("group", 0, 0, 8), ("group", 1, 0, 6)),
    ]


def test_a_node_s_rate_is_shared_by_its_devices_and_summed_by_its_group():
    per = {"per_1000_node_days": 24, "recovery_h": 1}
    device, node, whole = (components({"domain": d, **per})[0] for d in ("device", "node", "group"))
    assert (node.mtbf_s, device.mtbf_s, whole.mtbf_s) == pytest.approx((3.6e6, 4 * 3.6e6, 3.6e6 / 2))


def test_a_hazard_of_one_device_type_leaves_the_others_alone():
    on = load_problem(cluster="a100x8_v100x16").cluster
    found = components({"domain": "node", "mtbf_h": 9, "recovery_h": 1, "device": "v100_16"}, on=on)
    assert [c.group for c in found] == [1, 1]
    with pytest.raises(InputError, match=r"'t4' is not in cluster .*, which has a100_40, v100_16; name one"):
        components({"domain": "node", "mtbf_h": 9, "recovery_h": 1, "device": "t4"}, on=on)


def test_a_component_s_rates():
    one = Component("device", 0, 0, 1, mtbf_s=90.0, recovery_s=10.0)
    assert (one.unavailability, one.failure_rate, one.repair_rate) == (0.1, 1 / 90, 0.1)


def test_recovery_h_of_the_model_is_that_of_every_hazard():
    found = components({"domain": "node", "mtbf_h": 9, "recovery_h": 1}, {"domain": "group", "mtbf_h": 9}, recovery_h=2)
    assert {c.recovery_s for c in found} == {7200.0}


@pytest.mark.parametrize("name", ["rsc1", "rsc2", "llama3"])
def test_unpublished_recovery_times_are_asked_for(name):
    with pytest.raises(InputError, match=r"recovery_h is not given, .*; give faults\.recovery_h=2$"):
        failure_model_from_config(preset("faults", name))
    found = failure_model_from_config({**preset("faults", name), "recovery_h": 2}).components(V100X32)
    assert len(found) == 4


def test_nothing_fails_without_hazards():
    assert failure_model_from_config(preset("faults", "none")).components(V100X32) == ()
    assert (mean_down(()), probability_any_down(())) == (0, 0)


GOOD = {"domain": "node", "mtbf_h": 100, "recovery_h": 1}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"recovery_h": None}, "give faults.recovery_h=2"),
        ({"recovery_h": 0}, "recovery_h=0 must be a finite number above 0"),
        ({"recovery_h": -1}, "recovery_h=-1 must be"),
        ({"recovery_h": 1e-9}, "between 0.001 and 1e+09 hours"),
        ({"mtbf_h": math.nan}, "mtbf_h=nan must be a finite number"),
        ({"mtbf_h": math.inf}, "mtbf_h=inf must be a finite number"),
        ({"mtbf_h": 10**400}, "mtbf_h=a number of more than 300 digits"),
        ({"mtbf_h": 1e20}, "between 0.001 and 1e+09 hours"),
        ({"mtbf_h": None}, "no rate given; give exactly one of mtbf_h, cluster_interval_h, per_1000_node_days"),
        ({"cluster_interval_h": 1}, "mtbf_h and cluster_interval_h given; give exactly one"),
        ({"mtbf_h": None, "per_1000_node_days": 1e9}, "per_1000_node_days=1000000000.0 is out of range"),
        ({"domain": "rack"}, "domain='rack' is not known; choose one of device, node, group"),
        ({"domain": ["node"]}, "domain=['node'] is not known"),
        ({"shape": 0.01}, "shape=0.01 must be between 0.1 and 10; 1 is exponential"),
        ({"recovery": "slow"}, "recovery='slow' is not known; choose one of exponential, fixed"),
        ({"mtbf": 3}, "unknown key 'mtbf'; did you mean 'mtbf_h'?"),
        ({"device": ""}, "device='' must be a name"),
    ],
)
def test_a_bad_hazard_is_one_clear_line(change, said):
    with pytest.raises(InputError) as error:
        model({**GOOD, **change})
    assert said in str(error.value)
    assert str(error.value).startswith("faults 'mine': hazards.0: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hazards": None}, "hazards=None must be a list; give [] for none"),
        ({"hazards": ["x"]}, "must be a mapping, for example {domain: node, mtbf_h: 1000}"),
        ({"recovery_h": "long"}, "faults: recovery_h='long' must be a finite number"),
        ({"trace": 3}, "trace=3 must be the name of a file, or null"),
        ({"hazard": []}, "unknown key 'hazard'; did you mean 'hazards'?"),
        ({"name": ""}, "name='' must be a name"),
    ],
)
def test_a_bad_failure_model_is_one_clear_line(change, said):
    with pytest.raises(InputError) as error:
        failure_model_from_config({"name": "mine", "hazards": [GOOD], **change})
    assert said in str(error.value)


def test_failures_that_outrun_repair_are_refused():
    with pytest.raises(InputError, match=r"means 8 down on average, but cluster .* has 5 such nodes; raise"):
        components({"domain": "node", "cluster_interval_h": 1, "recovery_h": 8})


VALUES = st.sampled_from(
    [None, True, -1, 0, 1, 0.5, 1e-300, 1e300, 10**400, math.inf, math.nan, "", "x", [], {}, "node"]
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([*GOOD, "cluster_interval_h", "shape", "recovery", "device"]), VALUES))
def test_whatever_a_hazard_holds_it_is_a_model_or_one_line(change):
    said, found = "", ()
    try:
        found = model({**GOOD, **change}).components(TWO_GROUPS)
    except InputError as error:
        said = str(error)
    assert "\n" not in said
    assert all(0 < c.mtbf_s < math.inf and 0 < c.recovery_s < math.inf for c in found)


# ---------------------------------------------------------------------------------------- preset files
def test_presets_share_what_is_equal_everywhere_and_shared_is_none_of_them():
    assert names("faults") == ["llama3", "mecefo_high", "mecefo_low", "mecefo_mid", "none", "rsc1", "rsc2"]
    for name in names("faults"):
        config = preset("faults", name)
        assert config["name"] == name
        assert "defaults" not in config
        assert {"recovery_h", "trace", "policy", "mecefo", "constants"} <= set(config)


@pytest.mark.parametrize("name", names("faults"))
def test_hydra_composes_what_the_preset_says(name):
    with hydra.initialize_config_dir(conf_dir(), version_base="1.3"):
        words = ["plan=p.json", f"faults={name}", "faults.policy=restart", "faults.recovery_h=2"]
        composed = OmegaConf.to_container(hydra.compose("simulate", words), resolve=True)["faults"]
    assert composed == {**preset("faults", name), "policy": "restart", "recovery_h": 2}
    failure_model_from_config(composed)


def test_more_things_than_can_be_followed_are_refused_at_once():
    everywhere = Cluster("huge", (group("fast", nodes=10**12, per_node=8),))
    with pytest.raises(
        InputError, match=r"there are 8,000,000,000,000 such devices, .* at most 1,000,000; use domain=node"
    ):
        model({"domain": "device", "mtbf_h": 1000, "recovery_h": 1}).components(everywhere)
    with pytest.raises(InputError, match=r"cluster 'huge': there are 1,000,000,000,000 such nodes"):
        whole_cluster(everywhere, "node")
    (one,) = model({"domain": "group", "mtbf_h": 1000, "recovery_h": 1}).components(everywhere)
    assert one.num_devices == 8 * 10**12
