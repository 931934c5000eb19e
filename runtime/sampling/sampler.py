"""From one row of logits to one token: processors → filters → Gumbel argmax.

`SAMPLING.md` states every edge. Functions are pure and take one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.errors import NonFiniteError, RequestError
from headport.runtime.sampling.choice import Choice, TopLogprob
from headport.runtime.sampling.filters import FILTERS, keep, log_softmax, scale
from headport.runtime.sampling.largest import largest
from headport.runtime.sampling.noise import NoiseKey, argmax_with_noise, draw_bits
from headport.runtime.sampling.processors import PROCESSORS, apply_processors
from headport.runtime.sampling.settings import Context, Sampling

__all__ = ["choose", "draw", "faults", "filtering", "likelihood", "process", "processing"]

Float32 = npt.NDArray[np.float32]
Scores = npt.NDArray[Any]  # float32 as the head gives them, or float64 as processors leave them
Int64 = npt.NDArray[np.int64]

_NOTHING = Context()


def processing(sampling: Sampling) -> bool:
    """Whether any processor acts."""
    return any(processor.acts(sampling) for processor in PROCESSORS)


def filtering(sampling: Sampling) -> bool:
    """Whether any filter may remove a token."""
    return any(each.acts(sampling) for each in FILTERS)


def faults(logits: Scores, names: Sequence[tuple[int, int]]) -> dict[int, NonFiniteError]:
    """The rows from which no token can be drawn, because a logit is NaN or infinite.

    Args:
        logits: [N, V].
        names: (prompt's index, step) of each row, for the message.
    """
    finite = np.isfinite(logits)
    if finite.all():
        return {}
    found = {}
    for n in np.flatnonzero(~finite.all(axis=1)).tolist():
        broken = np.flatnonzero(~finite[n])
        index, step = names[n]
        found[n] = NonFiniteError(
            f"row {index}, step {step}: {len(broken)} of {logits.shape[1]} logits are not finite "
            f"(first at position {broken[0]}: {logits[n, broken[0]]}); the bundle or its input is "
            "broken, `headport inspect BUNDLE --selftest` tells which"
        )
    return found


def process(
    logits: Scores, ids: Int64, sampling: Sampling, context: Context = _NOTHING
) -> tuple[Scores, Int64]:
    """What the processors leave of a row: scores without the banned ones, and their ids.

    Raises:
        RequestError: If nothing is left.
    """
    if not processing(sampling):
        return logits, ids
    scores = apply_processors(logits.astype(np.float64), ids, sampling, context)
    alive = np.flatnonzero(scores > -np.inf)
    if not len(alive):
        raise RequestError(
            f"prompt {context.index}, step {len(context.token_ids)}: the request's rules ban every "
            "token; loosen bad_words, suppress_tokens, no_repeat_ngram_size, allowed or min_length"
        )
    return scores[alive], ids[alive]


def choose(
    logits: Scores,
    ids: Int64,
    sampling: Sampling,
    key: NoiseKey | None,
    context: Context = _NOTHING,
) -> int:
    """Choose a token.

    Args:
        logits: One row, finite, [V].
        ids: Original id of each position, ascending, [V].
        sampling: How to choose.
        key: Key of the noise; None only where the temperature is 0.
        context: The row's past.

    Returns:
        The original id: the argmax of the processed scores where the temperature is 0, else of
        score / T + g over what the filters keep. Ties go to the lowest id.

    Raises:
        RequestError: If the request's rules ban every token, or a callback fails.
    """
    return draw(*process(logits, ids, sampling, context), sampling, key)


def draw(scores: Scores, ids: Int64, sampling: Sampling, key: NoiseKey | None) -> int:
    """As `choose`, from processed scores."""
    if sampling.temperature == 0.0:
        return int(ids[np.argmax(scores)])
    assert key is not None
    bits = draw_bits(key, int(ids[-1]) + 1)
    if filtering(sampling):
        positions = keep(scores, sampling)
        scores, ids = scores[positions], ids[positions]
    if len(ids) != len(bits):
        bits = bits[ids]
    return int(ids[argmax_with_noise(scale(scores, sampling.temperature), bits)])


def likelihood(
    token_id: int,
    logits: Float32,
    ids: Int64,
    *,
    processed: tuple[Scores, Int64],
    sampling: Sampling,
    top: int,
) -> Choice:
    """How likely a chosen token was: of the model itself, and as it was drawn.

    Args:
        token_id: The chosen original id.
        logits: Its row, finite, [V].
        ids: Original id of each position, ascending, [V].
        processed: What `process` made of them.
        sampling: How it was chosen.
        top: How many of the model's most likely tokens are told.
    """
    model = log_softmax(logits)
    scores, left = processed
    temperature = sampling.temperature or 1.0
    kept = keep(scores, sampling) if sampling.temperature > 0.0 else slice(None)
    scaled = scale(scores, temperature)
    drawn = scaled[np.searchsorted(left, token_id)] - np.log(np.exp(scaled[kept]).sum())
    return Choice(
        token_id,
        float(model[np.searchsorted(ids, token_id)]),
        float(drawn),
        tuple(TopLogprob(int(ids[n]), float(model[n])) for n in largest(logits, top)),
    )
