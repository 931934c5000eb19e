"""Rewritten tokenizers of every kind, on any text."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from headport.errors import QuantizeError
from headport.quantize.prune.closure import always_kept
from headport.quantize.prune.rewrite import refuse_tokenizer, rewrite_tokenizer
from headport.quantize.prune.selection import Limits, Wanted, select
from headport.quantize.prune.tokens import TokenTable, read_tokens
from tests.quantize.prune.tokenizers_of import CHAT, KINDS, LINES, byte_level
from tests.quantize.prune.toys import tokenizer_bundle

SHARES = (0.0, 0.4)  # of the tokens that are not always kept


@functools.cache
def _tokenizer(kind: str) -> Tokenizer:
    return KINDS[kind]()  # not twice: training Unigram and WordPiece breaks ties at random


class Pair:
    """A tokenizer and what is left of it."""

    def __init__(self, folder: Path, kind: str, share: float) -> None:
        bundle = tokenizer_bundle(folder, _tokenizer(kind), chat=CHAT)
        self.before: TokenTable = read_tokens(bundle)
        closure = always_kept(bundle, self.before)
        rng = np.random.default_rng(7)
        free = sorted(self.before.pieces.keys() - closure.base)
        keep = rng.permutation(free)[: int(share * len(free))]
        wanted = Wanted(None, keep=frozenset(int(i) for i in keep))
        self.kept = select(closure, range(closure.size), wanted, Limits()).kept
        self.numbers = {int(old): new for new, old in enumerate(self.kept)}
        self.after: Tokenizer = Tokenizer.from_str(rewrite_tokenizer(self.before, self.kept))
        self.after.no_padding()

    def ids(self, text: str, *, special: bool = False) -> tuple[list[int], list[int]]:
        old = self.before.inner.encode(text, add_special_tokens=special).ids
        return old, self.after.encode(text, add_special_tokens=special).ids

    def texts(self, old: list[int], new: list[int]) -> tuple[str, str]:
        before = self.before.inner.decode(old, skip_special_tokens=False)
        return before, self.after.decode(new, skip_special_tokens=False)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pairs")


@functools.cache
def _pair(folder: Path, kind: str, share: float) -> Pair:
    return Pair(folder / kind / str(share), kind, share)


WORDS = sorted({word for line in LINES for word in line.split()})
SPECIAL = (
    "<|start|>",
    "<note>",
    "<s>",
    "[SEP]",
    "<unk>",
    "▁",
    "##a",
    "Ġ",
    "\ufffd",
    "🙂",
    "👩‍👩‍👧",
)
TEXTS = st.lists(
    st.one_of(
        st.text(st.characters(codec="utf-8"), max_size=8),
        st.sampled_from(WORDS),
        st.sampled_from(WORDS).map(lambda word: f" {word}"),
        st.sampled_from(SPECIAL),
    ),
    max_size=8,
).map("".join)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("kind", KINDS)
def test_any_text_reads_back_and_kept_tokens_stay(folder: Path, kind: str, share: float) -> None:
    pair = _pair(folder, kind, share)

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @example("\x00\x1f\x7f\u0085\u200b\u2028\ufeff\U0010ffff")
    @example("中文 العربية עברית हिन्दी ไทย ქართული Ελληνικά")
    @given(TEXTS)
    def check(text: str) -> None:
        for special in (False, True):
            old, new = pair.ids(text, special=special)
            assert max(new, default=0) < len(pair.kept)
            before, after = pair.texts(old, new)
            assert before == after
            if kind.startswith("byte-level") and not special:
                assert after == text
            if all(i in pair.numbers for i in old):
                assert new == [pair.numbers[i] for i in old]

    check()


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kept_token_is_reached_as_before(folder: Path, kind: str, share: float) -> None:
    pair = _pair(folder, kind, share)
    alone = 0
    for token_id, piece in pair.before.pieces.items():
        old, new = pair.ids(pair.before.inner.decode([token_id], skip_special_tokens=False))
        if token_id in pair.numbers and old == [token_id]:
            assert new == [pair.numbers[token_id]], piece
            alone += 1
        if token_id not in pair.numbers and old == [token_id]:
            assert len(new) > 1, piece
    assert alone >= 4


@pytest.mark.parametrize("kind", KINDS)
def test_ids_have_no_gaps_and_keep_their_order(folder: Path, kind: str) -> None:
    pair = _pair(folder, kind, 0.4)
    found = pair.after.get_vocab(with_added_tokens=True)
    assert sorted(found.values()) == list(range(len(pair.kept)))
    assert found == {pair.before.pieces[int(old)]: new for new, old in enumerate(pair.kept)}


@pytest.mark.parametrize("kind", KINDS)
def test_keeping_everything_changes_no_number(kind: str) -> None:
    table = TokenTable.parse(KINDS[kind]().to_str().encode())
    made = json.loads(rewrite_tokenizer(table, np.arange(len(table.pieces))))
    assert made == table.document


@pytest.mark.parametrize("kind", KINDS)
def test_pruning_twice_is_pruning_once(folder: Path, kind: str) -> None:
    pair = _pair(folder, kind, 0.7)
    small = _pair(folder, kind, 0.4)  # its tokens were drawn from the same permutation
    assert set(small.kept) <= set(pair.kept)
    table = TokenTable.parse(rewrite_tokenizer(pair.before, pair.kept).encode())
    places = np.array([pair.numbers[int(i)] for i in small.kept])
    twice = json.loads(rewrite_tokenizer(table, places))
    assert twice == json.loads(rewrite_tokenizer(small.before, small.kept))


def test_post_processor_and_padding_get_the_new_numbers(folder: Path) -> None:
    pair = _pair(folder, "byte-level BPE", 0.0)
    document = json.loads(pair.after.to_str())
    stop = pair.after.token_to_id("<|stop|>")
    [_, template] = document["post_processor"]["processors"]
    assert template["special_tokens"]["<|stop|>"]["ids"] == [stop]
    assert stop < len(pair.kept) < pair.before.inner.token_to_id("<|stop|>")
    made = json.loads(rewrite_tokenizer(pair.before, pair.kept))
    assert made["padding"]["pad_id"] == pair.after.token_to_id("<|pad|>")
    assert pair.after.encode("a").ids[-1] == stop


def test_greedy_merging_may_end_in_fewer_tokens() -> None:
    """`ab` comes first and leaves `d` alone; without it `bcd` comes together."""
    pieces = {p: n for n, p in enumerate(["a", "b", "c", "d", "bc", "bcd", "ab"])}
    merges = [("a", "b"), ("b", "c"), ("bc", "d")]
    table = TokenTable.parse(Tokenizer(models.BPE(pieces, merges)).to_str().encode())
    assert [table.pieces[i] for i in table.encode("abcd")] == ["ab", "c", "d"]
    after = Tokenizer.from_str(rewrite_tokenizer(table, np.arange(6)))
    assert after.encode("abcd").tokens == ["a", "bcd"]


def test_kinds_that_cannot_be_rewritten_are_refused() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    random = byte_level()
    random.model.dropout = 0.1
    for tokenizer, size, message in (
        (words, 2, "BPE, Unigram, WordPiece was expected, WordLevel found; use --mode output"),
        (random, 500, "at random"),
        (byte_level(), 422, r"adds 1 tokens that the model has no row for, such as '<note>'"),
    ):
        table = TokenTable.parse(tokenizer.to_str().encode())
        with pytest.raises(QuantizeError, match=message):
            refuse_tokenizer(table, size)
    refuse_tokenizer(TokenTable.parse(byte_level().to_str().encode()), 423)
