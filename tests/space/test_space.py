"""The declared space against brute force: counts, memory, draws without dead ends, the bound, the balancer, moves."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from haap_rl.cost.estimator import Estimator
from haap_rl.problem.errors import InputError
from haap_rl.problem.presets import load_problem, preset
from haap_rl.search.base import Budget, load_searcher, run_search
from haap_rl.space import moves
from haap_rl.space.balance import even_split, water_fill
from haap_rl.space.bound import lower_bound
from haap_rl.space.initial import draw_options, pruning_report
from haap_rl.space.options import SpaceSpec
from haap_rl.space.space import Genome, Space
from tests.builders import group, problem, room
from tests.space.enumerate_plans import compositions, every_plan

TINY = SpaceSpec(num_microbatches=(2, 4), max_stages=3, max_tp=2, group_sizes=(1, 2), recompute=("none", "full"))


def tiny(fast_gb=2.4, slow_gb=1.0, layers=5, **settings):
    """Two small groups whose memory, beside the reserve, admits some plans and refuses others."""
    groups = (
        group("fast", per_node=2, memory_gb=room(fast_gb)),
        group("slow", per_node=2, memory_gb=room(slow_gb), tflops=40.0),
    )
    changes = {"num_layers": layers, "tied_embeddings": settings.pop("tied", False)}
    return problem(groups, changes, global_batch_size=8, seq_len=1024, **settings)


def bind(target, spec=TINY):
    return Space(target, spec, Estimator(target))


@pytest.mark.parametrize(
    ("fast_gb", "slow_gb", "tied", "zero"), [(2.4, 1.0, False, 1), (1.45, 0.75, True, 1), (1.6, 1.05, False, 0)]
)
def test_counts_and_bound_equal_brute_force(fast_gb, slow_gb, tied, zero):
    target = tiny(fast_gb, slow_gb, layers=4, tied=tied)
    spec = SpaceSpec(
        num_microbatches=(2, 4), max_stages=3, max_tp=2, group_sizes=(1, 2), recompute=("none", "full"), zero_stage=zero
    )
    space = bind(target, spec)
    plans = list(every_plan(space))
    fitting = [(genome, estimate) for genome, estimate in plans if estimate.fits]
    report = pruning_report(target, spec)
    assert report.plans == len(plans)
    assert report.plans_that_fit == len(fitting)
    assert 0 < len(fitting) < len(plans)
    assert report.factor == len(plans) / len(fitting)

    best = min(estimate.iteration_s for _, estimate in fitting)
    bound = lower_bound(target, spec)
    assert 0.3 * best < bound.seconds <= best

    # the tables agree with the estimator plan by plan
    for genome, estimate in plans:
        caps = space.tables(genome.num_microbatches).caps(genome.options)
        assert estimate.fits == all(n <= cap for n, cap in zip(genome.layers, caps, strict=True))


def test_room_knows_exactly_what_can_be_completed():
    target = tiny(1.45, 0.75, layers=4)
    space = bind(target)
    for m in space.num_microbatches:
        holds = [
            sum(space.tables(m).caps(options))
            for p in range(1, 4)
            for options in itertools.product(range(len(space.options)), repeat=p)
            if min(space.devices_left(options)) >= 0 and min(space.tables(m).caps(options)) > 0
        ]
        assert space.room(m).most_layers == max(holds)


def test_every_draw_fits_and_draws_differ():
    space = bind(tiny())
    rng = np.random.default_rng(0)
    drawn = [space.draw(rng) for _ in range(200)]
    assert all(space.estimator(space.plan(genome)).fits for genome in drawn)
    assert len(set(drawn)) > 10


def test_draws_reach_every_stage_sequence_that_fits():
    # one micro-batch count, few options: all sequences with room for the layers must come up
    spec = SpaceSpec(num_microbatches=(4,), max_stages=2, max_tp=1, group_sizes=(1,), recompute=("none", "full"))
    space = bind(tiny(layers=3), spec)
    rng = np.random.default_rng(1)
    drawn = {draw_options(space.room(4), 3, rng.random(1 + space.max_stages)) for _ in range(2000)}
    possible = {
        options
        for p in (1, 2)
        for options in itertools.product(range(len(space.options)), repeat=p)
        if space.holds(4, options)
    }
    assert drawn == possible


def test_no_plan_has_fewer_stages_than_the_memory_minimum():
    space = bind(tiny(1.1, 0.75, layers=5))
    for m in space.feasible_microbatches:
        least = space.room(m).min_stages(space.num_layers)
        fitting = [len(g.options) for g, e in every_plan(space) if e.fits and g.num_microbatches == m]
        assert least <= min(fitting)


def test_without_memory_awareness_draws_ignore_memory_but_bound_and_report_do_not():
    target = tiny(1.45, 0.75)
    blind_spec = SpaceSpec(**{**spec_values(TINY), "memory_aware_init": False})
    blind = bind(target, blind_spec)
    rng = np.random.default_rng(0)
    fits = [blind.estimator(blind.plan(blind.draw(rng))).fits for _ in range(200)]
    assert not all(fits)
    assert pruning_report(target, blind_spec) == pruning_report(target, TINY)
    assert lower_bound(target, blind_spec) == lower_bound(target, TINY)


def spec_values(spec):
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}


def test_nothing_fits_is_explained():
    target = tiny(0.05, 0.05)
    space = bind(target)
    assert space.feasible_microbatches == ()
    assert lower_bound(target, TINY).seconds == math.inf
    assert pruning_report(target, TINY).plans_that_fit == 0
    with pytest.raises(InputError) as error:
        space.draw(np.random.default_rng(0))
    message = str(error.value)
    assert all(word in message for word in ("fast_device", "slow_device", "must hold at least", "GiB", "add devices"))
    assert "\n" not in message


def test_a_huge_cluster_is_planned_with_coarser_device_counts():
    groups = tuple(group(name, nodes=64, per_node=8, memory_gb=room(13.5)) for name in ("a", "b", "c"))
    space = bind(problem(groups, {"num_layers": 12}), SpaceSpec(num_microbatches=(4,)))
    rng = np.random.default_rng(0)
    for _ in range(20):
        assert space.estimator(space.plan(space.draw(rng))).fits
    assert pruning_report(space.problem, space.spec).plans is None


# ------------------------------------------------------------------------------ the balancer
def test_water_fill_minimises_the_slowest_stage():
    rng = np.random.default_rng(0)
    for _ in range(200):
        p, n = int(rng.integers(1, 5)), int(rng.integers(4, 10))
        speed, fixed = rng.uniform(0.5, 2, p), rng.uniform(0, 1, p)
        caps = rng.integers(1, n + 1, p)
        filled = water_fill(speed.tolist(), fixed.tolist(), caps.tolist(), n)
        fitting = [c for c in compositions(n, p) if all(x <= cap for x, cap in zip(c, caps, strict=True))]
        if not fitting:
            assert filled is None
            continue
        assert filled in fitting

        def slowest(layers, fixed=fixed, speed=speed):
            return max(f + x * t for f, x, t in zip(fixed, layers, speed, strict=True))

        assert slowest(filled) == pytest.approx(min(slowest(c) for c in fitting))


def test_even_split_ignores_speed_and_keeps_caps():
    assert even_split([8, 8, 8], 9) == (3, 3, 3)
    assert even_split([1, 8, 8], 9) == (1, 4, 4)
    assert even_split([1, 1], 3) is None


def test_load_balance_switch():
    spec = SpaceSpec(**{**spec_values(TINY), "load_balance": False})
    target = tiny(6.0, 6.0, layers=6)
    fast, slow = (next(k for k, o in enumerate(bind(target).options) if o.group == g) for g in (0, 1))
    assert bind(target, spec).decode(4, (fast, slow)).layers == (3, 3)
    assert bind(target).decode(4, (fast, slow)).layers[0] > 3


# ----------------------------------------------------------------------------------- genomes
def test_plan_and_genome_are_inverse():
    target = load_problem()
    space = bind(target, SpaceSpec())
    rng = np.random.default_rng(0)
    for _ in range(50):
        genome = space.draw(rng)
        assert space.genome(space.plan(genome)) == genome


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"zero_stage": 3}, "zero_stage=3 of the plan is not that of this space, 1"),
        ({"virtual_stages": 2}, "interleaves"),
    ],
)
def test_plans_that_the_space_does_not_search_are_outside_it(changes, words):
    space = bind(load_problem(), SpaceSpec())
    inside = space.plan(space.draw(np.random.default_rng(0)))
    with pytest.raises(InputError, match=words):
        space.genome(dataclasses.replace(inside, **changes))


def test_default_space_is_the_preset():
    assert SpaceSpec.from_config(preset("space", "default")) == SpaceSpec()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_microbatches": [3]}, ["num_microbatches=[3]", "128"]),
        ({"num_microbatches": []}, ["num_microbatches"]),
        ({"num_microbatches": 4}, ["must be a list"]),
        ({"group_sizes": [0]}, ["group_sizes=0"]),
        ({"group_sizes": [4096]}, ["group size"]),
        ({"max_tp": -1}, ["max_tp=-1"]),
        ({"recompute": ["partial"]}, ["partial", "selective"]),
        ({"zero_stage": 3}, ["zero_stage=3"]),
        ({"load_balance": "no"}, ["load_balance"]),
        ({"max_stage": 3}, ["'max_stage'", "max_stages"]),
    ],
)
def test_a_bad_space_is_refused(changes, words):
    with pytest.raises(InputError) as error:
        bind(load_problem(), SpaceSpec.from_config({**preset("space", "default"), **changes}))
    assert all(word in str(error.value) for word in words), str(error.value)


# ------------------------------------------------------------------------------------- moves
@pytest.mark.parametrize("spec", [TINY, SpaceSpec()])
def test_legal_moves_give_plans_that_fit_and_is_legal_agrees_with_apply(spec):
    target = tiny(4.2, 4.2) if spec is TINY else load_problem("gpt3_1_3b")
    space = bind(target, spec)
    everything = moves.edits(space)
    assert len(set(everything)) == len(everything)
    rng = np.random.default_rng(0)
    kinds = set()
    for _ in range(15):
        genome = space.draw(rng)
        for move in everything:
            after = moves.apply(space, genome, move)
            assert moves.is_legal(space, genome, move) == (after is not None)
            if after is not None:
                kinds.add(move.kind)
                assert after != genome
                assert space.estimator(space.plan(after)).fits
                assert min(space.devices_left(after.options)) >= 0
    assert kinds >= {"shift", "tp", "devices", "recompute", "split", "merge", "swap", "remove", "microbatches"}


def test_a_move_changes_what_it_says():
    space = bind(load_problem("gpt3_1_3b"), SpaceSpec())
    index = {option[:4]: k for k, option in enumerate(space.options)}
    start = space.decode(16, (index[0, 1, 4, "none"], index[1, 4, 2, "selective"]))

    def after(kind, stage=0, argument=0):
        return [space.options[k][:4] for k in moves.apply(space, start, moves.Move(kind, stage, argument)).options]

    a, v = (0, 1, 4, "none"), (1, 4, 2, "selective")
    assert after("tp", 0, 1) == [(0, 2, 2, "none"), v]
    assert after("devices", 1, 1) == [a, (1, 4, 4, "selective")]
    assert after("recompute", 0, 1) == [(0, 1, 4, "selective"), v]
    assert after("swap", 0) == [v, a]
    assert after("split", 0) == [(0, 1, 2, "none"), (0, 1, 2, "none"), v]
    assert after("insert", 0, 0) == [a, a, v]
    assert after("insert", 1, 1) == [a, v, (1, 1, 8, "none")]
    assert after("group", 0, 1) == [(1, 1, 4, "none"), v]
    shifted = moves.apply(space, start, moves.Move("shift", 0, 1))
    assert shifted.layers == (start.layers[0] - 1, start.layers[1] + 1)
    assert moves.apply(space, start, moves.Move("microbatches", 0, 1)).num_microbatches == 32
    assert moves.apply(space, start, moves.Move("balance")) is None  # it is balanced already
    assert moves.apply(space, shifted, moves.Move("balance")) == start
    assert moves.apply(space, start, moves.Move("tp", 7, 1)) is None


def test_relief_changes_only_what_fits_and_never_repeats():
    space = bind(load_problem(), SpaceSpec())
    rng = np.random.default_rng(4)
    for _ in range(5):
        genome = space.draw(rng)
        for stage in range(len(genome.options)):
            found = list(moves.relief(space, genome, stage))
            assert len(set(found)) == len(found)
            assert genome not in found
            assert all(space.estimator(space.plan(other)).fits for other in found)


def test_random_neighbour_is_a_neighbour():
    space = bind(tiny(1.45, 0.75))
    rng = np.random.default_rng(0)
    everything = moves.edits(space)
    genome = space.draw(rng)
    neighbours = {moves.apply(space, genome, move) for move in everything} - {None}
    assert all(moves.random_neighbour(space, genome, everything, rng) in neighbours for _ in range(20))
    assert isinstance(genome, Genome)


def test_a_cluster_that_no_table_could_list_is_refused_before_one_is_built():
    target = problem((group("huge", nodes=10**12),))
    with pytest.raises(InputError, match=r"'huge' has 4,000,000,000,000 devices.*at most 1,000,000;") as error:
        run_search(load_searcher("random"), target, Budget(evaluations=10))
    assert "\n" not in str(error.value)
