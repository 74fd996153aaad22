"""What-if features: compiled and readable ones equal, and blind to scale, order and size of a problem."""

from functools import cache

import numpy as np
import pytest

from haap_rl.cost.estimator import Estimator
from haap_rl.cost.kernels import scratch
from haap_rl.problem.presets import load_problem
from haap_rl.space import kernels, move_feature_kernels, move_features, moves
from haap_rl.space.move_features import FEATURES, WIDEST
from haap_rl.space.options import SpaceSpec
from haap_rl.space.space import Space
from tests.builders import group, problem, room, three_groups

SMALL = {"num_microbatches": (2, 4, 8), "max_stages": 5, "max_tp": 4, "group_sizes": (1, 2, 4, 8)}
BATCH = {"global_batch_size": 16, "seq_len": 1024}
COLUMN = {name: x for x, name in enumerate(FEATURES)}


def tied():
    return three_groups({"tied_embeddings": True})


def tight():
    """So little memory that many plans do not fit."""
    groups = [group("fast", per_node=2, memory_gb=room(1.9)), group("slow", per_node=2, memory_gb=room(1.5))]
    return problem(groups, {"num_layers": 6}, **BATCH)


SPACES = {
    "default": (load_problem, SpaceSpec()),
    "three groups": (three_groups, SpaceSpec(**SMALL, recompute=("full", "none"))),
    "mixed stages": (tied, SpaceSpec(**SMALL, mixed_stages=True)),
    "no balancing": (tied, SpaceSpec(**SMALL, load_balance=False)),
    "tight": (tight, SpaceSpec(**SMALL)),
    "memory ignored": (tight, SpaceSpec(**SMALL, memory_aware_init=False)),
}
every_space = pytest.mark.parametrize("name", SPACES)


@cache
def bound(name):
    """(space, its moves, genomes: draws, and what is some random moves away from one)."""
    make, spec = SPACES[name]
    target = make()
    space = Space(target, spec, Estimator(target))
    edits = moves.edits(space)
    rng = np.random.default_rng(7)
    genomes = []
    for x in range(8 if name == "default" else 24):
        genome = space.draw(rng)
        for _ in range(x % 2 * 6):
            genome = moves.random_neighbour(space, genome, edits, rng)
        genomes.append(genome)
    return space, edits, genomes


def compiled(space, edits, genomes, moves_left, speed_up, tables=None):
    tables = space.stage_tables if tables is None else tables
    out = np.full((len(genomes), len(edits) + 1, len(FEATURES)), 99, np.float32)  # rubbish that must not stay
    codes, coded = space.encode(genomes), kernels.coded(edits)
    nb = space.neighbourhood
    move_feature_kernels.observe(tables, nb, scratch(tables), codes, coded, moves_left, speed_up, out)
    return out


def observed(name):
    """(features of the genomes of a space, space, moves, genomes)."""
    space, edits, genomes = bound(name)
    ones = np.ones(len(genomes))
    return compiled(space, edits, genomes, ones, ones), space, edits, genomes


@every_space
def test_compiled_features_are_the_readable_ones(name):
    space, edits, genomes = bound(name)
    rng = np.random.default_rng(1)
    moves_left, speed_up = rng.random(len(genomes)), np.exp(rng.normal(size=len(genomes)))
    found = compiled(space, edits, genomes, moves_left, speed_up)
    for genome, rows, left, faster in zip(genomes, found, moves_left, speed_up, strict=True):
        wanted = move_features.rows(space, genome, edits, lambda g: space.estimator(space.plan(g)), left, faster)
        np.testing.assert_allclose(rows, wanted, rtol=0, atol=1e-6)
    for column in ("missing", "missing_now"):
        assert (found[:, :, COLUMN[column]].max() > 0) == (name == "memory ignored")


@every_space
def test_rows_are_of_legal_moves_and_staying_is_legal_where_none_is(name):
    found, space, edits, genomes = observed(name)
    assert np.abs(found).max() <= WIDEST
    legal = found[:, :, 0] == 1
    assert (found[~legal] == 0).all()
    for genome, mask in zip(genomes, legal, strict=True):
        assert mask[:-1].tolist() == [moves.is_legal(space, genome, move) for move in edits]
        assert mask[-1] == (not mask[:-1].any())
    ones = np.ones(len(genomes))
    alone = compiled(space, edits[:0], genomes, ones, ones)[:, 0]
    same = [COLUMN[name] for name in ("slowest", "round_trip", "microbatches", "stages", "speed_up")]
    assert (alone[:, :2] == 1).all()
    assert (alone[:, same] == 0).all()
    for name in ("balance", "memory", "idle", "missing"):
        assert (alone[:, COLUMN[name]] == alone[:, COLUMN[f"{name}_now"]]).all()


@every_space
def test_what_a_column_says_is_what_the_move_does(name):
    found, space, edits, genomes = observed(name)
    for genome, rows in zip(genomes, found, strict=True):
        loads = space.estimator(space.plan(genome)).loads_s
        for move, row in zip(edits, rows[:-1], strict=True):
            if row[0] == 0:
                continue
            after = moves.apply(space, genome, move)
            value = dict(zip(FEATURES, row.tolist(), strict=True))
            then = space.estimator(space.plan(after)).loads_s
            assert value["slowest"] == pytest.approx(4 * np.tanh(np.log(max(then) / max(loads))), abs=1e-5)
            assert value["stages"] == len(after.options) - len(genome.options)
            assert value["microbatches"] == np.log2(after.num_microbatches / genome.num_microbatches)
            assert (value["idle"] == value["idle_now"]) or move.kind not in ("shift", "balance", "swap", "recompute")
            if move.kind == "shift" and not value["relieves"]:
                assert value["slowest"] >= 0  # the slowest stage was left alone
            kinds = [value[kind] for kind in move_features.GROUPS_OF_KINDS]
            assert sum(kinds) == (move.kind != "microbatches")


def test_a_ratio_beyond_all_numbers_is_at_the_edge():
    squashed = move_feature_kernels.squashed
    assert squashed(np.inf) == WIDEST
    assert squashed(0.0) == -WIDEST
    for ratio in (1e-3, 0.5, 1.0, 1.01, 30.0):
        assert squashed(ratio) == pytest.approx(move_features.squashed(ratio), abs=1e-12)


@every_space
def test_the_unit_of_time_does_not_matter(name):
    space, edits, genomes = bound(name)
    t = space.stage_tables
    slower = t._replace(
        **{name: 1000.0 * getattr(t, name) for name in ("forward_s", "backward_s", "sync_s", "optimizer_s", "send_s")},
        tied_rate=t.tied_rate * [1000.0, 0.001] if t.tied_rate.size else t.tied_rate,
    )
    ones = np.ones(len(genomes))
    here, there = (compiled(space, edits, genomes, ones, ones, tables) for tables in (t, slower))
    exact = [x for name, x in COLUMN.items() if name not in ("relieves", "load")]
    np.testing.assert_allclose(here[:, :, exact], there[:, :, exact], rtol=0, atol=1e-5)


def test_the_best_looking_moves_are_better_than_random_ones():
    found, space, edits, genomes = observed("default")
    ranks = []
    for genome, rows in zip(genomes, found, strict=True):
        legal = np.flatnonzero(rows[:-1, 0])
        times = [space.estimator(space.plan(moves.apply(space, genome, edits[x]))).iteration_s for x in legal]
        looks = rows[legal, COLUMN["slowest"]] + rows[legal, COLUMN["round_trip"]]
        ranks.append(np.argsort(np.argsort(times))[looks.argmin()] / len(legal))
    assert np.mean(ranks) < 0.2


def test_steps_of_many_plans_are_single_steps():
    space, edits, genomes = bound("three groups")
    coded, codes = kernels.coded(edits), space.encode(genomes)
    rng = np.random.default_rng(0)
    for _ in range(20):
        actions = rng.integers(len(edits) + 1, size=len(codes))
        out, legal = np.full_like(codes, 99), np.zeros(len(codes), np.bool_)
        move_feature_kernels.apply_each(space.neighbourhood, codes, coded, actions, out, legal)
        for code, action, row, moved in zip(codes, actions, out, legal, strict=True):
            genome = space.genome_of(code)
            after = moves.apply(space, genome, edits[action]) if action < len(edits) else None
            assert moved == (after is not None)
            assert row.tolist() == space.encode([after or genome])[0].tolist()
