"""The compiled estimator against the readable one and, for what-ifs on one plan, against pricing the whole plan."""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from haap_rl.cost import kernels, stage_tables
from haap_rl.cost.calibration import DEFAULT, with_parameters
from haap_rl.cost.compiling import jit, ready
from haap_rl.cost.estimator import Estimator
from haap_rl.cost.kernels import BACKWARD, BY_CHANGE, BY_LOWER, BY_MEMORY, BY_UPPER, DELAY, FORWARD, STEP, SYNC
from haap_rl.problem.errors import InputError
from haap_rl.problem.plan import Problem
from haap_rl.problem.presets import load_problem
from haap_rl.search.base import CompiledPrices
from haap_rl.space import kernels as space_kernels
from haap_rl.space import moves
from haap_rl.space.options import SpaceSpec
from haap_rl.space.space import Genome, Space
from tests.builders import group, problem, room, three_groups

SMALL = {"num_microbatches": (2, 4, 8), "max_stages": 5, "max_tp": 4, "group_sizes": (1, 2, 4, 8)}
ODD = {"num_microbatches": (3, 5, 6, 10, 12), "max_stages": 6, "max_tp": 6, "group_sizes": (1, 2, 3, 5, 6, 10)}
TIED = {"tied_embeddings": True}


def odd_nodes(**model_changes) -> Problem:
    """Nodes of 6 and of 10 devices, which stages of 3 and 5 straddle; a batch that 3 and 5 divide."""
    groups = [
        group("six", nodes=3, per_node=6, memory_gb=room(2.4)),
        group("ten", nodes=2, per_node=10, memory_gb=room(1.6), tflops=50.0),
    ]
    changes = {"num_layers": 9, "heads": 30, "kv_heads": 30, **model_changes}
    return problem(groups, changes, global_batch_size=60, seq_len=1020)


def tight() -> Problem:
    groups = [group("fast", per_node=2, memory_gb=room(1.9)), group("slow", per_node=2, memory_gb=room(1.5))]
    return problem(groups, {"num_layers": 6}, global_batch_size=16, seq_len=1024)


SPACES = {
    "default": (load_problem, SpaceSpec()),
    "three groups": (three_groups, SpaceSpec(**SMALL)),
    "stages that straddle nodes": (odd_nodes, SpaceSpec(**ODD)),
    "tied embeddings": (lambda: three_groups(TIED), SpaceSpec(**SMALL)),
    "tied, straddling, mixed": (lambda: odd_nodes(**TIED), SpaceSpec(**{**ODD, "max_tp": 3}, mixed_stages=True)),
    "mixed stages": (three_groups, SpaceSpec(**SMALL, mixed_stages=True)),
    "sends half blocking": (lambda: three_groups(framework="deepspeed"), SpaceSpec(**SMALL)),
    "zero_stage 0": (three_groups, SpaceSpec(**SMALL, zero_stage=0)),
    "memory ignored": (tight, SpaceSpec(**SMALL, memory_aware_init=False)),
}
HALF_BLOCKING = with_parameters(DEFAULT, {"deepspeed.send_blocking": 0.5})
every_space = pytest.mark.parametrize("name", SPACES)


class Case(NamedTuple):
    """A space, its compiled face, and which kinds have the same devices as which, -1 beyond."""

    space: Space
    tables: stage_tables.StageTables
    prices: CompiledPrices
    edits: np.ndarray
    alike: np.ndarray


@cache
def case(name) -> Case:
    make, spec = SPACES[name]
    target = make()
    space = Space(target, spec, Estimator(target, calibration=HALF_BLOCKING))
    tables = space.stage_tables
    kinds = range(len(space.options))
    rows = [[q for q in kinds if q != k and kernels.stays_put(tables, k, q)] for k in kinds]
    alike = np.full((len(kinds), 1 + max(map(len, rows))), -1, np.int64)
    for k, row in enumerate(rows):
        alike[k, : len(row)] = row
    return Case(space, tables, CompiledPrices(space), space_kernels.coded(moves.edits(space)), alike)


def walk(name, starts, steps, seed=0):
    """(starts x steps) random plans of a space: draws, then random legal moves from each, so any layers and devices."""
    space, *_, edits, _ = case(name)
    rng = np.random.default_rng(seed)
    plans = [space.draws(rng, starts)]
    for _ in range(steps - 1):
        plans.append(np.zeros_like(plans[0]))
        space_kernels.random_neighbours(space.neighbourhood, plans[-2], edits, rng, plans[-1])
    return np.concatenate(plans)


def bounds(tables, plans):
    """(lower, upper, exact, bytes missing) of every plan."""
    lower, upper, exact, missing = (np.zeros(len(plans)) for _ in range(4))
    kernels.bound_many(tables, plans, kernels.scratch(tables), lower, upper, exact, missing)
    return lower, upper, exact, missing


# --------------------------------------------------------------------------- against the readable one
@every_space
def test_kernels_give_the_bits_of_the_readable_estimator(name):
    space, tables, prices, *_ = case(name)
    plans = walk(name, 60, 6)
    readable = Estimator(space.problem, calibration=HALF_BLOCKING)
    before = space.estimator.operators_requested, space.estimator.operators_distinct
    found = prices(plans, math.inf)
    lower, upper, *_ = bounds(tables, plans)
    for x, row in enumerate(plans):
        estimate = readable(space.plan(space.genome_of(row)))
        assert found.iteration_s[x] == estimate.iteration_s
        assert found.bytes_missing[x] == estimate.bytes_missing
        assert found.capacity_bytes[x] == sum(g.capacity_bytes for groups in estimate.memory for g in groups)
        assert prices.loads(row) == (
            estimate.loads_s,
            [sum(g.missing_bytes for g in groups) for groups in estimate.memory],
        )
        assert (lower[x], upper[x]) == pytest.approx(estimate.bounds_s, rel=1e-9)
    assert space.estimator.operators_requested - before[0] == readable.operators_requested
    assert space.estimator.operators_distinct - before[1] == readable.operators_distinct


def test_the_spaces_are_what_they_are_for():
    for name in ("stages that straddle nodes", "tied, straddling, mixed"):
        tables = case(name).tables
        work, seen = kernels.scratch(tables), set()
        for row in walk(name, 60, 6):
            kernels.place(tables, row, work)
            seen |= {int(np.flatnonzero(tables.row[row[2 + i]] == work.rows[i])[0]) for i in range(row[1])}
        assert {0, 1, 3} <= seen  # as few nodes as can be, one more, tensor parallelism across nodes besides
    assert any(case("mixed stages").space.options[k].partner for k in np.unique(walk("mixed stages", 60, 6)[:, 2]))
    assert (bounds(case("memory ignored").tables, walk("memory ignored", 60, 6))[3] > 0).any()
    assert case("sends half blocking").tables.blocking == 0.5
    assert case("tied embeddings").tables.tied_bytes > 0


def test_a_limit_leaves_the_bound_of_what_cannot_beat_it():
    _, tables, prices, *_ = case("default")
    plans = walk("default", 500, 4)
    exact = prices(plans, math.inf).iteration_s
    limit_s = float(np.quantile(exact, 0.2))
    limited = prices(plans, limit_s).iteration_s
    lower = bounds(tables, plans)[0] * (1 - kernels.SLACK)
    assert (limited == np.where(lower >= limit_s, lower, exact)).all()
    assert limited.argmin() == exact.argmin()
    assert 0 < (limited != exact).sum() < len(plans)


# ------------------------------------------------------------------------------------------- bounds
PLANS = 100_000  # over all spaces


@every_space
def test_bounds_enclose_the_exact_time(name):
    tables = case(name).tables
    lower, upper, exact, _ = bounds(tables, walk(name, 1000, -(-PLANS // (1000 * len(SPACES))), seed=1))
    assert (lower <= exact * (1 + 1e-12)).all()
    assert (upper >= exact * (1 - 1e-12)).all()
    assert np.median(lower / exact) > 0.9


def test_the_truncated_recurrence_is_exact_at_first_and_close_beyond():
    rng = np.random.default_rng(2)
    tables = case("default").tables
    work = kernels.scratch(tables)
    compared = set()
    for row in rng.permutation(walk("default", 500, 6, seed=2)):
        p, m = int(row[1]), int(tables.num_microbatches[row[0]])
        kernels.place(tables, row, work)
        kernels.stage_times(tables, row, work)
        truncated, exact = kernels.truncated_s(work.times, p, m, 2), kernels.exact_s(work.times, p, m)
        compared.add(m <= 2 * p)
        if m <= 2 * p:
            assert truncated == exact
        else:
            assert truncated == pytest.approx(exact, rel=0.05)
    assert compared == {False, True}


# ------------------------------------------------------------------------------------- move streams
STEPS = 1_000_000  # over all spaces
CHECKED, WRONG_BOUND, OTHER_BOUND, WRONG_DECISION, NOT_UNDONE, OTHER_PRICE, UNDIVIDED, HOW = range(8)


@jit
def path_bound_s(times, p, m):
    """The bound that `change_bound_s` keeps up to date, from the times of a whole plan."""
    lone = works = stays = before = 0.0
    for i in range(p):
        f, b = times[FORWARD, i], times[BACKWARD, i]
        lone += f + b + 2.0 * times[DELAY, i]
    for i in range(p):
        f, b = times[FORWARD, i], times[BACKWARD, i]
        ahead = min(p - 1 - i, m - 1)
        works = max(works, before + m * (f + b))
        stays = max(stays, (m - 1) * max(f, b) + (m - 1 - ahead) * min(f, b))
        before += f + b + 2.0 * times[DELAY, i]
    return max(lone + stays, works) + times[SYNC, 0] + times[STEP, 0]


@jit
def same_state(state, other):
    """Whether two states hold the same plan with the same bits."""
    p = state.plan[1]
    for x in range(state.plan.shape[0]):
        if state.plan[x] != other.plan[x]:
            return False
    for i in range(p):
        if state.work.rows[i] != other.work.rows[i] or state.work.spot[i] != other.work.spot[i]:
            return False
        for y in range(kernels.FREE):
            if state.work.times[y, i] != other.work.times[y, i] or state.trial.times[y, i] != state.work.times[y, i]:
                return False
    for y in range(state.sums.shape[0]):
        for x in range(1, p + 1):
            if state.sums[y, x] != other.sums[y, x]:
                return False
    return state.whole[0] == other.whole[0] and state.whole[1] == other.whole[1]


@jit
def stream(t, nb, state, twin, edits, alike, numbers, wholes, work, prices, missing, capacity, counts, tally):
    """One step per row of random `numbers`; `tally` counts what was checked, what was wrong, how what was decided."""
    S, whole = t.max_stages, wholes[0]
    for step in range(numbers.shape[0]):
        u = numbers[step]
        p = state.plan[1]
        if u[0] < 0.04:  # any other move, made for good
            x = int(u[1] * edits.shape[0])
            if space_kernels.apply(nb, state.plan, edits[x, 0], edits[x, 1], edits[x, 2], whole):
                kernels.commit(t, state, whole)
            continue
        i = int(u[1] * p)
        j, q, o = -1, 0, 0
        k, n = state.plan[2 + i], state.plan[2 + S + i]
        other = int(u[2] * p)
        if other != i:  # a layer from one stage to any other
            if n == 1:
                continue
            j = max(i, other)
            n, o = n - 1, state.plan[2 + S + other] + 1
            if i > other:
                n, o = o, n
            i = min(i, other)
            k, q = state.plan[2 + i], state.plan[2 + j]
        if other == i or u[3] < 0.3:  # another kind on the same devices, with layers shifted or not
            x = int(u[4] * alike.shape[1])
            if alike[k, x] >= 0:
                k = alike[k, x]
            if j >= 0 and u[3] < 0.15 and alike[q, x] >= 0:
                q = alike[q, x]
        kernels.changed_plan(state, i, k, n, j, q, o, whole)
        placed = kernels.place(t, whole, work)
        kernels.stage_times(t, whole, work)
        p, m = whole[1], t.num_microbatches[whole[0]]
        limit_s = state.whole[1] * (0.97 + 0.06 * u[5])
        seconds, how = kernels.what_if(t, state, i, k, n, j, q, o, limit_s)
        undivided = False
        for x in range(p):
            undivided = undivided or not work.times[FORWARD, x] < np.inf
        if undivided:  # a micro-batch that the new kind's replicas cannot share
            tally[UNDIVIDED] += 1
            tally[WRONG_DECISION] += seconds < limit_s
            continue
        exact = kernels.exact_s(work.times, p, m)
        missed = kernels.plan_missing_bytes(t, whole, work)
        lacks = missed > 0
        bound = kernels.change_bound_s(t, state, i, k, n, j, q, o)
        again = path_bound_s(work.times, p, m)
        tally[CHECKED] += 1
        tally[HOW + how] += 1
        tally[WRONG_BOUND] += not placed or not bound <= exact * (1 + 1e-12)
        tally[WRONG_BOUND] += missed != kernels.change_missing_bytes(t, state, i, k, n, j, q, o)
        tally[OTHER_BOUND] += not abs(bound - again) <= 1e-9 * again
        if how == BY_MEMORY:
            right = lacks and seconds == np.inf
        elif how == BY_CHANGE:
            right = exact >= limit_s and seconds >= limit_s
        elif how == BY_LOWER:
            right = exact >= limit_s and seconds >= limit_s and not lacks
        elif how == BY_UPPER:
            right = exact <= seconds and seconds < limit_s and not lacks
        else:
            right = seconds == exact and not lacks
        tally[WRONG_DECISION] += not right
        if u[6] < 0.2:
            if u[6] < 0.1:
                kernels.commit(t, twin, state.plan)
                kernels.commit(t, state, whole)
                kernels.undo(t, state)
                tally[NOT_UNDONE] += not same_state(state, twin)
            else:
                kernels.commit(t, state, whole)
        if step % 1000 == 0:
            space_kernels.copy(state.plan, whole)
            kernels.price_many(t, wholes, np.inf, work, prices, missing, capacity, counts)
            tally[OTHER_PRICE] += prices[0] != state.whole[1]


def run_stream(name, numbers):
    space, tables, _, edits, alike = case(name)
    start = space.draws(np.random.default_rng(3), 1)[0]
    state, twin = kernels.state_of(tables, start), kernels.state_of(tables, start)
    tally = np.zeros(HOW + 5, np.int64)
    prices = np.zeros(1), np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(3, np.int64)
    row = np.zeros((1, len(start)), np.int64)
    work = kernels.scratch(tables)
    stream(tables, space.neighbourhood, state, twin, edits, alike, numbers, row, work, *prices, tally)
    return tally


@pytest.mark.parametrize("name", SPACES)
def test_what_ifs_are_right_at_every_step_of_a_stream_of_moves(name):
    ready("kernel tests", lambda: run_stream("memory ignored", np.zeros((0, 7))))
    tally = run_stream(name, np.random.default_rng(4).random((-(-STEPS // len(SPACES)), 7)))
    assert tally[CHECKED] > 50_000
    assert tally[WRONG_BOUND:UNDIVIDED].tolist() == [0] * 5
    assert (tally[HOW:] > 0).all(), tally


def polished(name, start, most=10**9):
    """(evaluations, state after, how what was decided) of `polish` from a plan."""
    _, tables, _, _, alike = case(name)
    state, decided = kernels.state_of(tables, start), np.zeros(5, np.int64)
    evaluations = kernels.polish(tables, state, alike, most, np.zeros_like(start), decided)
    assert evaluations == decided.sum()
    return evaluations, state, decided


@pytest.mark.parametrize("name", ["three groups", "tied embeddings", "mixed stages", "stages that straddle nodes"])
def test_polish_ends_where_no_single_change_helps(name):
    space, _, prices, _, alike = case(name)
    readable = Estimator(space.problem, calibration=HALF_BLOCKING)
    improved = 0
    for start in space.draws(np.random.default_rng(5), 12):
        before_s = prices(start[None], math.inf).iteration_s[0]
        _, state, _ = polished(name, start)
        after = readable(space.plan(space.genome_of(state.plan)))
        assert after.fits
        assert after.iteration_s == state.whole[1] <= before_s
        improved += state.whole[1] < before_s
        m, options, layers = space.genome_of(state.plan)
        changes = [
            (options, tuple(n - (i == x) + (i == y) for i, n in enumerate(layers)))
            for x in range(len(options))
            for y in range(len(options))
            if x != y and layers[x] > 1
        ]
        changes += [
            ((*options[:i], int(k), *options[i + 1 :]), layers)
            for i in range(len(options))
            for k in alike[options[i]]
            if k >= 0 and space.sizes(m, int(k)) is not None
        ]
        for kinds, counts in changes:
            assert readable(space.plan(Genome(m, kinds, counts))).rank >= after.rank
    assert improved > 3


def test_polish_uses_no_more_evaluations_than_it_may():
    start = case("default").space.draws(np.random.default_rng(6), 1)[0]
    needed, best, _ = polished("default", start)
    assert needed > 100
    for most in (0, 1, 57):
        used, state, _ = polished("default", start, most)
        assert used == most
        assert state.whole[1] >= best.whole[1]
    assert polished("default", start, needed)[1].whole[1] == best.whole[1]


# ------------------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize(("zero_stage", "virtual_stages"), [(2, 1), (3, 1), (1, 2)])
def test_what_only_the_readable_estimator_prices_is_refused(zero_stage, virtual_stages):
    kinds = [option.kind for option in case("three groups").space.options]
    estimator = Estimator(three_groups())
    with pytest.raises(InputError, match="readable estimator only") as error:
        stage_tables.build(estimator, (4,), kinds, lambda kind, m: (1,), 4, zero_stage, virtual_stages=virtual_stages)
    assert "\n" not in str(error.value)
    assert f"={zero_stage if virtual_stages == 1 else virtual_stages} " in str(error.value)


def test_tables_that_would_not_fit_are_refused_before_they_are_filled(monkeypatch):
    monkeypatch.setattr(stage_tables, "MOST_BYTES", 1000)
    monkeypatch.setattr(stage_tables, "_fill_times", None)
    target = three_groups()
    with pytest.raises(InputError, match="GiB; use fewer") as error:
        _ = Space(target, SpaceSpec(**SMALL), Estimator(target)).stage_tables
    assert "\n" not in str(error.value)
