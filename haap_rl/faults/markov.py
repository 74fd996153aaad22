"""The exact long run of few components with exponential times: the oracle that simulation and objective are held to.

The sets of components that are down are the states of a continuous-time Markov chain. Its stationary distribution is
solved for as for any chain, although for components that fail by themselves it is also a product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from haap_rl.faults.checkpoint import kept_share
from haap_rl.faults.model import Component
from haap_rl.faults.simulate import Reactions
from haap_rl.problem.errors import InputError

MOST_COMPONENTS = 12  # 4,096 states: a dense system of 128 MiB, some seconds


class LongRun(NamedTuple):
    """Averages over an endless time.

    tokens_per_s: tokens that count. trained to stopped: shares of all time, as `simulate.Seconds` has them.
    attention_lost: share of the attention gradients, weighted by tokens.
    """

    tokens_per_s: float
    trained: float
    transitions: float
    restarts: float
    checkpoints_and_lost: float
    stopped: float
    stops_per_s: float
    attention_lost: float


def stationary_distribution(components: Sequence[Component]) -> NDArray[np.float64]:
    """Probability of each set of components down; component i is down in state s if bit i of s is set."""
    generator = _generator(components)
    # pi Q = 0 has one redundant equation; that the probabilities add up to one takes its place
    system = generator.T.copy()
    system[0] = 1.0
    right = np.zeros(len(system))
    right[0] = 1.0
    return np.asarray(np.linalg.solve(system, right), dtype=np.float64)


def long_run(components: Sequence[Component], reactions: Reactions) -> LongRun:
    """What `reactions` bring in the long run. Raises InputError for components that are not exponential, or too many.

    A visit to a state that runs lasts S, exponential with the state's total exit rate L, of which a dead time t leaves
    E[S - min(t, S)] / E[S] = e^(-L t). What checkpoints leave of that is `kept_share` with the rate of exits into
    stopped states: exact if they are continuous or one state runs, else a good approximation, since a cycle may last
    longer than a visit.
    """
    probability = stationary_distribution(components)
    transitions = reactions.transitions
    responses = [
        reactions(frozenset(i for i in range(len(components)) if state >> i & 1)) for state in range(len(probability))
    ]
    tokens = trained = in_transitions = in_restarts = checkpointing = stopped = stops = attention = 0.0
    for state, response in enumerate(responses):
        if not response.runs:
            stopped += probability[state]
            continue
        exit_rate = stop_rate = 0.0
        entries: list[tuple[float, float, bool]] = []  # flow into the state, dead time, whether it was stopped
        for i, component in enumerate(components):
            other = state ^ (1 << i)
            is_down, was_stopped = bool(state >> i & 1), not responses[other].runs
            fails, returns = component.failure_rate, component.repair_rate
            exit_rate += returns if is_down else fails
            stop_rate += (returns if is_down else fails) if was_stopped else 0.0
            dead_s = (
                transitions.restart_s if was_stopped else transitions.failure_s if is_down else transitions.return_s
            )
            entries.append((probability[other] * (fails if is_down else returns), dead_s, was_stopped))
        entered = math.fsum(flow for flow, _, _ in entries)
        dead = [(flow / entered * -math.expm1(-exit_rate * dead_s), was) for flow, dead_s, was in entries]
        restarting = math.fsum(share for share, was_stopped in dead if was_stopped)
        productive = 1 - math.fsum(share for share, _ in dead)
        kept = kept_share(
            transitions.checkpoint_interval_s, transitions.checkpoint_s, 1 / stop_rate if stop_rate else math.inf
        )
        counts = probability[state] * productive * kept
        trained += counts
        tokens += counts * response.tokens_per_s
        attention += counts * response.tokens_per_s * response.attention_lost
        in_restarts += probability[state] * restarting
        in_transitions += probability[state] * (1 - productive - restarting)
        checkpointing += probability[state] * productive * (1 - kept)
        stops += probability[state] * stop_rate
    return LongRun(
        tokens_per_s=float(tokens),
        trained=float(trained),
        transitions=float(in_transitions),
        restarts=float(in_restarts),
        checkpoints_and_lost=float(checkpointing),
        stopped=float(stopped),
        stops_per_s=float(stops),
        attention_lost=float(attention / tokens) if tokens else 0.0,
    )


def _generator(components: Sequence[Component]) -> NDArray[np.float64]:
    """Q[s, t]: rate per second from state s to another state t; its rows add up to zero."""
    if len(components) > MOST_COMPONENTS:
        raise InputError(
            f"faults: {len(components)} components have {2.0 ** len(components):.3g} sets that can be down; the exact "
            f"solution takes at most {MOST_COMPONENTS} components, simulate instead"
        )
    if any(component.shape != 1 or component.fixed_recovery for component in components):
        raise InputError(
            "faults: the exact solution needs exponential times; simulate, or use shape 1 and no fixed recovery"
        )
    states = np.arange(2 ** len(components))
    generator = np.zeros((len(states), len(states)))
    for i, component in enumerate(components):
        is_down = states >> i & 1 == 1
        generator[states, states ^ (1 << i)] = np.where(is_down, component.repair_rate, component.failure_rate)
    generator[states, states] = -generator.sum(axis=1)
    return generator
