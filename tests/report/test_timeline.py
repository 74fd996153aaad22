"""Who computes when and who waits for whom, by hand for two stages, and drawn small however long the pipeline is."""

import itertools
import re

import pytest

from haap_rl.cost.estimate import Estimate, StageMemory, StageTime
from haap_rl.cost.estimator import Estimator
from haap_rl.problem.plan import Plan, ReplicaGroup, Stage
from haap_rl.report.timeline import Waits, spans, timeline_picture, waits
from tests.builders import PLAIN, plan, problem, random_plans, stage


def estimate(forward, backward, m, tails):
    """An estimate of stages with these seconds, which send for nothing."""
    times = [StageTime(f, b, 0, 0, 0, 0, 0, tail, 0, 1) for f, b, tail in zip(forward, backward, tails, strict=True)]
    memory = ((StageMemory("fast", 1, 1, 1, 1, 1, 1, 1, 10, 0.0),),) * len(times)
    bare = Estimate(0, True, 0, 0, tuple(times), memory, (0.0,) * (len(times) - 1), (forward,), (backward,), m, 1)
    ends = [max(slot.end_s for slot in bare.timeline() if slot.stage == i) for i in range(len(times))]
    iteration_s = max(end + tail for end, tail in zip(ends, tails, strict=True))
    return Estimate(iteration_s, True, 0, max(ends), tuple(times), memory, bare.delays_s, (forward,), (backward,), m, 1)


def test_two_stages_and_two_micro_batches_by_hand():
    # stage 0: F F . . B B . B B t    stage 1: . F B B F B B . . .
    shown = estimate((1.0, 1.0), (2.0, 2.0), 2, (1.0, 0.0))
    assert waits(shown) == [Waits(0.0, 3.0, 0.0), Waits(1.0, 0.0, 3.0)]
    kinds = [(s.kind, s.start_s, s.end_s) for s in spans(shown)[0]]
    assert kinds == [
        ("forward", 0, 1), ("forward", 1, 2), ("after", 2, 4), ("backward", 4, 6), ("after", 6, 7), ("backward", 7, 9),
        ("tail", 9, 10), ("end", 10, 10),
    ]  # fmt: skip


def test_spans_fill_every_stage_of_any_plan_without_gaps():
    target = problem()
    estimator = Estimator(target)
    for candidate in random_plans(target, 30):
        price = estimator(candidate)
        for row in spans(price):
            assert row[0].start_s == 0
            assert all(before.end_s == after.start_s for before, after in itertools.pairwise(row))
            assert row[-1].end_s == pytest.approx(price.iteration_s)


def test_chunks_of_interleaved_stages_are_drawn_paler():
    target = problem()
    shown = plan(stage(3, "fast", 1, 2, 2), stage(3, "slow", 2, 2, 2), m=2, virtual_stages=2)
    drawn = timeline_picture(shown, Estimator(target, calibration=PLAIN)(shown))
    assert 'fill-opacity="0.45"' in drawn
    assert "Paler" in drawn


@pytest.mark.parametrize(("stages", "m"), [(2, 2), (16, 128), (12, 4096), (100, 512)])
def test_the_picture_stays_small(stages, m):
    shown = estimate((1e-3,) * stages, (2e-3,) * stages, m, (1e-3,) * stages)
    drawn = timeline_picture(Plan((Stage(3, (ReplicaGroup("fast", 1, 1, 1),)),) * stages, m), shown)
    assert len(drawn) < 600_000
    assert ("drawn together" in drawn) == (m > 128)


def test_slots_drawn_together_keep_their_shares():
    shown = estimate((1e-3, 1e-3), (3e-3, 3e-3), 2000, (0.0, 0.0))
    drawn = timeline_picture(Plan((Stage(3, (ReplicaGroup("fast", 1, 1, 1),)),) * 2, 2000), shown)

    def area(kind):
        paths = "".join(re.findall(rf'<path d="([^"]*)" class="{kind}">', drawn))
        return sum(float(w) * float(h) for w, h in re.findall(r"h([\d.]+)v([\d.]+)", paths))

    assert area("backward") / area("forward") == pytest.approx(3, rel=0.02)
