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
    """Refuse a text that is given for both of two options, also under another name.

    Args:
        texts: Of the first option.
        others: Of the second one.
        options: Both, as they are written.
        why: What figures on such a text would be, and what to do.

    Raises:
        UsageError: If there is one, or a file cannot be read.
    """
    seen = {_content(file): file for file in others}
    for file in texts:
        if (same := seen.get(_content(file))) is not None:
            raise UsageError(f"{file} is both {options[0]} and {options[1]} ({same}); {why}")


def _content(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes().strip()).hexdigest()
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from error
