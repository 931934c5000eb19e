from __future__ import annotations

import pytest

from headport.quantize.count.pieces import (
    ANY_CLASS,
    BEFORE_SIGN,
    Needles,
    PieceCutter,
    spaced_words_of,
    spelled_bytes,
    word_of,
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
        ("", [], []),
        ("的，中1。a", ["的", "，", "中", "1", "。", "a"], ["的", "，中", "1", "。a"]),
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
    assert inside.cut("a中文.b的的") == ["a中文", ".", "b的", "的"]
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


def test_words_are_spelled_as_the_model_knows_them():
    cutter = PieceCutter(ANY_CLASS, ("foo",), (), word_of)
    assert cutter.words(" the") == ["Ġthe"]
    assert cutter.words("中") == ["ä¸Ń"]
    assert cutter.words("+=") == ["+="]
    for other in ("food", "a1", "a.", "a'", "  a", "\na", "é", ""):
        assert cutter.words(other) == []
    assert PieceCutter(ANY_CLASS, ()).words("a") == []


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (" a", [" a"]),
        ("   a", ["  ", " a"]),
        ("\n\n  (", ["\n\n ", " ("]),
        ("\na", ["\n", "a"]),
        (" \n\ta", [" \n", "\t", "a"]),
        ("  ", []),
        ("\u3000a", []),
        (" 1", []),
    ],
)
def test_white_space_before_a_word_goes_as_gpt2_says(piece, words):
    assert spaced_words_of(piece) == words
