"""How a token is chosen from a row, and what of the row's past the rules may look at."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "Allowed",
    "AllowedIds",
    "Beams",
    "Context",
    "EarlyStopping",
    "FixedIds",
    "ProcessScores",
    "Sampling",
    "read_bias",
]

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Context:
    """One sequence being continued, as processors and callbacks see it. All ids are original."""

    prompt_token_ids: Sequence[int] = ()  # rows of embeddings are not among them
    token_ids: Sequence[int] = ()  # new tokens so far; their number is the step
    eos_token_ids: tuple[int, ...] = ()
    index: int = 0  # place of the prompt in its request
    sample: int = 0  # place among the samples of one prompt; the rank of a beam
    max_new_tokens: int | None = None  # where the reply ends at the latest
    prompt_rows: int = 0  # of embeddings in the prompt

    @property
    def prompt_length(self) -> int:
        """Tokens and rows of the prompt."""
        return len(self.prompt_token_ids) + self.prompt_rows


# Ids that may follow, or bool [V] by original id, or None for all.
AllowedIds: TypeAlias = Sequence[int] | npt.NDArray[Any] | None
Allowed: TypeAlias = Callable[[Context], AllowedIds]
# (context, scores [K], original ids [K]) → scores [K]; -inf bans
ProcessScores: TypeAlias = Callable[[Context, Float64, Int64], Float64]


@dataclass(frozen=True)
class FixedIds:
    """The same allowed tokens at every step."""

    token_ids: tuple[int, ...]

    @cached_property
    def _array(self) -> Int64:
        return np.array(self.token_ids, np.int64)

    def __call__(self, _: Context) -> Int64:
        """The ids."""
        return self._array


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from a row. The defaults are greedy and change nothing.

    Fields of the first part shape the distribution that is drawn from, in this order; they play
    no part where the temperature is 0. Those of the second part change scores, greedy or not, and
    are applied before the first; `processors.PROCESSORS` is their order.
    """

    temperature: float = 0.0  # 0 = greedy: the filters and the seed play no part
    top_k: int = 0  # most likely tokens kept, ties at the last place included; 0 = all
    top_p: float = 1.0  # smallest most likely set with this mass or more; 1 = all
    min_p: float = 0.0  # least probability as a share of the largest one; 0 = all
    typical_p: float = 1.0  # mass of the tokens whose surprise is nearest the mean; 1 = all
    epsilon_cutoff: float = 0.0  # least probability; 0 = all
    eta_cutoff: float = 0.0  # least probability, lower where the row is uncertain; 0 = all

    logit_bias: tuple[tuple[tuple[int, ...], float], ...] = ()  # (sequence, added to its last id)
    repetition_penalty: float = 1.0  # of ids in the prompt or the reply; 1 = off
    presence_penalty: float = 0.0  # taken off ids in the reply
    frequency_penalty: float = 0.0  # taken off per time that an id stands in the reply
    no_repeat_ngram_size: int = 0  # no n-gram twice in prompt and reply; 0 = off
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences that are never completed
    min_length: int = 0  # no EOS below this many tokens, the prompt's included
    min_new_tokens: int = 0  # no EOS below this many new tokens
    allowed: Allowed | None = None  # the only tokens that may follow
    forced_bos: int | None = None  # the first new token, where the prompt is one token
    forced_eos: tuple[int, ...] = ()  # the last token of a reply that reaches its limit
    suppress_tokens: tuple[int, ...] = ()  # never chosen
    begin_suppress_tokens: tuple[int, ...] = ()  # never the first new token
    process_scores: ProcessScores | None = None  # the caller's own, after all others


EarlyStopping: TypeAlias = bool | Literal["never"]


@dataclass(frozen=True)
class Beams:
    """How beam search goes."""

    num_beams: int = 1  # 1 = no beam search
    length_penalty: float = 1.0  # Σ ln p of a reply is divided by its tokens to this power
    # True: end with num_beams complete replies; False: when the best open beam, at its length now,
    # cannot beat the worst of them; "never": also at the length that suits it best
    early_stopping: EarlyStopping = False


def read_bias(value: Any) -> tuple[tuple[tuple[int, ...], float], ...]:
    """A mapping of ids or sequences to numbers, or pairs of them, as `Sampling` holds it."""
    pairs = value.items() if isinstance(value, Mapping) else value
    return tuple(
        ((int(words),) if isinstance(words, numbers.Integral) else tuple(map(int, words)), float(b))
        for words, b in pairs
    )
