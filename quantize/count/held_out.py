"""Which documents are held out of the counts: decided by each document's own text."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from itertools import compress
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from headport.errors import UsageError

__all__ = ["RULE", "HeldOutFile", "check_unfinished", "held_out"]

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


def check_unfinished(path: Path, size: int) -> None:
    """Refuse to go on where an earlier run's part of a file of held-out texts is gone.

    Args:
        path: Where the file is to be.
        size: Bytes that run counted as written.

    Raises:
        UsageError: If they are not there.
    """
    part = _part(path)
    found = part.stat().st_size if part.exists() else 0
    if found < size:
        raise UsageError(
            f"{part}: {size} bytes of an unfinished count were expected, {found} found; pass "
            "--force to count anew"
        )


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.unfinished")


class HeldOutFile:
    """Held-out documents as JSON lines, {"text": …}; hidden beside its place until it is complete.

    Args:
        path: Where it is to be.
        size: Bytes that an earlier run counted as written, which `check_unfinished` found; what
            follows them comes again.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._part = _part(path)
        self._part.touch()
        self._stream = self._part.open("r+b")
        self._stream.truncate(size)
        self._stream.seek(size)

    def write(self, texts: Sequence[str], wanted: npt.NDArray[np.bool_]) -> None:
        """Write the wanted ones of some documents."""
        for text in compress(texts, wanted):
            self._stream.write(msgspec.json.encode({"text": text}) + b"\n")

    def sync(self) -> int:
        """Bring all to the disk; returns its bytes."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return self._stream.tell()

    def place(self) -> None:
        """Put the complete file into its place."""
        self.sync()
        self._part.replace(self._path)

    def close(self) -> None:
        """Close the file; what was written stays for the next run."""
        self._stream.close()
