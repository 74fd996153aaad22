"""Intervals of means by Student's t."""

import pytest

from haap_rl.report.intervals import half_width, interval


def test_a_single_value_has_no_width():
    assert half_width([3.0]) is None
    assert interval([3.0]) == (3.0, 3.0, 3.0)


def test_three_values_by_the_table_of_students_t():
    mean, low, high = interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert high - mean == pytest.approx(4.303 / 3**0.5, rel=1e-3)  # t of 2 degrees of freedom, 0.975
    assert mean - low == pytest.approx(high - mean)


def test_equal_values_are_certain():
    assert interval([2.0] * 5) == (2.0, 2.0, 2.0)
