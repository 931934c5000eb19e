"""Files that name tokens: `--keep` and `--drop`.

One entry per line, UTF-8: a token as the vocabulary spells it (`Ġthe`, `<|im_end|>`), `id:` and a
number, or `text:` and a text, which stands for every token it is split into. Empty lines count for
nothing.
"""

from __future__ import annotations

from pathlib import Path

from headport.errors import UsageError
from headport.quantize.prune.tokens import TokenTable

__all__ = ["read_token_file"]

_SHOWN = 50  # faults named in a message


def read_token_file(path: Path, table: TokenTable, size: int, flag: str) -> set[int]:
    """Ids of the tokens that a file names.

    Args:
        path: The file.
        table: The tokenizer.
        size: V, ids from 0 to V - 1.
        flag: The option, for messages.

    Raises:
        UsageError: If the file cannot be read, or naming every token that is unknown and every id
            that is out of range.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {path}: a UTF-8 text was expected ({error})") from error
    known = {piece: token_id for token_id, piece in table.pieces.items()}
    found: set[int] = set()
    faults = []
    for number, line in enumerate(lines, 1):
        entry = line.removesuffix("\r")
        if not entry:
            continue
        ids = _ids(entry, known, table)
        if ids is None:
            faults.append(f"line {number}: no token {entry!r}")
        elif outside := [i for i in ids if not 0 <= i < size]:
            named = ", ".join(map(str, outside))
            faults.append(f"line {number}: ids from 0 to {size - 1} expected, {named} found")
        else:
            found |= ids
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise UsageError(f"{flag} {path}: {'; '.join(faults[:_SHOWN])}{more}")
    return found


def _ids(entry: str, known: dict[str, int], table: TokenTable) -> set[int] | None:
    if entry in known:
        return {known[entry]}
    kind, _, rest = entry.partition(":")
    if kind == "text" and rest:
        return set(table.encode(rest))
    if kind == "id":
        try:
            return {int(rest)}
        except ValueError:
            return None
    return None
