"""A training job: all that a process needs to begin, and to run any rank's part of any step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from haap_rl.mecefo.corpus import ALPHABET, corpus
from haap_rl.mecefo.llama import Llama, LlamaShape


class Job(Protocol):
    """What is trained and on what; can be sent to another process.

    The batch is a function of step and rank, so that a neighbour can run a dead rank's samples.
    """

    def model(self) -> nn.Module:
        """The model as training begins; equal wherever it is made."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Any of torch's."""

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Mean over the samples."""

    def batch(self, step: int, rank: int) -> Tensor:
        """A rank's samples (samples, ...) of a step; equally many on every rank."""

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Change the weights by their `.grad`."""


@dataclass(frozen=True, slots=True)
class CharacterPretraining:
    """A small LLaMA on the stories of `corpus.py`: AdamW, warm-up and cosine decay, gradients clipped to norm 1.

    samples, length   of a rank's batch, sequences and characters each
    """

    seed: int = 0
    steps: int = 300
    samples: int = 4
    length: int = 64
    learning_rate: float = 6e-3
    warmup: int = 20
    shape: LlamaShape = field(default_factory=lambda: LlamaShape(vocab=len(ALPHABET)))

    CHARACTERS = 400_000
    HELD_OUT = 40_000

    def model(self) -> Llama:
        """The model at its seed's initial weights."""
        return Llama(self.shape, self.seed)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW as LLaMA's authors set it."""
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Mean cross-entropy per character, in nats."""
        return model.loss(batch)  # type: ignore[operator,no-any-return]

    def batch(self, step: int, rank: int) -> Tensor:
        """Sequences (samples, length + 1) from random places of the text but for its held-out end."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) * 1009 + rank)
        return _sequences(corpus(self.CHARACTERS, 0)[: -self.HELD_OUT], self.samples, self.length, generator)

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """One step of AdamW."""
        for group in optimizer.param_groups:
            decay = 0.1 + 0.45 * (1 + math.cos(math.pi * step / self.steps))
            group["lr"] = self.learning_rate * min(1.0, (step + 1) / self.warmup) * decay
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def perplexity(self, model: nn.Module) -> float:
        """exp of the mean loss per character on held-out text, the same for every seed."""
        generator = torch.Generator().manual_seed(0)
        held_out = corpus(self.CHARACTERS, 0)[-self.HELD_OUT :]
        return math.exp(float(self.loss(model, _sequences(held_out, 256, self.length, generator))))


def _sequences(text: Tensor, number: int, length: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(0, len(text) - length, (number, 1), generator=generator)
    return text[starts + torch.arange(length + 1)]
