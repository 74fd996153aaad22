"""When what fails and returns: traces drawn at random, and traces of others read from files.

Bamboo (uclasystem/bamboo, Thorpe et al., NSDI 2023): CSV without a header, `milliseconds,add|remove,node`.
Sailor (eth-easl/sailor, Strati et al., SOSP 2025): a JSON list of {"Time": seconds, "GPUs": how many there are}.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from haap_rl.faults.model import Component, check_number, things_of
from haap_rl.problem.cluster import Cluster
from haap_rl.problem.errors import InputError, check_keys, shown
from haap_rl.problem.formats.files import read_json, read_text

MOST_CHANGES = 10**6  # of a trace; more means minutes per policy and most likely a slip of a unit
AT_ONCE = 16  # times drawn together; a fixed number, so that a longer horizon only continues a trace
MOST_MS = 10**15
LARGEST_TIME_S = MOST_MS / 1e3


class Change(NamedTuple):
    """A component fails or returns."""

    time_s: float
    component: int
    is_failure: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """What happens to `components` from 0 to horizon_s: changes in order of time, each of the component's state.

    down_at_start: components that are down at time 0.
    """

    components: tuple[Component, ...]
    changes: tuple[Change, ...]
    horizon_s: float
    down_at_start: frozenset[int] = frozenset()

    @property
    def num_failures(self) -> int:
        return sum(change.is_failure for change in self.changes)


# ------------------------------------------------------------------------------------------ at random
def draw(
    components: Sequence[Component], horizon_s: float, rng: np.random.Generator, stationary: bool = False
) -> Trace:
    """A random trace: every component is in service and down by turns, for times of its own distributions.

    Each component has a generator of its own, spawned from `rng` in order, so that one more at the end changes no
    other. All are up at time 0, as when a job starts; `stationary`: as found at a random time of the long run, which
    makes averages over the trace unbiased. Raises InputError where more than MOST_CHANGES changes are to be expected.
    """
    expected = 2 * math.fsum(horizon_s / (c.mtbf_s + c.recovery_s) for c in components)
    if expected > MOST_CHANGES:
        raise InputError(
            f"faults: {expected:.3g} changes are to be expected in {horizon_s / 3600:g} hours, more than "
            f"{MOST_CHANGES}; simulate fewer hours, or check the rates"
        )
    down = set()
    changes: list[Change] = []
    for index, (component, own) in enumerate(zip(components, rng.spawn(len(components)), strict=True)):
        starts_down = stationary and own.random() < component.unavailability
        if starts_down:
            down.add(index)
        is_failure = not starts_down
        for time_s in _change_times(component, horizon_s, own, starts_down, stationary):
            changes.append(Change(time_s, index, is_failure))
            is_failure = not is_failure
    return Trace(tuple(components), tuple(sorted(changes)), horizon_s, frozenset(down))


def _change_times(
    component: Component, horizon_s: float, own: np.random.Generator, starts_down: bool, stationary: bool
) -> Iterator[float]:
    """Times before `horizon_s` at which the component fails and returns by turns."""
    time_s = 0.0
    if stationary:
        time_s += _rest_down(component, own) if starts_down else _rest_up(component, own)
    elif starts_down:
        raise AssertionError("only a stationary trace starts with something down")
    else:
        time_s += float(_up_times(component, own, 1)[0])
    is_down = not starts_down
    while time_s < horizon_s:
        ups, downs = _up_times(component, own, AT_ONCE), _down_times(component, own, AT_ONCE)
        for up, down in zip(ups.tolist(), downs.tolist(), strict=True):
            for step in (down, up) if is_down else (up, down):
                if time_s >= horizon_s:
                    return
                yield time_s
                time_s += step


def _scale_s(component: Component) -> float:
    """Scale of the Weibull distribution that has the component's mean: M / Gamma(1 + 1/k)."""
    return component.mtbf_s / math.gamma(1 + 1 / component.shape)


def _up_times(
    component: Component, own: np.random.Generator, count: int
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return _scale_s(component) * own.weibull(component.shape, count)


def _down_times(
    component: Component, own: np.random.Generator, count: int
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    if component.fixed_recovery:
        return np.full(count, component.recovery_s)
    return own.exponential(component.recovery_s, count)


def _rest_up(component: Component, own: np.random.Generator) -> float:
    """Time to failure from a random moment in service: a uniform part of a time drawn in proportion to its length.

    If X is Weibull(k, scale), the density x f(x) / E[X] is that of scale * G^(1/k), G ~ Gamma(1 + 1/k).
    """
    whole = _scale_s(component) * own.gamma(1 + 1 / component.shape) ** (1 / component.shape)
    return float(own.random() * whole)


def _rest_down(component: Component, own: np.random.Generator) -> float:
    """Time to return from a random moment of being down; an exponential time has no memory."""
    return float(
        own.random() * component.recovery_s if component.fixed_recovery else own.exponential(component.recovery_s)
    )


# ----------------------------------------------------------------------------------------- from files
def read_trace(path: object, cluster: Cluster, horizon_s: float | None = None) -> Trace:
    """The trace in the file at `path`, Bamboo's (.csv) or Sailor's (.json), for `cluster`. Raises InputError.

    horizon_s: the trace is cut there, or its last state goes on until then; None: it ends with its last entry. The
    components have the trace's own pooled rates: all time in service over failures, all time down over failures.
    """
    readers = {".csv": read_bamboo, ".json": read_sailor}
    suffix = Path(path).suffix.lower() if isinstance(path, str | Path) else ""
    if suffix not in readers:
        raise InputError(f"trace={shown(str(path))} must end in .csv (Bamboo's) or .json (Sailor's); rename the file")
    trace = readers[suffix](path, cluster)
    end_s = trace.horizon_s if horizon_s is None else horizon_s
    changes = tuple(change for change in trace.changes if change.time_s < end_s)
    return _with_pooled_rates(replace(trace, changes=changes, horizon_s=end_s))


def read_bamboo(path: object, cluster: Cluster) -> Trace:
    """The trace in Bamboo's CSV; its components are the cluster's nodes, group after group.

    Bamboo names instances, each new one anew: a new instance takes the first node that is free, and keeps it until it
    is removed. Nodes that no line adds at time 0 are down at the start. The 45 s that Bamboo's simulator waits for an
    instance to start are no part of its traces, nor of what is read. Raises InputError naming the line.
    """
    where = f"Bamboo trace {str(path)!r}"
    components = whole_cluster(cluster, "node")
    node_of: dict[str, int] = {}
    free = list(range(len(components)))  # a heap
    changes: list[Change] = []
    before_ms = 0
    for number, text in enumerate(read_text(path, "Bamboo trace").split("\n"), start=1):
        if not text.strip():
            continue
        place = f"{where}: line {number}"
        fields = [field.strip() for field in text.split(",")]
        if len(fields) != 3 or fields[1] not in ("add", "remove") or not fields[2]:
            raise InputError(f"{place} {shown(text.strip())} is not 'milliseconds,add|remove,node'; correct it")
        time_ms, name = _milliseconds(place, fields[0]), fields[2]
        if time_ms < before_ms:
            raise InputError(f"{place}: {time_ms} ms comes after {before_ms} ms; sort the lines by time")
        before_ms = time_ms
        is_add = fields[1] == "add"
        if is_add == (name in node_of):
            is_there = "is there already" if is_add else "is not there"
            raise InputError(f"{place}: {fields[1]} of node {shown(name)}, which {is_there}; correct the line")
        if is_add:
            if not free:
                raise InputError(
                    f"{place}: {len(components) + 1} nodes are there, but cluster {cluster.name!r} has "
                    f"{len(components)}; choose the cluster of this trace"
                )
            node_of[name] = heapq.heappop(free)
        changes.append(Change(time_ms / 1e3, node_of[name], not is_add))
        if not is_add:
            heapq.heappush(free, node_of.pop(name))
    if not changes:
        raise InputError(f"{where}: holds no line; write lines like '0,add,node1'")
    return _from_nothing(where, components, changes)


def read_sailor(path: object, cluster: Cluster) -> Trace:
    """The trace in Sailor's JSON; its components are the cluster's devices, group after group, node after node.

    It says how many GPUs there are, not which: the first so many are up, as Sailor's controller keeps the first of its
    list of pods. The last entry ends the trace. Raises InputError naming the entry.
    """
    where = f"Sailor trace {str(path)!r}"
    components = whole_cluster(cluster, "device")
    entries = read_json(path, "Sailor trace")
    if not isinstance(entries, list) or not entries:
        raise InputError(f'{where}: holds {shown(entries)}, not a list like [{{"Time": 0, "GPUs": 16}}]; write one')
    changes: list[Change] = []
    there = 0
    before_s = -1.0
    for position, entry in enumerate(entries):
        place = f"{where}: entry {position}"
        if not isinstance(entry, dict):
            raise InputError(f'{place}: {shown(entry)} must be an object like {{"Time": 0, "GPUs": 16}}')
        check_keys(place, entry, ("Time", "GPUs"))
        time_s, gpus = _seconds(place, entry["Time"]), _count(place, entry["GPUs"])
        if position == 0 and time_s != 0:
            raise InputError(
                f"{place}: Time={shown(entry['Time'])} must be 0 in the first entry; say what is there then"
            )
        if time_s <= before_s:
            raise InputError(f"{place}: Time={time_s:g} does not come after {before_s:g}; sort the entries, one a time")
        if gpus > len(components):
            raise InputError(
                f"{place}: GPUs={gpus}, but cluster {cluster.name!r} has {len(components)} devices; choose the cluster "
                "of this trace"
            )
        changes += [Change(time_s, device, gpus < there) for device in range(min(there, gpus), max(there, gpus))]
        there, before_s = gpus, time_s
        if len(changes) > MOST_CHANGES:
            raise InputError(f"{place}: more than {MOST_CHANGES} changes by then; give a shorter trace")
    trace = _from_nothing(where, components, changes, before_s)
    return replace(trace, changes=tuple(sorted(trace.changes)))


def whole_cluster(cluster: Cluster, domain: str) -> tuple[Component, ...]:
    """Every node or device of the cluster as a component that never fails by itself, group after group.

    Raises InputError for more of them than are followed.
    """
    check_number(f"cluster {cluster.name!r}", domain, sum(things_of(group, domain) for group in cluster.groups))
    return tuple(
        Component(domain, index, first, size, math.inf, 0.0)
        for index, group in enumerate(cluster.groups)
        for size in (group.devices_per_node if domain == "node" else 1,)
        for first in range(0, group.num_devices, size)
    )


def _from_nothing(
    where: str, components: tuple[Component, ...], changes: Sequence[Change], end_s: float | None = None
) -> Trace:
    """The Trace of changes that begin with nothing there; those at time 0 make its start."""
    end_s = changes[-1].time_s if end_s is None else end_s
    if end_s <= 0:
        raise InputError(f"{where}: all of it is at time 0; a trace must last")
    down = set(range(len(components)))
    for change in changes:
        if change.time_s == 0:
            (down.add if change.is_failure else down.discard)(change.component)
    later = tuple(change for change in changes if change.time_s > 0)
    return Trace(components, later, end_s, frozenset(down))


def _with_pooled_rates(trace: Trace) -> Trace:
    """The trace with the same mean times for all its components, as they are in it; without a failure they stay."""
    down = dict.fromkeys(trace.down_at_start, 0.0)
    down_s = 0.0
    for change in trace.changes:
        if change.is_failure:
            down[change.component] = change.time_s
        else:
            down_s += change.time_s - down.pop(change.component)
    down_s += math.fsum(trace.horizon_s - since_s for since_s in down.values())
    if not trace.num_failures:
        return trace
    up_s = len(trace.components) * trace.horizon_s - down_s
    mtbf_s, recovery_s = up_s / trace.num_failures, down_s / trace.num_failures
    return replace(trace, components=tuple(replace(c, mtbf_s=mtbf_s, recovery_s=recovery_s) for c in trace.components))


def _milliseconds(place: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise InputError(f"{place}: milliseconds={shown(text)} must be a whole number from 0 up to 10^15")
    return int(text)


def _seconds(place: str, value: object) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= LARGEST_TIME_S:  # type: ignore[operator]
        raise InputError(f"{place}: Time={shown(value)} must be seconds from 0 up to 10^12")
    return float(value)  # type: ignore[arg-type]


def _count(place: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"{place}: GPUs={shown(value)} must be a whole number from 0")
    return value
