"""Several runs on one page: a table, the searches together, and the plans one under another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from haap_rl.cost.estimator import fingerprint
from haap_rl.report.charts import curves_picture
from haap_rl.report.markup import Markup, element, table
from haap_rl.report.page import Run, document, gap, interval, section_of_plan
from haap_rl.search.certificate import problem_key

COLUMNS = (
    "#run", "record", "search", "model", "cluster", "#seed", "#iteration, s", "#90 % interval", "#tokens/s",
    "#gap to bound", "#plans priced", "#search, s",
)  # fmt: skip


def comparison_page(runs: Sequence[Run]) -> str:
    """The whole page, as HTML; runs keep their order and are numbered from 1."""
    numbered = dict(enumerate(runs, 1))
    groups = _by_problem(numbered)
    title = f"{len(runs)} runs compared"
    parts: list[Markup | None] = [element("h1", title), _different(runs, len(groups)), _stale(numbered)]
    best = {number for group in groups for number in _fastest(group)}
    caption = "In bold the fastest plan" + (" of each problem." if len(groups) > 1 else ".")
    parts.append(table(caption, COLUMNS, [_row(number, run, number in best) for number, run in numbered.items()]))
    for group in groups:
        problem = next(iter(group.values())).record.problem
        curves = [run.curve._replace(name=f"{number}: {run.name}") for number, run in group.items()]
        drawing = curves_picture(curves)
        parts.append(element("h2", f"{problem.model.name} on {problem.cluster.name}"))
        parts.append(None if drawing is None else element("figure", drawing))
        for numbers in _by_plan(group):
            run = group[numbers[0]]
            names = "; ".join(f"{number}: {group[number].name}" for number in numbers)
            if run.estimate is None:
                parts.append(element("h3", f"Run {names}: no plan, {run.record.reason}"))
                continue
            parts += [element("h3", f"Run {names}: {run.estimate.iteration_s:.3f} s"), *section_of_plan(run, None)]
    return document(title, *parts)


def _row(number: int, run: Run, best: bool) -> list[object]:
    record, estimate = run.record, run.estimate
    far = gap(run)
    seconds = "none" if estimate is None else f"{estimate.iteration_s:.3f}"
    return [
        number,
        record.directory.name or str(record.directory),
        record.searcher,
        record.problem.model.name,
        record.problem.cluster.name,
        record.seed,
        element("b", seconds) if best else seconds,
        "" if estimate is None else interval(estimate),
        "" if estimate is None else f"{estimate.tokens_per_s:,.0f}",
        "" if far is None else f"{far:.1%}",
        f"{record.evaluations:,}",
        f"{record.wall_time_s:.1f}",
    ]


def _by_problem(runs: Mapping[int, Run]) -> list[dict[int, Run]]:
    """The runs of each problem, space and profile, by their numbers."""
    groups: dict[object, dict[int, Run]] = {}
    for number, run in runs.items():
        record = run.record
        key = problem_key(record.problem, record.space), record.profile
        groups.setdefault(key, {})[number] = run
    return list(groups.values())


def _by_plan(runs: Mapping[int, Run]) -> list[list[int]]:
    """Numbers of the runs that found the same plan; those without one each by themselves."""
    plans: dict[object, list[int]] = {}
    for number, run in runs.items():
        plans.setdefault(number if run.record.plan is None else run.record.plan, []).append(number)
    return list(plans.values())


def _fastest(runs: Mapping[int, Run]) -> list[int]:
    """Numbers of the runs with the best plan of one problem; none where there is none."""
    ranks = {number: run.estimate.rank for number, run in runs.items() if run.estimate is not None}
    return [number for number, rank in ranks.items() if rank == min(ranks.values())]


def _different(runs: Sequence[Run], num_problems: int) -> Markup | None:
    """Says plainly where the runs do not answer one question, and in what the questions differ."""
    if num_problems == 1:
        return None
    first = runs[0].record
    settings = [replace(run.record.problem, model=first.problem.model, cluster=first.problem.cluster) for run in runs]
    parts: dict[str, list[object]] = {
        "model": [run.record.problem.model for run in runs],
        "cluster": [run.record.problem.cluster for run in runs],
        "settings of the problem": list(settings),
        "space": [run.record.space for run in runs],
        "measured profile": [run.record.profile for run in runs],
    }
    differ = [name for name, values in parts.items() if any(value != values[0] for value in values)]
    text = f"These runs are of {num_problems} different problems: they differ in {', '.join(differ)}. "
    return element("p", text + "Times and gaps must not be compared across problems.", class_="warning")


def _stale(runs: Mapping[int, Run]) -> Markup | None:
    """Names the runs whose searches and bounds come from another estimator than the page's."""
    old = [
        str(number) for number, run in runs.items() if run.record.fingerprint != fingerprint(profile=run.record.profile)
    ]
    if not old:
        return None
    text = f"Made with another version of the estimator: run {', '.join(old)}. Plans are priced anew, bounds are not."
    return element("p", text, class_="warning")
