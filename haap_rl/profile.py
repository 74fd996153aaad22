"""Measure the device under this program: `python -m haap_rl.profile out=FILE model=NAME 'tp=[1,2]' 'microbatch=[1,2]'`.

Times and bytes of a layer, the embedding and the head over a grid, and of collectives, into a profile that the other
commands take as estimator.profile=FILE. The file is written after each cell: the same command goes on where it stopped.
"""

from __future__ import annotations

import datetime
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from haap_rl import configs
from haap_rl.cost.profile_files import MIB, load_profile, write_profile
from haap_rl.cost.profiles import DIMENSIONS, UNITS, CollectiveCell, Grid, MeasuredFor, Profile, UnitCell
from haap_rl.problem.errors import LARGEST_COUNT, InputError, check_keys, label, positive_float, positive_int, shown
from haap_rl.problem.model import Unit
from haap_rl.problem.plan import Problem
from haap_rl.problem.presets import names, preset, problem_from_config

if TYPE_CHECKING:
    import torch

KEYS = ("model", "problem", "out", "tp", "microbatch", "device_name", "ranks", "sizes_mib", "warmup", "repeats")
MEMORY_WITHIN = 0.15  # relative: a device counts as a registered one if its memory is that near
ASSUMPTIONS = (
    "a tensor-parallel rank is measured alone: heads, MLP width and vocabulary divided by tp, norms and residuals "
    "whole, collectives apart",
)


class Cell(NamedTuple):
    """One thing to measure: a unit at (tp, micro-batch), or the collectives among so many ranks."""

    unit: Unit | None
    tp: int
    size: int
    ranks: int

    def __str__(self) -> str:
        if self.unit is None:
            return f"collectives among {self.ranks}"
        return f"{self.unit} tp {self.tp} micro-batch {self.size}"


def profile(config: dict[str, Any], _: Path) -> int:
    """Measure what `config` describes that its file does not hold yet; the exit status.

    0 all is measured, 130 interrupted with what there is in the file. Raises InputError for a bad configuration and
    where the file holds another measurement; it is then untouched.
    """
    import torch
    from rich.console import Console

    check_keys("configuration", config, KEYS)
    grid = _grid(config)
    out = Path(str(config["out"]))
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    name = device_name(config["device_name"], kind)
    problem = _problem(config, name)
    for tp in grid.tp:
        if not problem.model.allows_tp(tp):
            raise InputError(
                f"tp={tp} does not divide the heads and the MLP of model {problem.model.name!r}; leave it out"
            )
    available = torch.cuda.device_count() if kind == "cuda" else None
    for ranks in grid.ranks:
        if available is not None and ranks > available:
            raise InputError(f"ranks={ranks}: this machine has {available} CUDA devices; leave it out")
    measured = begun(out, new_profile(problem, grid, f"torch {torch.__version__}", kind), name)
    write_profile(measured, out)  # where it cannot be written, nothing is measured in vain
    left = missing(measured)
    total = len(grid.tp) * len(grid.microbatch_size) * len(UNITS) + len(grid.ranks)
    console = Console(width=None if sys.stdout.isatty() else 120)
    if len(left) < total:
        console.print(f"{out}: {total - len(left)} of {total} cells are there already", highlight=False)
    try:
        if left and left[0].unit is not None:  # once in vain: what torch loads at first use is in no cell
            measure(left[0], problem, torch.device(kind), name, grid._replace(warmup=1, repeats=1))
        for cell in progress(console, left, total):
            found = measure(cell, problem, torch.device(kind), name, grid)
            measured = _with(measured, found)
            write_profile(measured, out)
            if cell.unit is None and (lost := sizes_lost(found, grid)):
                print(f"haap_rl: {cell}: sizes_mib={lost} do not fit in memory; not measured", file=sys.stderr)
    except KeyboardInterrupt:
        print(
            f"haap_rl: interrupted; {total - len(missing(measured))} of {total} cells are in {out}; the same command "
            "goes on where it stopped",
            file=sys.stderr,
        )
        return 130
    full = sum(cell.out_of_memory for cell in measured.units)
    console.print(f"profile of {measured.name}: {out} ({total} cells, {full} of them out of memory)", highlight=False)
    console.print(f"use it with estimator.profile={out} where a cluster has device {name!r}", highlight=False)
    return 0


def measure(
    cell: Cell, problem: Problem, device: torch.device, name: str, grid: Grid
) -> list[UnitCell] | list[CollectiveCell]:
    """What one cell of the grid gives, measured now."""
    if cell.unit is None:
        from haap_rl.measure.collectives import measure_collectives

        return measure_collectives(name, device.type, cell.ranks, grid.sizes_bytes, grid.warmup, grid.repeats)
    from haap_rl.measure.cells import measure_unit

    return [measure_unit(problem, device, name, cell.unit, cell.tp, cell.size, grid.warmup, grid.repeats)]


def sizes_lost(found: Sequence[UnitCell | CollectiveCell], grid: Grid) -> list[float]:
    """The largest sizes of the grid, in MiB, that no collective of `found` was measured with."""
    most = max((len(cell.timings) for cell in found if isinstance(cell, CollectiveCell)), default=0)
    return [round(size / MIB, 3) for size in grid.sizes_bytes[most:]]


# ------------------------------------------------------------------------------------- what is asked for
def _grid(config: dict[str, Any]) -> Grid:
    def counts(key: str, empty: bool = False) -> tuple[int, ...]:
        given = config[key] if isinstance(config[key], list) else [config[key]]
        values = tuple(sorted({positive_int("profile", key, value) for value in given}))
        if not values and not empty:
            raise InputError(f"profile: {key}=[] is empty; give for example {key}=[1,2]")
        return values

    ranks = counts("ranks", empty=True)
    if 1 in ranks:
        raise InputError("profile: ranks=1 is no collective; give for example ranks=[2]")
    sizes = config["sizes_mib"] if isinstance(config["sizes_mib"], list) else [config["sizes_mib"]]
    sizes_bytes = {max(4, int(positive_float("profile", "sizes_mib", size) * MIB)) for size in sizes}
    if not sizes_bytes:
        raise InputError("profile: sizes_mib=[] is empty; give for example sizes_mib=[1,16]")
    if max(sizes_bytes) > LARGEST_COUNT:  # a profile's reader takes no more
        raise InputError(f"profile: sizes_mib={max(sizes_bytes) / MIB:g} is more than 10^15 bytes; give smaller ones")
    warmup, repeats = (positive_int("profile", key, config[key]) for key in ("warmup", "repeats"))
    return Grid(counts("tp"), counts("microbatch"), ranks, tuple(sorted(sizes_bytes)), warmup, repeats)


def _problem(config: dict[str, Any], device: str) -> Problem:
    """The problem whose units are measured; of its cluster only the device's name counts."""
    precision = config["problem"].get("precision") if isinstance(config["problem"], dict) else None
    here = {
        "name": "here",
        "groups": [
            {
                "name": "here",
                "device": {
                    "name": device,
                    "peak_tflops": {str(precision): 1.0},
                    "memory_gib": 1.0,
                    "memory_bandwidth_gb_per_s": 1.0,
                },
                "num_nodes": 1,
                "devices_per_node": 1,
                "intra_node": {"latency_us": 1.0, "bandwidth_gb_per_s": 1.0},
                "inter_node": {"latency_us": 1.0, "bandwidth_gb_per_s": 1.0},
            }
        ],
    }
    return problem_from_config(config["model"], here, config["problem"])


def device_name(given: object, kind: str) -> str:
    """What the profile calls the device: the name given, "cpu", or the registered device that the card is."""
    if given is not None:
        return label("profile", "device", given)
    if kind == "cpu":
        return "cpu"
    import torch

    properties = torch.cuda.get_device_properties(0)
    found = registered_device(properties.name, properties.total_memory)
    if found is None:
        raise InputError(f"this device is {shown(properties.name)}, none of conf/device; name it with device=NAME")
    return found


def registered_device(card: str, memory_bytes: int) -> str | None:
    """The name in `conf/device/` of a card as its driver calls it ("Tesla V100-SXM2-32GB"); None if there is none."""
    words = set(re.split(r"[^a-z0-9]+", card.lower()))
    found = []
    for name in names("device"):
        device = preset("device", name)
        needed = {part for part in name.split("_") if part not in ("pcie", f"{device['memory_gib']:g}")}
        off = abs(memory_bytes / 2**30 / device["memory_gib"] - 1.0)
        if needed <= words and off <= MEMORY_WITHIN:
            found.append((("pcie" in words) != name.endswith("_pcie"), off, name))
    return min(found)[2] if found else None


# --------------------------------------------------------------------------- the file, and what it lacks
def new_profile(problem: Problem, grid: Grid, library: str, kind: str) -> Profile:
    """A profile of `problem` with nothing measured yet."""
    model = problem.model
    return Profile(
        name=model.name,
        measured_for=MeasuredFor(
            tuple((key, getattr(model, key)) for key in DIMENSIONS),
            problem.seq_len,
            problem.precision,
            problem.fused_attention,
        ),
        library=library,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        source=f"haap_rl.profile on {kind}, {platform.machine()}",
        assumptions=ASSUMPTIONS,
        grid=grid,
    )


def begun(out: Path, new: Profile, device: str) -> Profile:
    """What `out` holds of the measurement `new`; `new` if there is no file. Raises InputError for another one."""
    if out.is_dir():
        raise InputError(f"out={str(out)!r}: is a directory; give a file, for example out={out / 'profile.json'}")
    if not out.exists():
        return new
    old = load_profile(out)
    facts: list[tuple[str, object, object]] = [("model", old.name, new.name), ("grid", old.grid, new.grid)]
    facts += [
        (key, getattr(old.measured_for, key), getattr(new.measured_for, key))
        for key in MeasuredFor.__dataclass_fields__
    ]
    facts.append(("library", old.library, new.library))
    named = {cell.device for cell in old.units} | {cell.device for cell in old.collectives}
    facts += [("device", name, device) for name in sorted(named)]
    for what, held, wanted in facts:
        if held != wanted:
            raise InputError(
                f"out={str(out)!r}: holds a measurement of another {what} ({_brief(held)}, now {_brief(wanted)}); "
                "choose another out=FILE"
            )
    return replace(old, file="")


def _brief(value: object) -> str:
    if isinstance(value, Grid):
        return " ".join(f"{key}={list(v) if isinstance(v, tuple) else v}" for key, v in value._asdict().items())
    return shown(value)


def missing(profile: Profile) -> list[Cell]:
    """The cells of the profile's grid that it does not hold, in the order in which they are measured."""
    grid = profile.grid
    if grid is None:
        return []
    units = {(cell.unit, cell.tp, cell.microbatch_size) for cell in profile.units}
    ranks = {cell.ranks for cell in profile.collectives}
    cells = [Cell(unit, tp, size, 1) for tp in grid.tp for size in grid.microbatch_size for unit in UNITS]
    return [cell for cell in cells if (cell.unit, cell.tp, cell.size) not in units] + [
        Cell(None, 1, 1, n) for n in grid.ranks if n not in ranks
    ]


def _with(profile: Profile, found: list[UnitCell] | list[CollectiveCell]) -> Profile:
    units = tuple(cell for cell in found if isinstance(cell, UnitCell))
    collectives = tuple(cell for cell in found if isinstance(cell, CollectiveCell))
    return replace(profile, units=(*profile.units, *units), collectives=(*profile.collectives, *collectives))


def progress(console: Any, cells: Sequence[Cell], total: int) -> Iterable[Cell]:
    """The cells one by one, with a bar on a terminal and a line for each elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    done = total - len(cells)
    if not console.is_terminal:
        for i, cell in enumerate(cells, start=done + 1):
            console.print(f"{i} of {total}: {cell}", highlight=False)
            yield cell
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total, completed=done)
        for cell in cells:
            bar.update(task, description=str(cell))
            yield cell
            bar.advance(task)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status (see `haap_rl.configs`)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # to Hydra `device=` is a choice of conf/device; here any name will do
    renamed = [re.sub("^device=", "device_name=", argument) for argument in arguments]
    return configs.run("profile", profile, renamed)


if __name__ == "__main__":
    sys.exit(main())
