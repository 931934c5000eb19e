"""What has been counted so far, and the file that lets a killed run go on."""

from __future__ import annotations

import contextlib
import os
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headport.errors import OutputError, UsageError
from headport.quantize.count.counting import Counted

__all__ = ["Tally", "TallyFile"]

Int64 = npt.NDArray[np.int64]


class Totals(msgspec.Struct):
    """Numbers of a tally."""

    documents: int = 0  # counted
    bytes: int = 0
    held_out_documents: int = 0
    duplicates: int = 0
    skipped: int = 0
    file: int = 0  # where the stream stands: index of the file, and place in it
    end: int = 0
    held_out_bytes: int = 0  # of the file of held-out texts


@dataclass
class Tally:
    """Counts and totals; grows with the vocabulary, not with the corpus."""

    counts: Int64  # [V]
    held_out: Int64  # [V]
    file_documents: Int64  # [files], documents read of each
    totals: Totals = field(default_factory=Totals)
    seen: npt.NDArray[np.uint8] | None = None  # filter of near duplicates

    @classmethod
    def empty(cls, vocab_size: int, files: int) -> Tally:
        """Nothing counted."""
        return cls(
            counts=np.zeros(vocab_size, np.int64),
            held_out=np.zeros(vocab_size, np.int64),
            file_documents=np.zeros(files, np.int64),
        )

    def add(self, counted: Counted, held_out: Counted) -> None:
        """Add a batch."""
        self.counts += counted.counts
        self.held_out += held_out.counts
        self.totals.documents += counted.documents
        self.totals.bytes += counted.bytes
        self.totals.held_out_documents += held_out.documents


class TallyFile:
    """The tally of an unfinished table, hidden beside it.

    Args:
        output: The table.
        task: All that its counts depend on; only the same task goes on with it.
    """

    def __init__(self, output: Path, task: dict[str, Any]) -> None:
        self.path = output.with_name(f".{output.name}.unfinished")
        self._task = task

    def save(self, tally: Tally) -> None:
        """Write the tally, complete or not at all.

        Raises:
            OutputError: If it cannot be written.
        """
        header = msgspec.json.encode({"task": self._task, "totals": tally.totals})
        arrays: dict[str, npt.NDArray[Any]] = {
            "header": np.frombuffer(header, np.uint8),
            "counts": tally.counts,
            "held_out": tally.held_out,
            "file_documents": tally.file_documents,
        }
        if tally.seen is not None:
            arrays["seen"] = tally.seen
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            with part.open("wb") as stream:
                np.savez(stream, allow_pickle=False, **arrays)
                stream.flush()
                os.fsync(stream.fileno())
            part.replace(self.path)
        except OSError as error:
            raise OutputError(f"{self.path} cannot be written: {error.strerror}") from error
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    def load(self) -> Tally | None:
        """The tally of an earlier run of the same task, if there is one.

        Raises:
            UsageError: If it belongs to another task or cannot be read; what differs is named.
        """
        if not self.path.exists():
            return None
        advice = f"pass --force to count anew, or delete {self.path}"
        try:
            with np.load(self.path, allow_pickle=False) as found:
                arrays = {name: found[name] for name in found.files}
            header = msgspec.json.decode(arrays.pop("header").tobytes())
            totals = msgspec.convert(header["totals"], Totals)
            tally = Tally(**arrays, totals=totals)
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            raise UsageError(
                f"{self.path}: an unfinished count that cannot be read ({error}); {advice}"
            ) from error
        # As JSON brings it back.
        expected, found_task = msgspec.json.decode(msgspec.json.encode(self._task)), header["task"]
        odd = sorted(
            key
            for key in expected.keys() | found_task.keys()
            if expected.get(key) != found_task.get(key)
        )
        if odd:
            raise UsageError(
                f"{self.path}: an unfinished count of the same task was expected, one with other "
                f"{', '.join(odd)} found; {advice}"
            )
        return tally

    def discard(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)
