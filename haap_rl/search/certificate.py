"""Certificates: what the exact search proved about a problem, as a file that other runs can rest on.

`+search=exact` leaves `certificate.json` beside its record. A certificate speaks of one problem, one declared space and
one estimator; for any other it is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from haap_rl.cost.estimator import fingerprint
from haap_rl.cost.profiles import Profile
from haap_rl.problem.errors import InputError, check_keys, shown
from haap_rl.problem.formats.files import read_json_object

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


@dataclass(frozen=True, slots=True)
class Certificate:
    """No plan of the space takes less than lower_bound_s; the best one known takes iteration_time_s (None: no plan)."""

    lower_bound_s: float
    iteration_time_s: float | None
    proven_optimal: bool


def load_certificate(path: str | Path, problem_key: str, command: str, profile: Profile | None = None) -> Certificate:
    """The certificate in the JSON file `path`, made for the problem and space of `problem_key`.

    Raises InputError, naming the file, if it cannot be read or is none, if it was made for another problem, space or
    estimator (`command` then remakes it), or if it does not cover the whole space.
    """
    where = f"certificate {str(path)!r}"
    data = read_json_object(path, "certificate")
    if data.get("schema") != SCHEMA:
        raise InputError(
            f"{where}: schema={shown(data.get('schema'))} is not {SCHEMA}; give a certificate.json of +search=exact"
        )
    check_keys(where, data, KEYS)
    numbers = data["lower_bound_s"], data["iteration_time_s"]
    bound, best = (float(value) if type(value) in (int, float) else None for value in numbers)
    if bound is None or not 0 <= bound < 1e30 or (best is not None and not bound * (1 - 1e-6) <= best):
        raise InputError(
            f"{where}: lower_bound_s={shown(numbers[0])} and iteration_time_s={shown(numbers[1])} are no bound and "
            f"time; remake it: {command}"
        )
    if data["problem"] != problem_key:
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
    return Certificate(bound, best, bool(data["proven_optimal"]))
