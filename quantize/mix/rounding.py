"""Matrices of a backbone as two formats would store them, and as float32 again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.errors import QuantizeError
from headport.lowering.matrices import Matrix
from headport.manifest import StoredMatrix
from headport.progress import track
from headport.quantize.backbone import checked_weight
from headport.quantize.backbone_plan import stored_text
from headport.quantize.formats import FORMATS, StoredWeight
from headport.quantize.spool import Spool

__all__ = ["Plan", "RoundedMatrices", "restored"]

Float32 = npt.NDArray[np.float32]
# weight's name → how it is stored; a matrix that is missing, or None, stays as it is
Plan = Mapping[str, StoredMatrix | None]


class RoundedMatrices:
    """Every matrix rounded once by each of two formats, kept on disk.

    Args:
        matrices: Of a float32 backbone.
        formats: Two formats; None for float32.
        folder: An empty folder for what is rounded.

    Raises:
        QuantizeError: If a weight is not float32, or a format cannot hold it.
    """

    def __init__(
        self, matrices: Iterable[Matrix], formats: Iterable[StoredMatrix | None], folder: Path
    ) -> None:
        self._matrices = {matrix.name: matrix for matrix in matrices}
        self.originals: dict[str, Float32] = {
            matrix.value.name or "": _float32(matrix) for matrix in self._matrices.values()
        }
        self._stored: dict[tuple[str, str], StoredWeight] = {}
        wanted = [how for how in formats if how is not None]
        spool = Spool(folder)
        for matrix in track(list(self._matrices.values()), "rounding the backbone", unit="matrix"):
            for how in wanted:
                weight = checked_weight(
                    matrix.value, matrix.name, how, rows_first=matrix.rows_first
                )
                stored = FORMATS[how.format].store(weight, how.block or 0)
                self._stored[matrix.name, stored_text(how)] = spool.keep(stored)

    @property
    def names(self) -> list[str]:
        """Of the matrices, in graph order."""
        return list(self._matrices)

    def nbytes(self, name: str, how: StoredMatrix | None) -> int:
        """Bytes of a matrix in a format, scales included."""
        if how is None:
            return self.originals[self._matrices[name].value.name or ""].nbytes
        return self._stored[name, stored_text(how)].nbytes

    def weights(self, plan: Plan) -> dict[str, Float32]:
        """All matrices as float32, laid out as the graph reads them, by initialiser."""
        found = dict(self.originals)
        for name, how in plan.items():
            if how is not None:
                matrix = self._matrices[name]
                weight = restored(self._stored[name, stored_text(how)], how)
                weight = weight if matrix.rows_first else np.ascontiguousarray(weight.T)
                found[matrix.value.name or ""] = weight
        return found


def restored(stored: StoredWeight, how: StoredMatrix) -> Float32:
    """Ŵ [N, K] as the written graph makes it: Q · S in float32, or the float16 numbers."""
    whole = np.asarray(next(iter(stored.tensors.values()))).astype(np.float32)
    if how.block is not None:
        scale = np.repeat(stored.tensors["scale"], how.block, axis=1)
        whole *= scale[:, : whole.shape[1]]
    return whole


def _float32(matrix: Matrix) -> Float32:
    assert matrix.value.const_value is not None
    array: npt.NDArray[Any] = matrix.value.const_value.numpy()
    if array.dtype != np.float32:
        raise QuantizeError(
            f"{matrix.name} is {array.dtype}, float32 was expected: what rounding costs is "
            "measured against a float32 bundle; export it with --dtype fp32"
        )
    return array
