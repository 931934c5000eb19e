"""Softmax over clusters of tokens: adaptive softmax, and classes with their members.

One small product gives the share of every cluster, and of tokens that stand alone; a cluster's own
product shares that out among its tokens:

    log p(t) = root(t)                                         of a token that stands alone
    log p(t) = root(c) + y_t − max y − ln Σ exp(y − max y)     of a token t of cluster c

All of it in float64. No token's log-probability is above its cluster's share, so the best tokens
are known as soon as no unread cluster's share reaches the last of them: the others are not read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.errors import BundleError, NonFiniteError
from headport.manifest import AdaptiveHead, TreeHead

__all__ = ["ClusteredSoftmax", "log_softmax", "open_clusters"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


class _Heads(Protocol):
    """What is asked of a runner."""

    def full_logits(self, hidden_states: Float32, name: str = "lm") -> Float32: ...

    def rows(self, hidden_states: Float32, token_ids: Int64, name: str = "lm") -> Float32: ...


_Product = Callable[[Float32], Float32]


@dataclass(frozen=True)
class _Cluster:
    """Tokens that share one column of the root, and their scores."""

    tokens: Int64  # [n]
    scores: _Product  # hidden states [N, H] → [N, n]


class ClusteredSoftmax:
    """Log-probabilities of a vocabulary whose tokens lie in clusters.

    Args:
        root: Hidden states [N, H] → scores [N, S + C]: S tokens that stand alone, then C clusters.
        alone: Tokens of the first columns, [S].
        clusters: Of the other columns.
    """

    def __init__(self, root: _Product, alone: Int64, clusters: tuple[_Cluster, ...]) -> None:
        self._root = root
        self._alone = alone
        self._clusters = clusters
        self.vocab_size = len(alone) + sum(len(cluster.tokens) for cluster in clusters)
        self.rows = 0  # hidden states that were asked about
        self.reads: Counter[int] = Counter()  # by cluster, hidden states whose tokens were scored

    def log_probs(self, hidden_states: Float32) -> Float64:
        """Log-probabilities of all tokens, [N, V]; reads every cluster.

        Raises:
            NonFiniteError: If a score is NaN or infinite.
        """
        root = self._shares(hidden_states)
        found = np.empty((len(root), self.vocab_size))
        found[:, _place(self._alone)] = root[:, : len(self._alone)]
        for n, cluster in enumerate(self._clusters):
            inner = self._inner(n, hidden_states)
            inner += root[:, len(self._alone) + n, None]
            found[:, _place(cluster.tokens)] = inner
        return found

    def top(self, hidden_states: Float32, count: int) -> tuple[Int64, Float64]:
        """The most likely tokens, best first, equal ones by lowest id.

        Args:
            hidden_states: [N, H].
            count: Tokens per row, k; at most V.

        Returns:
            Ids [N, k] and their log-probabilities [N, k].

        Raises:
            NonFiniteError: If a score is NaN or infinite.
        """
        root = self._shares(hidden_states)
        rows, width = len(root), len(self._alone)
        best = [_best(self._alone, row[:width], count) for row in root]
        unread = root[:, width:].copy()
        while unread.size:
            last = np.array([p[-1] if len(p) == count else -np.inf for _, p in best])
            asked = np.flatnonzero((unread.max(axis=1) >= last) & (unread.max(axis=1) > -np.inf))
            if not len(asked):
                break
            chosen = unread[asked].argmax(axis=1)
            for n in np.unique(chosen):
                wanted = asked[chosen == n]
                inner = self._inner(int(n), hidden_states[wanted])
                tokens = self._clusters[n].tokens
                for row, scores in zip(wanted, inner, strict=True):
                    ids, probs = _best(tokens, root[row, width + n] + scores, count)
                    held = best[row]
                    best[row] = _best(np.append(held[0], ids), np.append(held[1], probs), count)
                unread[wanted, n] = -np.inf
        shape = (rows, count)
        ids = np.array([ids for ids, _ in best], np.int64).reshape(shape)
        return ids, np.array([probs for _, probs in best]).reshape(shape)

    def predict(self, hidden_states: Float32) -> Int64:
        """The most likely token of each row, [N]."""
        return self.top(hidden_states, 1)[0][:, 0]

    def _shares(self, hidden_states: Float32) -> Float64:
        self.rows += len(hidden_states)
        return log_softmax(self._root(hidden_states))

    def _inner(self, cluster: int, hidden_states: Float32) -> Float64:
        self.reads[cluster] += len(hidden_states)
        return log_softmax(self._clusters[cluster].scores(hidden_states))


def log_softmax(scores: Float32) -> Float64:
    """Log-probabilities of rows of scores [N, n], in float64, their maximum subtracted first.

    Raises:
        NonFiniteError: If a score is NaN or infinite.
    """
    if not np.isfinite(scores).all():
        row = int(np.flatnonzero(~np.isfinite(scores).all(axis=1))[0])
        raise NonFiniteError(f"row {row} of the scores holds NaN or infinity")
    y = scores.astype(np.float64)
    for n in range(len(y)):  # one after the other: a row stays in the cache
        y[n] -= y[n].max()
        y[n] -= np.log(np.exp(y[n]).sum())
    return y


def _place(tokens: Int64) -> slice | Int64:
    """Where tokens stand among all: a slice is much faster than a list of places."""
    if len(tokens) and np.array_equal(tokens, np.arange(tokens[0], tokens[0] + len(tokens))):
        return slice(int(tokens[0]), int(tokens[0]) + len(tokens))
    return tokens


def _best(tokens: Int64, log_probs: Float64, count: int) -> tuple[Int64, Float64]:
    """The `count` best, best first, equal ones by lowest id."""
    if count < len(log_probs):
        # Only what is no worse than the last of them is sorted, whole ties included.
        least = log_probs.max() if count == 1 else np.partition(log_probs, -count)[-count]
        chosen = np.flatnonzero(log_probs >= least)
        tokens, log_probs = tokens[chosen], log_probs[chosen]
    order = np.lexsort((tokens, -log_probs))[:count]
    return tokens[order], log_probs[order]


def open_clusters(
    bundle: Bundle, runner: _Heads, name: str, head: AdaptiveHead | TreeHead
) -> ClusteredSoftmax:
    """The softmax of one head of a bundle.

    Args:
        bundle: Holds the head.
        runner: Runs its parts.
        name: The head's name.
        head: Its entry.

    Raises:
        BundleError: If the order of a tree's rows is no permutation of the tokens.
    """
    if isinstance(head, AdaptiveHead):
        clusters = tuple(
            _Cluster(np.arange(first, last), partial(runner.full_logits, name=f"{name}.tail{n}"))
            for n, (first, last) in enumerate(pairwise(head.cutoffs), 1)
        )
        root = partial(runner.full_logits, name=f"{name}.shortlist")
        return ClusteredSoftmax(root, np.arange(head.cutoffs[0]), clusters)
    order = _order(bundle, name, head)
    members = f"{name}.members"
    clusters = tuple(
        _Cluster(
            order[first:last],
            partial(_rows_of, runner, members, np.arange(first, last)),
        )
        for first, last in pairwise(head.starts)
    )
    root = partial(runner.full_logits, name=f"{name}.classes")
    return ClusteredSoftmax(root, np.arange(0), clusters)


def _rows_of(runner: _Heads, name: str, rows: Int64, hidden_states: Float32) -> Float32:
    return runner.rows(hidden_states, rows, name)


def _order(bundle: Bundle, name: str, head: TreeHead) -> Int64:
    size = head.members.vocab_size
    if head.order is None:
        return np.arange(size)
    found = np.load(bundle.file(head.order), allow_pickle=False)
    if found.shape != (size,) or not np.array_equal(np.sort(found), np.arange(size)):
        raise BundleError(f"{bundle.path}: {head.order} does not name each token of {name} once")
    order: Int64 = found.astype(np.int64)
    return order
