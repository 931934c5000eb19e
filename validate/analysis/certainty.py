"""Margins and entropies of both sides."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headport.validate.analysis.records import Certainty, Quantiles

__all__ = ["CertaintyOfSides", "entropy"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


def entropy(logits: Float32) -> Float64:
    """Entropy of softmax(z) of each row, nats: ln Σ exp z − Σ p z.

    Args:
        logits: z, [N, V]; −∞ for a removed token.
    """
    z = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    weights = np.exp(z)
    total = weights.sum(axis=1)
    found: Float64 = np.log(total) - (weights * np.where(weights > 0, z, 0.0)).sum(axis=1) / total
    return found


class CertaintyOfSides:
    """Keeps two numbers per position and side."""

    def __init__(self) -> None:
        self._found: tuple[list[Float64], ...] = ([], [], [], [])

    def add(self, logits: tuple[Float32, Float32]) -> None:
        """Look at some positions: reference and candidate, [N, V] each."""
        for side, z in enumerate(logits):
            best = np.partition(z, -2, axis=1)[:, -2:].astype(np.float64)
            self._found[side].append(entropy(z))
            self._found[2 + side].append(best[:, 1] - best[:, 0])

    def certainty(self) -> Certainty:
        """Quantiles of what was seen; at least one position must have been."""
        return Certainty(
            reference_entropy=_quantiles(self._found[0]),
            candidate_entropy=_quantiles(self._found[1]),
            reference_margin=_quantiles(self._found[2]),
            candidate_margin=_quantiles(self._found[3]),
        )


def _quantiles(parts: list[Float64]) -> Quantiles:
    p1, p10, p50, p90, p99 = np.quantile(np.concatenate(parts), (0.01, 0.1, 0.5, 0.9, 0.99))
    return Quantiles(p1=float(p1), p10=float(p10), p50=float(p50), p90=float(p90), p99=float(p99))
