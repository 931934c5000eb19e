"""What each format makes of a weight, from its definition, not shared with the code it checks.

`rounded_weight` starts from the original weight and rounds to nearest; `stored_weight` starts from
the written bytes and undoes the format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.errors import BundleError
from headport.ledger import find_tensor, head_weight, read_tensor
from headport.manifest import Head, Quantization

__all__ = ["rounded_weight", "stored_scale", "stored_weight"]

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]

# How many quarters of a step a 4-bit block's largest magnitude may be from 0.
_QUARTERS = range(26, 37)
_UNITS = 1 << 20  # of that magnitude, in which weights are measured to find the scale


def rounded_weight(
    weight: Array, quantization: Quantization, scale: Array | None = None
) -> Float64:
    """Ŵ of W, rounded to nearest.

    Args:
        weight: W [V, H].
        quantization: How.
        scale: As written, [V, K]. Where an INT4 block's is positive although its largest weight is,
            it was to be positive. None: none was.

    Returns:
        Ŵ [V, H].
    """
    blocks = _BY_BLOCK.get((quantization.format, quantization.symmetric))
    if blocks is None:
        return _FLOATS[quantization.format](weight)
    width = quantization.block or weight.shape[1]
    rounded = np.empty(weight.shape, np.float64)
    for k, start in enumerate(range(0, weight.shape[1], width)):
        part = weight[:, start : start + width].astype(np.float32)
        positive = np.zeros(len(part), bool) if scale is None else scale[:, k] > 0
        rounded[:, start : start + width] = blocks(part, positive[:, None])
    return rounded


def stored_scale(bundle: Bundle, head: Head, rows: slice) -> Array:
    """Scales of some rows, [n, K], from the tensor ledger.

    Raises:
        BundleError: If the ledger has none.
    """
    _, initializer = head_weight(bundle.manifest, head)
    stem = initializer.rsplit(".", 1)[0]
    found = read_tensor(bundle, find_tensor(bundle.manifest, head.graph, f"{stem}.scale"))[rows]
    return found.reshape(len(found), -1)


def stored_weight(bundle: Bundle, head: Head, rows: slice) -> Float64:
    """Ŵ of some rows, [n, H], from the tensor ledger.

    Raises:
        BundleError: If the ledger lacks a tensor of the format.
    """
    quantization = head.quantization
    assert quantization is not None
    entry, initializer = head_weight(bundle.manifest, head)
    whole = read_tensor(bundle, entry)[rows].astype(np.float64)
    stem = initializer.rsplit(".", 1)[0]

    def each(suffix: str) -> Float64:
        found = find_tensor(bundle.manifest, head.graph, f"{stem}.{suffix}")
        values = read_tensor(bundle, found)[rows].astype(np.float64)
        if values.ndim == 1:
            return values[:, None]
        if quantization.block is None:
            raise BundleError(f"{found.name}: one scale per row was expected")
        return np.repeat(values, quantization.block, axis=1)[:, : whole.shape[1]]

    if not quantization.symmetric:
        whole = whole - each("zero")
    return whole * each("scale")


def _int8(part: Array, positive: Array) -> Float64:
    del positive
    largest = np.max(np.abs(part), axis=1, keepdims=True)
    step = _step(largest, 127.0)
    whole = np.clip(np.rint(part / step), -127, 127)
    values: Float64 = whole.astype(np.float64) * step.astype(np.float64)
    return values


def _int4(part: Array, positive: Array) -> Float64:
    # The scale minimises Σ |w| (w − S q)² for the integers q that one of the quarters gives.
    place = np.argmax(np.abs(part), axis=1, keepdims=True)
    largest = np.take_along_axis(part, place, axis=1)
    unit = np.where(positive, np.abs(largest), -largest).astype(np.float64)
    unit = np.where(unit == 0, 1.0, unit)
    ratio = np.rint(part.astype(np.float64) / unit * _UNITS).astype(np.int64)
    most = np.zeros(len(part))
    scale = np.zeros(len(part))
    for quarters in _QUARTERS:
        whole = np.clip(np.rint(ratio * quarters / (4 * _UNITS)), -8, 7).astype(np.int64)
        along = (np.abs(ratio) * ratio * whole).sum(axis=1).astype(np.float64)
        square = np.maximum((np.abs(ratio) * whole * whole).sum(axis=1), 1).astype(np.float64)
        explained = along * along / square
        scale = np.where(explained > most, along / square, scale)
        most = np.maximum(most, explained)
    step = _normal((scale[:, None] / _UNITS * unit).astype(np.float32), np.abs(largest))
    whole_steps = np.clip(np.rint(part / step), -8, 7)
    return whole_steps.astype(np.float64) * step.astype(np.float64)


def _uint4(part: Array, positive: Array) -> Float64:
    del positive
    low = np.minimum(np.min(part, axis=1, keepdims=True), 0)
    span = np.maximum(np.max(part, axis=1, keepdims=True), 0) - low
    step = _step(span, 15.0)
    zero = np.clip(np.rint(-low / step), 0, 15)
    whole = np.clip(np.rint(part / step) + zero, 0, 15)
    values: Float64 = (whole - zero).astype(np.float64) * step.astype(np.float64)
    return values


def _step(size: Array, end: float) -> Array:
    return _normal(size / np.float32(end), size)


def _normal(step: Array, size: Array) -> Array:
    subnormal = np.abs(step) < np.float32(2.0**-126)
    away = np.where(np.signbit(step), np.float32(-np.inf), np.float32(np.inf))
    step = np.where(subnormal, np.nextafter(step, away), step)
    return np.where(size == 0, np.float32(1), step)


def _fp8(weight: Array) -> Float64:
    part = weight.astype(np.float32)
    largest = np.max(np.abs(part), axis=1, keepdims=True)
    step = np.where(
        largest == 0, np.float32(1), np.maximum(largest / np.float32(448), np.float32(2.0**-126))
    )
    return _to_e4m3((part / step).astype(np.float64)) * step.astype(np.float64)


def _to_e4m3(values: Float64) -> Float64:
    # Four exponent bits from 2^-6 to 2^8, three bits behind the point, multiples of 2^-9 below.
    _, exponent = np.frexp(np.abs(values))
    unit = np.ldexp(1.0, np.maximum(exponent - 1, -6) - 3)
    rounded: Float64 = np.clip(np.rint(values / unit) * unit, -448, 448)
    return rounded


def _fp16(weight: Array) -> Float64:
    return weight.astype(np.float32).astype(np.float16).astype(np.float64)


def _bf16(weight: Array) -> Float64:
    # The upper half of float32's bits, rounded half to even.
    bits = weight.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


_BY_BLOCK: dict[tuple[str, bool], Callable[[Array, Array], Float64]] = {
    ("int8", True): _int8,
    ("int8-row", True): _int8,
    ("int4", True): _int4,
    ("int4", False): _uint4,
}
_FLOATS: dict[str, Callable[[Array], Float64]] = {"fp16": _fp16, "bf16": _bf16, "fp8": _fp8}
