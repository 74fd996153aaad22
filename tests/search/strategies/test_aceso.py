"""Aceso: what each primitive does, which are tried for which bottleneck, and that no descent ends worse than begun."""

import numpy as np
import pytest

from haap_rl.problem.errors import InputError
from haap_rl.search.base import Budget, Objective, Prices, load_searcher, run_search
from haap_rl.search.strategies import aceso, one_type
from haap_rl.search.strategies.aceso import PRIMITIVES, RELIEVES, Aceso, Descent, even_start
from haap_rl.space.options import Option, SpaceSpec
from haap_rl.space.space import Genome
from tests.builders import group, problem, room

SPEC = SpaceSpec(num_microbatches=(2, 4, 8), max_stages=4, max_tp=4, group_sizes=(1, 2, 4))


def target(usable_gb=8.0, **changes):
    only = group("only", per_node=8, memory_gb=room(usable_gb))
    return problem((only,), {"num_layers": 8, **changes}, global_batch_size=16, seq_len=1024)


@pytest.fixture
def space():
    return Objective(target(), space=SPEC).space


def genome_of(space, *stages, m=4):
    """(tp, dp, layers[, mode]) per stage."""
    options = tuple(space.option_index[Option(0, tp, dp, *(mode or ["none"]))] for tp, dp, _, *mode in stages)
    return Genome(m, options, tuple(stage[2] for stage in stages))


def after(space, primitive, genome, stage, partners):
    """[(micro-batches, (tp, dp, layers, mode) per stage)] of what a primitive gives."""
    found = []
    for changed in PRIMITIVES[primitive](space, genome, stage, partners):
        options = [space.options[k] for k in changed.options]
        stages = [(o.tp, o.dp, n, o.recompute) for o, n in zip(options, changed.layers, strict=True)]
        found.append((changed.num_microbatches, stages))
    return found


def test_each_primitive_does_what_it_says(space):
    one, two = (1, 2, 5, "none"), (1, 4, 3, "none")
    genome = genome_of(space, one, two)  # 2 + 4 of 8 devices
    assert after(space, "dec-op", genome, 0, [1]) == [
        (4, [(1, 2, 4, "none"), (1, 4, 4, "none")]),
        (4, [(1, 2, 3, "none"), (1, 4, 5, "none")]),
        (4, [(1, 2, 1, "none"), (1, 4, 7, "none")]),
    ]
    idle = [(1, 4, 5, "none"), two]
    halved = [(1, 4, 5, "none"), (1, 2, 3, "none")]
    assert after(space, "inc-dp", genome, 0, [1]) == [(4, idle), (4, halved)]
    assert after(space, "inc-tp", genome, 0, [1]) == [(4, [(2, 2, 5, "none"), s]) for s in (two, halved[1])]
    assert after(space, "inc-tp dec-dp", genome, 0, [1]) == [(4, [(2, 1, 5, "none"), two])]
    assert after(space, "inc-dp dec-tp", genome_of(space, (2, 1, 5), (1, 4, 3)), 0, [1]) == [(4, [one, two])]
    assert after(space, "inc-dp dec-tp", genome, 0, [1]) == []  # there is no tp to give up
    assert after(space, "inc-rc", genome, 0, [1]) == [(4, [(1, 2, 5, "selective"), two])]
    assert after(space, "dec-rc", genome, 0, [1]) == []
    assert after(space, "dec-rc", genome_of(space, (1, 2, 5, "full"), two), 0, []) == [
        (4, [(1, 2, 5, "selective"), two])
    ]
    assert after(space, "inc-mbs", genome, 0, [1]) == [(2, [one, two])]
    # 8 micro-batches have 2 samples each: four replicas become two of two devices
    assert after(space, "dec-mbs", genome, 0, [1]) == [(8, [one, (2, 2, 3, "none")])]


def test_devices_and_layers_are_never_made_up(space):
    rng = np.random.default_rng(0)
    given = 0
    for code in space.draws(rng, 40):
        genome = space.genome_of(code)
        p = len(genome.options)
        for stage in range(p):
            partners = [j for j in range(p) if j != stage][:2]
            for primitive in PRIMITIVES.values():
                for changed in primitive(space, genome, stage, partners):
                    given += 1
                    assert sum(changed.layers) == space.num_layers
                    assert min(changed.layers) >= 1
                    assert min(space.devices_left(changed.options)) >= 0
                    space.problem.validate(space.plan(changed))
    assert given > 500


def test_every_primitive_relieves_something():
    assert {name for names in RELIEVES.values() for name in names} == set(PRIMITIVES)


class Explained:
    """As much of one as the choice of primitives reads: two stages at 4 micro-batches."""

    def __init__(self, busy, tensor_parallel, memory_share=(0.5, 0.5)):
        self.busy_s, self.tensor_parallel_s = np.array(busy, float), np.array(tensor_parallel, float)
        self.blocked_s = self.gradient_sync_s = self.optimizer_s = np.zeros(2)
        self.memory_share = np.array(memory_share)
        self.fits = max(memory_share) <= 1


@pytest.mark.parametrize(("explained", "stage", "resources"), [
    (Explained((3, 2), (1, 1)), 0, ["compute", "communication"]),
    (Explained((3, 4), (1, 3)), 1, ["communication", "compute"]),
    (Explained((9, 4), (1, 3), (0.7, 1.2)), 1, ["memory"]),
])  # fmt: skip
def test_the_bottleneck_by_hand(space, monkeypatch, explained, stage, resources):
    seen = []

    def noted(name):
        def primitive(space, genome, stage, partners):
            seen.append((name, stage, list(partners)))
            return iter(())

        return primitive

    monkeypatch.setattr(aceso, "PRIMITIVES", {name: noted(name) for name in PRIMITIVES})
    list(aceso.relief(space, genome_of(space, (1, 2, 4), (1, 2, 4)), explained))
    assert seen == [(name, stage, [1 - stage]) for resource in resources for name in RELIEVES[resource]]


def test_starts_are_even_by_hand(space):
    def start(p):
        genome = even_start(space, p)
        options = [space.options[k] for k in genome.options]
        return genome.num_microbatches, [(o.tp, o.dp) for o in options], genome.layers

    # 8 devices; a stage has at most 4. One sample per replica: 16 / 4 = 4 micro-batches
    assert start(1) == (4, [(1, 4)], (8,))
    assert start(2) == (4, [(1, 4), (1, 4)], (4, 4))
    # 8 / 3: two each, and two more for the last
    assert start(3) == (4, [(1, 2), (1, 2), (1, 4)], (3, 3, 2))
    assert start(4) == (8, [(1, 2)] * 4, (2, 2, 2, 2))


def test_no_descent_ends_worse_than_it_began_and_none_prices_twice():
    for usable_gb in (1.6, 8.0):
        for p in (1, 2, 3, 4):
            objective = Objective(target(usable_gb), Budget(evaluations=600), SPEC)
            (view,) = one_type.views(objective, None)
            start = even_start(view.space, p)
            descent = Descent(view, hops=3, until=0.9)
            descent.run(start)
            assert min(descent.seen.values()) <= descent.seen[start]
            assert objective.best_rank == min(descent.seen.values())
            assert {len(genome.options) for genome in descent.seen} == {p}  # each number of stages by itself
            assert objective.evaluations <= 600


def test_layers_move_from_the_slow_stage_until_both_take_equally_long():
    """Two stages of one device each, no other choice: the optimum is the best cut, and every hop gets nearer to it."""
    spec = SpaceSpec(num_microbatches=(8,), max_stages=2, max_tp=1, group_sizes=(1,), recompute=("none",))
    alone = problem((group("only", per_node=2, memory_gb=80.0),), {"num_layers": 8}, global_batch_size=16)
    objective = Objective(alone, space=spec)
    (view,) = one_type.views(objective, None)
    descent = Descent(view, hops=2, until=1.0)
    descent.run(Genome(8, (0, 0), (7, 1)))
    space = view.space
    cuts = {n: space.estimator(space.plan(Genome(8, (0, 0), (n, 8 - n)))).iteration_s for n in range(1, 8)}
    best = min(descent.seen, key=descent.seen.get)
    assert descent.seen[best][2] == min(cuts.values())


def test_hops_lead_through_what_is_worse(monkeypatch):
    """A better plan two primitives away is found with two hops and not with one."""

    class Line:
        """Configurations 0, 1, 2, ... in a row, each explained by nothing, with costs 5, 9, 1."""

        space = None
        objective = type("O", (), {"used": 0.0})()
        cost = (5.0, 9.0, 1.0)

        def explain(self, genome):
            return genome

        def price(self, genomes):
            costs = np.array([self.cost[genome] for genome in genomes])
            return Prices(costs, np.zeros(len(costs), np.int64), np.ones(len(costs), np.int64))

    monkeypatch.setattr(aceso, "relief", lambda space, genome, _: iter([[genome + 1]] if genome < 2 else []))
    found = {}
    for hops in (1, 2):
        descent = Descent(Line(), hops, until=1.0)
        descent.run(0)
        found[hops] = min(descent.seen, key=descent.seen.get)
    assert found == {1: 0, 2: 2}


def test_every_number_of_stages_has_its_share_of_the_budget():
    seen = {}

    class Watched(Objective):
        def many(self, codes, limit_s=np.inf):
            for code in codes:
                seen[int(code[1])] = seen.get(int(code[1]), 0) + 1
            return super().many(codes, limit_s)

    objective = Watched(target(), Budget(evaluations=400), SPEC)
    Aceso().search(target(), objective, np.random.default_rng(0))
    assert set(seen) == {1, 2, 3, 4}
    assert objective.evaluations <= 400


def test_more_evaluations_are_no_worse_on_a_real_case():
    times = [
        run_search(load_searcher("aceso"), target(2.0), Budget(evaluations=n), space=SPEC).estimate.iteration_s
        for n in (200, 2000)
    ]
    assert times[1] <= times[0]


@pytest.mark.parametrize(("hops", "words"), [(0, "at least 1"), (10**15, "at most 100")])
def test_absurd_hops_are_refused(hops, words):
    with pytest.raises(InputError, match=words):
        Aceso(hops=hops)
