"""A corpus as a stream of documents that can be taken up again at any of them.

| file | document | place |
|---|---|---|
| `.jsonl`, `.ndjson` | a line's field | bytes of what was read |
| `.parquet` | a row's column | rows |
| any other: text | lines up to the first blank one behind `TEXT_BYTES` | bytes of what was read |

`.gz`, `.xz` and `.zst` behind a name mean that the file is compressed.
"""

from __future__ import annotations

import glob
import gzip
import io
import lzma
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from headport.errors import UsageError
from headport.quantize.count.table import import_pyarrow

__all__ = ["TEXT_BYTES", "Corpus", "Document", "find_files"]

TEXT_BYTES = 4096  # a plain text's documents are at least this long
_LONGEST_BYTES = 1 << 20  # and cut behind a line, a space or a character at the latest here
_CHUNK_BYTES = 1 << 20
_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")
_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Document:
    """One document, and where the stream stands behind it."""

    text: str | None  # None: damaged
    file: int  # index in the corpus
    end: int  # place in the file
    fault: str = ""  # what is wrong with a damaged one


def find_files(names: Sequence[str]) -> tuple[Path, ...]:
    """Files of paths, folders and glob patterns, each once, in order.

    Raises:
        UsageError: If a name leads to no file; all such names are listed.
    """
    found: dict[Path, None] = {}
    missing = []
    for name in names:
        path = Path(name)
        # Path.glob takes no absolute pattern.
        matches = sorted(glob.glob(name, recursive=True))  # noqa: PTH207
        paths = [path] if path.exists() else [Path(match) for match in matches]
        files = [f for p in paths for f in (_below(p) if p.is_dir() else [p])]
        found |= dict.fromkeys(files)
        if not files:
            missing.append(name)
    if missing:
        raise UsageError(
            f"--corpus: files were expected, none found for {', '.join(missing)}; check the path"
        )
    return tuple(found)


def _below(folder: Path) -> list[Path]:
    inside = (p.relative_to(folder) for p in sorted(folder.rglob("*")) if p.is_file())
    return [folder / p for p in inside if not any(part.startswith(".") for part in p.parts)]


class Corpus:
    """Documents of files, in order.

    Args:
        files: As `find_files` gives them.
        field: Field of a JSON line, or column of a Parquet file, that holds the text.
    """

    def __init__(self, files: Sequence[Path], field: str = "text") -> None:
        self.files = tuple(files)
        self.field = field

    def documents(self, file: int = 0, start: int = 0) -> Iterator[Document]:
        """Documents from a place on, as an earlier one's `file` and `end` name it.

        Raises:
            UsageError: If a file cannot be read; its place is named.
        """
        for index in range(file, len(self.files)):
            path = self.files[index]
            place = start if index == file else 0
            try:
                for text, end, fault in self._read(path, place):
                    place = end
                    yield Document(text, index, end, fault)
            except (OSError, EOFError, lzma.LZMAError) as error:
                raise UsageError(
                    f"{path}: cannot be read behind {place} ({error}); mend it or leave it out"
                ) from error

    def _read(self, path: Path, start: int) -> Iterator[tuple[str | None, int, str]]:
        plain = path.with_suffix("") if path.suffix in _OPEN else path
        if plain.suffix == ".parquet":
            if plain is not path:
                raise UsageError(f"{path}: Parquet compresses itself; unpack the file")
            yield from _rows(path, self.field, start)
            return
        with _OPEN.get(path.suffix, _open_plain)(path) as stream:
            _skip(stream, start, path)
            if plain.suffix in (".jsonl", ".ndjson"):
                yield from _lines(stream, self.field, start)
            else:
                yield from _paragraphs(stream, start)


def _open_plain(path: Path) -> BinaryIO:
    return path.open("rb")


def _open_zstd(path: Path) -> BinaryIO:
    arrow = import_pyarrow()
    unpacked = arrow.CompressedInputStream(arrow.OSFile(str(path)), "zstd")
    return io.BufferedReader(unpacked, _CHUNK_BYTES)


_OPEN: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.GzipFile,
    ".xz": lzma.LZMAFile,
    ".zst": _open_zstd,
}


def _skip(stream: BinaryIO, size: int, path: Path) -> None:
    if isinstance(stream, io.BufferedReader) and isinstance(stream.raw, io.FileIO):
        stream.seek(size)
        return
    while size:
        found = len(stream.read(min(size, _CHUNK_BYTES)))
        if not found:
            raise UsageError(
                f"{path}: it is shorter than when counting began; pass --force to count anew"
            )
        size -= found


def _lines(stream: BinaryIO, field: str, place: int) -> Iterator[tuple[str | None, int, str]]:
    # Only the field is decoded, whatever else a line holds.
    record = msgspec.defstruct("Line", [("text", str, msgspec.field(name=field))])
    decode = msgspec.json.Decoder(record).decode
    for line in stream:
        place += len(line)
        if not line.strip():
            continue
        try:
            yield decode(line).text, place, ""  # type: ignore[attr-defined]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            yield None, place, str(error)


def _rows(path: Path, field: str, place: int) -> Iterator[tuple[str | None, int, str]]:
    arrow = import_pyarrow()
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except arrow.ArrowException as error:
        raise UsageError(
            f"{path}: not a Parquet file that can be read ({error}); mend the file or leave it out"
        ) from error
    names = file.schema_arrow.names
    if field not in names:
        raise UsageError(
            f"{path}: a column {field!r} was expected, found {', '.join(names)}; name one with "
            "--field"
        )
    with file:
        sizes = [file.metadata.row_group(g).num_rows for g in range(file.num_row_groups)]
        row = 0
        for group, size in enumerate(sizes):
            if row + size <= place:
                row += size
                continue
            for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=[field]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    if row <= place:
                        continue
                    good = isinstance(text, str)
                    yield text if good else None, row, "" if good else "a text was expected"


def _paragraphs(stream: BinaryIO, place: int) -> Iterator[tuple[str | None, int, str]]:
    # Where a document ends depends on what follows its beginning only, not on how much is read at
    # once, so that counting taken up again finds the same documents.
    held, ended = b"", False
    while held or not ended:
        while len(held) < _LONGEST_BYTES and not ended:
            chunk = stream.read(_CHUNK_BYTES)
            held, ended = held + chunk, not chunk
        start = 0
        while start < len(held) and (ended or len(held) - start >= _LONGEST_BYTES):
            end = _document_end(held, start)
            data = held[start:end]
            place += end - start
            start = end
            try:
                yield data.decode("utf-8"), place, ""
            except UnicodeDecodeError as error:
                yield None, place, f"UTF-8 was expected ({error})"
        held = held[start:]


def _document_end(held: bytes, start: int) -> int:
    """End of the document that begins at `start`; what follows is the file's rest, or enough."""
    least, limit = start + TEXT_BYTES, start + _LONGEST_BYTES
    found = _BLANK_LINE.search(held, least, limit)
    if found:
        return found.end()
    if len(held) < limit:
        return len(held)
    for mark in (b"\n", b" "):
        if (at := held.rfind(mark, least, limit)) >= 0:
            return at + 1
    end = limit
    while end > least and held[end - 1] & 0xC0 == 0x80:  # the last character may be cut in two
        end -= 1
    return end - 1 if held[end - 1] >= 0xC0 else limit
