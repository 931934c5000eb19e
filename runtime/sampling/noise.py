"""Gumbel noise as a pure function of (seed, sample, step, original id).

Random numbers come from Philox4x64-10, a counter-based generator: nothing is carried from token
to token, so a draw does not depend on the batch, on streaming, or on which other ids exist.
`SAMPLING.md` is the specification; the C++ runtime follows the same page.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; for sampling as an
argmax, Gumbel 1954 and Maddison et al. 2014, arXiv:1411.0030.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = [
    "MAX_SEED",
    "NoiseKey",
    "argmax_with_noise",
    "draw_bits",
    "gumbel",
    "gumbel_bound",
    "uniform",
]

MAX_SEED = 2**64 - 1  # the seed is the low word of the Philox key, the high word is 0
_IDS_PER_BLOCK = 8  # a block has four 64-bit words, a word gives two draws
_BOUND_SLACK = 1e-4  # far above the float32 logarithm's error, at most 22.9 * 4 ulp = 1e-5

Float64 = npt.NDArray[np.float64]
Bits = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class NoiseKey:
    """What all noise of one draw depends on, besides the token's original id."""

    seed: int  # 0 … MAX_SEED
    step: int  # index of the new token, 0 for the first
    sample: int = 0  # index among the samples of one request, never a row of a batch


# Rows of one batch often share their seed; the array is read-only, so sharing is safe.
@lru_cache(maxsize=4)
def draw_bits(key: NoiseKey, count: int) -> Bits:
    """32 random bits for each of the ids 0 … count - 1.

    Block i // 8 of id i has the counter (i // 8, step, sample, 0), least significant word first,
    and the key (seed, 0). Word (i % 8) // 2 of the block holds the draws of two ids: the low half
    belongs to the even one.

    Args:
        key: Seed, step and sample.
        count: Number of ids.

    Returns:
        uint32 [count], read-only.
    """
    blocks = -(-count // _IDS_PER_BLOCK)
    # NumPy raises the 256-bit counter before its first block, so it is given the one before.
    counter = ((key.sample << 128) + (key.step << 64) - 1) % 2**256
    words = np.random.Philox(key=key.seed, counter=counter).random_raw(blocks * 4)
    bits = words.astype("<u8", copy=False).view("<u4")[:count]
    bits.flags.writeable = False
    return bits


def uniform(bits: Bits) -> Float64:
    """Bits r → u = (2 r + 1) / 2^33: strictly between 0 and 1, exact in float64."""
    return (bits.astype(np.float64) * 2.0 + 1.0) * 2.0**-33


def gumbel(bits: Bits) -> Float64:
    """Bits → g = -ln(-ln u), float64, between -3.14 and 22.88."""
    return -np.log(-np.log(uniform(bits)))


def gumbel_bound(bits: Bits) -> npt.NDArray[np.float32]:
    """Bits → upper bound of g in float32 with one logarithm; within 0.02 where g > 0.4.

    With y = 1 - u: -ln u ≥ y + y²/2 + y³/3 + y⁴/4, hence g ≤ -ln(y (1 + y (1/2 + y (1/3 + y/4)))).
    """
    rest = np.invert(bits).astype(np.float32)  # y = (2 rest + 1) / 2^33
    rest += np.float32(0.5)
    rest *= np.float32(2.0**-32)
    series = rest * np.float32(0.25)
    for term in (1 / 3, 1 / 2, 1.0):
        series += np.float32(term)
        series *= rest
    np.log(series, out=series)
    bound: npt.NDArray[np.float32] = np.float32(_BOUND_SLACK) - series
    return bound


def argmax_with_noise(scaled: Float64, bits: Bits) -> int:
    """Index of the largest `scaled + gumbel(bits)`, ties by lowest index.

    Double logarithms of a whole vocabulary cost more than the draws, so they are taken only where
    a cheap upper bound leaves a chance: -ln u ≥ 1 - u, hence g ≤ -ln(1 - u).

    Args:
        scaled: Scores without noise, [K]; -inf never wins. At least one is finite.
        bits: Draws, [K].
    """
    # In place: at this size fresh memory costs more than the arithmetic.
    rest = np.invert(bits).astype(np.float32)  # 1 - u = (2 rest + 1) / 2^33
    rest += np.float32(0.5)
    rest *= np.float32(2.0**-32)
    bound = scaled - np.log(rest, out=rest)
    likely = int(np.argmax(bound))
    floor = scaled[likely] + gumbel(bits[likely : likely + 1])[0] - _BOUND_SLACK
    alive = np.flatnonzero(bound >= floor)
    return int(alive[np.argmax(scaled[alive] + gumbel(bits[alive]))])
