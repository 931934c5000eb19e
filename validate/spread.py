"""How figures spread over positions: counted block by block, memory does not grow with the text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from headport.metrics import RowScores
from headport.validate.certainty import Estimate, positive_bounds, ratio, share_bounds
from headport.validate.distributions import (
    Bin,
    Breakdown,
    Calibration,
    CalibrationBin,
    Distributions,
    Histogram,
)
from headport.validate.evidence import Metric

__all__ = ["Spread", "histogram"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class _Kind:
    """One property of a position and the lower edges of its bins."""

    by: Literal["position", "frequency", "confidence"]
    definition: str
    edges: tuple[float, ...]  # ascending; a bin reaches to the next edge
    share: bool = False  # edges are shares, shown in per cent

    def names(self) -> list[str]:
        if self.share:
            ends = [f"{100 * edge:g}" for edge in (*self.edges, 1.0)]
            return [f"{a}–{b} %" for a, b in pairwise(ends)]
        last = [*self.edges[1:], math.inf]
        return [
            f"{a:g}" if b == a + 1 else (f"{a:g} and more" if b == math.inf else f"{a:g}–{b - 1:g}")
            for a, b in zip(self.edges, last, strict=True)
        ]


_KINDS = (
    _Kind(
        "position",
        "place of the scored token among those of its document, from 1",
        (1, 17, 65, 129, 257, 513, 1025),
    ),
    _Kind("frequency", "how often the scored token occurs in these texts", (1, 2, 4, 10, 32, 100)),
    _Kind(
        "confidence",
        "probability of the reference's first choice",
        (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99),
        share=True,
    ),
)
_CALIBRATION_BINS = 10
_EVERY = 16  # positions of which the changes of logits are sampled
_SAMPLED = 64  # logits of such a position
_MOST_SAMPLES = 1 << 18


class Spread:
    """Adds up what `Distributions` shows."""

    def __init__(self, documents: int, frequency: Int64) -> None:
        """Room for so many documents; `frequency` [V] is how often each token is scored."""
        self._frequency = frequency
        # top-1 agreement, KL and weight per bin and document
        self._sums = [np.zeros((3, len(kind.edges), documents)) for kind in _KINDS]
        self._counts = [np.zeros(len(kind.edges), np.int64) for kind in _KINDS]
        # positions, confidence and accuracy per side and bin
        self._calibration = np.zeros((2, 3, _CALIBRATION_BINS))
        self._changes: list[Float32] = []
        self._seen, self._stride = 0, _EVERY

    def add(
        self,
        document: tuple[int, float],
        place: Int64,
        targets: Int64,
        logits: tuple[Float32, Float32],
        scores: RowScores,
    ) -> None:
        """Add the positions of one block.

        Args:
            document: Row of the document, and its weight.
            place: Of the scored tokens in their document, from 0, [N].
            targets: The scored tokens, [N].
            logits: Reference and candidate, [N, V] each.
            scores: Their figures.
        """
        row, weight = document
        confidence = self._calibrate(targets, logits, scores)
        columns = (scores.agreement[:, 0], scores.kl, np.ones(len(scores)))
        properties = (place + 1, self._frequency[targets], confidence)
        for index, (kind, values) in enumerate(zip(_KINDS, properties, strict=True)):
            bins = np.searchsorted(np.asarray(kind.edges), values, side="right") - 1
            size = len(kind.edges)
            self._counts[index] += np.bincount(bins, minlength=size)
            for total, column in zip(self._sums[index], columns, strict=True):
                total[:, row] += weight * np.bincount(bins, column, size)
        self._sample(*logits)

    def _calibrate(
        self, targets: Int64, logits: tuple[Float32, Float32], scores: RowScores
    ) -> Float64:
        """Count both sides' confidence; returns the reference's, [N]."""
        sides = zip(logits, (scores.nll_reference, scores.nll_candidate), strict=True)
        found: list[Float64] = []
        rows, last = np.arange(len(targets)), _CALIBRATION_BINS - 1
        for side, (z, nll) in enumerate(sides):
            first = z.argmax(axis=1)
            # ln p(first) = z_first − z_y + ln p(y)
            above = z[rows, first].astype(np.float64) - z[rows, targets]
            confidence = np.clip(np.exp(above - nll), 0.0, 1.0)
            bins = np.minimum((confidence * _CALIBRATION_BINS).astype(np.int64), last)
            for column, values in enumerate((np.ones(len(rows)), confidence, first == targets)):
                self._calibration[side, column] += np.bincount(bins, values, _CALIBRATION_BINS)
            found.append(confidence)
        return found[0]

    def _sample(self, reference: Float32, candidate: Float32) -> None:
        for row in range(-self._seen % self._stride, len(reference), self._stride):
            change = (candidate[row] - reference[row])[:: max(1, reference.shape[1] // _SAMPLED)]
            self._changes.append(change[np.isfinite(change)])
        self._seen += len(reference)
        if len(self._changes) * _SAMPLED > _MOST_SAMPLES:
            self._changes = self._changes[::2]
            self._stride *= 2

    def distributions(self, kept: Mapping[str, Float32]) -> Distributions:
        """What was counted.

        Args:
            kept: `kl` and `max_abs_error` of every position, [N] each.
        """
        changes = np.concatenate([np.zeros(0, np.float32), *self._changes])
        return Distributions(
            kl=histogram(kept["kl"], logarithmic=True),
            max_abs_logit_error=histogram(kept["max_abs_error"], logarithmic=True),
            delta_logit=histogram(changes),
            delta_logit_sample=(
                f"{len(changes)} logits: about {_SAMPLED}, evenly spaced in the vocabulary, of "
                f"every {self._stride}th position"
            ),
            breakdowns=tuple(
                _breakdown(kind, sums, counts)
                for kind, sums, counts in zip(_KINDS, self._sums, self._counts, strict=True)
            ),
            calibration=_calibration(self._calibration),
        )


def histogram(values: Float32, *, logarithmic: bool = False, bins: int = 40) -> Histogram:
    """Count values in bins of equal width between their percentiles 0.05 and 99.95.

    Args:
        values: [N].
        logarithmic: Equal width on a logarithmic axis; values of 0 or less are counted as below.
        bins: Of the histogram.
    """
    found = values.astype(np.float64)
    inside = found[found > 0] if logarithmic else found
    if not len(inside):
        return Histogram(edges=(0.0, 1.0), counts=(0,), below=len(found), above=0)
    low, high = np.quantile(inside, (5e-4, 1 - 5e-4)).tolist()
    if logarithmic:
        edges = np.geomspace(low, high * (1 + 1e-6), bins + 1)
    else:
        reach = float(max(abs(low), abs(high), np.finfo(np.float32).tiny))
        edges = np.linspace(-reach, reach, bins + 1)  # around zero, so that a shift shows
    counts = np.histogram(found, edges)[0]
    return Histogram(
        edges=tuple(edges.tolist()),
        counts=tuple(counts.tolist()),
        below=int(np.count_nonzero(found < edges[0])),
        above=int(np.count_nonzero(found > edges[-1])),
    )


def _breakdown(kind: _Kind, sums: Float64, counts: Int64) -> Breakdown:
    agreement, kl, weight = sums
    bins = []
    for index, name in enumerate(kind.names()):
        if not counts[index]:
            continue
        same = ratio(agreement[index], weight[index])
        apart = ratio(kl[index], weight[index])
        bins.append(
            Bin(
                name=name,
                tokens=int(counts[index]),
                top1_agreement=_metric(same, share_bounds(same, counts[index].astype(np.float64))),
                kl_mean=_metric(apart, positive_bounds(apart)),
            )
        )
    return Breakdown(by=kind.by, definition=kind.definition, bins=tuple(bins))


def _metric(estimate: Estimate, interval: tuple[Float64, Float64]) -> Metric:
    found = (estimate.value, *interval, estimate.error)
    value, low, high, error = (float(x) if np.isfinite(x) else None for x in found)
    return Metric(value=value, low=low, high=high, error=error)


def _calibration(sums: Float64) -> Calibration:
    errors: list[float | None] = []
    sides: list[Sequence[tuple[int, float | None, float | None]]] = []
    for positions, confidence, accuracy in sums:
        total = positions.sum()
        gap = float(np.abs(confidence - accuracy).sum() / total) if total else None
        errors.append(gap)
        sides.append(
            [
                (int(n), float(c / n), float(a / n)) if n else (0, None, None)
                for n, c, a in zip(positions, confidence, accuracy, strict=True)
            ]
        )
    return Calibration(
        bins=tuple(
            CalibrationBin(
                low=index / _CALIBRATION_BINS,
                high=(index + 1) / _CALIBRATION_BINS,
                reference_positions=ours[0],
                reference_confidence=ours[1],
                reference_accuracy=ours[2],
                candidate_positions=theirs[0],
                candidate_confidence=theirs[1],
                candidate_accuracy=theirs[2],
            )
            for index, (ours, theirs) in enumerate(zip(*sides, strict=True))
        ),
        reference_error=errors[0],
        candidate_error=errors[1],
    )
