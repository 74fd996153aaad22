"""A plan trained on the ranks of a session, and the same training in one process to hold it against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from haap_rl.problem.plan import Plan
from haap_rl.runtime.device import NATIVE, Pacing
from haap_rl.runtime.executor import Event, Report, State, Worker
from haap_rl.runtime.job import Job, check_ranks, check_runs
from haap_rl.runtime.layers import Embedding, Masks, TensorParallel, build_unit
from haap_rl.runtime.routes import routes
from haap_rl.runtime.session import Member
from haap_rl.runtime.updates import BETAS, EPSILON


class Tolerance(NamedTuple):
    """How far a plan may be from one process: rounding in another order, over some ten steps."""

    loss: float
    weight: float


WITHIN = {"float32": Tolerance(1e-5, 1e-5), "float64": Tolerance(1e-12, 1e-10)}


class Checkpoint(NamedTuple):
    """A training after `step` steps: {kind: {name: whole tensor}} of weights and moments, whatever the plan."""

    step: int
    state: State


class Trained(NamedTuple):
    """What a rank brings back; the checkpoint is on rank 0, if it was asked for."""

    report: Report | None
    checkpoint: Checkpoint | None


def train(
    member: Member,
    job: Job,
    plan: Plan,
    steps: int,
    pacing: Pacing = NATIVE,
    begin: Checkpoint | None = None,
    keep_state: bool = False,
) -> Trained:
    """Train `plan` on the first ranks of the world, for `steps` steps from `begin` (None: from the seed).

    Every rank of the world must call it; those that the plan does not need return nothing. Raises InputError where the
    world is too small, or the runtime does not do what the plan says.
    """
    check_runs(job, plan)
    check_ranks(plan, member.world_size)
    ways = routes(plan, job.global_batch_size // plan.num_microbatches)
    member.groups.prepare(ways)
    if member.rank >= ways.num_ranks:
        return Trained(None, None)
    member.stage = ways.places[member.rank].stage
    worker = Worker(job, plan, ways, member.rank, member.groups, pacing, member.device, member.watch)
    if begin is not None:
        worker.load_state(begin.state, begin.step)
    losses: list[float] = []
    events: list[tuple[Event, ...]] = []
    for step in range(worker.steps, worker.steps + steps):
        if len(losses) == 1:  # the first step is slower: it counts for losses only
            worker.pacer.paced = worker.pacer.overran = 0
        losses.append(worker.step(job.batch(step)))
        events.append(tuple(worker.events))
        member.done(worker.steps, losses[-1])
    checkpoint = None
    if keep_state:
        member.watch("state", -1)
        checkpoint = Checkpoint(worker.steps, worker.gather_state())
    member.stage = -1
    return Trained(worker.report(losses, events), checkpoint if member.rank == 0 else None)


class OneProcess:
    """The same model in one process: whole batches, one backward pass, torch's own clipping and AdamW."""

    def __init__(self, job: Job) -> None:
        self.job, self.masks = job, Masks(job)
        alone = TensorParallel()
        units = [build_unit(job, alone, 0)]
        first = units[0]
        assert isinstance(first, Embedding)
        tied = first.tokens if job.model.tied_embeddings else None
        units += [build_unit(job, alone, number, tokens=tied) for number in range(1, job.model.num_units)]
        self.units = units
        self.parameters: dict[str, nn.Parameter] = {
            name: parameter for unit in units for name, parameter in unit.named().items()
        }
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=job.learning_rate,
            betas=BETAS,
            eps=EPSILON,
            weight_decay=job.weight_decay,
        )
        self.steps = 0

    def load_state(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint of any plan."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(checkpoint.state["weights"][name])
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(checkpoint.step)),
                    "exp_avg": checkpoint.state["first_moment"][name].clone(),
                    "exp_avg_sq": checkpoint.state["second_moment"][name].clone(),
                }
        self.steps = checkpoint.step

    def step(self, batch: Tensor) -> float:
        """One step; the mean loss per token."""
        samples = range(len(batch))
        hidden = batch[:, :-1]
        for number, unit in enumerate(self.units[:-1]):
            self.masks.begin(self.steps, number, samples)
            hidden = unit(hidden, self.masks)
        loss = self.units[-1](hidden, batch[:, 1:]) / self.job.num_tokens
        self.optimizer.zero_grad()
        loss.backward()
        if self.job.clip_norm:
            nn.utils.clip_grad_norm_(self.parameters.values(), self.job.clip_norm)
        self.optimizer.step()
        self.steps += 1
        return float(loss.detach())

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.parameters.items()}


def one_process(job: Job, steps: int, begin: Checkpoint | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of `steps` steps and the final weights by name, trained in this process on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = OneProcess(job)
        if begin is not None:
            alone.load_state(begin)
        losses = [alone.step(job.batch(step)) for step in range(alone.steps, alone.steps + steps)]
        return losses, dict(alone.weights)
    finally:
        torch.set_num_threads(threads)
