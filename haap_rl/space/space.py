"""The declared space bound to a problem: what searchers draw from, move in and turn into plans."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from haap_rl.cost.estimator import Estimator
from haap_rl.problem.errors import InputError
from haap_rl.problem.plan import Plan, Problem, Recompute, RecomputeMode, ReplicaGroup, Stage
from haap_rl.space.balance import even_split, water_fill
from haap_rl.space.initial import Room, draw_options, no_plan_fits
from haap_rl.space.options import SEQUENCE_PARALLEL, Option, SpaceSpec, Tables, stage_options


class Genome(NamedTuple):
    """A point of the space: micro-batches, and per stage, front to back, an option (index) and its layers."""

    num_microbatches: int
    options: tuple[int, ...]
    layers: tuple[int, ...]


class Space:
    """`spec` bound to one problem and its estimator (whose memo the tables share).

    options            every option of a stage, `Option`s; genomes hold their indices
    num_microbatches   the counts of the spec that divide the batch
    """

    def __init__(self, problem: Problem, spec: SpaceSpec, estimator: Estimator) -> None:
        self.problem, self.spec, self.estimator = problem, spec, estimator
        self.options = stage_options(problem, spec)
        self.option_index = {option: k for k, option in enumerate(self.options)}
        self.num_microbatches = tuple(sorted(m for m in spec.num_microbatches if problem.global_batch_size % m == 0))
        if not self.num_microbatches:
            raise InputError(
                f"space: none of num_microbatches={list(spec.num_microbatches)} divides "
                f"global_batch_size={problem.global_batch_size}; add a divisor of it, or change the batch"
            )
        if not self.options:
            raise InputError(
                f"space: no group size of {list(spec.group_sizes)} and tp <= {spec.max_tp} is legal on cluster "
                f"{problem.cluster.name!r}; add a smaller group size"
            )
        self.num_layers = problem.model.num_layers
        self.max_stages = min(spec.max_stages, self.num_layers)
        self.num_devices = tuple(group.num_devices for group in problem.cluster.groups)
        self._tables: dict[int, Tables] = {}
        self._rooms: dict[int, Room] = {}
        self._stages: dict[tuple[int, int, int, int], Stage] = {}

    def tables(self, m: int) -> Tables:
        """Time and memory of the options at `m` micro-batches; memory is ignored where the ablation says so."""
        if m not in self._tables:
            self._tables[m] = Tables(
                self.problem, self.spec, self.options, self.estimator, m, memory=self.spec.memory_aware_init
            )
        return self._tables[m]

    def room(self, m: int) -> Room:
        """Which partial plans can still be completed at `m` micro-batches."""
        if m not in self._rooms:
            self._rooms[m] = Room(self.options, self.tables(m), self.num_devices)
        return self._rooms[m]

    @cached_property
    def feasible_microbatches(self) -> tuple[int, ...]:
        """The micro-batch counts at which some plan of the space fits (all of them if memory is ignored)."""
        return tuple(m for m in self.num_microbatches if self.room(m).most_layers >= self.num_layers)

    # --------------------------------------------------------------------------------- genomes
    def draw(self, rng: np.random.Generator) -> Genome:
        """A random genome by memory-aware initialisation. Raises InputError, saying why, if no plan fits."""
        if not self.feasible_microbatches:
            raise InputError(no_plan_fits(self.problem, self.spec, self.options, self.estimator))
        m = int(rng.choice(self.feasible_microbatches))
        genome = self.decode(m, draw_options(self.room(m), self.num_layers, rng))
        if genome is None:
            raise AssertionError("memory-aware initialisation drew a stage sequence that cannot hold the layers")
        return genome

    def decode(self, m: int, options: tuple[int, ...]) -> Genome | None:
        """The genome with these options and balanced layers, or None if the layers do not fit in them.

        Devices are not checked here; see `devices_left`.
        """
        tables = self.tables(m)
        caps = tables.caps(options)
        if not self.spec.load_balance:
            layers = even_split(caps, self.num_layers)
        else:
            fixed = [0.0] * len(options)
            fixed[0] += tables.embedding_s[options[0]]
            fixed[-1] += tables.head_s[options[-1]]
            layers = water_fill([tables.layer_s[k] for k in options], fixed, caps, self.num_layers)
        return None if layers is None else Genome(m, options, layers)

    def holds(self, m: int, options: tuple[int, ...]) -> bool:
        """Whether `decode` would succeed and no device group is over-used, without balancing."""
        if not 0 < len(options) <= self.max_stages or min(self.devices_left(options)) < 0:
            return False
        caps = self.tables(m).caps(options)
        return min(caps) > 0 and sum(caps) >= self.num_layers

    def devices_left(self, options: tuple[int, ...]) -> list[int]:
        """Devices of each group that the options leave idle; negative where they use too many."""
        left = list(self.num_devices)
        for k in options:
            option = self.options[k]
            left[option.group] -= option.tp * option.dp
        return left

    # ----------------------------------------------------------------------------------- plans
    def plan(self, genome: Genome) -> Plan:
        """The plan that a genome stands for."""
        m, last = genome.num_microbatches, len(genome.options) - 1
        return Plan(
            tuple(
                self._stage(m, k, layers, (i == 0) + (i == last))
                for i, (k, layers) in enumerate(zip(genome.options, genome.layers, strict=True))
            ),
            m,
            self.spec.zero_stage,
            SEQUENCE_PARALLEL,
        )

    def _stage(self, m: int, k: int, layers: int, other_units: int) -> Stage:
        key = (m, k, layers, other_units)
        stage = self._stages.get(key)
        if stage is None:
            option = self.options[k]
            mode: RecomputeMode = option.recompute  # type: ignore[assignment]
            size = self.problem.global_batch_size // m // option.dp
            stage = self._stages[key] = Stage(
                layers + other_units,
                (ReplicaGroup(self.problem.cluster.groups[option.group].name, option.tp, option.dp, size),),
                Recompute(mode, 0 if mode == "none" else layers),
            )
        return stage

    def genome(self, plan: Plan) -> Genome:
        """The genome of a plan of this space. Raises InputError if the plan is outside it."""
        if plan.zero_stage != self.spec.zero_stage:
            raise InputError(
                f"space: zero_stage={plan.zero_stage} of the plan is not that of this space, {self.spec.zero_stage}"
            )
        if plan.virtual_stages != 1:
            raise InputError("space: the plan interleaves its stages; this space does not")
        options, layers = [], []
        last = len(plan.stages) - 1
        for i, stage in enumerate(plan.stages):
            where = f"space: stage {i} of the plan"
            if len(stage.replicas) != 1:
                raise InputError(f"{where} mixes device groups; this space keeps a stage on one")
            replica = stage.replicas[0]
            count = stage.num_units - (i == 0) - (i == last)
            if stage.recompute.num_layers not in (0, count):
                raise InputError(f"{where} recomputes some of its layers; this space recomputes all or none")
            group = self.problem.cluster.index(replica.group)
            option = Option(group, replica.tp, replica.dp, stage.recompute.mode)
            if option not in self.option_index or count < 1:
                raise InputError(f"{where} ({option}, {count} layers) is not an option of this space; widen space")
            options.append(self.option_index[option])
            layers.append(count)
        return Genome(plan.num_microbatches, tuple(options), tuple(layers))
