"""Vocabularies of every size: in which order tokens would be kept, and where to cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headport.validate.price.report import Curve, CurvePoint, Suggestion

__all__ = ["KeepOrder", "keep_order", "make_curve"]

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

_POINTS = 24  # of the curve, evenly spaced in log K


@dataclass(frozen=True)
class KeepOrder:
    """Every id by when it would be kept."""

    ids: Int64  # [V]
    place: Int64  # [V], of each id in that order
    sizes: Int64  # [points], K of the curve's points, ascending; the last is V

    @property
    def starts(self) -> Int64:
        """Beginnings of the pieces that the sizes cut the order into, [points]."""
        return np.append(0, self.sizes[:-1])


def keep_order(
    counts: Int64, base: Iterable[int], with_needs: Callable[[int], Iterable[int]], size: int
) -> KeepOrder:
    """The order in which `headport prune --max-size` keeps ids, and the sizes of a curve.

    Args:
        counts: How often each id occurs, [V] or shorter.
        base: Ids that are always kept.
        with_needs: An id and those that it brings along.
        size: V.
    """
    chosen: dict[int, None] = dict.fromkeys(i for i in sorted(base) if i < size)
    least = max(1, len(chosen))
    by_count = np.argsort(-counts[:size], kind="stable")
    for token_id in by_count[counts[by_count] > 0].tolist():
        chosen |= dict.fromkeys(i for i in sorted(with_needs(token_id)) if i not in chosen)
    used = len(chosen)
    chosen |= dict.fromkeys(i for i in range(size) if i not in chosen)
    ids = np.fromiter(chosen, np.int64, size)
    place = np.empty(size, np.int64)
    place[ids] = np.arange(size)
    inner = np.geomspace(least, max(least, used), _POINTS).round().astype(np.int64)
    return KeepOrder(ids, place, np.unique(np.append(inner, size)))


def make_curve(
    order: KeepOrder,
    lost: Float64,
    covered: Float64,
    *,
    bytes_per_row: float,
    step_ms: tuple[tuple[int, float], tuple[int, float]],
    limit: float,
) -> Curve:
    """The curve and the suggested cut.

    Args:
        order: Sizes.
        lost: Mean probability on removed ids, by size, [points].
        covered: Share of the text's tokens whose id is kept, by size, [points].
        bytes_per_row: Of the head.
        step_ms: Two measured (K, milliseconds); others lie on the line through them.
        limit: Lost probability that is accepted.
    """
    points = tuple(
        CurvePoint(
            kept=int(k),
            lost_mass=float(mass),
            covered_tokens=float(share),
            head_bytes=round(bytes_per_row * int(k)),
            step_ms=_on_line(step_ms, int(k)),
        )
        for k, mass, share in zip(order.sizes, lost, covered, strict=True)
    )
    words = "always kept ids first, then by falling count, each with the parts it is merged from"
    return Curve(points=points, suggestion=_suggest(points, limit), order=words)


def _on_line(measured: tuple[tuple[int, float], tuple[int, float]], k: int) -> float | None:
    (small, fast), (large, slow) = sorted(measured)
    if small == large or slow < fast:  # noise is larger than the difference
        return None
    return max(0.0, fast + (slow - fast) * (k - small) / (large - small))


def _suggest(points: tuple[CurvePoint, ...], limit: float) -> Suggestion:
    inner = points[:-1]  # the last keeps everything
    good = [n for n, point in enumerate(inner) if point.lost_mass <= limit]
    if not good:
        least = min((p.lost_mass for p in inner), default=0.0)
        return Suggestion(
            kept=None,
            reason=f"no size of the curve loses at most {limit:.3%} of the probability; even all "
            f"counted tokens lose {least:.3%}, so count more text of this kind",
        )
    chosen = inner[good[0]]
    reason = f"the smallest of the curve that loses at most {limit:.3%} of the probability"
    if good[0]:
        before = inner[good[0] - 1]
        reason += f"; K = {before.kept} loses {before.lost_mass:.3%}"
    return Suggestion(kept=chosen.kept, reason=reason)
