"""One plan under one policy on one cluster: which cells a component takes with it, and how training goes on without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from haap_rl.faults.cost import Cell, Degraded, FaultEstimator
from haap_rl.faults.model import Component
from haap_rl.faults.policy import Down, Policy, Stopped
from haap_rl.faults.response import Response, Transitions
from haap_rl.problem.placement import place
from haap_rl.problem.plan import Plan, Problem


def cell_devices(problem: Problem, plan: Plan) -> dict[tuple[int, int], Cell]:
    """(device group, device) -> the cell that it is part of; devices that the plan leaves idle are not there."""
    cells = {}
    for i, (stage, placed) in enumerate(zip(plan.stages, place(problem.cluster, plan), strict=True)):
        replica = 0
        for group, where in zip(stage.replicas, placed, strict=True):
            index = problem.cluster.index(group.group)
            for device in range(group.num_devices):
                cells[index, where.first_device + device] = Cell(i, replica + device // group.tp)
            replica += group.dp
    return cells


class Reactions:
    """`reactions(down) -> Response` for sets of components (indices) that are down, each worked out once.

    transitions     seconds in which nothing is trained; `checkpoint_interval_s` as given
    cells, idle     of each component: the cells that it takes with it, and of each device group the idle devices
    spare           idle devices of each device group, all alive
    Idle devices are left out where they make no difference to the policy.
    """

    def __init__(
        self,
        estimator: FaultEstimator,
        plan: Plan,
        policy: Policy,
        components: Sequence[Component],
        checkpoint_interval_s: float | None = None,
    ) -> None:
        self.estimator, self.plan, self.policy, self.components = estimator, plan, policy, tuple(components)
        self.transitions: Transitions = policy.transitions(estimator, plan)
        if checkpoint_interval_s is not None:
            self.transitions = self.transitions._replace(checkpoint_interval_s=checkpoint_interval_s)
        of_device = cell_devices(estimator.problem, plan)
        self.cells: list[tuple[Cell, ...]] = []
        self.idle: list[tuple[tuple[int, int], ...]] = []
        self._lost: list[frozenset[tuple[int, int]]] = []  # of each component, the idle devices it takes with it
        for component in self.components:
            devices = [(component.group, component.first_device + d) for d in range(component.num_devices)]
            self.cells.append(tuple(sorted({of_device[d] for d in devices if d in of_device})))
            lost = frozenset(d for d in devices if policy.uses_idle and d not in of_device)
            self._lost.append(lost)
            self.idle.append(tuple(sorted(Counter(group for group, _ in lost).items())))
        groups = estimator.problem.cluster.groups
        used = [sum(1 for group, _ in of_device if group == g) for g in range(len(groups))]
        self.spare = tuple(
            group.num_devices - n if policy.uses_idle else 0 for group, n in zip(groups, used, strict=True)
        )
        self._layers = [key.num_layers for key in estimator.keys(plan)]
        self._known: dict[Down, Response] = {}

    def __call__(self, down: frozenset[int]) -> Response:
        """How training goes on while the components `down` are down."""
        cells = frozenset(cell for index in down for cell in self.cells[index])
        lost = frozenset(device for index in down for device in self._lost[index])
        idle = tuple(n - sum(1 for group, _ in lost if group == g) for g, n in enumerate(self.spare))
        return self.of(Down(cells, idle))

    def of(self, down: Down) -> Response:
        """The same for cells and the live idle devices of each device group."""
        response = self._known.get(down)
        if response is None:
            response = self._known[down] = self._work_out(down)
        return response

    def _work_out(self, down: Down) -> Response:
        estimator, plan = self.estimator, self.plan
        action = self.policy.apply(estimator, plan, down)
        if isinstance(action, Stopped):
            return Response(0.0, reason=action.reason, out_of_memory=action.out_of_memory)
        healthy = estimator.healthy(plan)
        if not isinstance(action, Degraded):
            seconds = max(healthy.iteration_s, estimator.pipelines_s(plan, action))
            return Response(healthy.tokens_per_iteration / seconds)
        estimate = estimator.degraded(action)
        if not estimate.fits:
            return Response(0.0, reason="the take-over does not fit in memory", out_of_memory=True)
        # work that is shared out anew never makes the whole faster than the healthy plan, which could do the same
        rate = min(estimate.tokens_per_s, healthy.tokens_per_s)
        samples_lost = action.samples_lost * plan.num_microbatches / estimator.problem.global_batch_size
        return Response(rate, self._attention_lost(action), samples_lost)

    def _attention_lost(self, state: Degraded) -> float:
        """Share of attention gradients, layer by sample, that takers skip."""
        samples = self.estimator.problem.global_batch_size / state.plan.num_microbatches
        lost = sum(
            layers * sum(t.share * t.samples for cell in cells for t in cell if t.backward == "mecefo") / samples
            for layers, cells in zip(self._layers, state.work, strict=True)
        )
        return lost / sum(self._layers)

    def with_interval(self, checkpoint_interval_s: float) -> Reactions:
        """The same with another time between checkpoints; what is known is kept."""
        other = Reactions.__new__(Reactions)
        other.__dict__.update(self.__dict__)
        other.transitions = self.transitions._replace(checkpoint_interval_s=checkpoint_interval_s)
        return other
