"""A bundle's tokenizer as data: pieces by id, and what its model is made of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from headport.bundle import Bundle
from headport.errors import BundleError

__all__ = ["TOKENIZER", "TokenTable", "component_types", "read_tokens"]

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class TokenTable:
    """What `tokenizer.json` says, in the form in which the tokenizers library writes it."""

    document: dict[str, Any]
    sha256: str  # of the file's bytes
    inner: Tokenizer

    @property
    def model(self) -> dict[str, Any]:
        """The part that splits words: vocabulary, merges, unknown token."""
        found: dict[str, Any] = self.document["model"]
        return found

    @property
    def kind(self) -> str:
        """`BPE`, `Unigram`, `WordPiece` or `WordLevel`."""
        return str(self.model["type"])

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Pieces that the model itself knows → id."""
        found = self.model["vocab"]
        if isinstance(found, list):  # Unigram: [piece, score], the place is the id
            return {piece: n for n, (piece, _) in enumerate(found)}
        return dict(found)

    @cached_property
    def added(self) -> dict[int, bool]:
        """Ids of tokens that are found in a text before it is split → whether they are special."""
        return {token["id"]: token["special"] for token in self.document["added_tokens"]}

    @cached_property
    def pieces(self) -> dict[int, str]:
        """Every id that stands for something → its spelling."""
        found = {n: piece for piece, n in self.vocabulary.items()}
        return found | {token["id"]: token["content"] for token in self.document["added_tokens"]}

    @property
    def byte_level(self) -> bool:
        """Texts become characters that each stand for one byte."""
        return "ByteLevel" in {
            kind
            for part in ("normalizer", "pre_tokenizer", "decoder")
            for kind in component_types(self.document.get(part))
        }

    @property
    def byte_fallback(self) -> bool:
        """A character that has no piece is spelled with tokens such as `<0xE2>`."""
        return bool(self.model.get("byte_fallback"))

    @classmethod
    def parse(cls, source: bytes) -> TokenTable:
        """Read the contents of a `tokenizer.json`; plain `Exception` where that cannot be done."""
        inner = Tokenizer.from_str(source.decode())
        document = json.loads(inner.to_str())
        # Settings that serve the training of encoders.
        inner.no_truncation()
        inner.no_padding()
        return cls(document, hashlib.sha256(source).hexdigest(), inner)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without the tokens that a post-processor adds."""
        ids: list[int] = self.inner.encode(text, add_special_tokens=False).ids
        return ids


def read_tokens(bundle: Bundle) -> TokenTable:
    """Read a bundle's tokenizer.

    Raises:
        BundleError: If `tokenizer.json` is missing or cannot be read.
    """
    path = bundle.path / TOKENIZER
    try:
        return TokenTable.parse(path.read_bytes())
    except Exception as error:  # tokenizers raises plain Exception for what it cannot parse
        raise BundleError(f"{path}: no usable tokenizer ({error})") from error


def component_types(part: Any) -> Iterator[str]:
    """The types named in a normalizer, pre-tokenizer, post-processor or decoder, nested or not."""
    if isinstance(part, dict):
        if isinstance(part.get("type"), str):
            yield part["type"]
        for value in part.values():
            yield from component_types(value)
    elif isinstance(part, list):
        for value in part:
            yield from component_types(value)
