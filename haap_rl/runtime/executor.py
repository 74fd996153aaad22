"""One rank of a plan that runs: 1F1B over its units, messages, recomputation, and the end of a step.

`Worker.step(batch)` does one training step and returns the loss of the whole batch, the same on every rank. All ranks
of the plan must call it together. Units run one by one, forward and backward, each on a detached input, so that each
can be timed, paced, recomputed and weighed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from haap_rl.problem.plan import Plan
from haap_rl.runtime.device import NATIVE, Pacing, Target, pacer_of, sleep_until
from haap_rl.runtime.groups import Groups
from haap_rl.runtime.job import Job
from haap_rl.runtime.layers import TIED, Cut, Embedding, Head, Masks, TensorParallel, Unit, build_unit, shard, unshard
from haap_rl.runtime.routes import Direction, Message, Place, Routes, incoming, outgoing
from haap_rl.runtime.schedule import Op, operations
from haap_rl.runtime.updates import KINDS, Updates

POSTED_AHEAD = 2  # passes whose messages are awaited before they are needed: what is sent is then already on its way
BEFORE_STEP_S = 0.005  # from agreeing on the beginning of a step to beginning it
Watch = Callable[[str, int], None]  # told what a rank is about to do, and of which micro-batch (-1: none)
State = dict[str, dict[str, Tensor]]


class Event(NamedTuple):
    """Something a rank did, in seconds from the step's beginning; collective_s of it in tensor-parallel collectives.

    kind: "forward", "backward", "wait forward", "wait backward" (for its input), "tie" (a tied
    embedding), "sync", "clip", "optimizer", "gather"
    """

    kind: str
    microbatch: int
    start_s: float
    end_s: float
    collective_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class Held(NamedTuple):
    """Bytes that one rank holds.

    gradients    when the last backward pass is done
    optimizer    from step to step
    activations  most that was kept for backward passes at once, the loss's logits with it, in the first step
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return sum(self)


class Report(NamedTuple):
    """What one rank has to say of a run.

    events            per step
    in_flight         most micro-batches whose activations were held at once
    paced, overran    operations that were to last, and those that took longer, without the first of several steps
    """

    place: Place
    losses: tuple[float, ...]
    events: tuple[tuple[Event, ...], ...]
    in_flight: int
    held: Held
    paced: int
    overran: int


class Kept(NamedTuple):
    """What a unit keeps of one micro-batch: its input, and its output or else the masks to compute it again with."""

    input: Tensor
    output: Tensor | None
    masks: list[Tensor]


def nobody(doing: str, microbatch: int) -> None:
    """Hears what a rank is about to do, and does nothing."""


class Worker:
    """One rank's units, messages and optimiser. Every process of the world makes one per plan, at the same time."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        routes: Routes,
        rank: int,
        groups: Groups,
        pacing: Pacing = NATIVE,
        device: torch.device | None = None,
        watch: Watch = nobody,
    ) -> None:
        self.job, self.routes, self.groups = job, routes, groups
        self.place = routes.places[rank]
        self.device = device or torch.device("cpu")
        self._watch = watch
        self._doing = "idle", -1
        ranks = routes.stages[self.place.stage][self.place.replica]
        self.ranks = TensorParallel(self.place.tp_index, self.place.tp, groups.of(ranks), self._waiting)
        self.masks = Masks(job)
        stage = plan.stages[self.place.stage]
        self.units: list[Unit] = []
        self.full: list[bool] = []  # per unit, whether all of it is recomputed
        left = stage.recompute.num_layers
        for number in range(*routes.units[self.place.stage]):
            mode = stage.recompute.mode if left and 0 < number <= job.model.num_layers else "none"
            left -= mode != "none"
            first = self.units[0] if self.units else None
            tied = first.tokens if isinstance(first, Embedding) and job.model.tied_embeddings else None
            self.units.append(build_unit(job, self.ranks, number, mode, tied).to(self.device))
            self.full.append(mode == "full")
        self.cuts: dict[str, Cut] = {name: cut for unit in self.units for name, cut in unit.cuts.items()}
        named = {name: parameter for unit in self.units for name, parameter in unit.named().items()}
        self.parameters = {name: named[name] for name in self.cuts}
        self.updates = Updates(job, routes, self.place, self.parameters, self.cuts, groups, plan.zero_stage)
        self.pacing = pacing
        self.pacer = pacer_of(pacing, self.place.stage, self.place.replica_group, self.place.group)
        self.steps = 0
        self.in_flight = self.activation_bytes = self.gradient_bytes = 0
        self.events: list[Event] = []
        self._kept: dict[int, list[Kept]] = {}
        self._weights: dict[int, int] = {}  # bytes kept per micro-batch in flight
        self._awaited: dict[tuple[Direction, int], list[tuple[Message, Tensor, Any]]] = {}
        self._sent: list[tuple[Any, Tensor]] = []
        self._first = True  # whether no step was done yet
        self._begun = 0.0
        self._samples = range(0)  # of the global batch, in the pass that runs

    def watch(self, doing: str, microbatch: int) -> None:
        """Tell what this rank is about to do."""
        self._doing = doing, microbatch
        self._watch(doing, microbatch)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Tells that this rank waits for its tensor-parallel peers; on an error that is what it was doing."""
        self._watch("tensor parallel", self._doing[1])
        yield
        self._watch(*self._doing)

    # ---------------------------------------------------------------------------------------- a step
    def step(self, batch: Tensor) -> float:
        """One step on token ids (global batch, seq_len + 1), the same on every rank; the mean loss per token."""
        self.events = []
        self._begin()
        ids = batch.to(self.device)
        losses = torch.zeros((), dtype=torch.float64)
        order = operations(len(self.routes.stages), self.place.stage, self.routes.num_microbatches)
        for n, op in enumerate(order):
            for ahead in order[n : n + 1 + POSTED_AHEAD]:
                self._await(ahead)
            if op.is_forward:
                losses += self._forward(op.microbatch, self._own(ids, op.microbatch)).double().cpu()
            else:
                self._backward(op.microbatch)
        for work, _ in self._sent:
            self.watch("send", -1)
            work.wait()
        self._sent.clear()
        self.gradient_bytes = sum(p.grad.nbytes for p in self.parameters.values() if p.grad is not None)
        self._update()
        if self.place.tp_index:  # each tensor-parallel rank of the last stage has the same loss
            losses.zero_()
        self.watch("loss", -1)
        dist.all_reduce(losses, group=self.groups.control(self.routes.num_ranks))
        self.steps += 1
        self._first = False
        return float(losses) / self.job.num_tokens

    def _begin(self) -> None:
        """Begin together: where time is imposed, at a moment that all agree on, for stamps count from it."""
        self.watch("begin", -1)
        control = self.groups.control(self.routes.num_ranks)
        dist.barrier(group=control)
        moment = torch.tensor(time.monotonic() + BEFORE_STEP_S, dtype=torch.float64)
        if self.pacing.mode == "imposed":
            dist.broadcast(moment, src=0, group=control)
            sleep_until(float(moment))
            self._begun = float(moment)
        else:
            self._begun = time.monotonic()

    def _own(self, ids: Tensor, microbatch: int) -> Tensor:
        """This replica's samples of a micro-batch."""
        begin = microbatch * self.routes.samples
        return ids[begin + self.place.first : begin + self.place.end]

    def _note(self, kind: str, microbatch: int, start: float, collective_s: float = 0.0) -> None:
        if self.device.type == "cuda":  # what was launched counts when it is done
            torch.cuda.synchronize(self.device)
        now = time.monotonic()
        self.events.append(Event(kind, microbatch, start - self._begun, now - self._begun, collective_s))

    # ----------------------------------------------------------------------------------------- passes
    def _forward(self, microbatch: int, ids: Tensor) -> Tensor:
        """One micro-batch through all units; the sum of its losses on the last stage, else 0."""
        hidden = self._receive("down", microbatch) if self.place.stage else None
        self.watch("forward", microbatch)
        start, before_s = time.monotonic(), self.ranks.collective_s
        self.pacer.begin()
        begin = microbatch * self.routes.samples
        self._samples = range(begin + self.place.first, begin + self.place.end)
        kept: list[Kept] = []
        loss = torch.zeros(())
        bytes_kept: dict[int, int] = {}
        for n, unit in enumerate(self.units):
            with self._timed(n, True), self._weighing(bytes_kept):
                hidden = self._forward_unit(n, unit, hidden, ids, kept)
        assert hidden is not None
        if self.place.stage == len(self.routes.stages) - 1:
            loss = hidden
        self._kept[microbatch] = kept
        # of what is recomputed only the input is kept
        inputs = sum(unit.input.nbytes for unit in kept if unit.output is None)
        self._weights[microbatch] = sum(bytes_kept.values()) + inputs
        self.in_flight = max(self.in_flight, len(self._kept))
        if self._first:
            self.activation_bytes = max(self.activation_bytes, sum(self._weights.values()))
        self.pacer.end()
        self._note("forward", microbatch, start, self.ranks.collective_s - before_s)
        self._send("down", microbatch, hidden)
        return loss

    def _forward_unit(self, n: int, unit: Unit, hidden: Tensor | None, ids: Tensor, kept: list[Kept]) -> Tensor:
        number = self.routes.units[self.place.stage][0] + n
        self.masks.begin(self.steps, number, self._samples)
        if isinstance(unit, Embedding):
            output: Tensor = unit(ids[:, :-1], self.masks)
            kept.append(Kept(ids, output, []))
            return output.detach()
        assert hidden is not None
        given = hidden.detach().requires_grad_()
        if isinstance(unit, Head):
            output = unit(given, ids[:, 1:])
            kept.append(Kept(given, output, []))
        elif self.full[n]:
            state = self.masks.state()
            with torch.no_grad():
                output = unit(given, self.masks)
            kept.append(Kept(given, None, state))
        else:
            output = unit(given, self.masks)
            kept.append(Kept(given, output, []))
        return output.detach()

    def _backward(self, microbatch: int) -> None:
        """The gradients of one micro-batch, of all units and of what was received."""
        last = self.place.stage == len(self.routes.stages) - 1
        gradient = None if last else self._receive("up", microbatch)
        self.watch("backward", microbatch)
        start, before_s = time.monotonic(), self.ranks.collective_s
        self.pacer.begin(is_forward=False)
        kept = self._kept[microbatch]
        for n in reversed(range(len(self.units))):
            unit, (given, output, state) = self.units[n], kept.pop()
            with self._timed(n, False):
                if output is None:
                    self.masks.restore(state)
                    output = unit(given, self.masks)
                if gradient is None:  # of the loss: a mean over the tokens of the whole batch, never over a slice
                    gradient = torch.full_like(output, 1.0 / self.job.num_tokens)
                torch.autograd.backward(output, gradient)
            gradient = given.grad
        del self._kept[microbatch], self._weights[microbatch]
        self.pacer.end()
        self._note("backward", microbatch, start, self.ranks.collective_s - before_s)
        if gradient is not None:
            self._send("up", microbatch, gradient)

    def _timed(self, n: int, is_forward: bool) -> _Timed:
        table = self.pacer.table
        target = None if table is None else (table.forward if is_forward else table.backward)[n]
        return _Timed(self, target)

    def _weighing(self, found: dict[int, int]) -> Any:
        """Notes the bytes that autograd keeps, each storage once, weights left out; in the first step only."""
        if not self._first:
            return contextlib.nullcontext()
        weights = {parameter.untyped_storage().data_ptr() for parameter in self.parameters.values()}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)

    # --------------------------------------------------------------------------------------- messages
    def _await(self, op: Op) -> None:
        """Post the receives of a pass, once."""
        direction: Direction = "down" if op.is_forward else "up"
        key = (direction, op.microbatch)
        if key in self._awaited:
            return
        group, posted = self.groups.way(direction), []
        for message in incoming(self.routes, self.place, direction):
            values = (message.end - message.first) * self.job.seq_len * self.job.model.hidden + self._stamped
            buffer = torch.empty(values, dtype=self.job.torch_dtype, device=self.device)
            work = dist.irecv(buffer, src=message.sender, group=group, tag=op.microbatch)
            posted.append((message, buffer, work))
        self._awaited[key] = posted

    @property
    def _stamped(self) -> int:
        """1 where a message ends with the moment it was sent, so that the link's time can be imposed."""
        return int(self.pacing.mode == "imposed")

    def _receive(self, direction: Direction, microbatch: int) -> Tensor:
        """The samples of this replica, put together from all messages of a pass."""
        kind = "wait forward" if direction == "down" else "wait backward"
        self.watch(kind, microbatch)
        start = time.monotonic()
        shape = (self.place.end - self.place.first, self.job.seq_len, self.job.model.hidden)
        whole = torch.empty(shape, dtype=self.job.torch_dtype, device=self.device)
        table = self.pacer.table
        for message, buffer, work in self._awaited[direction, microbatch]:
            work.wait()
            if table is not None:
                on_its_way_s = table.down_s if direction == "down" else table.up_s
                sleep_until(self._begun + float(buffer[-1]) + on_its_way_s)
                buffer = buffer[:-1]
            part = whole[message.first - self.place.first : message.end - self.place.first]
            part.copy_(buffer.view_as(part))
        self._awaited[direction, microbatch] = []
        self._note(kind, microbatch, start)
        return whole

    def _send(self, direction: Direction, microbatch: int, values: Tensor) -> None:
        """Send each receiver its samples, without waiting for it."""
        self._sent = [(work, held) for work, held in self._sent if not work.is_completed()]
        for message in outgoing(self.routes, self.place, direction):
            part = values.detach()[message.first - self.place.first : message.end - self.place.first].reshape(-1)
            if self._stamped:
                part = torch.cat([part, part.new_tensor([time.monotonic() - self._begun])])
            part = part.contiguous()
            work = dist.isend(part, dst=message.receiver, group=self.groups.way(direction), tag=microbatch)
            self._sent.append((work, part))

    # ------------------------------------------------------------------------------------ the update
    def _update(self) -> None:
        """Sum gradients, clip, step, hand weights round. Half of an imposed synchronisation is the gathering."""
        table = self.pacer.table
        sync_s, optimizer_s = (table.sync_s / 2, table.optimizer_s) if table is not None else (0.0, 0.0)
        parts: tuple[tuple[str, Callable[[], object], float], ...] = (
            *((("tie", self.updates.tie, 0.0),) if self.updates.ties else ()),
            ("sync", self.updates.reduce, sync_s),
            ("clip", self.updates.clip, 0.0),
            ("optimizer", self.updates.apply, optimizer_s),
            ("gather", self.updates.gather, sync_s),
        )
        for kind, work, seconds in parts:
            self.watch(kind, -1)
            start = time.monotonic()
            work()
            self.pacer.rest(start, seconds, kind == "optimizer")
            self._note(kind, -1, start)
        self._awaited.clear()

    # ------------------------------------------------------------------------------------- the state
    def gather_state(self) -> State:
        """{kind: {name: whole tensor}} of weights and moments, whatever the plan; on rank 0, {} on the others."""
        mine = self.updates.state()
        shards = {
            name: (self.place.tp_index, self.cuts[name], {kind: mine[kind][name].cpu() for kind in KINDS})
            for name in self.parameters
            if self.place.replica == 0 and name != TIED
        }
        found: list[Any] | None = [None] * self.routes.num_ranks if self.place.rank == 0 else None
        dist.gather_object(shards, found, dst=0, group=self.groups.control(self.routes.num_ranks))
        if found is None:
            return {}
        by_name: dict[str, list[Any]] = {}
        for theirs in found:
            for name, entry in theirs.items():
                by_name.setdefault(name, []).append(entry)
        state: State = {kind: {} for kind in KINDS}
        for name, entries in by_name.items():
            entries.sort(key=lambda entry: entry[0])
            for kind in KINDS:
                state[kind][name] = unshard([parts[kind] for _, _, parts in entries], entries[0][1])
        return state

    def load_state(self, state: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        """Go on from a state that `gather_state` returned after `step` steps, of this plan or any other."""
        shards = {
            kind: {
                name: shard(
                    state[kind]["embedding.tokens" if name == TIED else name],
                    cut,
                    self.place.tp_index,
                    self.place.tp,
                ).to(self.device)
                for name, cut in self.cuts.items()
            }
            for kind in KINDS
        }
        self.updates.load(shards, step)
        self.steps = step

    def report(self, losses: list[float], events: list[tuple[Event, ...]]) -> Report:
        """What this rank has to say of the steps it has done."""
        weights = sum(parameter.nbytes for parameter in self.parameters.values())
        held = Held(weights, self.gradient_bytes, self.updates.moment_bytes, self.activation_bytes)
        pacer = self.pacer
        return Report(self.place, tuple(losses), tuple(events), self.in_flight, held, pacer.paced, pacer.overran)


class _Timed:
    """Around one unit's work: it lasts as long as the worker's pacer says."""

    def __init__(self, worker: Worker, target: Target | None) -> None:
        self.worker, self.target = worker, target

    def __enter__(self) -> None:
        self._start, self._cpu = time.perf_counter(), time.thread_time()
        self._collective = self.worker.ranks.collective_s

    def __exit__(self, *error: object) -> None:
        if error[0] is None and self.worker.pacer.mode != "native":
            self.worker.pacer.unit(
                self.target,
                time.perf_counter() - self._start,
                time.thread_time() - self._cpu,
                self.worker.ranks.collective_s - self._collective,
            )
