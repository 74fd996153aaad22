"""Fit the cost model's constants to published runs, and say how well it then predicts what it was not fitted on.

    python -m experiments.fit_estimator data=DIR out=DIR                about seven minutes on two cores
    python -m experiments.fit_estimator data=DIR out=DIR families=false only the fit on everything, two minutes

DIR holds measured*.csv (runs), and, if they are there, profiles_sailor_layers.csv, profiles_aceso_v100_ops.csv and
comm_measured.csv (measured layers, heads and collectives, which pin what runs alone do not). Written into out:
fitted.json (copy it to haap_rl/cost/fitted.json to ship it), predictions_{literature,left_out,fitted}.csv, the three
columns of every claim, in the schema of `haap_rl.validate`, and summary.json.

How: maximum a posteriori. A constant is its value in `LITERATURE` times exp(x) (a share: its logit plus x), with x
normal around 0 with the width of PRIOR_WIDTHS. The residual of a run is log(predicted / measured), robust (soft L1 at
5 %). Rows of a source share the weight n^0.9, so that a thousand rows of one machine do not drown seven of another.
The gradient is the estimator's own, by dual numbers. Deterministic: no randomness, no dependence on the core count.

Left out: for each family of sources (same runs, machines or authors) the constants are fitted on all others, from the
literature values on, and predict it. Measured layers and collectives stay in: a device nobody has run on still has
its data sheet and its benchmarks.

Status: 0 good, 1 some rows were malformed (counted, and the others fitted), 2 bad input.
"""

from __future__ import annotations

import datetime
import hashlib
import math
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from experiments.dual import Dual, value_of
from haap_rl import configs, validate
from haap_rl.cost import comm
from haap_rl.cost.calibration import LITERATURE, SCHEMA, Calibration, interval_class, parameters, with_parameters
from haap_rl.cost.estimator import Estimator, UnitKey, fingerprint
from haap_rl.cost.profile_files import load_profile
from haap_rl.problem.cluster import Cluster, DeviceGroup, device_from_config, link_from_config
from haap_rl.problem.errors import InputError
from haap_rl.problem.formats.measured import MeasuredRun
from haap_rl.problem.model import Model, Unit
from haap_rl.problem.plan import Problem
from haap_rl.problem.presets import preset
from haap_rl.report.accuracy import Prediction, summary
from haap_rl.tracking.record import check_writable, to_json_text, write_files

Floats = npt.NDArray[np.float64]
OPTIONS = {"data": None, "out": None, "families": True, "jobs": 2}
# sources that share runs, machines or authors, by the beginning of their name; any other source is its own family
FAMILIES = {
    "vtrain": ("vtrain_",),
    "sailor": ("sailor",),
    "amp": ("amp_",),
    "ds3lab": ("ds3lab_",),
    "llm_foundry": ("llm_foundry",),
    "bigscience": ("bigscience_", "bloom176b"),
    "korthikanti": ("korthikanti_",),
    "megatron": ("megatron_2020", "megatron_sc21", "megatron_gpt3", "megatron_h100", "megatron_llama", "mtnlg"),
    "internevo": ("internevo_",),
    "kwai": ("kwai_",),
}
TOLERANCE = 0.05  # error in log seconds above which a residual counts less and less
# quantile of the residuals that makes the interval: families differ from each other by more than their runs do, and
# with 0.90 the intervals cover 86.7 %, with 0.92 87.1 %, with 0.93 95.1 % of the runs of families they were not
# calibrated on
LEVEL = 0.92
WEIGHT_POWER = 0.9  # a source of n rows weighs n^0.9
# a micro-benchmark's weight is divided by this: it is no training run, and comes in hundreds of near-equal sizes
MICROBENCHMARK_DIVISORS = {"sailor_layers": 3.0, "aceso_heads": 3.0, "collectives": 12.0}
MOST_ROWS = 400  # of one source; a larger one gives every k-th row
PRIOR_STRENGTH = 0.6
ITERATIONS = 14
FAR = 3.0  # prior widths from the literature: a constant farther than this is reported
COLLECTIVE_RANKS, COLLECTIVE_BYTES = 8, 600e6  # whole nodes, and sizes that training sends
# Kept at their values in the literature: nothing here informs them, or their value is a fact.
FIXED = (
    *("other.gemm_efficiency", "other.attention_efficiency", "other.fused_attention_efficiency"),
    *("other.memory_bandwidth_share", "other.unaligned_share", "turing.unaligned_share", "hopper.unaligned_share"),
    *("volta.fused_attention_efficiency", "turing.fused_attention_efficiency"),
    *("nvlink.contention", "pcie.contention", "rdma.contention", "fast_ethernet.contention"),
    *("nvlink.small_message_s", "pcie.small_message_s", "rdma.small_message_s", "fast_ethernet.small_message_s"),
    *("ethernet.small_message_s", "small_message_bytes", "fast_ethernet.latency_scale"),
    *("fsdp.send_blocking", "huggingface.send_blocking", "huggingface.sync_hidden"),
    *("megatron.elementwise_passes", "deepspeed.elementwise_passes"),  # fused kernels: one pass, by definition
    *("megatron.reserve_bytes", "deepspeed.reserve_bytes", "huggingface.reserve_bytes", "fsdp.reserve_bytes"),
    "fragmentation",
)
# the two constants of memory, by search over a grid: the reserve of runtimes with several communicators per device
# (FSDP has one), and the allocator's share
RESERVED = ("megatron.reserve_bytes", "deepspeed.reserve_bytes", "huggingface.reserve_bytes")
RESERVES_BYTES = [i * 0.25e9 for i in range(12, 25)]
FRAGMENTATIONS = [i * 0.02 for i in range(8)]
SHARES = ("efficiency", "bandwidth_share", "unaligned_share", "hidden", "blocking", "contention")
# how far a value of the literature may be off, as the standard deviation of its logarithm (of a share: of its logit)
PRIOR_WIDTHS = {
    "gemm_efficiency": 0.2,
    "fused_attention_efficiency": 0.06,
    "attention_efficiency": 0.2,
    "memory_bandwidth_share": 0.2,
    "unaligned_share": 0.3,
    "ethernet.efficiency": 0.08,
    "efficiency": 0.2,  # of links
    "rdma.latency_scale": 0.2,
    "latency_scale": 0.3,
    "contention": 0.1,
    "host_layer_s": 0.03,
    "huggingface.host_microbatch_s": 0.3,
    "host_microbatch_s": 0.5,
    "deepspeed.host_iteration_s": 0.2,
    "host_iteration_s": 0.5,
    "megatron.send_blocking": 0.5,
    "send_blocking": 0.25,
    "hidden": 0.3,
    "huggingface.optimizer_bytes": 0.2,
    "fsdp.optimizer_bytes": 0.2,
    "optimizer_bytes": 0.15,
    "gemm_half_size": 0.07,
    "gemm_half_tokens": 0.2,
    "collective_s": 0.1,
    "straggler_share": 0.07,
}
# other constants that one family alone informs: wide, for with that family left out they are the literature's again
WIDE, ALONE = 0.5, ("turing.", "pcie.", "huggingface.", "fsdp.", "fast_ethernet.")


# ---------------------------------------------------------------------------------------------- what was measured
@dataclass(frozen=True)
class Observation:
    """Something measured: its source, the seconds, and the seconds by a set of constants."""

    source: str
    seconds: float
    predict: Callable[[Calibration], Any]


def of_run(run: MeasuredRun) -> Observation:
    """A whole run: seconds of one iteration."""
    assert run.time_s is not None
    return Observation(run.source_id, run.time_s, lambda constants: predicted_s(run, constants))


def predicted_s(run: MeasuredRun, constants: Calibration) -> Any:
    assert run.problem is not None
    assert run.plan is not None
    return Estimator(run.problem, calibration=constants)(run.plan).iteration_s


def usable(run: MeasuredRun) -> bool:
    """Whether a run's time is fitted and judged: priced, timed, and not in doubt."""
    timed = run.problem is not None and run.time_s is not None and run.batch_stated and run.ran is True
    return timed and run.quality != "C" and not run.suspect


def microbenchmarks(data: Path) -> list[Observation]:
    """Measured layers of GH200 and heads of V100 on one device, and all-reduces in a node of V100."""
    found: list[Observation] = []
    layers, operators, collectives = (
        data / name for name in ("profiles_sailor_layers.csv", "profiles_aceso_v100_ops.csv", "comm_measured.csv")
    )
    if layers.is_file():
        for model in ("OPT-350", "GPT-Neo-2.7"):
            found += _units(layers, model, "gh200_96", "layer", "huggingface", "sailor_layers")
    if operators.is_file():
        for model in ("350M", "1_3B", "2_6B", "6_7B", "13B"):
            found += _units(operators, model, "v100_32", "head", "megatron", "aceso_heads")
    if collectives.is_file():
        found += _collectives(collectives)
    return found


def _units(path: Path, model: str, device: str, unit: Unit, framework: str, source: str) -> list[Observation]:
    """Forward + backward seconds of one unit on one device, every micro-batch that was measured."""
    try:
        profile = load_profile(path, model)
    except InputError as error:
        if "model" in str(error):  # this copy of the table does not hold it
            return []
        raise
    sizes: Any = dict(profile.measured_for.dimensions)
    problem = Problem(
        cluster=_one_node(device),
        model=Model(
            name=model,
            num_layers=1,
            hidden=sizes["hidden"],
            heads=sizes["heads"],
            kv_heads=sizes["kv_heads"],
            head_dim=sizes["hidden"] // sizes["heads"],
            ffn=sizes["ffn"],
            gated_mlp=False,
            vocab=sizes["vocab"],
            max_positions=profile.measured_for.seq_len or 2048,
            learned_positions=True,
            norm="layernorm",
            tied_embeddings=True,
            biases=True,
            dropout=True,
        ),
        seq_len=profile.measured_for.seq_len or 2048,
        global_batch_size=1,
        framework=framework,
    )
    observations = []
    for cell in profile.units:
        if (cell.device, cell.unit, cell.tp) != (device, unit, 1) or cell.forward_s is None or cell.backward_s is None:
            continue

        def predict(constants: Calibration, size: int = cell.microbatch_size) -> Any:
            time = Estimator(problem, calibration=constants).unit_time(UnitKey(unit, 0, 1, 1, size, False))
            return time.forward_s + time.backward_s

        observations.append(Observation(source, cell.forward_s + cell.backward_s, predict))
    return observations


def _collectives(path: Path) -> list[Observation]:
    group = _one_node("v100_32").groups[0]
    observations = []
    for cell in load_profile(path).collectives:
        if cell.operation != "all_reduce" or cell.ranks != COLLECTIVE_RANKS:
            continue
        for timing in cell.timings:
            if timing.num_bytes > COLLECTIVE_BYTES:
                continue

            def predict(constants: Calibration, num_bytes: float = float(timing.num_bytes)) -> Any:
                return comm.ring_all_reduce_s(num_bytes, COLLECTIVE_RANKS, *constants.inside(group.intra_node))

            observations.append(Observation("collectives", timing.seconds, predict))
    return observations


def _one_node(device: str) -> Cluster:
    config = preset("device", device)
    intra, inter = (link_from_config(key, config["node"][key]) for key in ("intra_node", "inter_node"))
    return Cluster(device, (DeviceGroup(device, device_from_config(config), 1, 8, intra, inter),))


def weights(observations: Sequence[Observation]) -> Floats:
    """Weight of every observation; they average 1."""
    counts = Counter(o.source for o in observations)
    values = [
        counts[o.source] ** (WEIGHT_POWER - 1.0) / MICROBENCHMARK_DIVISORS.get(o.source, 1.0) for o in observations
    ]
    weight: Floats = np.array(values) / np.mean(values)
    return weight


# ------------------------------------------------------------------------------------------------------- the fit
def fitted_names() -> list[str]:
    return [name for name in parameters(LITERATURE) if name not in FIXED]


def width(name: str) -> float:
    if name in PRIOR_WIDTHS:
        return PRIOR_WIDTHS[name]
    if name.startswith(ALONE):
        return WIDE
    return next(width for ending, width in PRIOR_WIDTHS.items() if name.endswith(ending))


def constant(name: str, x: float) -> tuple[float, float]:
    """Value of a constant at its coordinate x, and the derivative."""
    first = float(parameters(LITERATURE)[name])
    if name.endswith(SHARES):
        value = 1.0 / (1.0 + math.exp(-(math.log(first / (1.0 - first)) + x)))
        return value, value * (1.0 - value)
    return first * math.exp(x), first * math.exp(x)


def constants_at(names: Sequence[str], x: Floats, dual: bool = False) -> Calibration:
    """The constants at coordinates x; as dual numbers whose gradient is by x, if asked for."""
    values: dict[str, Any] = {}
    for i, name in enumerate(names):
        value, slope = constant(name, float(x[i]))
        values[name] = Dual(value, slope * np.eye(len(names))[i]) if dual else value
    return with_parameters(LITERATURE, values)


def fit(observations: Sequence[Observation], names: Sequence[str]) -> Floats:
    """Coordinates of the constants that explain the observations best, given the priors."""
    from scipy.optimize import least_squares

    measured = np.log([o.seconds for o in observations])
    weight = weights(observations)
    root = np.sqrt(weight) / TOLERANCE
    prior = PRIOR_STRENGTH / np.array([width(name) for name in names])
    number = len(observations)

    def residuals(x: Floats) -> Floats:
        constants = constants_at(names, x)
        predicted = np.log([value_of(o.predict(constants)) for o in observations])
        return np.concatenate([root * (predicted - measured), prior * x])

    def jacobian(x: Floats) -> Floats:
        constants = constants_at(names, x, dual=True)
        rows = []
        for o, factor in zip(observations, root, strict=True):
            seconds = o.predict(constants)
            rows.append(factor * seconds.gradient / seconds.value if isinstance(seconds, Dual) else np.zeros(len(x)))
        return np.vstack([rows, np.diag(prior)])

    def soft_l1(squares: Floats) -> Floats:
        """Loss, first and second derivative by the squared residual: soft L1 for data, plain for the priors."""
        scale = np.concatenate([weight, np.ones(len(squares) - number)])
        data = np.arange(len(squares)) < number
        rooted = np.sqrt(1.0 + squares / scale)
        return np.stack(
            [
                np.where(data, 2.0 * scale * (rooted - 1.0), squares),
                np.where(data, 1.0 / rooted, 1.0),
                np.where(data, -0.5 / (rooted**3 * scale), 0.0),
            ]
        )

    scales = np.array([width(name) for name in names])
    start = np.zeros(len(names))
    result = least_squares(residuals, start, jacobian, loss=cast(Any, soft_l1), x_scale=scales, max_nfev=ITERATIONS)
    return np.asarray(result.x)


def fit_memory(runs: Sequence[MeasuredRun]) -> dict[str, float]:
    """Reserve and fragmentation with the least loss; none where no run states its memory.

    Loss: mean over the sources of the mean error of peak memory in percent, plus one point for every failed run that is
    said to fit and one for every percent of the others that is said not to.
    """
    trusted = [run for run in runs if run.problem is not None and run.quality != "C" and not run.suspect]
    sized = [run for run in trusted if run.memory_gib is not None]
    if not sized:
        return {}
    failed = [run for run in trusted if run.ran is False]
    tight = _tight([run for run in trusted if run.ran])
    best: tuple[float, dict[str, float]] = (math.inf, {})
    for reserve in RESERVES_BYTES:
        for fragmentation in FRAGMENTATIONS:
            values = {**dict.fromkeys(RESERVED, reserve), "fragmentation": fragmentation}
            constants = with_parameters(LITERATURE, values)
            errors: dict[str, list[float]] = {}
            for p in predictions_by(constants, sized):
                if p.memory_gib is not None and p.run.memory_gib is not None:
                    errors.setdefault(p.run.source_id, []).append(100.0 * abs(p.memory_gib / p.run.memory_gib - 1.0))
            wrong = sum(p.fits is True for p in predictions_by(constants, failed))
            refused = sum(p.fits is False for p in predictions_by(constants, tight))
            loss = float(np.mean([np.mean(some) for some in errors.values()])) if errors else 0.0
            loss += wrong + 100.0 * refused / max(1, len(trusted))
            if loss < best[0] - 1e-9:
                best = (loss, values)
    return best[1]


def _tight(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """The runs that the largest reserve of the grid would refuse: no other reserve refuses any more."""
    most = with_parameters(LITERATURE, dict.fromkeys(RESERVED, RESERVES_BYTES[-1]))
    return [p.run for p in predictions_by(most, runs) if p.fits is False]


def predictions_by(constants: Calibration, runs: Sequence[MeasuredRun]) -> list[Prediction]:
    """What the estimator says of the runs with these constants, without a progress bar."""
    from rich.console import Console

    return validate.predict(runs, constants, Console(quiet=True))


def thinned(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """The runs that are fitted: of a source with very many, every k-th."""
    by_source: dict[str, list[MeasuredRun]] = {}
    for run in runs:
        by_source.setdefault(run.source_id, []).append(run)
    return [run for some in by_source.values() for run in some[:: -(-len(some) // MOST_ROWS)]]


def family(source: str) -> str:
    return next((name for name, starts in FAMILIES.items() if source.startswith(starts)), source)


_RUNS: list[MeasuredRun] = []  # what the worker processes inherit
_DATA = Path()


def _fit_without(left_out: str) -> tuple[str, list[float]]:
    kept = [of_run(run) for run in thinned([run for run in _RUNS if family(run.source_id) != left_out])]
    return left_out, fit([*kept, *microbenchmarks(_DATA)], fitted_names()).tolist()


# ----------------------------------------------------------------------------------------------------- the command
def fit_estimator(options: dict[str, Any]) -> int:
    data, out = Path(str(options["data"])), Path(str(options["out"]))
    if not isinstance(options["families"], bool):
        raise InputError(f"families={options['families']!r} must be true or false")
    if type(options["jobs"]) is not int or options["jobs"] < 1:
        raise InputError(f"jobs={options['jobs']!r} must be a whole number of at least 1; give for example jobs=2")
    files = sorted(data.glob("measured*.csv"))
    if not files:
        raise InputError(f"data={str(data)!r} holds no measured*.csv; give the folder of the published runs")
    all_runs, faults = validate.read([str(file) for file in files])
    runs = [run for run in all_runs if usable(run)]
    families = sorted({family(run.source_id) for run in runs})
    if len(families) < (2 if options["families"] else 1):
        way_out = (
            "none is left when one is left out; give families=false"
            if families
            else "they need a time, a stated batch, and no doubt about them"
        )
        raise InputError(f"{len(runs)} usable runs of {len(families)} families; {way_out}")
    check_writable(out)  # before minutes of work
    names = fitted_names()
    print(f"{len(runs)} runs of {len({run.source_id for run in runs})} sources, {len(names)} constants", flush=True)

    global _RUNS, _DATA
    _RUNS, _DATA = runs, data
    tasks = [""]  # nothing left out
    if options["families"]:
        tasks += families
    coordinates: dict[str, list[float]] = {}
    with multiprocessing.get_context("fork").Pool(min(options["jobs"], len(tasks))) as pool:
        for left_out, x in pool.imap_unordered(_fit_without, tasks):
            coordinates[left_out] = x
            print(f"fitted {'on everything' if not left_out else 'without ' + left_out}", flush=True)

    memory = fit_memory(all_runs)
    print(f"memory: {memory}", flush=True)
    fitted = with_parameters(constants_at(names, np.array(coordinates[""])), memory)
    columns: dict[str, dict[str, Calibration]] = {"literature": {"": LITERATURE}, "fitted": {"": fitted}}
    if options["families"]:
        columns["left_out"] = {name: constants_at(names, np.array(x)) for name, x in coordinates.items()}
    predicted = {column: predictions_by_family(by_family, all_runs) for column, by_family in columns.items()}
    intervals, coverage = {}, {}
    if options["families"]:
        intervals = quantiles(residuals_by_class(predicted["left_out"]))
        coverage = coverage_of(predicted["left_out"])
    figures = {column: summary(predictions) for column, predictions in predicted.items()}
    used = Counter(run.source_id for run in thinned(runs))
    errors = {column: mape(predictions) for column, predictions in predicted.items()}
    result = {
        "schema": SCHEMA,
        "date": datetime.date.today().isoformat(),
        "command": "python -m experiments.fit_estimator data=DIR out=DIR",
        "data_sha256": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files},
        "rows_used": dict(sorted(used.items())),
        "fitted": [*names, *memory],
        "near_bound": near_bound(fitted, names),
        "mape_pct": errors,
        "intervals": intervals,
        "constants": {name: float(value) for name, value in parameters(fitted).items()},
    }
    facts = {"figures": figures, "coverage": coverage, "fingerprint": fingerprint(fitted)}
    contents = {
        "fitted.json": to_json_text(result).encode(),
        "summary.json": to_json_text(facts).encode(),
    }
    for column, predictions in predicted.items():
        contents[f"predictions_{column}.csv"] = validate.predictions_csv(predictions, faults).encode()
    write_files(out, contents)
    for column, by_source in errors.items():
        print(column, " ".join(f"{source} {value:.1f}" for source, value in by_source.items()))
    print(f"written: {out}")
    if faults:
        print(f"haap_rl: {len(faults)} malformed rows skipped; haap_rl.validate names them", file=sys.stderr)
    return 1 if faults else 0


def predictions_by_family(constants: Mapping[str, Calibration], runs: Sequence[MeasuredRun]) -> list[Prediction]:
    """Predictions with the constants of each run's family, where there are such, else with those of ""."""
    by_family: dict[str, list[MeasuredRun]] = {}
    for run in runs:
        name = family(run.source_id)
        by_family.setdefault(name if name in constants else "", []).append(run)
    found = {
        prediction.run.row_id: prediction
        for name, some in by_family.items()
        for prediction in predictions_by(constants[name], some)
    }
    return [found[run.row_id] for run in runs]


def judged(predictions: Sequence[Prediction]) -> Iterator[tuple[MeasuredRun, float]]:
    """(run, predicted / measured seconds) of the runs whose time counts."""
    for p in predictions:
        if usable(p.run) and p.time_s is not None and p.run.time_s is not None:
            yield p.run, p.time_s / p.run.time_s


def mape(predictions: Sequence[Prediction]) -> dict[str, float]:
    """Mean absolute error in percent, per source and over all rows."""
    errors: dict[str, list[float]] = {}
    for run, ratio in judged(predictions):
        for key in (run.source_id, "all"):
            errors.setdefault(key, []).append(abs(ratio - 1.0))
    return {key: round(100.0 * float(np.mean(values)), 3) for key, values in sorted(errors.items())}


def near_bound(constants: Calibration, names: Sequence[str]) -> list[str]:
    """Constants that the fit drives out of what they can mean: there the formula, not the value, is incomplete.

    Shares near 0 or 1, and constants more than FAR widths of their prior away from the literature.
    """
    values, first = parameters(constants), parameters(LITERATURE)

    def coordinate(name: str, value: float) -> float:
        return math.log(value / (1.0 - value)) if name.endswith(SHARES) else math.log(value)

    moved = {name: coordinate(name, values[name]) - coordinate(name, first[name]) for name in names}
    far = [name for name in names if abs(moved[name]) > FAR * width(name)]
    return [name for name in names if name in far or (name.endswith(SHARES) and not 0.03 < values[name] < 0.97)]


# ------------------------------------------------------------------------------------------------------ intervals
def residuals_by_class(predictions: Sequence[Prediction], without: str = "") -> dict[str, list[tuple[str, float]]]:
    """(family, |log(predicted / measured)|) of runs that were predicted by the fit without their family, by class."""
    found: dict[str, list[tuple[str, float]]] = {}
    for run, ratio in judged(predictions):
        if family(run.source_id) == without:
            continue
        assert run.problem is not None
        assert run.plan is not None
        for name in (*interval_class(run.problem, run.plan), "all"):
            found.setdefault(name, []).append((family(run.source_id), abs(math.log(ratio))))
    return found


def quantiles(residuals: Mapping[str, Sequence[tuple[str, float]]], level: float = LEVEL) -> dict[str, float]:
    """Split-conformal quantile of every class with enough residuals: the (n + 1) level-th smallest of n.

    Families weigh the square root of their rows: a new cluster is a new family, not one more row of a known one.
    """
    result = {}
    for name, pairs in sorted(residuals.items()):
        counts = Counter(key for key, _ in pairs)
        if len(pairs) < 20:
            continue
        ordered = sorted((error, counts[key] ** -0.5) for key, error in pairs)
        total = sum(weight for _, weight in ordered) * (len(pairs) + 1) / len(pairs)
        reached = width_here = 0.0
        for error, weight in ordered:
            width_here = error
            reached += weight
            if reached >= level * total:
                break
        result[name] = round(width_here, 6)
    return result


def coverage_of(predictions: Sequence[Prediction]) -> dict[str, dict[str, float]]:
    """Share of each family's runs inside intervals that were calibrated on the other families."""
    result = {}
    hits: list[bool] = []
    widths: list[float] = []
    for name in sorted({family(run.source_id) for run, _ in judged(predictions)}):
        table = quantiles(residuals_by_class(predictions, without=name))
        calibrated = replace(LITERATURE, intervals=tuple(table.items()))
        inside, half = [], []
        for run, ratio in judged(predictions):
            if family(run.source_id) != name:
                continue
            assert run.problem is not None
            assert run.plan is not None
            most = calibrated.half_width(run.problem, run.plan)
            assert most is not None
            inside.append(abs(math.log(ratio)) <= most)
            half.append(math.expm1(most))
        result[name] = {"rows": len(inside), "covered": float(np.mean(inside)), "half_width": float(np.median(half))}
        hits += inside
        widths += half
    result["all"] = {"rows": len(hits), "covered": float(np.mean(hits)), "half_width": float(np.median(widths))}
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return configs.run_with_options(fit_estimator, OPTIONS, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
