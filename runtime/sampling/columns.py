"""Original ids → the columns of a row that stand for them; the past as one list."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from headport.runtime.sampling.settings import Context

__all__ = ["columns_of", "ends_with", "past_of"]

Int64 = npt.NDArray[np.int64]


def columns_of(ids: Int64, wanted: Iterable[int]) -> Int64:
    """Columns of those wanted ids that exist, each once, ascending."""
    sought = np.unique(np.fromiter(wanted, np.int64))
    places = np.minimum(np.searchsorted(ids, sought), len(ids) - 1)
    found: Int64 = places[ids[places] == sought]
    return found


def past_of(context: Context) -> list[int]:
    """Prompt and reply."""
    return [*context.prompt_token_ids, *context.token_ids]


def ends_with(past: Sequence[int], words: Sequence[int]) -> bool:
    """Whether some words are the latest tokens; no words always are."""
    return len(past) >= len(words) and list(past[len(past) - len(words) :]) == list(words)
