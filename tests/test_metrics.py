"""Drift statistics on numbers checkable by hand, and against extended precision."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from headport.errors import NonFiniteError
from headport.metrics import RowScores, score_rows, top_ids


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


def exact(z: Any, c: Any, targets: Any) -> dict[str, Any]:
    """Figures in extended precision, straight from the definitions."""
    a, b, index = exact_log_softmax(z), exact_log_softmax(c), np.arange(len(targets))
    p, q = np.exp(a), np.exp(b)
    found = {
        "nll_reference": -a[index, targets],
        "nll_candidate": -b[index, targets],
        "kl": (p * (a - b)).sum(axis=1),
        "kl_reverse": (q * (b - a)).sum(axis=1),
        "total_variation": np.abs(p - q).sum(axis=1) / 2,
        "delta_p": (q - p)[index, targets],
    }
    return {name: value.astype(np.float64) for name, value in found.items()}


def test_two_tokens_by_hand() -> None:
    found = score(rows([math.log(3), 0]), rows([0, 0]), [0])  # p = ¾ ¼, q = ½ ½
    assert found.nll_reference[0] == pytest.approx(-math.log(0.75), abs=1e-7)
    assert found.nll_candidate[0] == pytest.approx(math.log(2), abs=1e-7)
    assert found.kl[0] == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), abs=1e-7)
    assert found.max_abs_error[0] == pytest.approx(math.log(3))


@pytest.mark.parametrize("scale", [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 3.0])
def test_agrees_with_extended_precision(scale: float) -> None:
    z, c, targets = random_pair(scale)
    expected = exact(z, c, targets)
    found = score_rows(z, c, targets, np.zeros(len(z)))
    # Relative, also where KL is 1e-12: noise of float32 log-sum-exps would be 1e-7.
    np.testing.assert_allclose(found.kl, expected["kl"], rtol=1e-5)
    np.testing.assert_allclose(found.kl_reverse, expected["kl_reverse"], rtol=1e-5)
    np.testing.assert_allclose(found.total_variation, expected["total_variation"], rtol=1e-5)
    np.testing.assert_allclose(found.nll_reference, expected["nll_reference"], atol=3e-7)
    np.testing.assert_allclose(found.nll_candidate, expected["nll_candidate"], atol=5e-7)
    np.testing.assert_allclose(found.delta_p, expected["delta_p"], atol=3e-7)


def test_rows_of_different_drift_in_one_block_are_each_right() -> None:
    z, c, targets = random_pair(1.0, count=7)
    scale = np.array([1e-7, 1e-5, 1e-3, 1e-2, 0.05, 0.1, 2.0])[:, None]
    c = (z + scale * (c - z)).astype(np.float32)
    expected = exact(z, c, targets)
    found = score_rows(z, c, targets, np.zeros(len(z)))
    np.testing.assert_allclose(found.kl[1:], expected["kl"][1:], rtol=1e-5)
    alone = [score_rows(z[[i]], c[[i]], targets[[i]], np.zeros(1)).kl[0] for i in range(7)]
    np.testing.assert_array_equal(found.kl, alone)


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


@pytest.mark.parametrize("scale", [1e-3, 0.1, 3.0])
def test_the_rank_of_the_first_choice_is_counted(scale: float) -> None:
    z, c, targets = random_pair(scale)
    c[3, z[3].argmax()] = np.sort(c[3])[-200]  # a tie far down: the lower id stands higher
    best, index = z.argmax(axis=1), np.arange(len(z))
    order = np.lexsort((np.broadcast_to(np.arange(z.shape[1]), c.shape), -c))
    expected = (order == best[:, None]).argmax(axis=1) + 1
    found = score_rows(z, c, targets, np.zeros(len(z)))
    np.testing.assert_array_equal(found.rank, expected[index])
    assert found.rank[3] > 100


def test_order_counts_places_that_hold_the_same_token() -> None:
    z = rows([9, 8, 7, 6, 5, 4, 3, 2, 1, 0, -1, -2])
    c = z.copy()
    c[0, 1], c[0, 2] = 7, 8  # ranks two and three change places: the same set, another order
    found = score(z, c, [0], bound=0.5)
    np.testing.assert_allclose(found.agreement[0], [1, 1, 1])
    np.testing.assert_allclose(found.order[0], [1, 3 / 5, 8 / 10])
    np.testing.assert_allclose(found.order_tie_adjusted[0], [1, 3 / 5, 8 / 10])
    near = score(z, c, [0], bound=1.0)  # the two reference logits differ by 1
    np.testing.assert_allclose(near.order_tie_adjusted[0], [1, 1, 1])


def test_positions_without_any_token_are_refused() -> None:
    nothing = np.full((1, 5), -np.inf, np.float32)
    with pytest.raises(NonFiniteError, match="both sides give −inf for every token"):
        score(nothing, nothing, [0])
