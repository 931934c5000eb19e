"""Units cut further, where a byte-level tokenizer provably cuts or never merges.

Two sorts of cuts, with which a rare unit becomes pieces that mostly were seen before:

1. Between ASCII letters, digits and signs, where no match of the pre-tokenizer's regular expression
   reaches over. An apostrophe stays with what is around it, because `'s` is a match.
2. Between two Han characters, which are letters of one match, where no token holds the last byte of
   the one and the first of the other: merges make tokens only, so none reaches over, and the order
   of merges on one side does not depend on the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["ANY_CLASS", "BEFORE_SIGN", "Needles", "PieceCutter", "spelled_bytes"]

_LETTER, _DIGIT, _SIGN = r"[A-Za-z]", r"[0-9]", r"[!-&(-/:-@\[-`{-~]"


def _between(*pairs: tuple[str, str]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?<={left})(?={right})" for left, right in pairs))


_COMMON = (
    (_LETTER, _DIGIT),
    (_DIGIT, _LETTER),
    (_LETTER, _SIGN),
    (_DIGIT, _SIGN),
    (_SIGN, _DIGIT),
)
BEFORE_SIGN = _between(*_COMMON)  # a sign may begin a match of letters
ANY_CLASS = _between(*_COMMON, (_SIGN, _LETTER))

_HAN_RUN = re.compile("[\u4e00-\u9fff]{2,}")
_HAN_BYTES = 3


class Needles:
    """Strings that are looked for, grouped by how they begin: most texts hold no beginning."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(texts)
        self._groups: dict[str, list[str]] = {}
        for text in self.texts:
            self._groups.setdefault(text[:2], []).append(text)

    def is_in(self, text: str) -> bool:
        """Whether a text holds one of them."""
        return any(
            beginning in text and any(each in text for each in group)
            for beginning, group in self._groups.items()
        )


class PieceCutter:
    """Cuts units of a byte-level BPE tokenizer into pieces.

    Args:
        boundaries: `ANY_CLASS` or `BEFORE_SIGN`.
        added: Added tokens; a unit that holds one is left whole.
        tokens: The bytes of every token that merges can make; empty: Han characters stay together.
    """

    def __init__(
        self, boundaries: re.Pattern[str], added: Iterable[str], tokens: Iterable[bytes] = ()
    ) -> None:
        self._split = boundaries.split
        self._added = Needles(added)
        # What tokens hold on both sides of a place where a character begins.
        self._joints = {joint for token in tokens for joint in _joints(token)}
        self._cuts_han = bool(self._joints)
        self._joined: dict[str, bool] = {}

    def cut(self, unit: str) -> list[str]:
        """The pieces of a unit, in order."""
        if self._added.is_in(unit):
            return [unit]
        pieces = self._split(unit)
        if not self._cuts_han or unit.isascii():
            return pieces
        return [part for piece in pieces for part in self._cut_han(piece)]

    def _cut_han(self, piece: str) -> list[str]:
        parts, start = [], 0
        for run in _HAN_RUN.finditer(piece):
            for place in range(run.start() + 1, run.end()):
                if not self._is_joined(piece[place - 1 : place + 1]):
                    parts.append(piece[start:place])
                    start = place
        parts.append(piece[start:])
        return parts

    def _is_joined(self, pair: str) -> bool:
        found = self._joined.get(pair)
        if found is None:
            left, right = pair[0].encode(), pair[1].encode()
            found = any(
                (left[-n:], right[:m]) in self._joints
                for n in range(1, _HAN_BYTES + 1)
                for m in range(1, _HAN_BYTES + 1)
            )
            self._joined[pair] = found
        return found


def _joints(token: bytes) -> Iterable[tuple[bytes, bytes]]:
    """What stands before and behind each beginning of a character inside a token's bytes."""
    begins = [n for n in range(len(token)) if token[n] & 0xC0 != 0x80]
    for place in begins:
        if place == 0:
            continue
        start = max((n for n in begins if n < place), default=0)
        end = min((n for n in begins if n > place), default=len(token))
        yield token[start:place][-_HAN_BYTES:], token[place:end][:_HAN_BYTES]


def _byte_letters() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies (Radford et al. 2019)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = (byte for byte in range(256) if byte not in shown)
    return {chr(b): b for b in shown} | {chr(256 + n): b for n, b in enumerate(hidden)}


_BYTES = _byte_letters()


def spelled_bytes(token: str) -> bytes:
    """The bytes of a token of a byte-level vocabulary; none of one that is spelled otherwise."""
    if all(letter in _BYTES for letter in token):
        return bytes(_BYTES[letter] for letter in token)
    return b""
