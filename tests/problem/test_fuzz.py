"""Whatever a file holds, its reader gives a valid result or one clear line: no traceback, no hang.

HAAP_RL_FUZZ=N mutated files per reader (default 60); 1e5 over the six readers of problem files: HAAP_RL_FUZZ=17000.
"""

import copy
import dataclasses
import json
import os
import signal

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from haap_rl.cost.profile_files import load_profile, profile_from_json, profile_to_json
from haap_rl.problem.cluster import cluster_from_config
from haap_rl.problem.errors import InputError
from haap_rl.problem.model import model_from_config
from haap_rl.problem.presets import cluster_from_file, load_problem, model_from_file, preset
from tests.cost.test_profile_files import (
    aceso_table,
    collectives_table,
    metis_profile,
    sailor_table,
    whole_profile,
)
from tests.problem.test_formats import GEMMA3, GPT2, LLAMA3, METIS, OPT, QWEN3, all_pairs, topo_table
from tests.problem.test_schemas import written_plan

EXAMPLES = int(os.environ.get("HAAP_RL_FUZZ", "60"))
SECONDS = 20  # of one file; a hang is a failure

PROBLEM = load_problem()
HOSTS = b"# mine\nworker-1 slots=8\nworker-2 slots=8\nworker-3 slots=4 # old\n"
SEEDS = {
    "huggingface": [json.dumps(config, indent=1).encode() for config in (GPT2, LLAMA3, OPT, QWEN3, GEMMA3)],
    "yaml": [yaml.safe_dump(preset("cluster", name)).encode() for name in ("a100x8_v100x16", "h100x64")]
    + [
        yaml.safe_dump({**preset("cluster", "a100x8"), "links": [{"between": ["a100", "b"], "latency_us": 1}]}).encode()
    ],
    "hostfile": [HOSTS],
    "metis": [json.dumps(METIS, indent=1).encode()],
    "topo": [topo_table(all_pairs(4, "NV4"), ("NIC0", "NIC1")).encode(), topo_table(all_pairs(2, "SYS")).encode()],
    "plan": [json.dumps(written_plan(), indent=1).encode()],
    "profile": [json.dumps(profile_to_json(whole_profile()), indent=1).encode()],
    "table": [aceso_table().encode(), collectives_table().encode(), sailor_table().encode()],
    "DeviceType.A100_tp2_bs1.json": [json.dumps(metis_profile(), indent=1).encode()],
}
JSON_SEEDS = ("huggingface", "metis", "plan", "profile", "DeviceType.A100_tp2_bs1.json")
# what tends to break parsers, whatever the format
PIECES = [
    *(b"NaN", b"Infinity", b"-1", b"0", b"1e999", b"1e15", b"0.5", b"7" * 30, b"7" * 400),
    *(b"7" * 5000, b"0x" + b"f" * 5000),
    *(b"null", b"true", b'""', b'"x"', b"[]", b"{}", b"[" * 3000, b'{"a":' * 3000, b"}", b"]", b",", b":", b'"', b"'"),
    *(b"\x00", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\\ud800", b"\x1b[4m", b"\r", b"\n", b"\t", b"  "),
    *(b"#", b"\xc2\x85"),
    *(b"&a [*a, *a]", b"*a", b"<<: ", b"!!int ''", b"!!timestamp x", b"!!bool x", b"2001-99-99", b"1:2:3"),
    *(b"? ", b"- "),
    *(b"GPU0", b"MIG 1g.5gb", b"NV18", b"X", b"SYS", b"slots=", b"slots=999999999", b"Legend:", b"num_experts"),
]  # fmt: skip

# what a syntactically good file may hold in the wrong place
VALUES = [
    *(None, True, False, -1, 0, 1, 3, 0.5, 4096.0, float("inf"), float("nan"), 10**15, 10**16, 10**400, 1e300, 1e-300),
    *("", "x", "a100_80", "none", "\ud800", "a\nb", "7" * 5000, [], {}, [[]], {"a": {"b": 1}}, [1, "x", None] * 50),
]  # fmt: skip


@st.composite
def rewritten(draw, seed, dump):
    """A good file with some values replaced, removed or added, written again."""
    data = yaml.safe_load(seed)
    for _ in range(draw(st.integers(1, 3))):
        place = data
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(place[key], dict | list) and draw(st.integers(0, 3)):
                place = place[key]
                continue
            kind = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
            if kind == "remove":
                del place[key]
            elif kind == "add" and isinstance(place, dict):
                place[draw(st.sampled_from(["extra", "num_experts", "text_config", "links", "node", "7" * 500]))] = 8
            else:
                place[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))
            break
    return dump(data).encode()


def files_for(kind):
    """Files for the reader of `kind`: bytes mutated, and where there is a syntax to keep, values too."""
    broken = mutated(SEEDS[kind])
    if kind not in ("yaml", *JSON_SEEDS):
        return broken
    dump = yaml.safe_dump if kind == "yaml" else json.dumps
    return st.one_of(broken, *(rewritten(seed, dump) for seed in SEEDS[kind]))


@st.composite
def mutated(draw, seeds):
    """A good file after some cuts, copies, swaps and insertions."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(0, 6))):
        start, end = sorted((draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))))
        kind = draw(st.sampled_from(["insert", "replace", "token", "cut", "drop", "copy", "bytes"]))
        if kind == "insert":
            data = data[:start] + draw(st.sampled_from(PIECES)) + data[start:]
        elif kind == "replace":
            end = min(end, start + draw(st.integers(0, 12)))
            data = data[:start] + draw(st.sampled_from(PIECES)) + data[end:]
        elif kind == "token":  # the whole value at a place, so that the syntax often stays right
            data = _with_token(data, start, draw(st.sampled_from(PIECES)))
        elif kind == "cut":
            data = data[:end]
        elif kind == "drop":
            data = data[:start] + data[min(end, start + 40) :]
        elif kind == "copy":
            data = data[:end] + data[start:end] + data[end:]
        else:
            data = data[:start] + draw(st.binary(max_size=8)) + data[start:]
        data = data[:100_000]
    return data


def _with_token(data, start, piece):
    """`data` with the run of word characters at or after `start` replaced."""
    word = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"
    while start < len(data) and data[start : start + 1] not in [bytes([c]) for c in word]:
        start += 1
    first = end = start
    while first and data[first - 1] in word:
        first -= 1
    while end < len(data) and data[end] in word:
        end += 1
    return data[:first] + piece + data[end:]


def read(kind, folder, path):
    """What the reader makes of `path`, checked by the types that use it."""
    if kind in ("profile", "table") or kind.startswith("DeviceType"):
        profile = load_profile(path)
        again = profile_from_json(json.loads(json.dumps(profile_to_json(profile), allow_nan=False)))
        assert dataclasses.replace(again, file=profile.file) == profile
    elif kind == "plan":
        PROBLEM.validate(PROBLEM.load_plan(path))
    elif kind == "huggingface":
        assert model_from_config(model_from_file({"path": path})).num_parameters > 0
    else:
        given = {} if kind == "yaml" else {"device": "a100_40"}
        if kind == "metis":
            given["hostfile"] = str(folder / "hosts")
        cluster = cluster_from_file({"path": path, "format": kind, **given})
        assert cluster_from_config(cluster, lambda name: preset("device", name)).num_devices > 0
        yaml.safe_dump(cluster)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "hosts").write_text("".join(f"{host} slots=4\n" for host in METIS))
    return folder


def _hangs(*_):
    raise TimeoutError(f"a file took more than {SECONDS} s")


@pytest.mark.parametrize("kind", SEEDS)
def test_a_mutated_file_gives_a_result_or_one_line(folder, kind):
    path = folder / kind

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )
    @given(files_for(kind))
    def check(data):
        path.write_bytes(data)
        signal.alarm(SECONDS)
        try:
            read(kind, folder, str(path))
        except InputError as error:
            line = str(error)
            assert line.isprintable(), line
            assert len(line) < 2000, line
        finally:
            signal.alarm(0)

    before = signal.signal(signal.SIGALRM, _hangs)
    try:
        check()
    finally:
        signal.signal(signal.SIGALRM, before)
