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
from haap_rl.search.candidate_policy import CandidateNetwork, sample
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
    """The plans of one policy for one objective's space; draws from torch's global generator.

    codes   what was priced so far
    """

    def __init__(self, objective: Objective, network: CandidateNetwork) -> None:
        self.objective, self.network, self.space = objective, network, objective.space
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
        counts = np.arange(len(self._best))
        self._price(build(self.objective, self.network, counts, None))

    def more(self, most: int = BATCH) -> int:
        """Price up to `most` plans drawn that are new, the most frequent ones first; how many it were."""
        share = np.ones(len(self._best))
        if np.isfinite(self._best).any():
            share = np.exp(-(self._best - self._best.min()) / SPREAD)
        counts = np.repeat(np.arange(len(share)), np.ceil(DRAWN * share / share.sum()).astype(np.int64))
        while True:
            drawn = build(self.objective, self.network, counts, self.temperature)
            rows, times = np.unique(drawn, axis=0, return_counts=True)
            new = np.array([row.tobytes() not in self._known for row in rows])
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
def build(objective: Objective, network: CandidateNetwork, counts: Ints, temperature: float | None) -> Codes:
    """One plan for each of `counts` (choices of the number of micro-batches), as rows; no evaluation.

    temperature: of the distribution that choices are drawn from; None: the most likely choice each time.
    A network without masks (an ablation) may choose what is not legal: there is no plan then.
    """
    space = objective.space
    c, n = space.construction, len(counts)
    partials = kernels.partials(n, c.max_stages, len(c.total))
    seen = np.zeros((n, len(c.step) + 1 if len(c.step) >= len(c.m) else len(c.m), len(FEATURES)), np.float32)
    built: Codes = np.zeros((n, 2 + 2 * c.max_stages), np.int64)
    building = np.arange(n)
    kernels.begin_many(c, partials, building, counts, seen)
    while len(building):
        logits, _ = network(torch.from_numpy(seen[building]))
        actions = (logits.argmax(1) if temperature is None else sample(logits, temperature)).numpy()
        legal = seen[building, actions, 0] > 0
        building, actions = building[legal], actions[legal]
        ended, rows = kernels.step_many(c, partials, building, actions, seen)
        built[building[ended]] = rows[ended]
        building = building[~ended]
    return built[built[:, 1] > 0]
