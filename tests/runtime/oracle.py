"""The same plan under torch's own pipeline schedules: only messages are ours, order and backward passes are torch's.

It stands on torch's private `_PipelineStageBase`, for the public PipelineStage has one peer per neighbour.
"""

import torch
import torch.distributed as dist
from torch import nn

from haap_rl.runtime.executor import Worker
from haap_rl.runtime.layers import Embedding
from haap_rl.runtime.routes import incoming, outgoing, routes


class Units(nn.Module):
    """A stage's units without the head, which belongs to the loss."""

    def __init__(self, worker):
        super().__init__()
        self.worker = worker
        self.units = nn.ModuleList(worker.units[: -1 if worker.place.stage == len(worker.routes.stages) - 1 else None])

    def forward(self, values):
        for unit in self.units:
            values = unit(values[:, :-1] if isinstance(unit, Embedding) else values, self.worker.masks)
        return values


def tag(direction, k):
    """torch wants one group for all that it starts together: tags tell both directions apart."""
    return 2 * k + (direction == "up")


def stage_class():
    from torch.distributed.pipelining.stage import _PipelineStageBase

    class AsymmetricStage(_PipelineStageBase):
        """A stage whose replica talks to any ranks of its neighbours."""

        def __init__(self, worker, alone):
            place = worker.place
            super().__init__(Units(worker), place.stage, len(worker.routes.stages), torch.device("cpu"), alone)
            self.worker, self.received = worker, {}
            self._stage_meta.inputs = (None,)

        def _prepare_forward_infra(self, num_microbatches, args, kwargs=None, has_backward=False):
            self.chunks = num_microbatches

        def _prepare_backward_infra(self, num_microbatches, *_, **__):
            return None

        def _create_grad_recv_info(self, act_send_info):
            return ()

        def _get_init_p2p_neighbors_ops(self):
            return []

        def _receives(self, direction, k):
            worker, ops, self.received[direction, k] = self.worker, [], []
            for message in incoming(worker.routes, worker.place, direction):
                shape = (message.end - message.first, worker.job.seq_len, worker.job.model.hidden)
                buffer = torch.empty(shape, dtype=worker.job.torch_dtype)
                self.received[direction, k].append((message, buffer))
                ops.append(dist.P2POp(dist.irecv, buffer, message.sender, worker.groups.way("down"), tag(direction, k)))
            return ops

        def _whole(self, direction, k):
            parts = sorted(self.received.pop((direction, k)), key=lambda pair: pair[0].first)
            return torch.cat([buffer for _, buffer in parts])

        def _sends(self, direction, k, values):
            place = self.worker.place
            return [
                dist.P2POp(
                    dist.isend,
                    values.detach()[m.first - place.first : m.end - place.first].contiguous(),
                    m.receiver,
                    self.worker.groups.way("down"),
                    tag(direction, k),
                )
                for m in outgoing(self.worker.routes, place, direction)
            ]

        def get_fwd_recv_ops(self, fwd_chunk_id):
            return self._receives("down", fwd_chunk_id)

        def get_bwd_recv_ops(self, bwd_chunk_id):
            return self._receives("up", bwd_chunk_id)

        def _retrieve_recv_activations(self, fwd_chunk_id):
            return (self._whole("down", fwd_chunk_id).requires_grad_(),)

        def _retrieve_recv_grads(self, bwd_chunk_id):
            return (self._whole("up", bwd_chunk_id),)

        def get_fwd_send_ops(self, fwd_chunk_id):
            return self._sends("down", fwd_chunk_id, self.fwd_cache[fwd_chunk_id][0][0])

        def get_bwd_send_ops(self, bwd_chunk_id):
            gradients = self.bwd_cache.pop(bwd_chunk_id)
            return [] if self.is_first else self._sends("up", bwd_chunk_id, gradients[0])

    return AsymmetricStage


def train_by_torch(member, schedule_name, job, plan, steps):
    """Losses of a plan's steps on each of its ranks, by a schedule of torch.distributed.pipelining."""
    from torch.distributed import pipelining

    ways = routes(plan, job.global_batch_size // plan.num_microbatches)
    member.groups.prepare(ways)
    alone = [dist.new_group([rank]) for rank in range(member.world_size)][member.rank]
    if member.rank >= ways.num_ranks:
        return None
    worker = Worker(job, plan, ways, member.rank, member.groups)
    place, head = worker.place, worker.units[-1]
    last = place.stage == len(ways.stages) - 1
    stage = stage_class()(worker, alone)
    schedule = getattr(pipelining, schedule_name)(
        stage, plan.num_microbatches, lambda hidden, target: head(hidden, target) / job.num_tokens, scale_grads=False
    )
    control, found = member.groups.control(ways.num_ranks), []
    for step in range(steps):
        ids = job.batch(step)
        own = torch.cat([worker._own(ids, k) for k in range(plan.num_microbatches)])
        losses = []
        given = {"target": own[:, 1:], "losses": losses} if last else {}
        schedule.step(*([own] if place.stage == 0 else []), return_outputs=False, **given)
        for end in (worker.updates.reduce, worker.updates.clip, worker.updates.apply, worker.updates.gather):
            end()
        total = torch.tensor(sum(map(float, losses)) if place.tp_index == 0 else 0.0, dtype=torch.float64)
        dist.all_reduce(total, group=control)
        found.append(float(total))
    return found
