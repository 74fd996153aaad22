"""Single effects of the cost model, each by hand under plain constants: messages, adapters, host, padding, cache."""

import dataclasses

import pytest

from haap_rl.cost.calibration import LITERATURE, with_parameters
from haap_rl.cost.estimate import StageMemory
from haap_rl.cost.estimator import Estimator, UnitKey
from haap_rl.problem.errors import InputError
from haap_rl.problem.presets import load_problem
from tests.builders import PLAIN, calibration, group, plan, problem, random_plans, stage

WAIT_S = 0.04
NUM_BYTES = 2 * 512 * 1024  # what one sample sends from stage to stage
WAITS = with_parameters(PLAIN, {"ethernet.small_message_s": WAIT_S, "small_message_bytes": 2.0 * NUM_BYTES})


def send_s(inter_gb, candidate, constants=WAITS):
    groups = tuple(group(name, per_node=4, inter_gb=inter_gb, nics=4) for name in ("fast", "slow"))
    return Estimator(problem(groups), calibration=constants)(candidate).stages


# ----------------------------------------------------------------------------------------- small messages
def test_a_small_message_waits_on_ethernet_and_nowhere_else():
    one = plan(stage(3, "fast"), stage(3, "slow"))
    for inter_gb, waits in ((1, True), (3.9, True), (4, False), (12, False), (100, False)):
        plain = send_s(inter_gb, one, PLAIN)[0].send_s
        assert send_s(inter_gb, one)[0].send_s == pytest.approx(plain + WAIT_S * waits)
    inside = plan(stage(3, "fast"), stage(3, "fast"))
    assert send_s(1, inside)[0].send_s == send_s(1, inside, PLAIN)[0].send_s


def test_a_message_is_small_by_what_one_lane_sends():
    def waits(samples, lanes):
        one = plan(
            stage(3, "fast", 1, lanes, samples // lanes), stage(3, "slow", 1, lanes, samples // lanes), m=8 // samples
        )
        return send_s(1, one)[0].send_s - send_s(1, one, PLAIN)[0].send_s

    assert waits(1, 1) == pytest.approx(WAIT_S)
    assert waits(2, 1) == 0  # two samples are just large enough
    assert waits(2, 2) == pytest.approx(WAIT_S)  # not so when two lanes share them
    assert waits(8, 4) == 0


def test_the_send_from_the_last_stage_back_to_the_first_waits_too():
    looped = plan(stage(3, "fast"), stage(3, "slow"), virtual_stages=2)
    for with_wait, without in zip(send_s(1, looped), send_s(1, looped, PLAIN), strict=True):
        assert with_wait.send_s == pytest.approx(without.send_s + WAIT_S)


# --------------------------------------------------------------------------------------------- contention
def test_transfers_share_an_adapter_evenly_and_lose_nothing():
    constants = calibration(contention=0.25)

    def rate(devices, nics=1):
        groups = tuple(group(name, per_node=8, inter_gb=8, nics=nics) for name in ("fast", "slow"))
        sides = [stage(3, name, 1, devices, 8 // devices) for name in ("fast", "slow")]
        seconds = Estimator(problem(groups), calibration=constants)(plan(*sides, m=1)).stages[0].send_s
        return 8 * NUM_BYTES / (seconds - 50e-6)

    for devices in (1, 2, 4, 8):
        assert rate(devices) == pytest.approx(8e9)
        assert rate(devices, nics=8) == pytest.approx(devices * 1e9)  # an adapter each


def test_rings_that_share_an_adapter_contend():
    def sync_s(tp, contention):
        one = group("fast", nodes=2, per_node=tp, inter_gb=1, intra_gb=1000)
        estimator = Estimator(problem((one,)), calibration=calibration(contention=contention, latency_scale=0.0))
        return estimator(plan(stage(6, "fast", tp, 2, 1), m=4)).stages[0].gradient_sync_s

    assert sync_s(1, 0.25) == sync_s(1, 0.0)
    assert sync_s(2, 0.25) == pytest.approx(sync_s(2, 0.0) / 0.75)
    assert sync_s(4, 0.25) == pytest.approx(sync_s(4, 0.0) / 0.75**2)


# ------------------------------------------------------------------------------------ host and collectives
def test_launch_blocking_adds_what_would_overlap():
    constants = calibration(host_layer_s=5e-4)

    def layer(**settings):
        return Estimator(problem(**settings), calibration=constants).unit_time(UnitKey("layer", 0, 1, 1, 1, True))

    device = Estimator(problem(), calibration=PLAIN).unit_time(UnitKey("layer", 0, 1, 1, 1, True))
    queued, waited = layer(), layer(launch_blocking=True)
    assert waited.forward_s == pytest.approx(device.forward_s + 5e-4)
    assert waited.backward_s == pytest.approx(device.backward_s + 5e-4)
    assert max(device.forward_s, 5e-4) < queued.forward_s < waited.forward_s
    with pytest.raises(InputError, match="launch_blocking"):
        load_problem(launch_blocking="sometimes")


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_collective_costs_its_launch_on_the_device_and_on_the_host(nodes):
    target = problem((group("fast", nodes=2, per_node=4),), launch_blocking=True)
    key = UnitKey("layer", 0, 4, nodes, 1, True)
    plain, slow = (Estimator(target, calibration=c).unit_time(key) for c in (PLAIN, calibration(collective_s=1e-3)))
    # two all-reduces in each direction; each delays the device, and the host that launches it
    assert slow.forward_s - plain.forward_s == pytest.approx(2 * 1e-3 + 2 * 1e-3)
    assert slow.backward_s - plain.backward_s == pytest.approx(2 * 1e-3 + 2 * 1e-3)
    assert slow.tensor_parallel_s - plain.tensor_parallel_s == pytest.approx(4 * 1e-3)
    alone = key._replace(tp=1, tp_nodes=1)
    plain, slow = (Estimator(target, calibration=c).unit_time(alone) for c in (PLAIN, calibration(collective_s=1e-3)))
    assert slow == plain


# --------------------------------------------------------------------------------------- sizes and padding
def test_a_size_that_is_no_multiple_of_eight_slows_its_products_only():
    keeps = calibration(unaligned_share=0.25)

    def head_s(vocab, constants, tp=1):
        target = problem(model_changes={"vocab": vocab})
        return Estimator(target, calibration=constants).unit_time(UnitKey("head", 0, tp, 1, 8, True)).forward_s

    assert head_s(32000, keeps) == head_s(32000, PLAIN)
    product_s = 2 * 8 * 512 * 1024 * 32001 / 100e12  # takes four times as long
    assert head_s(32001, keeps) - head_s(32001, PLAIN) == pytest.approx(3 * product_s)
    layer = UnitKey("layer", 0, 1, 1, 8, True)
    for sizes, slower in (({}, False), ({"ffn": 4092}, True), ({"head_dim": 60}, True)):
        seconds = [
            Estimator(problem(model_changes=sizes), calibration=c).unit_time(layer).forward_s for c in (keeps, PLAIN)
        ]
        assert (seconds[0] > seconds[1]) == slower


def test_the_vocabulary_is_padded_to_128_rows_a_rank_where_it_is_divided():
    model = problem(model_changes={"vocab": 50257}).model
    assert [model.vocab_per_rank(tp) for tp in (1, 2, 4, 8)] == [50257, 25216, 12672, 6400]
    keeps = calibration(unaligned_share=0.25)

    def head_s(vocab, tp, constants):
        target = problem(model_changes={"vocab": vocab})
        return Estimator(target, calibration=constants).unit_time(UnitKey("head", 0, tp, 1, 8, True)).forward_s

    assert head_s(50257, 2, keeps) == head_s(50257, 2, PLAIN)  # padded sizes are aligned
    # of a vocabulary that needs no padding only the loss is longer: it moves four 2-byte values per logit
    loss_s = 8 * 512 * (2 * 25216 - 50257) / 2 * 4 * 2 / 1e12
    assert head_s(2 * 25216, 2, PLAIN) - head_s(50257, 2, PLAIN) == pytest.approx(loss_s)
    product_s = 2 * 8 * 512 * 1024 * 50257 / 100e12
    assert head_s(50257, 1, keeps) - head_s(50257, 1, PLAIN) == pytest.approx(3 * product_s)


# -------------------------------------------------------------------------------------- the allocator's cache
def memory(activations, capacity, fragmentation=0.25):
    return StageMemory("fast", 100, 200, 300, activations, 40, 60, 50, capacity, fragmentation)


def test_the_cache_is_a_share_of_what_comes_and_goes_while_there_is_room():
    roomy = memory(1000, 10_000)
    assert roomy.needed_bytes == 100 + 200 + 300 + 1000 + 60 + 50
    assert roomy.cached_bytes == (1000 + 60) // 4
    assert roomy.used_bytes == roomy.needed_bytes + 265
    assert memory(1000, 1800).cached_bytes == 90  # what is left
    assert memory(1000, 1800).used_bytes == 1800
    full, over = memory(1000, 1710), memory(1000, 1700)
    assert (full.cached_bytes, full.missing_bytes) == (0, 0)
    assert (over.cached_bytes, over.missing_bytes, over.used_bytes) == (0, 10, 1710)


def test_the_cache_never_overflows_and_never_decides_whether_a_plan_fits():
    tight = dataclasses.replace(problem((group("fast", memory_gb=1.4), group("slow", memory_gb=1.0))))
    bare = Estimator(tight, calibration=with_parameters(LITERATURE, dict.fromkeys(RESERVES, 0.0)))
    wasteful = Estimator(tight, calibration=with_parameters(bare.calibration, {"fragmentation": 0.9}))
    fits = []
    for candidate in random_plans(tight, 150, seed=7):
        some, more = bare(candidate), wasteful(candidate)
        fits.append(more.fits)
        assert (more.fits, more.bytes_missing) == (some.fits, some.bytes_missing)
        assert more.rank == some.rank
        for one in (part for groups in more.memory for part in groups):
            assert one.used_bytes <= max(one.capacity_bytes, one.needed_bytes)
    assert 10 < sum(fits) < 140


RESERVES = [f"{name}.reserve_bytes" for name, _ in LITERATURE.frameworks]


def test_sizes_off_the_tensor_cores_slow_16_bit_products_only():
    def head_s(precision, vocab):
        base = load_problem("gpt3_1_3b", "v100x32", precision=precision)
        target = dataclasses.replace(base, model=dataclasses.replace(base.model, vocab=vocab))
        return (
            Estimator(target, calibration=calibration(unaligned_share=0.25))
            .unit_time(UnitKey("head", 0, 1, 1, 1, False))
            .forward_s
        )

    assert head_s("fp16", 50257) > 2 * head_s("fp16", 50264)
    assert head_s("fp32", 50257) == pytest.approx(head_s("fp32", 50264), rel=1e-3)
