"""Runs kept as files, so that an interrupted experiment goes on where it stopped."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def kept(path: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The figures in the file `path`; None where it is missing, broken or of other settings."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        saved = json.loads(path.read_text())
        if saved["settings"] == settings:
            return saved["run"]  # type: ignore[no-any-return]
    return None


def stored(path: Path, settings: Mapping[str, Any], run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The figures in the file `path` if they were made with these settings, else those of `run()`, kept there.

    `settings` is all that the figures depend on, as JSON data. A file that is broken or of other settings is replaced.
    """
    figures = kept(path, settings)
    if figures is None:
        figures = run()
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"settings": settings, "run": figures}))
        temporary.replace(path)
    return figures
