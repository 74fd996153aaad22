"""Command lines: the only module that imports Hydra. key=value in, one plain configuration per job out, and back.

Status: 0 good, 1 a search that found no plan that fits, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from haap_rl.problem.errors import InputError
from haap_rl.problem.presets import choices, conf_dir, names, preset

Config = dict[str, Any]
DEFAULT_CHOICES = {"objective": "iteration_time", "faults": "none"}  # of conf/train.yaml
Job = Callable[[Config, Path], int]


def run(config_name: str, job: Job, arguments: Sequence[str]) -> int:
    """Run `job(config, directory)` for each point that `arguments` describe; the exit status.

    A bad point of a sweep is reported and the others run; the largest status counts.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig, OmegaConf

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises instead of printing a traceback of its own
    statuses = [0]

    def one_point(composed: DictConfig) -> None:
        directory = Path(HydraConfig.get().runtime.output_dir)
        with reported(statuses, config_name):
            config = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
            if not isinstance(config, dict):
                raise TypeError("the composed configuration is not a mapping")
            if "search" in config:
                _check_search_name(config, HydraConfig.get().runtime.choices)
            statuses.append(job({str(key): value for key, value in config.items()}, directory))
        if directory.resolve() != Path.cwd():
            with contextlib.suppress(OSError):
                directory.rmdir()  # Hydra makes it beforehand; an empty one says nothing

    main = hydra.main(version_base="1.3", config_path=conf_dir(), config_name=config_name)(one_point)
    given, sys.argv = sys.argv, [f"haap_rl.{config_name}", *with_search_appended(arguments)]
    try:
        with reported(statuses, config_name), warnings.catch_warnings():
            warnings.filterwarnings("error", message="provider=hydra.searchpath")
            _check_arguments(arguments)
            main()
    finally:
        sys.argv = given
    return max(statuses)


def _check_arguments(arguments: Sequence[str]) -> None:
    """Raise InputError for what Hydra would take and then do something that nobody meant."""
    sweep = {"-m", "--multirun"} & set(arguments)
    for argument in arguments:
        key, _, value = argument.partition("=")
        group = key.lstrip("+")
        if value == "null" and Path(conf_dir(), group).is_dir():
            raise InputError(f"{argument}: {group} needs a name; {_near('', choices(group), 'choices')}")
        if key == "hydra.run.dir" or (key == "out" and sweep):
            way_out = "with -m give hydra.sweep.dir=DIR" if sweep else "use out=DIR"
            raise InputError(f"{argument} would put the record elsewhere than it says; {way_out}")


def run_with_options(job: Callable[[Config], int], defaults: Config, arguments: Sequence[str]) -> int:
    """Run `job(options)` for a command with a few flat keys; the exit status, as `run` has it.

    Each argument is key=value with a key of `defaults`, its value read as YAML; a default of None must be given.
    """
    statuses = [0]
    with reported(statuses):
        options = dict(defaults)
        if {"-h", "--help"} & set(arguments):
            keys = " ".join(f"{key}={'...' if value is None else value}" for key, value in defaults.items())
            print(f"options, with their defaults: {keys}")
            return 0
        for argument in arguments:
            key, equals, value = argument.partition("=")
            if not equals or key not in defaults:
                raise InputError(f"{argument!r} is not an option; {_near(key, list(defaults), 'options')}")
            try:
                options[key] = yaml.safe_load(value)
            except yaml.YAMLError:
                raise InputError(f"{key}={value!r} cannot be read; quote special characters") from None
        for key, value in options.items():
            if value is None:
                raise InputError(f"{key} has no value; give {key}=...")
        statuses.append(job(options))
    return max(statuses)


def command_line(config: Mapping[str, Any]) -> str:
    """The `haap_rl.train` command that composes the parts which `config` has of a run's configuration.

    Presets by name, and key=value for what differs from them. Where figures come from (`source`) is left out.
    """
    words = [f"+search={config['search']['name']}"]
    bases = {"search": _base("search", config["search"]["name"])}
    for group in ("model", "cluster"):
        name = config[group]["name"] if config[group]["name"] in names(group) else names(group)[0]
        words.append(f"{group}={name}")
        bases[group] = preset(group, name)
    for group in ("objective", "faults"):
        if group in config and config[group]["name"] in names(group):
            bases[group] = preset(group, config[group]["name"])
            if config[group]["name"] != DEFAULT_CHOICES[group]:
                words.append(f"{group}={config[group]['name']}")
    for group in ("search", "model", "cluster", "problem", "budget", "space", "estimator", "objective", "faults"):
        if group in config and (group in bases or group not in DEFAULT_CHOICES):
            base = bases[group] if group in bases else preset(group, "default")
            words += _overrides(group, base, config[group])
    words += [f"{key}={_value(config[key])}" for key in ("certificate", "seed") if config.get(key) is not None]
    return " ".join(["python -m haap_rl.train", *map(shlex.quote, words)])


def _base(group: str, name: str) -> Config:
    """The preset, or nothing where an installed package has it."""
    return preset(group, name) if name in names(group) else {"name": name}


def _overrides(key: str, base: Any, value: Any) -> list[str]:
    """What makes `value` at `key` of `base`, as Hydra takes it."""
    if isinstance(base, Mapping) and isinstance(value, Mapping):
        parts = {name: part for name, part in value.items() if name != "source"}
        gone = [f"~{key}.{name}" for name in base if name != "source" and name not in parts]
        new = [f"++{key}.{name}={_value(part)}" for name, part in parts.items() if name not in base]
        return [
            *gone,
            *new,
            *(w for name in parts if name in base for w in _overrides(f"{key}.{name}", base[name], parts[name])),
        ]
    lists = isinstance(base, list) and isinstance(value, list)
    if lists and any(map(_keys, base)) and list(map(_keys, base)) == list(map(_keys, value)):
        return [word for i, part in enumerate(value) for word in _overrides(f"{key}.{i}", base[i], part)]
    return [] if type(base) is type(value) and base == value else [f"{key}={_value(value)}"]


def _keys(value: object) -> set[Any]:
    """The keys of a mapping that count; none of anything else."""
    return set(value) - {"source"} if isinstance(value, Mapping) else set()


def _value(value: object) -> str:
    """A value of a configuration in Hydra's grammar."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_value(part)}" for key, part in value.items() if key != "source") + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_value, value)) + "]"
    if not isinstance(value, str):
        return "null" if value is None else str(value).lower()
    if re.fullmatch(r"[A-Za-z_][\w./@-]*", value, re.ASCII) and value.lower() not in (
        "null",
        "true",
        "false",
        "nan",
        "inf",
    ):
        return value
    # Hydra halves the backslashes before a quote, OmegaConf those before an interpolation
    quoted = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)
    return "'" + re.sub(r"(\\*)\$\{", r"\1\1\\${", quoted) + "'"


def with_search_appended(arguments: Sequence[str]) -> list[str]:
    """`search=ppo` as Hydra wants it, `+search=ppo`: the search is no default that could be overridden."""
    return [f"+{argument}" if argument.startswith("search=") else argument for argument in arguments]


def names_search(arguments: Sequence[str]) -> bool:
    """Whether a command line chooses a search, or only asks Hydra for information."""
    return any(re.match(r"\+{0,2}search=", a) or a in ("--help", "-h", "--cfg", "-c", "--info") for a in arguments) or (
        any(a.startswith(("--cfg", "--info", "--hydra-help", "--version")) for a in arguments)
    )


@contextlib.contextmanager
def reported(statuses: list[int], config_name: str = "train") -> Iterator[None]:
    """Turn bad input into one line on standard error and status 2, and an interrupt into 130.

    config_name: the composed configuration, whose keys a misspelt one is compared with.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except InputError as error:
        print(f"haap_rl: {error}", file=sys.stderr)
        statuses.append(2)
    except (HydraException, OmegaConfBaseException) as error:
        print(f"haap_rl: {explain(error, config_name)}", file=sys.stderr)
        statuses.append(2)
    except ValueError as error:
        if "Config group override" not in str(error):  # Hydra's own, of a choice that is no text; else a bug of ours
            raise
        print(f"haap_rl: {_one_line(error)}; a group takes the name of one of its files", file=sys.stderr)
        statuses.append(2)
    except yaml.YAMLError as error:
        print(f"haap_rl: {_one_line(error)}; repair that YAML file", file=sys.stderr)
        statuses.append(2)
    except UserWarning as error:
        path = str(error).partition("path=")[2]
        print(f"haap_rl: hydra.searchpath: {path} Give [file://DIR] with a DIR that holds search/", file=sys.stderr)
        statuses.append(2)
    except OSError as error:
        print(f"haap_rl: {error.filename or 'a file'}: {error.strerror}; choose another path", file=sys.stderr)
        statuses.append(2)
    except KeyboardInterrupt:
        print("haap_rl: interrupted before there was a plan", file=sys.stderr)
        statuses.append(130)


def explain(error: Exception, config_name: str = "train") -> str:
    """One line for an error of Hydra or OmegaConf: what is wrong and what is near."""
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    text = "\n".join(str(link) for link in chain)
    if found := re.search(r"Could not find '(\w+)/([^']*)'", text):
        group, name = found.groups()
        return f"{group}={name} is not known; {_near(name, _choices(group, text), 'choices')}"
    if found := re.search(r"Could not override '([^']+)'", text):
        known = _known_keys(config_name)
        if found[1] in known:
            group = found[1].split(".")[0]
            return f"{found[1]!r} is no key of the {group} that was chosen; choose the {group}=NAME that has it"
        near = {key if "." in found[1] else key.split(".")[0] for key in known}
        return f"unknown key {found[1]!r}; {_near(found[1], sorted(near), 'keys')}"
    if found := re.search(r"An item is already at '([^']+)'", text):
        return f"{found[1]!r} is there already; write it without the '+'"
    if "Missing mandatory value" in text:
        key = getattr(error, "full_key", None) or "a key"
        return f"{key} has no value; give {key}=..."
    override = getattr(error, "override", None)
    if override is not None:
        return f"{override!r} cannot be read as key=value; quote special characters for the shell and for Hydra"
    return _one_line(error)


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r"\s+", " ", " ".join(lines[:2])) if lines else type(error).__name__


def _choices(group: str, message: str) -> list[str]:
    """What Hydra says there is, which counts in the folders of hydra.searchpath; ours where it says nothing."""
    found = re.search(rf"Available options in '{group}':\n((?:\t.*\n?)+)", message)
    return found[1].split() if found else choices(group)


def _near(word: str, known: Sequence[str], what: str) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"{what}: {', '.join(sorted(known))}"


def _known_keys(config_name: str) -> list[str]:
    """Every dotted key of a configuration and of all choices in its groups, without composing anything."""
    keys: list[str] = []

    def walk(prefix: str, node: object) -> None:
        if isinstance(node, dict):
            for name, value in node.items():
                if name not in ("source", "hydra", "defaults"):
                    walk(f"{prefix}.{name}" if prefix else str(name), value)
        elif isinstance(node, list) and any(isinstance(entry, dict) for entry in node):
            for position, entry in enumerate(node):
                walk(f"{prefix}.{position}", entry)
        else:
            keys.append(prefix)

    root = Path(conf_dir())
    main = yaml.safe_load((root / f"{config_name}.yaml").read_text(encoding="utf-8"))
    walk("", main)
    groups = {str(group) for entry in main["defaults"] if isinstance(entry, dict) for group in entry}
    for group in sorted(groups | ({"search"} & set(main))):
        for path in sorted(root.glob(f"{group}/*.yaml")):
            walk(group, yaml.safe_load(path.read_text(encoding="utf-8")))
    return sorted(set(keys))


def _check_search_name(config: dict[Any, Any], chosen_by_group: Any) -> None:
    """`search.name` says which module runs; overriding it would run one search with another's settings."""
    search = config.get("search")
    chosen = str(chosen_by_group.get("search"))
    if isinstance(search, dict) and "name" not in search:
        raise InputError(f"search={chosen}: its YAML has no key 'name'; add the line `name: {chosen}`")
    if not isinstance(search, dict):
        raise InputError(
            f"search={search!r} is not a searcher; choose one with +search=NAME: {', '.join(names('search'))}"
        )
    if search["name"] != chosen:
        raise InputError(
            f"search.name={search['name']!r} must be {chosen!r}, as its YAML is called; choose another searcher with "
            f"+search={search['name']}"
        )
