"""Checkpoints: the state of training every so many steps, gone back to where failures cannot be lived with.

One is kept, the last. It holds all that changes as training goes on, and no random state: a job's batches are functions
of the step (job.py). In memory for ranks simulated in one process; a file where processes end, and for a training that
is itself ended and begun again.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from haap_rl.mecefo.failures import UNBROKEN, Restarted, Timeline
from haap_rl.mecefo.projectors import ProjectorStore


@dataclass(slots=True)
class Training:
    """All that changes as training goes on: what a peer copies, and a checkpoint holds.

    losses   mean loss of each step done
    errors   (step, norm ratio of the gradient's error) of the steps that were looked at
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    projectors: ProjectorStore
    losses: list[float] = field(default_factory=list)
    errors: list[tuple[int, float]] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.losses)

    def state(self) -> dict[str, Any]:
        """What `load` takes; no copy."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "projectors": self.projectors.state(),
            "losses": self.losses,
            "errors": self.errors,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Become as the training was whose `state()` this is."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.projectors.load(state["projectors"])
        self.losses, self.errors = list(state["losses"]), list(state["errors"])


@dataclass(slots=True)
class Checkpoints:
    """The last checkpoint of one training.

    every      steps between two
    path       of the file; None: in memory
    settings   what tells this training from others; a file with other settings is refused
    """

    every: int = 50
    path: Path | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    _kept: bytes | None = None

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"mecefo: checkpoint_steps={self.every} must be at least 1; give for example 50")

    def keep(self, training: Training, timeline: Timeline, steps: int) -> None:
        """Keep the state of a training of so many steps, if that is due after those done; the last is always due."""
        if training.step % self.every and training.step < steps:
            return
        content = io.BytesIO()
        restarts = [tuple(restart) for restart in timeline.restarts]
        torch.save({"settings": dict(self.settings), "restarts": restarts, "training": training.state()}, content)
        if self.path is None:
            self._kept = content.getvalue()
        else:
            self._write(self.path, content.getvalue())

    def last(self) -> tuple[dict[str, Any], Timeline] | None:
        """State and timeline of training as they were kept; None where there is no checkpoint.

        Raises ValueError in one line for a file that is not whole, is of another training or cannot be used.
        """
        content = self._kept if self.path is None else self._read(self.path)
        if content is None:
            return None
        found = torch.load(io.BytesIO(content))
        for key in sorted({*found["settings"], *self.settings}):
            there, here = found["settings"].get(key), self.settings.get(key)
            if there != here:
                raise ValueError(
                    f"mecefo: checkpoint={self.path} is of another training, with {key}={there}, not {here}; give its "
                    "options, or another file"
                )
        return found["training"], Timeline(tuple(Restarted(*restart) for restart in found["restarts"]))

    def restore(self, training: Training) -> Timeline:
        """Take training back, or forward, to the last checkpoint, if there is one; the timeline kept with it."""
        found = self.last()
        if found is None:
            return UNBROKEN
        state, timeline = found
        training.load(state)
        return timeline

    @staticmethod
    def _write(path: Path, content: bytes) -> None:
        """A file is there as a whole or not at all; what a killed writer leaves is written over by the next."""
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with temporary.open("wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            raise ValueError(f"mecefo: checkpoint={path} cannot be written: {error.strerror}; free it") from None

    @staticmethod
    def _read(path: Path) -> bytes | None:
        try:
            whole = path.read_bytes()
        except FileNotFoundError:
            if not os.access(path.parent, os.W_OK):
                raise ValueError(
                    f"mecefo: checkpoint={path} cannot be written; give a file in a folder that is there"
                ) from None
            return None
        except OSError as error:
            raise ValueError(f"mecefo: checkpoint={path} cannot be read: {error.strerror}; give another file") from None
        digest, content = whole[:32], whole[32:]
        if hashlib.sha256(content).digest() != digest:
            raise ValueError(
                f"mecefo: checkpoint={path} is no whole checkpoint; delete it to begin anew, or give another file"
            )
        return content
