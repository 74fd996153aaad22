"""Imports go one way, and the house is as ARCHITECTURE.md says."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ["problem", "cost", "space", "search", "training"]  # each may import those before it
TRAINS = ("ppo.py", "ppo_partition.py")  # the searchers that train in the environments


def imports(path):
    """Absolute names of the modules that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(name):
    """The room of a module name: `haap_rl.cost.comm` -> cost; top-level modules are their own."""
    parts = name.split(".")
    return parts[1] if parts[0] == "haap_rl" and len(parts) > 1 else parts[0]


def test_imports_go_one_way():
    for position, here in enumerate(ROOMS):
        allowed = {*ROOMS[: position + 1]} | ({"export"} if here not in ("problem", "cost") else set())
        for path in (ROOT / "haap_rl" / here).rglob("*.py"):
            ours = {room(name) for name in imports(path) if name.startswith("haap_rl.")}
            assert ours <= allowed, (path, ours - allowed)
            if here != "training" and path.name not in TRAINS:
                assert not any(name.startswith("haap_envs") for name in imports(path)), path


def test_faults_sit_on_problem_cost_and_the_options_of_mecefo():
    for path in (ROOT / "haap_rl" / "faults").glob("*.py"):
        # the command draws and writes as well, and reads a command line
        allowed = {"problem", "cost", "faults"} | (
            {"configs", "report", "tracking"} if path.name == "simulate.py" else set()
        )
        for name in imports(path):
            assert (
                not name.startswith("haap_rl.") or room(name) in allowed or name.startswith("haap_rl.mecefo.options")
            ), (path, name)


def test_exporters_sit_on_problem_and_cost_and_import_no_framework():
    for path in (ROOT / "haap_rl" / "export").glob("*.py"):
        # the command prints and writes as well, and reads a command line
        command = {"configs", "report", "tracking"} if path.name == "__main__.py" else set()
        for name in imports(path):
            assert not name.startswith("haap_rl.") or room(name) in {"problem", "cost", "export"} | command, (
                path,
                name,
            )
            assert name.split(".")[0] not in ("torch", "megatron", "torchtitan", "flagscale"), (path, name)


def test_environments_sit_on_problem_cost_space_and_the_search_contract():
    for path in (ROOT / "envs" / "haap_envs").glob("*.py"):
        for name in imports(path):
            if name.startswith("haap_rl."):
                assert room(name) in ("problem", "cost", "space") or name.startswith("haap_rl.search.base"), (
                    path,
                    name,
                )


def test_only_configs_imports_hydra():
    for path in [
        *(ROOT / "haap_rl").rglob("*.py"),
        *(ROOT / "envs").rglob("*.py"),
        *(ROOT / "experiments").rglob("*.py"),
    ]:
        if path.name != "configs.py":
            assert not any(name.split(".")[0] in ("hydra", "omegaconf") for name in imports(path)), path


def test_only_one_module_imports_wandb():
    for path in [*(ROOT / "haap_rl").rglob("*.py"), *(ROOT / "envs").rglob("*.py")]:
        if path.name != "weights_and_biases.py":
            assert not any(name.split(".")[0] == "wandb" for name in imports(path)), path


def test_only_the_profile_command_measures_and_measuring_needs_only_problem_and_cost():
    for path in [*(ROOT / "haap_rl").rglob("*.py"), *(ROOT / "envs").rglob("*.py")]:
        measures = any(name.startswith("haap_rl.measure") for name in imports(path))
        assert not measures or path.name == "profile.py" or path.parent.name == "measure", path
    for path in (ROOT / "haap_rl" / "measure").glob("*.py"):
        assert {room(name) for name in imports(path) if name.startswith("haap_rl.")} <= {"problem", "cost", "measure"}


def test_the_runtime_sits_on_problem_and_cost_and_only_its_command_draws_and_writes():
    for path in (ROOT / "haap_rl" / "runtime").glob("*.py"):
        allowed = {"problem", "cost", "runtime"} | ({"configs", "tracking"} if path.name == "__main__.py" else set())
        assert {room(name) for name in imports(path) if name.startswith("haap_rl.")} <= allowed, path
    for name in ("routes", "schedule"):
        assert not {found.split(".")[0] for found in imports(ROOT / "haap_rl" / "runtime" / f"{name}.py")} & {
            "torch", "numpy",
        }, name  # fmt: skip
    for path in [*(ROOT / "haap_rl").rglob("*.py"), *(ROOT / "envs").rglob("*.py")]:
        if path.parent.name != "runtime":
            assert not any(name.startswith("haap_rl.runtime") for name in imports(path)), path


def test_the_training_mechanism_imports_nothing_of_ours_and_its_options_no_torch():
    for path in (ROOT / "haap_rl" / "mecefo").glob("*.py"):
        ours = [name for name in imports(path) if name.split(".")[0] in ("haap_rl", "haap_envs", "experiments")]
        assert all(name.startswith("haap_rl.mecefo.") for name in ours), path
    assert not {name.split(".")[0] for name in imports(ROOT / "haap_rl" / "mecefo" / "options.py")} & {"torch", "numpy"}


def test_no_searcher_keeps_a_clock_or_a_log():
    for path in (ROOT / "haap_rl" / "search").rglob("*.py"):
        if path.name not in ("base.py", "__init__.py"):
            assert not {"time", "logging"} & {name.split(".")[0] for name in imports(path)}, path


def test_no_drawer_of_helpers():
    names = {path.stem for path in (ROOT / "haap_rl").rglob("*")} | {path.stem for path in (ROOT / "envs").rglob("*")}
    assert not names & {"utils", "util", "helpers", "common", "misc"}
