"""Measuring this machine for real, on a tiny model: grid, resume, too little memory, Ctrl-C, and the search on it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

import haap_rl.measure.cells
import haap_rl.measure.collectives
from haap_rl import estimate, train
from haap_rl.cost.estimator import Estimator
from haap_rl.cost.memory import unit_parameters
from haap_rl.cost.profile_files import load_profile
from haap_rl.measure.cells import measure_unit
from haap_rl.measure.units import Embedding, Head, Layer
from haap_rl.problem.presets import problem_from_config
from haap_rl.profile import main, registered_device
from haap_rl.report import pipeline
from tests.builders import model, problem

TINY = {
    "name": "tiny",
    "num_layers": 4,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "ffn": 64,
    "gated_mlp": True,
    "vocab": 100,
    "max_positions": 32,
    "learned_positions": False,
    "norm": "rmsnorm",
    "tied_embeddings": False,
    "biases": False,
    "dropout": False,
}
SETTINGS = ["problem.precision=fp32", "problem.seq_len=16", "problem.global_batch_size=8"]
GRID = ["tp=[1,2]", "microbatch=[1,2]", "warmup=1", "repeats=3"]
COMMAND = [*(f"model.{key}={value}" for key, value in TINY.items()), *SETTINGS]
CPUS = {
    "name": "my_cpus",
    "groups": [
        {
            "name": "cpus",
            "device": {
                "name": "cpu",
                "peak_tflops": {"fp32": 0.1},
                "memory_gib": 8,
                "memory_bandwidth_gb_per_s": 20,
            },
            "num_nodes": 1,
            "devices_per_node": 4,
            "intra_node": {"latency_us": 20, "bandwidth_gb_per_s": 5},
            "inter_node": {"latency_us": 50, "bandwidth_gb_per_s": 1},
        }
    ],
}


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads on a busy machine wait for each other longer than these units take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory, with a cluster of CPUs beside it."""
    (tmp_path / "work").mkdir()
    (tmp_path / "cpus.yaml").write_text(yaml.safe_dump(CPUS))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def measured(path):
    """(unit, tp, micro-batch) of the cells that a profile file holds."""
    return [(cell.unit, cell.tp, cell.microbatch_size) for cell in load_profile(path).units]


WHOLE = [(unit, tp, size) for tp in (1, 2) for size in (1, 2) for unit in ("embedding", "layer", "head")]


# ------------------------------------------------------------------------------------------ measuring
def test_a_grid_is_measured_for_real_and_feeds_search_estimate_and_picture(here, capsys):
    assert main(["out=p.json", *COMMAND, *GRID]) == 0
    printed = capsys.readouterr().out
    assert "12 of 12: head tp 2 micro-batch 2" in printed
    assert "estimator.profile=p.json where a cluster has device 'cpu'" in printed
    profile = load_profile("p.json")
    assert measured("p.json") == WHOLE
    for cell in profile.units:
        assert all(0 < seconds < 5 for seconds in (cell.forward_s, cell.backward_s, cell.update_s)), cell
        assert cell.forward_iqr_s >= 0
        assert cell.weights_bytes > 0
        assert cell.device == "cpu"
    layers = {(c.tp, c.microbatch_size): c for c in profile.units if c.unit == "layer"}
    assert layers[1, 2].activation_bytes > 1.8 * layers[1, 1].activation_bytes
    assert layers[2, 1].activation_bytes < layers[1, 1].activation_bytes
    assert 0 < layers[1, 1].attention_s < layers[1, 1].forward_s + layers[1, 1].backward_s
    assert profile.measured_for.precision == "fp32"
    assert profile.library == f"torch {torch.__version__}"

    on_cpus = [*COMMAND, "cluster=file", "cluster.path=../cpus.yaml", "estimator.profile=p.json"]
    on_cpus.append("space.num_microbatches=[4,8]")
    assert train.main(["+search=autohaap", *on_cpus, "budget.evaluations=40", "out=record"]) == 0
    printed = capsys.readouterr().out
    assert f"times measured by profile tiny ({profile.checksum})" in printed
    assert "assumed: a tensor-parallel rank is measured alone" in printed
    result = json.loads(Path("record/result.json").read_text())
    assert result["profile"]["checksum"] == profile.checksum
    assert result["profile"]["name"] == "tiny"
    settings = {
        "seq_len": 16,
        "global_batch_size": 8,
        "precision": "fp32",
        "optimizer": "adam",
        "framework": "megatron",
    }
    target = problem_from_config(TINY, CPUS, {**settings, "fused_attention": False})
    plan = target.load_plan("record/plan.json")
    with_it, without = Estimator(target, profile=profile), Estimator(target)
    assert with_it(plan).iteration_s == result["iteration_time_s"] != without(plan).iteration_s
    assert result["lower_bound_s"] <= result["iteration_time_s"]
    assert tuple(result["profile"]["not_measured"]) == with_it.gaps(plan)

    Path("p.json").unlink()  # the record outlives the file
    assert load_profile("record/profile.json").checksum == profile.checksum
    assert pipeline.main(["record=record", "out=plan.png"]) == 0
    assert Path("plan.png").stat().st_size > 1000

    on_cpus[-2] = "estimator.profile=record/profile.json"
    capsys.readouterr()
    assert estimate.main([*on_cpus, "tp=2", "pp=2", "dp=1", "microbatch=2", "out=priced"]) == 0
    printed = capsys.readouterr().out
    assert "not measured: activation bytes on cpu at tp 2: measured without sequence parallelism" in printed
    assert "not measured: all_reduce on cpu: nothing measured, the alpha-beta model" in printed
    assert json.loads(Path("priced/estimate.json").read_text())["profile"]["checksum"] == profile.checksum

    Path("p2.json").write_bytes(Path("record/profile.json").read_bytes())
    no_profile = [argument for argument in on_cpus if not argument.startswith("estimator.")]
    assert train.main(["+search=random", *no_profile, "budget.evaluations=5", "out=record"]) == 0
    assert not Path("record/profile.json").exists()  # an earlier run's would be taken for this one's
    assert json.loads(Path("record/result.json").read_text())["profile"] is None


def test_an_interrupted_measurement_goes_on_where_it_stopped(here, capfd, monkeypatch):
    calls = []

    def interrupted_at(count):
        def measure(*arguments):
            if len(calls) == count:
                raise KeyboardInterrupt
            calls.append(arguments[3:6])
            return measure_unit(*arguments)

        return measure

    monkeypatch.setattr(haap_rl.measure.cells, "measure_unit", interrupted_at(6))  # the first is measured twice
    assert main(["out=p.json", *COMMAND, *GRID]) == 130
    assert "5 of 12 cells are in p.json; the same command goes on" in capfd.readouterr().err
    assert measured("p.json") == WHOLE[:5]
    first = load_profile("p.json").units
    calls.clear()
    monkeypatch.setattr(haap_rl.measure.cells, "measure_unit", interrupted_at(-1))
    assert main(["out=p.json", *COMMAND, *GRID]) == 0
    assert calls[1:] == WHOLE[5:]  # no finished cell again; calls[0] only wakes torch
    assert "5 of 12 cells are there already" in capfd.readouterr().out
    assert load_profile("p.json").units[:5] == first
    assert measured("p.json") == WHOLE
    calls.clear()
    before = Path("p.json").read_bytes()
    assert main(["out=p.json", *COMMAND, *GRID]) == 0
    assert calls == []
    assert Path("p.json").read_bytes() == before


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_cell_that_does_not_fit_is_recorded_and_the_others_are_measured(here, capsys, monkeypatch, error):
    really = haap_rl.measure.cells._measured

    def measure(cell, *arguments):
        if (cell.unit, cell.microbatch_size) == ("layer", 2):
            raise error
        return really(cell, *arguments)

    monkeypatch.setattr(haap_rl.measure.cells, "_measured", measure)
    grid = ["tp=1", "microbatch=[1,2]", "warmup=1", "repeats=1"]
    assert main(["out=p.json", *COMMAND, *grid]) == 0
    assert "6 cells, 1 of them out of memory" in capsys.readouterr().out
    full = [cell for cell in load_profile("p.json").units if cell.out_of_memory]
    assert [(cell.unit, cell.tp, cell.microbatch_size, cell.forward_s) for cell in full] == [("layer", 1, 2, None)]
    monkeypatch.setattr(haap_rl.measure.cells, "_measured", None)  # it is not tried again
    assert main(["out=p.json", *COMMAND, *grid]) == 0


def test_any_other_error_of_a_cell_is_not_taken_for_memory(monkeypatch):
    def broken(*_):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(haap_rl.measure.cells, "_measured", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        measure_unit(problem(), torch.device("cpu"), "cpu", "layer", 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (["microbatch=[1,4]"], ["another grid", "[1, 2]", "[1, 4]"]),
        (["repeats=7"], ["another grid", "repeats=7"]),
        (["model.hidden=64"], ["another dimensions", "64"]),
        (["model.name=other"], ["another model", "'other'"]),
        (["problem.seq_len=8"], ["another seq_len", "16", "8"]),
        (["problem.fused_attention=true"], ["another fused_attention"]),
        (["device=mine"], ["another device", "'cpu'", "'mine'"]),
    ],
    ids=lambda value: value[0],
)
def test_a_file_of_another_measurement_is_refused_in_one_line_and_untouched(here, capfd, changed, words):
    grid = ["tp=1", "microbatch=[1,2]", "warmup=1", "repeats=1"]
    assert main(["out=p.json", *COMMAND, *grid]) == 0
    before = Path("p.json").read_bytes()
    replaced = {argument.split("=")[0]: argument for argument in [*COMMAND, *grid, *changed]}
    capfd.readouterr()
    assert main(["out=p.json", *replaced.values()]) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert all(word in lines[0] for word in ["out='p.json'", "choose another out=FILE", *words]), lines[0]
    assert Path("p.json").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tp=3"], ["tp=3 does not divide"]),
        (["tp=0"], ["tp=0"]),
        (["microbatch=[]"], ["microbatch=[]"]),
        (["microbatch=x"], ["microbatch='x'"]),
        (["ranks=[1]"], ["ranks=1"]),
        (["sizes_mib=[0]"], ["sizes_mib=0"]),
        (["sizes_mib=[1,1e25]"], ["sizes_mib=1e+25", "10^15"]),
        (["repeats=0"], ["repeats=0"]),
        (["device=[1]"], ["device=[1]"]),
        (["problem.precision=fp8"], ["'fp8'"]),
        (["model.hidden=0"], ["hidden=0"]),
        (["modle=x"], ["'modle'", "'model'"]),
        (["out=."], ["is a directory"]),
        (["out=/proc/none/p.json"], ["cannot be written"]),
    ],
    ids=lambda value: value[0],
)
def test_bad_input_is_one_line_with_status_2(here, capfd, arguments, words):
    replaced = {argument.split("=")[0]: argument for argument in ["out=p.json", *COMMAND, *arguments]}
    assert main(list(replaced.values())) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert all(word in lines[0] for word in words), lines[0]
    assert list(here.iterdir()) == []


def test_without_out_it_asks_for_one(here, capfd):
    assert main(COMMAND) == 2
    assert "give out=..." in capfd.readouterr().err


# ------------------------------------------------------------------- in a process of its own
def test_ctrl_c_leaves_the_cells_so_far(here):
    process = subprocess.Popen(
        [sys.executable, "-m", "haap_rl.profile", "out=p.json", *COMMAND, "microbatch=[1,2,3,4]", "repeats=100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        for line in process.stdout:  # a cell of so many rounds takes long enough
            if line.startswith("1 of "):
                break
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, (out, err)
    assert "of 12 cells are in p.json; the same command goes on where it stopped" in err
    assert "Traceback" not in err
    assert load_profile(here / "p.json").grid.repeats == 100_000
    assert [path.name for path in here.iterdir()] == ["p.json"]


def run_alone(arguments):
    """The command in a process of its own, one thread, as collectives need it."""
    return subprocess.run(
        [sys.executable, "-m", "haap_rl.profile", "out=p.json", *COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_two_processes_measure_collectives_with_gloo(here):
    arguments = ["tp=1", "microbatch=1", "warmup=1", "repeats=3", "ranks=[2]", "sizes_mib=[0.01,0.5]"]
    done = run_alone(arguments)
    assert done.returncode == 0, done.stderr
    found = {(cell.operation, cell.ranks): cell for cell in load_profile("p.json").collectives}
    assert ("all_reduce", 2) in found
    for cell in found.values():
        assert cell.inside_node
        assert cell.device == "cpu"
        assert [timing.num_bytes // 1000 for timing in cell.timings] == [10, 524]
        assert all(0 < timing.seconds < 10 for timing in cell.timings)


def test_collectives_that_do_not_fit_are_left_out_and_named(here):
    arguments = ["tp=1", "microbatch=1", "warmup=1", "repeats=1", "ranks=[2]", "sizes_mib=[0.01,100000000]"]
    done = run_alone(arguments)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "collectives among 2: sizes_mib=[100000000.0] do not fit in memory" in done.stderr
    profile = load_profile("p.json")
    assert len(profile.units) == 3
    assert {tuple(t.num_bytes // 1000 for t in cell.timings) for cell in profile.collectives} == {(10,)}


def killed(rank, *_):
    os.kill(os.getpid(), signal.SIGKILL)


def out_of_memory(rank, *_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize("ending", [killed, out_of_memory])
def test_a_rank_that_ends_for_want_of_memory_is_one_line_and_the_units_stay(here, capfd, monkeypatch, ending):
    monkeypatch.setattr(haap_rl.measure.collectives, "_rank", ending)
    arguments = ["tp=1", "microbatch=1", "warmup=1", "repeats=1", "ranks=[2]", "sizes_mib=1"]
    assert main(["out=p.json", *COMMAND, *arguments]) == 2
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert "haap_rl: ranks=2: a process was ended for want of memory" in err
    assert len(load_profile("p.json").units) == 3


def test_help_comes_at_once_for_want_of_heavy_imports(here):
    code = (
        "import sys\n"
        "from haap_rl.profile import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: status = end.code\n"
        "print(*sys.modules, file=sys.stderr)\n"
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "Measure this machine's device" in done.stdout
    assert not {"torch", "numba", "scipy", "matplotlib", "gymnasium", "wandb"} & set(done.stderr.split())


# ------------------------------------------------------------------------------- the modules themselves
LLAMA = {
    "kv_heads": 4,
    "gated_mlp": True,
    "norm": "rmsnorm",
    "learned_positions": False,
    "biases": False,
    "dropout": False,
}


@pytest.mark.parametrize("changes", [{}, LLAMA, {"kv_heads": 2}], ids=["gpt", "llama", "grouped"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_rank_holds_the_parameters_that_the_memory_model_counts(changes, tp):
    of = model(**changes, vocab=128 * 4 * 60)  # whole blocks of 128 on every rank
    modules = {"embedding": Embedding(of, tp), "layer": Layer(of, tp, False), "head": Head(of, tp)}
    for unit, module in modules.items():
        assert sum(p.numel() for p in module.parameters()) == unit_parameters(of, unit, tp), unit


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_rank_holds_its_part_of_the_padded_vocabulary(tp):
    of = model(vocab=50257)
    rows = {1: 50257, 2: 25216, 4: 12672}[tp]
    assert Embedding(of, tp).tokens.num_embeddings == Head(of, tp).logits.out_features == rows


def test_ids_are_drawn_from_the_rows_that_a_rank_holds(monkeypatch):
    drawn = []
    real = torch.randint
    monkeypatch.setattr(torch, "randint", lambda most, *rest, **more: drawn.append(most) or real(most, *rest, **more))
    measure_unit(problem(model_changes={"vocab": 300}), torch.device("cpu"), "cpu", "embedding", 2, 1, 1, 1)
    assert drawn == [256]


@pytest.mark.parametrize("of", [model(dropout=False), model(**LLAMA)], ids=["gpt", "llama"])
def test_fused_and_explicit_attention_compute_the_same(of):
    torch.manual_seed(0)
    explicit = Layer(of, 2, fused_attention=False)
    fused = Layer(of, 2, fused_attention=True)
    fused.load_state_dict(explicit.state_dict())
    hidden = torch.randn(2, 16, of.hidden)
    torch.testing.assert_close(explicit(hidden), fused(hidden), rtol=1e-4, atol=1e-4)


def test_no_token_sees_a_later_one():
    torch.manual_seed(0)
    for layer in (Layer(model(**LLAMA), 1, False), Layer(model(**LLAMA), 1, True)):
        hidden = torch.randn(1, 8, model().hidden)
        changed = hidden.clone()
        changed[:, 5:] += 1.0
        torch.testing.assert_close(layer(hidden)[:, :5], layer(changed)[:, :5])


@pytest.mark.parametrize("fused", [False, True])
def test_measured_activation_bytes_are_near_the_published_formula(fused):
    narrow = {"hidden": 128, "heads": 4, "kv_heads": 4, "head_dim": 32, "ffn": 512, "vocab": 64}
    narrow["dropout"] = not fused  # on the CPU torch has no fused kernel with dropout
    target = problem(model_changes=narrow, fused_attention=fused, seq_len=128)
    cell = measure_unit(target, torch.device("cpu"), "cpu", "layer", 1, 2, 1, 1)
    formula = Estimator(target).unit_memory("layer", 1, 1, 2, "none", 1, False).activation
    assert 1 / 1.6 < cell.activation_bytes / formula < 1.6, cell.activation_bytes / formula


@pytest.mark.parametrize(
    ("card", "gib", "name"),
    [
        ("Tesla V100-SXM2-32GB", 31.7, "v100_32"),
        ("Tesla V100-SXM2-16GB", 15.8, "v100_16"),
        ("Tesla V100-PCIE-32GB", 31.7, "v100_32_pcie"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100_80"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100_40"),
        ("NVIDIA A100 80GB PCIe", 79.2, "a100_80_pcie"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100_80"),
        ("NVIDIA H100 PCIe", 79.1, "h100_80_pcie"),
        ("NVIDIA H200", 139.8, "h200"),
        ("Tesla T4", 14.6, "t4"),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA A10G", 22.1, "a10g"),
        ("NVIDIA GeForce RTX 3090", 23.7, "rtx_3090"),
        ("NVIDIA RTX A6000", 47.5, "a6000"),
        ("Quadro K2000", 2.0, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.8, None),
    ],
)
def test_a_card_is_found_in_the_registry_by_its_drivers_name(card, gib, name):
    assert registered_device(card, int(gib * 2**30)) == name


# --------------------------------------------------------------- profiles on the other commands' lines
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["estimator.profile=nowhere.json"], ["nowhere.json", "cannot be read"]),
        (["estimator.profile_model=1_3B"], ["profile_model='1_3B'", "without a profile"]),
        (["estimator.profile_collectives=x"], ["profile_collectives='x'", "without a profile"]),
        (["estimator.profile=../other.json"], ["../other.json", "hidden=7", "measure this problem"]),
        (["estimator.profil=x"], ["'estimator.profil'", "'estimator.profile'"]),
    ],
)
def test_a_profile_that_cannot_be_used_is_one_line(here, capfd, arguments, words):
    other = {"schema": "haap_rl.profile/1", "name": "x", "measured_for": {"model": {"hidden": 7}}}
    (here.parent / "other.json").write_text(json.dumps({**other, "units": [], "collectives": []}))
    degrees = ["tp=1", "pp=2", "dp=1", "microbatch=1"]
    for run in (
        lambda: train.main(["+search=random", "out=r", *arguments]),
        lambda: estimate.main([*degrees, *arguments]),
    ):
        assert run() == 2
        lines = capfd.readouterr().err.strip().splitlines()
        assert len(lines) == 1, lines
        assert all(word in lines[0] for word in words), lines[0]
    assert list(here.iterdir()) == []
