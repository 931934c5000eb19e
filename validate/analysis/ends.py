"""Probability of the end-of-text tokens where a document ends, and elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.runtime.text import Tokens
from headport.validate.analysis.records import Ends
from headport.validate.candidate import Candidate
from headport.validate.comparison import Material
from headport.validate.sides import ReferenceSide

__all__ = ["EndProbabilities", "end_ids"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


def end_ids(bundle: Bundle, tokens: Tokens) -> tuple[int, ...]:
    """Ids that end a text: those of the bundle's defaults, else the tokenizer's EOS."""
    given = bundle.manifest.defaults.get("eos_token_id")
    if isinstance(given, int):
        return (given,)
    if given:
        return tuple(given)
    text = tokens.special_tokens.get("eos_token")
    return () if text is None else tuple(tokens.encode(text, add_special_tokens=False)[:1])


class EndProbabilities:
    """Adds up P(end) of both sides."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = np.asarray(ids, np.int64)
        self._elsewhere = np.zeros(2)
        self._positions = 0

    def add(self, logits: tuple[Float32, Float32], inside: npt.NDArray[np.bool_]) -> None:
        """Look at positions that are no end.

        Args:
            logits: Reference and candidate, [N, V] each.
            inside: Rows whose next token is no end-of-text token, [N].
        """
        self._positions += int(inside.sum())
        for side, z in enumerate(logits):
            self._elsewhere[side] += float(self._share(z)[inside].sum())

    def ends(
        self,
        materials: Sequence[Material],
        candidate: Candidate,
        reference: ReferenceSide,
        window: int,
    ) -> Ends:
        """Feed the ends of all whole documents; a document that was cut has none.

        Args:
            materials: Texts.
            candidate: The bundle.
            reference: With nothing asked.
            window: Tokens before an end that are fed at most.
        """
        found: list[tuple[float, float]] = []
        for material in materials:
            for document in material.documents:
                token_ids = document.token_ids[-window:]
                while len(token_ids) and token_ids[-1] in self._ids:
                    token_ids = token_ids[:-1]  # the text holds its end: what stands before it
                if document.used < len(document.token_ids) or not len(token_ids):
                    continue
                reference.ask_score(token_ids)
                *_, last = reference.read_score(candidate.block_rows)
                ours = last.logits[-1:]
                theirs = candidate.logits(candidate.hidden_states([token_ids])[0][-1:])
                found.append((float(self._share(ours)[0]), float(self._share(theirs)[0])))
        at_end = np.array(found).mean(axis=0).tolist() if found else [None, None]
        count = self._positions
        elsewhere = (self._elsewhere / count).tolist() if count else [None, None]
        return Ends(
            tokens=tuple(candidate.tokens.piece(int(token_id)) for token_id in self._ids),
            documents=len(found),
            reference_at_end=at_end[0],
            candidate_at_end=at_end[1],
            reference_elsewhere=elsewhere[0],
            candidate_elsewhere=elsewhere[1],
        )

    def _share(self, z: Float32) -> Float64:
        """Σ p of the end tokens of each row, [N]."""
        top = z.max(axis=1, keepdims=True)
        total = np.exp(z - top).sum(axis=1, dtype=np.float64)
        found: Float64 = np.exp((z[:, self._ids] - top).astype(np.float64)).sum(axis=1) / total
        return found
