"""The scalar formulas stay scalar: numba compiles each of them, and the machine code gives Python's values."""

import inspect
import types

import numba
import numpy as np
import pytest

from haap_rl.cost import comm, compute, schedule

RANKS = [1, 2, 3, 4, 8, 16]
DRAWS = {  # parameter -> a random value of it; anything else is a positive number
    "fused": lambda rng: bool(rng.integers(2)),
    "dropout": lambda rng: bool(rng.integers(2)),
    "tokens": lambda rng: float(rng.integers(1, 10_000)),
    "seq_len": lambda rng: float(rng.integers(1, 10_000)),
    "heads": lambda rng: float(rng.integers(1, 100)),
    "head_dim": lambda rng: float(rng.integers(1, 260)),
    "inputs": lambda rng: float(rng.integers(1, 4000)) * rng.choice([1.0, 8.0, 1 / 3]),
    "outputs": lambda rng: float(rng.integers(1, 4000)) * rng.choice([1.0, 8.0, 1 / 3]),
    "bytes_per_value": lambda rng: float(rng.choice([2, 4])),
    "num_ranks": lambda rng: float(rng.choice(RANKS)),
    "ranks_per_node": lambda rng: float(rng.choice([0.5, *RANKS])),
    "num_nodes": lambda rng: float(rng.choice(RANKS)),
    "rings_per_node": lambda rng: float(rng.choice(RANKS)),
    "nics_per_node": lambda rng: float(rng.choice(RANKS)),
    "num_bytes": lambda rng: float(rng.choice([0, 1e3, 1e9])),
    "gather_bytes": lambda rng: float(rng.choice([0, 1e3, 1e9])),
    "efficiency": lambda rng: float(rng.uniform(0.1, 1)),
    "unaligned": lambda rng: float(rng.uniform(0.1, 1)),
    "hidden": lambda rng: float(rng.uniform(0, 1)),
    "host_s": lambda rng: float(rng.choice([0.0, 1e-3, rng.uniform(0, 1)])),
    "device_s": lambda rng: float(rng.choice([0.0, 1e-3, rng.uniform(0, 1)])),
    "num_stages": lambda rng: int(rng.integers(4, 9)),
    "stage": lambda rng: int(rng.integers(4)),
    "num_microbatches": lambda rng: int(rng.integers(1, 33)),
    "num_chunks": lambda rng: int(rng.integers(1, 5)),
    "passes": lambda rng: float(rng.uniform(1, 3)),
    "half_tokens": lambda rng: float(rng.uniform(0, 300)),
}


def compiled(module):
    """The module's functions by name, as machine code that calls each other's machine code."""
    namespace = dict(vars(module))
    own = {name: f for name, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__}
    for name, function in own.items():
        copy = types.FunctionType(function.__code__, namespace, name, function.__defaults__)
        namespace[name] = numba.njit(copy)
    return {name: namespace[name] for name in own}


def public(module):
    return [name for name, f in vars(module).items() if inspect.isfunction(f) and not name.startswith("_")]


SCALAR = [
    *((compute, name) for name in public(compute)),
    *((comm, name) for name in public(comm)),
    (schedule, "in_flight"),
    (schedule, "interleaved_in_flight"),
]


@pytest.mark.parametrize(("module", "name"), SCALAR, ids=lambda value: getattr(value, "__name__", value))
def test_machine_code_gives_the_value_of_python(module, name):
    rng = np.random.default_rng(0)
    plain, fast = getattr(module, name), compiled(module)[name]
    for _ in range(200):
        values = [
            DRAWS.get(key, lambda rng: float(10 ** rng.uniform(-6, 12)))(rng)
            for key in inspect.signature(plain).parameters
        ]
        assert fast(*values) == pytest.approx(plain(*values), rel=1e-12, abs=0), (name, values)
    assert fast.nopython_signatures


def test_the_schedule_and_its_bounds_compile():
    rng = np.random.default_rng(1)
    fast = compiled(schedule)
    for p, m in ((1, 1), (1, 5), (4, 3), (5, 12)):
        times = tuple(rng.uniform(0.1, 1.0, n) for n in (p, p, p - 1, p - 1))
        np.testing.assert_allclose(fast["stage_ends_s"](*times, m), schedule.stage_ends_s(*times, m), rtol=1e-12)
        period = schedule.steady_period_s(*times)
        assert fast["steady_period_s"](*times) == pytest.approx(period, rel=1e-12)
        for name in ("lower_bound_s", "upper_bound_s"):
            assert fast[name](*times, m) == pytest.approx(getattr(schedule, name)(*times, m), rel=1e-12)
