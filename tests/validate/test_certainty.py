"""Intervals against tables, against each other, and on samples whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headport.validate.certainty import (
    bootstrap,
    bounds,
    detectable,
    positive_bounds,
    ratio,
    share_bounds,
    student_quantile,
    tokens_for,
    tokens_to_decide,
)


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (30, 2.0423), (120, 1.9799)],
)
def test_student_quantiles_are_those_of_the_tables(freedom: int, expected: float) -> None:
    assert student_quantile(freedom) == pytest.approx(expected, abs=5e-5)


def test_student_tends_to_the_normal_distribution_without_a_step() -> None:
    assert student_quantile(2001) == pytest.approx(student_quantile(2000), abs=1e-6)
    assert student_quantile(10**7) == pytest.approx(1.959964, abs=1e-5)


def test_the_error_of_equal_documents_is_that_of_their_means() -> None:
    means = np.array([1.0, 2.0, 4.0, 5.0])
    found = ratio(means * 10, np.full(4, 10.0))
    assert found.value == 3 and found.documents == 4
    assert found.error == pytest.approx(np.std(means, ddof=1) / 2)


def test_alike_tokens_count_as_their_document_not_as_tokens() -> None:
    rng = np.random.default_rng(1)
    level = rng.normal(size=50)
    values = level[:, None] + 0.1 * rng.normal(size=(50, 200))
    clustered = ratio(values.sum(axis=1), np.full(50, 200.0))
    independent = values.std(ddof=1) / math.sqrt(values.size)
    assert clustered.error > 10 * independent


def test_documents_of_weight_zero_are_no_documents() -> None:
    found = ratio(np.array([1.0, 0.0, 3.0]), np.array([1.0, 0.0, 1.0]))
    assert found.documents == 2
    assert bootstrap(np.array([1.0, 0.0]), np.array([1.0, 0.0])) == pytest.approx(
        (math.nan, math.nan), nan_ok=True
    )


def test_bootstrap_and_formula_agree() -> None:
    rng = np.random.default_rng(2)
    weights = rng.integers(50, 400, 200).astype(float)
    sums = weights * (0.01 + 0.02 * rng.normal(size=200))
    low, high = bounds(ratio(sums, weights))
    again = bootstrap(sums, weights)
    width = float(high - low)
    assert again[0] == pytest.approx(float(low), abs=0.1 * width)
    assert again[1] == pytest.approx(float(high), abs=0.1 * width)
    assert again == bootstrap(sums, weights), "the same sample, the same interval"


def test_share_without_a_flip_is_the_rule_of_three() -> None:
    weights = np.full(1000, 1.0)
    low, high = share_bounds(ratio(weights, weights), np.asarray(1000.0))
    assert high == 1 and 1 - low == pytest.approx(3.84 / 1003.84, rel=0.01)


def test_intervals_cover_a_share_near_one() -> None:
    rng = np.random.default_rng(3)
    truth, tokens = 0.99, 100
    flips = rng.binomial(tokens, 1 - truth, size=(2000, 60))
    found = ratio(tokens - flips.astype(float), np.full((2000, 60), float(tokens)))
    low, high = share_bounds(found, np.full(2000, 6000.0))
    covered = np.mean((low <= truth) & (truth <= high))
    assert 0.93 <= covered <= 0.97


def test_the_recommended_sample_makes_the_effect_detectable() -> None:
    tokens = tokens_for(0.003, 0.002, 1000)
    assert tokens is not None
    error = 0.002 * math.sqrt(1000 / tokens)
    assert detectable(error) == pytest.approx(0.003, rel=1e-3)


def test_a_limit_that_is_met_exactly_is_never_decided() -> None:
    assert tokens_to_decide(0.0, 1.0, 1000) is None
    assert tokens_to_decide(0.5, 1.0, 1000) == 4000


def test_intervals_cover_a_mean_of_documents_of_unequal_length() -> None:
    rng = np.random.default_rng(4)
    weights = rng.integers(64, 600, (2000, 40)).astype(float)
    level = 0.004 * rng.standard_normal((2000, 40))
    noise = 0.05 * np.sqrt(weights) * rng.standard_normal((2000, 40))
    low, high = bounds(ratio(level * weights + noise, weights))
    covered = np.mean((low <= 0) & (high >= 0))
    assert 0.93 <= covered <= 0.97


def test_a_positive_mean_has_the_interval_of_its_logarithm() -> None:
    found = ratio(np.array([1.0, 2.0, 6.0]), np.ones(3))
    low, high = positive_bounds(found)
    half = student_quantile(2) * float(found.error) / 3
    assert (float(low), float(high)) == pytest.approx((3 * math.exp(-half), 3 * math.exp(half)))
    assert low > 0, "the symmetric interval would reach below 0"
    assert [float(b) for b in positive_bounds(ratio(np.zeros(3), np.ones(3)))] == [0.0, 0.0]
    assert np.isnan(positive_bounds(ratio(np.ones(1), np.ones(1)))).all()


def test_a_long_documents_pull_on_the_ratio_is_made_good() -> None:
    """The jackknife's variance: the ratio is estimated again without each document."""
    sums, weights = np.array([1.0, 5.0, 30.0, 2.0]), np.array([2.0, 4.0, 40.0, 3.0])
    found = ratio(sums, weights)
    without = (sums.sum() - sums) / (weights.sum() - weights)
    expected = math.sqrt(3 / 4 * ((without - found.value) ** 2).sum())
    assert float(found.error) == pytest.approx(expected, rel=1e-12)


def test_few_documents_are_recommended_with_a_reserve() -> None:
    many = tokens_for(0.003, 0.0005, 10_000, 5000)
    assert many == tokens_for(0.003, 0.0005, 10_000), "as by normal quantiles"
    few = tokens_for(0.003, 0.003, 1000, 10)
    assert few is not None and few % 100 == 0, "whole documents of 100 tokens"
    count = few // 100
    quantiles = student_quantile(count - 1) + student_quantile(count - 1, 0.9)
    assert quantiles * 0.003 * math.sqrt(10 / count) <= 0.003
    quantiles = student_quantile(count - 2) + student_quantile(count - 2, 0.9)
    assert quantiles * 0.003 * math.sqrt(10 / (count - 1)) > 0.003
