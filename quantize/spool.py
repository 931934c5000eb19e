"""Arrays kept on disk until a bundle is written, so that memory holds one matrix at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.quantize.formats import StoredWeight

__all__ = ["Spool"]

_SMALL_BYTES = 1 << 20


class Spool:
    """Files of a folder that disappears with it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def keep(self, stored: StoredWeight) -> StoredWeight:
        """The same weight, with its large tensors mapped from files."""
        tensors = {suffix: self._map(array) for suffix, array in stored.tensors.items()}
        return StoredWeight(tensors, stored.row_errors)

    def _map(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if array.nbytes < _SMALL_BYTES:
            return array
        file = self._folder / f"{self._count}.bin"
        self._count += 1
        array.tofile(file)
        mapped: npt.NDArray[Any] = np.memmap(file, array.dtype, "r", 0, array.shape)
        return mapped
