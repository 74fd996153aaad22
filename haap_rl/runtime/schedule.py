"""The order of one stage's work in a step: 1F1B as `cost.schedule` prices it, and how much is kept at once."""

from __future__ import annotations

from typing import NamedTuple


class Op(NamedTuple):
    """The forward or the backward pass of one micro-batch through one stage."""

    is_forward: bool
    microbatch: int


def operations(num_stages: int, stage: int, num_microbatches: int) -> list[Op]:
    """All passes of a stage in order; m may be less than p.

    min(p-1-i, m-1) forwards run ahead, then one forward and one backward in turn, then the backwards that are left
    (Narayanan et al. 2021, arXiv 2104.04473).
    """
    m = num_microbatches
    ahead = min(num_stages - 1 - stage, m - 1)
    order = [Op(True, k) for k in range(ahead)]
    for k in range(m):
        if k + ahead < m:
            order.append(Op(True, k + ahead))
        order.append(Op(False, k))
    return order
