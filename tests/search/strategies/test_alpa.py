"""Alpa's dynamic program: by hand, and against every way to cut."""

import itertools

import numpy as np
import pytest

from haap_rl.search.base import Budget, Objective, run_search
from haap_rl.search.strategies.alpa import Alpa, InterOperator
from haap_rl.search.strategies.megatron import Megatron
from haap_rl.search.strategies.stages import squeeze
from haap_rl.space.options import Option, SpaceSpec
from haap_rl.space.space import Genome
from tests.builders import group, problem, room, set_tables
from tests.space.enumerate_plans import compositions


def space_of(devices=2, layers=4, nodes=1, m=4, **spec):
    target = problem((group("fast", nodes=nodes, per_node=devices),), {"num_layers": layers}, global_batch_size=16)
    settings = {"max_stages": 4, "max_tp": 2, "group_sizes": (1, 2, 4, 8), "recompute": ("none",), **spec}
    return Objective(target, space=SpaceSpec(num_microbatches=(m,), **settings))


def planned(objective, m=4):
    program = InterOperator(objective, objective.space, m, "none")
    best, solves = squeeze(program.solve, m)
    return best, None if best is None else program.genome(best), solves, program


def test_four_layers_on_two_devices_by_hand():
    objective = space_of(max_tp=1)
    space = objective.space
    one, two = (space.option_index[Option(0, 1, dp, "none")] for dp in (1, 2))

    # a layer takes 2 s on one device, 1 s on two: one stage 4 + 3 x 4 = 16 s, two stages of two layers 8 + 3 x 4 = 20 s
    set_tables(space, 4, lambda option: 2 / option.dp)
    best, genome, _, _ = planned(objective)
    assert (best.total_s, best.slowest_s) == (4, 4)
    assert genome == (4, (two,), (4,))

    # 1.5 s on two: one stage 6 + 3 x 6 = 24 s, two stages still 20 s
    set_tables(space, 4, lambda option: 2 if option.dp == 1 else 1.5)
    best, genome, _, _ = planned(objective)
    assert (best.total_s, best.slowest_s) == (8, 4)
    assert genome == (4, (one, one), (2, 2))

    # and an embedding of 2 s: (2, 2) takes 6 and 4, 10 + 3 x 6 = 28 s; (1, 3) takes 4 and 6, as long; one stage
    # 8 + 3 x 8 = 32 s. A head of 1 s more: (2, 2) takes 6 and 5, 11 + 18 = 29 s; (1, 3) 4 and 7, 11 + 21 = 32 s
    set_tables(space, 4, lambda option: 2 if option.dp == 1 else 1.5, embedding_s=2, head_s=1)
    best, genome, _, _ = planned(objective)
    assert (best.total_s, best.slowest_s) == (11, 6)
    assert genome == (4, (one, one), (2, 2))


def test_memory_counts_the_microbatches_in_flight():
    objective = space_of(max_tp=1)
    space = objective.space
    one = space.option_index[Option(0, 1, 1, "none")]
    # two devices hold no stage; of one, the last stage has room for 3 layers and the one before it for 1
    set_tables(space, 4, lambda _: 2, most=lambda option, s: 0 if option.dp == 2 else {1: 3, 2: 1}.get(s, 0))
    _, genome, _, _ = planned(objective)
    assert genome == (4, (one, one), (1, 3))
    set_tables(space, 4, lambda _: 2, most=lambda option, s: 0 if option.dp == 2 else 1)
    assert planned(objective)[0] is None


def test_the_fastest_that_fits_is_taken_on_a_submesh():
    objective = space_of()
    space = objective.space
    wide, tall = (space.option_index[Option(0, tp, 2 // tp, "none")] for tp in (1, 2))
    set_tables(space, 4, lambda option: {1: 9, 2: 3 - option.tp}[option.num_devices])
    assert planned(objective)[1].options == (tall,)
    set_tables(space, 4, lambda option: {1: 9, 2: 3 - option.tp}[option.num_devices], most=lambda o, _: 4 * (o.tp == 1))
    assert planned(objective)[1].options == (wide,)


def test_submeshes_are_powers_of_two_in_a_node_and_whole_nodes():
    objective = space_of(devices=6, nodes=2, group_sizes=(1, 2, 3, 4, 6, 8, 12), m=1)
    assert planned(objective, 1)[3].sizes == [1, 2, 4]  # 6 and 12 replicas do not divide 16 samples
    objective = space_of(devices=4, nodes=2, m=1)
    assert planned(objective, 1)[3].sizes == [1, 2, 4, 8]


def test_the_program_equals_brute_force_over_its_own_choices():
    rng = np.random.default_rng(0)
    nothing = 0
    for _ in range(60):
        layers, m = int(rng.integers(2, 6)), int(rng.choice([1, 2, 4, 8]))
        objective = space_of(devices=4, layers=layers, m=m)
        space = objective.space
        seconds = rng.integers(1, 9, len(space.options))
        caps = rng.integers(0, layers + 1, (len(space.options), 5))
        set_tables(
            space, m, lambda o, space=space, seconds=seconds: int(seconds[space.option_index[o]]),
            int(rng.integers(3)), int(rng.integers(3)),
            lambda o, s, space=space, caps=caps: int(caps[space.option_index[o], s]),
        )  # fmt: skip
        best, genome, solves, program = planned(objective, m)
        found = None if best is None else best.total_s + (m - 1) * best.slowest_s
        assert found == brute_force(space, m)
        if best is None:
            nothing += 1
            continue
        stages = seconds_of(space, genome)
        assert found == sum(stages) + (m - 1) * max(stages)
        assert solves >= 1
        assert program.states > 0
    assert 0 < nothing < 40


def seconds_of(space, genome):
    tables, last = space.tables(genome.num_microbatches), len(genome.options) - 1
    return [
        n * tables.layer_s[k] + (i == 0) * tables.embedding_s[k] + (i == last) * tables.head_s[k]
        for i, (k, n) in enumerate(zip(genome.options, genome.layers, strict=True))
    ]


def brute_force(space, m):
    """Least sum + (m - 1) max over all stages that use all devices."""
    best = None
    tables = space.tables(m)
    for p in range(1, space.max_stages + 1):
        for options in itertools.product(range(len(space.options)), repeat=p):
            if space.devices_left(options) != [0] or any(space.sizes(m, k) is None for k in options):
                continue
            caps = tables.caps(options)
            for layers in compositions(space.num_layers, p):
                if any(n > cap for n, cap in zip(layers, caps, strict=True)):
                    continue
                stages = seconds_of(space, Genome(m, options, layers))
                time = sum(stages) + (m - 1) * max(stages)
                best = time if best is None else min(best, time)
    return best


@pytest.mark.parametrize("usable_gb", [3.0, 8.0])
def test_on_one_device_type_it_is_no_worse_than_the_uniform_grid_in_what_it_makes_least(usable_gb):
    target = problem((group("fast", per_node=4, memory_gb=room(usable_gb)),), {"num_layers": 6}, global_batch_size=16)
    spec = SpaceSpec(num_microbatches=(2, 4, 8), max_stages=4, max_tp=4, group_sizes=(1, 2, 4))
    alpa = run_search(Alpa(), target, Budget(evaluations=1000), space=spec)
    uniform = run_search(Megatron(devices="all"), target, Budget(evaluations=1000), space=spec)
    space = Objective(target, space=spec).space

    def pipeline_s(plan):
        stages = seconds_of(space, space.genome(plan))
        return sum(stages) + (plan.num_microbatches - 1) * max(stages)

    objective = Objective(target, space=spec)
    m = uniform.plan.num_microbatches
    mode = space.options[space.genome(uniform.plan).options[0]].recompute
    best, _ = squeeze(InterOperator(objective, objective.space, m, mode).solve, m)
    assert best.total_s + (m - 1) * best.slowest_s <= pipeline_s(uniform.plan) * (1 + 1e-12)
    assert "solves" in alpa.notes[0]
    assert "states" in alpa.notes[0]
    assert alpa.stopped_by == "finished"
