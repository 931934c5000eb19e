"""One text field out of a `.gguf` file, without reading the vocabulary that follows it.

Layout: magic "GGUF", uint32 version, uint64 tensors, uint64 fields, then per field a key, a uint32
type and a value; texts are a uint64 length and UTF-8 bytes, arrays a uint32 type, a uint64 count
and the values. Little-endian. Source: the GGUF specification of the ggml project.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from headport.errors import CheckpointError

__all__ = ["read_text_field"]

_MAGIC = b"GGUF"
_TEXT, _ARRAY = 8, 9
# type → bytes of a scalar: uint8, int8, uint16, int16, uint32, int32, float32, bool, then 64 bits
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def read_text_field(file: Path, key: str) -> str | None:
    """The text of a metadata field, or None if the file has no such text field.

    Raises:
        CheckpointError: If the file is not GGUF or ends too early.
    """
    try:
        with file.open("rb") as stream:
            if stream.read(4) != _MAGIC:
                raise CheckpointError(f"{file.name}: not a GGUF file")
            _, _, fields = struct.unpack("<IQQ", stream.read(20))
            for _ in range(fields):
                name = _text(stream)
                (kind,) = struct.unpack("<I", stream.read(4))
                if name == key:
                    return _text(stream) if kind == _TEXT else None
                _skip(stream, kind)
    except (struct.error, KeyError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file.name}: damaged GGUF metadata") from error
    return None


def _text(stream: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", stream.read(8))
    return stream.read(length).decode("utf-8")


def _skip(stream: BinaryIO, kind: int) -> None:
    if kind == _TEXT:
        (length,) = struct.unpack("<Q", stream.read(8))
        stream.seek(length, 1)
    elif kind == _ARRAY:
        inner, count = struct.unpack("<IQ", stream.read(12))
        if inner in _SIZES:
            stream.seek(_SIZES[inner] * count, 1)
        else:
            for _ in range(count):
                _skip(stream, inner)
    else:
        stream.seek(_SIZES[kind], 1)
