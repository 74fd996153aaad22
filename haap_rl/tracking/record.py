"""The record that every run leaves: config.yaml, plan.json, result.json and trace.csv, complete or not at all.

Beside them lie the files of the searcher's own, such as a trained policy.zip, and the report made from the record.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from haap_rl.cost.estimator import fingerprint
from haap_rl.cost.profile_files import profile_from_json, profile_to_json
from haap_rl.cost.profiles import Profile
from haap_rl.faults.tradeoff import FRONT, Tradeoff, read_front
from haap_rl.problem.errors import LARGEST_NUMBER, InputError, shown
from haap_rl.problem.formats.files import read_json_object, read_text
from haap_rl.problem.plan import Plan, Problem
from haap_rl.problem.presets import problem_from_config
from haap_rl.search.base import SearchResult, TracePoint
from haap_rl.space.options import SpaceSpec

PROFILE, REPORT = "profile.json", "report.html"
TRACE_COLUMNS = (
    "evaluations",
    "best_iteration_time_s",
    "operator_evaluations",
    "operator_evaluations_avoided",
    "seconds",
)
# what a report needs of result.json; a number is finite and not negative
Number = (int, float)
RESULT_KINDS: Mapping[str, tuple[type, ...]] = {
    "seed": (int,),
    "evaluations": (int,),
    "wall_time_s": Number,
    "iteration_time_s": (*Number, type(None)),
    "lower_bound_s": (*Number, type(None)),
    "proven_optimal": (bool,),
    "stopped_by": (str,),
    "reason": (str,),
    "notes": (list,),
    "estimator_fingerprint": (str,),
}
# what a report needs of result.json's expected_throughput
FAILURE_KINDS: Mapping[str, tuple[type, ...]] = {
    "faults": (str,),
    "policy": (str,),
    "policy_used": (str,),
    "method": (str,),
    "states": (int,),
    "expected_tokens_per_s": Number,
    "expected_tokens_per_s_low": Number,
    "expected_tokens_per_s_high": Number,
    "failure_free_tokens_per_s": Number,
    "gradient_fidelity": Number,
    "stopped_share": Number,
    "stops_per_hour": Number,
    "checkpoint_interval_s": (*Number, type(None)),
}


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
    for name in ("plan.json", PROFILE, FRONT, REPORT):  # one that an earlier run left would be taken for this run's
        if name not in texts and name not in result.artifacts:
            (directory / name).unlink(missing_ok=True)


def _value(key: str) -> str:
    return f"{key}={'DIR' if key == 'out' else 'FILE'}"


def check_writable(directory: Path, key: str = "out") -> None:
    """Make `directory` if it is missing. Raises InputError, naming the key, where no file can be written into it."""
    probe = directory / f".writable.{os.getpid()}.tmp"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"{key}={str(directory)!r}: cannot be written into ({error.strerror}); choose another {_value(key)}"
        ) from None


def write_files(directory: Path, files: Mapping[str, bytes], key: str = "out") -> None:
    """Write `files` (name -> content) into `directory`, made if missing.

    All are written under temporary names first and then renamed; where one cannot be written, none is and what was
    there is untouched. Raises InputError then, naming the key of the configuration that said where.
    """
    for name in files:
        if (directory / name).is_dir():
            raise InputError(f"{key}={str(directory)!r}: {name} is a directory there; choose another {_value(key)}")
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
            f"{key}={str(directory)!r}: its files cannot be written ({error.strerror}); choose another {_value(key)}"
        ) from None


@dataclass(frozen=True, slots=True)
class Record:
    """A run as its record tells it.

    plan              None where none was found; `reason` then says why
    lower_bound_s     no plan of the space is faster; None where nothing is proven
    fingerprint       of the estimator that the run used (`cost.estimator.fingerprint`)
    iteration_time_s  of the plan, by that estimator
    under_failures    what the plan is worth when devices fail, as result.json has it; None where nothing fails
    front             plans that the search would trade for it
    """

    directory: Path
    config: Mapping[str, Any]
    problem: Problem
    space: SpaceSpec
    profile: Profile | None
    plan: Plan | None
    trace: tuple[TracePoint, ...]
    seed: int
    evaluations: int
    wall_time_s: float
    iteration_time_s: float | None
    lower_bound_s: float | None
    proven_optimal: bool
    stopped_by: str
    reason: str
    notes: tuple[str, ...]
    fingerprint: str
    under_failures: Mapping[str, Any] | None = None
    front: tuple[Tradeoff, ...] = ()

    @property
    def searcher(self) -> str:
        return str(self.config["search"]["name"])

    @property
    def objective(self) -> str:
        """What plans were ranked by."""
        chosen = self.config.get("objective")
        return str(chosen.get("name", "iteration_time")) if isinstance(chosen, Mapping) else "iteration_time"


def read_record(directory: Path) -> Record:
    """The record in `directory`. Raises InputError, naming the file, where one is missing or no run wrote it."""
    config = _recorded_config(directory, ("model", "cluster", "problem", "space", "search"))
    if "name" not in config["search"]:
        raise InputError(f"record={str(directory)!r}: config.yaml names no search; give a directory of haap_rl.train")
    problem = problem_from_config(config["model"], config["cluster"], config["problem"])
    path = directory / "result.json"
    where, result = f"result {str(path)!r}", read_json_object(path, "result")
    known = {key: _checked(where, result, key) for key in RESULT_KINDS}
    plan = problem.load_plan(directory / "plan.json") if known["iteration_time_s"] is not None else None
    return Record(
        directory,
        config,
        problem,
        SpaceSpec.from_config(config["space"]),
        recorded_profile(directory),
        plan,
        read_trace(directory / "trace.csv"),
        notes=tuple(map(str, known.pop("notes"))),
        fingerprint=known.pop("estimator_fingerprint"),
        under_failures=_under_failures(where, result),
        front=read_front(directory / FRONT) if (directory / FRONT).is_file() else (),
        **known,
    )


def _under_failures(where: str, result: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What result.json says of failures. Raises InputError where no run wrote it so; None in records of before."""
    facts = result.get("expected_throughput")
    if facts is None:
        return None
    if not isinstance(facts, dict):
        raise InputError(f"{where}: expected_throughput={shown(facts)} is not what a run writes there; run it again")
    for key, kinds in FAILURE_KINDS.items():
        value = facts.get(key)
        good = key in facts and type(value) in kinds
        if not good or (type(value) in Number and not 0 <= value <= LARGEST_NUMBER):  # type: ignore[operator]
            raise InputError(f"{where}: expected_throughput.{key}={shown(value)} is not what a run writes there")
    if not facts["failure_free_tokens_per_s"]:
        raise InputError(f"{where}: expected_throughput.failure_free_tokens_per_s=0 is not what a run writes there")
    return facts


def _checked(where: str, result: Mapping[str, Any], key: str) -> Any:
    value = result.get(key)
    good = key in result and type(value) in RESULT_KINDS[key]
    if not good or (type(value) in Number and not 0 <= value <= LARGEST_NUMBER):  # type: ignore[operator]
        raise InputError(f"{where}: {key}={shown(value)} is not what a run writes there; run it again")
    return value


def read_trace(path: Path) -> tuple[TracePoint, ...]:
    """The trace that `trace_csv` wrote. Raises InputError naming the line that it did not write."""
    rows = csv.reader(io.StringIO(read_text(path, "trace")))
    where = f"trace {str(path)!r}"
    if next(rows, None) != list(TRACE_COLUMNS):
        raise InputError(f"{where}: its first line is not {','.join(TRACE_COLUMNS)}; run it again")
    points = []
    try:
        for evaluations, best, computed, avoided, seconds in rows:
            best_s = float(best) if best else None
            points.append(TracePoint(int(evaluations), best_s, int(computed), int(avoided), float(seconds)))
            if points[-1].evaluations < 0 or not (best_s is None or 0 < best_s <= LARGEST_NUMBER):
                raise ValueError
    except (ValueError, csv.Error):
        raise InputError(f"{where}: line {rows.line_num} is not a point of a trace; run it again") from None
    return tuple(points)


def recorded_plan(directory: Path) -> tuple[Problem, Plan]:
    """The problem and the plan of a record. Raises InputError if it is not one, or holds no plan."""
    config = _recorded_config(directory, ("model", "cluster", "problem"))
    problem = problem_from_config(config["model"], config["cluster"], config["problem"])
    return problem, problem.load_plan(directory / "plan.json")


def _recorded_config(directory: Path, parts: Sequence[str]) -> dict[str, Any]:
    """The configuration in a record, with mappings at `parts`. Raises InputError where it is none."""
    try:
        config = yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = str(getattr(error, "strerror", None) or error).splitlines()[0]
        raise InputError(f"record={str(directory)!r}: config.yaml cannot be read ({reason})") from None
    if not isinstance(config, dict) or not all(isinstance(config.get(part), dict) for part in parts):
        raise InputError(f"record={str(directory)!r}: config.yaml is not a run's configuration; give a run directory")
    return config


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
        "objective": config.get("objective", {}).get("name", "iteration_time"),
        "score_s": result.score_s,
        "expected_throughput": dict(result.scored) if result.scored is not None else None,
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
