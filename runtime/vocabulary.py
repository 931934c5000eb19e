"""Original ids: the one place where a bundle's own ids are translated.

A pruned head has one row per kept token; `vocab_map.npy` says which. Everything after this file
(sampler, noise, end tokens, results) sees original ids only, in ascending order, and only ids
that exist: a stored matrix may be wider than the vocabulary, and a padded row is no token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.errors import BundleError

__all__ = ["IdMap"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


class IdMap:
    """Head columns ↔ original ids.

    Args:
        size: True size V of the original vocabulary.
        new_to_original: Original id of each head column, [K]; None where nothing was pruned.

    Raises:
        BundleError: If an id is out of range or given twice.
    """

    def __init__(self, size: int, new_to_original: Int64 | None = None) -> None:
        self.size = size
        self.own = np.arange(size) if new_to_original is None else new_to_original.astype(np.int64)
        if new_to_original is not None:
            outside = self.own[(self.own < 0) | (self.own >= size)]
            if len(outside) or len(np.unique(self.own)) != len(self.own):
                raise BundleError(
                    f"the vocabulary map must name different ids below {size}; it names "
                    f"{outside.tolist() or 'some twice'}"
                )
        order = np.argsort(self.own)
        self.ids: Int64 = self.own[order]  # original ids, ascending, [K]
        self._order = None if (order == np.arange(len(order))).all() else order

    @classmethod
    def from_bundle(cls, bundle: Bundle) -> IdMap:
        """Read the map that the manifest names, if any.

        Raises:
            BundleError: If the map is not int32 [K], or its ids are not right: stages write them
                ascending, so others were not written with this head.
        """
        vocabulary = bundle.manifest.vocabulary
        if vocabulary.map is None:
            return cls(vocabulary.size)
        path = bundle.file(vocabulary.map)
        try:
            found = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise BundleError(f"{path}: cannot be read ({error})") from error
        if found.dtype != np.int32 or found.shape != (vocabulary.kept_size,):
            raise BundleError(
                f"{path}: int32 [{vocabulary.kept_size}] expected, "
                f"{found.dtype} {list(found.shape)} found"
            )
        if (odd := np.flatnonzero(np.diff(found.astype(np.int64)) < 0)).size:
            place = int(odd[0])
            raise BundleError(
                f"{path}: ascending ids expected, {found[place]} and {found[place + 1]} found at "
                f"{place}; the file was changed, make the bundle again"
            )
        return cls(vocabulary.size, found)

    @property
    def columns(self) -> Int64:
        """Head column of each id of `ids`, [K]."""
        return np.arange(len(self.own)) if self._order is None else self._order

    def rows(self, logits: Float32) -> Float32:
        """Drop padded columns and order the rest by original id: [N, ≥ K] → [N, K].

        Raises:
            BundleError: If the head has fewer columns than there are ids.
        """
        kept = len(self.own)
        if logits.shape[1] < kept:
            raise BundleError(f"{kept} logits per row expected, the head gives {logits.shape[1]}")
        logits = logits[:, :kept]
        return logits if self._order is None else logits[:, self._order]

    def spread(self, rows: Float32) -> Float32:
        """Rows by original id over the whole vocabulary, -inf where an id was pruned.

        [N, K] from `rows` → [N, V].
        """
        if len(self.ids) == self.size:
            return rows
        found = np.full((len(rows), self.size), -np.inf, np.float32)
        found[:, self.ids] = rows
        return found
