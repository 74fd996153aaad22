"""The paper's tables: their figures by hand, a small run of all of them, restarts, and the page for the README."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import yaml

from experiments import grid, reproduce
from experiments.paper import equal_budgets, homogeneous_throughput, ideas, search_efficiency, throughput
from experiments.paper.table import Experiment, bound_s, load, median_s, published, spread, trace
from haap_rl import train
from haap_rl.problem.presets import conf_dir, names, preset
from tests.builders import group, problem

PAIR = ("gpt3_350m", "v100x4_t4x4")
MIXED = ("gpt3_1_3b", "v100x4_t4x4")
SPACE = {"num_microbatches": [8, 16], "max_stages": 4, "max_tp": 2, "group_sizes": [2, 4], "recompute": ["full"]}


def small(name, pairs=(PAIR,), **changes):
    """An experiment that takes a moment."""
    settings = {
        "name": name, "pairs": pairs, "problem": preset("problem", "default"), "evaluations": 40,
        "space": {**preset("space", "default"), **SPACE}, "seeds": (0, 1), "few": 10, "quick": True,
    }  # fmt: skip
    return Experiment(**{**settings, **changes})


def row(best_s=None, seed=0, **figures):
    """A row as a grid has it."""
    told = "" if best_s is None else repr(best_s)
    found = dict.fromkeys(grid.COLUMNS, "") | {"seed": str(seed), "iteration_time_s": told, "evaluations": "100"}
    return found | {"lower_bound_s": "1.0", "seconds": "2.0", "operator_evaluations": "7"} | figures


def found(*cells_and_rows):
    """A grid with these rows for these cells."""
    made = grid.Grid()
    for cell, rows in cells_and_rows:
        made.rows[cell.config_hash] = rows
    return made


# ------------------------------------------------------------------------------------------- by hand
def test_a_median_is_a_plan_that_exists_and_a_seed_without_one_counts_as_worst():
    assert median_s([row(3.0), row(1.0), row(2.0)]) == 2.0
    assert median_s([row(3.0), row(1.0)]) == 1.0
    assert median_s([row(3.0), row(), row(1.0)]) == 3.0
    assert median_s([row(), row(), row(1.0)]) is None
    assert median_s([]) is None
    assert spread([3.0, 1.0, 2.0]) == {"min": 1.0, "median": 2.0, "max": 3.0}
    assert spread([]) is None


def throughput_grid(experiment, autohaap, **baselines):
    """A grid in which the bound is 1 s; baselines by method."""
    pair = experiment.pairs[0]
    cells = [(experiment.exact(pair), [row(1.0)])]
    cells.append((throughput.autohaap(experiment, pair), [row(time, seed) for seed, time in enumerate(autohaap)]))
    for name in throughput.BASELINES:
        for cell in throughput.baseline(experiment, pair, name):
            time = baselines.get(cell.method.replace(" ", "_"))
            cells.append((cell, [row(time, reason="no plan of it fits" if time is None else "")]))
    return found(*cells)


def test_gains_are_over_the_better_way_of_a_baseline_and_a_baseline_that_wins_is_counted():
    experiment = small("mixed_throughput", (MIXED,))
    made = throughput.table(
        experiment,
        throughput_grid(experiment, (1.1, 1.0), megatron_all=1.5, megatron_part=1.2, alpa_all=1.6, metis=0.998),
        "title",
        "mixed_gain_pct",
    )
    gains = made.summary["per_baseline"]
    assert gains["megatron"]["median"] == pytest.approx(20)
    assert gains["alpa"]["median"] == pytest.approx(60)
    assert gains["aceso"] is None
    assert made.summary["mixed_gain_pct"]["min"] == pytest.approx(-0.2)
    assert made.summary["mixed_gain_pct"]["max"] == pytest.approx(60)
    assert made.summary["cells_where_a_baseline_wins"] == [[*MIXED, "metis"]]
    assert made.summary["gap_to_bound_pct"]["max"] == pytest.approx(0)
    assert ["gpt3_1_3b", "v100x4_t4x4", "sailor", "no plan of it fits"] in made.summary["cells_without_plan"]
    assert "+50.0 % / +20.0 %" in made.markdown
    assert "Published: +10.1 to +22.28 %" in made.markdown
    (ours,) = [line for line in made.rows if line["method"] == "autohaap"]
    assert float(ours["tokens_per_s"]) == pytest.approx(128 * 2048 / 1.0)


def test_a_loss_of_a_thousandth_is_no_loss():
    experiment = small("mixed_throughput", (MIXED,))
    made = throughput.table(experiment, throughput_grid(experiment, (1.0,), metis=0.9995), "title", "mixed_gain_pct")
    assert made.summary["cells_where_a_baseline_wins"] == []


def test_a_cell_in_which_autohaap_has_no_plan_is_lost():
    experiment = small("mixed_throughput", (MIXED,))
    made = throughput.table(experiment, throughput_grid(experiment, (None,), metis=2.0), "title", "mixed_gain_pct")
    assert made.summary["cells_where_a_baseline_wins"] == [[*MIXED, "any"]]


def test_a_policy_that_is_refused_is_not_trained():
    experiment = small("mixed_throughput", (MIXED,))
    cells = throughput_grid(experiment, (1.0,), metis=2.0)
    cells.rows[throughput.policy(experiment, MIXED).config_hash] = [row(reason="policy 'pretrained': retrain it")]
    made = throughput.table(experiment, cells, "title", "mixed_gain_pct")
    assert "| not trained |" in made.markdown
    assert any(line["reason"].startswith("not trained: policy") for line in made.rows)


def test_what_is_published_stands_beside_ours():
    experiment = small("homogeneous_throughput", (("gpt3_1_3b", "v100x4"),))
    made = homogeneous_throughput.table(
        experiment, throughput_grid(experiment, (1.0,), megatron_all=1.5, aceso_all=1.2)
    )
    assert "| gpt3_1_3b | v100x4 | 0.97 | - | 1.22 | 1.25 | 1.50 |" in made.markdown
    assert len(published()["gpt3_on_v100"]["cells"]) == 5


def test_a_search_is_as_good_at_the_first_point_of_its_trace_that_is():
    points = {"trace": "1:3.0 10:2.0 50:1.0", "trace_seconds": "0.1 0.2 0.3"}
    assert trace(row(1.0, **points)) == [(1, 3.0, 0.1), (10, 2.0, 0.2), (50, 1.0, 0.3)]
    assert search_efficiency.reached([row(1.0, **points)], 2.5) == (10, 0.2)
    assert search_efficiency.reached([row(1.0, **points)], 1.0) == (50, 0.3)
    assert search_efficiency.reached([row(1.0, **points), row(5.0)], 2.5) == (None, None)
    assert search_efficiency.reached([row(1.0, **points)], 0.9) == (None, None)


def test_alpa_profiles_every_run_of_layers_on_every_submesh():
    two_on_one = problem([group(per_node=1)], {"num_layers": 2})
    assert search_efficiency.alpa_candidates(two_on_one) == 3  # first, second, both
    three_on_four = problem([group(per_node=4)], {"num_layers": 3})
    assert search_efficiency.alpa_candidates(three_on_four) == 18  # six runs on 1, 2 and 4 devices


def test_efficiency_is_the_baselines_cost_over_what_autohaap_took_to_be_as_good():
    experiment = small("search_efficiency", (("gpt3_1_3b", "v100x4"),))
    cells = throughput_grid(experiment, (1.0,), alpa_all=2.0, aceso_all=0.5)
    ours = throughput.autohaap(experiment, experiment.pairs[0])
    cells.rows[ours.config_hash] = [row(1.0, trace="4:3.0 25:1.5", trace_seconds="0.1 0.5", seconds="10.0")]
    made = search_efficiency.table(experiment, cells)
    assert made.summary["search_efficiency_x"]["alpa"] == {"min": 4.0, "median": 4.0, "max": 4.0}
    assert made.summary["search_efficiency_x_by_evaluations"]["alpa"]["median"] == 4.0
    assert made.summary["search_efficiency_x"]["aceso"] is None
    assert made.summary["never_as_good"] == [["gpt3_1_3b", "v100x4", "aceso"]]
    assert made.summary["published_search_seconds_over_ours"]["max"] == pytest.approx(417.9)


# -------------------------------------------------------------------------------------- configurations
@pytest.mark.parametrize("name", reproduce.TABLES)
def test_an_experiment_names_problems_budget_and_seeds_but_never_a_search(name):
    config = yaml.safe_load(Path(conf_dir(), "experiment", f"{name}.yaml").read_text())
    assert set(config) <= {"defaults", "problem", "space", "budget", "experiment"}
    chosen = {key.split("/")[1]: value for entry in config["defaults"] for key, value in entry.items()}
    assert [chosen["model"], chosen["cluster"]] in config["experiment"]["cells"]
    for quick in (False, True):
        experiment = load(name, quick)
        for model, cluster in experiment.pairs:
            assert model in names("model")
            assert cluster in names("cluster")
    assert load(name, True).evaluations < load(name).evaluations


def test_every_experiment_is_a_table():
    assert set(names("experiment")) == set(reproduce.TABLES)


def test_the_mixed_table_has_six_clusters_of_two_to_four_types():
    pairs = load("mixed_throughput").pairs
    types = [len({group["device"] for group in preset("cluster", cluster)["groups"]}) for _, cluster in pairs]
    assert len({cluster for _, cluster in pairs}) >= 6
    assert set(types) == {2, 3, 4}
    assert not any(throughput.is_mixed(cluster) for _, cluster in load("homogeneous_throughput").pairs)


@pytest.mark.parametrize("name", ["homogeneous_throughput", "ideas"])
def test_the_command_line_remakes_a_cell(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = [f"+experiment={name}", "+search=random", "budget.evaluations=20", "out=record", "model=gpt3_350m"]
    arguments += ["cluster=v100x4_t4x4"]
    assert train.main(arguments) == 0
    config = yaml.safe_load(Path("record", "config.yaml").read_text())
    cell = load(name).cell(("gpt3_350m", "v100x4_t4x4"), "random", "random", evaluations=20, seeds=[0])
    assert config["model"]["name"] == cell.model
    assert config["cluster"]["name"] == cell.cluster
    assert (config["problem"], config["space"], config["search"]) == (cell.problem, cell.space, cell.search)
    assert "experiment" not in config
    result = json.loads(Path("record", "result.json").read_text())
    (rows,) = grid.run_cell(cell)
    assert result["iteration_time_s"] == float(rows["iteration_time_s"])


# ----------------------------------------------------------------------------------------- a small run
def here(run, cells):
    for each in cells:
        yield each, run(each)


@pytest.fixture
def few(monkeypatch):
    """Every table small, and in this process."""
    pairs = {"homogeneous_throughput": (("gpt3_350m", "v100x4"),), "search_efficiency": (("gpt3_350m", "v100x4"),)}
    monkeypatch.setattr(reproduce, "load", lambda name, quick: small(name, pairs.get(name, (PAIR,))))
    monkeypatch.setattr(equal_budgets, "SEARCHES", ("autohaap", "ga", "random"))
    monkeypatch.setattr(reproduce, "runner_of", lambda *options: here)


def figures(folder):
    """{CSV: its rows without what a clock gave}."""
    made = {}
    for path in sorted(folder.rglob("*.csv")):
        with path.open() as file:
            made[path.relative_to(folder)] = [
                {key: value for key, value in line.items() if "seconds" not in key} for line in csv.DictReader(file)
            ]
    return made


def test_all_tables_in_one_command_which_goes_on_where_it_stopped(few, tmp_path, capsys):
    out = tmp_path / "results"
    assert reproduce.main([f"out={out}", "quick=true"]) == 0
    text = (out / "results.md").read_text()
    assert text in capsys.readouterr().out
    for name in reproduce.TABLES:
        assert (out / f"{name}.md").read_text().rstrip("\n") in text
    for name in ("homogeneous_throughput", "mixed_throughput", "equal_budgets"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((out / "summary.json").read_text())
    for key in ("homogeneous_gain_pct", "mixed_gain_pct"):
        assert set(summary[key]) == {"min", "median", "max"}
    assert set(summary["search_efficiency_x"]) == set(throughput.BASELINES)
    assert set(summary["gap_to_bound_pct"]) == {"median", "max"}
    assert summary["cells"] > 0
    assert summary["cells_where_a_baseline_wins"] >= 0
    first = figures(out)

    again = tmp_path / "again"
    shutil.copytree(out / "cells", again / "cells")
    for path in sorted((again / "cells").iterdir())[::2]:
        path.unlink()
    assert reproduce.main([f"out={again}", "quick=true"]) == 0
    assert figures(again) == first
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("cells were there")


def test_the_page_goes_to_the_docs_and_the_headline_into_the_readme(few, tmp_path, capsys):
    docs = tmp_path / "docs"
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{reproduce.BEGIN}\nold\n{reproduce.END}\nafter\n")
    arguments = [f"out={tmp_path / 'results'}", f"docs={docs}"]
    assert reproduce.main([*arguments, "table=ideas"]) == 2
    assert "needs every table" in capsys.readouterr().err
    assert reproduce.main(arguments) == 0
    assert (docs / "results.md").read_text() == (tmp_path / "results" / "results.md").read_text()
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "| throughput, mixed device types |" in text
    assert "old" not in text
    readme.write_text("no place")
    assert reproduce.main(arguments) == 2
    assert "put them where the table goes" in capsys.readouterr().err


def test_the_readme_has_a_place_for_the_headline_table():
    text = (Path(__file__).parents[2] / "README.md").read_text()
    assert text.count(reproduce.BEGIN) == text.count(reproduce.END) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["table=nope"], "mixed_throughput"), (["quick=maybe"], "quick"), (["runner=mpi"], "processes or ray"),
     (["runner.processes=0"], "at least 1"), (["seeds=3"], "not an option")],
)  # fmt: skip
def test_a_bad_option_is_one_line(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert reproduce.main(arguments) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_an_interrupted_run_says_what_is_kept(few, tmp_path, monkeypatch, capsys):
    def interrupted(run, cells):
        yield cells[0], run(cells[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(reproduce, "runner_of", lambda *options: interrupted)
    assert reproduce.main([f"out={tmp_path}", "table=ideas"]) == 130
    assert f"cells kept in {tmp_path / 'cells'}: 1;" in capsys.readouterr().out


def test_without_a_proof_there_is_no_gap_to_show():
    experiment = small("ideas")
    with pytest.raises(ValueError, match="gpt3_350m"):
        bound_s(grid.Grid(), experiment, PAIR)
    assert ideas.evaluations(experiment, "state_caching") == 10
