"""Documents that are nearly the same as an earlier one, found in constant memory.

A document is the set of its runs of `SHINGLE_BYTES` bytes, in lower case and with white space made
single spaces. Of their hashes one in `_SAMPLE` is kept (all, if there are few), whichever document
they stand in, and the smallest under each of 72 hash functions is taken (MinHash, Broder 1997): two
documents agree in one with probability J, the Jaccard similarity of their sets. 6 bands of 12 such
values are looked up in a Bloom filter (Bloom 1970); one band seen before makes a duplicate:

    P(duplicate | J) = 1 − (1 − J¹²)⁶
    J = 0.5: 0.15 %   0.7: 8 %   0.8: 35 %   0.9: 86 %   0.95: 99 %

A filter that is full to f takes a new document for an old one with probability 1 − (1 − f⁶)⁶.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["METHOD", "SeenDocuments", "signatures"]

UInt64 = npt.NDArray[np.uint64]
Bool = npt.NDArray[np.bool_]

METHOD = (
    "MinHash over runs of 24 bytes, 6 bands of 12, in a Bloom filter; documents of Jaccard "
    "similarity 0.5, 0.8, 0.9, 0.95 are left out with probability 0.0015, 0.35, 0.86, 0.99"
)
SHINGLE_BYTES = 24
_SAMPLE, _FEW = 8, 256
_BANDS, _ROWS = 6, 12
_FILTER_BITS = 1 << 30  # 128 MiB: 10 million documents fill 28 % of it
_PROBES = 6
_ONES = np.array([byte.bit_count() for byte in range(256)], np.uint8)


def _mix(values: UInt64) -> UInt64:
    """A bijection that makes every bit depend on every bit (splitmix64's, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


_KEYS = _mix(np.arange(1, _BANDS * _ROWS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
_BASE = 0x100000001B3  # odd, so that every byte of a run counts


def signatures(documents: Sequence[str]) -> UInt64:
    """Band keys of documents, [n, 6]; a document without text gets keys of its own."""
    found = [_signature(text) for text in documents]
    return np.stack(found) if found else np.empty((0, _BANDS), np.uint64)


def _signature(text: str) -> UInt64:
    data = " ".join(text.lower().split()).encode()
    if len(data) < SHINGLE_BYTES:
        digest = hashlib.blake2b(data, digest_size=8).digest()
        hashes = np.frombuffer(digest, np.uint64)
    else:
        hashes = _mix(_runs(np.frombuffer(data, np.uint8).astype(np.uint64)))
        sampled = hashes[hashes % np.uint64(_SAMPLE) == 0]
        hashes = sampled if len(sampled) >= _FEW else hashes
    smallest = np.array([_mix(hashes ^ key).min() for key in _KEYS])
    return _fold(smallest.reshape(_BANDS, _ROWS))


def _runs(data: UInt64) -> UInt64:
    """Polynomial hash of every run of 24 values, [n] → [n − 23], modulo 2⁶⁴.

    hash(a ∥ b) = hash(a) · base^|b| + hash(b), for |a|, |b| = 1, 1; 2, 2; 4, 4; 8, 8; 8, 16.
    """
    eight = data
    for size in (1, 2, 4):
        eight = _joined(eight, eight, size, size)
    return _joined(eight, _joined(eight, eight, 8, 8), 8, 16)


def _joined(first: UInt64, second: UInt64, first_size: int, second_size: int) -> UInt64:
    count = len(second) - first_size
    scale = np.uint64(pow(_BASE, second_size, 1 << 64))
    return first[:count] * scale + second[first_size:]


def _fold(bands: UInt64) -> UInt64:
    """One key per band, [6, 12] → [6]; equal values in other bands give other keys."""
    keys = np.arange(_BANDS, dtype=np.uint64)
    for column in bands.T:
        keys = _mix(keys ^ column) * np.uint64(0x9E3779B97F4A7C15)
    return keys


class SeenDocuments:
    """A Bloom filter of band keys.

    Args:
        bits: Its content, uint8 [2²⁷], as an earlier one had it; None is empty.
    """

    def __init__(self, bits: npt.NDArray[np.uint8] | None = None) -> None:
        self.bits = np.zeros(_FILTER_BITS // 8, np.uint8) if bits is None else bits

    def add(self, keys: UInt64) -> Bool:
        """Which documents are new, [n]; all of them are remembered.

        Args:
            keys: Band keys [n, 6], in the documents' order.
        """
        new = np.ones(len(keys), np.bool_)
        for row, bands in enumerate(keys):
            places = self._places(bands)  # [6, probes]
            masks = np.left_shift(np.uint8(1), (places & np.uint64(7)).astype(np.uint8))
            cells = (places >> np.uint64(3)).astype(np.int64)
            new[row] = not ((self.bits[cells] & masks) > 0).all(axis=1).any()
            np.bitwise_or.at(self.bits, cells, masks)
        return new

    def wrong_share(self) -> float:
        """Share of new documents that are now taken for old ones."""
        pieces = np.split(self.bits, max(1, len(self.bits) >> 20))  # a table of ones per MiB
        ones = sum(int(_ONES[piece].sum(dtype=np.int64)) for piece in pieces)
        full = ones / (8 * len(self.bits))
        return float(1 - (1 - full**_PROBES) ** _BANDS)

    def _places(self, bands: UInt64) -> UInt64:
        # Double hashing (Kirsch and Mitzenmacher 2006); an odd step visits different bits.
        step = _mix(bands) | np.uint64(1)
        probes = np.arange(_PROBES, dtype=np.uint64)
        return (bands[:, None] + probes * step[:, None]) % np.uint64(8 * len(self.bits))
