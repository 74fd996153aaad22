"""Dual numbers: a value and its gradient, so that the ordinary estimator differentiates itself (forward mode).

The estimator's formulas are plain Python arithmetic with `max` and `min`. Given constants that are dual numbers, the
same code returns seconds that carry their gradient by those constants. Source: Wengert 1964.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class Dual:
    """value + gradient . epsilon, with epsilon squared = 0. Comparisons are by value."""

    __slots__ = ("gradient", "value")
    __array_ufunc__ = None  # NumPy scalars leave the arithmetic to this class

    def __init__(self, value: float, gradient: npt.NDArray[np.float64]) -> None:
        self.value = value
        self.gradient = gradient

    def __add__(self, other: Any) -> Dual:
        if isinstance(other, Dual):
            return Dual(self.value + other.value, self.gradient + other.gradient)
        return Dual(self.value + other, self.gradient)

    __radd__ = __add__

    def __neg__(self) -> Dual:
        return Dual(-self.value, -self.gradient)

    def __sub__(self, other: Any) -> Dual:
        if isinstance(other, Dual):
            return Dual(self.value - other.value, self.gradient - other.gradient)
        return Dual(self.value - other, self.gradient)

    def __rsub__(self, other: Any) -> Dual:
        return Dual(other - self.value, -self.gradient)

    def __mul__(self, other: Any) -> Dual:
        if isinstance(other, Dual):
            return Dual(self.value * other.value, self.value * other.gradient + other.value * self.gradient)
        return Dual(self.value * other, other * self.gradient)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Dual:
        if isinstance(other, Dual):
            value = self.value / other.value
            return Dual(value, (self.gradient - value * other.gradient) / other.value)
        return Dual(self.value / other, self.gradient / other)

    def __rtruediv__(self, other: Any) -> Dual:
        value = other / self.value
        return Dual(value, (-value / self.value) * self.gradient)

    def __pow__(self, power: float) -> Dual:
        return Dual(self.value**power, (power * self.value ** (power - 1.0)) * self.gradient)

    def __lt__(self, other: Any) -> bool:
        return bool(self.value < value_of(other))

    def __le__(self, other: Any) -> bool:
        return bool(self.value <= value_of(other))

    def __gt__(self, other: Any) -> bool:
        return bool(self.value > value_of(other))

    def __ge__(self, other: Any) -> bool:
        return bool(self.value >= value_of(other))

    def __eq__(self, other: object) -> bool:
        return bool(self.value == value_of(other))

    def __hash__(self) -> int:
        return hash(self.value)


def value_of(number: Any) -> Any:
    """The value of a dual number; any other number is its own value."""
    return number.value if isinstance(number, Dual) else number
