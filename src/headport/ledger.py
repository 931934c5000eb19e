"""Reading the tensor ledger: where a bundle's tensors lie, and their values as NumPy arrays.

Independent of any ONNX library, so that a check built on it does not share the code that wrote
the graphs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.errors import BundleError
from headport.manifest import Head, Manifest, Tensor

__all__ = ["find_tensor", "head_weight", "read_rows", "read_tensor"]

Array = npt.NDArray[Any]

_DTYPES: dict[str, type[np.generic]] = {
    "float": np.float32,
    "float16": np.float16,
    "double": np.float64,
    "int64": np.int64,
    "int32": np.int32,
    "int8": np.int8,
    "uint8": np.uint8,
    "bool": np.bool_,
    "bfloat16": np.uint16,  # NumPy has no such type; widened to float32 below
    "float8e4m3fn": np.uint8,  # likewise
}
_HALF_BYTES = {"int4": 8, "uint4": 0}  # two to a byte, the first low → where negatives begin


def find_tensor(manifest: Manifest, graph: str, initializer: str) -> Tensor:
    """The ledger entry that a graph reads under this name.

    Raises:
        BundleError: If there is none.
    """
    consumer = f"{graph}:{initializer}"
    for tensor in manifest.tensors:
        if consumer in tensor.consumers:
            return tensor
    raise BundleError(f"the tensor ledger has no entry for {consumer}")


def head_weight(manifest: Manifest, head: Head) -> tuple[Tensor, str]:
    """A head's weight in the ledger, and its name inside the head's graph.

    The two names differ for a tied weight, which two graphs read.

    Raises:
        BundleError: If the ledger does not hold the weight, or the head's graph does not read it.
    """
    prefix = f"{head.graph}:"
    for tensor in manifest.tensors:
        names = [c.removeprefix(prefix) for c in tensor.consumers if c.startswith(prefix)]
        if tensor.name == head.weight and names:
            return tensor, names[0]
    raise BundleError(f"the tensor ledger has no weight {head.weight!r} that {head.graph} reads")


def read_tensor(bundle: Bundle, tensor: Tensor) -> Array:
    """A tensor's values, mapped read-only from its file.

    bfloat16 and float8 are widened to float32, 4-bit integers to int8.

    Raises:
        BundleError: If its element type is unknown here or its length does not fit its shape.
    """
    if tensor.dtype in _HALF_BYTES:
        packed = _map_halves(bundle, tensor, (tensor.length,))
        count = int(np.prod(tensor.shape, dtype=np.int64))
        return _halves(packed, tensor.dtype)[:count].reshape(tensor.shape)
    return _widened(_map(bundle, tensor), tensor.dtype)


def read_rows(bundle: Bundle, tensor: Tensor, rows: Array) -> Array:
    """As `read_tensor(bundle, tensor)[rows]`, reading and widening nothing but these rows.

    Args:
        bundle: Holds the tensor.
        tensor: Ledger entry.
        rows: Places along its first axis, int [n].
    """
    width = int(np.prod(tensor.shape[1:], dtype=np.int64))
    if tensor.dtype not in _HALF_BYTES:
        return _widened(np.array(_map(bundle, tensor)[rows]), tensor.dtype)
    if width % 2:  # a row may begin inside a byte
        return read_tensor(bundle, tensor)[rows]
    packed = _map_halves(bundle, tensor, (tensor.shape[0], width // 2))[rows]
    return _halves(packed, tensor.dtype).reshape(len(rows), *tensor.shape[1:])


def _map(bundle: Bundle, tensor: Tensor) -> Array:
    if tensor.dtype not in _DTYPES:
        raise BundleError(f"{tensor.name}: element type {tensor.dtype} cannot be read")
    dtype = np.dtype(_DTYPES[tensor.dtype])
    size = dtype.itemsize * int(np.prod(tensor.shape, dtype=np.int64))
    if size != tensor.length:
        raise BundleError(
            f"{tensor.name}: {size} bytes expected for {tensor.dtype} {list(tensor.shape)}, "
            f"{tensor.length} found in the ledger"
        )
    file = bundle.file(tensor.file)
    return np.memmap(file, dtype, "r", tensor.offset, tensor.shape)


def _widened(array: Array, dtype: str) -> Array:
    if dtype == "float8e4m3fn":
        return _E4M3[array]
    if dtype != "bfloat16":
        return array
    return (array.astype(np.uint32) << 16).view(np.float32)


def _map_halves(bundle: Bundle, tensor: Tensor, shape: tuple[int, ...]) -> Array:
    count = int(np.prod(tensor.shape, dtype=np.int64))
    if tensor.length != -(-count // 2):
        raise BundleError(
            f"{tensor.name}: {-(-count // 2)} bytes expected for {tensor.dtype} "
            f"{list(tensor.shape)}, {tensor.length} found in the ledger"
        )
    return np.memmap(bundle.file(tensor.file), np.uint8, "r", tensor.offset, shape)


def _halves(packed: Array, dtype: str) -> Array:
    """4-bit integers of bytes as int8, in one row."""
    values = np.empty((packed.size, 2), np.int8)
    flat = packed.reshape(-1)
    values[:, 0], values[:, 1] = flat & 15, flat >> 4
    found: Array = values.reshape(-1)
    if (sign := _HALF_BYTES[dtype]) > 0:
        found = np.where(found >= sign, found - 16, found).astype(np.int8)
    return found


def _e4m3_values() -> Array:
    # 1 sign bit, 4 exponent bits of bias 7, 3 fraction bits; all ones is NaN.
    codes = np.arange(256)
    exponent, fraction = (codes >> 3) & 15, codes & 7
    size = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * np.exp2(exponent - 10.0))
    size = np.where(codes & 127 == 127, np.nan, size)
    return np.where(codes & 128, -size, size).astype(np.float32)


_E4M3 = _e4m3_values()
