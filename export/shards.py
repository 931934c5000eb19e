"""Where the tensors of safetensors files lie, and reading any rows of them, nothing else.

Format: 8 bytes little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}`,
then the bytes. Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from headport.errors import CheckpointError

__all__ = ["StoredTensor", "read_header"]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of one file."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes, from the start of the file

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows [start, stop) along the first axis, in memory of their own; all by default.

        Raises:
            CheckpointError: If the file has become shorter.
        """
        shape = list(self.shape)
        if shape:
            shape[0] = (shape[0] if stop is None else stop) - start
        row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        count = prod(shape) * self.dtype.itemsize
        found = np.fromfile(self.file, np.uint8, count, offset=self.offset + start * row_bytes)
        if len(found) != count:
            raise CheckpointError(f"{self.file.name}: {self.name} was cut off while it was read")
        return torch.from_numpy(found).view(self.dtype).reshape(shape)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Every tensor of a safetensors file, by name.

    Raises:
        CheckpointError: If it is no intact safetensors file, or has an element type that is not
            known here.
    """
    try:
        with safe_open(file, "pt"):  # checks the header: overlaps, holes, length of the file
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file.name}: not an intact safetensors file ({error})") from error
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    unknown = {entry["dtype"] for entry in header.values()} - _DTYPES.keys()
    if unknown:
        raise CheckpointError(
            f"{file.name}: element types {', '.join(sorted(unknown))} cannot be read; "
            f"known are {', '.join(_DTYPES)}"
        )
    return {
        name: StoredTensor(
            file=file,
            name=name,
            dtype=_DTYPES[entry["dtype"]],
            shape=tuple(entry["shape"]),
            offset=8 + length + entry["data_offsets"][0],
        )
        for name, entry in header.items()
    }
