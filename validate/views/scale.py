"""Axes of plots: figures to pixels, and round figures to write beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Scale", "scale_over"]


@dataclass(frozen=True)
class Scale:
    """Figures in [low, high] on pixels [start, end]."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """Pixel of a figure; beyond the ends, the end."""
        low, high, x = self.low, self.high, value
        if self.logarithmic:
            low, high, x = math.log(low), math.log(high), math.log(max(value, low))
        share = min(max((x - low) / (high - low), 0.0), 1.0)
        return round(self.start + share * (self.end - self.start), 2)

    def ticks(self, most: int = 6) -> list[float]:
        """Round figures within the scale.

        Linear, or within one power of ten: steps of 1, 2 or 5 of a power. Logarithmic: powers of
        ten, over less than two of them also twice and five times as much.
        """
        if self.logarithmic and self.high > 10 * self.low:
            first, last = math.floor(math.log10(self.low)), math.floor(math.log10(self.high))
            if math.log10(self.high / self.low) < 2:
                steps = [10.0**k * factor for k in range(first, last + 1) for factor in (1, 2, 5)]
                return [value for value in steps if self.low <= value <= self.high]
            first += 10.0**first < self.low
            every = max(1, math.ceil((last - first + 1) / most))
            return [10.0**k for k in range(first, last + 1, every)]
        step = _round_step((self.high - self.low) / most)
        start, end = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(k * step, 12) for k in range(start, end + 1)]


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))


def scale_over(
    values: Sequence[float], pixels: tuple[float, float], *, room: float = 0.06
) -> Scale:
    """A scale over some figures, with room at both ends; one figure alone gets a width."""
    low, high = min(values), max(values)
    spread = high - low or abs(high) * 0.1 or 1.0
    return Scale(low - room * spread, high + room * spread, *pixels)
