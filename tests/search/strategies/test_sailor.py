"""Sailor: even layers, the least tp that fits per device type, and its dynamic program against every placement."""

import itertools

import numpy as np

from haap_rl.search.base import Budget, Objective, run_search
from haap_rl.search.strategies import sailor, stages
from haap_rl.search.strategies.sailor import Regions, Sailor
from haap_rl.space.options import Option, SpaceSpec
from tests.builders import group, problem, set_tables

SPEC = SpaceSpec(num_microbatches=(4,), max_stages=4, max_tp=4, group_sizes=(1, 2, 4), recompute=("none",))


def two_types(layers=4, **changes):
    groups = (group("roomy", per_node=4, tflops=50.0), group("tight", per_node=4, memory_gb=16.0))
    target = problem(groups, {"num_layers": layers}, global_batch_size=16)
    return Objective(target, space=SPEC).space


def test_each_device_type_has_the_least_tp_that_fits_by_hand(monkeypatch):
    monkeypatch.setattr(sailor, "send_s", lambda *_: 0.25)
    space = two_types()
    # two layers fit on a roomy device alone and on two tight ones; a layer takes 3 s there and 2 s on two tight ones
    set_tables(
        space, 4, lambda option: 3 if option.group == 0 else 4 // option.tp,
        most=lambda option, s: 2 if option.group == 0 or option.tp >= 2 else 1,
    )  # fmt: skip
    regions = Regions(space, 4, 2, 2, "none")
    roomy, tight = (space.option_index[Option(*shape, "none")] for shape in ((0, 1, 2), (1, 2, 2)))
    assert regions.layers == (2, 2)
    assert regions.choices == [[(roomy, 6), (tight, 4)]] * 2
    # the tight group has room for one stage of 2 x 2 devices. tight + roomy: 4 + 6 s, two sends of 0.25 s and 3 x 6 s,
    # 28.5 s; roomy twice: 12.5 + 18 = 30.5 s
    best, _ = stages.squeeze(regions.solve, 4)
    assert (best.total_s, best.slowest_s) == (10.5, 6)
    assert set(regions.genome(best).options) == {roomy, tight}
    assert regions.genome(best).layers == (2, 2)


def test_layers_are_even_and_dp_is_one_for_all_stages():
    groups = (group("a", per_node=4), group("b", per_node=4, tflops=40.0, memory_gb=16.0))
    target = problem(groups, {"num_layers": 7}, global_batch_size=16)
    priced = []

    class Watched(Objective):
        def many(self, codes, limit_s=np.inf):
            priced.extend(self.space.genome_of(code) for code in codes)
            return super().many(codes, limit_s)

    objective = Watched(target, space=SPEC)
    Sailor().search(target, objective, np.random.default_rng(0))
    assert len(priced) == objective.evaluations >= 10
    for genome in priced:
        assert max(genome.layers) - min(genome.layers) <= 1
        assert len({objective.space.options[k].dp for k in genome.options}) == 1
    assert {len(genome.options) for genome in priced} == {1, 2, 3, 4}


def test_the_program_equals_every_placement():
    rng = np.random.default_rng(1)
    impossible = 0
    for _ in range(60):
        layers, p, dp = int(rng.integers(2, 8)), int(rng.integers(1, 5)), int(rng.choice([1, 2, 4]))
        if p > layers:
            continue
        space = two_types(layers)
        seconds = rng.integers(1, 9, len(space.options))
        caps = rng.integers(0, layers + 2, (len(space.options), 5))
        set_tables(
            space, 4, lambda o, space=space, seconds=seconds: int(seconds[space.option_index[o]]), 1, 2,
            lambda o, s, space=space, caps=caps: int(caps[space.option_index[o], s]),
        )  # fmt: skip
        regions = Regions(space, 4, p, dp, "none")
        best, _ = stages.squeeze(regions.solve, 4) if regions.possible else (None, 0)
        found = None if best is None else best.total_s + 3 * best.slowest_s
        times = []
        for chosen in itertools.product(*regions.choices):
            options = tuple(k for k, _ in chosen)
            if min(space.devices_left(options)) < 0:
                continue
            sends = sum(2 * stages.send_s(space, 4, a, b) for a, b in itertools.pairwise(options))
            times.append(sum(s for _, s in chosen) + sends + 3 * max(s for _, s in chosen))
        impossible += not times
        assert (found is None) == (not times)
        assert not times or abs(found - min(times)) < 1e-9
    assert 0 < impossible < 40


def test_it_ends_with_a_plan_and_says_what_it_took():
    target = problem((group("a", per_node=4), group("b", per_node=4, tflops=40.0)), global_batch_size=16)
    result = run_search(Sailor(), target, Budget(evaluations=5000), space=SPEC)
    assert result.stopped_by == "finished"
    assert result.estimate.fits
    assert "Sailor's dynamic program" in result.notes[0]
