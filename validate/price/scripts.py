"""Which script a piece of text is written in, by the names of its characters."""

from __future__ import annotations

import unicodedata
from functools import lru_cache

__all__ = ["script_of"]

# First word of a character's name → script, where it is not the word itself.
_SCRIPTS = {
    "CJK": "Han",
    "IDEOGRAPHIC": "Han",
    "KATAKANA-HIRAGANA": "Katakana",
    "MATHEMATICAL": "symbols",
    "MODIFIER": "symbols",
    "FEMININE": "Latin",
    "MASCULINE": "Latin",
}


def script_of(text: str) -> str:
    """The script of the first letter; `digits`, `space` or `symbols` where there is none."""
    for character in text:
        if character.isalpha():
            return _script(character)
    if any(character.isdigit() for character in text):
        return "digits"
    return "space" if not text.strip() else "symbols"


@lru_cache(1 << 14)
def _script(letter: str) -> str:
    name = unicodedata.name(letter, "UNKNOWN")
    word = name.removeprefix("HALFWIDTH ").removeprefix("FULLWIDTH ").split()[0]
    return _SCRIPTS.get(word, word.capitalize())
