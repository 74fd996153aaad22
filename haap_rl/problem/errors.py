"""What a person can get wrong, said in one line: where, which key, which value, which rule, and a way out."""

import math
import reprlib
from collections.abc import Iterable

LARGEST_COUNT = 10**15
LARGEST_NUMBER = 1e30


class InputError(ValueError):
    """Something a person typed or brought is wrong; the message is one complete line meant for them."""


class PlanError(InputError):
    """A plan breaks a rule of its problem. A plan that merely does not fit in memory is not an error."""


class _Short(reprlib.Repr):
    """repr of at most a line, also of what a hostile file holds."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to print a whole number of more than 4,300 digits
        return super().repr_int(x, level) if x.bit_length() < 1000 else "a number of more than 300 digits"


shown = _Short().repr  # a value for an error message: one short line, whatever it is


def label(where: str, key: str, value: object) -> str:
    """`value` as a name: 1 to 100 printable characters. Raises InputError naming `where` and `key`."""
    named = isinstance(value, str) or (isinstance(value, int) and value.bit_length() < 64)  # `name: 100` in YAML
    text = str(value) if named and not isinstance(value, bool) else ""
    if not 1 <= len(text) <= 100 or not text.isprintable():
        raise InputError(f"{where}: {key}={shown(value)} must be a name of 1 to 100 printable characters")
    return text


def positive_int(where: str, key: str, value: object) -> int:
    """`value` as an int from 1 to 10^15; whole floats such as 1e4 are taken. InputError names `where` and `key`."""
    whole = isinstance(value, float) and math.isfinite(value) and value == int(value)
    if isinstance(value, bool) or not (isinstance(value, int) or whole) or not 1 <= value <= LARGEST_COUNT:  # type: ignore[operator]
        small = not (isinstance(value, int) and value > LARGEST_COUNT)
        rule = "of at least 1" if small else "up to 10^15"
        raise InputError(f"{where}: {key}={shown(value)} must be a whole number {rule}; give for example {key}=8")
    return int(value)  # type: ignore[call-overload, no-any-return]


def positive_float(where: str, key: str, value: object) -> float:
    """`value` as a float above 0 and up to 10^30. Raises InputError naming `where` and `key`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= LARGEST_NUMBER:  # type: ignore[operator]
        raise InputError(f"{where}: {key}={shown(value)} must be a finite number above 0; give for example {key}=1.5")
    return float(value)  # type: ignore[arg-type]


def share(where: str, key: str, value: object) -> float:
    """`value` as a float between 0 and 1. Raises InputError naming `where` and `key`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= 1:  # type: ignore[operator]
        raise InputError(f"{where}: {key}={shown(value)} must be between 0 and 1; give for example {key}=0.5")
    return float(value)  # type: ignore[arg-type]


def yes_or_no(where: str, key: str, value: object) -> bool:
    """`value` as a bool. Raises InputError naming `where` and `key`."""
    if not isinstance(value, bool):
        raise InputError(f"{where}: {key}={shown(value)} must be true or false")
    return value


def check_keys(where: str, given: Iterable[str], required: Iterable[str], optional: Iterable[str] = ()) -> None:
    """Raise InputError for the first key that is missing, or that nobody reads (naming the nearest known one)."""
    import difflib

    given, required = list(given), list(required)
    known = [*required, *optional]
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key)[:100], known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
            raise InputError(f"{where}: unknown key {shown(key)}; {hint}")
    for key in required:
        if key not in given:
            raise InputError(f"{where}: key {key!r} is missing; needed are {', '.join(sorted(required))}")
