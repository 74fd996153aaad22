"""Our loop against torch's own pipeline schedules, on plans whose neighbouring stages differ in every degree."""

import pytest
from torch.distributed.pipelining import stage

from haap_rl.runtime.training import train
from tests.runtime.oracle import train_by_torch
from tests.runtime.plans import LLAMA, PLANS, job, problem

NEEDED = ("get_fwd_recv_ops", "get_bwd_send_ops", "_retrieve_recv_activations", "_retrieve_recv_grads")
JOB = job(problem(LLAMA))
STEPS = 5

pytestmark = pytest.mark.skipif(
    not all(hasattr(getattr(stage, "_PipelineStageBase", None), name) for name in NEEDED),
    reason="the private base class of torch's pipeline stages is another one in this version",
)


@pytest.mark.parametrize("name", ["tp 2 -> dp 3 unequal", "dp 2 -> dp 3", "four micro-batches"])
def test_losses_are_those_under_torchs_schedules(ranks, name):
    ours = [trained.report for trained in ranks.call(train, JOB, PLANS[name], STEPS) if trained.report]
    for schedule in ("Schedule1F1B", "ScheduleGPipe"):
        theirs = ranks.call(train_by_torch, schedule, JOB, PLANS[name], STEPS)
        for report, losses in zip(ours, theirs, strict=False):
            assert losses == pytest.approx(report.losses, abs=1e-6)
