"""Certificates: what the exact search proved about a problem, as a file that other runs can rest on.

`+search=exact` leaves `certificate.json` beside its record. A certificate speaks of one problem, one declared space and
one estimator; for any other it is refused.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from haap_rl.cost.estimator import Estimator, fingerprint
from haap_rl.cost.profiles import Profile
from haap_rl.problem.errors import LARGEST_NUMBER, InputError, check_keys, shown
from haap_rl.problem.formats.files import read_json_object
from haap_rl.problem.plan import Problem
from haap_rl.search.base import OPTIMAL_WITHIN, SearchResult
from haap_rl.space.options import SpaceSpec

FILE = "certificate.json"
SCHEMA = "haap_rl.certificate/1"
KEYS = (
    "schema",
    "model",
    "cluster",
    "problem",
    "covers",
    "iteration_time_s",
    "lower_bound_s",
    "gap_to_lower_bound",
    "proven_optimal",
    "plan",
    "device_units",
    "solves",
    "states",
    "nodes",
    "plans_completed",
    "seconds",
    "message",
    "estimator_fingerprint",
)
EVERY_PLAN = "every plan of the declared space"
# switches of SpaceSpec that change nothing of what can be proven
ABLATIONS: dict[str, Any] = {"memory_aware_init": True, "load_balance": True}
WITHIN = 1e-6  # relative: what a plan's seconds and its certificate may differ by


@dataclass(frozen=True, slots=True)
class Certificate:
    """No plan of the space takes less than lower_bound_s; the best one known takes iteration_time_s (None: no plan)."""

    path: str
    lower_bound_s: float
    iteration_time_s: float | None

    def beside(self, result: SearchResult, weaker_bound_s: float) -> SearchResult:
        """`result` with a note that its bound is this one's; with `weaker_bound_s` where its plan refutes this one."""
        if result.estimate is not None and result.estimate.iteration_s < self.lower_bound_s * (1 - OPTIMAL_WITHIN):
            note = f"{self.path} is wrong: this plan is faster than its bound of {self.lower_bound_s:.3f} s; remake it"
            own = {name: content for name, content in result.artifacts.items() if name != FILE}  # it would say so too
            return replace(
                result, lower_bound_s=weaker_bound_s, proven_optimal=False, notes=(note, *result.notes), artifacts=own
            )
        if result.lower_bound_s > self.lower_bound_s:  # an exact search proved more
            return result
        return replace(result, notes=(f"bound proven by {self.path}", *result.notes))


def problem_key(problem: Problem, spec: SpaceSpec) -> str:
    """Short hash of the problem and of the declared space, without the switches that change neither."""
    text = repr((problem, replace(spec, **ABLATIONS)))
    if spec.survives:
        text += repr((spec.survives, spec.take_over))
    if spec.target is not None:
        text += repr((spec.target, spec.fixed_tp))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_certificate(
    path: str | Path, problem: Problem, spec: SpaceSpec, command: str, profile: Profile | None = None
) -> Certificate:
    """The certificate of this problem and space in the JSON file `path`, or in the record of that name.

    Raises InputError, naming the file, if it cannot be read or is none, if it was made for another problem, space or
    estimator, if its plan does not take the seconds it says, or if it does not cover the whole space. `command` is
    what would make the right one.
    """
    if isinstance(path, str | Path) and str(path) and Path(path).is_dir():
        path = Path(path, FILE)
    where = f"certificate {str(path)!r}"
    data = read_json_object(path, "certificate")
    if data.get("schema") != SCHEMA:
        raise InputError(f"{where}: schema={shown(data.get('schema'))} is not {SCHEMA}; give the {FILE} of {command}")
    check_keys(where, data, KEYS)
    if data["problem"] != problem_key(problem, spec):
        raise InputError(
            f"{where}: it was made for another problem or space (model {shown(data['model'])}, cluster "
            f"{shown(data['cluster'])}); for this one: {command}"
        )
    mine = fingerprint(profile=profile)
    if data["estimator_fingerprint"] != mine:
        raise InputError(
            f"{where}: it is stale, made with estimator {shown(data['estimator_fingerprint'])}, this one is {mine}; "
            f"remake it: {command}"
        )
    if data["covers"] != EVERY_PLAN:
        raise InputError(f"{where}: it covers {shown(data['covers'])} only; for the whole space: {command}")
    bound, best = data["lower_bound_s"], data["iteration_time_s"]
    if not _is_seconds(bound) or not (best is None or (_is_seconds(best) and bound * (1 - WITHIN) <= best)):
        raise InputError(
            f"{where}: lower_bound_s={shown(bound)} and iteration_time_s={shown(best)} are no bound and time; "
            f"remake it: {command}"
        )
    if best is not None:
        estimate = Estimator(problem, profile=profile)(problem.plan_from_json(data["plan"], f"{where}: plan"))
        if not estimate.fits or not math.isclose(estimate.iteration_s, best, rel_tol=WITHIN):
            raise InputError(
                f"{where}: its plan {'takes' if estimate.fits else 'does not fit and takes'} "
                f"{estimate.iteration_s:.6g} s, not iteration_time_s={shown(best)}; remake it: {command}"
            )
    return Certificate(str(path), float(bound), None if best is None else float(best))


def _is_seconds(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= LARGEST_NUMBER  # type: ignore[operator]
