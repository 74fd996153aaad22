"""Expected throughput where stages help themselves, compiled: every likely number of failures, its schedule, its rates.

The readable twin is `expected.by_sets`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from haap_rl.cost.compiling import jit, machine_code
from haap_rl.cost.kernels import BACKWARD, DELAY, FORWARD, STEP, SYNC, exact_s
from haap_rl.faults import checkpoint

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_kept_share = machine_code(checkpoint)["kept_share"]


class States(NamedTuple):
    """What can be down, and what each stage does then.

    C classes of elements that are alike; Q slots, the replica groups of all stages; p stages; X states of a stage, a
    number of dead replicas of each of its replica groups.

    size (C,)                elements
    share (C, N+1)           probability that so many of them are down, as far as N
    mode (C,)                the likeliest number
    fails, returns (C,)      per second and element
    takes (C, Q)             replicas that one element takes with it
    stage, stride, most (Q,) of a slot: its stage, what one dead replica adds to the stage's state, and the largest
                             number of them that is in the tables
    forward_s, backward_s, tail_s, lost (p, X)   seconds, and share of attention gradients lost, of the whole model's
    runs (p, X)              1 where the stage goes on
    delay_s (p,)             of sends
    """

    size: Ints
    share: Floats
    mode: Ints
    fails: Floats
    returns: Floats
    takes: Ints
    stage: Ints
    stride: Ints
    most: Ints
    forward_s: Floats
    backward_s: Floats
    tail_s: Floats
    lost: Floats
    runs: Ints
    delay_s: Floats


# what is summed up over states: their probability, tokens per second, those with attention gradients lost, rate of
# stops, probability of those that are stopped, how many there are, and squares of tokens per second
COVERED, TOKENS, LOST, STOPS, STOPPED, COUNT, SQUARES = range(7)
OUTSIDE, STOPPED_STATE, RUNNING = range(3)


@jit
def stage_states(t, down, state):
    """Fill the state of each stage from the numbers of elements down; whether all run, one is stopped, or one has more
    dead replicas than its table."""
    for i in range(state.shape[0]):
        state[i] = 0
    for q in range(t.stage.shape[0]):
        dead = 0
        for c in range(down.shape[0]):
            dead += down[c] * t.takes[c, q]
        if dead > t.most[q]:
            return OUTSIDE
        state[t.stage[q]] += dead * t.stride[q]
    for i in range(state.shape[0]):
        if t.runs[i, state[i]] == 0:
            return STOPPED_STATE
    return RUNNING


@jit
def rates(t, down, state, out):
    """Fill (failures, returns, failures that stop training) per second from a state that runs."""
    out[0] = out[1] = out[2] = 0.0
    for c in range(down.shape[0]):
        out[1] += down[c] * t.returns[c]
        left = t.size[c] - down[c]
        if left > 0:
            out[0] += left * t.fails[c]
            down[c] += 1
            if stage_states(t, down, state) != RUNNING:
                out[2] += left * t.fails[c]
            down[c] -= 1
    stage_states(t, down, state)


@jit
def add_state(t, probability, m, healthy_s, tokens, fills, transitions, priced, work, sums):
    """Add the state of work's numbers of elements down to the sums, with that weight.

    m micro-batches, of which healthy training makes `tokens` in healthy_s; fills: `Policy.fills_bubbles`. transitions:
    as `response.Transitions`. priced 0: rates and probabilities only. work: (times (9, p), numbers (C,), states (p,),
    probabilities (C+1,), the largest probability that is still to come (C+1,), rates (3,)).
    """
    times, down, state, _, _, rate = work
    failure_s, return_s, restart_s, checkpoint_s, interval_s = transitions
    p = t.delay_s.shape[0]
    kind = stage_states(t, down, state)
    if kind == OUTSIDE:
        return
    sums[COVERED] += probability
    sums[COUNT] += 1.0
    if kind == STOPPED_STATE:
        sums[STOPPED] += probability
        return
    rates(t, down, state, rate)
    sums[STOPS] += probability * rate[2]
    if priced == 0:
        return
    lost, seconds = 0.0, healthy_s
    changed = False
    for i in range(p):
        x = state[i]
        changed = changed or x > 0
        times[FORWARD, i], times[BACKWARD, i] = t.forward_s[i, x], t.backward_s[i, x]
        times[SYNC, i], times[STEP, i], times[DELAY, i] = t.tail_s[i, x], 0.0, t.delay_s[i]
        lost += t.lost[i, x]
        if fills != 0:
            busy_s = m * (t.forward_s[i, x] + t.backward_s[i, x]) + t.tail_s[i, x]
            seconds = max(seconds, busy_s)
    if changed and fills == 0:
        seconds = max(seconds, exact_s(times, p, m))
    fails, returns, stops = rate[0], rate[1], rate[2]
    leaves = fails + returns
    made = 1.0
    if leaves > 0.0:  # the flows into a state are those out of it, one by one: failures lead in as returns lead out
        made = (
            returns * np.exp(-leaves * failure_s)
            + (fails - stops) * np.exp(-leaves * return_s)
            + stops * np.exp(-leaves * restart_s)
        ) / leaves
    made *= _kept_share(interval_s, checkpoint_s, 1.0 / stops if stops > 0.0 else np.inf)
    rate_here = made * tokens / seconds
    sums[TOKENS] += probability * rate_here
    sums[SQUARES] += probability * rate_here * rate_here
    sums[LOST] += probability * rate_here * lost


@jit
def expect(t, least, m, healthy_s, tokens, fills, transitions, priced, work, sums):
    """Sum up over all states of a probability of at least `least`; the rest as `add_state` takes it."""
    _, down, _, before, ahead, _ = work
    last = t.size.shape[0] - 1
    for x in range(sums.shape[0]):
        sums[x] = 0.0
    ahead[last + 1] = before[0] = 1.0
    for c in range(last, -1, -1):
        ahead[c] = ahead[c + 1] * t.share[c, t.mode[c]]
        down[c] = 0
    c = 0
    down[0] = -1
    while c >= 0:
        down[c] += 1
        if down[c] >= t.share.shape[1] or down[c] > t.size[c]:
            down[c] = 0
            c -= 1
            continue
        before[c + 1] = before[c] * t.share[c, down[c]]
        if before[c + 1] * ahead[c + 1] < least:
            if down[c] >= t.mode[c]:
                down[c] = 0
                c -= 1
            continue
        if c < last:
            c += 1
            down[c] = -1
            continue
        add_state(t, before[last + 1], m, healthy_s, tokens, fills, transitions, priced, work, sums)


@jit
def sample(t, uniform, m, healthy_s, tokens, fills, transitions, priced, work, sums):
    """The same over states drawn by the rows of `uniform` (N, at least C), numbers between 0 and 1."""
    down = work[1]
    for x in range(sums.shape[0]):
        sums[x] = 0.0
    for row in range(uniform.shape[0]):
        for c in range(t.size.shape[0]):
            n, reached = 0, t.share[c, 0]
            while reached < uniform[row, c] and n + 1 < t.share.shape[1] and n < t.size[c]:
                n += 1
                reached += t.share[c, n]
            down[c] = n
        add_state(t, 1.0 / uniform.shape[0], m, healthy_s, tokens, fills, transitions, priced, work, sums)
