"""Plans that a trained policy proposes for a problem, without any training: the first ones, then ever less likely ones.

The policy builds plans stage by stage (`space.construction`). First its most likely plan at every number of
micro-batches, then plans drawn from its distribution, most of them at the numbers that did best; a plan that was
priced before is not priced again, so what is drawn often costs one evaluation. Asking the network is no evaluation.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from haap_rl.search.autohaap import Kept
from haap_rl.search.base import Objective
from haap_rl.search.candidate_policy import CandidateNetwork
from haap_rl.space import construction_kernels as kernels
from haap_rl.space.construction import FEATURES
from haap_rl.space.space import Codes

Ints = npt.NDArray[np.int64]
SPREAD = 0.03  # a number of micro-batches at which the best plan is e^0.03 times slower is drawn 1/e times as often
DRAWN = 1000  # episodes between two batches of evaluations
BATCH = 90  # evaluations of a batch: with one for each number of micro-batches about a hundred in the first round
HOTTER = 1.25  # the temperature rises by, when a draw gives too few new plans
HOTTEST = 8.0


class Proposals:
    """The plans of one policy for one objective's space.

    codes   what was priced so far
    """

    def __init__(self, objective: Objective, network: CandidateNetwork, rng: np.random.Generator) -> None:
        self.objective, self.network, self.space, self.rng = objective, network, objective.space, rng
        self.codes: Codes = np.zeros((0, 2 + 2 * self.space.max_stages), np.int64)
        self.temperature = 1.0
        self._known: set[bytes] = set()
        self._ranks: list[tuple[bool, int, float]] = []
        self._taken = 0
        self._best = np.full(len(self.space.construction.m), np.inf)  # energy, of each number of micro-batches

    @property
    def best_s(self) -> float:
        """Iteration seconds of the best plan so far, where it fits."""
        return float(np.exp(self._best.min()))

    def first(self) -> None:
        """Price the most likely plan at every number of micro-batches."""
        self._price(likeliest(self.objective, self.network, np.arange(len(self._best))))

    def more(self, most: int = BATCH) -> int:
        """Price up to `most` plans drawn that are new, the most frequent ones first; how many it were."""
        share = np.ones(len(self._best))
        if np.isfinite(self._best).any():
            share = np.exp(-(self._best - self._best.min()) / SPREAD)
        counts, each = np.arange(len(share)), np.ceil(DRAWN * share / share.sum()).astype(np.int64)
        while True:
            rows, times = drawn(self.objective, self.network, counts, each, self.temperature, self.rng)
            new = np.array([row.tobytes() not in self._known for row in rows], np.bool_)
            rows, times = rows[new], times[new]
            if len(rows) >= most or self.temperature >= HOTTEST:
                break
            self.temperature *= HOTTER
            if len(rows) >= most // 2:
                break
        rows = rows[np.argsort(-times, kind="stable")[:most]]
        if len(rows):
            self._price(rows)
        return len(rows)

    def take(self, most: int) -> list[Kept]:
        """The best plans priced since this was last asked, best first, as `AutoHAAP.descend` starts from them."""
        ranks, codes = self._ranks[self._taken :], self.codes[self._taken :]
        self._taken = len(self.codes)
        order = sorted(range(len(ranks)), key=ranks.__getitem__)[:most]
        return [Kept(ranks[i], codes[i]) for i in order]

    def _price(self, rows: Codes) -> None:
        if not len(rows):
            return
        self._known.update(row.tobytes() for row in rows)
        prices = self.objective.many(rows)
        self.codes = np.concatenate([self.codes, rows])
        self._ranks += [prices.rank(i) for i in range(len(rows))]
        index = np.searchsorted(self.space.construction.space_index, rows[:, 0])
        np.minimum.at(self._best, index, prices.energy)


@torch.no_grad()
def likeliest(objective: Objective, network: CandidateNetwork, counts: Ints) -> Codes:
    """The policy's likeliest choices from each of `counts` (choices of the number of micro-batches), as rows."""
    space = objective.space
    c, n = space.construction, len(counts)
    partials, seen = kernels.partials(n, c.max_stages, len(c.total)), view(objective, n)
    built: Codes = np.zeros((n, 2 + 2 * c.max_stages), np.int64)
    building = np.arange(n)
    kernels.begin_many(c, partials, building, counts, seen)
    while len(building):
        actions = scores(network, seen[building]).argmax(1).numpy()
        building, actions = _legal(seen, building, actions)
        ended, rows = kernels.step_many(c, partials, building, actions, seen)
        built[building[ended]] = rows[ended]
        building = building[~ended]
    return built[built[:, 1] > 0]


@torch.no_grad()
def drawn(
    objective: Objective,
    network: CandidateNetwork,
    counts: Ints,
    times: Ints,
    temperature: float,
    rng: np.random.Generator,
) -> tuple[Codes, Ints]:
    """`times` plans drawn from each of `counts`: the different ones, as rows, and how often each was drawn.

    Plans that are alike so far are one, so that the network is asked once about them.
    """
    space = objective.space
    c, found, often = space.construction, [np.zeros((0, 2 + 2 * space.max_stages), np.int64)], [np.zeros(0, np.int64)]
    partials, seen = kernels.partials(len(counts), c.max_stages, len(c.total)), view(objective, len(counts))
    kernels.begin_many(c, partials, np.arange(len(counts)), counts, seen)
    while len(times):
        chances = torch.softmax(scores(network, seen) / temperature, 1).double().numpy()
        taken = rng.multinomial(times, chances / chances.sum(1, keepdims=True))
        parents, actions = np.nonzero(taken)
        times = taken[parents, actions]
        seen = seen[parents]
        partials = partials.picked(parents)
        members, actions = _legal(seen, np.arange(len(parents)), actions)
        ended, rows = kernels.step_many(c, partials, members, actions, seen)
        found.append(rows[ended])
        often.append(times[members[ended]])
        going = members[~ended]
        times, seen, partials = times[going], seen[going], partials.picked(going)
    return np.concatenate(found), np.concatenate(often)


def view(objective: Objective, n: int) -> npt.NDArray[np.float32]:
    """Room for what is seen of n plans."""
    c = objective.space.construction
    return np.zeros((n, max(len(c.step) + 1, len(c.m)), len(FEATURES)), np.float32)


def scores(network: CandidateNetwork, seen: npt.NDArray[np.float32]) -> torch.Tensor:
    """(n, A) logits."""
    logits: torch.Tensor = network(torch.from_numpy(seen))[0]
    return logits


def _legal(seen: npt.NDArray[np.float32], building: Ints, actions: Ints) -> tuple[Ints, Ints]:
    """Those whose choice is legal; a network without masks (an ablation) may choose otherwise, and has no plan then."""
    legal = seen[building, actions, 0] > 0
    return building[legal], actions[legal]
