"""The positions where the candidate's distribution is farthest from the reference's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headport.metrics import RowScores, top_ids
from headport.validate.documents import Document, Window
from headport.validate.report import Choice, Position

__all__ = ["WorstPositions", "shorten"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

_CONTEXT_TOKENS = 48
_CONTEXT_CHARACTERS = 240
_TEXT_CHARACTERS = 80
_CHOICES = 10


@dataclass(frozen=True)
class _Found:
    material: int
    document: int
    token: int
    kl: float
    margin: float
    reference: tuple[tuple[int, float], ...]  # likeliest tokens and their probabilities
    candidate: tuple[tuple[int, float], ...]


class WorstPositions:
    """Keeps the `limit` positions with the largest KL, whatever the length of the text."""

    def __init__(self, limit: int = 40) -> None:
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
            ours, theirs = _likeliest(reference[row]), _likeliest(candidate[row])
            best, chosen = ours[0][0], theirs[0][0]
            self._found.append(
                _Found(
                    material=material,
                    document=window.document,
                    token=window.start + int(at[row]) + 1,
                    kl=float(scores.kl[row]),
                    margin=float(reference[row, best]) - float(reference[row, chosen]),
                    reference=ours,
                    candidate=theirs,
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
                context=shorten(
                    decode(ids[max(0, found.token - _CONTEXT_TOKENS) : found.token]),
                    _CONTEXT_CHARACTERS,
                ),
                target=shorten(decode(ids[found.token : found.token + 1])),
                reference_top1=shorten(decode([found.reference[0][0]])),
                candidate_top1=shorten(decode([found.candidate[0][0]])),
                reference_margin=found.margin,
                reference_top=_choices(found.reference, decode),
                candidate_top=_choices(found.candidate, decode),
            )
            for found in self._found
            for ids in [by_index[found.material][found.document].token_ids.tolist()]
        )


def _likeliest(logits: Float32) -> tuple[tuple[int, float], ...]:
    """The best tokens of one position [V], and their probabilities."""
    ids = top_ids(logits[None], _CHOICES)[0]
    z = logits.astype(np.float64) - float(logits[ids[0]])
    shares = np.exp(z[ids]) / np.exp(z).sum()
    return tuple(zip(ids.tolist(), shares.tolist(), strict=True))


def _choices(
    found: Sequence[tuple[int, float]], decode: Callable[[Sequence[int]], str]
) -> tuple[Choice, ...]:
    return tuple(
        Choice(token=shorten(decode([token_id])), token_id=token_id, probability=probability)
        for token_id, probability in found
    )


def shorten(text: str, characters: int = _TEXT_CHARACTERS) -> str:
    """The end of a text, so many characters at most."""
    return text if len(text) <= characters else "…" + text[1 - characters :]
