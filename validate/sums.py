"""Figures of positions, added up per document as they come: memory does not grow with the text.

What is kept of a position are the few numbers that percentiles need, 21 bytes; logits and all
other figures are gone once they are added to their document's row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headport.metrics import TOP_K, RowScores

__all__ = ["CELLS", "COLUMNS", "DocumentSums", "Part", "Positions"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

# column → its value per position [N]; each is weighted and summed over a document's positions
COLUMNS: dict[str, Callable[[RowScores], Float64]] = {
    "nll_reference": lambda s: s.nll_reference,
    "nll_candidate": lambda s: s.nll_candidate,
    "kl": lambda s: s.kl,
    "kl_reverse": lambda s: s.kl_reverse,
    "total_variation": lambda s: s.total_variation,
    "delta_p": lambda s: s.delta_p,
    "delta_p_squared": lambda s: s.delta_p**2,
    "rank": lambda s: s.rank,
}
for _index, _k in enumerate(TOP_K):
    COLUMNS |= {
        f"top{_k}": lambda s, i=_index: s.agreement[:, i],  # type: ignore[misc]
        f"top{_k}_tie_adjusted": lambda s, i=_index: s.agreement_tie_adjusted[:, i],  # type: ignore[misc]
        f"order{_k}": lambda s, i=_index: s.order[:, i],  # type: ignore[misc]
        f"order{_k}_tie_adjusted": lambda s, i=_index: s.order_tie_adjusted[:, i],  # type: ignore[misc]
    }

# Positions are told apart by two marks, hence four cells; a slice of positions is a set of cells.
CELLS = {"early": (2, 3), "late": (0, 1), "rare": (1, 3), "common": (0, 2)}
_CELL_COUNT = 4
_BYTES, _WEIGHT = len(COLUMNS), len(COLUMNS) + 1


@dataclass(frozen=True)
class Positions:
    """What the scored positions of one block are, besides their figures."""

    document: int  # row of the document in the sums
    weight: float  # of the document
    bytes: Int64  # [N], UTF-8 bytes of each scored token
    early: Bool  # [N]
    rare: Bool  # [N]
    near_tie_bound: Float64  # [N], logits


class DocumentSums:
    """Weighted sums per document and cell, and the columns that percentiles are taken of."""

    def __init__(self, documents: int, positions: int) -> None:
        """Room for so many documents and scored positions."""
        self._sums = np.zeros((_CELL_COUNT, documents, len(COLUMNS) + 2))
        self._counts = np.zeros((_CELL_COUNT, documents), np.int64)
        self._kept = {
            name: np.empty(positions, np.float32)
            for name in ("kl", "delta_p", "max_abs_error", "near_tie_bound")
        }
        self._document = np.empty(positions, np.int32)
        self._cell = np.empty(positions, np.uint8)
        self._used = 0

    def add(self, scores: RowScores, at: Positions) -> None:
        """Add the positions of one block."""
        if not len(scores):
            return
        values = np.stack([column(scores) for column in COLUMNS.values()], axis=1)
        ones = np.ones((len(scores), 1))
        rows = np.concatenate([values, at.bytes[:, None], ones], axis=1) * at.weight
        cell = (2 * at.early + at.rare).astype(np.uint8)
        for index in np.unique(cell):
            inside = cell == index
            self._sums[index, at.document] += rows[inside].sum(axis=0)
            self._counts[index, at.document] += np.count_nonzero(inside)
        place = slice(self._used, self._used + len(scores))
        kept = {
            "kl": scores.kl,
            "delta_p": scores.delta_p,
            "max_abs_error": scores.max_abs_error,
            "near_tie_bound": at.near_tie_bound,
        }
        for name, column in kept.items():
            self._kept[name][place] = column
        self._document[place] = at.document
        self._cell[place] = cell
        self._used += len(scores)

    def part(self, documents: slice | None = None, cells: Sequence[int] | None = None) -> Part:
        """The sums of some documents (default: all) and some cells (default: all)."""
        rows = slice(None) if documents is None else documents
        chosen = range(_CELL_COUNT) if cells is None else cells
        used = slice(0, self._used)
        low, high, _ = rows.indices(self._sums.shape[1])
        inside = (self._document[used] >= low) & (self._document[used] < high)
        if cells is not None:
            inside &= np.isin(self._cell[used], list(cells))
        whole = bool(inside.all())
        return Part(
            sums=np.sum([self._sums[cell, rows] for cell in chosen], axis=0),
            counts=np.sum([self._counts[cell, rows] for cell in chosen], axis=0),
            kept={n: c[used] if whole else c[used][inside] for n, c in self._kept.items()},
        )


@dataclass(frozen=True)
class Part:
    """Sums of the documents [D] of one slice."""

    sums: Float64  # [D, columns, bytes, weight], weighted
    counts: Int64  # [D], positions
    kept: dict[str, Float32]  # [N] each

    @property
    def tokens(self) -> int:
        """Positions."""
        return int(self.counts.sum())

    @property
    def weights(self) -> Float64:
        """Weighted positions of each document, [D]."""
        return self.sums[:, _WEIGHT]

    @property
    def bytes(self) -> Float64:
        """Weighted UTF-8 bytes of each document, [D]."""
        return self.sums[:, _BYTES]

    def column(self, name: str) -> Float64:
        """Weighted sums of one column, [D]."""
        return self.sums[:, _PLACES[name]]


_PLACES = {name: place for place, name in enumerate(COLUMNS)}
