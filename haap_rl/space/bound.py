"""A proven lower bound on the iteration time of every plan of a declared space, by linear programming.

For each number of micro-batches m the program relaxes a plan to fractions: x[k, s] layers (and shares of the
embedding and the head) that the s-th stage from the end runs on option k. With f, b the seconds per micro-batch of
that work, w = min(s-1, m-1), and S the time of one micro-batch alone, every plan satisfies (docstring of
`cost.schedule.lower_bound_s`)

    T >= S + (m-1-w) (f+b) + w b          for each stage: the path that leaves it once
    T >= (f+b of the stages before it) + m (f+b)

and, since a stage uses its g devices for as long, the same summed over the stages of a device group and weighted by
g, against the group's devices. Memory enters through the most layers an option holds at place s. Left out, hence a
bound and not the optimum: transfers, gradient synchronisation, optimiser, host time per micro-batch, whole layers,
one option per stage, straddled nodes. The ablation switches of the space do not touch it. Proof of each figure: weak
duality of the linear program, checked here from the solver's dual values with the residual charged against the
bound, so nothing rests on the solver's tolerances.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from haap_rl.cost.estimator import FIRST, LAST, Estimator
from haap_rl.cost.profiles import Profile
from haap_rl.problem.plan import Problem
from haap_rl.space.initial import Room
from haap_rl.space.options import Option, SpaceSpec, Tables, stage_options
from haap_rl.space.target import parts

INFEASIBLE = 2  # status of scipy's linprog
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bound:
    """No plan of the space takes less than `seconds`; inf if no plan fits at all."""

    seconds: float
    num_microbatches: int | None  # where the bound is attained; None if nothing fits


def lower_bound(problem: Problem, spec: SpaceSpec, profile: Profile | None = None) -> Bound:
    """The least of the linear programs' bounds over the space's micro-batch counts, proven.

    profile: that of the estimator whose plans are bounded.
    """
    estimator = Estimator(problem, profile=profile)
    return min((bound_of_part(problem, part, estimator) for part in parts(problem, spec)), key=lambda b: b.seconds)


def bound_of_part(problem: Problem, spec: SpaceSpec, estimator: Estimator) -> Bound:
    """The same of a space that is one part (`space.target.parts`)."""
    options = stage_options(problem, spec)
    num_devices = tuple(group.num_devices for group in problem.cluster.groups)
    best = Bound(np.inf, None)
    for m in sorted(spec.num_microbatches):
        if problem.global_batch_size % m:
            continue
        tables = Tables(problem, spec, options, estimator, m, memory=True)
        room = Room(options, tables, num_devices)
        if room.exact and room.most_layers < problem.model.num_layers:
            continue
        seconds = _program_s(problem, options, tables, num_devices)
        if seconds < best.seconds:
            best = Bound(seconds, m)
    return best


def _program_s(problem: Problem, options: tuple[Option, ...], tables: Tables, num_devices: tuple[int, ...]) -> float:
    """Proven lower bound in seconds at one number of micro-batches."""
    from scipy.optimize import linprog

    m, most = tables.num_microbatches, tables.max_stages
    # columns: (option, s, unit) with unit 0 embedding, 1 layer, 2 head; then T and S
    columns = [
        (k, s, unit)
        for k in range(len(options))
        for s in range(1, most + 1)
        for unit in range(3)
        if np.isfinite(tables.forward_s[k, unit]) and _most_layers(tables, k, s) > 0 and (unit != 2 or s == 1)
    ]
    option, place, unit = np.array(columns).T
    backward = tables.backward_s[option, unit]
    alone = tables.forward_s[option, unit] + backward
    ahead = np.minimum(place - 1, m - 1)
    leaves_once = (m - 1 - ahead) * alone + ahead * backward
    share = np.array([1.0 / _most_layers(tables, k, s) if u == 1 else 0.0 for k, s, u in columns])
    uses = np.array([options[k].uses(len(num_devices)) for k in option])

    rows: list[Floats] = []  # coefficients of the columns, of T and of S
    limits: list[float] = []

    def at_most(limit: float, factors: Floats, T: float = 0.0, S: float = 0.0) -> None:
        rows.append(np.append(factors, [T, S]))
        limits.append(limit)

    at_most(0.0, alone, S=-1.0)  # S is at least one micro-batch alone
    for s in range(1, most + 1):
        here = place == s
        at_most(0.0, here * leaves_once, T=-1.0, S=1.0)
        at_most(0.0, (m * here + (place > s)) * alone, T=-1.0)
        at_most(1.0, here * share)
    for d, available in enumerate(num_devices):
        weight = uses[:, d] / available
        at_most(0.0, weight * leaves_once, T=-1.0, S=1.0)
        at_most(0.0, weight * m * alone, T=-1.0)
        at_most(1.0, weight * share)

    A, b = np.array(rows), np.array(limits)
    amounts = np.array([1.0, float(problem.model.num_layers), 1.0])  # of embedding, layers, head
    whole = np.append((unit == np.arange(3)[:, None]).astype(float), np.zeros((3, 2)), axis=1)
    cost = np.append(np.zeros(len(columns)), [1.0, 0.0])
    result = linprog(cost, A_ub=A, b_ub=b, A_eq=whole, b_eq=amounts, bounds=(0, None), method="highs")
    if result.status == INFEASIBLE:
        return np.inf
    if not result.success or result.fun is None:
        return 0.0  # nothing proven
    # weak duality: with y <= 0 and any z, b'y + e'z bounds the optimum if the reduced costs are >= 0; where one is
    # not, its column can still gain at most |reduced cost| times the column's largest value
    y: Floats = np.minimum(result.ineqlin.marginals, 0.0)
    z: Floats = np.asarray(result.eqlin.marginals)
    reduced = cost - A.T @ y - whole.T @ z
    largest = np.append(amounts[unit], [2.0 * result.fun, 2.0 * result.fun])
    return max(0.0, float(b @ y + amounts @ z + np.minimum(reduced, 0.0) @ largest))


def _most_layers(tables: Tables, k: int, s: int) -> int:
    """Most layers of option k at place s, wherever the pipeline begins."""
    last = LAST if s == 1 else 0
    return int(max(tables.max_layers[k, last, s], tables.max_layers[k, FIRST | last, s]))
