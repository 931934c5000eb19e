"""Records of how figures spread: histograms, positions by kind, calibration."""

from __future__ import annotations

from typing import Literal

from headport.validate.evidence import Metric, Record

__all__ = [
    "Bin",
    "Breakdown",
    "Calibration",
    "CalibrationBin",
    "Distributions",
    "Histogram",
]


class Histogram(Record, frozen=True):
    """Counts of values between ascending edges; the last bin holds its upper edge."""

    edges: tuple[float, ...]  # one more than counts
    counts: tuple[int, ...]
    below: int  # values below the first edge
    above: int


class Bin(Record, frozen=True):
    """Positions of one kind."""

    name: str
    tokens: int
    top1_agreement: Metric
    kl_mean: Metric  # nats


class Breakdown(Record, frozen=True):
    """All scored positions, told apart by one property."""

    by: Literal["position", "frequency", "confidence"]
    definition: str
    bins: tuple[Bin, ...]  # those that hold a position, in order


class CalibrationBin(Record, frozen=True):
    """Positions of each side whose likeliest token has a probability in [low, high).

    Confidence is the mean of that probability, accuracy the share of positions at which that token
    follows in the text; null where there is no such position.
    """

    low: float
    high: float
    reference_positions: int
    reference_confidence: float | None
    reference_accuracy: float | None
    candidate_positions: int
    candidate_confidence: float | None
    candidate_accuracy: float | None


class Calibration(Record, frozen=True):
    """How far each side's confidence is from its accuracy."""

    bins: tuple[CalibrationBin, ...]
    reference_error: float | None  # mean |confidence - accuracy| over positions
    candidate_error: float | None


class Distributions(Record, frozen=True):
    """What lies behind the means."""

    kl: Histogram  # nats, per position
    max_abs_logit_error: Histogram  # logits, per position
    delta_logit: Histogram  # logits
    delta_logit_sample: str  # which logits
    breakdowns: tuple[Breakdown, ...]
    calibration: Calibration
