"""Rows of embeddings in prompts: what stands in the place of a token's looked-up row.

A backbone that was exported for them has two more inputs:

    embeddings      [given, E], float: rows
    embedding_rows  [batch, sequence], int64: below 0, the token of `input_ids` is looked up; else
                    the row of `embeddings` that is read in its place

Between a prompt and a runner such a row is an id below 0, of its own for as long as anything holds
it: so prompts stay lists of ids, and a cache is taken over only from the very same rows.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.errors import UsageError
from headport.manifest import Graph, Manifest

__all__ = [
    "EMBEDDINGS",
    "EMBEDDING_ROWS",
    "GivenRows",
    "PromptIds",
    "embedding_size",
    "open_given_rows",
    "refuse_embeddings",
]

EMBEDDINGS = "embeddings"
EMBEDDING_ROWS = "embedding_rows"
_TYPES = {"float": np.float32, "float16": np.float16}

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]


class _Block:
    """Rows that were given together, [n, E]; row r has the id `first` - r."""

    def __init__(self, rows: Array, first: int) -> None:
        self.rows = rows
        self.first = first


class PromptIds(list[int]):
    """Ids of a prompt, and what keeps its rows: they are known for as long as this list."""

    blocks: Sequence[object] = ()


class GivenRows:
    """The rows that prompts hold at the moment. Any thread may add some.

    Args:
        size: E, numbers of a row.
        dtype: Of the backbone's input.
    """

    def __init__(self, size: int, dtype: npt.DTypeLike) -> None:
        self.size = size
        self._dtype = np.dtype(dtype)
        self._next = -1
        self._blocks: weakref.WeakValueDictionary[int, _Block] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def holds(self, rows: Array) -> bool:
        """Whether rows are finite in the backbone's type."""
        with np.errstate(over="ignore"):
            return bool(np.isfinite(rows.astype(self._dtype)).all())

    def add(self, rows: Array) -> PromptIds:
        """Ids of rows [n, E]; they are known for as long as the list is kept."""
        with self._lock:
            block = _Block(rows.astype(self._dtype), self._next)
            found = PromptIds(range(self._next, self._next - len(rows), -1))
            found.blocks = (block,)
            self._next -= len(rows)
            self._blocks.update(dict.fromkeys(found, block))
        return found

    def feeds(self, token_ids: Int64) -> dict[str, Array]:
        """What the backbone reads for ids [B, T]: `input_ids` and the two inputs beside it."""
        given = token_ids < 0
        rows = np.full(token_ids.shape, -1, np.int64)
        rows[given] = np.arange(given.sum())
        values = np.zeros((max(1, int(given.sum())), self.size), self._dtype)
        with self._lock:
            for n, token_id in enumerate(token_ids[given].tolist()):
                block = self._blocks[token_id]
                values[n] = block.rows[block.first - token_id]
        return {
            "input_ids": np.where(given, 0, token_ids),
            EMBEDDING_ROWS: rows,
            EMBEDDINGS: values,
        }


def open_given_rows(backbone: Graph) -> GivenRows | None:
    """What keeps the rows of a backbone's prompts; None where it reads tokens alone."""
    for port in backbone.inputs:
        if port.name == EMBEDDINGS:
            return GivenRows(int(port.shape[1]), _TYPES[port.dtype])
    return None


def embedding_size(manifest: Manifest) -> int | None:
    """E, numbers of a row that a prompt may hold; None where prompts are tokens alone."""
    found = open_given_rows(manifest.backbone) if _has_backbone(manifest) else None
    return None if found is None else found.size


def _has_backbone(manifest: Manifest) -> bool:
    return any(graph.role == "backbone" for graph in manifest.graphs.values())


def refuse_embeddings(bundle: Bundle, what: str, instead: str) -> None:
    """Refuse a bundle whose prompts may hold rows of embeddings, where nothing feeds them.

    Args:
        bundle: The bundle.
        what: What was asked for, in words.
        instead: What to do.

    Raises:
        UsageError: If it is one.
    """
    if embedding_size(bundle.manifest) is not None:
        raise UsageError(
            f"{bundle.path} was exported with --inputs-embeds, so its backbone has inputs more, "
            f"{what} was asked for, where nothing feeds them; {instead}"
        )
