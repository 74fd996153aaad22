"""What a person can get wrong, said in one line: where, which key, which value, which rule, and a way out."""

import math
from collections.abc import Iterable


class InputError(ValueError):
    """Something a person typed or brought is wrong; the message is one complete line meant for them."""


class PlanError(InputError):
    """A plan breaks a rule of its problem. A plan that merely does not fit in memory is not an error."""


def positive_int(where: str, key: str, value: object) -> int:
    """`value` as an int >= 1; whole floats such as 1e4 are taken. Raises InputError naming `where` and `key`."""
    whole = isinstance(value, float) and math.isfinite(value) and value == int(value)
    if isinstance(value, bool) or not (isinstance(value, int) or whole) or int(value) < 1:  # type: ignore[call-overload]
        raise InputError(f"{where}: {key}={value!r} must be a whole number of at least 1; give for example {key}=8")
    return int(value)  # type: ignore[call-overload, no-any-return]


def positive_float(where: str, key: str, value: object) -> float:
    """`value` as a finite float > 0. Raises InputError naming `where` and `key`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type, operator]
        raise InputError(f"{where}: {key}={value!r} must be a finite number above 0; give for example {key}=1.5")
    return float(value)  # type: ignore[arg-type]


def check_keys(where: str, given: Iterable[str], required: Iterable[str], optional: Iterable[str] = ()) -> None:
    """Raise InputError for the first key that is missing, or that nobody reads (naming the nearest known one)."""
    import difflib

    given, required = list(given), list(required)
    known = [*required, *optional]
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
            raise InputError(f"{where}: unknown key {str(key)!r}; {hint}")
    for key in required:
        if key not in given:
            raise InputError(f"{where}: key {key!r} is missing; needed are {', '.join(sorted(required))}")
