"""A policy that scores candidates: one small network for every row of an observation, softmax over the legal ones.

Observations are (n, A, F): a row of F features for each of A candidate actions, the first feature 1 where the action
is legal. The same weights score every row, with a view of what the other rows are on average, so the probabilities
do not depend on the order of the candidates, and any number of them will do: a policy trained on some problems can be
asked about others. `CandidateNetwork` is plain torch, `CandidatePolicy` makes a Stable-Baselines3 policy of it.

A policy is kept as an .npz file of arrays and one line of JSON, which holds no code and is loaded as such.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sb3_contrib.common.maskable.distributions import MaskableDistribution
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import nn

from haap_rl.cost.estimator import fingerprint
from haap_rl.problem.errors import InputError, positive_int
from haap_rl.space.construction import FEATURES, VERSION

SCHEMA = "haap_rl.policy/1"
PRETRAINED = "pretrained"
SHIPPED = Path(__file__).with_name("pretrained.npz")
COMMAND = "python -m haap_rl.train_policy"
IMPOSSIBLE = -1e8  # logit of a candidate that is not legal
MOST_HIDDEN = 4096


def hidden_units(where: str, value: object) -> int:
    """`value` as units of a layer. Raises InputError for what is none, or more than MOST_HIDDEN."""
    hidden = positive_int(where, "hidden", value)
    if hidden > MOST_HIDDEN:
        raise InputError(f"{where}: hidden={hidden} must be at most {MOST_HIDDEN}; give for example hidden=96")
    return hidden


class CandidateNetwork(nn.Module):
    """Logits of candidates, and the value of their set.

    width    features of a candidate
    hidden   units of each layer
    masked   whether candidates that are not legal get no probability; off is an ablation
    blank    columns of features that it does not look at: an ablation
    """

    looks: torch.Tensor

    def __init__(self, width: int, hidden: int, masked: bool = True, blank: Sequence[int] = ()) -> None:
        super().__init__()
        self.width, self.hidden, self.masked, self.blank = width, hidden, masked, tuple(blank)
        looks = torch.ones(width)
        looks[list(self.blank)] = 0.0
        self.register_buffer("looks", looks, persistent=False)
        self.embed = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.own, self.others = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden, bias=False)
        self.score = nn.Linear(hidden, 1)
        self.seen = nn.Sequential(nn.Linear(width, hidden), nn.ReLU())
        self.value = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        nn.init.normal_(self.score.weight, std=0.01)  # close to uniform at first
        nn.init.zeros_(self.score.bias)

    def forward(self, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(n, A) logits and (n,) values of (n, A, width) observations."""
        legal = observations[..., 0] > 0 if self.masked else torch.ones_like(observations[..., 0], dtype=torch.bool)
        state, action = legal.nonzero(as_tuple=True)
        scores, values = self.of_rows(observations[state, action], state, len(observations))
        return torch.full(legal.shape, IMPOSSIBLE).index_put((state, action), scores), values

    def of_rows(self, rows: torch.Tensor, state: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(R,) logits and (n,) values of (R, width) candidates, the r-th one of observation state[r]."""
        rows = rows * self.looks
        share = 1.0 / torch.bincount(state, minlength=n).clamp(min=1).to(rows.dtype)

        def mean(values: torch.Tensor) -> torch.Tensor:
            pooled = values.new_zeros(n, values.shape[1]).index_add(0, state, values)
            return pooled * share[:, None]

        embedded = self.embed(rows)
        context = self.others(mean(embedded))
        scores = self.score(torch.relu(self.own(embedded) + context[state]))[:, 0]
        return scores, self.value(mean(self.seen(rows)))[:, 0]


class CandidatePolicy(MaskableActorCriticPolicy):
    """A CandidateNetwork as the policy of MaskablePPO; observations hold the mask. policy_kwargs are its arguments."""

    def __init__(
        self, *args: Any, hidden: int = 64, masked: bool = True, blank: Sequence[int] = (), **kwargs: Any
    ) -> None:
        self._settings: dict[str, Any] = {"hidden": hidden, "masked": masked, "blank": blank}
        super().__init__(*args, **kwargs)

    def _build(self, lr_schedule: Schedule) -> None:
        shape = self.observation_space.shape
        assert shape is not None
        self.network = CandidateNetwork(shape[-1], **self._settings)
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1.0), **self.optimizer_kwargs)  # type: ignore[call-arg]

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return {**super()._get_constructor_parameters(), **self._settings}

    def forward(
        self, obs: torch.Tensor, deterministic: bool = False, action_masks: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, values = self.network(obs)
        actions = logits.argmax(1) if deterministic else sample(logits)
        return actions, values, torch.log_softmax(logits, 1).gather(1, actions[:, None])[:, 0]

    def evaluate_actions(
        self, obs: torch.Tensor, actions: torch.Tensor, action_masks: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, values = self.network(obs)
        log_p = torch.log_softmax(logits, 1)
        return values, log_p.gather(1, actions[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)

    def get_distribution(self, obs: PyTorchObs, action_masks: Any = None) -> MaskableDistribution:
        distribution = self.action_dist.proba_distribution(action_logits=self.network(obs)[0])
        if action_masks is not None:
            distribution.apply_masking(action_masks)
        return distribution

    def predict_values(self, obs: PyTorchObs) -> torch.Tensor:
        values: torch.Tensor = self.network(obs)[1]
        return values


def sample(logits: torch.Tensor) -> torch.Tensor:
    """(n,) one candidate of each row by its probability (the Gumbel-max trick), from torch's global generator."""
    noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-20, 1 - 1e-7)))
    return (logits + noise).argmax(1)


# ------------------------------------------------------------------------------------------ as a file
def policy_bytes(network: CandidateNetwork, facts: Mapping[str, Any]) -> bytes:
    """The file of a network; `facts` are kept with it (how it was trained)."""
    header = {
        "schema": SCHEMA,
        "features_version": VERSION,
        "features": FEATURES,
        "estimator_fingerprint": fingerprint(),
        "hidden": network.hidden,
        "masked": network.masked,
        "blank": network.blank,
        "facts": dict(facts),
    }
    arrays = {name: value.detach().numpy() for name, value in network.state_dict().items()}
    file = io.BytesIO()
    np.savez(file, header=np.array(json.dumps(header)), **arrays)
    return file.getvalue()


def load_policy(name: str) -> tuple[CandidateNetwork, dict[str, Any]]:
    """(network, facts) of the shipped policy, `pretrained`, or of a policy file.

    Raises InputError for a file that is broken, not ours, or made for other features or another estimator: what a
    policy learnt holds for the times that it learnt from.
    """
    path = SHIPPED if name == PRETRAINED else Path(name)
    where = f"policy {name!r}"
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        header = json.loads(str(arrays.pop("header")))
        if header["schema"] != SCHEMA:
            raise KeyError("schema")
        facts, hidden, masked = dict(header["facts"]), header["hidden"], bool(header["masked"])
        blank = [int(column) for column in header["blank"] if FEATURES[int(column)]]
        version, features, estimator = (
            header[key] for key in ("features_version", "features", "estimator_fingerprint")
        )
        if type(hidden) is not int or not 1 <= hidden <= MOST_HIDDEN:
            raise ValueError("hidden")
    except FileNotFoundError:
        raise InputError(f"{where}: there is no such file; give {PRETRAINED}, or a file of {COMMAND}") from None
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        EOFError,
        IndexError,
        zipfile.BadZipFile,
    ) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InputError(
            f"{where}: it is not a whole policy file of {SCHEMA}; give {PRETRAINED}, or a file of {COMMAND}"
        ) from None
    if version != VERSION or tuple(features) != FEATURES:
        raise InputError(
            f"{where}: it was trained on version {version} of the features, this is version {VERSION}; retrain it: "
            f"{COMMAND}"
        )
    if estimator != fingerprint():
        raise InputError(
            f"{where}: it was trained with estimator {estimator}, this one is {fingerprint()}; retrain it: {COMMAND}"
        )
    network = CandidateNetwork(len(FEATURES), hidden, masked, blank)
    expected = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    if {key: value.shape for key, value in arrays.items()} != expected or not all(
        value.dtype == np.float32 and np.isfinite(value).all() for value in arrays.values()
    ):
        raise InputError(f"{where}: its weights are not those of {hidden} hidden units; retrain it: {COMMAND}")
    network.load_state_dict({key: torch.from_numpy(value) for key, value in arrays.items()})
    return network.eval(), facts
