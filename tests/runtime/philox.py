"""Philox4x64-10 in plain integers: the reference of the noise tests, in Python and in C++."""

from __future__ import annotations

WORD = 2**64 - 1


def philox4x64(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x64-10 as the paper writes it, in plain integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * c0, 2**64)
        high1, low1 = divmod(0xCA5A826395121157 * c2, 2**64)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & WORD, (k1 + 0xBB67AE8584CAA73B) & WORD
    return c0, c1, c2, c3
