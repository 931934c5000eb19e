"""Which documents are held out of the counts: decided by each document's own text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["RULE", "held_out"]

RULE = "the first 8 bytes of blake2b(UTF-8 text), as a share of 2⁶⁴, are below the share"


def held_out(documents: Sequence[str], share: float) -> npt.NDArray[np.bool_]:
    """Which documents belong to the held-out part, [n].

    Equal texts fall on the same side, in whatever order, file or run they come.

    Args:
        documents: Texts.
        share: In [0, 1).
    """
    if not share:
        return np.zeros(len(documents), np.bool_)
    digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in documents]
    values = np.frombuffer(b"".join(digests), ">u8")
    return values < share * 2.0**64
