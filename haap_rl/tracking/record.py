"""The record that every run leaves: config.yaml, plan.json, result.json and trace.csv, complete or not at all.

Beside them lie the files of the searcher's own, such as a trained policy.zip.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from haap_rl.cost.estimator import fingerprint
from haap_rl.cost.profile_files import profile_from_json, profile_to_json
from haap_rl.cost.profiles import Profile
from haap_rl.problem.errors import InputError
from haap_rl.problem.formats.files import read_json_object
from haap_rl.problem.plan import Plan, Problem
from haap_rl.problem.presets import problem_from_config
from haap_rl.search.base import SearchResult

PROFILE = "profile.json"
TRACE_COLUMNS = (
    "evaluations",
    "best_iteration_time_s",
    "operator_evaluations",
    "operator_evaluations_avoided",
    "seconds",
)


def write_record(directory: Path, config: dict[str, Any], problem: Problem, result: SearchResult) -> None:
    """Write the record's files and the searcher's own into `directory` (made if missing).

    plan.json if there is a plan, profile.json if the times come from one.

    Raises InputError if the directory cannot be written; an older record there is then untouched.
    """
    texts = {
        "config.yaml": yaml.safe_dump(config, sort_keys=False),
        "result.json": to_json_text(result_to_json(config, problem, result)),
        "trace.csv": trace_csv(result),
    }
    if result.plan is not None:
        texts["plan.json"] = to_json_text(problem.plan_to_json(result.plan))
    if result.profile is not None:  # so that the record can be priced when the file has moved
        texts[PROFILE] = to_json_text(profile_to_json(result.profile))
    write_files(directory, {**result.artifacts, **{name: text.encode("utf-8") for name, text in texts.items()}})
    for name in ("plan.json", PROFILE):  # one that an earlier run left would be taken for this run's
        if name not in texts:
            (directory / name).unlink(missing_ok=True)


def check_writable(directory: Path) -> None:
    """Make `directory` if it is missing. Raises InputError where no file can be written into it."""
    probe = directory / f".writable.{os.getpid()}.tmp"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"out={str(directory)!r}: cannot be written into ({error.strerror}); choose another out=DIR"
        ) from None


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write `files` (name -> content) into `directory`, made if missing.

    All are written under temporary names first and then renamed; where one cannot be written, none is and what was
    there is untouched. Raises InputError then.
    """
    for name in files:
        if (directory / name).is_dir():
            raise InputError(f"out={str(directory)!r}: {name} is a directory there; choose another out=DIR")
    temporary: list[tuple[Path, Path]] = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            path = directory / f".{name}.{os.getpid()}.tmp"
            temporary.append((path, directory / name))
            path.write_bytes(content)
        for path, final in temporary:
            path.replace(final)
    except OSError as error:
        for path, _ in temporary:
            path.unlink(missing_ok=True)
        raise InputError(
            f"out={str(directory)!r}: the record cannot be written ({error.strerror}); choose another out=DIR"
        ) from None


def recorded_plan(directory: Path) -> tuple[Problem, Plan]:
    """The problem and the plan of a record. Raises InputError if it is not one, or holds no plan."""
    path = directory / "config.yaml"
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(getattr(error, "strerror", None) or error).splitlines()[0]
        raise InputError(f"record={str(directory)!r}: config.yaml cannot be read ({reason})") from None
    parts = [config.get(key) for key in ("model", "cluster", "problem")] if isinstance(config, dict) else [None]
    if not all(isinstance(part, dict) for part in parts):
        raise InputError(f"record={str(directory)!r}: config.yaml is not a run's configuration; give a run directory")
    problem = problem_from_config(config["model"], config["cluster"], config["problem"])
    return problem, problem.load_plan(directory / "plan.json")


def recorded_profile(directory: Path) -> Profile | None:
    """The profile that the record's run used; None if it used none. Raises InputError if it cannot be read."""
    path = directory / PROFILE
    return profile_from_json(read_json_object(path, "profile"), str(path)) if path.is_file() else None


def result_to_json(config: dict[str, Any], problem: Problem, result: SearchResult) -> dict[str, Any]:
    """The figures of a run as plain JSON data; what is not known is null, never NaN or infinity."""
    estimate = result.estimate
    between = (estimate.interval_s if estimate else None) or (None, None)
    return {
        "searcher": config["search"]["name"],
        "model": problem.model.name,
        "cluster": problem.cluster.name,
        "seed": result.seed,
        "iteration_time_s": estimate.iteration_s if estimate else None,
        "iteration_time_low_s": between[0],
        "iteration_time_high_s": between[1],
        "tokens_per_s": estimate.tokens_per_s if estimate else None,
        "fits": estimate.fits if estimate else False,
        "bubble": estimate.bubble if estimate else None,
        "bottleneck": list(estimate.bottleneck) if estimate else None,
        "evaluations": result.evaluations,
        "operator_evaluations": result.operator_evaluations,
        "operator_evaluations_avoided": result.operator_evaluations_avoided,
        "operator_evaluations_avoided_per_plan": result.operator_evaluations_avoided_per_plan,
        "wall_time_s": result.wall_time_s,
        "lower_bound_s": result.lower_bound_s if math.isfinite(result.lower_bound_s) else None,
        "gap_to_lower_bound": result.gap_to_lower_bound,
        "proven_optimal": result.proven_optimal,
        "stopped_by": result.stopped_by,
        "reason": result.reason,
        "notes": list(result.notes),
        "space": config["space"],
        "pruning": {
            "options": result.pruning.options,
            "options_that_fit": result.pruning.options_that_fit,
            "plans": result.pruning.plans,
            "plans_that_fit": result.pruning.plans_that_fit,
            "factor": result.pruning.factor,
        },
        "profile": profile_facts(result.profile, result.profile_gaps),
        "estimator_fingerprint": fingerprint(profile=result.profile),
    }


def profile_facts(profile: Profile | None, gaps: Sequence[str]) -> dict[str, Any] | None:
    """Which measurements a price rests on, and where it does not, as plain JSON data."""
    if profile is None:
        return None
    return {
        "name": profile.name,
        "checksum": profile.checksum,
        "assumptions": list(profile.assumptions),
        "not_measured": list(gaps),
    }


def trace_csv(result: SearchResult) -> str:
    """The trace as CSV text; best_iteration_time_s is empty until a plan fits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(TRACE_COLUMNS)
    for point in result.trace:
        best = "" if point.best_iteration_time_s is None else repr(point.best_iteration_time_s)
        writer.writerow(
            [
                point.evaluations,
                best,
                point.operator_evaluations,
                point.operator_evaluations_avoided,
                f"{point.seconds:.6f}",
            ]
        )
    return text.getvalue()


def to_json_text(data: object) -> str:
    """Indented JSON; NaN and infinity are refused."""
    return json.dumps(data, indent=2, allow_nan=False) + "\n"
