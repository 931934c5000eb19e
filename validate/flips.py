"""Every position where the two sides choose another token, explained by its margin."""

from __future__ import annotations

import math
from array import array
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
_NOISE_EVERY = 16  # positions at which the noise is measured


@dataclass(frozen=True)
class _Found:
    material: int
    document: int
    token: int
    ids: tuple[int, int]
    margin: float
    noise: float


class FlipCounts:
    """Counts flips by what explains them and keeps the `limit` widest.

    The noise is that of the whole run, not of the flip's own position: a fault at some positions
    spreads their logits and would explain its own flips.
    """

    def __init__(self, limit: int = 10) -> None:
        self._limit = limit
        self._positions = 0
        self._noise = array("d")  # RMS of sampled positions
        self._margins, self._bounds = array("d"), array("d")  # of all flips
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
        for sampled in range(-self._positions % _NOISE_EVERY, len(at), _NOISE_EVERY):
            self._noise.append(_rms(reference[sampled], candidate[sampled]))
        self._positions += len(at)
        for row in np.flatnonzero(best != chosen):
            z = reference[row]
            margin = float(z[best[row]]) - float(z[chosen[row]])
            noise = _rms(z, candidate[row])
            self._margins.append(margin)
            self._bounds.append(float(bound[row]))
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
        noise = float(np.median(self._noise)) if self._noise else 0.0
        margins = np.array(self._margins)
        tied = margins <= np.array(self._bounds)
        within = ~tied & (margins <= _NOISE_FACTOR * math.sqrt(2) * noise)
        return Flips(
            positions=self._positions,
            noise=noise,
            noise_factor=_NOISE_FACTOR,
            near_ties=int(tied.sum()),
            within_noise=int(within.sum()),
            beyond_noise=int((~tied & ~within).sum()),
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


def _rms(reference: Float32, candidate: Float32) -> float:
    """RMS of the logit differences of one position, their mean removed; removed tokens left out."""
    kept = np.isfinite(reference)
    return float(np.std(candidate[kept].astype(np.float64) - reference[kept]))
