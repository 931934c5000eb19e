"""Documents as a price tag looks at them: whole, with the text and script of every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from headport.errors import UsageError
from headport.validate.candidate import Candidate
from headport.validate.comparison import Material
from headport.validate.documents import Document, Tokens, cut_document
from headport.validate.price.scripts import script_of

__all__ = ["Priced", "priced_documents"]


@dataclass(frozen=True)
class Priced:
    """One document; it is fed and scored to its end."""

    text: int  # index of the text
    name: str  # of the text
    document: Document
    tokens: Tokens

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """Text that each token takes up, [n]; a part of a character counts as the character."""
        content, ends = self.document.content, np.maximum.accumulate(self.tokens.ends)
        starts = np.append(0, ends[:-1])
        return tuple(
            content[start : max(end, start + 1)]
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        )

    @cached_property
    def scripts(self) -> tuple[str, ...]:
        """Script of each token, [n]."""
        return tuple(script_of(piece) for piece in self.pieces)

    def before(self, place: int, characters: int) -> str:
        """The text that leads up to token `place`."""
        end = int(np.maximum.accumulate(self.tokens.ends)[place - 1]) if place else 0
        return self.document.content[max(0, end - characters) : end]


def priced_documents(materials: Sequence[Material], tokenizer: Candidate) -> list[Priced]:
    """The documents of texts; one that was cut to fit a budget ends where it was cut.

    Raises:
        UsageError: If a document is a conversation.
    """
    found = []
    for index, material in enumerate(materials):
        for document in material.documents:
            if getattr(document, "messages", None) is not None:
                raise UsageError(
                    f"{material.text.file}: plain texts were expected, conversations found; pass "
                    'lines {"text": …}'
                )
            whole, tokens = document, tokenizer.encode(document.content)
            if document.used < len(document.token_ids):
                content = document.content[: int(tokens.ends[document.used - 1])]
                tokens = tokenizer.encode(content)
                cut = cut_document(document.index, content, tokens, 0)
                if cut is None:
                    continue
                whole = cut
            found.append(Priced(index, material.text.name, whole, tokens))
    return found
