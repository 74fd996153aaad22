"""The neighbour moves of the space: one vocabulary for local search, GA mutation and the environment.

A move changes one thing of a genome; moves that change options give the layers out anew through the balancer. The
edits of `edits(space)` are a fixed list, so that a policy's action i always means the same. The moves of a stage's
shape pass over a stage on two device groups (an option with a partner).

Twin: `space.kernels`, compiled; tests hold the two equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from haap_rl.problem.plan import RECOMPUTE_MODES
from haap_rl.space.options import Option
from haap_rl.space.space import Genome, Space

TRIES = 64  # random numbers of `random_neighbour`; the last one is for the case that no move tried was legal


class Move(NamedTuple):
    """`kind` applied to `stage` (front to back); `argument` where a kind needs one.

    shift       one layer from `stage` to its neighbour at `stage + argument` (no balancing)
    tp          tensor parallelism times (argument 1) or divided by (-1) two, data parallelism the other way
    devices     data parallelism times (1) or divided by (-1) two: takes idle devices, or leaves some idle
    recompute   the next heavier (1) or lighter (-1) mode
    group       the same shape on device group `argument`
    swap        exchange options with the next stage
    split       in two stages, each with half of the devices
    merge       with the next stage: its option doubled if both are alike, else the one with more devices
    insert      behind `stage` a new stage of the largest idle block of device group `argument`
    remove      drop the stage and leave its devices idle
    microbatches  twice (1) or half (-1) as many
    balance     give the layers out anew
    """

    kind: str
    stage: int = 0
    argument: int = 0


def edits(space: Space) -> tuple[Move, ...]:
    """Every move there is for pipelines of up to `space.max_stages` stages, in a fixed order."""
    most = space.max_stages
    both = (1, -1)
    moves = [Move("balance")]
    moves += [Move("microbatches", 0, way) for way in both]
    for stage in range(most):
        moves += [Move(kind, stage, way) for kind in ("shift", "tp", "devices", "recompute") for way in both]
        moves += [Move("split", stage), Move("remove", stage)]
        if stage < most - 1:
            moves += [Move("swap", stage), Move("merge", stage)]
        for group in range(len(space.num_devices)):
            moves += [Move("group", stage, group), Move("insert", stage, group)]
    return tuple(moves)


def apply(space: Space, genome: Genome, move: Move) -> Genome | None:
    """The genome after `move`, or None if the move is not legal there (memory included, where the space minds it)."""
    if move.kind == "shift":
        return _shift(space, genome, move.stage, move.stage + move.argument)
    if move.kind == "balance":
        balanced = space.decode(genome.num_microbatches, genome.options)
        return None if balanced == genome else balanced
    target = _after(space, genome, move)
    if target is None or not space.holds(*target):
        return None
    return space.decode(*target)


def is_legal(space: Space, genome: Genome, move: Move) -> bool:
    """Whether `apply` would give a genome, without balancing any layers."""
    if move.kind in ("shift", "balance"):
        return apply(space, genome, move) is not None
    target = _after(space, genome, move)
    return target is not None and space.holds(*target)


def describe(space: Space, genome: Genome, move: Move) -> str:
    """What `move` does to `genome`, in words; stages are counted from 0."""
    kind, i, argument = move
    anew = "" if kind in ("shift", "balance") else ", layers given out anew"
    name = space.problem.cluster.groups[argument].name if kind in ("group", "insert") else ""
    more = argument > 0
    words = {
        "shift": f"move one layer from stage {i} to stage {i + argument}",
        "tp": f"stage {i}: {'double' if more else 'halve'} tp, {'halve' if more else 'double'} dp",
        "devices": f"stage {i}: {'double' if more else 'halve'} dp",
        "recompute": f"stage {i}: recompute {'more' if more else 'less'}",
        "group": f"move stage {i} to {name} devices",
        "swap": f"exchange the devices of stages {i} and {i + 1}",
        "split": f"split stage {i} in two",
        "merge": f"merge stages {i} and {i + 1}",
        "insert": f"add a stage of idle {name} devices behind stage {i}",
        "remove": f"drop stage {i}",
        "microbatches": f"{'twice' if more else 'half'} as many micro-batches ({genome.num_microbatches} now)",
        "balance": "give the layers out by speed",
    }
    return words[kind] + anew


def random_neighbour(space: Space, genome: Genome, moves: tuple[Move, ...], rng: np.random.Generator) -> Genome:
    """The genome after a move drawn uniformly from the legal ones of `moves`; itself if there is none.

    Moves are drawn until one is legal; where that takes too long, from the list of the legal ones.
    """
    numbers = rng.random(TRIES)
    for number in numbers[:-1] if moves else ():
        neighbour = apply(space, genome, moves[int(number * len(moves))])
        if neighbour is not None:
            return neighbour
    legal = [neighbour for move in moves if (neighbour := apply(space, genome, move)) is not None]
    return legal[int(numbers[-1] * len(legal))] if legal else genome


def relief(space: Space, genome: Genome, stage: int) -> Iterator[Genome]:
    """Every genome that changes `stage` to relieve it, and the moves that touch the whole pipeline.

    Each other option of the stage on devices that are idle or its own; options exchanged with every other stage; the
    stage given an option that takes devices from another stage, which shrinks; single layers moved from it to any
    stage; split, merge, insert, remove; other micro-batch counts.
    """
    m, options, _ = genome
    p = len(options)
    seen = {genome}

    def fresh(candidate: Genome | None) -> Iterator[Genome]:
        if candidate is not None and candidate not in seen:
            seen.add(candidate)
            yield candidate

    def shapes(others: tuple[int, ...], k: int) -> Iterator[Genome]:
        """The stage on option k's shape, the lightest recomputation first, none heavier than memory asks for."""
        for mode in RECOMPUTE_MODES:
            heavier = with_mode(space, space.options[k], mode)
            if heavier is None:
                continue
            changed = (*others[:stage], heavier, *others[stage + 1 :])
            if space.holds(m, changed):
                candidate = space.decode(m, changed)
                yield from fresh(candidate)
                if candidate is not None and candidate.layers[stage] < space.tables(m).caps(changed)[stage]:
                    return

    yield from fresh(space.decode(m, options))
    for k, option in enumerate(space.options):
        if option.recompute != space.spec.recompute[0]:
            continue
        yield from shapes(options, k)
        left = space.devices_left((*options[:stage], k, *options[stage + 1 :]))
        short = [group for group, _, _ in option.parts if left[group] < 0]
        for j in range(p):  # halve another stage of a group that is short of devices
            other = space.options[options[j]]
            if j != stage and other.group in short:
                smaller = half(space, other)
                if smaller is not None:
                    yield from shapes((*options[:j], smaller, *options[j + 1 :]), k)
    for j in range(p):
        if j != stage:
            exchanged = list(options)
            exchanged[stage], exchanged[j] = options[j], options[stage]
            if space.holds(m, tuple(exchanged)):
                yield from fresh(space.decode(m, tuple(exchanged)))
            yield from fresh(_shift(space, genome, stage, j))
    structural = [Move("split", stage), Move("remove", stage), Move("merge", stage), Move("merge", stage - 1)]
    structural += [Move("insert", j, group) for j in (stage - 1, stage) for group in range(len(space.num_devices))]
    structural += [Move("microbatches", 0, way) for way in (1, -1)]
    for move in structural:
        yield from fresh(apply(space, genome, move))


# ------------------------------------------------------------------------------- how each kind works
def _shift(space: Space, genome: Genome, source: int, target: int) -> Genome | None:
    layers = list(genome.layers)
    if not (0 <= source < len(layers) and 0 <= target < len(layers)) or layers[source] == 1:
        return None
    if layers[target] >= space.tables(genome.num_microbatches).caps(genome.options)[target]:
        return None
    layers[source] -= 1
    layers[target] += 1
    return genome._replace(layers=tuple(layers))


def _after(space: Space, genome: Genome, move: Move) -> tuple[int, tuple[int, ...]] | None:
    """(micro-batches, options) after a move that changes them, or None if it makes no sense; memory unchecked."""
    m, options, _ = genome
    kind, i, argument = move
    if kind == "microbatches":
        return _with_microbatches(space, genome, m * 2 if argument > 0 else m // 2)
    if not 0 <= i < len(options):
        return None
    before, option, behind = options[:i], space.options[options[i]], options[i + 1 :]
    if kind == "tp":
        changed = scaled(space, option, 2, 0.5) if argument > 0 else scaled(space, option, 0.5, 2)
    elif kind == "devices":
        changed = scaled(space, option, 1, 2.0 if argument > 0 else 0.5)
    elif kind == "recompute":
        changed = with_recompute(space, option, argument)
    elif kind == "group":
        changed = on_group(space, option, argument)
    else:
        return _restructured(space, genome, move)
    return None if changed is None else (m, (*before, changed, *behind))


def _restructured(space: Space, genome: Genome, move: Move) -> tuple[int, tuple[int, ...]] | None:
    """(micro-batches, options) after a move that changes the number or the order of stages."""
    m, options, _ = genome
    kind, i, argument = move
    before, k, behind = options[:i], options[i], options[i + 1 :]
    if kind == "remove":
        return (m, before + behind) if len(options) > 1 else None
    if kind == "split":
        smaller = half(space, space.options[k])
        return None if smaller is None else (m, (*before, smaller, smaller, *behind))
    if kind == "insert":
        new = largest_idle(space, m, space.devices_left(options)[argument], argument)
        return None if new is None else (m, (*before, k, new, *behind))
    if not behind:
        return None
    other, rest = behind[0], behind[1:]
    if kind == "swap":
        return (m, (*before, other, k, *rest)) if other != k else None
    doubled = scaled(space, space.options[k], 1, 2) if k == other else None  # merge
    larger = k if space.options[k].num_devices >= space.options[other].num_devices else other
    return m, (*before, larger if doubled is None else doubled, *rest)


def _with_microbatches(space: Space, genome: Genome, m: int) -> tuple[int, tuple[int, ...]] | None:
    """The same stages at another micro-batch count."""
    if m not in space.num_microbatches:
        return None
    options = []
    for k in genome.options:
        option = at_count(space, k, m)
        if option is None:
            return None
        options.append(option)
    return m, tuple(options)


# ------------------------------------------------------- options that are like another one: index, or None if not there
def scaled(space: Space, option: Option, tp_factor: float, dp_factor: float = 1) -> int | None:
    """The option with tp and dp multiplied."""
    tp, dp = option.tp * tp_factor, option.dp * dp_factor
    if option.partner is not None or tp != int(tp) or dp != int(dp):
        return None
    return space.option_index.get(option._replace(tp=int(tp), dp=int(dp)))


def half(space: Space, option: Option) -> int | None:
    """The option on half of the devices: of its replicas if it has several."""
    return scaled(space, option, 1, 0.5) if option.dp > 1 else scaled(space, option, 0.5)


def on_group(space: Space, option: Option, group: int) -> int | None:
    """The same shape on another device group."""
    if option.partner is not None or option.group == group:
        return None
    return space.option_index.get(option._replace(group=group))


def with_mode(space: Space, option: Option, mode: str) -> int | None:
    """The same devices with a mode of recomputation."""
    return space.option_index.get(option._replace(recompute=mode))


def with_recompute(space: Space, option: Option, way: int) -> int | None:
    """The same devices with the next heavier (1) or lighter (-1) recomputation of the space."""
    allowed = [mode for mode in RECOMPUTE_MODES if mode in space.spec.recompute]
    position = allowed.index(option.recompute) + way  # type: ignore[arg-type]
    return with_mode(space, option, allowed[position]) if 0 <= position < len(allowed) else None


def at_count(space: Space, k: int, m: int) -> int | None:
    """Option k at m micro-batches: where its dp does not divide the micro-batch, tp takes its place.

    An option with a partner stays as it is: whether its replicas can share the micro-batch, the tables know.
    """
    samples = space.problem.global_batch_size // m
    while space.options[k].partner is None and samples % space.options[k].dp:
        smaller = scaled(space, space.options[k], 2, 0.5)
        if smaller is None:
            return None
        k = smaller
    return k


def largest_idle(space: Space, m: int, idle: int, group: int) -> int | None:
    """The option with most devices among `idle` ones of `group`: least tensor parallelism and recomputation first."""
    samples = space.problem.global_batch_size // m
    fitting = [
        (-option.num_devices, option.tp, k)
        for k, option in enumerate(space.options)
        if option.partner is None and option.group == group and option.num_devices <= idle and samples % option.dp == 0
    ]
    return min(fitting)[2] if fitting else None
