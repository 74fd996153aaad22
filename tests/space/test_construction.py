"""Building plans stage by stage: never a dead end, features as stated, and the kernels equal to the readable twin."""

import numpy as np
import pytest

from haap_rl.problem.presets import load_problem
from haap_rl.search.base import Objective
from haap_rl.space import construction
from haap_rl.space import construction_kernels as compiled
from haap_rl.space.balance import pipeline_fill
from haap_rl.space.construction import COLUMN, FEATURES
from haap_rl.space.options import SpaceSpec
from tests.builders import group, problem, room, three_groups

SMALL = {"num_microbatches": (2, 4, 8), "max_stages": 5, "max_tp": 4, "group_sizes": (1, 2, 4, 8)}


def odd_nodes():
    return problem((group("odd", nodes=2, per_node=3), group("slow", per_node=4)), {"num_layers": 9})


SPACES = {
    "default": (load_problem, SpaceSpec()),
    "three groups, tight": (three_groups, SpaceSpec(**SMALL)),
    "two types in a stage": (lambda: three_groups({"tied_embeddings": True}), SpaceSpec(**SMALL, mixed_stages=True)),
    "memory ignored": (three_groups, SpaceSpec(**SMALL, memory_aware_init=False)),
    "more stages than layers": (
        lambda: problem(model_changes={"num_layers": 3}),
        SpaceSpec(num_microbatches=(1, 2, 8), max_stages=12),
    ),
    "odd nodes": (odd_nodes, SpaceSpec(num_microbatches=(1, 8), max_stages=6, group_sizes=(1, 2, 3, 6))),
}


def space_of(name):
    make, spec = SPACES[name]
    return Objective(make(), space=spec).space


def built(space, rng):
    """Each state of a random episode with what the kernel saw of it, then the row it ends in."""
    c = space.construction
    partials = compiled.partials(1, c.max_stages, len(c.total))
    seen = np.zeros((1, max(len(c.step) + 1, len(c.m)), len(FEATURES)), np.float32)
    partial, only = construction.begin(c), np.array([0])
    compiled.begin_many(c, partials, only, np.array([-1]), seen)
    while True:
        mask = construction.legal(c, partial)
        yield partial, mask, seen[0]
        action = int(rng.choice(np.flatnonzero(mask)))
        ended, rows = compiled.step_many(c, partials, only, np.array([action]), seen)
        if partial.count >= 0 and action == len(c.step):
            assert ended[0]
            assert space.genome_of(rows[0]) == construction.genome(space, partial)
            yield rows[0]
            return
        assert not ended[0]
        partial = construction.chosen(c, partial, action)


@pytest.mark.parametrize("name", SPACES)
def test_kernels_see_what_the_readable_twin_sees_and_episodes_end_in_plans(name):
    space, rng = space_of(name), np.random.default_rng(0)
    c = space.construction
    for _ in range(40):
        *states, row = built(space, rng)
        for partial, mask, seen in _again(space, states):
            assert mask.any(), "a dead end"
            features = construction.features(c, partial)
            assert np.abs(features).max() <= construction.MOST
            np.testing.assert_array_equal(features[:, COLUMN["legal"]] > 0, mask)
            np.testing.assert_allclose(seen[: len(features)], features, atol=2e-6)
            assert not seen[len(features) :].any()
        genome = space.genome_of(row)
        assert sum(genome.layers) == space.num_layers
        assert min(space.devices_left(genome.options)) >= 0
        estimate = space.estimator(space.plan(genome))  # which validates the plan
        assert estimate.fits or not space.spec.memory_aware_init


def _again(space, states):
    """The states with the kernel's view of each: it shares one array, so it is looked at anew."""
    c = space.construction
    partials = compiled.partials(1, c.max_stages, len(c.total))
    seen, only = np.zeros((1, max(len(c.step) + 1, len(c.m)), len(FEATURES)), np.float32), np.array([0])
    for partial, mask, _ in states:
        compiled.begin_many(c, partials, only, np.array([partial.count]), seen)
        for action in partial.options:
            compiled.step_many(c, partials, only, np.array([action]), seen)
        yield partial, mask, seen[0].copy()


@pytest.mark.parametrize("name", ["default", "three groups, tight", "two types in a stage"])
def test_no_episode_of_many_ends_dead(name):
    """A legal choice at every step of 20,000 random episodes, each a plan that fits."""
    space = space_of(name)
    c, n = space.construction, 2000
    rng = np.random.default_rng(1)
    partials = compiled.partials(n, c.max_stages, len(c.total))
    seen = np.zeros((n, len(c.step) + 1, len(FEATURES)), np.float32)
    objective = Objective(space.problem, space=space.spec)
    for _ in range(10):
        building = np.arange(n)
        compiled.begin_many(c, partials, building, np.full(n, -1), seen)
        while len(building):
            legal = seen[building, :, 0] > 0
            assert legal.any(1).all()
            actions = (rng.random(legal.shape) * legal).argmax(1)
            ended, rows = compiled.step_many(c, partials, building, actions, seen)
            building, rows = building[~ended], rows[ended]
            if len(rows):
                assert not objective.many(rows).bytes_missing.any()


def test_what_is_legal_is_exactly_what_can_be_completed():
    """Against brute force: a choice is legal if and only if some sequence of options behind it holds the model."""
    space = Objective(three_groups(), space=SpaceSpec(**{**SMALL, "max_stages": 3, "num_microbatches": (4,)})).space
    c = space.construction

    def completable(options):
        """Whether options, counted from the end, are the end of a plan that holds."""
        if space.holds(4, tuple(reversed(options))):
            return True
        left = space.devices_left(tuple(options))
        return len(options) < 3 and any(
            min(space.devices_left((*options, k))) >= 0 and completable((*options, k))
            for k in range(len(space.options))
        ) if min(left) >= 0 else False  # fmt: skip

    rng = np.random.default_rng(2)
    for _ in range(15):
        partial = construction.chosen(c, construction.begin(c), 0)
        while True:
            mask = construction.legal(c, partial)
            for k in rng.choice(len(space.options), 6, replace=False).tolist():
                if min(space.devices_left((*partial.options, k))) >= 0:
                    assert mask[k] == completable((*partial.options, k)), (partial, k)
            assert mask[-1] == space.holds(4, tuple(reversed(partial.options))) if partial.options else not mask[-1]
            action = int(rng.choice(np.flatnonzero(mask)))
            if action == len(c.step):
                break
            partial = construction.chosen(c, partial, action)


def test_stop_now_is_the_pipeline_that_the_balancer_gives():
    """Two stages on one device each: by hand."""
    target = problem(
        (group("fast", per_node=1, tflops=100.0), group("slow", per_node=1, tflops=50.0)), {"num_layers": 8}
    )
    spec = SpaceSpec(num_microbatches=(8,), max_stages=2, max_tp=1, group_sizes=(1,), recompute=("none",))
    space = Objective(target, space=spec).space
    c, tables = space.construction, space.tables(8)
    partial = construction.begin(c)
    for action in (0, 1, 0):
        partial = construction.chosen(c, partial, action)
    assert partial.options == (1, 0)
    genome = space.decode(8, (0, 1))
    busy = [n * tables.layer_s[k] for k, n in zip(genome.options, genome.layers, strict=True)]
    busy = [busy[0] + tables.embedding_s[0], busy[1] + tables.head_s[1]]
    microbatch_s = 8 / sum(1 / s for s in tables.layer_s)
    sends_s = float(c.send[0, 0, 1]) * microbatch_s
    busy = [seconds + c.blocking * sends_s for seconds in busy]
    expected = (7 * max(busy) + sum(busy) + (1 - c.blocking) * sends_s) / (8 * microbatch_s)
    expected += genome.layers[0] * float(c.tail[0, 0])
    stop = construction.features(c, partial)[-1]
    assert stop[COLUMN["stop_now"]] == pytest.approx(np.log(expected), abs=1e-6)
    assert stop[COLUMN["slowest"]] == pytest.approx(np.log(max(busy) / microbatch_s), abs=1e-6)
    assert c.ideal_s == pytest.approx(8 * microbatch_s)


def test_features_are_free_of_units():
    """A cluster ten times as fast with links ten times as fast and no latency sees the same ratios."""

    def seen(scale):
        groups = [
            group("fast", tflops=100.0 * scale, bandwidth_gb=1000.0 * scale, intra_gb=100.0 * scale,
                  inter_gb=10.0 * scale, latencies_us=(1e-6, 1e-6)),
            group("slow", tflops=50.0 * scale, bandwidth_gb=1000.0 * scale, intra_gb=100.0 * scale,
                  inter_gb=10.0 * scale, latencies_us=(1e-6, 1e-6)),
        ]  # fmt: skip
        space = Objective(problem(groups), space=SpaceSpec(num_microbatches=(4, 8), max_stages=4)).space
        c = space.construction
        partial = construction.chosen(c, construction.begin(c), 1)
        partial = construction.chosen(c, partial, int(np.flatnonzero(construction.legal(c, partial))[0]))
        return construction.features(c, partial)

    # host time and small messages, which do not scale with the devices, are all that may differ
    one, ten = seen(1.0), seen(1.01)
    np.testing.assert_allclose(one, ten, rtol=0.02, atol=0.02)


def test_no_plan_fits_is_said():
    from haap_rl.problem.errors import InputError

    target = problem((group("small", memory_gb=room(0.01)),))
    with pytest.raises(InputError, match="no plan of the space fits"):
        _ = Objective(target).space.construction


def test_pipeline_fill_is_the_best_split_of_all():
    """Against every split of some layers over two to four stages."""
    rng = np.random.default_rng(0)
    for _ in range(150):
        p, m = int(rng.integers(1, 5)), int(rng.choice([1, 2, 4, 32]))
        each, fixed = rng.uniform(0.2, 3.0, p).tolist(), rng.uniform(0.0, 2.0, p).tolist()
        caps, layers = rng.integers(1, 9, p).tolist(), int(rng.integers(p, 13))
        splits = [n for n in np.ndindex(*(cap + 1 for cap in caps)) if min(n) > 0 and sum(n) == layers]

        def seconds(split, m=m, each=each, fixed=fixed):
            times = [n * one + more for n, one, more in zip(split, each, fixed, strict=True)]
            return (m - 1) * max(times) + sum(times)

        found = pipeline_fill(each, fixed, caps, layers, m)
        if not splits:
            assert found is None
        else:
            assert found in splits
            assert seconds(found) == pytest.approx(min(map(seconds, splits)))
