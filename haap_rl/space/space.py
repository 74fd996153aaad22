"""The declared space bound to a problem: what searchers draw from, move in and turn into plans."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from haap_rl.cost.estimator import Estimator
from haap_rl.problem.errors import InputError
from haap_rl.problem.plan import Plan, Problem, Recompute, RecomputeMode, ReplicaGroup, Stage
from haap_rl.space.balance import even_split, water_fill
from haap_rl.space.initial import Room, draw_options, no_plan_fits
from haap_rl.space.options import SEQUENCE_PARALLEL, Option, Partner, SpaceSpec, Tables, replica_sizes, stage_options
from haap_rl.space.target import parts

if TYPE_CHECKING:
    from haap_rl.cost.stage_tables import StageTables
    from haap_rl.space.construction import Construction
    from haap_rl.space.kernels import Neighbourhood

MOST_DEVICES = 1_000_000  # of a device group: the compiled tables list them one by one


class Genome(NamedTuple):
    """A point of the space: micro-batches, and per stage, front to back, an option (index) and its layers."""

    num_microbatches: int
    options: tuple[int, ...]
    layers: tuple[int, ...]


Code = npt.NDArray[np.int64]  # a genome as a row of whole numbers, as `cost.kernels` and `space.kernels` take it
Codes = npt.NDArray[np.int64]  # some of them, (N, 2 + 2 S)


class Space:
    """`spec` bound to one problem and its estimator (whose memo the tables share).

    options            every option of a stage, `Option`s; genomes hold their indices
    num_microbatches   the counts of the spec that divide the batch
    """

    def __init__(self, problem: Problem, spec: SpaceSpec, estimator: Estimator) -> None:
        if parts(problem, spec) != (spec,):
            raise InputError(
                f"space: target={spec.target} is the union of several spaces, of one tp, dp and recomputation each, "
                "and only `run_search` goes through them; leave target null here"
            )
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
        self._sizes: dict[tuple[int, int], tuple[int, ...] | None] = {}

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
    def stage_tables(self) -> StageTables:
        """The compiled face of the estimator: seconds and bytes of every option, for kernels."""
        from haap_rl.cost import stage_tables  # numba is imported where it is used

        self._check_listable()
        kinds = [option.kind for option in self.options]
        index = {kind: k for k, kind in enumerate(kinds)}
        return stage_tables.build(
            self.estimator,
            self.num_microbatches,
            kinds,
            lambda kind, m: self.sizes(m, index[kind]),
            self.max_stages,
            self.spec.zero_stage,
            SEQUENCE_PARALLEL,
        )

    @cached_property
    def neighbourhood(self) -> Neighbourhood:
        """The compiled face of draws, moves and relief; the space's own, so not for two threads at once."""
        from haap_rl.space import kernels

        self._check_listable()
        return kernels.build(self)

    @cached_property
    def construction(self) -> Construction:
        """What building plans stage by stage looks up. Raises InputError, saying why, if no plan fits."""
        from haap_rl.space import construction

        self._check_listable()
        if not self.feasible_microbatches:
            raise InputError(no_plan_fits(self.problem, self.spec, self.options, self.estimator))
        return construction.build(self)

    def _check_listable(self) -> None:
        """Raise InputError for a device group with more devices than tables can list."""
        for group in self.problem.cluster.groups:
            if group.num_devices > MOST_DEVICES:
                raise InputError(
                    f"space: device group {group.name!r} has {group.num_devices:,} devices, and plans are searched for "
                    f"at most {MOST_DEVICES:,}; lower num_nodes or devices_per_node"
                )

    @cached_property
    def feasible_microbatches(self) -> tuple[int, ...]:
        """The micro-batch counts at which some plan of the space fits (all of them if memory is ignored)."""
        return tuple(m for m in self.num_microbatches if self.room(m).most_layers >= self.num_layers)

    # --------------------------------------------------------------------------------- genomes
    def draw(self, rng: np.random.Generator) -> Genome:
        """A random genome by memory-aware initialisation. Raises InputError, saying why, if no plan fits."""
        if not self.feasible_microbatches:
            raise InputError(no_plan_fits(self.problem, self.spec, self.options, self.estimator))
        first, *numbers = rng.random(2 + self.max_stages)
        m = self.feasible_microbatches[int(first * len(self.feasible_microbatches))]
        genome = self.decode(m, draw_options(self.room(m), self.num_layers, np.array(numbers)))
        if genome is None:
            raise AssertionError("memory-aware initialisation drew a stage sequence that cannot hold the layers")
        return genome

    def draws(self, rng: np.random.Generator, count: int) -> Codes:
        """`count` draws as rows, compiled: the same plans from the same generator as `draw` gives one by one."""
        from haap_rl.space import kernels

        if not self.feasible_microbatches:
            raise InputError(no_plan_fits(self.problem, self.spec, self.options, self.estimator))
        codes = np.zeros((count, 2 + 2 * self.max_stages), np.int64)
        kernels.draw(self.neighbourhood, rng, codes)
        return codes

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
            for group, tp, dp in self.options[k].parts:
                left[group] -= tp * dp
        return left

    def sizes(self, m: int, k: int) -> tuple[int, ...] | None:
        """Micro-batch size of each replica group of option k at `m` micro-batches; None where none divides it."""
        if (m, k) not in self._sizes:
            self._sizes[m, k] = replica_sizes(self.problem, self.spec, self.estimator, self.options[k], m)
        return self._sizes[m, k]

    def encode(self, genomes: Sequence[Genome]) -> Codes:
        """(N, 2 + 2 S) the genomes as rows: micro-batch index, stages p, S options, S layers; zeros behind the p-th."""
        stages = self.max_stages
        codes = np.zeros((len(genomes), 2 + 2 * stages), np.int64)
        for code, (m, options, layers) in zip(codes, genomes, strict=True):
            p = len(options)
            code[:2] = self.num_microbatches.index(m), p
            code[2 : 2 + p], code[2 + stages : 2 + stages + p] = options, layers
        return codes

    def genome_of(self, code: Code) -> Genome:
        """The genome of a row."""
        index, p, *rest = code.tolist()
        stages = self.max_stages
        return Genome(self.num_microbatches[index], tuple(rest[:p]), tuple(rest[stages : stages + p]))

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
            sizes = self.sizes(m, k)
            if sizes is None:
                raise AssertionError(f"option {option} cannot divide a micro-batch at {m} micro-batches")
            groups = self.problem.cluster.groups
            stage = self._stages[key] = Stage(
                layers + other_units,
                tuple(
                    ReplicaGroup(groups[group].name, tp, dp, size)
                    for (group, tp, dp), size in zip(option.parts, sizes, strict=True)
                ),
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
            if len(stage.replicas) > 1 + self.spec.mixed_stages:
                raise InputError(f"{where} mixes device groups; this space keeps a stage on one")
            replica, *others = stage.replicas
            count = stage.num_units - (i == 0) - (i == last)
            if stage.recompute.num_layers not in (0, count):
                raise InputError(f"{where} recomputes some of its layers; this space recomputes all or none")
            index = self.problem.cluster.index
            partner = Partner(index(others[0].group), others[0].tp, others[0].dp) if others else None
            option = Option(index(replica.group), replica.tp, replica.dp, stage.recompute.mode, partner)
            if option not in self.option_index or count < 1:
                raise InputError(f"{where} ({option}, {count} layers) is not an option of this space; widen space")
            sizes = tuple(part.microbatch_size for part in stage.replicas)
            if sizes != self.sizes(plan.num_microbatches, self.option_index[option]):
                raise InputError(f"{where} gives its replica groups {sizes} samples; this space gives them others")
            options.append(self.option_index[option])
            layers.append(count)
        return Genome(plan.num_microbatches, tuple(options), tuple(layers))
