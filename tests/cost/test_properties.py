"""What must hold whatever the constants: several of these are defects seen in other planners."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from haap_rl.cost.calibration import (
    DEFAULT,
    FAST_ETHERNET_BYTES_PER_S,
    NVLINK_BYTES_PER_S,
    RDMA_BYTES_PER_S,
    parameters,
    with_parameters,
)
from haap_rl.cost.estimator import Estimator, UnitKey
from haap_rl.problem.cluster import Cluster, Link
from haap_rl.problem.errors import InputError
from haap_rl.problem.plan import Plan, ReplicaGroup, Stage
from haap_rl.problem.presets import load_problem, preset, problem_from_config
from tests.builders import PLAIN, calibration, group, plan, problem, random_plans, stage

# every effect is there, and every constant is round
LIVELY = calibration(
    gemm_efficiency=0.5, attention_efficiency=0.25, gemm_half_size=100.0, unaligned_share=0.5, efficiency=0.5,
    host_layer_s=1e-3, host_microbatch_s=1e-3, send_blocking=0.75, sync_hidden=0.5, sharded_hidden=0.75,
    straggler_share=0.125, collective_s=1e-4, contention=0.25, small_message_s=1e-3, gemm_half_tokens=50.0,
)  # fmt: skip


@pytest.mark.parametrize("preset_names", [("llama3_8b", "a100x8_v100x16"), ("gpt3_1_3b", "v100x4_t4x4")])
def test_cached_and_uncached_estimates_are_equal_bit_for_bit(preset_names):
    target = load_problem(*preset_names)
    cached, plain = Estimator(target), Estimator(target, cached=False)
    for candidate in random_plans(target, 150):
        assert cached(candidate) == plain(candidate)
    assert plain.operators_computed == plain.operators_requested == cached.operators_requested
    assert cached.operators_distinct == plain.operators_distinct
    assert cached.operators_computed < cached.operators_distinct < cached.operators_requested


def test_same_plan_same_cost_whatever_was_priced_before():
    target = load_problem()
    plans = list(random_plans(target, 40, seed=3))
    warm = Estimator(target)
    first = [warm(candidate) for candidate in plans]
    again = [warm(candidate) for candidate in reversed(plans)][::-1]
    cold = [Estimator(target)(candidate) for candidate in plans]
    assert first == again == cold


def mixed_problem():
    """Two groups of several nodes and a link of its own between them."""
    groups = (
        group("fast", nodes=2, per_node=4, intra_gb=20, inter_gb=4, nics=4),
        group("slow", nodes=3, per_node=3, intra_gb=5, inter_gb=1, tflops=50),
    )
    base = problem(groups, {"num_layers": 8, "tied_embeddings": True}, global_batch_size=16)
    return dataclasses.replace(base, cluster=Cluster("mixed", groups, (("slow", "fast", Link(1e-4, 0.5e9)),)))


LINKS = ("fast.intra_node", "fast.inter_node", "slow.intra_node", "slow.inter_node", "between")


def with_faster(target, where, factor):
    """`target` with `factor` times the bandwidth of one link."""

    def faster(link):
        return Link(link.latency_s, link.bandwidth_bytes_per_s * factor)

    cluster = target.cluster
    if where == "between":
        cluster = dataclasses.replace(cluster, links=tuple((a, b, faster(link)) for a, b, link in cluster.links))
    else:
        name, _, kind = where.partition(".")
        groups = tuple(
            dataclasses.replace(g, **{kind: faster(getattr(g, kind))}) if g.name == name else g for g in cluster.groups
        )
        cluster = dataclasses.replace(cluster, groups=groups)
    return dataclasses.replace(target, cluster=cluster)


@pytest.mark.parametrize("where", LINKS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), factor=st.floats(1.0, 1000.0))
def test_more_bandwidth_is_never_slower(where, seed, factor):
    target = mixed_problem()
    (candidate,) = random_plans(target, 1, seed)
    before = Estimator(target, calibration=LIVELY)(candidate).iteration_s
    after = Estimator(with_faster(target, where, factor), calibration=LIVELY)(candidate).iteration_s
    assert after <= before * (1 + 1e-12)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("zero_stage", range(4))
def test_what_hides_traffic_never_shrinks_faster_than_the_traffic_ends(chunks, zero_stage):
    # faster tensor parallelism shortens the backward pass that hides the synchronisation, and ends it as much sooner
    target = mixed_problem()
    fast, slow = stage(5, "fast", 4, 2, 4), stage(5, "slow", 1, 1, 8)
    candidate = plan(fast, slow, m=2, zero_stage=zero_stage, virtual_stages=chunks)
    seconds = [
        Estimator(with_faster(target, "fast.intra_node", factor), calibration=LIVELY)(candidate).iteration_s
        for factor in (1.0, 2.0, 10.0, 100.0)
    ]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("where", LINKS)
def test_every_link_of_a_mixed_cluster_matters_to_some_plan(where):
    target = mixed_problem()
    base, better = (Estimator(t, calibration=LIVELY) for t in (target, with_faster(target, where, 4.0)))
    assert any(better(one).iteration_s < base(one).iteration_s for one in random_plans(target, 100, seed=1))


@pytest.mark.parametrize(
    ("kind", "bandwidth"),
    [
        ("inside", NVLINK_BYTES_PER_S),
        ("between", RDMA_BYTES_PER_S),
        ("between", FAST_ETHERNET_BYTES_PER_S),
    ],
)
def test_a_link_just_above_the_border_of_its_kind_is_no_worse_than_one_just_below(kind, bandwidth):
    rng = np.random.default_rng(0)
    for flows in (1, 2, 7.5) if kind == "between" else (None,):
        for constants in [DEFAULT, *(any_constants(rng) for _ in range(100))]:
            links = [Link(1e-6, bandwidth * factor) for factor in (0.01, 1 - 1e-9, 1.0, 1 + 1e-9, 100.0)]
            seconds = [getattr(constants, kind)(link, *([flows] if flows else [])) for link in links]
            for (slow_latency_s, slow), (fast_latency_s, fast) in itertools.pairwise(seconds):
                assert fast >= slow
                assert fast_latency_s <= slow_latency_s
            if kind == "between":
                waits = [constants.small_message_s(link) for link in links]
                assert waits == sorted(waits, reverse=True)


def any_constants(rng):
    """Kinds of link in no order at all."""
    values = parameters(DEFAULT)
    for name in values:
        if name.endswith((".efficiency", ".contention")):
            values[name] = float(rng.uniform(0.01, 0.99))
        elif name.endswith((".latency_scale", ".small_message_s")):
            values[name] = float(rng.uniform(0.0, 3.0))
    return with_parameters(DEFAULT, values)


def test_the_bandwidth_between_nodes_matters():
    def seconds(inter_gb):
        one = group("fast", nodes=2, per_node=2, inter_gb=inter_gb)
        return Estimator(problem((one,)), calibration=PLAIN)(plan(stage(6, "fast", 1, 4, 1), m=2)).iteration_s

    assert seconds(1) > seconds(2) > seconds(4)


def test_a_slow_stage_costs_more_the_later_it_sits():
    # The slow stage k is never idle but before its first forward and its first backward pass, whose sum is
    # sum_{i<k}(f + b) + sum_{i>k}(f + b) - (p - k - 1) f_slow: one stage later, one warm-up pass of its own fewer fills
    # the wait, and the iteration takes f_slow more. (Both plans have the same stages in another order, all inner.)
    estimator = Estimator(problem(model_changes={"num_layers": 8, "vocab": 128}), calibration=PLAIN)
    fast, slow = stage(2, "fast"), stage(2, "slow")
    early = estimator(plan(fast, slow, fast, fast, fast))
    late = estimator(plan(fast, fast, slow, fast, fast))
    assert sorted(s.forward_s for s in early.stages) == sorted(s.forward_s for s in late.stages)
    assert late.iteration_s - early.iteration_s == pytest.approx(late.stages[2].forward_s)


def test_memory_is_checked_on_each_device_type_of_a_mixed_stage():
    groups = (group("fast", memory_gb=40), group("slow", memory_gb=1))
    mixed = Stage(6, (ReplicaGroup("fast", 1, 2, 3), ReplicaGroup("slow", 1, 2, 1)))
    estimate = Estimator(problem(groups), calibration=PLAIN)(Plan((mixed,), 1))
    fast, slow = estimate.memory[0]
    assert fast.missing_bytes == 0
    assert slow.missing_bytes > 0
    assert not estimate.fits
    assert estimate.bytes_missing == slow.missing_bytes
    assert estimate.bottleneck == (0, "memory")


@pytest.mark.parametrize("per_node", [10, 12, 16])
def test_ten_or_more_devices_per_node(per_node):
    wide = group("fast", nodes=2, per_node=per_node)
    target = problem((wide,), global_batch_size=4 * per_node)
    estimate = Estimator(target, calibration=PLAIN)(plan(stage(6, "fast", 1, 2 * per_node, 1), m=2))
    assert estimate.fits
    assert estimate.stages[0].num_devices == 2 * per_node


def test_an_unknown_device_is_refused_by_name_with_what_is_near():
    cluster = preset("cluster", "a100x8")
    cluster["groups"][0]["device"] = "a100_4"
    with pytest.raises(InputError) as error:
        problem_from_config(preset("model", "llama3_8b"), cluster, preset("problem", "default"))
    assert "device='a100_4' is not known; did you mean 'a100_40'" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_device_of_no_known_architecture_is_priced_by_the_constants_of_the_others():
    assert DEFAULT.architecture(problem().cluster.groups[0].device) == dict(DEFAULT.architectures)["other"]


def test_doubling_the_microbatches_of_a_fixed_batch_never_halves_the_time():
    estimator = Estimator(problem(global_batch_size=64), calibration=LIVELY)
    for m in (1, 2, 4, 8):
        few = plan(stage(3, "fast", 1, 1, 64 // m), stage(3, "slow", 1, 1, 64 // m), m=m)
        many = plan(stage(3, "fast", 1, 1, 32 // m), stage(3, "slow", 1, 1, 32 // m), m=2 * m)
        assert estimator(many).iteration_s > estimator(few).iteration_s / 2


@pytest.mark.parametrize("zero_stage", range(4))
def test_more_tensor_parallelism_never_needs_more_weight_memory_per_device(zero_stage):
    target = load_problem("llama3_8b", "h100x64")
    estimator = Estimator(target, calibration=PLAIN)
    used = [
        estimator(Plan((Stage(34, (ReplicaGroup("h100", tp, 2, 1),)),), 64, zero_stage)).memory[0][0]
        for tp in (1, 2, 4, 8, 16)
    ]
    for wide, narrow in itertools.pairwise(used):
        assert narrow.weights_bytes < wide.weights_bytes
        assert narrow.used_bytes < wide.used_bytes


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    tp=st.sampled_from([2, 4, 8, 16]),
    size=st.sampled_from([1, 8]),
    gb=st.tuples(st.floats(0.5, 1000), st.floats(0.5, 1000)),
    latencies_us=st.tuples(st.floats(1, 100), st.floats(1, 100)),
    nics=st.sampled_from([1, 2, 8]),
)
def test_a_replica_that_straddles_nodes_is_never_faster_than_one_inside_a_node(tp, size, gb, latencies_us, nics):
    # what the space's bounds rest on, for their tables know no straddling
    one = group("fast", nodes=2, per_node=16, intra_gb=gb[0], inter_gb=gb[1], latencies_us=latencies_us, nics=nics)
    estimator = Estimator(problem((one,)), calibration=PLAIN)
    inside, across = (estimator.unit_time(UnitKey("layer", 0, tp, nodes, size, True)) for nodes in (1, 2))
    assert all(far >= near for far, near in zip(across, inside, strict=True))


def test_random_plans_lie_between_their_closed_form_bounds():
    target = load_problem()
    estimator = Estimator(target, calibration=LIVELY)
    for candidate in random_plans(target, 150, seed=5):
        estimate = estimator(candidate)
        lower, upper = estimate.bounds_s
        assert lower <= estimate.iteration_s * (1 + 1e-12)
        assert estimate.iteration_s <= upper * (1 + 1e-12)
