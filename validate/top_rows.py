"""A reference of which only the likeliest tokens are known, as a closed model gives them.

Stored of a position are the ids and log-probabilities of the K likeliest tokens, the
log-probability of the token that follows, and the mass of all others. How that mass is spread is
not known: two ways of spreading it bound every figure that depends on it. Known exactly are the
ranks down to K and the likelihood, hence agreements, orders, perplexities and Δp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BOUNDED_METRICS", "TopRows"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

# Figures of which only the least value that fits is known; others look at ranks and likelihoods.
BOUNDED_METRICS = ("kl_", "total_variation", "max_abs_logit_error", "reference_top1_rank")


@dataclass(frozen=True)
class TopRows:
    """N positions."""

    ids: Int32  # [N, K], likeliest first
    log_p: Float32  # [N, K]
    target_log_p: Float64  # [N], of the token that follows
    rest: Float64  # [N], probability of all tokens but those K and the one that follows

    def __len__(self) -> int:
        return len(self.ids)

    @staticmethod
    def layout(count: int) -> np.dtype[Any]:
        """A position as it is stored."""
        return np.dtype(
            [
                ("ids", "<i4", count),
                ("log_p", "<f4", count),
                ("target_log_p", "<f8"),
                ("rest", "<f8"),
            ]
        )

    @classmethod
    def read(cls, stored: npt.NDArray[Any]) -> TopRows:
        """Positions of a file of `layout`."""
        return cls(*(np.array(stored[name]) for name in stored.dtype.names or ()))

    def stored(self) -> npt.NDArray[Any]:
        """The positions in `layout`."""
        found = np.empty(len(self), self.layout(self.ids.shape[1]))
        for name in found.dtype.names or ():
            found[name] = getattr(self, name)
        return found

    def __getitem__(self, rows: slice | Int64) -> TopRows:
        return TopRows(self.ids[rows], self.log_p[rows], self.target_log_p[rows], self.rest[rows])

    @classmethod
    def of_logits(cls, logits: Float32, targets: Int64, count: int) -> TopRows:
        """What is kept of logits [N, V] and the tokens [N] that follow."""
        z = logits.astype(np.float64)
        top = z.max(axis=1, keepdims=True)
        log_p = z - top - np.log(np.exp(z - top).sum(axis=1, keepdims=True))
        order = np.argsort(-logits, axis=1, kind="stable")[:, :count]  # ties by lowest id
        unknown = np.ones(logits.shape, np.bool_)
        np.put_along_axis(unknown, order, False, axis=1)
        unknown[np.arange(len(z)), targets] = False
        return cls(
            order.astype(np.int32),
            np.take_along_axis(log_p, order, axis=1).astype(np.float32),
            log_p[np.arange(len(z)), targets],
            np.where(unknown, np.exp(log_p), 0).sum(axis=1),
        )

    def completed(self, candidate: Float32, targets: Int64) -> tuple[Float32, Float64, Float64]:
        """Logits that fit what is known and are as near to the candidate's as they can be.

        The rest is spread as the candidate spreads it, no token above the K-th: by convexity that
        gives the least KL(p ‖ q) of all distributions p that fit. The greatest is that of the other
        extreme: the whole rest on the tokens that the candidate finds least likely, each as likely
        as the K-th.

        Args:
            candidate: Logits [N, V].
            targets: Tokens that follow, [N].

        Returns:
            Logits [N, V] on the candidate's scale; least and greatest KL, [N] each, nats.
        """
        c = candidate.astype(np.float64)
        top = c.max(axis=1, keepdims=True)
        scale = top + np.log(np.exp(c - top).sum(axis=1, keepdims=True))
        log_q = c - scale
        known = np.zeros(c.shape, np.bool_)
        np.put_along_axis(known, self.ids.astype(np.int64), True, axis=1)
        known[np.arange(len(c)), targets] = True
        log_p = np.full(c.shape, -np.inf)
        log_p[np.arange(len(c)), targets] = self.target_log_p
        np.put_along_axis(log_p, self.ids.astype(np.int64), self.log_p.astype(np.float64), axis=1)
        log_p[np.arange(len(c)), targets] = self.target_log_p
        least, most = np.empty(len(c)), np.empty(len(c))
        for row in range(len(c)):
            inside, q = ~known[row], np.exp(log_q[row])
            cap = float(np.exp(np.float64(self.log_p[row, -1])))
            spread = _spread(q[inside], float(self.rest[row]), cap)
            with np.errstate(divide="ignore"):
                log_p[row, inside] = np.log(spread)
            shown = log_p[row, known[row]]
            fixed = float(np.exp(shown) @ (shown - log_q[row, known[row]]))
            least[row] = fixed + _divergence(spread, log_q[row, inside])
            worst = _extreme(log_q[row, inside], float(self.rest[row]), cap)
            most[row] = fixed + worst
        # A token without any mass would be −∞ on one side alone, which is no logit.
        logits = np.maximum(log_p, -1e4) + scale
        return logits.astype(np.float32), np.maximum(least, 0), np.maximum(most, 0)


def _spread(q: Float64, mass: float, cap: float) -> Float64:
    """min(cap, λ q) with the λ that makes the sum `mass`, as far as the cap lets it."""
    found = np.zeros_like(q)
    free = np.ones(len(q), np.bool_)
    left = mass
    while free.any() and left > 0:
        total = float(q[free].sum())
        if total <= 0:
            break
        found[free] = q[free] * (left / total)
        over = free & (found > cap)
        if not over.any():
            break
        found[over] = cap
        free &= ~over
        left = mass - float(found[~free].sum())
    return found


def _divergence(p: Float64, log_q: Float64) -> float:
    kept = p > 0
    return float(p[kept] @ (np.log(p[kept]) - log_q[kept]))


def _extreme(log_q: Float64, mass: float, cap: float) -> float:
    """Σ p ln(p / q) with p at the cap on the least likely tokens, the remainder on the next."""
    if mass <= 0 or cap <= 0 or not len(log_q):
        return 0.0
    full = min(int(mass / cap), len(log_q) - 1)
    lowest = np.partition(log_q, full)[: full + 1]
    lowest.sort()
    remainder = max(mass - full * cap, 0.0)
    found = full * cap * np.log(cap) - cap * float(lowest[:full].sum())
    if remainder > 0:
        found += remainder * (np.log(remainder) - float(lowest[full]))
    return float(found)
