"""Histograms, breakdowns and calibration, by numbers that can be checked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from headport.metrics import score_rows
from headport.validate.distributions import Distributions
from headport.validate.spread import Spread, histogram


def counted(
    reference: np.ndarray, candidate: np.ndarray, targets: list[int], places: list[int]
) -> Distributions:
    z, c = reference.astype(np.float32), candidate.astype(np.float32)
    y, place = np.array(targets), np.array(places)
    scores = score_rows(z, c, y, np.zeros(len(z)))
    frequency = np.bincount(y, minlength=z.shape[1])
    spread = Spread(2, frequency)
    for row, block in enumerate((slice(0, 2), slice(2, None))):
        part = score_rows(z[block], c[block], y[block], np.zeros(len(z[block])))
        spread.add((row, 1.0), place[block], y[block], (z[block], c[block]), part)
    return spread.distributions({"kl": scores.kl, "max_abs_error": scores.max_abs_error})


def logits(*rows: tuple[float, float, float]) -> np.ndarray:
    """Of these probabilities."""
    return np.log(np.array(rows))


REFERENCE = logits((0.7, 0.2, 0.1), (0.7, 0.2, 0.1), (0.2, 0.5, 0.3), (0.2, 0.6, 0.2))
CANDIDATE = logits((0.7, 0.2, 0.1), (0.3, 0.6, 0.1), (0.2, 0.5, 0.3), (0.2, 0.6, 0.2))


def test_positions_are_told_apart_by_place_frequency_and_confidence() -> None:
    found = counted(REFERENCE, CANDIDATE, [0, 1, 0, 0], [0, 15, 16, 64])
    by = {part.by: {b.name: b for b in part.bins} for part in found.breakdowns}
    assert {name: b.tokens for name, b in by["position"].items()} == {
        "1–16": 2,
        "17–64": 1,
        "65–128": 1,
    }
    assert by["position"]["1–16"].top1_agreement.value == 0.5
    assert by["position"]["17–64"].top1_agreement.value == 1.0
    kl = 0.7 * np.log(7 / 3) + 0.2 * np.log(1 / 3)
    assert by["position"]["1–16"].kl_mean.value == pytest.approx(kl / 2, rel=1e-5)
    assert {name: b.tokens for name, b in by["frequency"].items()} == {"1": 1, "2–3": 3}
    assert by["frequency"]["1"].top1_agreement.value == 0.0
    assert {name: b.tokens for name, b in by["confidence"].items()} == {"50–75 %": 4}
    interval = by["confidence"]["50–75 %"].top1_agreement
    assert interval.low is not None and interval.low < 0.75 < 1 and interval.value == 0.75


def test_calibration_compares_confidence_with_what_follows() -> None:
    found = counted(REFERENCE, CANDIDATE, [0, 1, 0, 0], [0, 1, 0, 1]).calibration
    # The reference is right once of the two times it says 0.7, never at 0.5 and 0.6.
    by_low = {round(b.low, 1): b for b in found.bins}
    assert by_low[0.7].reference_positions == 2 and by_low[0.7].reference_accuracy == 0.5
    assert by_low[0.7].reference_confidence == pytest.approx(0.7, rel=1e-6)
    assert by_low[0.7].candidate_positions == 1 and by_low[0.7].candidate_accuracy == 1.0
    assert by_low[0.0].reference_confidence is None
    assert found.reference_error == pytest.approx((2 * 0.2 + 0.5 + 0.6) / 4, rel=1e-5)


def test_histograms_hold_every_value() -> None:
    values = np.concatenate([np.zeros(3), np.geomspace(1e-8, 1e-2, 4000)]).astype(np.float32)
    found = histogram(values, logarithmic=True)
    assert sum(found.counts) + found.below + found.above == len(values)
    assert found.below >= 3, "zeros have no place on a logarithmic axis"
    assert len(found.edges) == len(found.counts) + 1
    assert list(found.edges) == sorted(found.edges)


@pytest.mark.parametrize("values", [[], [0.0, 0.0], [1e-3]])
@pytest.mark.parametrize("logarithmic", [True, False])
def test_histograms_of_almost_nothing(values: list[float], logarithmic: bool) -> None:
    found = histogram(np.array(values, np.float32), logarithmic=logarithmic)
    assert sum(found.counts) + found.below + found.above == len(values)


def test_the_changes_of_logits_are_sampled_around_zero() -> None:
    found = counted(REFERENCE, REFERENCE + 0.25, [0, 1, 0, 0], [0, 1, 0, 1])
    edges, counts = found.delta_logit.edges, found.delta_logit.counts
    assert edges[0] == -edges[-1] and sum(counts) == 3, "three logits of the first position"
    middle = counts.index(3)
    assert edges[middle] <= 0.25 <= edges[middle + 1] * (1 + 1e-6)


def test_samples_stay_few() -> None:
    spread = Spread(1, np.ones(64, np.int64))
    z = np.zeros((4096, 64), np.float32)
    for _ in range(40):
        spread._sample(z, z)
    assert sum(map(len, spread._changes)) <= 1 << 18
    assert spread._stride > 16
