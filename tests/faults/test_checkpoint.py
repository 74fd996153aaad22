"""Young's and Daly's formulas, and where they must agree."""

import math

import pytest

from haap_rl.faults.checkpoint import best_interval_s, dalys_efficiency, kept_share, youngs_interval_s


def test_young_by_hand():
    assert youngs_interval_s(50.0, 1e4) == 1000.0


def test_daly_by_hand():
    # T = M ln 2 without checkpoint time: e = ln 2 e^(-R/M) / (2 - 1)
    assert dalys_efficiency(100 * math.log(2), 0.0, 100.0, 50.0) == pytest.approx(math.log(2) * math.exp(-0.5))


@pytest.mark.parametrize("mtbf_s", [3600.0, 1e6])
def test_young_s_interval_becomes_daly_s_best_as_checkpoints_become_short(mtbf_s):
    gaps = []
    for ratio in (1e-2, 1e-4, 1e-6, 1e-8):
        best = best_interval_s(ratio * mtbf_s, mtbf_s)
        gaps.append(1 - best / youngs_interval_s(ratio * mtbf_s, mtbf_s))
    # the next term: T = sqrt(2CM) (1 - sqrt(C / 2M) 2/3 ...), so a tenth per hundredth of C/M
    assert gaps == sorted(gaps, reverse=True)
    assert 0 < gaps[-1] < 1e-4
    assert gaps[1] / gaps[0] == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("checkpoint_s", [0.1, 30.0, 2000.0])
@pytest.mark.parametrize("restart_s", [0.0, 500.0])
def test_no_interval_beats_the_best(checkpoint_s, restart_s):
    best = best_interval_s(checkpoint_s, 1e4)
    top = dalys_efficiency(best, checkpoint_s, 1e4, restart_s)
    for factor in (0.5, 0.9, 0.999, 1.001, 1.1, 2.0):
        assert dalys_efficiency(factor * best, checkpoint_s, 1e4, restart_s) <= top


def test_ends_of_the_range():
    assert kept_share(0.0, 100.0, 50.0) == 1.0  # continuous
    assert kept_share(math.inf, 1.0, 50.0) == 0.0  # never, and stops come
    assert kept_share(math.inf, 1.0, math.inf) == 1.0  # never, and none comes
    assert kept_share(90.0, 10.0, math.inf) == 0.9
    assert kept_share(1e9, 1.0, 1.0) == 0.0
    assert best_interval_s(0.0, 100.0) == 0.0
    assert best_interval_s(10.0, math.inf) == math.inf


def test_without_stops_the_share_is_that_of_a_cycle():
    assert kept_share(90.0, 10.0, 1e12) == pytest.approx(0.9, rel=1e-9)
