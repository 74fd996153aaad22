"""Processes that run plans: one process group for any number of them, a driver that hears when one dies or hangs.

The driver is outside of the group. It holds the store through which ranks meet, hands every rank the same function to
call, and collects what they return. Each rank notes in shared memory what it is doing, so that one that died or does
not answer can be named with its stage and operation. Whatever happens, all ranks end: the driver kills them, and one
whose driver is gone ends itself.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from haap_rl.problem.errors import InputError
from haap_rl.runtime.groups import Groups, device_of
from haap_rl.runtime.orphans import BEAT_S, end_with_parent

START_S = 120.0  # for Python and torch to be loaded
TIMEOUT_S = 60.0  # without any rank going on
LATER = (
    2.0  # torch's own time-outs, in terms of ours: whoever waits is not to fail before the driver has named the cause
)
MOST_RANKS = 128  # processes of one machine
DOING = (
    "starting", "idle", "begin", "forward", "backward", "tensor parallel", "wait forward", "wait backward",
    "send", "tie", "sync", "clip", "optimizer", "gather", "loss", "state",
)  # fmt: skip
WAITS = (
    "begin",
    "tensor parallel",
    "wait forward",
    "wait backward",
    "send",
    "tie",
    "sync",
    "clip",
    "gather",
    "loss",
    "state",
)  # for others
TOLD = 3  # exit status of a rank that has said what was wrong
NOTED = 4  # numbers that a rank notes: stage, index in DOING, micro-batch, since when
POLL_S = 0.2
SILENT_S = 3 * BEAT_S  # without a beat, after which a process does not go on at all
SHORTEST_S, LONGEST_S = 1.0, 1e6  # time-outs
OnStep = Callable[[int, float], None]  # told the steps that are done, and the last one's loss


class RankError(InputError):
    """A rank died, hung or lost its peers; the message names it, its stage and its operation."""


class Member:
    """One rank's place in the world, as the functions that it is handed see it."""

    def __init__(
        self, rank: int, world_size: int, kind: str, timeout_s: float, notes: Any = None, on_step: OnStep | None = None
    ) -> None:
        self.rank, self.world_size, self.kind = rank, world_size, kind
        self.device = device_of(rank, kind)
        self.stage = -1
        self.doing = "starting", -1
        self._notes, self._on_step = notes, on_step
        self.groups = Groups(LATER * timeout_s)

    def watch(self, doing: str, microbatch: int) -> None:
        """Note what this rank is about to do, for the driver."""
        self.doing = doing, microbatch
        if self._notes is not None:
            at = NOTED * self.rank
            self._notes[at : at + NOTED] = [self.stage, DOING.index(doing), microbatch, time.monotonic()]

    def done(self, steps: int, loss: float) -> None:
        """Note that so many steps of a training are done; what rank 0 notes is told."""
        if self.rank == 0 and self._notes is not None:
            self._notes[-2:] = [steps, loss]
        elif self.rank == 0 and self._on_step is not None:
            self._on_step(steps, loss)

    @property
    def where(self) -> str:
        return described(self.rank, self.stage, *self.doing)


def described(rank: int, stage: int, doing: str, microbatch: int) -> str:
    """A rank and what it does, in words."""
    of = f" of micro-batch {microbatch}" if microbatch >= 0 else ""
    return f"rank {rank}{f' (stage {stage})' if stage >= 0 else ''} in {doing!r}{of}"


class Call(NamedTuple):
    """A function for all ranks: called as function(member, *arguments)."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class Failed(NamedTuple):
    """A rank met an error. of_input: its text is one line for the person who typed the command."""

    text: str
    of_input: bool
    lost_peer: bool


# ------------------------------------------------------------------------------------------------ a rank
def serve(
    pipe: Connection, rank: int, world_size: int, port: int, kind: str, timeout_s: float, notes: Any, beats: Any
) -> None:
    """Entry of a rank's process: join the group, then do what the driver says. It ends with the driver."""
    end_with_parent(lambda: beats.__setitem__(rank, time.monotonic()))
    stay_local()
    torch.set_num_threads(1)
    doing = "starting"
    member: Member | None = None
    try:
        later = datetime.timedelta(seconds=LATER * timeout_s)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=later)  # type: ignore[attr-defined]
        dist.init_process_group(backend(kind), store=store, rank=rank, world_size=world_size, timeout=later)
        if kind == "cuda":
            torch.cuda.set_device(device_of(rank, kind))
        member = Member(rank, world_size, kind, timeout_s, notes)
        member.watch("idle", -1)
        pipe.send(None)
        while (call := pipe.recv()) is not None:
            result = call.function(member, *call.arguments)
            member.watch("idle", -1)
            pipe.send(result)
    except (EOFError, BrokenPipeError):
        return  # the driver is gone
    except InputError as error:
        _tell(pipe, Failed(str(error), True, False))
    except Exception as error:
        doing = member.where if member is not None else f"rank {rank} in {doing!r}"
        lost = isinstance(error, RuntimeError) and (member is None or member.doing[0] in WAITS)
        brief = str(error).strip().splitlines()[0][:200] if lost else traceback.format_exc()
        _tell(pipe, Failed(f"{doing}: {brief}", False, lost))
    os._exit(TOLD)  # no destructor of a broken group may block


def _tell(pipe: Connection, message: Failed) -> None:
    with contextlib.suppress(OSError):
        pipe.send(message)


def stay_local() -> None:
    """Let gloo use the loopback device, whatever the host's name resolves to."""
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])


def backend(kind: str) -> str:
    """nccl for what lies on CUDA devices; gloo for the rest."""
    return "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"


# ------------------------------------------------------------------------------------------------ the driver
class Session:
    """Ranks that wait for functions to call. Use it as a context; leaving it ends all of them.

    port       of the store on this machine; 0: a free one
    timeout_s  without any rank going on, after which the run is ended; from 1 to 1e6
    on_step    told of steps that are done, now and then
    Raises InputError where the port is taken, RankError where a rank cannot be started.
    """

    def __init__(
        self,
        ranks: int,
        kind: str = "cpu",
        port: int = 0,
        timeout_s: float = TIMEOUT_S,
        on_step: OnStep | None = None,
    ) -> None:
        if ranks > MOST_RANKS:
            raise InputError(f"runtime: processes={ranks} on one machine; use at most {MOST_RANKS}, or torchrun")
        check_timeout(timeout_s)
        self.ranks, self.timeout_s, self._on_step = ranks, timeout_s, on_step
        try:
            self._store: Any = dist.TCPStore(  # type: ignore[attr-defined]
                "127.0.0.1", port, is_master=True, wait_for_workers=False
            )
        except RuntimeError:  # torch's DistNetworkError
            raise InputError(
                f"runtime: port={port} cannot be used on this machine, most likely it is in use; give another, or "
                "port=0 for a free one"
            ) from None
        context = get_context("forkserver")
        context.set_forkserver_preload(["haap_rl.runtime.executor", "torch._dynamo"])  # once for all ranks
        self._notes = context.RawArray("d", NOTED * ranks + 2)  # of each rank, then steps done and a loss
        self._beats = context.RawArray("d", ranks)  # when each rank last went on at all
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                arguments = (theirs, rank, ranks, self._store.port, kind, timeout_s, self._notes, self._beats)
                process = context.Process(target=serve, args=arguments, daemon=True)
                process.start()
                theirs.close()  # so that the process's end is the pipe's
                self._pipes.append(ours)
                self._processes.append(process)
            self._collect(START_S)
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    @property
    def pids(self) -> list[int]:
        return [int(process.pid or 0) for process in self._processes]

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What function(member, *arguments) returns on each rank, in their order.

        Raises RankError where a rank dies, hangs or loses its peers, InputError as a rank raises it, RuntimeError with
        the report of any other error. The session is over then.
        """
        try:
            for pipe in self._pipes:
                with contextlib.suppress(OSError):  # the end of a dead one's pipe is heard below
                    pipe.send(Call(function, arguments))
            return self._collect(self.timeout_s)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """End all ranks."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        self._store = None  # its port is free again

    # -------------------------------------------------------------------------------------- listening
    def _collect(self, timeout_s: float) -> list[Any]:
        """One message of each rank."""
        found: dict[int, Any] = {}
        ranks = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        heard, last = list(self._notes), time.monotonic()
        while len(found) < len(self._pipes):
            waiting = [pipe for pipe, rank in ranks.items() if rank not in found]
            for pipe in connection.wait(waiting, POLL_S):
                rank = ranks[pipe]  # type: ignore[index]
                try:
                    message = self._pipes[rank].recv()
                except (EOFError, OSError):
                    raise RankError(self._died(rank)) from None
                if isinstance(message, Failed):
                    self._failed(message)
                found[rank] = message
                last = time.monotonic()
            if (notes := list(self._notes)) != heard:
                if self._on_step is not None and notes[-2:] != heard[-2:]:
                    self._on_step(int(notes[-2]), notes[-1])
                heard, last = notes, time.monotonic()
            if time.monotonic() - last > timeout_s:
                raise RankError(self._hung(timeout_s, [rank for rank in ranks.values() if rank not in found]))
        return [found[rank] for rank in range(len(self._pipes))]

    def _described(self, rank: int) -> str:
        stage, doing, microbatch, _ = self._notes[NOTED * rank : NOTED * (rank + 1)]
        return described(rank, int(stage), DOING[int(doing)], int(microbatch))

    def _died(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(1.0)
        code = process.exitcode
        how = f"by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with status {code}"
        return f"runtime: {self._described(rank)}: its process ended {how}; all ranks were ended"

    def _failed(self, message: Failed) -> None:
        """Raise what a rank's message means; where it lost a peer, the peer is named."""
        if message.of_input:
            raise InputError(message.text)
        until = time.monotonic() + (2.0 if message.lost_peer else 0.0)
        while True:
            for rank, process in enumerate(self._processes):
                if process.exitcode not in (None, TOLD):
                    raise RankError(self._died(rank))
            if time.monotonic() >= until:
                break
            time.sleep(POLL_S)
        if not message.lost_peer:
            raise RuntimeError(f"runtime: {message.text}")
        raise RankError(f"runtime: {message.text}; all ranks were ended")

    def _hung(self, timeout_s: float, waiting: list[int]) -> str:
        """Name the rank that others wait for: one that does not go on at all, or that is in no wait itself, or else
        the one that waits longest."""
        now = time.monotonic()

        def guilt(rank: int) -> tuple[bool, bool, float]:
            _, doing, _, since = self._notes[NOTED * rank : NOTED * (rank + 1)]
            return now - self._beats[rank] < SILENT_S, DOING[int(doing)] in WAITS, since

        worst = min(waiting, key=guilt)
        return f"runtime: {self._described(worst)}: nothing for {timeout_s:g} s; all ranks were ended (timeout_s)"


@contextlib.contextmanager
def from_torchrun(timeout_s: float = TIMEOUT_S, on_step: OnStep | None = None) -> Iterator[Member]:
    """This process as a rank of the world that torchrun has made. Raises RankError where peers are lost."""
    check_timeout(timeout_s)
    kind = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= _local_world() else "cpu"
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    member: Member | None = None
    try:
        dist.init_process_group(backend(kind), timeout=datetime.timedelta(seconds=timeout_s))
        member = Member(rank, dist.get_world_size(), kind, timeout_s / LATER, on_step=on_step)
        if kind == "cuda":
            member.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        yield member
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        where = member.where if member is not None else f"rank {rank} in 'starting'"
        if member is not None and (member.doing[0] not in WAITS or isinstance(error, ValueError)):
            raise
        raise RankError(f"runtime: {where}: {str(error).strip().splitlines()[0][:200]}") from None


def _local_world() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def under_torchrun() -> bool:
    """Whether torchrun, or what speaks like it, has started this process as one of several."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def check_timeout(timeout_s: float) -> None:
    """Raise InputError for a time-out that nothing could keep, or that is none."""
    if not SHORTEST_S <= timeout_s <= LONGEST_S:
        raise InputError(f"runtime: timeout_s={timeout_s:g} must be from {SHORTEST_S:g} to {LONGEST_S:g} seconds")
