"""The encoder-decoder models that are known, by class: what they read and how positions enter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from headport.errors import ExportError

__all__ = ["FAMILIES", "Family", "family_of", "positions_from"]

Positions = Literal["table", "relative"]


@dataclass(frozen=True)
class Family:
    """How models of one class are exported."""

    reads: Literal["ids", "features"]
    # Of the decoder. table: a row per position, learned or of sines. relative: added to the scores.
    positions: Positions


_TEXT = Family("ids", "table")
_RELATIVE = Family("ids", "relative")
FAMILIES: dict[str, Family] = {
    "T5ForConditionalGeneration": _RELATIVE,
    "MT5ForConditionalGeneration": _RELATIVE,
    "UMT5ForConditionalGeneration": _RELATIVE,
    "BartForConditionalGeneration": _TEXT,
    "MBartForConditionalGeneration": _TEXT,
    "PLBartForConditionalGeneration": _TEXT,
    "MarianMTModel": _TEXT,
    "PegasusForConditionalGeneration": _TEXT,
    "BlenderbotForConditionalGeneration": _TEXT,
    "BlenderbotSmallForConditionalGeneration": _TEXT,
    "WhisperForConditionalGeneration": Family("features", "table"),
}


def family_of(name: str) -> Family:
    """The family of a model class.

    Raises:
        ExportError: If the class is not known.
    """
    if name not in FAMILIES:
        raise ExportError(
            f"{name} is an encoder-decoder model of a class that is not supported; supported are "
            f"{', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


@contextmanager
def positions_from(decoder: Any, family: Family) -> Iterator[dict[str, torch.Tensor]]:
    """Let a decoder take the positions of its tokens from the caller while the context lasts.

    Its own are the number of slots before a token, which padding makes wrong.

    Yields:
        A mapping that the caller gives `position_ids` [B, T].

    Raises:
        ExportError: If the decoder's table of positions is not where it is looked for.
    """
    given: dict[str, torch.Tensor] = {}
    if family.positions == "relative":
        yield given
        return
    table = getattr(decoder, "embed_positions", None)
    if not isinstance(table, torch.nn.Embedding):
        raise ExportError(
            f"{type(decoder).__name__}: a table of positions `embed_positions` was expected, "
            f"{type(table).__name__} found"
        )
    offset = getattr(table, "offset", 0)

    def looked_up(*_args: Any, **_kwargs: Any) -> torch.Tensor:
        return torch.nn.functional.embedding(given["position_ids"] + offset, table.weight)

    table.forward = looked_up  # type: ignore[method-assign]
    try:
        yield given
    finally:
        del table.__dict__["forward"]
