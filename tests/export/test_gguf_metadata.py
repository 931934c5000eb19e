"""One field is read out of GGUF metadata written by hand."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from headport.errors import CheckpointError
from headport.export.gguf_metadata import read_text_field


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


FIELDS = [
    text("general.alignment") + struct.pack("<II", 4, 32),
    text("flag") + struct.pack("<IB", 7, 1),
    text("numbers") + struct.pack("<IIQ3h", 9, 3, 3, 1, 2, 3),
    text("names") + struct.pack("<IIQ", 9, 8, 2) + text("general.license") + text("b"),
    text("general.license") + struct.pack("<I", 8) + text("apache-2.0"),
]


def write(folder: Path, fields: list[bytes], count: int | None = None) -> Path:
    file = folder / "tiny.gguf"
    header = struct.pack("<IQQ", 3, 0, len(fields) if count is None else count)
    file.write_bytes(b"GGUF" + header + b"".join(fields))
    return file


def test_the_field_is_found_behind_all_kinds(tmp_path: Path) -> None:
    assert read_text_field(write(tmp_path, FIELDS), "general.license") == "apache-2.0"


@pytest.mark.parametrize("key", ["nothing", "general.alignment", "names"])
def test_absent_or_not_a_text(tmp_path: Path, key: str) -> None:
    assert read_text_field(write(tmp_path, FIELDS), key) is None


def test_not_gguf(tmp_path: Path) -> None:
    file = tmp_path / "other.gguf"
    file.write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        read_text_field(file, "general.license")


@pytest.mark.parametrize(
    "fields", [[], [text("cut") + b"\x04"], [text("odd") + struct.pack("<I", 99)]]
)
def test_damaged(tmp_path: Path, fields: list[bytes]) -> None:
    with pytest.raises(CheckpointError, match="damaged GGUF"):
        read_text_field(write(tmp_path, fields, count=9), "general.license")
