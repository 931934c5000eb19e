"""Conversations: the assistant's words alone are scored, by the checkpoint's own template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from headport.bundle import Bundle
from headport.errors import ParityError, UsageError
from headport.validate import recording
from headport.validate.candidate import Candidate
from headport.validate.chats import write_chat
from headport.validate.command import Options, validate_with
from headport.validate.comparison import check_ids, prepare
from headport.validate.documents import Document, read_texts
from headport.validate.store import StoredReference

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a head?"},
    {"role": "assistant", "content": "A matrix."},
    {"role": "user", "content": "Of what?"},
    {"role": "assistant", "content": "Of a model."},
]


def plain(messages: Any, reply: bool) -> str:
    """ChatML, in short."""
    text = "".join(f"<{m['role']}>{m['content']}</>\n" for m in messages)
    return text + "<assistant>" * reply


def test_spans_are_the_replies_with_their_end_of_turn() -> None:
    text, spans = write_chat(tuple(TURNS), plain)
    assert [text[slice(*span)] for span in spans] == ["A matrix.</>\n", "Of a model.</>\n"]


def test_a_conversation_may_begin_with_a_reply() -> None:
    text, spans = write_chat(tuple(TURNS[2:3]), plain)
    assert spans == [(0, len(text))]


def forgetful(messages: Any, reply: bool) -> str:
    """A template that drops the words of all replies but the last."""
    last = len(messages) - 1
    kept = [
        m if m["role"] != "assistant" or i == last else m | {"content": ""}
        for i, m in enumerate(messages)
    ]
    return plain(kept, reply)


def test_a_template_that_rewrites_earlier_messages_is_refused() -> None:
    with pytest.raises(UsageError, match=r"message 2 .* writes it differently when other messages"):
        write_chat(tuple(TURNS), forgetful)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("chat") / "chat.jsonl"
    lines = [{"messages": TURNS}, {"messages": TURNS[1:3], "weight": 2}, {"text": "A plain text."}]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return file


def scored_text(candidate: Candidate, document: Document) -> str:
    ids = document.token_ids[1 : document.used][document.scored]
    return candidate.tokens._inner.decode(ids.tolist(), skip_special_tokens=False)


def test_what_is_scored_of_a_conversation(chat: Path, tiny_bundle: Path) -> None:
    candidate = Candidate(Bundle.open(tiny_bundle), threads=1)
    (material,) = prepare(read_texts([chat]), candidate, 0)
    first, second, text = material.documents
    assert scored_text(candidate, first) == "A matrix.<|end|>Of a model.<|end|>"
    assert scored_text(candidate, second) == "A matrix.<|end|>" and second.weight == 2
    assert scored_text(candidate, text) == " plain text." and text.messages is None
    assert first.content == "".join(f"{m['content']}<|end|>" for m in TURNS)
    assert first.bytes_scored == len("A matrix.<|end|>Of a model.<|end|>")


def test_the_reference_writes_the_conversation_itself(
    chat: Path, tiny_bundle: Path, tiny_llama: Path, reference_of: Any, tmp_path: Path
) -> None:
    candidate = Candidate(Bundle.open(tiny_bundle), threads=1)
    check_ids(prepare(read_texts([chat]), candidate, 0), candidate, reference_of(tiny_llama))
    copy = tmp_path / "copy"
    shutil.copytree(tiny_bundle, copy)
    template = copy / "chat_template.jinja"
    template.write_text(template.read_text().replace("m['content']", "m['content'] ~ ' '"))
    other = Candidate(Bundle(copy, Bundle.open(tiny_bundle).manifest), threads=1)
    with pytest.raises(ParityError, match="the reference's chat template or tokenizer"):
        check_ids(prepare(read_texts([chat]), other, 0), other, reference_of(tiny_llama))


def test_a_stored_reference_answers_alike(
    chat: Path, tiny_bundle: Path, tiny_llama: Path, reference_of: Any, tmp_path: Path
) -> None:
    options = Options(
        bundle=tiny_bundle, reference=str(tiny_llama), text=(chat,), greedy_tokens=0, window=40
    )
    live = validate_with(reference_of(tiny_llama), options)
    assert live.verdict == "passed"
    assert live.protocol.special_tokens.endswith("conversations: those of the chat template alone")
    recording.record(
        recording.Options(
            model=str(tiny_llama), text=(chat,), output=tmp_path / "ref", window=40, greedy_tokens=0
        )
    )
    stored = StoredReference(tmp_path / "ref")
    candidate = Candidate(Bundle.open(tiny_bundle), threads=1)
    check_ids(prepare(stored.texts(), candidate, 0), candidate, stored)
    rows = sum(len(window.token_ids) for window in stored.store.windows)
    assert rows == sum(
        d.used - 1 for m in prepare(stored.texts(), candidate, 0) for d in m.documents
    )
