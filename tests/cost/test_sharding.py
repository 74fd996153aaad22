"""ZeRO: what is divided among replicas, what that sends, and what of it shows."""

import dataclasses

import pytest

from haap_rl.cost import comm, memory
from haap_rl.cost.estimator import Estimator, stage_units
from haap_rl.problem.plan import Plan, ReplicaGroup, Stage
from tests.builders import PLAIN, calibration, group, plan, problem, random_plans, stage

ALPHA_S, BYTES_PER_S, RANKS = 20e-6, 100e9, 4  # the link inside a node of `problem()`


def replicated(zero_stage, m=2):
    return plan(stage(6, "fast", 1, RANKS, 2 // m), m=m, zero_stage=zero_stage)


def estimate(zero_stage, constants=PLAIN, **settings):
    return Estimator(problem(**settings), calibration=constants)(replicated(zero_stage))


def parameters():
    model = problem().model
    return sum(memory.unit_parameters(model, unit, 1) for unit in stage_units(True, True, 4, False))


UNITS = 6  # four layers, the embedding and the head: sharded weights and gradients travel by unit


def one_pass_s(num_bytes, messages=1):
    """A ring reduce-scatter or all-gather among the four devices, by hand, in so many messages."""
    return messages * 3 * ALPHA_S + 0.75 * num_bytes / BYTES_PER_S


def test_each_stage_divides_one_more_of_state_gradients_and_weights():
    four = [estimate(zero_stage).memory[0][0] for zero_stage in range(4)]
    number = parameters()
    bytes_per_parameter = [(m.weights_bytes, m.gradients_bytes, m.optimizer_bytes) for m in four]
    for given, expected in zip(bytes_per_parameter, [(2, 4, 12), (2, 4, 4), (2, 1, 4), (0.5, 0.5, 3)], strict=True):
        assert given == pytest.approx([number * e for e in expected], rel=1e-6)
    assert len({m.activations_bytes for m in four}) == 1


def test_memory_falls_with_the_stage_number_and_one_replica_gains_nothing():
    target = problem()
    estimator = Estimator(target, calibration=PLAIN)
    for candidate in random_plans(target, 60, seed=11):
        used = [
            [group for groups in estimator(plan_).memory for group in groups]
            for plan_ in (dataclasses.replace(candidate, zero_stage=zero_stage) for zero_stage in range(4))
        ]
        replicas = [sum(r.dp for r in stage.replicas) for stage in candidate.stages for _ in stage.replicas]
        for less, more in ((0, 1), (1, 2)):  # ZeRO-3 keeps whole layers beside its shards, which small stages feel
            for dp, before, after in zip(replicas, used[less], used[more], strict=True):
                if dp > 1:
                    assert after.used_bytes < before.used_bytes
                    continue
                # with ZeRO the step works on an fp32 copy of the replica's gradients, here all of them
                copy = before.gradients_bytes if less == 0 else 0
                assert after.used_bytes == before.used_bytes + copy


def test_traffic_of_each_stage_by_hand():
    # 16-bit weights and gradients; 4 ranks in one node; nothing hidden
    size = 2 * parameters()
    zero, one, two, three = (estimate(zero_stage).stages[0] for zero_stage in range(4))
    scatter = gather = one_pass_s(size)
    assert zero.gradient_sync_s == pytest.approx(scatter + gather)  # an all-reduce is both
    assert one.gradient_sync_s == pytest.approx(scatter + gather)
    assert two.gradient_sync_s == pytest.approx(gather)
    assert three.gradient_sync_s == 0
    assert zero.sharding_s == one.sharding_s == 0
    each = one_pass_s(size, UNITS)
    assert two.sharding_s == pytest.approx(each)
    assert three.sharding_s == pytest.approx(3 * each)


def test_zero_3_gathers_before_each_pass_of_every_microbatch():
    gather = scatter = one_pass_s(2 * parameters(), UNITS)
    plain, sharded = estimate(0), estimate(3)
    assert sharded.stages[0].forward_s - plain.stages[0].forward_s == pytest.approx(gather)
    assert sharded.stages[0].backward_s - plain.stages[0].backward_s == pytest.approx(gather + scatter)
    assert sharded.makespan_s - plain.makespan_s == pytest.approx(2 * (2 * gather + scatter))  # two micro-batches


def test_zero_2_scatters_the_gradients_of_every_microbatch():
    scatter = one_pass_s(2 * parameters(), UNITS)
    plain, sharded = estimate(0), estimate(2)
    assert sharded.stages[0].forward_s == plain.stages[0].forward_s
    assert sharded.makespan_s - plain.makespan_s == pytest.approx(2 * scatter)


def test_hidden_traffic_hides_behind_compute_only():
    gather = one_pass_s(2 * parameters(), UNITS)
    plain = estimate(0).stages[0]
    half = estimate(3, calibration(sharded_hidden=0.5)).stages[0]
    assert half.forward_s - plain.forward_s == pytest.approx(max(gather - plain.forward_s, gather / 2))
    all_of_it = estimate(3, calibration(sharded_hidden=1.0)).stages[0]
    assert all_of_it.forward_s == pytest.approx(max(gather, plain.forward_s))
    assert all_of_it.backward_s == pytest.approx(max(2 * gather, plain.backward_s))


def test_sync_is_hidden_behind_the_last_backward_only():
    whole = estimate(0).stages[0]
    half = estimate(0, calibration(sync_hidden=0.5)).stages[0]
    most = estimate(0, calibration(sync_hidden=1.0)).stages[0]
    assert half.gradient_sync_s == pytest.approx(
        max(whole.gradient_sync_s / 2, whole.gradient_sync_s - whole.backward_s)
    )
    assert most.gradient_sync_s == pytest.approx(max(0.0, whole.gradient_sync_s - whole.backward_s))


def test_no_part_is_ever_negative():
    target = problem((group("fast", nodes=2, nics=2, inter_gb=1), group("slow", intra_gb=1, tflops=10)))
    for share in (0.0, 0.5, 1.0):
        estimator = Estimator(target, calibration=calibration(sharded_hidden=share, sync_hidden=share))
        for candidate in random_plans(target, 60, seed=2):
            for part in estimator(candidate).stages:
                assert min(part) >= 0
                assert part.sharding_s <= part.busy_s
                assert candidate.zero_stage >= 2 or part.sharding_s == 0


def test_gathering_nothing_takes_no_time():
    assert comm.ring_pass_s(0.0, 8, 1.0, 1.0) == 0
    assert comm.gradient_sync_s(8, 0, 4, 1, 1, 1, 1.0, 2.0, 1.0, 1.0) == 3 + 3  # the reduce-scatter alone


def test_stragglers_lengthen_the_sync_of_many_nodes():
    def sync(nodes, share):
        one = problem((group("fast", nodes=nodes, per_node=1),))
        estimator = Estimator(one, calibration=calibration(straggler_share=share))
        return estimator(plan(stage(6, "fast", 1, nodes, 8 // nodes), m=1)).stages[0].gradient_sync_s

    assert sync(8, 0.1) == pytest.approx(1.3 * sync(8, 0.0))  # three doublings
    assert sync(1, 0.1) == sync(1, 0.0) == 0


@pytest.mark.parametrize(("framework", "expected"), [("megatron", 4), ("deepspeed", 2), ("fsdp", 2)])
def test_only_megatron_reduces_bf16_gradients_in_fp32(framework, expected):
    fast = group("fast")
    device = dataclasses.replace(fast.device, peak_flops=(("bf16", 100e12),))
    target = problem((dataclasses.replace(fast, device=device),), precision="bf16", framework=framework)
    part = Estimator(target, calibration=PLAIN)(replicated(1)).stages[0]
    scatter, gather = one_pass_s(expected * parameters()), one_pass_s(2 * parameters())
    assert part.gradient_sync_s == pytest.approx(scatter + gather)


def test_deepspeed_gathers_the_four_matrices_of_a_layer_one_by_one():
    three = {framework: estimate(3, framework=framework).stages[0] for framework in ("fsdp", "deepspeed")}
    size = 2 * parameters()
    assert three["fsdp"].sharding_s == pytest.approx(3 * one_pass_s(size, UNITS))
    assert three["deepspeed"].sharding_s == pytest.approx(3 * one_pass_s(size, 4 * UNITS))


def test_the_group_with_the_fewest_adapters_sets_the_pace_of_a_mixed_ring():
    def sync_s(*nics):
        groups = tuple(
            group(name, per_node=8, inter_gb=8, nics=n) for name, n in zip(("fast", "slow"), nics, strict=True)
        )
        replicas = tuple(ReplicaGroup(name, 4, 2, 2) for name in ("fast", "slow"))
        mixed = Plan((Stage(6, replicas),), 1, zero_stage=0)
        return Estimator(problem(groups), calibration=calibration(contention=0.25))(mixed).stages[0].gradient_sync_s

    assert sync_s(8, 8) < sync_s(8, 1) == sync_s(1, 8) == sync_s(1, 1)


def test_sharded_weights_of_three_layers_are_whole_at_a_time():
    one, whole = (
        Estimator(problem(), calibration=PLAIN).unit_memory("layer", 1, 4, 1, "none", z, False) for z in (3, 2)
    )
    assert one.working - whole.working == 3 * one.parameters * 2
    assert one.weights == -(-one.parameters * 2 // 4)
    assert one.weights + one.gradients + one.optimizer == pytest.approx(16 * one.parameters / 4, abs=3)
