"""Bugs planted in every rank, to see that a comparison with one process finds them."""

import contextlib
import os
import signal
import threading
import time
from unittest.mock import patch

from haap_rl.runtime import layers
from haap_rl.runtime.executor import Worker
from haap_rl.runtime.training import train
from haap_rl.runtime.updates import Updates


def mean_for_sum():
    """What DistributedDataParallel does: the mean over replicas of each replica's mean over its own samples."""
    right = Updates.gradients

    def wrong(self):
        replicas = len(self.routes.stages[self.place.stage])
        share = self.routes.samples / (self.place.end - self.place.first) / replicas
        return {name: share * gradient for name, gradient in right(self).items()}

    return patch.object(Updates, "gradients", wrong)


def swapped_slice():
    """The first stage's replicas take each other's samples of the inputs."""
    right = Worker._own

    def wrong(self, ids, microbatch):
        mine = right(self, ids, microbatch)
        replicas = self.routes.stages[self.place.stage]
        if self.place.stage:
            return mine
        other = self.routes.places[replicas[-1 - self.place.replica][0]]
        begin = microbatch * self.routes.samples
        return ids[begin + other.first : begin + other.end]

    return patch.object(Worker, "_own", wrong)


def no_sum_of_input_gradients():
    """The gradient of a column-parallel product's input stays this rank's part of it."""
    return patch.object(layers._Copied, "backward", staticmethod(lambda ctx, gradient: (gradient, None)))


def no_sum_of_outputs():
    """The output of a row-parallel product stays this rank's part of it."""
    return patch.object(layers._Summed, "forward", staticmethod(lambda ctx, values, ranks: values.clone()))


def other_masks_when_recomputed():
    return patch.object(layers.Masks, "restore", lambda self, state: None)


def no_bug():
    return contextlib.nullcontext()


def train_with(member, bug, *arguments):
    with bug():
        return train(member, *arguments)


# ------------------------------------------------------------------------------- ranks that die or hang
def die_in_backward(member, victim, *arguments):
    right = Worker._backward

    def backward(self, microbatch):
        if self.place.rank == victim and microbatch == 1:
            member.watch("backward", microbatch)
            os.kill(os.getpid(), signal.SIGKILL)
        right(self, microbatch)

    with patch.object(Worker, "_backward", backward):
        return train(member, *arguments)


def stop_itself(member, victim, *arguments):
    """A process that is stopped as a whole, somewhere in its second step."""
    right = Worker.step

    def step(self, batch):
        if self.place.rank == victim and self.steps == 1:
            threading.Timer(0.013, os.kill, (os.getpid(), signal.SIGSTOP)).start()
        return right(self, batch)

    with patch.object(Worker, "step", step):
        return train(member, *arguments)


def hang_in_forward(member, victim, *arguments):
    right = Worker._forward_unit

    def forward(self, *given):
        if self.place.rank == victim:
            time.sleep(1000)
        return right(self, *given)

    with patch.object(Worker, "_forward_unit", forward):
        return train(member, *arguments)


def die_in_the_third_step(member, job, plan, steps, pacing, begin, keep_state):
    """Rank 1 of a plan of three stages dies once two steps are kept."""
    kept = 0 if begin is None else begin.step
    if kept == 2 and len(plan.stages) == 3:
        return die_in_backward(member, 1, job, plan, steps, pacing, begin, keep_state)
    return train(member, job, plan, steps, pacing, begin, keep_state)
