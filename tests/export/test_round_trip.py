"""Any legal plan for any trainer: exact, or degraded and priced, or refused with field and rule."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from haap_rl.cost.estimator import Estimator
from haap_rl.export.base import losses
from haap_rl.export.targets import TARGETS, export_plan, target_named
from haap_rl.problem.errors import InputError
from haap_rl.problem.presets import load_problem
from tests.builders import group, plan, problem, stage
from tests.export.plans import COUNT, SEED, any_plans, in_bf16, uniform_random, wide_problem

FIELD_AND_RULE = r"^(megatron|torchtitan|flagscale): .+(=|\().+: .+|misses"


@pytest.fixture(scope="module")
def exported():
    """(problem, plan, target, Export or the message of a refusal) of random legal plans, every target each."""
    estimators, found = {}, []
    for target, one in any_plans(COUNT, SEED):
        estimator = estimators.setdefault(id(target.cluster), (target, Estimator(target)))[1]
        for name in TARGETS:
            try:
                found.append((target, one, name, export_plan(target, one, name, estimator)))
            except InputError as error:
                found.append((target, one, name, str(error)))
    return found


def test_every_written_plan_is_read_back_and_priced_as_written(exported):
    fresh = {}
    for target, one, name, result in exported:
        if isinstance(result, str):
            continue
        back = TARGETS[name].read(target, result.files)
        assert back == result.written
        assert result.exact == (back == one)
        estimator = fresh.setdefault(id(target.cluster), (target, Estimator(target)))[1]
        estimate = estimator(back)
        assert math.isclose(estimate.iteration_s, result.iteration_s, rel_tol=1e-12)
        assert result.fits == estimate.fits
        for loss in result.losses:
            assert math.isclose(loss.iteration_s, estimate.iteration_s, rel_tol=1e-12)
            assert loss.fits
            assert estimate.fits
            assert loss.plan_value != loss.written_value


def test_every_refusal_names_the_target_the_field_and_the_rule(exported):
    import re

    for _, _, name, result in exported:
        if isinstance(result, str):
            assert re.search(FIELD_AND_RULE, result), result
            assert result.startswith(f"{name}: ")
            assert "\n" not in result


def test_every_target_takes_some_exactly_and_some_not(exported):
    kinds = Counter((name, "refused" if isinstance(r, str) else r.exact) for _, _, name, r in exported)
    for name in TARGETS:
        assert kinds[name, True], kinds
        assert kinds[name, False], kinds
    print(dict(kinds))  # the figures of docs/export.md, with -s


def test_a_degraded_plan_keeps_its_layers_and_its_micro_batches(exported):
    for _, one, _, result in exported:
        if not isinstance(result, str):
            assert [s.num_units for s in result.written.stages] == [s.num_units for s in one.stages]
            assert result.written.num_microbatches == one.num_microbatches


def test_what_a_trainer_says_exactly_it_says_in_the_same_words_twice():
    target = wide_problem()
    estimator = Estimator(target)
    for one in uniform_random(target, 20, seed=3):
        first, second = (export_plan(target, one, "megatron", estimator) for _ in range(2))
        assert first.exact
        assert first.files == second.files


def test_losses_name_each_field_that_differs():
    estimate = Estimator(problem())(plan(stage(3, "fast", size=1), stage(3, "slow", size=1)))
    one = plan(stage(3, "fast", tp=2), stage(3, "slow", mode="full", recomputed=1))
    other = replace(one, zero_stage=0, stages=(stage(3, "fast"), stage(3, "slow")))
    found = losses(one, other, estimate)
    assert [loss.field for loss in found] == ["zero_stage", "stage 0 replicas", "stage 1 recompute"]
    assert found[1].plan_value == "1 of 2 fast x 1 samples"
    assert (found[2].plan_value, found[2].written_value) == ("full in 1 layers", "none")
    assert {loss.iteration_s for loss in found} == {estimate.iteration_s}


def test_recomputation_per_stage_becomes_one_of_the_job_that_fits_at_the_least_price():
    target = problem(global_batch_size=8)
    one = plan(stage(3, "fast", mode="full", recomputed=2), stage(3, "slow", mode="none"))
    estimator = Estimator(target)
    result = export_plan(target, one, "megatron", estimator)
    assert [loss.field for loss in result.losses] == ["stage 0 recompute"]  # both fit without
    assert result.iteration_s < estimator(one).iteration_s


def test_a_degraded_plan_that_does_not_fit_is_refused_and_says_what_is_missing():
    tight = problem((group("fast", memory_gb=8.0), group("slow", memory_gb=8.0)), {"num_layers": 60, "hidden": 2048})
    one = plan(stage(31, "fast", tp=4, mode="full", recomputed=30), stage(31, "slow", tp=2, mode="full", recomputed=30))
    with pytest.raises(InputError, match=r"megatron: without what it cannot say \(.*replicas.*misses .* GiB"):
        export_plan(tight, one, "megatron", Estimator(tight))


def test_where_no_uniform_plan_fits_as_it_is_one_that_recomputes_is_written():
    """The best plan known for llama3_8b on 8 A100-40 and 16 V100-16: tp 2 and tp 4, nothing recomputed."""
    target = load_problem()
    one = plan(stage(21, "a100", 2, 4, 1), stage(13, "v100", 4, 4, 1), m=32)
    result = export_plan(target, one, "megatron", Estimator(target))
    assert {"stage 0 recompute", "stage 1 recompute"} <= {loss.field for loss in result.losses}
    assert result.fits
    assert result.iteration_s > result.plan_s


def test_an_exact_export_of_a_plan_that_does_not_fit_says_so():
    tight = problem((group("fast", memory_gb=4.0),), {"num_layers": 60, "hidden": 2048})
    result = export_plan(tight, plan(stage(62, "fast")), "megatron", Estimator(tight))
    assert result.exact
    assert not result.fits


def test_an_unknown_target_is_one_line_with_those_there_are():
    with pytest.raises(InputError, match=r"to='nemo' is not one of megatron, torchtitan, flagscale"):
        target_named("nemo")


def test_unequal_samples_and_mixed_stages_become_equal_ones_on_one_group():
    target = in_bf16(problem(global_batch_size=32))
    mixed = replace(stage(3, "fast"), replicas=(*stage(3, "fast", size=3).replicas, *stage(3, "slow", size=1).replicas))
    one = plan(stage(3, "slow", tp=1, dp=2, size=2), mixed, m=8)
    for name in ("megatron", "flagscale"):
        result = export_plan(target, one, name, Estimator(target))
        assert "stage 1 replicas" in [loss.field for loss in result.losses]
        assert all(len(s.replicas) == 1 for s in result.written.stages)
