"""The compiled moves, relief and draws against the readable ones: the same plans from the same random numbers."""

from functools import cache

import numpy as np
import pytest

from haap_rl.cost.estimator import Estimator
from haap_rl.problem.presets import load_problem
from haap_rl.space import balance, kernels, moves
from haap_rl.space.options import SpaceSpec
from haap_rl.space.space import Genome, Space
from tests.builders import group, problem, room, three_groups

SMALL = {"num_microbatches": (2, 4, 8), "max_stages": 5, "max_tp": 4, "group_sizes": (1, 2, 4, 8)}
BATCH = {"global_batch_size": 16, "seq_len": 1024}


def odd_nodes():
    """Nodes of 6 and of 10 devices, groups of 3, 5, 6 and 10 of them, a batch that 3 and 5 divide."""
    groups = [
        group("six", nodes=2, per_node=6, memory_gb=room(2.4)),
        group("ten", per_node=10, memory_gb=room(1.6), tflops=50.0),
    ]
    return problem(groups, {"num_layers": 9, "heads": 30, "kv_heads": 30}, global_batch_size=60, seq_len=1020)


def tight():
    """So little memory that many micro-batches in flight, or large ones, do not fit."""
    groups = [group("fast", per_node=2, memory_gb=room(1.9)), group("slow", per_node=2, memory_gb=room(1.5))]
    return problem(groups, {"num_layers": 6}, **BATCH)


ODD = {"num_microbatches": (3, 5, 6, 10, 12), "max_stages": 6, "max_tp": 6, "group_sizes": (1, 2, 3, 5, 6, 10)}
SPACES = {
    "default": (load_problem, SpaceSpec()),
    "three groups": (three_groups, SpaceSpec(**SMALL, recompute=("full", "none"))),
    "nodes of 6 and 10": (odd_nodes, SpaceSpec(**ODD)),
    "mixed stages": (three_groups, SpaceSpec(**SMALL, mixed_stages=True)),
    "no balancing": (three_groups, SpaceSpec(**SMALL, load_balance=False)),
    "memory ignored": (tight, SpaceSpec(**SMALL, memory_aware_init=False)),
    "few counts fit": (tight, SpaceSpec(**{**SMALL, "num_microbatches": (1, 2, 4, 8, 16)}, recompute=("none",))),
}
every_space = pytest.mark.parametrize("name", SPACES)


@cache
def bound(name):
    """(space, its Neighbourhood, its moves)."""
    make, spec = SPACES[name]
    target = make()
    space = Space(target, spec, Estimator(target))
    return space, kernels.build(space), moves.edits(space)


@cache
def genomes(name, count=40):
    """Random genomes of a space, half of them some moves away from a draw: not balanced, unlikely devices."""
    space, _, edits = bound(name)
    rng = np.random.default_rng(7)
    found = []
    for x in range(count):
        genome = space.draw(rng)
        for _ in range(x % 2 * 6):
            genome = moves.random_neighbour(space, genome, edits, rng)
        found.append(genome)
    return found


def empty(space, count=1):
    """Rows with rubbish in them, which a kernel must not leave there."""
    return np.full((count, 2 + 2 * space.max_stages), 99, np.int64)


def test_the_spaces_are_what_they_are_for():
    few, _, _ = bound("few counts fit")
    assert 0 < len(few.feasible_microbatches) < len(few.num_microbatches)
    mixed = bound("mixed stages")[0]
    assert any(mixed.options[k].partner for genome in genomes("mixed stages") for k in genome.options)
    odd = bound("nodes of 6 and 10")[0]
    assert {3, 5} <= {odd.options[k].num_devices for genome in genomes("nodes of 6 and 10") for k in genome.options}


@every_space
def test_rows_and_genomes_are_inverse(name):
    space, _, _ = bound(name)
    for genome in genomes(name):
        row = space.encode([genome])[0]
        assert space.genome_of(row) == genome
        assert row.sum() == row[:2].sum() + sum(genome.options) + space.num_layers


# ---------------------------------------------------------------------------------------- layers
def test_water_fill_gives_the_layers_of_the_readable_one():
    rng = np.random.default_rng(0)
    refused = 0
    for x in range(6000):
        p = int(rng.integers(1, 13))
        num_layers = int(rng.integers(1, 97))
        seconds = rng.uniform(0.5, 2, p) ** rng.choice([0, 1, 8])  # alike, similar, very different
        fixed = rng.uniform(0, 3, p) * rng.choice([0, 1, 10], p)
        if x % 3 == 0:  # whole numbers: many ties
            seconds, fixed = np.ceil(seconds), np.ceil(fixed)
        caps = rng.integers(0 if x % 4 == 0 else 1, rng.choice([2, 12, 100]) + 1, p)
        wanted = balance.water_fill(seconds.tolist(), fixed.tolist(), caps.tolist(), num_layers)
        layers = np.zeros(p, np.int64)
        filled = kernels.water_fill(seconds, fixed, caps, p, num_layers, np.zeros(p), layers)
        assert filled == (wanted is not None)
        refused += not filled
        if filled:
            assert tuple(layers) == wanted, (seconds, fixed, caps, num_layers)
    assert 500 < refused < 4500


@every_space
def test_decode_and_holds_judge_any_options_alike(name):
    space, nb, _ = bound(name)
    rng = np.random.default_rng(1)
    outcomes = set()
    for _ in range(400):
        m = int(rng.choice(space.num_microbatches))
        options = tuple(rng.integers(len(space.options), size=rng.integers(1, space.max_stages + 1)).tolist())
        row = empty(space)[0]
        row[: 2 + space.max_stages] = 0
        row[:2], row[2 : 2 + len(options)] = (space.num_microbatches.index(m), len(options)), options
        holds = kernels.holds(nb, row)
        assert holds == space.holds(m, options)
        wanted = space.decode(m, options)
        assert kernels.decode(nb, row) == (wanted is not None)
        outcomes.add((holds, wanted is not None))
        if wanted is not None:
            assert row.tolist() == space.encode([wanted])[0].tolist()
    assert len(outcomes) > 1


# ----------------------------------------------------------------------------------------- moves
@every_space
def test_every_move_gives_the_plan_of_the_readable_one(name):
    space, nb, edits = bound(name)
    table = kernels.coded(edits)
    kinds = set()
    for genome in genomes(name):
        row, out, mask = space.encode([genome])[0], empty(space)[0], np.zeros(len(edits), bool)
        wanted = [moves.apply(space, genome, move) for move in edits]
        assert kernels.legal_mask(nb, row, table, mask) == mask.sum()
        assert mask.tolist() == [after is not None for after in wanted]
        for move, code, after in zip(edits, table, wanted, strict=True):
            assert kernels.apply(nb, row, *code, out) == (after is not None), (genome, move)
            assert moves.is_legal(space, genome, move) == (after is not None)
            if after is not None:
                kinds.add(move.kind)
                assert out.tolist() == space.encode([after])[0].tolist(), (genome, move)
    assert len(kinds) >= 8


@every_space
def test_random_neighbours_are_the_same_from_the_same_generator(name):
    space, nb, edits = bound(name)
    readable, compiled = np.random.default_rng(3), np.random.default_rng(3)
    codes = np.array([space.encode([genome])[0] for genome in genomes(name)])
    out = empty(space, len(codes))
    for few in (edits, edits[:1], edits[5:12], ()):
        kernels.random_neighbours(nb, codes, kernels.coded(few), compiled, out)
        wanted = [moves.random_neighbour(space, genome, few, readable) for genome in genomes(name)]
        assert [space.genome_of(row) for row in out] == wanted
    assert readable.random() == compiled.random()


def test_where_few_moves_are_legal_they_are_still_drawn_alike():
    # two legal moves among very many: some streams run out of tries, and the legal ones are looked for
    space, nb, edits = bound("default")
    genome = genomes("default")[0]
    row = space.encode([genome])[0]
    legal = [move for move in edits if moves.is_legal(space, genome, move)]
    illegal = [move for move in edits if not moves.is_legal(space, genome, move)]
    listed = (*illegal[:1] * 400, *legal[:1], *illegal[:1] * 400, *legal[1:2])
    readable, compiled = np.random.default_rng(5), np.random.default_rng(5)
    for many in (listed, listed[:100]):
        out = empty(space, 20)
        kernels.random_neighbours(nb, np.tile(row, (20, 1)), kernels.coded(many), compiled, out)
        wanted = [moves.random_neighbour(space, genome, many, readable) for _ in range(20)]
        assert [space.genome_of(found) for found in out] == wanted
    assert wanted[0] == genome  # none of these is legal
    assert readable.random() == compiled.random()


@every_space
def test_relief_gives_the_same_plans_in_the_same_order(name):
    space, nb, _ = bound(name)
    out = empty(space, kernels.most_relief(space) + 1)
    for genome in genomes(name)[: 6 if name == "mixed stages" else 14]:
        row = space.encode([genome])[0]
        for stage in range(len(genome.options)):
            count = kernels.relief(nb, row, stage, out)
            assert [space.genome_of(found) for found in out[:count]] == list(moves.relief(space, genome, stage))
            assert len(np.unique(out[:count], axis=0)) == count


# ----------------------------------------------------------------------------------------- draws
@every_space
def test_draws_are_the_same_from_the_same_generator(name):
    space, nb, _ = bound(name)
    readable, compiled = np.random.default_rng(11), np.random.default_rng(11)
    out = empty(space, 120)
    assert kernels.draw(nb, compiled, out)
    assert [space.genome_of(row) for row in out] == [space.draw(readable) for _ in out]
    assert readable.random() == compiled.random()
    assert all((row == space.encode([space.genome_of(row)])[0]).all() for row in out)


def test_draws_on_a_cluster_whose_devices_are_counted_in_coarser_units():
    groups = tuple(group(name, nodes=16, per_node=8, memory_gb=room(13.5)) for name in ("a", "b", "c"))
    target = problem(groups, {"num_layers": 12}, global_batch_size=64)
    space = Space(target, SpaceSpec(num_microbatches=(4, 8)), Estimator(target))
    assert not space.room(4).exact
    nb = kernels.build(space)
    readable, compiled = np.random.default_rng(2), np.random.default_rng(2)
    out = empty(space, 30)
    assert kernels.draw(nb, compiled, out)
    assert [space.genome_of(row) for row in out] == [space.draw(readable) for _ in out]


def test_no_draw_where_nothing_fits_but_moves_still_say_so():
    groups = (group("fast", memory_gb=room(0.05)), group("slow", memory_gb=room(0.05)))
    target = problem(groups, **BATCH)
    space = Space(target, SpaceSpec(**SMALL), Estimator(target))
    nb = kernels.build(space)
    assert not kernels.draw(nb, np.random.default_rng(0), empty(space))
    (row,) = space.encode([Genome(4, (0, 1), (2, 2))])
    mask = np.ones(1, bool)
    assert kernels.legal_mask(nb, row, kernels.coded([moves.Move("swap")]), mask) == 0
