"""Texts into documents, documents into windows: what is scored, and each token once."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headport.errors import UsageError
from headport.validate.chats import Render, write_chat
from headport.validate.given_source import GivenSource
from headport.validate.records import Messages, Record, is_records, parse_records

__all__ = [
    "EARLY_POSITIONS",
    "MIN_DOCUMENT_TOKENS",
    "Document",
    "Encode",
    "Text",
    "Tokens",
    "Window",
    "cut_document",
    "cut_documents",
    "read_texts",
    "record_documents",
    "split_documents",
    "windows_of",
]

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

MIN_DOCUMENT_TOKENS = 64
EARLY_POSITIONS = 64  # a document's first scored tokens, which have little context
# A line break, then one or more lines that hold nothing but white space.
_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")


@dataclass(frozen=True)
class Text:
    """One `--text` file; `name` is its stem and names the slice."""

    name: str
    file: str
    sha256: str
    bytes: int
    content: str
    folder: Path = Path()  # what files that its lines name are relative to

    def records(self) -> tuple[Record, ...]:
        """The documents of a .jsonl file; none of a plain text, which is split.

        Raises:
            UsageError: If a line is no record.
        """
        return parse_records(self.content, self.file) if is_records(self.file) else ()


@dataclass(frozen=True)
class Tokens:
    """A document as its tokenizer encodes it, special tokens included."""

    ids: Int64  # [n]
    ends: Int64  # [n], characters of the document used up so far; 0 for a leading special token


class Encode(Protocol):
    """A tokenizer's way of encoding a text."""

    def __call__(self, text: str, /, *, special_tokens: bool = True) -> Tokens:
        """Tokens; `special_tokens`: with those that the tokenizer itself adds."""
        ...


@dataclass(frozen=True)
class Document:
    """One document. Its first `used` tokens are fed or scored; the first is never scored."""

    index: int  # in its text
    content: str
    token_ids: Int64  # [n], all of them
    used: int  # 2…n
    token_bytes: Int64  # [used - 1], UTF-8 bytes of every token but the first
    scored: Bool  # [used - 1], which of these tokens are scored
    weight: float = 1.0
    messages: Messages | None = None  # what the chat template made its content of
    source: GivenSource | None = None  # what an encoder reads; its content is the target then
    source_text: str = ""  # what the ids of the source were made of

    @property
    def tokens_scored(self) -> int:
        """Tokens whose prediction counts."""
        return int(self.scored.sum())

    @property
    def bytes_scored(self) -> int:
        """UTF-8 bytes of the scored tokens' text."""
        return int(self.token_bytes[self.scored].sum())


@dataclass(frozen=True)
class Window:
    """Consecutive tokens fed at once, and the token that follows each of them."""

    document: int  # index of the document in its text
    start: int  # index of the first fed token in the document
    token_ids: Int64  # [T]
    targets: Int64  # [T]
    scored: Bool  # [T], which targets this window scores


def read_texts(files: Sequence[Path]) -> list[Text]:
    """Read plain UTF-8 texts.

    Raises:
        UsageError: If a file is missing, empty, not UTF-8, or two have the same stem.
    """
    texts = [_read_text(file) for file in files]
    names = [text.name for text in texts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(
            f"texts are told apart by their file name, but {', '.join(twice)} occurs twice; "
            "rename one"
        )
    return texts


def _read_text(file: Path) -> Text:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file}: a text file was expected: {error.strerror}") from error
    try:
        content = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{file}: plain UTF-8 text was expected, byte {error.start} is "
            f"0x{data[error.start]:02x}; convert it to UTF-8"
        ) from error
    if not content.strip():
        raise UsageError(f"{file}: a text to score was expected, the file holds none")
    sha256 = hashlib.sha256(data)
    text = Text(file.stem, file.name, sha256.hexdigest(), len(data), content, file.parent)
    records = text.records()  # refuses a damaged file before anything is loaded
    named = [record.features for record in records if record.features is not None]
    for name in named:
        sha256.update(_read_features(file, name))
    return replace(text, sha256=sha256.hexdigest()) if named else text


def _read_features(file: Path, name: str) -> bytes:
    try:
        return (file.parent / name).read_bytes()
    except OSError as error:
        raise UsageError(
            f"{file}: features {name}: a .npy file beside it was expected: {error.strerror}"
        ) from error


def split_documents(content: str, count_tokens: Callable[[str], int]) -> Iterator[str]:
    """Documents of a text, in order and unchanged inside.

    A document is a block between blank lines of at least `MIN_DOCUMENT_TOKENS` tokens; shorter
    ones are joined to the next, with the blank lines between them; a short rest at the end
    belongs to the last document. Blank lines between documents belong to none.

    Args:
        content: The text.
        count_tokens: Tokens of a block, special tokens not counted.
    """
    held: tuple[int, int] | None = None  # a complete document that may still get the rest
    start, tokens = -1, 0
    end = 0
    for block_start, end in _blocks(content):
        start = block_start if start < 0 else start
        tokens += count_tokens(content[block_start:end])
        if tokens >= MIN_DOCUMENT_TOKENS:
            if held:
                yield content[slice(*held)]
            held, start, tokens = (start, end), -1, 0
    if start >= 0:
        held = (held[0] if held else start, end)
    if held:
        yield content[slice(*held)]


def _blocks(content: str) -> Iterator[tuple[int, int]]:
    start = 0
    for gap in _BLANK_LINES.finditer(content):
        yield from _block(content, start, gap.start())
        start = gap.end()
    yield from _block(content, start, len(content))


def _block(content: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    if content[start:end].strip():
        yield start, end


def cut_documents(
    contents: Iterator[str],
    encode: Callable[[str], Tokens],
    budget: int,
    ignored_ids: Sequence[int] = (),
) -> Iterator[Document]:
    """Encode documents until `budget` tokens are to be scored; the last one is cut to fit.

    Args:
        contents: Documents of a text.
        encode: The tokenizer.
        budget: Tokens to score, 0 for all.
        ignored_ids: Tokens that are fed, but not scored.

    Yields:
        Documents with something to score; one of a single token has nothing.
    """
    left = budget
    for index, content in enumerate(contents):
        document = cut_document(index, content, encode(content), left, ignored_ids=ignored_ids)
        if document is None:
            continue
        yield document
        left -= document.tokens_scored
        if budget and left <= 0:
            return


def record_documents(
    records: Sequence[Record],
    encode: Encode,
    budget: int,
    ignored_ids: Sequence[int] = (),
    render: Render | None = None,
) -> Iterator[Document]:
    """As `cut_documents`, of records: prompts are fed but not scored, weights are kept.

    A token that begins in the prompt and ends behind it belongs to the prompt. Of a conversation,
    the replies are scored; the template writes all its special tokens, and none is added.

    Args:
        records: Of a .jsonl file.
        encode: The tokenizer.
        budget: Tokens to score, 0 for all.
        ignored_ids: Tokens that are fed, but not scored.
        render: The chat template, needed where a record is a conversation.
    """
    left = budget
    for index, record in enumerate(records):
        content, spans = record.content, [(record.prompt_characters, len(record.content))]
        if record.messages is None:
            tokens = encode(content)
        else:
            assert render is not None
            try:
                content, spans = write_chat(record.messages, render)
            except UsageError as error:
                raise UsageError(f"conversation {index}, {error}") from error
            tokens = encode(content, special_tokens=False)
        document = cut_document(
            index, content, tokens, left, ignored_ids=ignored_ids, wanted=_inside(tokens, spans)
        )
        if document is None or record.weight == 0:
            continue
        yield replace(document, weight=record.weight, messages=record.messages)
        left -= document.tokens_scored
        if budget and left <= 0:
            return


def _inside(tokens: Tokens, spans: Sequence[tuple[int, int]]) -> Bool:
    """Which tokens [n] begin inside one of the spans of characters, or at the very end."""
    starts = np.append(0, np.maximum.accumulate(tokens.ends)[:-1])
    last = max(end for _, end in spans)
    inside = np.zeros(len(starts), np.bool_)
    for start, end in spans:
        # A special token that the tokenizer puts behind the text begins where the text ends.
        inside |= (starts >= start) & ((starts < end) | (end == last) & (starts == last))
    return inside


def cut_document(
    index: int,
    content: str,
    tokens: Tokens,
    budget: int,
    *,
    ignored_ids: Sequence[int] = (),
    wanted: Bool | None = None,
) -> Document | None:
    """One document, cut behind the last of `budget` scored tokens; None if none is scored.

    Args:
        index: Of the document in its text.
        content: Its text.
        tokens: Its encoding.
        budget: Tokens to score, 0 for all.
        ignored_ids: Tokens that are fed, but not scored.
        wanted: [n], tokens that may be scored; None: all.
    """
    scored = ~np.isin(tokens.ids[1:], np.array(ignored_ids, np.int64))
    if wanted is not None:
        scored &= wanted[1:]
    places = np.flatnonzero(scored)
    if not len(places):
        return None
    # A text that is scored to its end is also fed to its end.
    last = int(places[budget - 1]) if 0 < budget < len(places) else len(scored) - 1
    return Document(
        index=index,
        content=content,
        token_ids=tokens.ids,
        used=last + 2,
        token_bytes=_token_bytes(content, tokens)[: last + 1],
        scored=scored[: last + 1],
    )


def _token_bytes(content: str, tokens: Tokens) -> Int64:
    """UTF-8 bytes that each token but the first uses up, [n - 1]."""
    sizes = np.frombuffer(content.encode("utf-32-le"), "<u4")
    # A character takes one byte more for each of these limits it reaches.
    lengths = 1 + (sizes >= 0x80) + (sizes >= 0x800) + (sizes >= 0x10000).astype(np.int64)
    before = np.append(0, np.cumsum(lengths))
    ends = np.maximum.accumulate(tokens.ends)
    return np.diff(before[ends])


def windows_of(document: Document, length: int, overlap: int = 0) -> list[Window]:
    """Cut a document into windows of at most `length` fed tokens.

    The token after a window's last one is scored by that window, so every token but the
    document's first is scored exactly once. With an overlap, each window but the first starts with
    the last `overlap` tokens of the one before it; they give context and are not scored again.
    """
    used = document.token_ids[: document.used]
    fed, following = used[:-1], used[1:]
    windows = []
    at = 0
    while at < len(fed):
        start = max(0, at - overlap)
        end = min(len(fed), start + length)
        scored = document.scored[start:end].copy()
        scored[: at - start] = False
        if scored.any():
            windows.append(
                Window(document.index, start, fed[start:end], following[start:end], scored)
            )
        at = end
    return windows
