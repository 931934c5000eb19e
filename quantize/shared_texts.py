"""Texts that serve two purposes at once, which makes figures flatter."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from headport.errors import UsageError

__all__ = ["refuse_shared_texts"]


def refuse_shared_texts(
    texts: Sequence[Path], others: Sequence[Path], options: tuple[str, str], why: str
) -> None:
    """Refuse a text that is given twice, or for both of two options, also under another name.

    Args:
        texts: Of the first option.
        others: Of the second one.
        options: Both, as they are written.
        why: What figures on such a text would be, and what to do.

    Raises:
        UsageError: If there is one, or a file cannot be read.
    """
    first, second = (
        _by_content(files, option) for files, option in zip((texts, others), options, strict=True)
    )
    for content, file in first.items():
        if content in second:
            raise UsageError(
                f"{file} is both {options[0]} and {options[1]} ({second[content]}); {why}"
            )


def _by_content(files: Sequence[Path], option: str) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for file in files:
        content = _content(file)
        if content in found:
            raise UsageError(
                f"{file} is {option} twice ({found[content]}), and figures would count it twice; "
                "leave one out"
            )
        found[content] = file
    return found


def _content(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes().strip()).hexdigest()
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from error
