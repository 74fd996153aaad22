"""The same with real processes: each rank is one, gradients meet over gloo, and one that is killed is taken over from.

A killed process breaks its process group, and no group can shrink. So time is cut into generations: in each a new group
of the live ranks meets through a file of its own, told to by a driver outside of all groups. A generation ends when a
member dies, at the step where a repaired rank is to return, or with training. Whoever begins a generation behind the
others, a returned rank or one that lost the last step's sum, copies weights, optimiser state and projectors from a
member that is not. Where nobody can take over, all ranks end; when enough of them are repaired, they start from the
last checkpoint.

A grid here has one stage: a rank that dies is a whole replica, and its neighbour computes its samples too.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import signal
import socket
import tempfile
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from haap_rl.mecefo.aggregate import average, counts
from haap_rl.mecefo.blocks import DegradableModel
from haap_rl.mecefo.checkpoint import Checkpoints, Training
from haap_rl.mecefo.failures import UNBROKEN, Cell, Restart, Schedule, Timeline, restarted, takers
from haap_rl.mecefo.job import Job
from haap_rl.mecefo.options import MecefoOptions, Techniques

Watch = Callable[[int, Mapping[int, int]], None]
START_S = 120.0  # for Python and torch to be loaded
TIMEOUT_S = 30.0  # of a collective


class Generation(NamedTuple):
    """Steps `begin` to `until` (not included) with a group of `members`; those in `behind` copy from `source` first."""

    number: int
    members: tuple[int, ...]
    begin: int
    until: int
    source: int
    behind: tuple[int, ...]
    timeline: Timeline


class Progress(NamedTuple):
    """A member has done the step before `step`, of mean loss `loss`."""

    step: int
    loss: float


class Waiting(NamedTuple):
    """A rank has begun or is out of its group, having done all steps before `step`, and waits for a generation."""

    step: int


class Failed(NamedTuple):
    """A member met an error that is no lost peer."""

    report: str


class BrokenGroup(Exception):
    """A collective was not completed: some member is gone."""


@dataclass(slots=True)
class ProcessRun:
    """What came of a training.

    losses       mean loss of each step; of one that was done again, the last
    generations  that there were, some of which ended early
    weights      {rank: its final state dict} of the ranks that were live in the end
    timeline     its restarts, with the steps lost and waited
    """

    losses: list[float] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    timeline: Timeline = UNBROKEN


# ------------------------------------------------------------------------------------------------ a rank
class Replica:
    """One rank's model and optimiser, with its part of every step."""

    def __init__(self, job: Job, rank: int, ranks: int, options: MecefoOptions, techniques: Techniques) -> None:
        self.job, self.rank, self.ranks, self.options = job, rank, ranks, options
        self.model = job.model()
        self.degradable = DegradableModel(self.model, options, techniques)
        self.optimizer = job.optimizer(self.model)
        self.training = Training(self.model, self.optimizer, self.degradable.projectors)

    @property
    def step(self) -> int:
        """Steps done."""
        return self.training.step

    def tasks(self, dead: frozenset[int]) -> tuple[list[Tensor], frozenset[int]]:
        """The samples this rank runs in its next step, its own first; and the ranks whose task is affected."""
        who = takers(dead, self.ranks, self.options)
        parts = [self.job.batch(self.step, self.rank)]
        for task, peers in who.items():
            if self.rank in peers:
                batch = self.job.batch(self.step, task)
                parts.append(batch.tensor_split(len(peers))[peers.index(self.rank)])
        return [part for part in parts if len(part)], dead.union(*who.values())

    def train(self, dead: frozenset[int], die: Callable[[], None] | None) -> float:
        """One step together with the other live ranks; its mean loss. `die` is called before anything is shared."""
        self.degradable.projectors.refresh(self.step)
        parts, hit = self.tasks(dead)
        affected, any_unaffected = self.rank in hit, len(hit) < self.ranks
        layers = range(len(self.degradable.blocks)) if affected else ()
        keeps_all = not any_unaffected and self.options.empty_set == "use_degraded"
        self.degradable.degrade(layers, layers if keeps_all else ())
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        skipped = {name: self.degradable.is_skipped(name) for name in named}
        sums = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
        losses = torch.zeros(())
        for part in parts:
            share = len(part) / len(parts[0])  # of a task
            self.model.zero_grad(set_to_none=True)
            loss = self.job.loss(self.model, part)
            loss.backward()  # type: ignore[no-untyped-call]
            losses += share * loss.detach()
            for name, parameter in named.items():
                counted = counts(affected, skipped[name], any_unaffected, self.options)
                if counted and parameter.grad is not None:
                    sums[name] += share * parameter.grad
        self.degradable.degrade(())
        if die is not None:
            die()
        flat = nn.utils.parameters_to_vector([*sums.values(), losses])
        with lost_peers():
            dist.all_reduce(flat)
        at = 0
        for name, parameter in named.items():
            total = flat[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
            tasks = sum(counts(rank in hit, skipped[name], any_unaffected, self.options) for rank in range(self.ranks))
            parameter.grad = average(total, tasks, parameter, self.options.empty_set)
        self.job.update(self.model, self.optimizer, self.step)
        self.training.losses.append(float(flat[-1]) / self.ranks)
        return self.training.losses[-1]


@contextlib.contextmanager
def lost_peers() -> Iterator[None]:
    """Turn what torch raises where a peer is gone, or does not answer in time, into BrokenGroup."""
    try:
        yield
    except RuntimeError as error:  # all errors of torch.distributed are
        raise BrokenGroup from error


def work(pipe: Connection, replica: Replica, setting: Setting, folder: str) -> None:
    """Do one generation after the other as told through `pipe`, until told to hand in the weights."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)  # no handler, no clean-up: what a lost machine looks like to its peers

    pipe.send(Waiting(replica.step))
    while (generation := pipe.recv()) is not None:
        dead = frozenset(range(replica.ranks)).difference(generation.members)
        me = generation.members.index(replica.rank)
        with contextlib.suppress(BrokenGroup):
            with lost_peers():
                dist.init_process_group(
                    "gloo",
                    init_method=Path(folder, str(generation.number)).as_uri(),
                    rank=me,
                    world_size=len(generation.members),
                    timeout=datetime.timedelta(seconds=setting.timeout_s),
                )
            if generation.behind:
                source = generation.members.index(generation.source)
                sent = [replica.training.state() if me == source else None]
                with lost_peers():
                    dist.broadcast_object_list(sent, src=source)
                if replica.rank in generation.behind and sent[0] is not None:
                    replica.training.load(sent[0])
            while replica.step < generation.until:
                fails = Cell(replica.rank, 0) in setting.schedule.down(
                    replica.step, setting.options, generation.timeline
                )
                loss = replica.train(dead, die if fails else None)
                pipe.send(Progress(replica.step, loss))
                if me == 0:
                    setting.checkpoints.keep(replica.training, generation.timeline, setting.steps)
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        pipe.send(Waiting(replica.step))
    content = io.BytesIO()
    torch.save(replica.model.state_dict(), content)
    pipe.send(content.getvalue())


def begin(pipe: Connection, rank: int, setting: Setting, folder: str) -> None:
    """Entry of a rank's process. It ends with its parent, however that was ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver ends its ranks
    parent = parent_process()

    def end_with_it() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=end_with_it, daemon=True).start()
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback[0]
    torch.set_num_threads(1)
    try:
        replica = Replica(setting.job, rank, setting.ranks, setting.options, setting.techniques)
        setting.checkpoints.restore(replica.training)
        work(pipe, replica, setting, folder)
    except Exception:
        pipe.send(Failed(traceback.format_exc()))


# ------------------------------------------------------------------------------------------------ the driver
@dataclass(frozen=True, slots=True)
class Setting:
    """A training in processes: what every rank is told."""

    job: Job
    ranks: int
    steps: int
    schedule: Schedule
    options: MecefoOptions
    techniques: Techniques
    timeout_s: float
    checkpoints: Checkpoints


class Rank:
    """The driver's end of a rank's process."""

    def __init__(self, rank: int, setting: Setting, folder: str) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__, "torch._dynamo"])  # once for all ranks; optimisers load the latter
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=begin, args=(theirs, rank, setting, folder), daemon=True)
        self.process.start()
        theirs.close()  # so that the process's end is the pipe's
        self.step = 0  # steps whose outcome its weights have, as far as has been heard

    def end(self) -> None:
        """End the process, if it has not ended."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Driver:
    """Starts ranks, forms generations of those that live, and hears when one is lost."""

    def __init__(self, setting: Setting, folder: str, watch: Watch) -> None:
        self.setting, self.folder, self.watch = setting, folder, watch
        self.run = ProcessRun()
        self.live: dict[int, Rank] = {}
        self.returns: dict[int, int | None] = {}  # dead rank -> the step before which it is back; None: never

    def train(self) -> None:
        """Generation after generation, until every live rank has done all steps."""
        last = self.setting.checkpoints.last()  # of a training that was ended
        if last is not None:
            self.run.timeline = last[1]
        gone: frozenset[int] = frozenset()
        while True:
            try:
                self.start_all(gone)
                while any(member.step < self.setting.steps for member in self.live.values()):
                    done = max(member.step for member in self.live.values())
                    self.start([rank for rank, step in self.returns.items() if step == done])
                    self.lead(self.next_generation(done))
                break
            except Restart as reason:
                gone = self.end_all(reason)
        for rank, member in sorted(self.live.items()):
            with contextlib.suppress(OSError, EOFError):  # of one that dies now
                member.pipe.send(None)
                if member.pipe.poll(self.setting.timeout_s):
                    self.run.weights[rank] = torch.load(io.BytesIO(member.pipe.recv()))

    def start_all(self, gone: Collection[int]) -> None:
        """Start all ranks but those that are gone for good or down, from the last checkpoint if there is one."""
        last = self.setting.checkpoints.last()
        self.run.losses[:] = last[0]["losses"] if last else []
        step = len(self.run.losses)
        returns = {rank: self.step_of_return(rank, step) for rank in range(self.setting.ranks)}
        self.returns = {rank: back for rank, back in returns.items() if back is not None} | dict.fromkeys(gone)
        self.start([rank for rank in range(self.setting.ranks) if rank not in self.returns])

    def end_all(self, reason: Restart) -> frozenset[int]:
        """End all ranks and put the clock forward to when enough are repaired; the ranks that are gone for good.

        Raises Restart where there is no such time.
        """
        for member in self.live.values():
            member.end()
        self.live.clear()
        gone = frozenset(rank for rank, step in self.returns.items() if step is None)
        last = self.setting.checkpoints.last()
        self.run.timeline = restarted(
            self.run.timeline,
            len(self.run.losses),
            len(last[0]["losses"]) if last else 0,
            self.setting.steps,
            self.setting.schedule,
            self.setting.options,
            lambda down: takers(gone.union(cell.rank for cell in down), self.setting.ranks, self.setting.options),
            reason,
        )
        return gone

    def step_of_return(self, rank: int, step: int) -> int | None:
        """The step before which a rank is back that is dead in `step`; None for one that did not die of an outage."""
        return self.setting.schedule.returns(Cell(rank, 0), step, self.setting.options, self.run.timeline)

    def next_generation(self, done: int) -> Generation:
        """One of all live ranks, up to the next return."""
        members = tuple(sorted(self.live))
        return Generation(
            number=len(self.run.generations),
            members=members,
            begin=done,
            until=min([self.setting.steps, *(step for step in self.returns.values() if step is not None)]),
            source=next(rank for rank in members if self.live[rank].step == done),
            behind=tuple(rank for rank in members if self.live[rank].step < done),
            timeline=self.run.timeline,
        )

    def start(self, ranks: Iterable[int]) -> None:
        """Start processes, and wait until they have loaded what they need."""
        for rank in ranks:
            self.returns.pop(rank, None)
            self.live[rank] = Rank(rank, self.setting, self.folder)
        self.collect(ranks, START_S)

    def lead(self, generation: Generation) -> None:
        """Let a generation run, until each of its members has ended it or is lost."""
        self.run.generations.append(generation)
        for rank in generation.members:
            with contextlib.suppress(OSError):  # the end of a dead one's pipe is heard below
                self.live[rank].pipe.send(generation)
        # twice what collectives wait for, so that those who wait for a silent one are heard before
        self.collect(generation.members, 2 * self.setting.timeout_s)

    def collect(self, ranks: Iterable[int], timeout_s: float) -> None:
        """Hear all that ranks say, until each waits for a generation or is lost.

        Raises TimeoutError where all of them are silent for so long, else those that are count as lost; and Restart
        where nobody can take over from the lost ones.
        """
        waiting = set(ranks)
        asked = len(waiting)
        while waiting:
            pipes = {self.live[rank].pipe: rank for rank in waiting}
            ready = connection.wait(list(pipes), timeout_s if len(waiting) == asked else timeout_s / 2)
            if not ready and len(waiting) == asked:
                raise TimeoutError(f"mecefo: none of {asked} processes has said anything for {timeout_s:g} s")
            for rank in [] if ready else sorted(waiting):
                self.lose(rank, waiting)
            for pipe in ready:
                self.hear(pipes[pipe], waiting)  # type: ignore[index]
        takers(self.returns, self.setting.ranks, self.setting.options)

    def hear(self, rank: int, waiting: set[int]) -> None:
        """Take note of a message, or of the end of the process that would have sent one."""
        member = self.live[rank]
        try:
            message = member.pipe.recv()
        except (EOFError, OSError):
            self.lose(rank, waiting)
            return
        if isinstance(message, Failed):
            raise RuntimeError(f"mecefo: rank {rank} failed\n{message.report}")
        member.step = message.step
        if isinstance(message, Waiting):
            waiting.discard(rank)
        elif message.step > len(self.run.losses):
            self.run.losses.append(message.loss)
            self.watch(message.step, {rank: int(member.process.pid or 0) for rank, member in self.live.items()})

    def lose(self, rank: int, waiting: set[int]) -> None:
        """Count a rank as dead, and make it so."""
        waiting.discard(rank)
        member = self.live.pop(rank)
        self.returns[rank] = self.step_of_return(rank, len(self.run.losses))
        member.end()


def train_in_processes(
    job: Job,
    ranks: int,
    steps: int,
    schedule: Schedule,
    options: MecefoOptions,
    techniques: Techniques | None = None,
    timeout_s: float = TIMEOUT_S,
    watch: Watch = lambda step, pids: None,
    checkpoints: Checkpoints | None = None,
) -> ProcessRun:
    """Train with a process per rank, in which `schedule` kills and starts processes; anybody else may kill them too.

    A rank whose outage begins at a step is killed in the middle of it, before it has shared a gradient, and the others
    do the step again. It is started anew where its outage ends. One that dies without an outage stays away. Where
    nobody can take over, all ranks end, and training goes on from the last checkpoint when `schedule`, which is by the
    clock that `Timeline` explains, has repaired enough.

    watch        told after every step of the number done and {rank: process id}
    timeout_s    of a collective; a member that is silent for longer is taken for dead
    checkpoints  every 50 steps by default, and lost with the training; with a file from before, training goes on there
    Raises Restart where failures outpace repair or those who are gone do not return, TimeoutError, RuntimeError with
    the report of a rank's own error, and ValueError for a file that is not of this training.
    """
    if any(outage.cell.stage for outage in schedule.outages):
        raise ValueError("mecefo: a process is a whole replica, of stage 0; give outages of stage 0")
    checkpoints = checkpoints or Checkpoints()
    with tempfile.TemporaryDirectory(prefix="mecefo-") as folder:
        if checkpoints.path is None:
            checkpoints = replace(checkpoints, path=Path(folder, "checkpoint"))
        setting = Setting(job, ranks, steps, schedule, options, techniques or Techniques(), timeout_s, checkpoints)
        driver = Driver(setting, folder, watch)
        try:
            driver.train()
        finally:
            for member in driver.live.values():
                member.end()
    return driver.run
