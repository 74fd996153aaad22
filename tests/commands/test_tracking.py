"""W&B gets its copy of a run, offline without an account, and can never harm the record."""

import csv
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import yaml

from haap_rl.train import main

SMALL = ["model=gpt3_1_3b", "cluster=v100x4_t4x4", "budget.evaluations=120"]
BLOCK_BYTES, HEADER_BYTES = 32768, 7


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory of a person who is not logged in to W&B."""
    monkeypatch.chdir(tmp_path)
    for key in [key for key in os.environ if key.startswith("WANDB_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path.parent / "wandb-config"))
    return tmp_path


def records(path):
    """The protocol buffers in a .wandb file: a LevelDB log of 32 KiB blocks, each entry crc, length, type, data."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts = path.read_bytes(), HEADER_BYTES, b""
    assert data.startswith(b":W&B")
    while position + HEADER_BYTES <= len(data):
        if BLOCK_BYTES - position % BLOCK_BYTES < HEADER_BYTES:  # the tail of a block is padding
            position += BLOCK_BYTES - position % BLOCK_BYTES
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += HEADER_BYTES
        parts += data[position : position + length]
        position += length
        if kind in (1, 4):  # full, last
            yield Record.FromString(parts)
            parts = b""


def read_back(directory):
    """(run, configuration, history rows, summary, metric definitions) of the one W&B run in a run directory."""
    (path,) = (directory / "wandb").glob("offline-run-*/*.wandb")
    run, config, rows, summary, metrics = None, {}, [], {}, []

    def values(items):
        return {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}

    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
            config.update(values(record.run.config.update))
        elif kind == "config":
            config.update(values(record.config.update))
        elif kind == "history":
            rows.append(values(record.history.item))
        elif kind == "summary":
            summary.update(values(record.summary.update))
        elif kind == "metric":
            metrics.append((record.metric.name or record.metric.glob_name, record.metric.step_metric))
    return run, config, rows, summary, metrics


def test_an_offline_run_is_read_back(here, capsys):
    arguments = ["+search=ppo", "tracking=wandb", "tracking.name=first", "tracking.tags=[a,b]", *SMALL, "out=record"]
    assert main([*arguments, "budget.evaluations=400"]) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"^W&B: offline \(not logged in\); .*wandb sync ", printed, re.M)) == 1

    record = here / "record"
    result = json.loads((record / "result.json").read_text())
    for _ in range(60):  # a loaded machine's W&B process may still be writing
        run, config, rows, summary, metrics = read_back(record)
        if any(row.get("search/evaluations") == 400 and "search/seconds" in row for row in rows):
            break
        time.sleep(0.5)
    assert (run.project, run.display_name, list(run.tags)) == ("haap_rl", "first", ["a", "b"])
    recorded_config = yaml.safe_load((record / "config.yaml").read_text())
    assert {key: config[key] for key in recorded_config} == recorded_config
    assert ("search/evaluations", "") in metrics
    assert {("search/*", "search/evaluations"), ("train/*", "search/evaluations")} <= set(metrics)

    search = [row for row in rows if "search/seconds" in row]
    trace = list(csv.DictReader((record / "trace.csv").open()))
    for point in trace:  # plans are priced in batches: told at the end of the batch
        later = [row for row in search if row["search/evaluations"] >= int(point["evaluations"])]
        assert later[0]["search/best_iteration_time_s"] <= float(point["best_iteration_time_s"])
    assert len(search) <= 100 + len(trace) + 2
    last = search[-1]
    assert last["search/evaluations"] == result["evaluations"] == 400
    assert last["search/best_iteration_time_s"] == result["iteration_time_s"]
    assert last["search/gap_to_lower_bound"] == result["gap_to_lower_bound"]
    for key in ("operator_evaluations", "operator_evaluations_avoided"):
        assert last[f"search/{key}"] == result[key]

    own = [row for row in rows if "train/loss" in row]
    assert own
    assert all("search/evaluations" in row for row in own)
    assert any("rollout/ep_rew_mean" in row for row in rows)

    for key in ("iteration_time_s", "tokens_per_s", "bubble"):
        assert summary[f"plan/{key}"] == result[key]
    assert summary["plan/stages"] == len(json.loads((record / "plan.json").read_text())["stages"])
    assert summary["search/stopped_by"] == "budget"
    assert any(key.startswith("plan/stages_table") for row in rows for key in row)
    (table,) = (record / "wandb").rglob("*.table.json")
    table = json.loads(table.read_text())
    assert table["columns"][:4] == ["stage", "group", "units", "tp"]
    assert len(table["data"]) >= summary["plan/stages"]


def test_points_of_a_sweep_are_runs_of_their_own(here):
    sweep = ["-m", "search=random", "tracking=wandb", *SMALL, "seed=0,1", "hydra.sweep.dir=sweep"]
    assert main(sweep) == 0
    found = [read_back(path.parent) for path in sorted((here / "sweep").glob("*/result.json"))]
    assert len(found) == 2
    assert len({run.run_id for run, *_ in found}) == 2
    assert [config["seed"] for _, config, *_ in found] == [0, 1]
    assert not (here / "wandb").exists()


@pytest.mark.parametrize("search", ["random", "ppo"])
def test_a_run_without_it_never_imports_wandb(here, search):
    code = f"""
import sys, haap_rl.train
assert haap_rl.train.main({[f"search={search}", *SMALL, "out=record"]!r}) == 0
assert "wandb" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert yaml.safe_load((here / "record" / "config.yaml").read_text())["tracking"] == {"backend": None}


@pytest.mark.parametrize(("arguments", "words"), [
    (["tracking=wandb", "tracking.mode=sometimes"], ["mode='sometimes'", "online, offline, disabled"]),
    (["tracking=wandb", "tracking.mode=off"], ["mode='off'"]),
    (["tracking=wandb", "tracking.projct=x"], ["'tracking.projct'", "'tracking.project'"]),
    (["tracking=wandb", "+tracking.projct=x"], ["'projct'", "'project'"]),
    (["tracking=wandb", "tracking.project=null"], ["project=None"]),
    (["tracking=wandb", "tracking.name=7"], ["name=7", "text"]),
    (["tracking=wandb", "tracking.tags=x"], ["tags='x'", "list"]),
    (["tracking=wandb", "tracking.backend=mlflow"], ["mlflow", "tracking=wandb"]),
    (["tracking=wandb", "cluster=a100x8", "cluster.groups.0.devices_per_node=1"], ["must hold at least"]),
    (["tracking=wand"], ["tracking=wand ", "'wandb'"]),
    (["tracking.project=x"], ["'tracking.project'", "tracking=NAME"]),
    (["+tracking.x=1"], ["'x'"]),
])  # fmt: skip
def test_bad_input_is_one_line_with_status_2_and_nothing_written(here, capfd, arguments, words):
    assert main(["search=random", *arguments, "out=record"]) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert all(word in lines[0] for word in words), lines[0]
    assert list(here.iterdir()) == []


# ------------------------------------------------------------------- a W&B that does as it is told
class FakeRun:
    """Stands for a W&B run; fails where it is told to."""

    disabled, dir, url = False, "wandb/run/files", "https://example.invalid/run"

    def __init__(self, service, mode):
        self.service, self.offline, self.summary = service, mode == "offline", {}
        self.settings = service.settings

    def define_metric(self, *_, **__):
        pass

    def log(self, values):
        self.service.happens("log")

    def finish(self, exit_code=None):
        self.service.happens("finish")
        self.service.exit_codes.append(exit_code)


class FakeWandb(types.ModuleType):
    def __init__(self, failing=(), api_key=None):
        super().__init__("wandb")
        self.failing, self.modes, self.events, self.exit_codes = failing, [], [], []
        self.settings = types.SimpleNamespace(
            api_key=api_key, identity_token_file=None, base_url="https://api.wandb.ai"
        )

    def happens(self, what):
        self.events.append(what)
        if what in self.failing:
            raise RuntimeError(f"no {what}\nsecond line")

    def setup(self):
        return types.SimpleNamespace(settings=self.settings)

    def Settings(self, **_):
        return None

    def Table(self, **_):
        return None

    def init(self, mode, **_):
        self.modes.append(mode)
        self.happens(f"init {mode}")
        return FakeRun(self, mode)


@pytest.mark.parametrize("failing", [["init offline"], ["log"], ["finish"], ["log", "finish"]])
def test_a_failing_service_is_said_and_the_record_is_whole(here, monkeypatch, capsys, failing):
    fake = FakeWandb(failing)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    assert main(["search=random", "tracking=wandb", *SMALL, "out=record"]) == 0
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines == [f"haap_rl: W&B failed (RuntimeError: no {what}); the record does not need it" for what in failing]
    assert fake.events.count("log") <= 1 or "log" not in failing
    assert json.loads((here / "record" / "result.json").read_text())["evaluations"] == 120


def test_a_wandb_that_cannot_be_imported_is_said(here, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["search=random", "tracking=wandb", *SMALL, "out=record"]) == 0
    assert "W&B failed (ModuleNotFoundError" in capsys.readouterr().err
    assert (here / "record" / "result.json").exists()


@pytest.mark.parametrize(("arguments", "environment", "api_key", "failing", "modes", "line"), [
    ([], {}, None, (), ["offline"], "offline (not logged in)"),
    ([], {}, "key", (), ["online"], "https://example.invalid/run"),
    ([], {"WANDB_API_KEY": "key"}, None, (), ["online"], "https://example.invalid/run"),
    ([], {"NETRC": "machine api.wandb.ai login user password key"}, None, (), ["online"], "https://example.invalid/run"),
    ([], {"NETRC": "machine example.invalid login user password key"}, None, (), ["offline"], "(not logged in)"),
    ([], {"NETRC": "machine machine"}, None, (), ["offline"], "(not logged in)"),
    ([], {"WANDB_MODE": "offline"}, "key", (), ["offline"], "offline; to upload"),
    (["tracking.mode=offline"], {}, "key", (), ["offline"], "offline; to upload"),
    (["tracking.mode=online"], {}, None, (), ["online"], "https://example.invalid/run"),
    ([], {}, "key", ["init online"], ["online", "offline"], "offline; to upload"),
])  # fmt: skip
def test_online_when_logged_in_else_offline(
    here, monkeypatch, capsys, arguments, environment, api_key, failing, modes, line
):
    fake = FakeWandb(failing, api_key)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    if "NETRC" in environment:
        (here / "netrc").write_text(environment["NETRC"])
        environment = {"NETRC": str(here / "netrc")}
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert main(["search=random", "tracking=wandb", *arguments, *SMALL, "out=record"]) == 0
    assert fake.modes == modes
    assert fake.exit_codes == [0]
    said = [text for text in capsys.readouterr().out.splitlines() if text.startswith("W&B: ")]
    assert len(said) == 1
    assert line in said[0]


def test_a_record_that_cannot_be_written_ends_the_run_as_failed(here, monkeypatch, capsys):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert main(["search=random", "tracking=wandb", *SMALL, "out=record"]) == 2
    assert fake.exit_codes == [1]


def test_ctrl_c_leaves_the_record_the_policy_and_the_offline_run(here):
    process = subprocess.Popen(
        [sys.executable, "-m", "haap_rl.train", "+search=ppo", "tracking=wandb", "budget.evaluations=100000000",
         "out=record"],
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        assert process.stdout.readline().startswith("W&B: offline")
        assert " of 100,000,000 plans" in process.stdout.readline()
        time.sleep(3)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: W&B's own process gets it too
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()  # nothing once it has ended
    assert process.returncode == 130, err
    assert "interrupted" in out
    assert (here / "record" / "policy.zip").stat().st_size > 1000
    *_, summary, _ = read_back(here / "record")
    assert summary["search/stopped_by"] == "interrupted"
    assert summary["plan/iteration_time_s"] > 0
