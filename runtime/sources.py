"""One source of a request to an encoder-decoder bundle, encoded once for all rows that read it."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy.typing as npt

from headport.runner import Cache
from headport.runtime.results import Stats
from headport.slots import Slots
from headport.source_encoder import Encoded, SourceEncoder

__all__ = ["ReadSource"]

Array = npt.NDArray[Any]


class ReadSource:
    """A checked source. It is encoded when the first of its rows begins, in the thread of the rows.

    Alone, so that a reply does not depend on what else is asked for: padding beside a longer source
    would change last bits.

    Args:
        values: Ids [S] or features [F, frames].
        encoder: Of the bundle.
        stats: Where runs are counted.
    """

    def __init__(self, values: Array, encoder: SourceEncoder, stats: Stats) -> None:
        self._values = values
        self._encoder = encoder
        self._stats = stats

    @cached_property
    def _encoded(self) -> Encoded:
        [found] = self._encoder.encode([self._values])
        self._stats.encoder_runs += 1
        self._stats.source_tokens += found.length
        return found

    def give(self, slots: Slots | Cache, slot: int) -> None:
        """Let a slot, or a row of a cache, read it."""
        slots.sources.put(slot, self._encoded)

    def fill(self, cache: Cache) -> None:
        """Let all rows of a cache read it: they share its arrays."""
        cache.sources.fill(self._encoded)
