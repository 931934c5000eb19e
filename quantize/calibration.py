"""Error-compensated rounding: what rounding one weight loses, the row's later weights make up for.

For a row w and hidden states X the loss is (w − ŵ) G (w − ŵ)ᵀ with G = XᵀX. Columns are rounded
one after the other; the error of each is spread over those to come so that this loss grows least
(Frantar et al. 2023, "GPTQ", arXiv:2210.17323, their algorithm 1, in the columns' own order):

    δ = (w_j − ŵ_j) / U_jj,   w_i ← w_i − δ U_ji for i > j,   G⁻¹ = Uᵀ U
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.errors import QuantizeError
from headport.quantize.formats import Rounder, round_to_nearest
from headport.quantize.grid import Grid, Rounded, dequantize

__all__ = ["Calibration", "calibrate", "calibration_record", "compensated_rounder", "loss_ratio"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Array = npt.NDArray[Any]

_DAMPING = 0.01  # of the mean of G's diagonal, added to it
_TILE = 64  # columns whose errors are spread among themselves before they reach the rest
_SAMPLED_ROWS = 2048


@dataclass(frozen=True)
class Calibration:
    """G = XᵀX of the hidden states [N, H] a text gives."""

    gram: Float64  # [H, H]
    positions: int  # N
    largest: float = 0.0  # max |x| over all of them


def calibrate(states: Iterable[Float32], hidden_size: int) -> Calibration:
    """Sum up G over parts of the hidden states, [n, H] each.

    Raises:
        QuantizeError: If there are fewer positions than channels: G would not tell the weights of
            a row apart; or if a state is not finite.
    """
    gram = np.zeros((hidden_size, hidden_size))
    positions, largest = 0, 0.0
    for part in states:
        wide = part.astype(np.float64)
        gram += wide.T @ wide
        positions += len(part)
        largest = max(largest, float(np.abs(part).max(initial=0.0)))
    if positions < hidden_size:
        raise QuantizeError(
            f"--calibration: text of at least {hidden_size} tokens was expected (the hidden size), "
            f"{positions} found; give more text"
        )
    if not np.isfinite(gram).all():
        raise QuantizeError("--calibration: the backbone gives hidden states that are not finite")
    return Calibration(gram, positions, largest)


def calibration_record(files: Iterable[Path]) -> list[dict[str, str]]:
    """Names and sha256 of the texts, for the provenance."""
    return [
        {"name": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        for file in files
    ]


def compensated_rounder(calibration: Calibration) -> Rounder:
    """A rounder that compensates errors for this calibration."""
    gram = calibration.gram
    damped = gram + np.eye(len(gram)) * (_DAMPING * float(np.mean(np.diag(gram))) or 1.0)
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T.astype(np.float32)

    def rounder(weight: Array, block: int, grid: Grid) -> Rounded:
        return _round(weight, block, grid, upper)

    return rounder


def _round(weight: Array, block: int, grid: Grid, upper: Float32) -> Rounded:
    V, H = weight.shape
    left = np.ascontiguousarray(weight.T, np.float32)  # what is still to be rounded, [H, V]
    whole = np.empty((H, V), np.int16)
    count = -(-H // block)
    scale, zero = np.empty((V, count), np.float32), np.empty((V, count), np.float32)
    for k in range(count):
        start, stop = k * block, min((k + 1) * block, H)
        # Fitted to what the columns have become, once for the whole block.
        scale[:, k], zero[:, k] = grid.fit(np.ascontiguousarray(left[start:stop].T))
        for first in range(start, stop, _TILE):
            end = min(first + _TILE, stop)
            errors = np.empty((end - first, V), np.float32)  # δ of each column
            for j in range(first, end):
                rounded = grid.round(left[j][:, None], scale[:, k], zero[:, k])
                lost = left[j] - grid.value(rounded, scale[:, k], zero[:, k])[:, 0]
                whole[j] = rounded[:, 0]
                errors[j - first] = lost / upper[j, j]
                left[j + 1 : end] -= upper[j, j + 1 : end, None] * errors[j - first]
            left[end:] -= upper[first:end, end:].T @ errors
    return Rounded(np.ascontiguousarray(whole.T), scale, zero.astype(np.int16))


def loss_ratio(weight: Array, block: int, grid: Grid, calibration: Calibration) -> float:
    """Loss of compensated rounding by that of nearest rounding, on a sample of the rows.

    Raises:
        QuantizeError: If it is not below 1: the text does not fit the model.
    """
    rows = weight[:: max(1, len(weight) // _SAMPLED_ROWS)].astype(np.float32)
    losses = [
        _loss(rows, dequantize(rounder(rows, block, grid), block), calibration.gram)
        for rounder in (compensated_rounder(calibration), round_to_nearest)
    ]
    ratio = losses[0] / losses[1] if losses[1] > 0 else 1.0
    if not ratio < 1:
        raise QuantizeError(
            "--calibration: compensated rounding loses no less than nearest rounding on its own "
            f"text (ratio {ratio:.3g}); give other text, or leave --calibration out"
        )
    return ratio


def _loss(exact: Float32, rounded: Float64, gram: Float64) -> float:
    error = exact.astype(np.float64) - rounded
    return float(np.einsum("vi,ij,vj->", error, gram, error, optimize=True))
