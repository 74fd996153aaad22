"""What is trained: a model's dimensions, batches of tokens from a seed, and the optimiser's settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from haap_rl.problem.errors import InputError, PlanError
from haap_rl.problem.model import Model
from haap_rl.problem.plan import Plan, Problem

Dtype = Literal["float32", "float64"]
DTYPES = {"float32": torch.float32, "float64": torch.float64}
DROPOUT = 0.1  # the share that GPT-3 like trainings drop (Megatron-LM's default)
# the largest sizes of a model made tiny, so that any machine runs any plan; none of them changes what a plan says
TINY_HIDDEN, TINY_HEAD, TINY_FFN, TINY_VOCAB, TINY_LENGTH = 32, 4, 128, 256, 16


@dataclass(frozen=True, slots=True)
class Job:
    """A training of `model` by AdamW on tokens drawn from `seed`; equal jobs have equal losses, whatever the plan.

    clip_norm: largest norm of the whole gradient (0: not clipped).
    """

    model: Model
    seq_len: int
    global_batch_size: int
    fused_attention: bool = False
    dtype: Dtype = "float32"
    seed: int = 0
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    clip_norm: float = 1.0

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def num_tokens(self) -> int:
        """Tokens whose losses a step sums."""
        return self.global_batch_size * self.seq_len

    def batch(self, step: int) -> Tensor:
        """Token ids of a step, (global batch, seq_len + 1): each token but the first is also a target.

        Short runs of counting, begun anywhere: a small model learns something in ten steps.
        """
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(self.model.vocab, (self.global_batch_size, 1), generator=generator)
        return (starts + torch.arange(self.seq_len + 1)) % self.model.vocab


def full_size(problem: Problem, dtype: Dtype = "float32", seed: int = 0) -> Job:
    """The problem's own model, length and batch."""
    return Job(problem.model, problem.seq_len, problem.global_batch_size, problem.fused_attention, dtype, seed)


def tiny(problem: Problem, dtype: Dtype = "float32", seed: int = 0) -> Job:
    """The same model with its layers, heads and switches, but narrow and short, so that any machine can run the plan.

    What a plan says (units, degrees, samples, micro-batches) stays as it is.
    """
    model, length = problem.model, min(problem.seq_len, TINY_LENGTH)
    narrow = replace(
        model,
        hidden=min(model.hidden, TINY_HIDDEN),
        head_dim=min(model.head_dim, TINY_HEAD),
        ffn=min(model.ffn, TINY_FFN),
        vocab=min(model.vocab, TINY_VOCAB),
        max_positions=length if model.learned_positions else model.max_positions,
    )
    return replace(full_size(problem, dtype, seed), model=narrow, seq_len=length)


def num_ranks(plan: Plan) -> int:
    """Processes that a plan needs."""
    return sum(replica.num_devices for stage in plan.stages for replica in stage.replicas)


def check_ranks(plan: Plan, processes: int) -> None:
    """Raise InputError where there are fewer processes than a plan needs."""
    if num_ranks(plan) > processes:
        raise InputError(
            f"runtime: the plan needs {num_ranks(plan)} ranks and there are processes={processes}; start more, or "
            "choose a plan of fewer devices"
        )


def check_runs(job: Job, plan: Plan) -> None:
    """Raise PlanError, with a way out, for what a legal plan can say and the runtime does not do."""
    if plan.zero_stage > 1:
        raise PlanError(f"runtime: zero_stage={plan.zero_stage} is not run; set the plan's zero_stage to 0 or 1")
    if plan.virtual_stages > 1:
        raise PlanError(
            f"runtime: virtual_stages={plan.virtual_stages} (interleaved stages) is not run; use virtual_stages=1"
        )
    for i, stage in enumerate(plan.stages):
        for group in stage.replicas:
            if job.model.kv_heads % group.tp:
                raise PlanError(
                    f"runtime: stage {i}: tp={group.tp} would repeat the {job.model.kv_heads} kv_heads of model "
                    f"{job.model.name!r}, which is not run; use a tp that divides them"
                )
            if job.model.ffn < group.tp or job.model.vocab < group.tp:
                raise PlanError(f"runtime: stage {i}: tp={group.tp} is more than the model has columns; lower tp")
