"""The ranges of all options, in one table that calls and bundles are held against."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headport.errors import RequestError
from headport.runtime.sampling.noise import MAX_SEED

__all__ = ["LIMITS", "check", "is_whole"]

Check = Callable[[Any], bool]
_BOOLEANS: tuple[type, ...] = (bool,)  # Python's own counts as a number


def is_whole(value: object) -> bool:
    """Whether a value is a whole number; truth values are none, NumPy's integers are."""
    return isinstance(value, numbers.Integral) and not isinstance(value, _BOOLEANS)


def _whole(low: int, high: float = float("inf")) -> Check:
    return lambda v: is_whole(v) and low <= int(v) <= high


def _real(low: float, high: float) -> Check:
    # NaN fails every comparison, so it is refused as well.
    return lambda v: (
        isinstance(v, numbers.Real) and not isinstance(v, _BOOLEANS) and low <= float(v) <= high
    )


def _text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _one_or_several(check: Check) -> Check:
    def holds(value: Any) -> bool:
        if isinstance(value, Sequence) and not isinstance(value, str):
            return all(check(v) for v in value)
        return check(value)

    return holds


# option → (check, what is expected); `parameters.Options` says what each one does
LIMITS: dict[str, tuple[Check, str]] = {
    "max_new_tokens": (_whole(1), "a whole number from 1 up"),
    "max_length": (_whole(1), "a whole number from 1 up"),
    "temperature": (_real(0.0, 1e30), "a number from 0 (greedy) to 1e30"),
    "top_k": (_whole(0), "a whole number from 0 (off) up"),
    "top_p": (_real(0.0, 1.0), "a number from 0 to 1 (off)"),
    "min_p": (_real(0.0, 1.0), "a number from 0 (off) to 1"),
    "seed": (_one_or_several(_whole(0, MAX_SEED)), f"whole numbers from 0 to {MAX_SEED}"),
    "stop": (_one_or_several(_text), "texts that are not empty"),
    "eos_token_id": (_one_or_several(_whole(0)), "token ids, whole numbers from 0 up"),
}


def check(values: Mapping[str, Any]) -> None:
    """Hold values against the table.

    Raises:
        RequestError: Naming every option that is out of range, its range and its value.
    """
    faults = [
        f"{name} must be {LIMITS[name][1]}, {value!r} was given"
        for name, value in values.items()
        if not LIMITS[name][0](value)
    ]
    if faults:
        raise RequestError("; ".join(faults))
