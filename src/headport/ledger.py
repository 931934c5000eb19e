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

__all__ = ["find_tensor", "head_weight", "read_tensor"]

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
}


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
    """A tensor's values, mapped read-only from its file; bfloat16 is widened to float32.

    Raises:
        BundleError: If its element type is unknown here or its length does not fit its shape.
    """
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
    array: Array = np.memmap(file, dtype, "r", tensor.offset, tensor.shape)
    if tensor.dtype != "bfloat16":
        return array
    return (array.astype(np.uint32) << 16).view(np.float32)
