"""What an encoder reads, as both sides of a comparison are given it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = ["GivenSource"]


class GivenSource(msgspec.Struct, frozen=True):
    """Token ids of a text, or a file of features; one of the two."""

    token_ids: tuple[int, ...] = ()
    features: str = ""  # path of a .npy file, float [bins, frames]

    def values(self) -> npt.NDArray[Any]:
        """int64 [S], or float32 [bins, frames].

        Raises:
            OSError: If the file cannot be read.
            ValueError: If it holds no plain array.
        """
        if self.features:
            found = np.load(self.features, allow_pickle=False)
            if not isinstance(found, np.ndarray):
                raise ValueError("one array was expected, an archive found")
            return np.ascontiguousarray(found, np.float32)
        return np.array(self.token_ids, np.int64)
