"""The process groups of this process, each made once for any number of plans."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

from haap_rl.runtime.routes import Direction, Routes


class Groups:
    """Groups by their ranks. Every process makes every group, in the same order, whether it is in it or not.

    Activations and gradients have a group each: traffic both ways between two ranks on one NCCL communicator can
    deadlock (pytorch issue 172668).
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._made: dict[tuple[int, ...], Any] = {}
        self._control: dict[int, Any] = {}
        everyone = list(range(dist.get_world_size()))
        self._ways: dict[Direction, Any] = {"down": self._new(everyone), "up": self._new(everyone)}

    def _new(self, ranks: list[int], backend: str | None = None) -> Any:
        return dist.new_group(ranks, timeout=self._timeout, backend=backend)

    def prepare(self, routes: Routes) -> None:
        """Make the groups that a plan needs and that are not there yet."""
        needed = [ranks for stage in routes.stages for ranks in stage]
        for i in range(len(routes.stages)):
            needed += [routes.holders(i, piece) for piece in range(routes.pieces(i))]
        needed.append(routes.outer_ranks)
        for ranks in needed:
            if len(set(ranks)) > 1 and ranks not in self._made:
                self._made[ranks] = self._new(sorted(set(ranks)))
        if routes.num_ranks not in self._control:
            self._control[routes.num_ranks] = self._new(list(range(routes.num_ranks)), "gloo")

    def of(self, ranks: tuple[int, ...]) -> Any:
        """The group of these ranks; None for a single one."""
        return self._made[ranks] if len(set(ranks)) > 1 else None

    def control(self, num_ranks: int) -> Any:
        """All ranks of a plan, for small things that lie on the host, whatever the devices are."""
        return self._control[num_ranks]

    def way(self, direction: Direction) -> Any:
        """The group for activations ("down") or gradients ("up") between stages."""
        return self._ways[direction]


def device_of(rank: int, kind: str) -> torch.device:
    """The device of a local rank: one CUDA device each, or the CPU."""
    return torch.device("cuda", rank % max(1, torch.cuda.device_count())) if kind == "cuda" else torch.device("cpu")
