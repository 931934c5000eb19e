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
from headport.vocabulary_map import read_map

__all__ = ["IdMap"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


class IdMap:
    """Head columns ↔ original ids.

    Args:
        size: True size V of the original vocabulary.
        kept: Original id of each head column, ascending, [K]; None where nothing was pruned.
    """

    def __init__(self, size: int, kept: Int64 | None = None) -> None:
        self.size = size
        self.ids: Int64 = np.arange(size) if kept is None else kept  # ascending, [K]
        assert (np.diff(self.ids) > 0).all(), "columns are in the order of their ids"

    @classmethod
    def from_bundle(cls, bundle: Bundle) -> IdMap:
        """Read the map that the manifest names, if any.

        Raises:
            BundleError: If the map is not right; see `headport.vocabulary_map.read_map`.
        """
        return cls(bundle.manifest.vocabulary.size, read_map(bundle))

    def rows(self, logits: Float32) -> Float32:
        """Drop padded columns: [N, ≥ K] → [N, K].

        Raises:
            BundleError: If the head has fewer columns than there are ids.
        """
        kept = len(self.ids)
        if logits.shape[1] < kept:
            raise BundleError(f"{kept} logits per row expected, the head gives {logits.shape[1]}")
        return logits[:, :kept]

    def spread(self, rows: Float32) -> Float32:
        """Rows by original id over the whole vocabulary, -inf where an id was pruned.

        [N, K] from `rows` → [N, V].
        """
        if len(self.ids) == self.size:
            return rows
        found = np.full((len(rows), self.size), -np.inf, np.float32)
        found[:, self.ids] = rows
        return found
