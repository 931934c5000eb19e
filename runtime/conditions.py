"""Conditions of requests: read, turned into vectors, and added to hidden states before the head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.condition import Conditions
from headport.errors import HeadportError, RequestError
from headport.runtime.results import Stats
from headport.runtime.row import Row
from headport.runtime.sampling.choice import Choice
from headport.runtime.sampling.chooser import Chooser

__all__ = ["Condition", "ConditionedChooser", "conditioned", "read_vector", "read_vectors"]

Float32 = npt.NDArray[np.float32]
Condition = str | Sequence[float] | Float32  # a stored name, or values [C]


@dataclass(frozen=True)
class ConditionedChooser:
    """A chooser whose rows' hidden states get what their conditions add."""

    inner: Chooser

    def choose(self, hidden: Float32, rows: Sequence[Row]) -> list[Choice | HeadportError]:
        """See `Chooser`."""
        return self.inner.choose(conditioned(hidden, rows), rows)

    def logits(self, hidden: Float32) -> Float32:
        """See `Chooser`; the caller has added what there is to add."""
        return self.inner.logits(hidden)


def conditioned(hidden: Float32, rows: Sequence[Row]) -> Float32:
    """Hidden states [N, H] with what the condition of each row adds, itself where there is none."""
    if all(row.condition is None for row in rows):
        return hidden
    found = hidden.copy()
    for n, row in enumerate(rows):
        if row.condition is not None:
            found[n] += row.condition
    return found


def read_vectors(
    given: Any, conditions: Conditions | None, prompts: int, stats: Stats
) -> list[Float32 | None]:
    """What is added to the hidden states of each prompt's rows, [H] each.

    Args:
        given: A condition for all prompts, a list of one or None for each, or None.
        conditions: Of the bundle.
        prompts: How many there are.
        stats: Where products are counted.

    Raises:
        RequestError: If the bundle takes no condition, or one is not as `Conditions.vector` wants
            it; if there is not one for each prompt.
    """
    if not isinstance(given, list | tuple) or not any(map(_is_condition, given)):
        return [read_vector(given, conditions, stats)] * prompts
    if len(given) != prompts:
        raise RequestError(
            f"one condition, or one for each of the {prompts} prompts, was expected; {len(given)} "
            "were given"
        )
    return [read_vector(each, conditions, stats) for each in given]


def read_vector(given: Any, conditions: Conditions | None, stats: Stats) -> Float32 | None:
    """What is added to hidden states, [H]; None without a condition.

    Raises:
        RequestError: As `read_vectors`.
    """
    if given is None:
        return None
    if conditions is None:
        raise RequestError(
            "condition: this bundle takes none; export the model with --condition FILE"
        )
    vector = conditions.vector(given)
    stats.condition_runs = conditions.computed
    return vector


def _is_condition(value: object) -> bool:
    return value is None or isinstance(value, str | list | tuple | np.ndarray)
