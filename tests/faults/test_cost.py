"""What degraded cells cost: the published shapes to two decimals, laws, and stages worked by hand."""

import dataclasses
import itertools

import pytest

from haap_rl.cost import schedule
from haap_rl.cost.estimator import Estimator
from haap_rl.cost.profiles import MeasuredFor, Profile, UnitCell
from haap_rl.faults.cost import (
    Cell,
    Degraded,
    FaultEstimator,
    RunKey,
    Task,
    forward_flops,
    healthy_work,
    live_key,
    load,
    projector_flops,
    replica_group,
    replica_of,
    replica_samples,
    task_flops,
    weight_gradient_flops_ratio,
)
from haap_rl.faults.policy import Down, policy_named
from haap_rl.mecefo.options import MecefoOptions
from haap_rl.problem.cluster import DeviceType
from haap_rl.problem.errors import InputError
from haap_rl.problem.plan import Recompute, ReplicaGroup, Stage
from tests.builders import PLAIN, group, model, plan, problem, random_plans, stage

# (hidden, FFN width) of the three LLaMA shapes, s = 256, r = 64; the six loads of two tasks over one healthy task
SHAPES = {"350M": (1024, 2736), "1B": (2048, 5461), "7B": (4096, 11008)}
TECHNIQUE_I = {"350M": 1.54, "1B": 1.55, "7B": 1.55}
I_AND_II = {"350M": 1.97, "1B": 1.99, "7B": 2.00}
ALL_WHOLE = {"350M": 1.58, "1B": 1.57, "7B": 1.56}
ALL_GATE_UP = {"350M": 1.43, "1B": 1.42, "7B": 1.42}
RECOMPUTED_WHOLE = {"350M": 1.18, "1B": 1.17, "7B": 1.17}
RECOMPUTED_GATE_UP = {"350M": 1.07, "1B": 1.06, "7B": 1.06}
GATE_UP = {"skip_attention": True, "ffn_recompute": "gate_up", "rank": 64}
WHOLE = {**GATE_UP, "ffn_recompute": "whole"}
SMALL = MecefoOptions(rank=8)


def llama(name, **changes):
    hidden, ffn = SHAPES[name]
    shape = {"hidden": hidden, "ffn": ffn, "heads": hidden // 64, "kv_heads": hidden // 64, "head_dim": 64}
    plain = {"gated_mlp": True, "norm": "rmsnorm", "learned_positions": False, "biases": False, "dropout": False}
    return model(**{**shape, **plain, **changes})


def peers(dp=3, p=2, **settings):
    """(problem, plan) of p equal stages of dp replicas of one device each."""
    target = problem((group("fast", per_node=p * dp),), global_batch_size=4 * dp, **settings)
    cut = target.model.num_units // p
    return target, plan(*[stage(cut, "fast", dp=dp) for _ in range(p)], m=4)


def worked(estimator, healthy, *cells, policy="mecefo", options=SMALL):
    """What the policy does while those cells, (stage, replica), are down."""
    return policy_named(policy, options).apply(estimator, healthy, Down(frozenset(Cell(*cell) for cell in cells)))


# --------------------------------------------------------------------------------------------- FLOPs
@pytest.mark.parametrize("name", SHAPES)
def test_loads_of_two_tasks_are_the_published_shapes_to_two_decimals(name):
    def loads(recomputes=False, **techniques):
        return round(load(llama(name), 256, healthy_recomputes=recomputes, **techniques), 2)

    assert load(llama(name), 256) == load(llama(name), 256, healthy_recomputes=True) == 2
    assert loads(skip_attention=True) == TECHNIQUE_I[name]
    assert loads(skip_attention=True, ffn_recompute="whole") == I_AND_II[name]
    assert loads(**WHOLE) == ALL_WHOLE[name]
    assert loads(**GATE_UP) == ALL_GATE_UP[name]
    assert loads(True, **WHOLE) == RECOMPUTED_WHOLE[name]
    assert loads(True, **GATE_UP) == RECOMPUTED_GATE_UP[name]


@pytest.mark.parametrize("name", ["1B", "7B"])
def test_skipping_and_recomputing_alone_save_nothing(name):
    assert load(llama(name), 256, skip_attention=True, ffn_recompute="whole") == pytest.approx(2, rel=0.02)


def test_a_larger_rank_costs_little_where_the_healthy_run_recomputes():
    loads = [load(llama("7B"), 256, healthy_recomputes=True, **{**GATE_UP, "rank": r}) for r in (64, 128, 256)]
    assert [round(value, 2) for value in loads] == [1.06, 1.07, 1.08]


def test_flops_of_a_layer_by_hand():
    # h 1024, f 2736, s 256: attention 8h^2 + 2hs, FFN 6hf
    assert forward_flops(llama("350M"), 256) == (8 * 1024**2 + 2 * 1024 * 256, 6 * 1024 * 2736)
    grouped = llama("350M", kv_heads=4)  # queries and output h x h, keys and values h x 256
    assert forward_flops(grouped, 256)[0] == 2 * (2 * 1024 * 1024 + 2 * 1024 * 256) + 2 * 1024 * 256
    plain_mlp = llama("350M", gated_mlp=False)  # two matrices, of which one is computed again
    attention, ffn = forward_flops(plain_mlp, 256)
    assert ffn == 4 * 1024 * 2736
    assert task_flops(plain_mlp, 256, **GATE_UP) == attention + 2 * ffn + ffn / 2 + 4 * 64 * (1024 + 2736)


def test_weight_gradient_flops_are_the_published_ratios():
    assert round(weight_gradient_flops_ratio(16_384, 11_008, 4096, 64), 4) == 0.0253
    assert round(weight_gradient_flops_ratio(65_536, 11_008, 4096, 256), 4) == 0.0897


def test_faster_projectors_take_fewer_flops():
    svd, eigh, random = (projector_flops(2736, 1024, 64, method) for method in ("svd", "eigh", "randomized"))
    assert svd == 4 * 2736 * 1024**2 + 22 * 1024**3
    assert random < eigh < svd


# -------------------------------------------------------------------------------------------- memory
def bf16(name, **changes):
    device = DeviceType("big", (("bf16", 1e14),), 80 * 10**9, 1e12)
    fast = dataclasses.replace(group("fast", per_node=8), device=device)
    target = problem((fast,), global_batch_size=8, seq_len=256, precision="bf16", fused_attention=True)
    return dataclasses.replace(target, model=llama(name, **changes))


@pytest.mark.parametrize("name", SHAPES)
def test_two_mecefo_tasks_keep_an_eighth_of_a_healthy_task(name):
    hidden, ffn = SHAPES[name]
    estimator = FaultEstimator(bf16(name))
    healthy = plan(stage(2, "fast", dp=2), stage(2, "fast", dp=2), stage(2, "fast", dp=2), m=4)
    keys, tokens, layers = estimator.keys(healthy), 256, 2  # the middle stage has layers and nothing else

    def kept(*tasks):
        return estimator.cell_memory(1, 0, tasks, keys, 2, held=1).activations_bytes

    cheap, exact = Task(1, 1, backward="mecefo"), Task(1, 1)
    assert kept(exact) == layers * tokens * (16 * hidden + 6 * ffn)
    assert kept(cheap) == layers * tokens * 2 * hidden
    assert kept(cheap, cheap) == layers * tokens * 4 * hidden
    assert round(kept(cheap, cheap) / kept(exact), 3) == 0.125  # 4h of 16h + 6f, where f is near 8h / 3


def test_a_degraded_layer_has_its_inside_back_once_and_projectors_for_it():
    estimator = FaultEstimator(bf16("1B"))
    hidden, ffn = SHAPES["1B"]
    key = RunKey(False, False, 2, "none", 0, 0, 1, 1, 2, 1, 0, True, "mecefo")
    run = estimator._run_bytes(key)
    assert run.working == 256 * (14 * hidden + 6 * ffn)  # the complete layer less what is kept
    assert run.projectors == 2 * 64 * (2 * hidden + ffn) * 2
    exact = estimator._run_bytes(key._replace(backward="exact"))
    assert (run.weights, run.gradients, run.optimizer) == (exact.weights, exact.gradients, exact.optimizer)


def test_memory_grows_with_tasks_and_a_mecefo_task_keeps_no_more_than_an_exact_one():
    target, healthy = peers(dp=3)
    estimator = FaultEstimator(target, options=SMALL)
    keys = estimator.keys(healthy)
    for i in range(2):
        for backward in ("exact", "mecefo"):
            task = Task(i, 1, backward=backward)
            needed = [estimator.cell_memory(i, 0, (task,) * n, keys, 3, held=2).needed_bytes for n in (1, 2, 3)]
            assert needed == sorted(needed)
            assert len(set(needed)) == 3
        cheap, exact = (
            estimator.cell_memory(i, 0, (Task(i, 1, backward=b),) * 2, keys, 3, held=2) for b in ("mecefo", "exact")
        )
        assert cheap.activations_bytes < exact.activations_bytes
        assert (
            cheap.weights_bytes - exact.weights_bytes
            == estimator._run_bytes(RunKey(i == 0, i == 1, 2, "none", 0, 0, 1, 1, 3, 1, 1, True, "mecefo")).projectors
        )


def test_with_zero_1_fewer_live_replicas_hold_more_of_the_optimiser_state_each():
    target, healthy = peers(dp=3)
    estimator = FaultEstimator(target, options=SMALL)
    keys, own = estimator.keys(healthy), (Task(0, 1),)
    three, two = (estimator.cell_memory(0, 0, own, keys, dp, held=1).optimizer_bytes for dp in (3, 2))
    assert two == pytest.approx(1.5 * three, rel=1e-6)


def test_a_share_of_a_task_keeps_as_many_micro_batches_as_it_has_in_flight():
    target, healthy = peers(dp=3)
    estimator = FaultEstimator(target, options=SMALL)
    keys = estimator.keys(healthy)

    def kept(*tasks):
        return estimator.cell_memory(0, 0, tasks, keys, 3, held=4).activations_bytes

    assert kept(Task(0, 1, 0.5)) == kept(Task(0, 1)) // 2
    assert kept(Task(0, 1, 0.3)) == kept(Task(0, 1)) // 2  # 1.2 of 4: two at worst
    assert kept(Task(0, 1, backward="none")) == 0


# ---------------------------------------------------------------------------------------- estimates
def test_with_every_cell_alive_it_is_the_ordinary_estimate():
    target = problem(global_batch_size=16)
    for profile in (None, measured()):
        estimator = FaultEstimator(target, profile=profile)
        for candidate in random_plans(target, 20):
            legal = dataclasses.replace(candidate, zero_stage=min(1, candidate.zero_stage), virtual_stages=1)
            estimate = estimator.degraded(Degraded(legal, healthy_work(legal)))
            assert estimate is estimator.healthy(legal)
            assert estimate == Estimator(target, profile=profile)(legal)


def test_pricing_a_stage_by_its_cells_is_the_estimator_s_price_of_it():
    target = problem(global_batch_size=16)
    estimator = FaultEstimator(target)
    for candidate in random_plans(target, 20):
        legal = dataclasses.replace(candidate, zero_stage=min(1, candidate.zero_stage), virtual_stages=1)
        keys = estimator.keys(legal)
        for i, (key, work) in enumerate(zip(keys, healthy_work(legal), strict=True)):
            cost, own = estimator.stage_cost(key), estimator.stage(i, work, keys)
            assert own == pytest.approx((cost.forward_s, cost.backward_s, cost.gradient_sync_s, cost.optimizer_s))
            held = schedule.in_flight(len(keys), i, legal.num_microbatches)
            needed = {memory.needed_bytes for memory in estimator.stage_memory(i, work, keys, held)}
            assert needed == {memory.needed_bytes for memory in estimator.healthy(legal).memory[i]}


def test_only_the_takers_operators_are_priced_anew():
    target, healthy = peers(dp=3)
    estimator = FaultEstimator(target, options=SMALL)
    estimator.healthy(healthy)
    computed = estimator.operators_computed
    estimator.degraded(worked(estimator, healthy, (0, 1), policy="naive_neighbour"))
    assert estimator.operators_computed == computed  # the same samples, twice
    estimator.degraded(worked(estimator, healthy, (1, 0)))
    assert estimator.operators_computed == computed  # the low-rank products are no operators of the model
    # a cell that takes a number of samples that nobody took before is new, and it alone
    target = problem((group("fast", per_node=8),), global_batch_size=12)
    uneven = plan(stage(3, "fast", dp=3), Stage(3, (ReplicaGroup("fast", 1, 1, 3),)), m=4)
    estimator = FaultEstimator(target, options=SMALL)
    estimator.healthy(uneven)
    computed = estimator.operators_computed
    estimator.degraded(worked(estimator, uneven, (0, 0), policy="drop_replica"))
    new = {"layer": 10, "head": 3}  # of the last stage, for 2 samples
    assert estimator.operators_computed == computed + sum(new.values())


def test_naive_doing_both_doubles_the_busy_time_of_the_taker_exactly():
    target, healthy = peers(dp=2)
    estimator = FaultEstimator(target)
    state = worked(estimator, healthy, (0, 1), policy="naive_neighbour")
    before, after = estimator.healthy(healthy).stages, estimator.degraded(state).stages
    keys = estimator.keys(healthy)
    for once, twice in zip(
        estimator.cell_s(0, 0, (Task(0, 1),), keys), estimator.cell_s(0, 0, state.work[0][0], keys), strict=True
    ):
        assert twice == 2 * once
    assert after[1] == before[1]  # the other stage is not touched
    assert after[0].blocked_s == before[0].blocked_s
    assert after[0].busy_s - before[0].busy_s == pytest.approx(sum(estimator.cell_s(0, 0, (Task(0, 1),), keys)))


def test_a_degraded_iteration_by_hand():
    target, healthy = peers(dp=2)
    estimator = FaultEstimator(target, calibration=PLAIN)  # nothing hidden, nothing blocks
    estimate = estimator.degraded(worked(estimator, healthy, (1, 0), policy="naive_neighbour"))
    (f, b), (g, c) = ((s.forward_s, s.backward_s) for s in estimate.stages)
    assert (g, c) == pytest.approx(tuple(2 * t for t in estimator.healthy(healthy).stages[1][:2]))
    # the last stage is the slower one: after its first micro-batch arrives it never waits
    assert g + c > f + b
    (send,) = estimate.delays_s
    assert estimate.makespan_s == pytest.approx(f + send + 4 * (g + c) + send + b)
    assert estimate.iteration_s == pytest.approx(estimate.makespan_s + estimate.stages[0].tail_s)
    assert estimate.tokens_per_iteration == target.tokens_per_iteration


def test_a_stage_of_two_with_one_alive_exchanges_no_gradients():
    target, healthy = peers(dp=2)
    estimator = FaultEstimator(target)
    alone = estimator.degraded(worked(estimator, healthy, (0, 0), policy="naive_neighbour")).stages
    assert alone[0].gradient_sync_s == 0
    assert alone[1].gradient_sync_s == estimator.healthy(healthy).stages[1].gradient_sync_s
    assert alone[0].num_devices == 1


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_mecefo_taker_is_busier_than_a_healthy_cell_and_less_than_a_naive_one(recompute):
    target, healthy = peers(dp=2, model_changes={"gated_mlp": True})
    if recompute == "full":
        healthy = dataclasses.replace(
            healthy, stages=tuple(dataclasses.replace(s, recompute=Recompute("full", 2)) for s in healthy.stages)
        )
    estimator = FaultEstimator(target, options=SMALL)
    own = estimator.healthy(healthy).stages[0].busy_s
    cheap, naive = (
        estimator.degraded(worked(estimator, healthy, (0, 1), policy=policy)).stages[0].busy_s
        for policy in ("mecefo", "naive_neighbour")
    )
    assert own < cheap < naive


@pytest.mark.parametrize("target", [problem(), problem(model_changes={"gated_mlp": True, "tied_embeddings": True})])
def test_a_larger_rank_is_never_cheaper_and_recomputing_all_of_the_ffn_never_cheaper_than_gate_and_up(target):
    def backward_s(**options):
        estimator = FaultEstimator(target, options=MecefoOptions(**options))
        healthy = plan(stage(3, "fast", tp=2, dp=2, size=2), stage(3, "slow", dp=4, size=1), m=2)
        keys = estimator.keys(healthy)
        return [estimator.cell_s(i, 0, (Task(i, 1, backward="mecefo"),), keys)[1] for i in (0, 1)]

    by_rank = [backward_s(rank=rank) for rank in (8, 64, 256, 1024)]  # multiples of 8: others pay for it
    for smaller, larger in itertools.pairwise(by_rank):
        assert all(a <= b for a, b in zip(smaller, larger, strict=True))
    assert all(a < b for a, b in zip(backward_s(), backward_s(ffn_recompute="whole"), strict=True))


def test_refreshing_projectors_seldom_costs_less_per_step():
    target, healthy = peers(dp=2)
    steps = []
    for refresh_steps in (1, 10, 100):
        estimator = FaultEstimator(target, options=MecefoOptions(refresh_steps=refresh_steps))
        state = worked(estimator, healthy, (0, 1), options=estimator.options)
        steps.append(estimator.degraded(state).stages[0].optimizer_s)
    assert steps == sorted(steps, reverse=True)
    flat = estimator.healthy(healthy).stages[0].optimizer_s
    once = estimator.refresh_s(0, 1, 2)
    assert steps[0] - steps[1] == pytest.approx(0.9 * once)
    assert steps[2] > once / 100
    assert flat > 0


def measured():
    """A profile whose layers take far longer than the curves say."""
    cells = [
        UnitCell(device, "layer", tp, size, 0.010 * slow * size / tp, 0.025 * slow * size / tp)
        for device, slow in (("fast_device", 1), ("slow_device", 2))
        for tp in (1, 2)
        for size in (1, 2, 4)
    ]
    return Profile("test", MeasuredFor(), tuple(cells), ())


def test_where_layers_are_measured_a_degraded_one_is_scaled_by_the_ratio_of_the_curves():
    curves, profiled = (
        FaultEstimator(problem(), options=SMALL),
        FaultEstimator(problem(), profile=measured(), options=SMALL),
    )
    healthy = plan(stage(3, "fast", dp=4, size=1), stage(3, "slow", dp=4, size=1), m=2)

    def layer_s(estimator, backward):
        key = RunKey(False, False, 1, "none", 0, 0, 1, 1, 4, 1, 1, True, backward)
        return estimator._run_s(key)

    assert layer_s(profiled, "exact") == (0.010, 0.025)
    ratio = layer_s(curves, "mecefo")[1] / layer_s(curves, "exact")[1]
    assert layer_s(profiled, "mecefo") == pytest.approx((0.010, 0.025 * ratio), rel=1e-9)
    assert 0 < ratio < 1
    state = worked(profiled, healthy, (0, 0))
    assert profiled.degraded(state).iteration_s > profiled.healthy(healthy).iteration_s


def test_without_the_memo_every_figure_is_the_same():
    target, healthy = peers(dp=3)
    found = []
    for cached in (True, False):
        estimator = FaultEstimator(target, cached, options=SMALL)
        states = [worked(estimator, healthy, (0, 1), (1, 2), policy=name) for name in ("mecefo", "recycle")]
        found.append([estimator.degraded(state) for state in states])
    assert found[0] == found[1]


def test_filling_bubbles_is_never_slower_and_never_faster_than_healthy():
    target, healthy = peers(dp=3)
    estimator = FaultEstimator(target, options=SMALL)
    state = worked(estimator, healthy, (0, 1), policy="recycle")
    filled = dataclasses.replace(state, fills_bubbles=True)
    assert estimator.healthy(healthy).iteration_s <= estimator.degraded(filled).iteration_s
    assert estimator.degraded(filled).iteration_s <= estimator.degraded(state).iteration_s


# --------------------------------------------------------------------------------------------- words
def test_replicas_are_counted_through_the_groups_of_a_stage():
    mixed = Stage(3, (ReplicaGroup("fast", 2, 2, 3), ReplicaGroup("slow", 1, 1, 2)))
    assert replica_samples(mixed) == [3, 3, 2]
    assert [replica_group(mixed, r) for r in range(3)] == [0, 0, 1]
    target = problem(global_batch_size=16)
    estimator = FaultEstimator(target)
    (key, _) = estimator.keys(plan(mixed, stage(3, "slow", dp=2, size=4), m=2))
    assert [replica_of(key, r).group for r in range(3)] == [0, 0, 1]
    assert [(r.group, r.dp) for r in live_key(key, (False, True, True)).replicas] == [(0, 1), (1, 1)]
    assert [(r.group, r.dp) for r in live_key(key, (True, True, False)).replicas] == [(0, 2)]
    with pytest.raises(IndexError):
        replica_of(key, 3)
    with pytest.raises(IndexError):
        replica_group(mixed, 3)


def test_what_is_not_priced_is_refused_in_one_line():
    with pytest.raises(InputError, match=r"rank=2000 is larger than the smallest side of an FFN matrix.*1024; give"):
        FaultEstimator(problem(), options=MecefoOptions(rank=2000))
    target, healthy = peers(dp=2)
    estimator = FaultEstimator(target)
    for changes, words in (({"zero_stage": 2}, "zero_stage=2"), ({"virtual_stages": 2}, "virtual_stages=2")):
        other = dataclasses.replace(healthy, **changes)
        with pytest.raises(InputError, match=f"{words} is not priced under failures") as error:
            estimator.healthy(other)
        assert "\n" not in str(error.value)
        with pytest.raises(InputError, match=words):
            estimator.degraded(Degraded(other, healthy_work(other)))
