from __future__ import annotations

import pytest

from headport.quantize.count.pieces import (
    ANY_CLASS,
    BEFORE_SIGN,
    Needles,
    PieceCutter,
    spelled_bytes,
)


@pytest.mark.parametrize(
    ("unit", "any_class", "before_sign"),
    [
        (
            " foo.bar(x1,",
            [" foo", ".", "bar", "(", "x", "1", ","],
            [" foo", ".bar", "(x", "1", ","],
        ),
        ("don't.", ["don't", "."], ["don't", "."]),
        ("3.5'a", ["3", ".", "5'a"], ["3", ".", "5'a"]),
        ("('s", ["('s"], ["('s"]),
        ("naïve_x", ["naïve", "_", "x"], ["naïve", "_x"]),
        ("é.b", ["é.", "b"], ["é.b"]),
        ("", [""], [""]),
    ],
)
def test_units_are_cut_between_ascii_classes(unit, any_class, before_sign):
    assert PieceCutter(ANY_CLASS, ()).cut(unit) == any_class
    assert PieceCutter(BEFORE_SIGN, ()).cut(unit) == before_sign


def test_an_added_token_is_left_whole():
    cutter = PieceCutter(ANY_CLASS, ("<|end|>",))
    assert cutter.cut("a.<|end|>b.c") == ["a.<|end|>b.c"]
    assert cutter.cut("a.<|ends|>") == ["a", ".<|", "ends", "|>"]


def test_han_characters_are_cut_where_no_token_reaches_over():
    whole = "中文".encode()
    assert PieceCutter(ANY_CLASS, (), [whole]).cut("的中文的中") == ["的", "中文", "的", "中"]
    # A token may hold parts of characters only.
    parts = "中".encode()[2:] + "文".encode()[:1]
    assert PieceCutter(ANY_CLASS, (), [parts]).cut("的中文的") == ["的", "中文", "的"]
    inside = PieceCutter(ANY_CLASS, (), ["x中文".encode()])
    assert inside.cut("a中文.b的的") == ["a中文.", "b的", "的"]
    assert PieceCutter(ANY_CLASS, ()).cut("的中文的") == ["的中文的"]


def test_bytes_of_byte_level_tokens():
    assert spelled_bytes("Ġthe") == b" the"
    assert spelled_bytes("ä¸Ń") == "中".encode()
    assert spelled_bytes("中") == b""


def test_needles_are_found_by_their_beginnings():
    needles = Needles(("<|a|>", "<|b|>", "  "))
    found = [needles.is_in(t) for t in ("<|c|> x", "x <|b|>", "a  b", "a b")]
    assert found == [False, True, True, False]
    assert not Needles(()).is_in("a")
