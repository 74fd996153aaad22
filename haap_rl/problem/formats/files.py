"""How every reader opens a file: regular, small enough, UTF-8, and JSON or YAML of a sane size; else one clear line."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from typing import Any

import yaml

from haap_rl.problem.errors import InputError, shown

MIB = 2**20
LARGEST_TEXT_BYTES = 4 * MIB
LARGEST_YAML_BYTES = MIB // 4  # the YAML parser is slow: about a second for this many
LARGEST_YAML_VALUES = 20_000  # with aliases followed, so that a small file cannot stand for a huge one
DEEPEST = 32


def read_text(path: object, what: str, largest_bytes: int = LARGEST_TEXT_BYTES) -> str:
    """The text of the file `path`; `what` says in messages what it should be ("cluster file").

    Raises InputError if it is not there, no regular file, not readable, larger than `largest_bytes` or not UTF-8.
    """
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise InputError(f"{what}: path={shown(path)} must be the name of a file")
    where = f"{what} {str(path)!r}"
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise InputError(f"{where}: is a directory; give the file in it")
        if not stat.S_ISREG(status.st_mode):  # a pipe or a device might never end
            raise InputError(f"{where}: is not a regular file; save it to one first")
        with open(path, "rb") as file:
            data = file.read(largest_bytes + 1)  # st_size may be 0 where there is more, as in /proc
        size = max(status.st_size, len(data))
        if size > largest_bytes:
            raise InputError(
                f"{where}: holds {size} bytes, more than the {largest_bytes} that such a file may have; "
                "check that it is the right file"
            )
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{where}: cannot be read ({error.strerror}); check the path") from None
    except ValueError:  # a NUL or a lone surrogate in the path
        raise InputError(f"{where}: cannot be the name of a file; check the path") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{where}: line {line} is not UTF-8 text ({error.reason}); save it as UTF-8") from None


def read_json_object(path: object, what: str) -> dict[str, Any]:
    """The JSON object in the file `path`. Raises InputError as `read_text` does, and for anything but one object."""
    data = read_json(path, what)
    if not isinstance(data, dict):
        where = f"{what} {str(path)!r}"
        raise InputError(f"{where}: holds {shown(data)}, not a JSON object; check that it is the right file")
    return data


def read_json(path: object, what: str) -> Any:
    """The JSON in the file `path`. Raises InputError as `read_text` does, and for anything else."""
    text = read_text(path, what)
    where = f"{what} {str(path)!r}"
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{where}: line {error.lineno} column {error.colno} is not JSON ({error.msg}); is the file complete?"
        ) from None
    except RecursionError:
        raise InputError(f"{where}: is nested too deeply; check that it is the right file") from None
    except ValueError as error:  # a key twice, or a whole number of more than 4,300 digits
        raise InputError(f"{where}: {str(error).split(';')[0]}; correct it") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {shown(key)} is there twice")
            seen.add(key)
    return data


class _PlainLoader(yaml.SafeLoader):
    """Safe YAML without merge keys, of which a few lines can stand for billions of values."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, "merge keys '<<' are not supported", key.start_mark)
        super().flatten_mapping(node)


def read_yaml_mapping(path: object, what: str) -> dict[str, Any]:
    """The YAML mapping in the file `path`. Raises InputError as `read_text` does, and for anything but one mapping."""
    text = read_text(path, what, LARGEST_YAML_BYTES)
    where = f"{what} {str(path)!r}"
    try:
        data = yaml.load(text, Loader=_PlainLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        problem = " ".join(str(error.problem).split())[:200]
        raise InputError(f"{where}: line {line} is not YAML ({problem}); is the file complete?") from None
    except yaml.YAMLError as error:
        raise InputError(f"{where}: is not YAML ({' '.join(str(error).split())[:200]}); save it as text") from None
    except RecursionError:
        raise InputError(f"{where}: is nested too deeply; check that it is the right file") from None
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        # PyYAML's constructors let these through for values like 2001-99-99 or !!int ""
        raise InputError(f"{where}: holds a value that YAML cannot read ({str(error)[:80]}); quote it") from None
    _refuse_bombs(where, data)
    if not isinstance(data, dict):
        raise InputError(
            f"{where}: holds {shown(data)}, not a mapping of keys to values; write it as in conf/cluster, "
            "or give cluster.format=hostfile, metis or topo"
        )
    return data


def _refuse_bombs(where: str, data: object) -> None:
    """Raise InputError if `data`, aliases followed, is too large, too deep or contains itself."""
    left = LARGEST_YAML_VALUES
    stack = [(data, 0)]
    while stack:
        value, depth = stack.pop()
        left -= 1
        if left < 0 or depth > DEEPEST:
            raise InputError(f"{where}: its aliases or nesting stand for too many values; write a plainer file")
        if isinstance(value, Mapping):
            stack.extend((part, depth + 1) for part in value.values())
        elif isinstance(value, list | tuple | set):
            stack.extend((part, depth + 1) for part in value)
