"""The command as a person meets it: records, tables, one line for bad input, Ctrl-C, lazy imports."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import yaml

from haap_rl.problem.errors import InputError
from haap_rl.problem.presets import load_problem, names
from haap_rl.train import main

SMALL = ["model=gpt3_350m", "cluster=v100x4_t4x4", "budget.evaluations=120"]
# where each searcher has processes of its own: replay has no plan yet; the others draw nothing, as megatron and aceso
PASSED_OVER = ("replay", "alpa", "amp", "metis", "sailor")


def command(*arguments, **settings):
    """Run `python -m haap_rl.train` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "haap_rl.train", *arguments], capture_output=True, text=True, timeout=300, **settings
    )


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_leaves_a_complete_record_and_prints_plan_gap_and_place(here, capsys):
    assert main(["+search=random", *SMALL, "seed=3", "out=record"]) == 0
    printed = capsys.readouterr().out
    assert "gpt3_350m on v100x4_t4x4" in printed
    assert re.search(r"no plan of this space is faster than [\d.]+ s \(proven\): gap [\d.]+%", printed)
    assert "record: " in printed
    assert "avoided against no memo" in printed
    record = here / "record"
    files = ["config.yaml", "plan.json", "report.html", "result.json", "trace.csv"]
    assert sorted(path.name for path in record.iterdir()) == files
    assert f"report: {record / 'report.html'}" in printed

    result = json.loads((record / "result.json").read_text())
    wanted = (
        "searcher model cluster seed iteration_time_s tokens_per_s fits evaluations operator_evaluations "
        "operator_evaluations_avoided wall_time_s lower_bound_s gap_to_lower_bound proven_optimal stopped_by space "
        "estimator_fingerprint"
    )
    assert set(wanted.split()) <= set(result)
    assert (result["searcher"], result["seed"], result["evaluations"]) == ("random", 3, 120)
    assert result["pruning"]["factor"] > 1
    assert yaml.safe_load((record / "config.yaml").read_text())["search"] == {"name": "random"}

    from haap_rl.cost.estimator import Estimator

    problem = load_problem("gpt3_350m", "v100x4_t4x4")
    plan = problem.load_plan(record / "plan.json")
    assert Estimator(problem)(plan).iteration_s == result["iteration_time_s"]

    rows = list(csv.DictReader((record / "trace.csv").open()))
    assert list(rows[0]) == [
        "evaluations",
        "best_iteration_time_s",
        "operator_evaluations",
        "operator_evaluations_avoided",
        "seconds",
    ]
    assert float(rows[-1]["best_iteration_time_s"]) == result["iteration_time_s"]


def test_a_run_on_files_leaves_a_record_that_needs_them_no_more(here):
    from haap_rl.tracking import recorded_plan

    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 2048, "vocab_size": 50257}
    (here / "config.json").write_text(json.dumps(gpt2))
    (here / "hosts").write_text("worker-1 slots=4\nworker-2 slots=2\n")
    files = ["model=file", "model.path=config.json", "cluster=file", "cluster.path=hosts", "cluster.format=hostfile"]
    assert main(["+search=random", *files, "cluster.device=v100_16", "budget.evaluations=20", "out=record"]) == 0
    (here / "config.json").unlink()
    (here / "hosts").unlink()
    problem, plan = recorded_plan(here / "record")
    problem.validate(plan)
    assert (problem.model.name, problem.model.num_parameters - 1024 * 768) == ("gpt2", 124_439_808)
    assert [(group.name, group.num_devices) for group in problem.cluster.groups] == [
        ("v100_16_x4", 4),
        ("v100_16_x2", 2),
    ]
    assert str(here) not in (here / "record" / "config.yaml").read_text()


def test_search_and_plus_search_are_the_same_and_whole_floats_are_taken(here):
    assert main(["search=random", *SMALL[:2], "budget.evaluations=2e1", "out=a"]) == 0
    assert main(["+search=random", *SMALL[:2], "budget.evaluations=20", "out=b"]) == 0
    assert without_seconds(here / "a") == without_seconds(here / "b")


def without_seconds(record):
    return [
        {key: value for key, value in row.items() if key != "seconds"}
        for row in csv.DictReader((record / "trace.csv").open())
    ]


@pytest.mark.parametrize("search", [name for name in names("search") if name not in PASSED_OVER])
def test_same_seed_in_two_processes_same_trace(here, search):
    for out in ("one", "two"):
        finished = command(f"+search={search}", *SMALL, "seed=5", f"out={out}", cwd=here)
        assert finished.returncode == 0, finished.stderr
    assert without_seconds(here / "one") == without_seconds(here / "two")


def test_uncached_runs_give_the_same_trace_but_for_the_operator_columns(here):
    for out, cached in (("one", "true"), ("two", "false")):
        assert main(["+search=autohaap", *SMALL, f"estimator.cached={cached}", f"out={out}"]) == 0

    def rows(out):
        return [(row["evaluations"], row["best_iteration_time_s"]) for row in without_seconds(here / out)]

    assert rows("one") == rows("two")
    assert without_seconds(here / "one") != without_seconds(here / "two")


def test_a_sweep_runs_every_point_and_a_bad_one_does_not_end_it(here, capsys):
    assert main(["-m", "search=random", *SMALL[:2], "budget.evaluations=0,10", "hydra.sweep.dir=sweep"]) == 2
    assert len(list((here / "sweep").glob("*/result.json"))) == 1
    assert "evaluations=0" in capsys.readouterr().err


def test_no_search_named_prints_the_choices_and_the_exact_command(here, capsys):
    assert main(["seed=1"]) == 2
    printed = capsys.readouterr().err
    for name in names("search"):
        assert f"python -m haap_rl.train +search={name} seed=1" in printed


BAD = [
    (["+search=nope"], ["search=nope", "autohaap"]),
    (["search="], ["search=", "autohaap"]),
    (["search=random", "modle=x"], ["'modle'", "'model'"]),
    (["search=random", "model=llama3_8"], ["model=llama3_8", "'llama3_8b'"]),
    (["search=random", "model=fil"], ["model=fil", "'file'"]),
    (["search=random", "model=file"], ["model.path=..."]),
    (["search=random", "model=file", "model.path=none.json"], ["none.json", "No such file"]),
    (["search=random", "model=file", "model.path=/"], ["is a directory"]),
    (["search=random", "model=file", "model.path=x", "model.hidden=3"], ["'model.hidden'", "model that was chosen"]),
    (["search=random", "cluster=file", "cluster.path=x", "cluster.format=slurm"], ["'slurm'", "hostfile"]),
    (["search=random", "cluster=a100x9"], ["cluster=a100x9", "'a100x8'"]),
    (["search=random", "budget.evaluatons=3"], ["'budget.evaluatons'", "'budget.evaluations'"]),
    (["search=ga", "search.populaton=3"], ["'search.populaton'", "'search.population'"]),
    (["search=random", "cluster.groups.0.device=a101"], ["'a101'", "a100_40"]),
    (["search=random", "cluster.groups.0.num_nodes=-1"], ["num_nodes=-1", "at least 1"]),
    (["search=random", "cluster.groups.0.num_nodes=0"], ["num_nodes=0"]),
    (["search=random", "cluster.groups.0.inter_node.bandwidth_gb_per_s=nan"], ["bandwidth_gb_per_s=nan"]),
    (["search=random", "model.hidden=inf"], ["hidden=inf"]),
    (["search=random", "model.name=???"], ["model.name", "no value"]),
    (["search=random", "problem.seq_len=0"], ["seq_len=0"]),
    (["search=random", "problem.global_batch_size=127"], ["global_batch_size=127", "num_microbatches"]),
    (["search=random", "problem.precision=bf16"], ["v100_16", "bf16", "fp16"]),
    (["search=random", "budget.evaluations=-5"], ["evaluations=-5"]),
    (["search=random", "budget.evaluations=null"], ["budget.evaluations=10000"]),
    (["search=random", "seed=-1"], ["seed=-1"]),
    (["search=random", "estimator.cached=perhaps"], ["cached='perhaps'"]),
    (["search=random", "+foo=1"], ["'foo'"]),
    (["search=random", "+seed=1"], ["'seed'", "without the '+'"]),
    (["search=random", "search.name=ppo"], ["search.name", "+search=ppo"]),
    (["search=random", "cluster.groups=[]"], ["no device groups"]),
    (["search=random", "model=null"], ["model=null", "llama3_8b"]),
    (["search=random", "space.group_sizes=[[1]]"], ["group_sizes=[1]", "whole number"]),
    (["search=random", "space.recompute=[[none]]"], ["['none']", "selective"]),
    (["search=ga", "search.population=0"], ["search=ga", "population=0"]),
    (["search=ga", "search.crossover=nan"], ["crossover=nan", "between 0 and 1"]),
    (["search=annealing", "search.start=0"], ["start=0"]),
    (["search=alpa", "search.devices=most"], ["search=alpa", "devices='most'", "part, all"]),
    (["search=aceso", "search.hops=0"], ["search=aceso", "hops=0"]),
    (["search=autohaap", "search.starts=abc"], ["starts='abc'"]),
    (["search=exact", "search.heuristic=-1"], ["heuristic=-1"]),
    (["search=ppo", "search.num_envs=0"], ["num_envs=0"]),
    (["search=ppo", "search.learning_rate=foo"], ["learning_rate='foo'"]),
    (["search=random", "hydra.run.dir=x"], ["hydra.run.dir", "out=DIR"]),
    (["search=random", "-m"], ["hydra.sweep.dir"]),
    (["search=random", "space.max_stages=0"], ["max_stages=0"]),
    (["search=random", "space.num_microbatches=[3]"], ["num_microbatches=[3]"]),
    (["search=random", "cluster.groups.0.num_nodes=${x"], ["cannot be read"]),
    (
        ["search=random", "cluster=a100x8", "cluster.groups.0.devices_per_node=1"],
        ["a100_40 must hold at least", "GiB", "the cluster has", "add devices"],
    ),
]


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_bad_input_is_one_line_with_status_2_and_nothing_written(here, capfd, arguments, words):
    assert main([*arguments, "out=record"]) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert all(word in lines[0] for word in words), lines[0]
    assert list(here.iterdir()) == []


def test_a_record_that_cannot_be_written_says_so_and_leaves_the_old_one(here, capfd):
    (here / "file").write_text("mine")
    assert main(["search=random", *SMALL, "out=file"]) == 2
    assert "file: File exists; choose another path" in capfd.readouterr().err
    assert (here / "file").read_text() == "mine"


def test_a_full_disk_leaves_the_old_record_untouched(here, capfd, monkeypatch):
    import errno
    from pathlib import Path

    assert main(["search=random", *SMALL, "out=record"]) == 0
    before = {path.name: path.read_bytes() for path in (here / "record").iterdir()}
    write, written = Path.write_bytes, []

    def full(path, content):
        written.append(path)
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    capfd.readouterr()
    assert main(["search=random", *SMALL, "seed=1", "out=record"]) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert all(word in lines[0] for word in ("record'", "No space left", "choose another"))
    assert {path.name: path.read_bytes() for path in (here / "record").iterdir()} == before


def test_a_file_that_is_a_directory_leaves_the_old_record_untouched(here, capfd):
    assert main(["search=random", *SMALL, "out=record"]) == 0
    (here / "record" / "trace.csv").unlink()
    (here / "record" / "trace.csv").mkdir()
    before = (here / "record" / "result.json").read_bytes()
    assert main(["search=random", *SMALL, "seed=1", "out=record"]) == 2
    assert "trace.csv is a directory" in capfd.readouterr().err
    assert (here / "record" / "result.json").read_bytes() == before


def test_a_run_without_a_plan_leaves_none_of_an_earlier_run(here):
    assert main(["search=random", *SMALL, "out=record"]) == 0
    nothing = ["search=random", *SMALL[:2], "budget.evaluations=null", "budget.seconds=1e-9", "out=record"]
    assert main(nothing) == 1
    assert not (here / "record" / "plan.json").exists()
    assert "No plan was found" in (here / "record" / "report.html").read_text()


def test_a_report_that_cannot_be_made_costs_nothing_of_the_record(here, capfd, monkeypatch):
    from haap_rl.report import page

    assert main(["search=random", *SMALL, "out=record"]) == 0
    for error, status, said in (
        (InputError("no room"), 2, "haap_rl: no room"),
        (KeyboardInterrupt(), 130, f"report: interrupted; python -m haap_rl.report {here / 'record'} writes it"),
    ):
        capfd.readouterr()

        def fails(directory, error=error):
            raise error

        monkeypatch.setattr(page, "run_page", fails)
        assert main(["search=random", *SMALL, "seed=1", "out=record"]) == status
        assert said in "".join(capfd.readouterr())
        assert json.loads((here / "record" / "result.json").read_text())["seed"] == 1
        assert not (here / "record" / "report.html").exists()  # the earlier run's would be taken for this one's


def test_a_search_that_finds_nothing_ends_with_status_1_and_a_reason(here, capsys):
    arguments = ["search=random", "space.memory_aware_init=false", "budget.evaluations=1"]
    statuses = {main([*arguments, f"seed={seed}", f"out={seed}"]) for seed in range(4)}
    assert 1 in statuses
    assert "no plan: no plan that was tried fits; the closest misses" in capsys.readouterr().out
    missing = [here / str(seed) for seed in range(4) if not (here / str(seed) / "plan.json").exists()]
    assert missing
    assert json.loads((missing[0] / "result.json").read_text())["iteration_time_s"] is None


def test_ctrl_c_leaves_the_best_plan_so_far(here):
    process = subprocess.Popen(
        [sys.executable, "-m", "haap_rl.train", "+search=random", "budget.evaluations=100000000", "out=record"],
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert " of 100,000,000 plans" in process.stdout.readline()
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()  # nothing once it has ended
    assert process.returncode == 130, err
    assert "interrupted" in out
    assert json.loads((here / "record" / "result.json").read_text())["stopped_by"] == "interrupted"
    assert load_problem().load_plan(here / "record" / "plan.json")
    assert "(interrupted)" in (here / "record" / "report.html").read_text()


def modules_after(code):
    """Top-level packages loaded once `code` has run in a fresh interpreter."""
    report = "import sys, json; print('MODULES' + json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.rpartition("MODULES")[2]))


HEAVY = {"torch", "stable_baselines3", "sb3_contrib", "scipy", "matplotlib", "deap", "gymnasium", "numba", "wandb"}


def test_importing_the_estimator_loads_nothing_heavy():
    assert not modules_after("import haap_rl.cost.estimator") & (HEAVY | {"hydra", "numpy"})


def test_help_loads_nothing_heavy(here):
    code = "import haap_rl.train\ntry: haap_rl.train.main(['--help'])\nexcept SystemExit as e: assert not e.code"
    assert not modules_after(code) & (HEAVY | {"numpy", "rich"})


def test_a_genetic_run_never_imports_torch(here):
    code = f"import haap_rl.train\nassert haap_rl.train.main({['+search=ga', *SMALL, 'out=record']!r}) == 0"
    assert not modules_after(code) & {"torch", "stable_baselines3", "sb3_contrib", "matplotlib"}


def test_help_names_the_groups_and_their_choices(here):
    printed = command("--help").stdout
    assert "python -m haap_rl.train +search=NAME" in printed
    for word in ("llama3_8b", "a100x8_v100x16", "autohaap", "ppo", "evaluations"):
        assert word in printed


SPACE = ["space.num_microbatches=[16,32]", "space.max_stages=4"]


@pytest.fixture(scope="module")
def certified(tmp_path_factory):
    """A directory with the record of an exact search in `exact`, its certificate included."""
    directory = tmp_path_factory.mktemp("certified")
    assert main(["+search=exact", *SMALL, *SPACE, f"out={directory / 'exact'}"]) == 0
    return directory


def test_an_exact_run_says_what_its_proof_took_and_leaves_a_certificate(here, capsys):
    assert main(["+search=exact", *SMALL, *SPACE, "out=exact"]) == 0
    assert re.search(r"^the proof took [\d,]+ passes .* completed [\d,]+ plans$", capsys.readouterr().out, re.M)
    (note,) = json.loads((here / "exact" / "result.json").read_text())["notes"]
    assert note.startswith("the proof took ")
    assert (here / "exact" / "certificate.json").is_file()


@pytest.mark.parametrize("given", ["exact/certificate.json", "exact"])
def test_a_certificate_is_what_another_run_is_measured_against(certified, monkeypatch, capsys, given):
    monkeypatch.chdir(certified)
    assert main(["+search=random", *SMALL, *SPACE, f"certificate={given}", "out=random"]) == 0
    assert "\nbound proven by exact/certificate.json\n" in capsys.readouterr().out
    proven, result = (json.loads((certified / run / "result.json").read_text()) for run in ("exact", "random"))
    assert result["lower_bound_s"] == proven["lower_bound_s"]
    assert result["gap_to_lower_bound"] == pytest.approx(
        result["iteration_time_s"] / proven["lower_bound_s"] - 1, abs=1e-12
    )
    assert result["notes"] == ["bound proven by exact/certificate.json"]


REMAKE = "python -m haap_rl.train +search=exact model="


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["certificate=none.json"], ["none.json", "No such file"]),
        (["certificate=7"], ["must be the name of a file"]),
        (["certificate="], ["must be the name of a file"]),
        (["certificate={CERTIFIED}/exact/result.json"], ["is not haap_rl.certificate/1", f"{REMAKE}gpt3_350m"]),
        (["certificate={CERTIFIED}/exact/trace.csv"], ["is not JSON"]),
        (
            ["certificate={CERTIFIED}/exact", "problem.seq_len=1024", "space.recompute=[none]"],
            [f"for this one: {REMAKE}gpt3_350m cluster=v100x4_t4x4 problem.seq_len=1024 ", "'space.recompute=[none]'"],
        ),
        (["certificate={CERTIFIED}/exact", "space.max_stages=3"], ["another problem or space", "space.max_stages=3"]),
        (["certificate={CERTIFIED}/exact", "model=gpt3_1_3b"], ["(model 'gpt3_350m'", f"{REMAKE}gpt3_1_3b"]),
        (
            ["certificate={CERTIFIED}/exact", "cluster.groups.0.num_nodes=2"],
            ["'space.num_microbatches=[16,32]'", "cluster=v100x4_t4x4 cluster.groups.0.num_nodes=2"],
        ),
    ],
)
def test_a_certificate_of_something_else_is_one_line_with_status_2_and_nothing_written(
    certified, here, capfd, arguments, words
):
    arguments = [argument.replace("{CERTIFIED}", str(certified)) for argument in arguments]
    assert main(["+search=random", *SMALL, *SPACE, *arguments, "out=record"]) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert all(word in lines[0] for word in ["certificate", *words]), lines[0]
    assert list(here.iterdir()) == []


def test_what_is_too_large_for_the_exact_search_says_so_and_still_leaves_a_plan_and_a_bound(here, capsys):
    large = ["cluster=h100x512_a100x512", "model=gpt3_175b", "budget.evaluations=300"]
    assert main(["+search=exact", *large, "out=record"]) == 0
    (line,) = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("search=exact: tables for 1024")
    ]
    result = json.loads((here / "record" / "result.json").read_text())
    assert result["notes"] == [line]
    assert (result["evaluations"], result["stopped_by"]) == (300, "budget")
    assert 0 < result["lower_bound_s"] < result["iteration_time_s"]
    assert json.loads((here / "record" / "certificate.json").read_text())["lower_bound_s"] == result["lower_bound_s"]
    assert (here / "record" / "plan.json").is_file()
