"""What MeCeFO's public descriptions leave open (arXiv 2510.16415), each an option with our default and the reason.

No torch here: planning imports the same options to price what training does with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, cast

FFN_MATRICES = ("gate", "up", "down")

Recompute = Literal["gate_up", "whole"]
Takeover = Literal["ring", "most_slack", "spread"]
ReturnRule = Literal["next_step", "refresh_boundary"]
FfnAverage = Literal["all_ranks", "unaffected"]
EmptySet = Literal["freeze", "zero", "use_degraded"]
OnOverload = Literal["chain", "restart"]
ProjectorMethod = Literal["svd", "eigh", "randomized"]

CHOICES: dict[str, tuple[str, ...]] = {
    "ffn_recompute": ("gate_up", "whole"),
    "takeover": ("ring", "most_slack", "spread"),
    "return_rule": ("next_step", "refresh_boundary"),
    "ffn_average": ("all_ranks", "unaffected"),
    "empty_set": ("freeze", "zero", "use_degraded"),
    "on_overload": ("chain", "restart"),
    "projector": ("svd", "eigh", "randomized"),
}


@dataclass(frozen=True, slots=True)
class MecefoOptions:
    """How a failure is lived with. Whether the healthy run recomputes is its plan's `recompute`, no option here.

    rank            r, right singular vectors kept of each matrix. 64 is low against hidden and FFN width of every
                    published model.
    refresh_steps   tau, steps between two singular value decompositions. 50: what our runs use.
    low_rank        FFN matrices with a low-rank weight gradient. All three: the paper says "FFN linear layers".
    ffn_recompute   what the backward pass computes again. `gate_up`: down's output is not needed; `whole`: what a
                    checkpoint wrapper around the FFN does.
    takeover        who runs a dead cell's task, always a live peer (same stage, other replica). `ring`: the next
                    replica; `most_slack`: the peer with the most time to spare, which on unequal devices is not the
                    next one; `spread`: its samples are divided among all peers, so that none of them is unaffected.
    return_rule     when a repaired cell takes part again, after copying weights and optimiser state from a peer.
                    `next_step`: at the next step; `refresh_boundary`: at the next step that refreshes projectors.
    ffn_average     over which tasks everything but a skipped branch is averaged. `all_ranks`, both tasks of a taker
                    among them: no sample is lost, as the convergence rate's factor n needs; `unaffected`: as attention.
    empty_set       weights that no unaffected rank has a gradient of (two replicas, one failure). `freeze`: no
                    gradient; `zero`: a gradient of zeros, with which momentum and weight decay still move weights;
                    `use_degraded`: affected ranks skip no attention there, which costs the time and memory that
                    skipping saves, and their gradients are used.
    on_overload     a second failure in a stage that leaves a dead cell with a dead neighbour. `chain`: the least
                    loaded live peer takes it; `restart`: training restarts from a checkpoint. A stage without live
                    cells always restarts.
    projector       `svd` is exact; `eigh` of the Gram matrix W^T W is faster, with the squared condition number;
                    `randomized` subspace iteration is the fastest and approximate.
    """

    rank: int = 64
    refresh_steps: int = 50
    low_rank: tuple[str, ...] = FFN_MATRICES
    ffn_recompute: Recompute = "gate_up"
    takeover: Takeover = "ring"
    return_rule: ReturnRule = "next_step"
    ffn_average: FfnAverage = "all_ranks"
    empty_set: EmptySet = "freeze"
    on_overload: OnOverload = "chain"
    projector: ProjectorMethod = "svd"

    def __post_init__(self) -> None:
        for key in ("rank", "refresh_steps"):
            value: object = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                default = MecefoOptions.default(key)
                raise ValueError(
                    f"mecefo: {key}={value!r} must be a whole number of at least 1; give for example {key}={default}"
                )
        for key, choices in CHOICES.items():
            if getattr(self, key) not in choices:
                raise ValueError(f"mecefo: {key}={getattr(self, key)!r} must be one of {', '.join(choices)}")
        named = cast(object, self.low_rank)  # from YAML it is a list
        if isinstance(named, str) or not isinstance(named, Sequence) or not all(n in FFN_MATRICES for n in named):
            raise ValueError(
                f"mecefo: low_rank={named!r} must be a list of some of {', '.join(FFN_MATRICES)}; [] turns it off"
            )
        object.__setattr__(self, "low_rank", tuple(name for name in FFN_MATRICES if name in named))

    @staticmethod
    def default(key: str) -> object:
        """The default of an option."""
        return next(field.default for field in fields(MecefoOptions) if field.name == key)


@dataclass(frozen=True, slots=True)
class Techniques:
    """Which of MeCeFO's three techniques a taker uses; all, unless one is being studied.

    skip        the residual branch that has no backward pass. `attention` is MeCeFO's; `ffn` is what it is compared
                with; `none`: with `recompute` off and no `low_rank` matrix the taker's gradients are exact.
    recompute   keep the FFN's input only and compute the inside again in the backward pass
    The third, the low-rank weight gradient, is off where `MecefoOptions.low_rank` is empty.
    """

    skip: Literal["attention", "ffn", "none"] = "attention"
    recompute: bool = True

    def __post_init__(self) -> None:
        if self.skip not in ("attention", "ffn", "none"):
            raise ValueError(f"mecefo: skip={self.skip!r} must be one of attention, ffn, none")
