"""What is always kept, for each kind of tokenizer and for everything that names an id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from headport.quantize.prune.closure import Closure, always_kept
from headport.quantize.prune.rewrite import rewrite_tokenizer
from headport.quantize.prune.tokens import read_tokens
from tests.quantize.prune.tokenizers_of import (
    CHAT,
    byte_level,
    sentencepiece_bpe,
    unigram,
    word_piece,
)
from tests.quantize.prune.toys import tokenizer_bundle


def _closure(folder: Path, tokenizer: Tokenizer, **files: Any) -> Closure:
    bundle = tokenizer_bundle(folder, tokenizer, **files)
    return always_kept(bundle, read_tokens(bundle))


def _spelled(closure: Closure, reason: str) -> set[str]:
    return {closure.table.pieces[i] for i in closure.always[reason]}


def test_byte_level(tmp_path: Path) -> None:
    found = _closure(tmp_path, byte_level())
    assert _spelled(found, "bytes") == set(pre_tokenizers.ByteLevel.alphabet())
    assert _spelled(found, "special tokens") == {"<|pad|>", "<|start|>", "<|stop|>"}
    assert _spelled(found, "added tokens") == {"<note>"}
    assert _spelled(found, "post-processor") == {"<|stop|>"}
    assert _spelled(found, "padding") == {"<|pad|>"}
    assert not found.always["alphabet"] and not found.always["chat template"]


def test_bytes_stand_in_for_characters_but_not_for_the_sign_of_a_space(tmp_path: Path) -> None:
    found = _closure(tmp_path, sentencepiece_bpe())
    assert _spelled(found, "bytes") == {f"<0x{byte:02X}>" for byte in range(256)}
    # Spelled in bytes, the sign would not be turned back into a space.
    assert _spelled(found, "signs of spaces") == {"▁"}
    assert _spelled(found, "unknown token") == {"<unk>"}
    assert not found.always["alphabet"]
    assert _spelled(found, "post-processor") == {"<s>"}


def test_without_bytes_every_character_keeps_its_piece(tmp_path: Path) -> None:
    found = _closure(tmp_path, unigram())
    single = {p for p in found.table.vocabulary if len(p) == 1}
    assert single and single <= _spelled(found, "alphabet")
    scores = dict(found.table.model["vocab"])
    [lowest] = _spelled(found, "lowest score")
    assert scores[lowest] == min(scores.values())
    assert _spelled(found, "unknown token") == {"<unk>"}


def test_characters_of_words_in_both_places(tmp_path: Path) -> None:
    found = _closure(tmp_path, word_piece())
    single = {p for p in found.table.vocabulary if len(p.removeprefix("##")) == 1}
    assert {"t", "##t"} <= single == _spelled(found, "alphabet")
    assert _spelled(found, "post-processor") == {"[CLS]", "[SEP]"}


def test_a_character_without_a_piece_of_its_own_keeps_the_pieces_it_is_in(tmp_path: Path) -> None:
    tokenizer = word_piece()
    document = tokenizer.to_str().replace('"##q"', '"##qq"')
    changed = Tokenizer.from_str(document)
    vocabulary = changed.get_vocab()
    with_q = {p for p in vocabulary if "q" in p[1:] and p.startswith("##")}
    found = _closure(tmp_path, changed)
    assert with_q <= _spelled(found, "alphabet")


def test_what_configurations_name_is_kept_and_what_does_not_exist_is_said(tmp_path: Path) -> None:
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    found = _closure(
        tmp_path,
        tokenizer,
        generation={
            "eos_token_id": [300, 301],
            "suppress_tokens": [302],
            "bad_words_ids": [[303, 304], [size]],
            "forced_eos_token_id": 305,
        },
        config={"bos_token_id": 306, "pad_token_id": -1},
    )
    assert found.always["generation settings"] == {300, 301, 302, 303, 304, 305}
    assert found.always["configuration"] == {306}
    assert found.notes == (
        f"generation settings: no token has the id {size}",
        "configuration: no token has the id -1",
    )


def test_the_chat_template_keeps_what_it_writes(tmp_path: Path) -> None:
    found = _closure(tmp_path, byte_level(), chat=CHAT)
    kept = found.always["chat template"]
    # `treatment` stands in a string of the template, `user` comes with the messages.
    for text in ("<|start|>", "treatment\n", "user\n", "assistant\n", "<|stop|>\n"):
        assert set(found.table.encode(text)) <= kept, text
    assert not set(found.table.encode(" arteries")) <= kept


@pytest.mark.parametrize(
    "chat", ["{% if %}", "{{ raise_exception('no') }}", "{{ messages[0].x.y }}"]
)
def test_a_template_that_cannot_be_rendered_keeps_its_texts(tmp_path: Path, chat: str) -> None:
    found = _closure(tmp_path, byte_level(), chat=chat + "<|start|>")
    if "if" not in chat:  # what cannot be read at all has no texts
        assert set(found.table.encode("<|start|>")) <= found.always["chat template"]


def test_a_token_brings_its_parts_along(tmp_path: Path) -> None:
    found = _closure(tmp_path, byte_level())
    heart = found.table.vocabulary["Ġheart"]
    parts = {found.table.pieces[i] for i in found.with_needs(heart)}
    assert {"Ġ", "h", "e", "a", "r", "t", "Ġheart"} < parts  # and what they merge to on the way
    assert found.with_needs(found.table.vocabulary["t"]) == {found.table.vocabulary["t"]}


def test_a_token_of_words_needs_nothing(tmp_path: Path) -> None:
    for kind in (unigram, word_piece):
        found = _closure(tmp_path / kind.__name__, kind())
        assert all(found.with_needs(i) == {i} for i in found.table.pieces)


def test_without_the_sign_of_a_space_a_text_would_read_back_with_it(tmp_path: Path) -> None:
    found = _closure(tmp_path, sentencepiece_bpe())
    kept = np.array(sorted(found.base))
    [sign] = found.always["signs of spaces"]
    for ids, expected in ((kept, "a b"), (kept[kept != sign], "▁a▁b")):
        after = Tokenizer.from_str(rewrite_tokenizer(found.table, ids))
        assert after.decode(after.encode("a b", add_special_tokens=False).ids) == expected


def test_without_the_lowest_score_an_unknown_character_would_be_cheaper(tmp_path: Path) -> None:
    pieces = {"<unk>": 0.0, "w": -1.0, "xy": -20.0, "zuv": -20.0, "yzuv": -1.0, "q": -1.0}
    inner = Tokenizer(models.Unigram([*pieces.items(), ("qq", -60.0)], unk_id=0))
    found = _closure(tmp_path, inner)
    split = ["w", "xy", "zuv"]  # x alone is unknown, which costs 10 more than the lowest score
    assert inner.encode("wxyzuv").tokens == split
    assert _spelled(found, "lowest score") == {"qq"}
    kept = np.arange(len(pieces) + 1)
    for ids, expected in ((kept, split), (kept[:-1], ["w", "x", "yzuv"])):
        after = Tokenizer.from_str(rewrite_tokenizer(found.table, ids))
        assert after.encode("wxyzuv").tokens == expected
