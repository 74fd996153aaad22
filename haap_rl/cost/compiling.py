"""How functions become machine code: once per machine, kept in a cache that parallel jobs can share.

The scalar formulas of this package stay plain Python (the estimator, the calibration's fit and tests call them so);
`machine_code(module)` compiles copies of them that call each other. Kernels are decorated with `jit`.

numba's own cache races between processes and cannot be written in a read-only installation. So it lives in one folder
per user, version and content of the compiled sources, and the first call of every kernel happens in `ready`, under a
lock. Where there is no place or no lock, everything is compiled anew without a cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])
ROOT = Path(__file__).resolve().parents[1]


@cache
def cache_folder() -> Path | None:
    """Where machine code is kept; None where nothing can be written."""
    digest = hashlib.sha256(f"{numba.__version__} {sys.version} {ROOT}".encode())
    rooms = [path for room in ("cost", "space", "problem") for path in ROOT.glob(f"{room}/*.py")]
    for path in sorted([*rooms, *ROOT.glob("search/*_kernels.py")]):
        digest.update(path.read_bytes())  # numba does not see a change in a function or a constant that a kernel uses
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "haap_rl" / f"numba-{numba.__version__}-{digest.hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("a") as lock, contextlib.suppress(BlockingIOError):  # held: there are locks
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return folder
    except (OSError, RuntimeError):
        return None


def jit_allotting(function: Function) -> Function:
    """numba's njit, cached in our folder. No fastmath: a kernel gives the bits that its Python source gives."""
    folder = cache_folder()
    before = numba.config.CACHE_DIR  # type: ignore[attr-defined]
    try:
        if folder is not None:
            numba.config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]
        compiled: Any = numba.njit(cache=folder is not None, error_model="numpy")(function)
    finally:
        numba.config.CACHE_DIR = before  # type: ignore[attr-defined]
    return cast(Function, compiled)


def jit(function: Function) -> Function:
    """`jit_allotting` for what allots no memory and keeps no array: there is nothing to count references of.

    Counting them for every array of a table at every call took two thirds of the time. What allots memory fails to
    compile so.
    """
    compiled = jit_allotting(function)
    if hasattr(compiled, "targetoptions"):  # it is the plain function where numba is switched off
        compiled.targetoptions["_nrt"] = False
    return compiled


def jit_inlined(function: Function) -> Function:
    """`jit` for a small kernel in inner loops: a table is hundreds of words to hand over, so its code goes there."""
    compiled = jit(function)
    if hasattr(compiled, "targetoptions"):
        compiled.targetoptions["forceinline"] = True
    return compiled


def machine_code(module: types.ModuleType) -> dict[str, Callable[..., Any]]:
    """The functions that `module` defines, as machine code that calls each other's machine code."""
    namespace = dict(vars(module))
    own = {name: f for name, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__}
    for name, function in own.items():
        copy = types.FunctionType(function.__code__, namespace, name, function.__defaults__)
        copy.__module__ = module.__name__
        namespace[name] = jit(copy)
    return {name: namespace[name] for name in own}


_ready: set[str] = set()


def ready(name: str, first_calls: Callable[[], object], announce: Callable[[str], None] | None = None) -> None:
    """Have a set of kernels compiled: `first_calls` calls each of them once.

    At most once per process and name. The first time on a machine it takes some seconds and says so, to standard
    error unless `announce` is given; later processes load what it left.
    """
    if name in _ready:
        return
    _ready.add(name)
    folder = cache_folder()
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        return  # there is nothing to compile
    done = None if folder is None else folder / f"{name}.done"
    with _locked(folder):
        if done is None or not done.exists():
            kept = "for this run" if done is None else "once for this machine"
            line = f"haap_rl: compiling the {name} kernels {kept} (less than a minute)"
            (announce or (lambda text: print(text, file=sys.stderr, flush=True)))(line)
        first_calls()
        if done is not None:
            with contextlib.suppress(OSError):
                done.touch()


@contextlib.contextmanager
def _locked(folder: Path | None) -> Iterator[None]:
    """Holds the folder's lock, so that processes that start together compile one after the other."""
    if folder is None:
        yield
        return
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
