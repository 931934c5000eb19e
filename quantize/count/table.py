"""`counts.parquet`: how often each token id occurs in a corpus, and what was counted how.

Columns `token_id` int32 and `count` int64, one row per id that occurs, ascending. The schema's
metadata holds, under the key `headport`, the JSON of a `CountsRecord`.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from headport.errors import OutputError, UsageError

__all__ = [
    "SCHEMA_VERSION",
    "CountedFile",
    "CountsRecord",
    "Deduplication",
    "HeldOut",
    "TokenCounts",
    "import_pyarrow",
    "read_counts",
    "write_counts",
]

Int64 = npt.NDArray[np.int64]

SCHEMA_VERSION = 1
_KEY = b"headport"


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what the metadata says."""


class CountedFile(_Record, frozen=True):
    """One file of the corpus, as it was found."""

    name: str
    bytes: int  # on disk, as compressed as it is
    documents: int


class HeldOut(_Record, frozen=True):
    """Documents that were not counted, so that a cut can be judged by text it has not seen."""

    share: float  # of the documents, asked for
    rule: str  # which documents those are, in words
    documents: int
    tokens: int
    unseen_tokens: int  # whose id does not occur in the counted part
    unseen_ids: int


class Deduplication(_Record, frozen=True):
    """Documents that were left out because an earlier one is nearly the same."""

    method: str  # in words, with its error
    documents: int  # left out
    wrong_share: float  # of new documents that the full filter takes for old ones, at the end


class CountsRecord(_Record, frozen=True):
    """What a table of counts says about itself."""

    schema_version: int
    tokenizer_sha256: str  # of the bytes of tokenizer.json
    vocab_size: int  # ids are below it
    documents: int  # counted
    tokens: int  # the sum of all counts
    bytes: int  # UTF-8 bytes of the counted documents
    files: tuple[CountedFile, ...]
    method: Literal["units", "plain"]  # each distinct unit of text encoded once, or every document
    method_reason: str  # why the two are the same here, or why units could not be counted
    held_out: HeldOut | None
    deduplication: Deduplication | None
    skipped_documents: int  # damaged ones, where the caller allowed that


@dataclass(frozen=True)
class TokenCounts:
    """A table of counts in memory."""

    counts: Int64  # [vocab_size]
    record: CountsRecord


def import_pyarrow() -> Any:
    """The pyarrow package.

    Raises:
        UsageError: If it is not installed.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise UsageError(
            "Parquet and Zstandard files need pyarrow, which is not installed; "
            "pip install 'headport[prune]'"
        ) from error
    return pyarrow


def write_counts(path: Path, found: TokenCounts, *, force: bool) -> None:
    """Write a table of counts, complete or not at all.

    Raises:
        OutputError: If `path` exists and `force` is False, or cannot be written.
        UsageError: If pyarrow is not installed.
    """
    arrow = import_pyarrow()
    from pyarrow import parquet

    if path.exists() and not force:
        raise OutputError(f"{path} exists; choose another output or pass --force")
    ids = np.flatnonzero(found.counts)
    metadata = {_KEY: msgspec.json.encode(found.record)}
    schema = arrow.schema(
        [
            arrow.field("token_id", arrow.int32(), nullable=False),
            arrow.field("count", arrow.int64(), nullable=False),
        ],
        metadata,
    )
    table = arrow.Table.from_arrays(
        [arrow.array(ids.astype(np.int32)), arrow.array(found.counts[ids])], schema=schema
    )
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, part)
        part.replace(path)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def read_counts(path: Path) -> TokenCounts:
    """Read a table of counts and check it against its own record.

    Raises:
        UsageError: If the file is missing, no Parquet, not a table of counts, of another schema
            version, or its rows contradict its record; or if pyarrow is not installed.
    """
    arrow = import_pyarrow()
    from pyarrow import parquet

    if not path.is_file():
        raise UsageError(f"{path}: a table that `headport count` wrote was expected, none is there")
    try:
        table = parquet.read_table(path)
    except (OSError, arrow.ArrowException) as error:
        raise UsageError(
            f"{path}: not a Parquet file that can be read ({error}); count again"
        ) from error
    metadata = (table.schema.metadata or {}).get(_KEY)
    names = table.schema.names
    if metadata is None or not {"token_id", "count"} <= set(names):
        raise UsageError(
            f"{path}: columns token_id and count and a record under the key 'headport' were "
            f"expected, columns {', '.join(names)} found; make it with `headport count`"
        )
    record = _decode_record(metadata, path)
    ids = table["token_id"].to_numpy().astype(np.int64)
    values = table["count"].to_numpy().astype(np.int64)
    _check_rows(ids, values, record, path)
    counts = np.zeros(record.vocab_size, np.int64)
    counts[ids] = values
    return TokenCounts(counts, record)


def _decode_record(metadata: bytes, path: Path) -> CountsRecord:
    try:
        record = msgspec.json.decode(metadata, type=CountsRecord)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"{path}: its record is not one of this release ({error}); count again"
        ) from error
    if record.schema_version != SCHEMA_VERSION:
        raise UsageError(
            f"{path}: schema version {SCHEMA_VERSION} expected, {record.schema_version} found; "
            "count again"
        )
    return record


def _check_rows(ids: Int64, values: Int64, record: CountsRecord, path: Path) -> None:
    outside = ids[(ids < 0) | (ids >= record.vocab_size)]
    if len(outside):
        raise UsageError(
            f"{path}: ids below {record.vocab_size} expected, {outside[:10].tolist()} found"
        )
    if len(np.unique(ids)) != len(ids) or (values < 1).any():
        raise UsageError(f"{path}: one row with a count of 1 or more per id expected")
    if int(values.sum()) != record.tokens:
        raise UsageError(
            f"{path}: {record.tokens} tokens expected by its record, the rows add up to "
            f"{int(values.sum())}"
        )
