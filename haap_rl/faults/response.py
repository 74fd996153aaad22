"""What training does while some components are down: the words that policies, objective and simulation share."""

from __future__ import annotations

from typing import NamedTuple


class Response(NamedTuple):
    """How training goes on while a certain set of components is down.

    tokens_per_s     useful tokens, checkpoints and transitions not counted; 0: it is stopped, and waits for repair
    attention_lost   share of the attention gradients (layer by replica) that nobody computes, 0 to 1
    samples_lost     share of each batch that is dropped, 0 to 1
    reason           why it is stopped, one line; "" where it runs
    out_of_memory    it is stopped because a take-over does not fit
    """

    tokens_per_s: float
    attention_lost: float = 0.0
    samples_lost: float = 0.0
    reason: str = ""
    out_of_memory: bool = False

    @property
    def runs(self) -> bool:
        return not self.reason


class Transitions(NamedTuple):
    """Seconds in which nothing is trained, of a plan under a policy.

    failure_s              after a failure that it survives: detection, new process groups, what must be copied
    return_s               when something returns while it runs
    restart_s              when it runs again after having been stopped: start, groups, loading the checkpoint
    checkpoint_s           to write one checkpoint
    checkpoint_interval_s  of training between two checkpoints; what was trained since the last one is lost by a stop
    """

    failure_s: float
    return_s: float
    restart_s: float
    checkpoint_s: float
    checkpoint_interval_s: float
