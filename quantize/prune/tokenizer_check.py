"""The check of a rewritten tokenizer, as it lies on disk, against the one it was made from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from headport.errors import ParityError
from headport.quantize.prune.tokens import TOKENIZER, TokenTable

__all__ = ["TokenizerCheck", "check_rewritten"]

Int64 = npt.NDArray[np.int64]

_TOKENS = 1 << 15  # whose own texts are looked at
_TEXTS = (
    "The head is the last matrix of a language model.",
    "def add(a, b):\n\treturn a + b  # naïve café\r\n\n",
    "中文與日本語、한국어, العربية, עברית, हिन्दी, ไทย, ქართული, Ελληνικά, кириллица",
    "emoji 🙂🏽👩‍👩‍👧‍👦🏴󠁧󠁢󠁳󠁣󠁴󠁿 and 𝔘𝔫𝔦𝔠𝔬𝔡𝔢, 12345.67e-8",
    "\x00\x01\x1b[0m\x7f\u0085\u00a0\u200b\u2028\ufeff\ufffd\U0010ffff",
    "  leading,   inner  and trailing   ",
    "",
)


@dataclass(frozen=True)
class TokenizerCheck:
    """How texts are split afterwards. Each reads back as before, with ids below K."""

    texts: int  # compared
    same: int  # all their tokens are kept: split as before
    longer: int  # more tokens than before
    shorter: int  # fewer: what is left can be merged further than what was there


def check_rewritten(before: TokenTable, folder: Path, kept: Int64) -> TokenizerCheck:
    """Compare both tokenizers on fixed texts of many scripts and on the texts of their own tokens.

    Args:
        before: The tokenizer before.
        folder: The written bundle.
        kept: Ids that stayed, [K].

    Raises:
        ParityError: If the written one numbers its tokens otherwise than the weights' rows, gives
            an id that has no row, reads back another text, or splits a text of kept tokens
            otherwise than before.
    """
    after = Tokenizer.from_file(str(folder / TOKENIZER))
    after.no_truncation()
    after.no_padding()
    numbers = {int(old): new for new, old in enumerate(kept)}
    expected = {before.pieces[old]: new for old, new in numbers.items() if old in before.pieces}
    found: dict[str, int] = after.get_vocab(with_added_tokens=True)
    if found != expected:
        wrong = sorted({token for token, _ in found.items() ^ expected.items()})
        raise ParityError(
            f"the rewritten tokenizer numbers {len(wrong)} tokens otherwise than the rows of the "
            f"weights, such as {wrong[0]!r}; use --mode output"
        )
    same = longer = shorter = count = 0
    for text in (*_TEXTS, *_token_texts(before)):
        old = before.inner.encode(text, add_special_tokens=False).ids
        new = after.encode(text, add_special_tokens=False).ids
        _check_text(text, old, new, numbers)
        _check_reading(text, before.inner, old, after, new)
        count += 1
        same += all(i in numbers for i in old)
        longer += len(new) > len(old)
        shorter += len(new) < len(old)
    return TokenizerCheck(texts=count, same=same, longer=longer, shorter=shorter)


def _token_texts(before: TokenTable) -> Iterator[str]:
    ids = sorted(before.pieces)
    for token_id in ids[:: max(1, len(ids) // _TOKENS)]:
        yield before.inner.decode([token_id], skip_special_tokens=False)


def _check_reading(
    text: str, before: Tokenizer, old: list[int], after: Tokenizer, new: list[int]
) -> None:
    read = before.decode(old, skip_special_tokens=False)
    again = after.decode(new, skip_special_tokens=False)
    if read != again:
        raise ParityError(f"{text!r} reads back as {again!r}, {read!r} expected")


def _check_text(text: str, old: list[int], new: list[int], numbers: dict[int, int]) -> None:
    if max(new, default=0) >= len(numbers):
        raise ParityError(f"{text!r} gets the id {max(new)}, ids below {len(numbers)} expected")
    kept = [numbers.get(i) for i in old]
    if None not in kept and kept != new:
        raise ParityError(
            f"{text!r}, of which every token is kept, is split into {new}, {kept} expected"
        )
