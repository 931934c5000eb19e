"""Softmax over clusters: against PyTorch's own, and that nothing is read without need."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headport.clustered import ClusteredSoftmax, _Cluster, log_softmax
from headport.errors import NonFiniteError
from tests.head_models import CUTOFFS, HIDDEN, VOCAB, adaptive_head

SIZES = (40, 80, 137)


def _softmax(module: torch.nn.AdaptiveLogSoftmaxWithLoss) -> ClusteredSoftmax:
    def product(layer: torch.nn.Module):
        return lambda h: layer(torch.from_numpy(h)).detach().numpy()

    starts = np.cumsum((0, *SIZES))
    clusters = tuple(
        _Cluster(np.arange(starts[n + 1], starts[n + 2]), product(tail))
        for n, tail in enumerate(module.tail)
    )
    return ClusteredSoftmax(product(module.head), np.arange(SIZES[0]), clusters)


@pytest.fixture(scope="module")
def module() -> torch.nn.AdaptiveLogSoftmaxWithLoss:
    return adaptive_head()


def _states(rows: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(0).normal(size=(rows, HIDDEN)) * scale).astype(np.float32)


def test_log_probs_are_pytorchs_and_sum_to_one(module):
    h = _states(50)
    found = _softmax(module).log_probs(h)
    expected = module.log_prob(torch.from_numpy(h)).detach().numpy()
    assert np.abs(found - expected).max() < 2e-4 * np.abs(expected).max()
    assert np.abs(np.exp(found).sum(axis=1) - 1).max() < 1e-12


def test_predict_is_pytorchs(module):
    h = _states(200)
    expected = module.predict(torch.from_numpy(h)).numpy()
    assert (expected >= CUTOFFS[0]).any() and (expected < CUTOFFS[0]).any()
    assert (_softmax(module).predict(h) == expected).all()


@pytest.mark.parametrize("count", [1, 5, 60, VOCAB])
def test_top_is_the_sorted_whole(module, count):
    softmax, h = _softmax(module), _states(40)
    whole = softmax.log_probs(h)
    ids, log_probs = softmax.top(h, count)
    order = np.argsort(-whole, axis=1, kind="stable")[:, :count]
    assert (ids == order).all()
    assert (log_probs == np.take_along_axis(whole, order, axis=1)).all()


def test_a_cluster_is_read_only_by_rows_that_may_need_it(module):
    softmax, h = _softmax(module), _states(200, 3.0)
    shares = log_softmax(module.head(torch.from_numpy(h)).detach().numpy())
    best_alone = shares[:, : CUTOFFS[0]].max(axis=1)
    softmax.predict(h)
    for n in range(2):
        may = int((shares[:, CUTOFFS[0] + n] >= best_alone).sum())
        assert softmax.reads[n] <= may < len(h)
    assert softmax.rows == len(h)


def test_an_unread_cluster_would_not_have_won(module):
    # A bound that lets too much pass: with clusters' shares taken too low, answers change.
    softmax, h = _softmax(module), _states(200)
    honest = softmax.predict(h)

    def low(states: np.ndarray) -> np.ndarray:
        scores = module.head(torch.from_numpy(states)).detach().numpy()
        scores[:, CUTOFFS[0] :] -= 20
        return scores

    softmax._root = low
    assert (softmax.predict(h) != honest).any()


def test_equal_tokens_rank_by_id():
    flat = ClusteredSoftmax(
        lambda h: np.zeros((len(h), 3), np.float32),
        np.array([5, 6]),
        (_Cluster(np.array([0, 1, 2, 3, 4]), lambda h: np.zeros((len(h), 5), np.float32)),),
    )
    ids, log_probs = flat.top(np.zeros((1, 4), np.float32), 4)
    assert ids.tolist() == [[5, 6, 0, 1]]
    assert np.allclose(np.exp(log_probs), [[1 / 3, 1 / 3, 1 / 15, 1 / 15]])


def test_huge_scores_do_not_overflow():
    found = log_softmax(np.array([[1e30, 0.0], [-1e30, -1e30]], np.float32))
    assert np.isfinite(found[1]).all() and found[0, 0] == 0


def test_a_nan_is_named():
    with pytest.raises(NonFiniteError, match="row 1"):
        log_softmax(np.array([[0.0, 1.0], [0.0, np.nan]], np.float32))
