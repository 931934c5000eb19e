"""What a certified head stores beside its weight, computed from both forms of the weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.certificate import Bound, block_norms, bound_matrix
from headport.errors import QuantizeError
from headport.progress import track
from headport.quantize.blocks import dequantize_blocks

__all__ = ["Certificate", "certificate_of", "equal_rows"]

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]

_CHUNK_ELEMENTS = 1 << 22
_LARGEST_ROW = 2.0**50  # so that no product with a hidden state below 2^60 overflows float32


@dataclass(frozen=True)
class Certificate:
    """Data of the bound, in the order of the weight's rows."""

    bounds: npt.NDArray[np.float32]  # [V, C + 1], see `headport.certificate.bound_matrix`
    largest_norm: float  # max ‖W_v‖, rounded up


def certificate_of(
    weight: Array,
    stored: Mapping[str, Array],
    bias: Array | None,
    *,
    block: int,
    activations: str,
    bound: Bound,
) -> Certificate:
    """Bound the error of a stored weight.

    Args:
        weight: W, shape [V, H].
        stored: `int8` [V, H] and `scale` [V, K].
        bias: b, shape [V], or None.
        block: Weights that share a scale.
        activations: What the lowered kernel does to hidden states.
        bound: `row` or `block`.

    Raises:
        QuantizeError: If a row or the bias is so large that float32 could overflow.
    """
    V, H = weight.shape
    scale = stored["scale"]
    errors, norms = np.empty(scale.shape), np.empty(scale.shape)
    largest = 0.0
    step = max(1, _CHUNK_ELEMENTS // H)
    for start in track(range(0, V, step), "bounding the head", unit="chunk"):
        rows = slice(start, min(start + step, V))
        original = weight[rows].astype(np.float64)
        rounded = dequantize_blocks(stored["int8"][rows], scale[rows], block)
        errors[rows] = block_norms(original - rounded, block)
        norms[rows] = block_norms(rounded, block)
        largest = max(largest, float(np.linalg.norm(original, axis=1).max()))
    # Norms of float64 sums are themselves rounded; 2^-40 is far more than H of them can lose.
    up = 1 + 2.0**-40
    b = None if bias is None else bias.astype(np.float64)
    _refuse_overflow(max(largest, float(np.abs(norms).max()), float(scale.max()) * 2**20), b)
    bounds = bound_matrix(
        errors * up,
        norms * up,
        scale,
        b,
        block=block,
        hidden_size=H,
        activations=activations,
        bound=bound,
    )
    return Certificate(bounds, largest * up)


def _refuse_overflow(largest: float, bias: Float64 | None) -> None:
    size = max(largest, 0.0 if bias is None else float(np.abs(bias).max()))
    if not size < _LARGEST_ROW:
        raise QuantizeError(
            f"--certify: rows and bias below 2^50 were expected, {size:.2g} found; "
            "such a head can be quantised, but not certified"
        )


def equal_rows(weight: Array, bias: Array | None) -> npt.NDArray[np.int64] | None:
    """Lowest id among the rows that are bit for bit equal, [V]; None if all rows differ.

    Equal rows have equal logits for every hidden state, which no bound on rounding can tell.
    """
    seen: dict[bytes, int] = {}
    first = np.arange(len(weight), dtype=np.int64)
    for row, values in enumerate(weight):
        content = values.tobytes() if bias is None else values.tobytes() + bias[row].tobytes()
        first[row] = seen.setdefault(blake2b(content, digest_size=20).digest(), row)
    return None if len(seen) == len(weight) else first
