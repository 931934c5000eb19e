"""Texts into documents, documents into windows: what is scored, and each token once."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headport.errors import UsageError

__all__ = [
    "MIN_DOCUMENT_TOKENS",
    "Document",
    "Text",
    "Tokens",
    "Window",
    "cut_documents",
    "read_texts",
    "split_documents",
    "windows_of",
]

Int64 = npt.NDArray[np.int64]

MIN_DOCUMENT_TOKENS = 64
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


@dataclass(frozen=True)
class Tokens:
    """A document as its tokenizer encodes it, special tokens included."""

    ids: Int64  # [n]
    ends: Int64  # [n], characters of the document used up so far; 0 for a leading special token


@dataclass(frozen=True)
class Document:
    """One document. Its first `used` tokens are fed or scored; the first is never scored."""

    index: int  # in its text
    content: str
    token_ids: Int64  # [n], all of them
    used: int  # 2…n
    bytes_scored: int  # UTF-8 bytes of the scored tokens' text

    @property
    def tokens_scored(self) -> int:
        """Tokens with a prediction."""
        return self.used - 1


@dataclass(frozen=True)
class Window:
    """Consecutive tokens fed at once, and the token that follows each of them."""

    document: int  # index of the document in its text
    start: int  # index of the first fed token in the document
    token_ids: Int64  # [T]
    targets: Int64  # [T]


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
    return Text(file.stem, file.name, hashlib.sha256(data).hexdigest(), len(data), content)


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
    contents: Iterator[str], encode: Callable[[str], Tokens], budget: int
) -> Iterator[Document]:
    """Encode documents until `budget` tokens are to be scored; the last one is cut to fit.

    Args:
        contents: Documents of a text.
        encode: The tokenizer.
        budget: Tokens to score, 0 for all.

    Yields:
        Documents with something to score; one of a single token has nothing.
    """
    left = budget
    for index, content in enumerate(contents):
        tokens = encode(content)
        used = len(tokens.ids) if not budget else min(len(tokens.ids), left + 1)
        if used < 2:
            continue
        scored = content[int(tokens.ends[0]) : int(tokens.ends[:used].max())]
        yield Document(index, content, tokens.ids, used, len(scored.encode("utf-8")))
        left -= used - 1
        if budget and left <= 0:
            return


def windows_of(document: Document, length: int) -> list[Window]:
    """Cut a document into consecutive windows of at most `length` fed tokens.

    The token after a window's last one is scored by that window, so every token but the
    document's first is scored exactly once.
    """
    used = document.token_ids[: document.used]
    fed, following = used[:-1], used[1:]
    return [
        Window(document.index, at, fed[at : at + length], following[at : at + length])
        for at in range(0, len(fed), length)
    ]
