from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from headport.quantize.count import units
from headport.quantize.count.counting import TokenCounter
from headport.quantize.count.pieces import ANY_CLASS, Needles, PieceCutter
from headport.quantize.count.units import UnitPlan, find_plan
from tests.quantize.count.tokenizers_of import (
    FAMILIES,
    LINES,
    byte_level,
    marked_merges,
    split_by,
    unigram,
)

SOURCES: dict[str, str] = {}
# White space of all sorts, what engines disagree about, joining characters, marks, specials.
ATOMS = [
    *" \t\n\r\f\v\x1c\x85\xa0\u2003\u3000\u180e\u200b\x00",
    *"aZé\u0301ß1٣!'/_▁中🙂\ufb01\u00a8\u212a\u1100\u1161",
    *[
        "文",
        "的",
        "'t.",
        "x1",
        "(a",
        "'s",
        "'LL",
        "  ",
        "\r\n",
        "foo",
        " bar",
        "123",
        "!\n",
        "<|end|>",
        "<s>",
        "<mask>",
        "[MASK]",
    ],
]
texts = st.lists(st.sampled_from(ATOMS), max_size=14).map("".join)


def counter(name: str) -> TokenCounter:
    if name not in SOURCES:
        SOURCES[name] = FAMILIES[name]().to_str()
    return TokenCounter(SOURCES[name])


COUNTERS: dict[str, TokenCounter] = {}


def expected(tokenizer: Tokenizer, documents: list[str], size: int) -> np.ndarray:
    ids = [i for d in documents for i in tokenizer.encode(d, add_special_tokens=False).ids]
    return np.bincount(np.array(ids, np.int64), minlength=size)


@pytest.mark.parametrize("name", FAMILIES)
def test_units_give_the_counts_of_whole_documents(name):
    found = COUNTERS.setdefault(name, counter(name))
    assert found.counts_units, found.reason
    tokenizer = Tokenizer.from_str(SOURCES[name])

    @settings(max_examples=80, deadline=None, derandomize=True)
    @given(st.lists(texts, max_size=3))
    @example([LINES[0] + "  \n" + LINES[3], LINES[1], LINES[2]])
    @example(["a\n  b", "!\n\n  x", "x\n \n y", "!\x1c a", "a  \u3000 b", " a", ""])
    def check(documents):
        counted = found.count(documents)
        whole = expected(tokenizer, documents, found.vocab_size)
        assert counted.counts.tolist() == whole.tolist()
        assert counted.documents == len(documents)
        assert counted.bytes == sum(len(d.encode()) for d in documents)

    check()


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("llama 3", units._BEFORE_WHITE_SPACE),  # line breaks belong to the piece before
        ("gpt2, prefix space", units._BEFORE_WHITE_SPACE),  # a piece gets a space of its own
        ("gpt2", re.compile(r"[^ ]+| +")),  # the last of some spaces belongs to the word
        ("bert", re.compile(r"[^e]+")),  # inside words
        ("t5", re.compile(r" +|[^ ]+")),  # the mark belongs to the word
        ("llama 2", re.compile("▁+|[^▁]+")),
    ],
)
def test_another_cut_would_be_noticed(name, pattern):
    found = counter(name)
    object.__setattr__(found._plan, "pattern", pattern)
    documents = [*LINES, "!\n\n  x", "a   b", "the head"]
    whole = expected(Tokenizer.from_str(SOURCES[name]), documents, found.vocab_size)
    assert found.count(documents).counts.tolist() != whole.tolist()


@pytest.mark.parametrize(
    ("name", "cutter"),
    [
        ("llama 3", PieceCutter(ANY_CLASS, (), [b"  "])),  # a sign begins a piece of letters
        ("gpt2", PieceCutter(ANY_CLASS, (), [b"a\xe4\xb8\xad"])),  # as if no token held two Han
        ("gpt2", PieceCutter(ANY_CLASS, ())),  # added tokens cut
    ],
)
def test_other_pieces_would_be_noticed(name, cutter):
    found = counter(name)
    object.__setattr__(found._plan, "cutter", cutter)
    documents = ["x(ab)(ab)", "中文中文的文中", "a<|end|>b"]
    whole = expected(Tokenizer.from_str(SOURCES[name]), documents, found.vocab_size)
    assert found.count(documents).counts.tolist() != whole.tolist()


def test_a_document_with_a_token_that_reaches_is_encoded_as_a_whole():
    found = counter("tokens that reach")
    assert found._plan.whole.texts == ("<mask>", "  ")
    object.__setattr__(found._plan, "whole", Needles(()))
    documents = ["a <mask> b"]
    tokenizer = Tokenizer.from_str(SOURCES["tokens that reach"])
    whole = expected(tokenizer, documents, found.vocab_size)
    assert found.count(documents).counts.tolist() != whole.tolist()


def odd_merges() -> Tokenizer:
    data = json.loads(marked_merges().to_str())
    data["model"]["vocab"]["e▁t"] = len(data["model"]["vocab"])
    return Tokenizer.from_str(json.dumps(data))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: split_by(r"\s+"), "not one whose cuts are known"),
        (lambda: split_by(units._GPT2, normalizers.NFKC()), "NFKC may change what a cut"),
        (lambda: byte_level(False, pre_tokenizers.Punctuation()), "not one whose cuts are known"),
        (lambda: unigram("first", normalizers.NFKC()), "marked as first depends"),
        (odd_merges, "tokens reach over a word's beginning"),
    ],
)
def test_what_is_not_proved_is_encoded_plainly_and_said(make, reason):
    tokenizer = make()
    plan = find_plan(tokenizer)
    assert isinstance(plan, str) and reason in plan
    found = TokenCounter(tokenizer.to_str())
    assert not found.counts_units and reason in found.reason
    whole = expected(tokenizer, list(LINES), found.vocab_size)
    assert found.count(LINES).counts.tolist() == whole.tolist()


@pytest.mark.parametrize(
    ("change", "cuts_han", "knows_words"),
    [
        ({}, True, True),
        ({"ignore_merges": True}, False, True),  # a token that no merges lead to
        ({"fuse_unk": True}, False, True),
        ({"end_of_word_suffix": "</w>"}, False, True),
        ({"byte level": False}, False, False),
    ],
)
def test_pieces_need_merges_alone_and_bytes(change, cuts_han, knows_words):
    data = json.loads(split_by(units._GPT2).to_str())
    if "byte level" in change:
        data["pre_tokenizer"] = data["pre_tokenizer"]["pretokenizers"][0]
    else:
        data["model"] |= change
    plan = find_plan(Tokenizer.from_str(json.dumps(data)))
    assert isinstance(plan, UnitPlan) and plan.cutter is not None
    assert (len(plan.cutter.cut("山水山")) > 1) == cuts_han
    assert bool(plan.cutter.words(" the")) == knows_words


def with_whole_tokens(*texts: str, hole: int = 0) -> str:
    """A tokenizer with tokens that no merges lead to."""
    data = json.loads(split_by(units._GPT2).to_str())
    data["model"]["ignore_merges"] = True
    for text in texts:
        [(spelled, _)] = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text)
        data["model"]["vocab"][spelled] = len(data["model"]["vocab"]) + hole
    return json.dumps(data)


@pytest.mark.parametrize("hole", [0, 5])
def test_a_token_that_no_merges_lead_to_is_counted_as_it_comes(hole):
    source = with_whole_tokens("山", "the最", hole=hole)
    documents = ["山", "文山", "山文 山", "the最 the最a"]
    found = TokenCounter(source)
    assert found.counts_units
    whole = expected(Tokenizer.from_str(source), documents, found.vocab_size)
    assert found.count(documents).counts.tolist() == whole.tolist()


def test_a_tokenizer_that_cannot_be_copied_is_counted_plainly(monkeypatch):
    monkeypatch.setattr(units, "_without", lambda data, *parts: "{}")
    found = TokenCounter(byte_level().to_str())
    assert not found.counts_units and "no copy of it can be made" in found.reason
    assert found.count(LINES).counts.sum() > 0


def test_units_are_cut_where_it_is_safe_only():
    cut = units._BEFORE_BLANK.findall
    assert cut("a b\tc") == ["a", " b", "\tc"]
    assert cut("a\n b!\n  c d") == ["a", "\n b!\n  c", " d"]
    assert cut("a\u3000b c\x1c  d") == ["a\u3000b", " c\x1c  d"]
    assert units._BEFORE_WHITE_SPACE.findall("!\n  c\x1c") == ["!", "\n  c\x1c"]
    assert units._BEFORE_WHITE_SPACE.findall(" \n") == [" \n"]


def test_forgetting_units_changes_nothing(monkeypatch):
    monkeypatch.setattr("headport.quantize.count.counting._REMEMBERED", 3)
    found = counter("gpt2")
    twice = found.count(LINES).counts + found.count(LINES).counts
    assert len(found._ids) > 3  # a batch is always held as a whole
    whole = expected(Tokenizer.from_str(SOURCES["gpt2"]), list(LINES) * 2, found.vocab_size)
    assert twice.tolist() == whole.tolist()
