"""Merging step by step, on vocabularies that can be followed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from headport.quantize.prune.merges import Merges
from headport.quantize.prune.tokens import TokenTable
from tests.quantize.prune.tokenizers_of import byte_level, sentencepiece_bpe


def _merges(pieces: str, merges: str, **model: Any) -> tuple[Merges, dict[str, int]]:
    vocabulary = {piece: n for n, piece in enumerate(pieces.split())}
    pairs = [pair.split("+") for pair in merges.split()]
    return Merges({"merges": pairs, **model}, vocabulary), vocabulary


def _path(found: tuple[Merges, dict[str, int]], piece: str) -> set[str] | None:
    merges, vocabulary = found
    names = {n: p for p, n in vocabulary.items()}
    path = merges.path(piece)
    return None if path is None else {names[i] for i in path}


def test_the_path_is_the_one_that_merging_takes() -> None:
    found = _merges("a b c d ab bc abc abcd cd", "b+c a+b a+bc c+d abc+d ab+cd")
    # b+c comes first, so `ab` and `cd` are never made, although merges from them exist.
    assert _path(found, "abcd") == {"a", "b", "c", "d", "bc", "abc", "abcd"}


def test_the_leftmost_of_equal_merges_comes_first() -> None:
    found = _merges("a aa aaa", "a+a aa+a")
    assert _path(found, "aaa") == {"a", "aa", "aaa"}
    assert _path(_merges("a aa aaa", "a+a a+aa"), "aaa") is None  # a|a|a → aa|a, which is stuck


def test_a_token_that_merging_never_gives_has_no_path() -> None:
    assert _path(_merges("a b ab xyz x y z", "a+b"), "xyz") is None


def test_prefixes_and_suffixes_mark_the_place_in_a_word() -> None:
    found = _merges("a ##b ##c ##bc abc", "##b+##c a+##bc", continuing_subword_prefix="##")
    assert _path(found, "abc") == {"a", "##b", "##c", "##bc", "abc"}
    found = _merges("a b b</w> ab</w> ab", "a+b</w> a+b", end_of_word_suffix="</w>")
    assert _path(found, "ab</w>") == {"a", "b</w>", "ab</w>"}


def test_a_character_without_a_piece_is_spelled_in_bytes() -> None:
    found = _merges("a <0xC3> <0xA9> é", "<0xC3>+<0xA9>", byte_fallback=True)
    assert found[0].path("aé") is None and _path(found, "é") == {"é"}


@pytest.mark.parametrize("make", [byte_level, sentencepiece_bpe])
def test_every_piece_that_the_library_merges_has_a_path_of_its_own(make: Any) -> None:
    table = TokenTable.parse(make().to_str().encode())
    merges = Merges(table.model, table.vocabulary)
    plain = make()
    plain.normalizer, plain.pre_tokenizer = None, None  # pieces as they stand
    alone = {p: plain.encode(p, add_special_tokens=False).ids for p in table.vocabulary}
    for piece, token_id in table.vocabulary.items():
        if token_id in table.added:
            continue
        path = merges.path(piece)
        assert (path is not None) == (alone[piece] == [token_id]), piece
