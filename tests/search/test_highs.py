"""The least path bound of the exact search against an integer program, solved by HiGHS.

The program shares with the search the tables of seconds and memory and nothing of how it searches them: devices,
layers, memory, contiguity and the two kinds of path are rows of a matrix here.
"""

import itertools

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from haap_rl.cost.estimator import FIRST, LAST, Estimator
from haap_rl.search import exact
from haap_rl.search.base import Objective
from haap_rl.search.exact import Proof, build
from haap_rl.search.exact_kernels import INF
from haap_rl.space.initial import pruning_report
from haap_rl.space.options import SpaceSpec
from haap_rl.space.space import Space
from tests.builders import group, problem, room


class Rows:
    """Linear rows low <= sum of coefficient * variable <= high, collected one by one."""

    def __init__(self):
        self.entries, self.low, self.high = [], [], []

    def add(self, terms, low, high):
        self.entries += [(len(self.low), variable, value) for variable, value in terms]
        self.low.append(low)
        self.high.append(high)

    def constraint(self, num_variables):
        row, column, value = zip(*self.entries, strict=True)
        matrix = coo_array((value, (row, column)), (len(self.low), num_variables))
        return LinearConstraint(matrix.tocsr(), self.low, self.high)


def integer_least_s(space, program, p, pairs):
    """Least P + max c over plans of exactly p stages, INF if there is none.

    x[i, k, n] in {0, 1}   stage i, from the front, runs option k with n layers
    y[i, a, b] >= 0        stages i and i+1 have shapes a and b (whole where x is)
    g[i, h] >= 0           at stage i the run of device group h begins
    c                      the largest c
    P                      the longest path down to the end and up again to a stage whose tail ends it

    pairs: c also has the cycles of two neighbouring stages that exchange micro-batches to and fro.
    """
    m, L, num_groups = program.m, program.num_layers, len(space.num_devices)
    shape = {int(k): a for a, row in enumerate(program.member) for k in row if k >= 0}
    C = len(program.member)
    x = []  # (stage, option, layers, position)
    for i in range(p):
        position = (FIRST if i == 0 else 0) | (LAST if i == p - 1 else 0)
        for k in shape:
            for n in range(1, min(L, int(program.fits[k, position, p - i])) + 1):
                if program.forward_s[k, position, n] + program.backward_s[k, position, n] < INF:
                    x.append((i, k, n, position))
    y = [(i, a, b) for i in range(p - 1) for a in range(C) for b in range(C)]
    g = [(i, h) for i in range(p) for h in range(num_groups)] if program.contiguous else []
    y0, g0, c = len(x), len(x) + len(y), len(x) + len(y) + len(g)
    P, num = c + 1, c + 2
    uses = {k: space.options[k].uses(num_groups) for k in shape}
    if not x:
        return INF
    forward_s, backward_s, tail_s = (
        np.array([table[k, q, n] for _, k, n, q in x])
        for table in (program.forward_s, program.backward_s, program.tail_s)
    )
    link_s, delay_s, blocked_s = (
        np.array([table[a, b] for _, a, b in y])
        for table in (program.link_s, program.delay_s, program.levels[program.level])
    )

    rows = Rows()
    for i in range(p):
        rows.add([(v, 1) for v, at in enumerate(x) if at[0] == i], 1, 1)
    rows.add([(v, at[2]) for v, at in enumerate(x)], L, L)
    for h in range(num_groups):
        rows.add([(v, uses[at[1]][h]) for v, at in enumerate(x)], 0, space.num_devices[h])
    for i in range(p - 1):
        for a in range(C):
            ahead = [(y0 + v, 1) for v, at in enumerate(y) if at[0] == i and at[1] == a]
            rows.add([*ahead, *((v, -1) for v, at in enumerate(x) if at[0] == i and shape[at[1]] == a)], 0, 0)
            behind = [(y0 + v, 1) for v, at in enumerate(y) if at[0] == i and at[2] == a]
            rows.add([*behind, *((v, -1) for v, at in enumerate(x) if at[0] == i + 1 and shape[at[1]] == a)], 0, 0)
    for v, (i, h) in enumerate(g):  # used here and not in front: its run begins
        here = [(u, -1) for u, at in enumerate(x) if at[0] == i and uses[at[1]][h]]
        in_front = [(u, 1) for u, at in enumerate(x) if at[0] == i - 1 and uses[at[1]][h]]
        rows.add([(g0 + v, 1), *here, *in_front], 0, np.inf)
    for h in range(num_groups if program.contiguous else 0):
        rows.add([(g0 + v, 1) for v, at in enumerate(g) if at[1] == h], 0, 1)
    stage_at = np.array([i for i, *_ in x])
    boundary_at = np.array([i for i, *_ in y], int)

    def per(of_x, of_y):
        """Coefficients of a sum over x and y, one per variable."""
        return np.concatenate([of_x, of_y, np.zeros(num - g0)])

    def at_least(variable, sum_of):
        rows.add([(variable, 1), *((int(v), -float(sum_of[v])) for v in np.flatnonzero(sum_of))], 0, np.inf)

    beside = [(boundary_at == i) | (boundary_at == i - 1) for i in range(p)]
    down = [per(forward_s * (stage_at == i), blocked_s * beside[i]) for i in range(p)]
    busy = [down[i] + per(backward_s * (stage_at == i), blocked_s * beside[i]) for i in range(p)]
    trip = [per((forward_s + backward_s) * (stage_at >= i), link_s * (boundary_at >= i)) for i in range(p)]
    for i in range(p):
        s = p - i
        ahead = min(s - 1, m - 1)
        at_least(c, (m - 1 - ahead) * busy[i] + ahead * down[i])
        turns = m - 1 - s
        if turns >= 0:
            at_least(c, turns * busy[i] + trip[i])
        if turns >= 0 and i + 1 < p and pairs:
            both = busy[i] + busy[i + 1] + per(np.zeros(len(x)), delay_s * (boundary_at == i))
            at_least(c, turns // 2 * both + turns % 2 * busy[i] + trip[i])
        to_there = per(forward_s * (stage_at < i) + tail_s * (stage_at == i), link_s / 2 * (boundary_at < i))
        at_least(P, to_there + trip[i])

    cost = np.zeros(num)
    cost[[c, P]] = 1.0
    upper = np.ones(num)
    upper[[c, P]] = np.inf
    found = milp(
        cost,
        integrality=(np.arange(num) < y0).astype(int),
        bounds=Bounds(0, upper),
        constraints=rows.constraint(num),
        options={"mip_rel_gap": 1e-9, "time_limit": 20},
    )
    assert found.status in (0, 2), found.message
    return INF if found.status == 2 else float(found.fun)


def small_problem(rng):
    """Two device groups, at most eight layers and three stages, one or a few options of each shape."""
    groups = tuple(
        group(
            name,
            nodes=int(rng.integers(1, 3)),
            per_node=int(rng.choice([1, 2, 3])),
            memory_gb=room(float(rng.uniform(0.4, 4.0))),
            tflops=float(rng.uniform(10, 100)),
            inter_gb=float(rng.choice([0.2, 2, 20])),
        )
        for name in ("fast", "slow")
    )
    target = problem(groups, {"num_layers": int(rng.integers(3, 9))}, global_batch_size=8)
    spec = SpaceSpec(
        num_microbatches=(int(rng.choice([2, 4, 8])),),
        max_stages=3,
        max_tp=1,
        group_sizes=((1,), (1, 2), (2,))[int(rng.integers(3))],
        recompute=("none",),
        mixed_stages=rng.random() < 0.3,
    )
    return target, spec


def problems(rng):
    """(space, m, least bound with and without contiguous device groups) of small problems in which a plan fits."""
    while True:
        target, spec = small_problem(rng)
        if pruning_report(target, spec).plans_that_fit:
            space = Space(target, spec, Estimator(target))
            (m,) = space.num_microbatches
            yield space, m, [least_bound_s(space, m, contiguous) for contiguous in (False, True)]


def least_bound_s(space, m, contiguous):
    """What the search says, knowing no plan yet."""
    return Proof(Objective(space.problem, space=space.spec), 0, contiguous).least_bound(m).least_s


def integer_bound_s(space, program, pairs=False):
    return min(integer_least_s(space, program, p, pairs) for p in range(1, 4))


def test_the_least_path_bound_is_that_of_an_integer_program():
    for space, m, bounds_s in itertools.islice(problems(np.random.default_rng(3)), 15):
        assert bounds_s[0] == pytest.approx(integer_bound_s(space, build(space, m, False, INF)), rel=1e-6)


def test_with_blocking_told_apart_it_lies_between_the_programs_without_and_with_pairs_of_stages(monkeypatch):
    """The tables know pairs by buckets only. As after a plan ten times as slow, but with nothing pruned by it."""
    blocked = 0
    for space, m, bounds_s in itertools.islice(problems(np.random.default_rng(3)), 40):
        program = build(space, m, False, 10 * bounds_s[0])
        if len(program.levels) == 1:
            continue
        with monkeypatch.context() as patch:
            patch.setattr(exact, "build", lambda *_, program=program: program)
            found_s = least_bound_s(space, m, False)
        assert integer_bound_s(space, program) * (1 - 1e-6) <= found_s
        assert found_s <= integer_bound_s(space, program, pairs=True) * (1 + 1e-6)
        blocked += found_s > bounds_s[0] * (1 + 1e-6)
    assert blocked >= 2


def test_so_it_is_with_device_groups_as_contiguous_runs_where_that_costs_time():
    matters = (case for case in problems(np.random.default_rng(4)) if case[2][1] > case[2][0] * (1 + 1e-6))
    for space, m, bounds_s in itertools.islice(matters, 5):
        for contiguous, bound_s in enumerate(bounds_s):
            program = build(space, m, bool(contiguous), INF)
            assert bound_s == pytest.approx(integer_bound_s(space, program), rel=1e-6)
