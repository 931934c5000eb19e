"""The positions where the candidate's distribution is farthest from the reference's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headport.metrics import RowScores
from headport.validate.documents import Document, Window
from headport.validate.report import Position

__all__ = ["WorstPositions", "shorten"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

_CONTEXT_TOKENS = 24
_TEXT_CHARACTERS = 80


@dataclass(frozen=True)
class _Found:
    material: int
    document: int
    token: int
    kl: float
    reference_top1: int
    candidate_top1: int
    margin: float


class WorstPositions:
    """Keeps the `limit` positions with the largest KL, whatever the length of the text."""

    def __init__(self, limit: int = 10) -> None:
        self._limit = limit
        self._found: list[_Found] = []

    def offer(
        self,
        material: int,
        window: Window,
        at: Int64,
        logits: tuple[Float32, Float32],
        scores: RowScores,
    ) -> None:
        """Look at some positions.

        Args:
            material: Index of the text.
            window: Where they lie.
            at: Positions in the window, [N].
            logits: Reference and candidate, [N, V] each.
            scores: Their figures.
        """
        reference, candidate = logits
        floor = self._found[-1].kl if len(self._found) == self._limit else 0.0
        rows = np.flatnonzero(scores.kl > floor)
        rows = rows[np.argsort(-scores.kl[rows], kind="stable")][: self._limit]
        for row in rows:
            best, chosen = int(reference[row].argmax()), int(candidate[row].argmax())
            self._found.append(
                _Found(
                    material=material,
                    document=window.document,
                    token=window.start + int(at[row]) + 1,
                    kl=float(scores.kl[row]),
                    reference_top1=best,
                    candidate_top1=chosen,
                    margin=float(reference[row, best]) - float(reference[row, chosen]),
                )
            )
        self._found = sorted(self._found, key=lambda found: -found.kl)[: self._limit]

    def positions(
        self,
        names: Sequence[str],
        documents: Sequence[Sequence[Document]],
        decode: Callable[[Sequence[int]], str],
    ) -> tuple[Position, ...]:
        """What was found, largest KL first, with text.

        Args:
            names: Of the texts.
            documents: Of each text.
            decode: Token ids → text.
        """
        by_index = [{d.index: d for d in of_text} for of_text in documents]
        return tuple(
            Position(
                slice=names[found.material],
                document=found.document,
                token=found.token,
                kl=found.kl,
                context=shorten(decode(ids[max(0, found.token - _CONTEXT_TOKENS) : found.token])),
                target=shorten(decode(ids[found.token : found.token + 1])),
                reference_top1=shorten(decode([found.reference_top1])),
                candidate_top1=shorten(decode([found.candidate_top1])),
                reference_margin=found.margin,
            )
            for found in self._found
            for ids in [by_index[found.material][found.document].token_ids.tolist()]
        )


def shorten(text: str) -> str:
    """The end of a text, `_TEXT_CHARACTERS` at most."""
    return text if len(text) <= _TEXT_CHARACTERS else "…" + text[1 - _TEXT_CHARACTERS :]
