"""Drift statistics on numbers checkable by hand, and against extended precision."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from headport.errors import NonFiniteError
from headport.metrics import RowScores, score_rows, summarize, top_ids


def rows(*values: list[float]) -> Any:
    return np.array(values, np.float32)


def score(z: Any, c: Any, targets: list[int], bound: float = 0.0) -> RowScores:
    return score_rows(z, c, np.array(targets), np.full(len(z), bound))


def random_pair(scale: float, vocab_size: int = 3001, count: int = 12) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(5)
    z = (3 * rng.standard_normal((count, vocab_size))).astype(np.float32)
    z[np.arange(count), rng.integers(0, vocab_size, count)] += 9  # a peak, as models have
    c = (z + scale * rng.standard_normal(z.shape)).astype(np.float32)
    return z, c, rng.integers(0, vocab_size, count)


def exact_log_softmax(x: Any) -> Any:
    x = x.astype(np.longdouble)
    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def exact(z: Any, c: Any, targets: Any) -> tuple[Any, Any, Any]:
    """NLLs and KL in extended precision, straight from the definitions."""
    a, b, index = exact_log_softmax(z), exact_log_softmax(c), np.arange(len(targets))
    return -a[index, targets], -b[index, targets], (np.exp(a) * (a - b)).sum(axis=1)


def test_two_tokens_by_hand() -> None:
    found = score(rows([math.log(3), 0]), rows([0, 0]), [0])  # p = ¾ ¼, q = ½ ½
    assert found.nll_reference[0] == pytest.approx(-math.log(0.75), abs=1e-7)
    assert found.nll_candidate[0] == pytest.approx(math.log(2), abs=1e-7)
    assert found.kl[0] == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), abs=1e-7)
    assert found.max_abs_error[0] == pytest.approx(math.log(3))


@pytest.mark.parametrize("scale", [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 3.0])
def test_agrees_with_extended_precision(scale: float) -> None:
    z, c, targets = random_pair(scale)
    nll_z, nll_c, kl = exact(z, c, targets)
    found = score_rows(z, c, targets, np.zeros(len(z)))
    # Relative, also where KL is 1e-12: noise of float32 log-sum-exps would be 1e-7.
    np.testing.assert_allclose(found.kl, kl.astype(np.float64), rtol=1e-5)
    np.testing.assert_allclose(found.nll_reference, nll_z.astype(np.float64), atol=3e-7)
    np.testing.assert_allclose(found.nll_candidate, nll_c.astype(np.float64), atol=5e-7)


def test_series_and_float64_meet_at_the_limit() -> None:
    z, c, targets = random_pair(0.1)
    delta = (c - z) * np.float32(0.4999) / np.abs(c - z).max(axis=1, keepdims=True)
    below = score_rows(z, (z + delta).astype(np.float32), targets, np.zeros(len(z)))
    above = score_rows(z, (z + delta * np.float32(1.001)).astype(np.float32), targets, below.kl * 0)
    assert (below.max_abs_error < 0.5).all() and (above.max_abs_error > 0.5).all()
    np.testing.assert_allclose(above.kl, below.kl * 1.001**2, rtol=1e-3)


def test_large_deviations_of_rare_tokens_by_hand() -> None:
    z = np.array([[math.log(9), 0]], np.float32)  # p = 0.9 0.1
    c = z + np.array([[0.49, -0.49]], np.float32)  # e = 0.098 −0.882: the end of the series
    p, q = np.exp(exact_log_softmax(z)), exact_log_softmax(c)
    expected = float((p * (np.log(p) - q)).sum())
    assert score(z, c, [0]).kl[0] == pytest.approx(expected, rel=1e-6)


def test_equal_logits_have_no_drift() -> None:
    z, _, targets = random_pair(0.1)
    found = score_rows(z, z.copy(), targets, np.zeros(len(z)))
    assert not found.kl.any() and not found.max_abs_error.any()
    assert (found.agreement == 1).all()
    np.testing.assert_array_equal(found.nll_reference, found.nll_candidate)


def test_a_constant_shift_changes_logits_but_no_probability() -> None:
    z, _, targets = random_pair(0.1)
    for shift in (0.25, 100.0):  # both paths
        found = score_rows(z, z + np.float32(shift), targets, np.zeros(len(z)))
        assert found.kl.max() < 1e-10
        assert found.max_abs_error.max() == pytest.approx(shift, rel=1e-5)
        np.testing.assert_allclose(found.nll_candidate, found.nll_reference, atol=1e-5)


@pytest.mark.parametrize("parts", [1, 2, 7])
def test_rows_do_not_depend_on_batching(parts: int) -> None:
    z, c, targets = random_pair(0.05)
    bound = np.zeros(len(z))
    whole = score_rows(z, c, targets, bound)
    split = RowScores.concatenate(
        [
            score_rows(*(a[i : i + parts] for a in (z, c, targets, bound)))
            for i in range(0, len(z), parts)
        ]
    )
    np.testing.assert_allclose(split.kl, whole.kl, rtol=1e-12)
    np.testing.assert_allclose(split.nll_candidate, whole.nll_candidate, rtol=1e-12)


def test_top_ids_breaks_ties_by_lowest_id() -> None:
    logits = rows([1, 3, 3, 0, 3], [2, 2, 2, 2, 2])
    np.testing.assert_array_equal(top_ids(logits, 3), [[1, 2, 4], [0, 1, 2]])
    np.testing.assert_array_equal(top_ids(logits, 10), [[1, 2, 4, 0, 3], [0, 1, 2, 3, 4]])


@pytest.mark.parametrize("vocab_size", [1025, 1056, 5003])
def test_top_ids_of_a_large_vocabulary(vocab_size: int) -> None:
    rng = np.random.default_rng(1)
    coarse = rng.integers(0, 40, (20, vocab_size)).astype(np.float32)  # ties everywhere
    coarse[0] = 7.0
    coarse[1, -3:] = 99.0  # in the columns that fill no whole group
    expected = np.lexsort((np.broadcast_to(np.arange(vocab_size), coarse.shape), -coarse))[:, :10]
    np.testing.assert_array_equal(top_ids(coarse, 10), expected)


def test_top1_tie_counts_only_within_the_bound() -> None:
    z, c = rows([1.0, 1.0 - 1e-3, 0]), rows([1.0 - 1e-3, 1.0, 0])
    assert score(z, c, [0]).agreement[0, 0] == 0
    assert score(z, c, [0], bound=2e-3).agreement_tie_adjusted[0, 0] == 1
    assert score(z, c, [0], bound=5e-4).agreement_tie_adjusted[0, 0] == 0


def test_top5_agreement_is_a_share() -> None:
    z = rows([9, 8, 7, 6, 5, 4, 3, 2, 1, 0, -1, -2])
    c = z.copy()
    c[0, 3], c[0, 9] = 0, 6  # id 9 enters the top five, id 3 leaves it
    found = score(z, c, [0], bound=0.5)
    np.testing.assert_allclose(found.agreement[0], [1, 0.8, 1])
    np.testing.assert_allclose(found.agreement_tie_adjusted[0], [1, 0.8, 1])
    far = score(z, c, [0], bound=5.0)  # z[9] = 0 ≥ z of rank five (5) − 5
    np.testing.assert_allclose(far.agreement_tie_adjusted[0], [1, 1, 1])


def test_vocabulary_smaller_than_k() -> None:
    found = score(rows([2, 1, 0]), rows([0, 1, 2]), [0])
    np.testing.assert_allclose(found.agreement[0], [0, 1, 1])


@pytest.mark.parametrize("side", ["reference", "candidate"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_logits_are_refused(side: str, value: float) -> None:
    z, c = rows([1, 2, 3]), rows([1, 2, 3])
    (z if side == "reference" else c)[0, 1] = value
    with pytest.raises(NonFiniteError, match=f"the {side} gives .* token id 1"):
        score(z, c, [0])


def test_removed_tokens_are_ignored() -> None:
    z, c = rows([math.log(3), -np.inf, 0]), rows([math.log(3), -np.inf, 0])
    found = score(z, c, [0])
    assert found.nll_candidate[0] == pytest.approx(-math.log(0.75), abs=1e-7)
    assert found.kl[0] == 0 and found.max_abs_error[0] == 0


def constant_scores(count: int, nll: float) -> RowScores:
    one, wide = np.ones(count), np.ones((count, 3))
    return RowScores(nll * one, 2 * nll * one, 0 * one, 0 * one, wide, wide)


def test_perplexity_weighs_tokens_not_texts() -> None:
    both = RowScores.concatenate([constant_scores(3, 1.0), constant_scores(300, 2.0)])
    found = summarize(both, 1000)
    mean = (3 * 1.0 + 300 * 2.0) / 303
    assert found.perplexity_reference == pytest.approx(math.exp(mean), rel=1e-12)
    assert found.perplexity_ratio == pytest.approx(math.exp(mean), rel=1e-12)


def test_a_uniform_byte_costs_eight_bits() -> None:
    uniform = np.zeros((5, 256), np.float32)
    found = summarize(score(uniform, uniform, [0, 1, 2, 3, 4]), 5)
    assert found.bits_per_byte_reference == pytest.approx(8, abs=1e-6)
    assert found.perplexity_candidate == pytest.approx(256, rel=1e-6)


def test_kl_of_positions_is_summarised() -> None:
    kl = np.arange(101) / 100
    one, wide = np.ones(101), np.ones((101, 3))
    found = summarize(RowScores(one, one, kl, one * 0.25, wide, wide), 1)
    assert found.kl_mean == pytest.approx(0.5) and found.kl_max == 1.0
    assert found.kl_p99 == pytest.approx(0.99) and found.max_abs_logit_error == 0.25


def test_nothing_scored_has_no_figures() -> None:
    found = summarize(RowScores.concatenate([]), 10)
    assert found.kl_mean is None and found.top1_agreement is None and found.perplexity_ratio is None


def test_no_bytes_no_bits_per_byte_and_no_overflow() -> None:
    found = summarize(constant_scores(2, 1000.0), 0)
    assert found.bits_per_byte_candidate is None
    assert found.perplexity_reference == math.inf
