"""Every position where the two sides choose another token, explained by its margin."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headport.validate.documents import Window
from headport.validate.evidence import Flip, Flips
from headport.validate.worst import shorten

__all__ = ["FlipCounts"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

# Logit noise is close to normal: of the differences of two logits 6e-5 lie beyond four RMS, but
# the best of a vocabulary is chosen among many, so a few flips reach five.
_NOISE_FACTOR = 6.0


@dataclass(frozen=True)
class _Found:
    material: int
    document: int
    token: int
    ids: tuple[int, int]
    margin: float
    noise: float


class FlipCounts:
    """Counts flips by what explains them and keeps the `limit` widest."""

    def __init__(self, limit: int = 10) -> None:
        self._limit = limit
        self._positions = self._near_ties = self._by_noise = self._unexplained = 0
        self._widest: list[_Found] = []

    def offer(
        self,
        material: int,
        window: Window,
        at: Int64,
        logits: tuple[Float32, Float32],
        bound: Float64,
    ) -> None:
        """Look at some positions.

        Args:
            material: Index of the text.
            window: Where they lie.
            at: Positions in the window, [N].
            logits: Reference and candidate, [N, V] each.
            bound: Near-tie bounds, [N], logits.
        """
        reference, candidate = logits
        best, chosen = reference.argmax(axis=1), candidate.argmax(axis=1)
        self._positions += len(at)
        for row in np.flatnonzero(best != chosen):
            z, c = reference[row].astype(np.float64), candidate[row].astype(np.float64)
            margin = float(z[best[row]] - z[chosen[row]])
            noise = float(np.std((c - z)[np.isfinite(z)]))
            if margin <= bound[row]:
                self._near_ties += 1
            elif margin <= _NOISE_FACTOR * math.sqrt(2) * noise:
                self._by_noise += 1
            else:
                self._unexplained += 1
            token = window.start + int(at[row]) + 1
            ids = (int(best[row]), int(chosen[row]))
            self._widest.append(_Found(material, window.document, token, ids, margin, noise))
        self._widest = sorted(self._widest, key=lambda flip: -flip.margin)[: self._limit]

    def flips(
        self,
        names: Sequence[str],
        decode: Callable[[Sequence[int]], str],
    ) -> Flips:
        """The counts, and the widest flips with their tokens.

        Args:
            names: Of the texts.
            decode: Token ids → text.
        """
        return Flips(
            positions=self._positions,
            near_ties=self._near_ties,
            by_noise=self._by_noise,
            unexplained=self._unexplained,
            noise_factor=_NOISE_FACTOR,
            widest=tuple(
                Flip(
                    slice=names[found.material],
                    document=found.document,
                    token=found.token,
                    reference_top1=shorten(decode([found.ids[0]])),
                    candidate_top1=shorten(decode([found.ids[1]])),
                    margin=found.margin,
                    logit_noise=found.noise,
                )
                for found in self._widest
            ),
        )
