"""One token that is to be drawn: what a row asks for, and its choice from all logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headport.errors import HeadportError
from headport.runtime.row import Row
from headport.runtime.sampling.allowed import ask_allowed
from headport.runtime.sampling.choice import Choice
from headport.runtime.sampling.noise import NoiseKey
from headport.runtime.sampling.sampler import draw, likelihood, process
from headport.runtime.sampling.settings import Context, Sampling

__all__ = ["Draw", "choose_from", "draw_of"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


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
