"""The searcher of docs/new_searcher.md, built from the code blocks of that page and from nothing else."""

import os
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "new_searcher.md"
NAME = "hill_climb"


def blocks():
    """The code blocks of the page by what their first line says after `# `: a file's name, or where to run them."""
    text = PAGE.read_text(encoding="utf-8")
    return dict(re.findall(r"^```\w+\n# ([^\n]+)\n(.*?)^```$", text, re.M | re.S))


def write_package(directory):
    """Lay the package out in `directory` as the page says; the YAML's path."""
    package = blocks()
    yaml_file = directory / "conf" / "search" / "hill_climb.yaml"
    yaml_file.parent.mkdir(parents=True)
    yaml_file.write_text(package["hill_climb.yaml"])
    for name in ("hill_climb.py", "pyproject.toml"):
        (directory / name).write_text(package[name])
    return yaml_file


def install(package, site):
    """Make the package in `package` an installed distribution of the folder `site`, as pip would, with no network."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (site / "hill_climb.py").write_text((package / "hill_climb.py").read_text())


def path_with(*folders):
    """The environment with `folders` first on Python's path."""
    given = os.environ.get("PYTHONPATH")
    paths = [*map(str, folders), *([given] if given else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def own_searchers_yaml():
    """YAML files of other installed searchers to hold to the contract: HAAP_RL_SEARCHER_YAML, separated as PATH is."""
    return [Path(path) for path in os.environ.get("HAAP_RL_SEARCHER_YAML", "").split(os.pathsep) if path]
