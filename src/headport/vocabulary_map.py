"""`vocab_map.npy` of a pruned bundle: the id that each row of its head had before."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.errors import BundleError

__all__ = ["read_map"]

Int64 = npt.NDArray[np.int64]


def read_map(bundle: Bundle) -> Int64 | None:
    """Id of each row of the head, ascending, [K]; None where nothing was pruned.

    Raises:
        BundleError: If it is not int32 [K] of ids that the vocabulary has, each above the one
            before. Stages write them ascending, so others were not written with this head.
    """
    vocabulary = bundle.manifest.vocabulary
    if vocabulary.map is None:
        return None
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
    ids: Int64 = found.astype(np.int64)
    outside = ids[(ids < 0) | (ids >= vocabulary.size)]
    if len(outside):
        raise BundleError(
            f"{path}: ids from 0 to {vocabulary.size - 1} expected, {outside[:5].tolist()} found; "
            "the file was changed, make the bundle again"
        )
    if (odd := np.flatnonzero(np.diff(ids) <= 0)).size:
        place = int(odd[0])
        raise BundleError(
            f"{path}: ascending ids expected, {ids[place]} and {ids[place + 1]} found at "
            f"{place}; the file was changed, make the bundle again"
        )
    return ids
