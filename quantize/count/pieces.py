"""Units cut further, where a byte-level tokenizer provably cuts or never merges.

Two sorts of cuts, with which a rare unit becomes pieces that mostly were seen before:

1. Between letters, digits and signs (ASCII, Han, Chinese punctuation), where no match of the
   pre-tokenizer's regular expression reaches over. An apostrophe stays with what is around it,
   because `'s` is a match.
2. Between two Han characters, which are letters of one match, where no token holds the last byte of
   the one and the first of the other: merges make tokens only, so none reaches over, and the order
   of merges on one side does not depend on the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from operator import add

__all__ = [
    "ANY_CLASS",
    "BEFORE_SIGN",
    "Needles",
    "PieceCutter",
    "spaced_words_of",
    "spelled_bytes",
    "word_of",
]

# Characters whose class is the same in every version of Unicode.
_HAN = "\u4e00-\u9fa5"
_PUNCTUATION = "\u3001\u3002\u300a-\u300f\uff01\uff08\uff09\uff0c\uff1a\uff1b\uff1f"
_LETTER, _DIGIT = f"A-Za-z{_HAN}", "0-9"
_SIGN = rf"!-&(-/:-@\[-`{{-~{_PUNCTUATION}"
_OTHER = f"[^{_LETTER}{_DIGIT}{_SIGN}]"


def _runs(*kinds: str) -> re.Pattern[str]:
    """Cuts where one run follows another; any other character holds both its sides together."""
    run = f"(?:{'|'.join(kinds)})"
    return re.compile(f"{_OTHER}*{run}(?:{_OTHER}+{run}?)*|{_OTHER}+")


ANY_CLASS = _runs(f"[{_LETTER}]+", f"[{_DIGIT}]+", f"[{_SIGN}]+")
# A sign may begin a match of letters.
BEFORE_SIGN = _runs(f"[{_SIGN}]*[{_LETTER}]+", f"[{_DIGIT}]+", f"[{_SIGN}]+")
# One match of each of the regular expressions, alone.
_WORD = re.compile(f" ?(?:[{_LETTER}]+|[{_SIGN}]+)")
# Of GPT-2's: white space but its last character is a match, and that one goes with what follows if
# it is a space; else it is a match as well.
_SPACED_WORD = re.compile(rf"([ \t\n\r\f\v]+)([{_LETTER}]+|[{_SIGN}]+)")

_HAN_RUN = re.compile(f"[{_HAN}]{{2,}}")
_HAN_BYTES = 3
_REMEMBERED_PAIRS = 500_000


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
        words: Which pieces are known to be one match, or some: by `word_of`, `spaced_words_of`.
    """

    def __init__(
        self,
        boundaries: re.Pattern[str],
        added: Iterable[str],
        tokens: Iterable[bytes] = (),
        words: Callable[[str], list[str]] | None = None,
    ) -> None:
        self._words = words
        self._split = boundaries.findall
        self._added = Needles(added)
        # What tokens hold on both sides of a place where a character begins.
        joints = {joint for token in tokens for joint in _joints(token)}
        self._is_joined = _Joined(joints) if joints else None

    def cut(self, unit: str) -> list[str]:
        """The pieces of a unit, in order."""
        if self._added.is_in(unit):
            return [unit]
        pieces = self._split(unit)
        if self._is_joined is None or unit.isascii():
            return pieces
        return [part for piece in pieces for part in _cut_han(piece, self._is_joined)]

    def words(self, piece: str) -> list[str]:
        """What the model is given of a piece, where the pre-tokenizer's cuts are known; or none."""
        if self._words is None or self._added.is_in(piece):
            return []
        found = self._words(piece)
        return [word.encode().decode("latin-1").translate(_LETTERS) for word in found]


def word_of(piece: str) -> list[str]:
    """The piece, if it is one match of each of the regular expressions."""
    return [piece] if _WORD.fullmatch(piece) else []


def spaced_words_of(piece: str) -> list[str]:
    """The matches of GPT-2's regular expression, if these are a word behind white space."""
    if _WORD.fullmatch(piece):
        return [piece]
    found = _SPACED_WORD.fullmatch(piece)
    if found is None:
        return []
    spaces, word = found.groups()
    last = [f" {word}"] if spaces[-1] == " " else [spaces[-1], word]
    return [spaces[:-1], *last] if len(spaces) > 1 else last


class _Joined(dict[str, bool]):
    """Two Han characters → whether a token holds the end of one and the beginning of the other."""

    def __init__(self, joints: set[tuple[bytes, bytes]]) -> None:
        super().__init__()
        self._joints = joints
        self._ends = {(left[-1], right[0]) for left, right in joints}

    def __missing__(self, pair: str) -> bool:
        data = pair.encode()  # three bytes each
        found = False
        if (data[2], data[3]) in self._ends:
            found = any(
                (data[n:3], data[3:m]) in self._joints for n in (0, 1, 2) for m in (4, 5, 6)
            )
        if len(self) >= _REMEMBERED_PAIRS:
            self.clear()
        self[pair] = found
        return found


def _cut_han(piece: str, is_joined: _Joined) -> list[str]:
    parts, start = [], 0
    for run in _HAN_RUN.finditer(piece):
        text, first = run.group(), run.start()
        joined = list(map(is_joined.__getitem__, map(add, text, text[1:])))
        if True not in joined:
            parts.append(piece[start : first + 1])
            parts.extend(text[1:-1])
            start = run.end() - 1
            continue
        for place, stays in enumerate(joined, first + 1):
            if not stays:
                parts.append(piece[start:place])
                start = place
    parts.append(piece[start:])
    return parts


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
_LETTERS = {byte: letter for letter, byte in _BYTES.items()}


def spelled_bytes(token: str) -> bytes:
    """The bytes of a token of a byte-level vocabulary; none of one that is spelled otherwise."""
    if all(letter in _BYTES for letter in token):
        return bytes(_BYTES[letter] for letter in token)
    return b""
