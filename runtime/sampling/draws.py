"""Tokens that are to be drawn: what rows ask for, and their choices from all logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headport.errors import HeadportError
from headport.runtime.row import Row
from headport.runtime.sampling.allowed import ask_allowed
from headport.runtime.sampling.choice import Choice
from headport.runtime.sampling.noise import NoiseKey
from headport.runtime.sampling.sampler import draw, faults, likelihood, process
from headport.runtime.sampling.settings import Context, Sampling

__all__ = ["Chooser", "Draw", "choose_each", "choose_from", "draw_of"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


class Chooser(Protocol):
    """Chooses tokens with one head of one runner."""

    def choose(self, hidden: Float32, rows: Sequence[Row]) -> list[Choice | HeadportError]:
        """One choice per row. Rows may be of any requests; none knows of the others.

        Args:
            hidden: The last hidden state of each row, [N, H].
            rows: Each with its own parameters, [N]; they are not changed, see `Row.accept`.

        Returns:
            For each row its choice, or the error that ends it: `NonFiniteError` where its logits
            are not finite, `RequestError` where its rules ban every token or a callback fails.
        """
        ...

    def logits(self, hidden: Float32) -> Float32:
        """All logits of hidden states [N, H], by ascending original id, [N, K]."""
        ...


@dataclass(frozen=True)
class Draw:
    """What one row asks for at one step."""

    sampling: Sampling  # its `allowed` has been asked for this step
    key: NoiseKey | None  # None only where the temperature is 0
    context: Context
    logprobs: int | None  # how many of the most likely tokens are told; None = no likelihoods

    @property
    def name(self) -> tuple[int, int]:
        """(prompt's index, step), for messages."""
        return self.context.index, len(self.context.token_ids)


def draw_of(row: Row) -> Draw | HeadportError:
    """What a row asks for; its error if its callback fails."""
    context = row.context
    try:
        sampling = ask_allowed(row.sampling, context)
    except HeadportError as error:
        return error
    return Draw(sampling, row.noise_key, context, row.parameters.logprobs)


def choose_from(
    logits: Float32, ids: Int64, each: Draw, decided: int | None = None
) -> Choice | HeadportError:
    """A row's choice from all its logits.

    Args:
        logits: Finite, [K].
        ids: Original id of each position, ascending, [K].
        each: What the row asks for.
        decided: The token, where it is known already and only its likelihood is asked for.

    Returns:
        The choice, or what the row cannot be continued for.
    """
    try:
        processed = process(logits, ids, each.sampling, each.context)
    except HeadportError as error:
        return error
    token_id = draw(*processed, each.sampling, each.key) if decided is None else decided
    if each.logprobs is None:
        return Choice(token_id)
    return likelihood(
        token_id, logits, ids, processed=processed, sampling=each.sampling, top=each.logprobs
    )


def choose_each(logits: Float32, ids: Int64, rows: Sequence[Row]) -> list[Choice | HeadportError]:
    """Each row's choice from its logits, or the error that ends it.

    Args:
        logits: [N, K].
        ids: Original id of each column, ascending, [K].
        rows: [N].
    """
    broken = faults(logits, [(row.index, row.step) for row in rows])
    found: list[Choice | HeadportError] = []
    for n, row in enumerate(rows):
        each = broken.get(n) or draw_of(row)
        found.append(choose_from(logits[n], ids, each) if isinstance(each, Draw) else each)
    return found
