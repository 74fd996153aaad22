"""What `faults=` says: how devices fail, what training does then, and how exactly that is summed up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from haap_rl.cost.profiles import Profile
from haap_rl.faults.cost import FaultEstimator
from haap_rl.faults.expected import LEAST_PROBABILITY
from haap_rl.faults.model import FailureModel, failure_model_from_config
from haap_rl.faults.policy import Constants, Policy, constants_from_config, mecefo_options, policy_named
from haap_rl.mecefo.options import MecefoOptions
from haap_rl.problem.errors import InputError, shown
from haap_rl.problem.plan import Problem


@dataclass(frozen=True, slots=True)
class Faults:
    """A failure model with the policy that meets it.

    least_probability   of a combination of failures that an expectation looks at one by one
    """

    model: FailureModel
    policy: Policy
    options: MecefoOptions
    constants: Constants
    least_probability: float = LEAST_PROBABILITY

    def estimator(self, problem: Problem, cached: bool = True, profile: Profile | None = None) -> FaultEstimator:
        """The estimator of degraded plans with these options."""
        return FaultEstimator(problem, cached, profile=profile, options=self.options)

    def with_policy(self, name: object) -> Faults:
        """The same failures met by another policy. Raises InputError for an unknown name."""
        policy = policy_named(name, self.options, self.constants)
        return Faults(self.model, policy, self.options, self.constants, self.least_probability)


def faults_from_config(config: Mapping[str, Any]) -> Faults:
    """Faults from the mapping of a composed `faults=` (see `conf/faults/`). Raises InputError."""
    model = failure_model_from_config(config)
    options = mecefo_options(config.get("mecefo", {}))
    constants = constants_from_config(config.get("constants", {}))
    least = config.get("least_probability", LEAST_PROBABILITY)
    if isinstance(least, bool) or not isinstance(least, int | float) or not 1e-9 <= least <= 0.01:
        raise InputError(
            f"faults: least_probability={shown(least)} must be between 1e-9 and 0.01; give for example "
            f"faults.least_probability={LEAST_PROBABILITY:g}"
        )
    policy = policy_named(config.get("policy", "mecefo"), options, constants)
    return Faults(model, policy, options, constants, float(least))
