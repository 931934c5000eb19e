"""The check after quantising a backbone: each matrix as it runs against the one it was made from.

Ŵ is computed again from the original weight in the source's tensor ledger, with the scales of the
written one, which must be those that the weights allow: of INT8 the largest magnitude over 127, of
INT4 one that loses no more than the plain scale −m / 8 of the largest weight m. None of it shares
code with what stored the matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.errors import ParityError
from headport.ledger import find_tensor, read_tensor
from headport.lowering.matrices import Matrix, Table
from headport.lowering.product_check import ExpectedProduct, ProductCheck, check_products
from headport.lowering.product_runs import run_lookup
from headport.manifest import StoredMatrix

__all__ = ["LookupCheck", "check_backbone", "check_lookups"]

Float64 = npt.NDArray[np.float64]

_SMALLEST = 2.0**-149  # of float32
_UNIT_ROUNDOFF = 2.0**-24
_IDS = 4096  # looked up at a time
_INTEGERS = {"int8": (-127, 127), "int4": (-8, 7)}  # smallest and largest
# Of a block's largest magnitude: how exactly weights are measured to find an INT4 scale.
_MEASURED = 2.0**-18


@dataclass(frozen=True)
class LookupCheck:
    """How far the rows of the written embedding are from the float64 reference."""

    rows: int
    largest_share_of_bound: float  # |Δ| / float32's rounding of one multiplication; ≤ 1

    def __bool__(self) -> bool:
        return self.rows > 0 and self.largest_share_of_bound <= 1


def check_backbone(
    source: Bundle,
    written: Bundle,
    graph: str,
    matrices: Iterable[Matrix],
    plan: Mapping[str, StoredMatrix],
) -> ProductCheck | None:
    """Compare every product with a stored matrix with x Ŵᵀ in float64; None if there are none.

    Args:
        source: The bundle before.
        written: The bundle after, as it lies on disk.
        graph: Name of the backbone's graph.
        matrices: Those of the source's backbone.
        plan: How each was to be stored.

    Raises:
        ParityError: If a product differs by more than float32 explains, or a scale is impossible.
    """
    expected = {}
    for matrix in matrices:
        how = plan.get(matrix.name)
        if how is not None:
            original = _Original(source, graph, matrix.value.name or "", matrix.rows_first)
            scale = _scale(written, graph, matrix.name, original, how)
            expected[matrix.name] = ExpectedProduct(
                size=matrix.shape,
                weight=_Restored(original, how, scale),
                block=how.block or matrix.shape[1],
                activations="exact",
                count=len(matrix.products),
            )
    return check_products(written, expected) if expected else None


def check_lookups(
    source: Bundle,
    written: Bundle,
    graph: str,
    tables: Iterable[Table],
    plan: Mapping[str, StoredMatrix],
) -> LookupCheck | None:
    """Look up every row of the stored tables and compare it with Ŵ; None if there are none.

    Raises:
        ParityError: If a row differs by more than one rounding to float32.
    """
    rows, share = 0, 0.0
    for table in tables:
        how = plan.get(table.name)
        if how is None:
            continue
        original = _Original(source, graph, table.value.name or "", True)
        restored = _Restored(original, how, _scale(written, graph, table.name, original, how))
        V = original.size[0]
        chunks = [np.arange(start, min(start + _IDS, V)) for start in range(0, V, _IDS)]
        for ids, found in zip(chunks, run_lookup(written, table.name, chunks), strict=True):
            start = int(ids[0])
            expected = restored(slice(start, start + len(ids)))
            share = max(share, _lookup_ratio(found, expected, table.name, start))
            rows += len(ids)
    return LookupCheck(rows, share) if rows else None


def _lookup_ratio(found: Float64, expected: Float64, name: str, start: int) -> float:
    if found.shape != expected.shape:
        raise ParityError(f"{name}: rows of shape {found.shape}, {expected.shape} expected")
    bound = _UNIT_ROUNDOFF * np.abs(expected) + _SMALLEST
    difference = np.abs(found - expected)
    ratio = np.where(np.isfinite(difference), difference / bound, np.inf)
    if not ratio.max() <= 1:
        row = int(ratio.max(axis=1).argmax())
        raise ParityError(
            f"the written embedding {name} does not give its rows as stored, first of all row "
            f"{start + row} (|Δ| {difference[row].max():.3g}); nothing was written"
        )
    return float(ratio.max())


class _Original:
    """A weight of the source, read outputs first."""

    def __init__(self, source: Bundle, graph: str, initializer: str, rows_first: bool) -> None:
        self._array = read_tensor(source, find_tensor(source.manifest, graph, initializer))
        self._rows_first = rows_first
        shape = self._array.shape
        self.size: tuple[int, int] = (shape[0], shape[1]) if rows_first else (shape[1], shape[0])

    def rows(self, rows: slice) -> npt.NDArray[np.float32]:
        part = self._array[rows] if self._rows_first else self._array[:, rows].T
        found: npt.NDArray[np.float32] = np.asarray(part, np.float32)
        return found


@dataclass(frozen=True)
class _Restored:
    """Rows of Ŵ: the original's, to the nearest multiple of the written scale."""

    original: _Original
    how: StoredMatrix
    scale: npt.NDArray[np.float32] | None

    def __call__(self, rows: slice) -> Float64:
        weight = self.original.rows(rows)
        if self.scale is None:
            return weight.astype(np.float16).astype(np.float64)
        assert self.how.block is not None
        low, high = _INTEGERS[self.how.format]
        step = np.repeat(self.scale[rows], self.how.block, axis=1)[:, : weight.shape[1]]
        whole = np.clip(np.rint(weight / step), low, high)
        restored: Float64 = whole.astype(np.float64) * step.astype(np.float64)
        return restored


def _scale(
    written: Bundle, graph: str, name: str, original: _Original, how: StoredMatrix
) -> npt.NDArray[np.float32] | None:
    if how.block is None:
        return None
    stored: npt.NDArray[Any] = read_tensor(
        written, find_tensor(written.manifest, graph, f"{name}.scale")
    )
    N, K = original.size
    shape = (N, -(-K // how.block))
    if stored.shape != shape or stored.dtype != np.float32:
        raise ParityError(
            f"{name}: scales float32 {shape} expected for block {how.block}, "
            f"{stored.dtype} {stored.shape} found; nothing was written"
        )
    scale = np.asarray(stored)
    can_have = {"int8": _is_largest_over_127, "int4": _loses_no_more_than_plain}[how.format]
    for start in range(0, N, _IDS):
        rows = slice(start, min(start + _IDS, N))
        weight = original.rows(rows).astype(np.float64)
        blocks = np.pad(weight, ((0, 0), (0, shape[1] * how.block - K)))
        blocks = blocks.reshape(len(weight), shape[1], how.block)
        part = scale[rows].astype(np.float64)
        wrong = np.where(blocks.any(axis=2), ~can_have(blocks, part), part != 1)
        if wrong.any():
            row = start + int(wrong.any(axis=1).argmax())
            raise ParityError(
                f"{name}: a scale of output {row} is not one its weights can have; "
                "nothing was written"
            )
    return scale


def _is_largest_over_127(blocks: Float64, scale: Float64) -> npt.NDArray[np.bool_]:
    expected = np.abs(blocks).max(axis=2) / 127
    slack = 4 * _UNIT_ROUNDOFF * expected + 2 * _SMALLEST
    found: npt.NDArray[np.bool_] = np.abs(scale - expected) <= slack
    return found


def _loses_no_more_than_plain(blocks: Float64, scale: Float64) -> npt.NDArray[np.bool_]:
    """√Σ |w| (w − ŵ)² of both, of which a change of w by δ moves neither by more than √Σ |w| δ²."""
    first = np.abs(blocks).argmax(axis=2, keepdims=True)
    largest = np.take_along_axis(blocks, first, axis=2)[..., 0]
    size = np.abs(blocks).sum(axis=2)
    slack = 2 * np.sqrt(size) * (_MEASURED * np.abs(largest) + 16 * _SMALLEST)
    plain = np.where(largest == 0, 1, -largest / 8)
    found: npt.NDArray[np.bool_] = _lost(blocks, scale) <= _lost(blocks, plain) + slack
    return found


def _lost(blocks: Float64, scale: Float64) -> Float64:
    low, high = _INTEGERS["int4"]
    step = scale[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        lost = blocks - np.clip(np.rint(blocks / step), low, high) * step
    found: Float64 = np.sqrt((np.abs(blocks) * np.square(lost)).sum(axis=2))
    return found
