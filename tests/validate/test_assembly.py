"""Notes that the report makes about the texts."""

from __future__ import annotations

import numpy as np

from headport.validate.assembly import _doubled
from headport.validate.comparison import Material
from headport.validate.documents import Document, Text


def material(*ids: int) -> Material:
    count = len(ids) - 1
    document = Document(
        0, "", np.array(ids), len(ids), np.zeros(count, np.int64), np.ones(count, np.bool_)
    )
    return Material(Text("a", "a.txt", "", 0, ""), (document,))


def test_a_second_bos_is_noted() -> None:
    (note,) = _doubled([material(1, 1, 5), material(1, 5, 1)], [1], lambda _: "<s>")
    assert note.startswith("1 documents begin with <s> twice")


def test_where_the_tokenizer_adds_nothing_there_is_no_such_note() -> None:
    assert _doubled([material(1, 1, 5)], [], str) == ()
