"""Documents and windows: every token but a document's first is scored exactly once."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headport.errors import UsageError
from headport.validate.documents import (
    Document,
    Text,
    Tokens,
    cut_documents,
    read_texts,
    record_documents,
    split_documents,
    windows_of,
)
from headport.validate.records import Record


def words(text: str) -> int:
    return len(text.split())


def block(count: int, word: str = "w") -> str:
    return " ".join([word] * count)


def split(text: str) -> list[str]:
    return list(split_documents(text, words))


def test_long_blocks_are_documents() -> None:
    assert split(f"{block(64, 'a')}\n\n{block(70, 'b')}\n") == [
        block(64, "a"),
        block(70, "b") + "\n",
    ]


def test_short_blocks_are_joined_to_the_next_with_their_blank_lines() -> None:
    text = f"{block(10, 'a')}\n\n\n{block(20, 'b')}\n \t\n{block(34, 'c')}\n\n{block(64, 'd')}"
    joined, last = split(text)
    assert joined == text[: text.index("c\n\nd") + 1]
    assert last == block(64, "d")


def test_a_short_rest_belongs_to_the_last_document() -> None:
    text = f"{block(64, 'a')}\n\n{block(3, 'b')}\n\n{block(2, 'c')}"
    assert split(text) == [text]


def test_a_text_shorter_than_a_document_is_one() -> None:
    assert split("\n\n a b\n\n c \n\n") == [" a b\n\n c "]


@pytest.mark.parametrize("text", ["", "\n\n \n", "   "])
def test_white_space_holds_no_document(text: str) -> None:
    assert split(text) == []


def test_windows_line_breaks_separate_too() -> None:
    assert len(split(f"{block(64)}\r\n\r\n{block(64)}")) == 2


@given(st.lists(st.tuples(st.integers(1, 90), st.sampled_from(["\n\n", "\n \n", "\n\n\n"]))))
def test_no_word_is_lost_or_repeated(blocks: list[tuple[int, str]]) -> None:
    text = "".join(f"{block(count, f'w{i}')}{gap}" for i, (count, gap) in enumerate(blocks))
    found = split(text)
    assert " ".join(found).split() == text.split()
    assert all(words(part) >= 64 for part in found) or len(found) == 1


def document(length: int) -> Document:
    ones = np.ones(length - 1, np.int64)
    return Document(0, "", np.arange(length), length, ones, ones.astype(np.bool_))


@given(st.integers(2, 200), st.integers(1, 70))
def test_windows_score_each_token_once_in_order(length: int, window: int) -> None:
    windows = windows_of(document(length), window)
    targets = np.concatenate([w.targets for w in windows])
    np.testing.assert_array_equal(targets, np.arange(1, length))
    for w in windows:
        assert 1 <= len(w.token_ids) == len(w.targets) <= window
        np.testing.assert_array_equal(w.targets, w.token_ids + 1)
        assert w.start == w.token_ids[0]


def characters(text: str) -> Tokens:
    ids = np.array([ord(c) for c in text], np.int64)
    return Tokens(ids, np.arange(1, len(ids) + 1))


def with_bos(text: str) -> Tokens:
    plain = characters(text)
    return Tokens(np.append(1, plain.ids), np.append(0, plain.ends))


def test_bytes_are_those_of_the_scored_tokens() -> None:
    (plain,) = cut_documents(iter(["é中a"]), characters, 0)
    assert (plain.tokens_scored, plain.bytes_scored) == (2, 3 + 1)  # é has nothing before it
    (led,) = cut_documents(iter(["é中a"]), with_bos, 0)
    assert (led.tokens_scored, led.bytes_scored) == (3, 2 + 3 + 1)


def test_the_budget_is_met_exactly() -> None:
    found = list(cut_documents(iter(["abcd", "efgh", "ijkl"]), characters, 5))
    assert [d.tokens_scored for d in found] == [3, 2]
    assert [d.bytes_scored for d in found] == [3, 2]
    assert len(found[1].token_ids) == 4, "ids are compared over the whole document"


def test_a_single_token_has_nothing_to_score() -> None:
    assert list(cut_documents(iter(["a"]), characters, 0)) == []


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_texts_carry_name_and_hash(tmp_path: Path) -> None:
    (text,) = read_texts([write(tmp_path / "prose.en.txt", "é\n".encode())])
    assert (text.name, text.file, text.bytes, text.content) == (
        "prose.en",
        "prose.en.txt",
        3,
        "é\n",
    )
    assert text.sha256.startswith("edd3a863")


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "holds none"), (b" \n\n\t", "holds none"), (b"ab\xff", "byte 2 is 0xff")],
)
def test_unusable_texts_are_refused(data: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        read_texts([write(tmp_path / "bad.txt", data)])


def test_a_missing_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.txt: a text file was expected"):
        read_texts([tmp_path / "none.txt"])


def test_texts_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    files = [write(tmp_path / "a.txt", b"x"), write(tmp_path / "other" / "a.md", b"x")]
    with pytest.raises(UsageError, match="a occurs twice"):
        read_texts(files)


@given(st.integers(2, 120), st.integers(2, 40), st.integers(0, 39))
def test_overlapping_windows_score_each_token_once(length: int, window: int, overlap: int) -> None:
    overlap = min(overlap, window - 1)
    windows = windows_of(document(length), window, overlap)
    targets = np.concatenate([w.targets[w.scored] for w in windows])
    np.testing.assert_array_equal(targets, np.arange(1, length))
    for earlier, later in pairwise(windows):
        assert later.start == earlier.start + len(earlier.token_ids) - overlap or (
            overlap > earlier.start + len(earlier.token_ids)
        ), "context is what the window before ended with"
        assert later.scored.argmax() == earlier.start + len(earlier.token_ids) - later.start


def test_ignored_ids_are_fed_but_not_scored() -> None:
    (found,) = cut_documents(iter(["abca"]), characters, 0, [ord("a")])
    assert found.tokens_scored == 2 and found.bytes_scored == 2
    assert found.used == 4, "the ignored last one is still fed"
    (window,) = windows_of(found, 8)
    np.testing.assert_array_equal(window.scored, [True, True, False])
    assert list(cut_documents(iter(["aaaa"]), characters, 0, [ord("a")])) == []


def test_the_budget_counts_scored_tokens_only() -> None:
    (found,) = cut_documents(iter(["abacad"]), characters, 2, [ord("a")])
    assert found.tokens_scored == 2 and found.used == 4, "cut behind the second scored token"


RECORDS = """
{"text": "abc"}

{"prompt": "ab", "completion": "cd", "weight": 0.5}
"""


def text_of(content: str, file: str = "chat.jsonl") -> Text:
    return Text("chat", file, "0" * 64, len(content), content)


def test_records_say_what_is_prompt_and_what_a_document_weighs() -> None:
    records = text_of(RECORDS).records()
    plain, chat = record_documents(records, characters, 0)
    assert (plain.tokens_scored, plain.weight) == (2, 1.0)
    np.testing.assert_array_equal(chat.scored, [False, True, True])
    assert (chat.weight, chat.bytes_scored) == (0.5, 2)
    assert text_of(RECORDS, "chat.txt").records() == (), "a plain text is split, not parsed"


def test_a_token_across_the_border_belongs_to_the_prompt() -> None:
    pairs = Tokens(np.array([1, 2, 3]), np.array([1, 3, 4]))  # a, bc, d
    (found,) = record_documents([Record("abcd", 2)], lambda _, special_tokens=True: pairs, 0)
    np.testing.assert_array_equal(found.scored, [False, True])


def test_a_weight_of_zero_leaves_a_document_out() -> None:
    assert list(record_documents([Record("abcd", 0, 0.0)], characters, 0)) == []


def test_records_meet_the_budget() -> None:
    found = list(record_documents([Record("abcd"), Record("efgh")], characters, 4))
    assert [d.tokens_scored for d in found] == [3, 1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1"),
        ('{"text": "a", "prompt": "b"}', "text alone, prompt and completion"),
        ('{"text": "a", "weight": -1}', "weight of 0 or more"),
        ('{"messages": []}', "at least one of role 'assistant'"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "at least one of role 'assistant'"),
        ('{"messages": [{"content": "a"}]}', "message 0: a role was expected"),
        ('{"messages": [{"role": "assistant"}], "text": "a"}', "or messages alone were expected"),
        ('{"text": 3}', "text"),
    ],
)
def test_other_lines_are_refused(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        text_of(line).records()
