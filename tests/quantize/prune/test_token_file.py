"""Files that name tokens, and all their faults at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from headport.errors import UsageError
from headport.quantize.prune.token_file import read_token_file
from headport.quantize.prune.tokens import TokenTable
from tests.quantize.prune.tokenizers_of import byte_level

TABLE = TokenTable.parse(byte_level().to_str().encode())
SIZE = max(TABLE.pieces) + 1


def _read(tmp_path: Path, text: str) -> set[int]:
    file = tmp_path / "tokens.txt"
    file.write_text(text, encoding="utf-8")
    return read_token_file(file, TABLE, SIZE, "--keep")


def test_spellings_ids_and_texts(tmp_path: Path) -> None:
    heart = TABLE.vocabulary["Ġheart"]
    found = _read(tmp_path, "Ġheart\r\n\n<|stop|>\nid:7\ntext: heart blood\n")
    blood = set(TABLE.encode(" heart blood"))
    assert found == {heart, TABLE.inner.token_to_id("<|stop|>"), 7} | blood


def test_all_faults_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        _read(tmp_path, f"Ġheart\nĠnosuch\nid:{SIZE}\nid:-1\nid:x\nnor this\n")
    message = str(caught.value)
    for part in (
        "line 2: no token 'Ġnosuch'",
        f"line 3: ids from 0 to {SIZE - 1} expected, {SIZE} found",
        "line 4: ids from 0",
        "line 5: no token 'id:x'",
        "line 6: no token 'nor this'",
    ):
        assert part in message
    assert "line 1" not in message


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokens.bin").write_bytes(b"\xff\xfe")
    for name in ("tokens.bin", "none"):
        with pytest.raises(UsageError, match="a UTF-8 text was expected"):
            read_token_file(tmp_path / name, TABLE, SIZE, "--drop")
