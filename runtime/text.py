"""Text ↔ token ids with the bundle's `tokenizer.json`, and text that grows token by token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer

from headport.bundle import Bundle
from headport.errors import BundleError, PromptError

__all__ = ["TextStream", "Tokens"]

_REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character (yet)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Decoders whose earlier text never changes when tokens are added, once what `_definite` holds
# back is held back. With any other decoder a stream gives its text at the end.
_STREAMABLE = frozenset(
    {"ByteLevel", "ByteFallback", "Metaspace", "Fuse", "Strip", "Replace", "BPEDecoder", "Sequence"}
)


class Tokens:
    """The bundle's tokenizer.

    Raises:
        BundleError: If `tokenizer.json` is missing or cannot be read.
    """

    def __init__(self, bundle: Bundle) -> None:
        path = bundle.path / "tokenizer.json"
        try:
            source = path.read_text(encoding="utf-8")
            self._inner = Tokenizer.from_str(source)
        except Exception as error:  # tokenizers raises plain Exception for what it cannot parse
            raise BundleError(f"{path}: no usable tokenizer ({error})") from error
        # Settings that serve the training of encoders; here they would cut or pad prompts.
        self._inner.no_truncation()
        self._inner.no_padding()
        self.config: dict[str, Any] = _read_config(bundle)
        self.special_tokens = _special_tokens(self.config)
        decoders = set(_decoder_types(json.loads(source).get("decoder")))
        self.streamable = decoders <= _STREAMABLE
        self.byte_ids: frozenset[int] = frozenset()
        if "ByteFallback" in decoders:
            vocabulary = self._inner.get_vocab(with_added_tokens=True)
            self.byte_ids = frozenset(i for t, i in vocabulary.items() if _BYTE_TOKEN.fullmatch(t))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer itself adds.

        Raises:
            PromptError: If it is no text, or no Unicode: a half of a surrogate pair, which is what
                a byte that is not UTF-8 becomes on a command line.
        """
        found = self._encode(text, add_special_tokens)
        ids: list[int] = found.ids
        return ids

    def encode_with_ends(
        self, text: str, *, add_special_tokens: bool = True
    ) -> tuple[list[int], list[int]]:
        """Ids as `encode` gives them, and for each the character of the text where it ends.

        A special token that the tokenizer adds has no text and ends at 0. Errors as `encode`.
        """
        found = self._encode(text, add_special_tokens)
        return found.ids, [end for _, end in found.offsets]

    def _encode(self, text: str, add_special_tokens: bool) -> Any:
        try:
            return self._inner.encode(text, add_special_tokens=add_special_tokens)
        except TypeError as error:
            at = _LONE_SURROGATE.search(text) if isinstance(text, str) else None
            what = f"{at.group()!r} at character {at.start()}" if at else type(text).__name__
            raise PromptError(
                f"a text of whole Unicode characters was expected, {what} was found; "
                "give it as UTF-8"
            ) from error

    def piece(self, token_id: int) -> str:
        """The token's own spelling in the vocabulary, such as `Ġthe`."""
        found: str | None = self._inner.id_to_token(token_id)
        return f"<no token {token_id}>" if found is None else found

    def id_of(self, piece: str) -> int | None:
        """The id of a token by its own spelling; None if there is no such token."""
        found: int | None = self._inner.token_to_id(piece)
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=True)
        return text

    def leading_ids(self) -> list[int]:
        """The ids that the tokenizer puts before every text, such as a BOS."""
        plain = self.encode("a", add_special_tokens=False)
        full = self.encode("a")
        starts = range(len(full) - len(plain) + 1)
        return next((full[:n] for n in starts if full[n : n + len(plain)] == plain), [])


class TextStream:
    """Text of a growing list of token ids; the parts joined equal the decoded whole.

    A part never ends inside a character, nor inside what may become a stop string. With a stop
    string in it, the text ends before that.

    Args:
        tokens: The tokenizer.
        stop: Strings that end the text, none of them empty.
    """

    def __init__(self, tokens: Tokens, stop: Iterable[str] = ()) -> None:
        self._tokens = tokens
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self.text = ""  # given out so far
        self.stopped = False

    def push(self, token_id: int, *, look: bool = True) -> str:
        """Add a token; returns the text that became definite, or none of it without `look`."""
        self._ids.append(token_id)
        return self._give(self._definite(), final=False) if look else ""

    def finish(self) -> str:
        """No token follows; returns the rest of the text."""
        return self._give(self._tokens.decode(self._ids), final=True)

    def _definite(self) -> str:
        if not self._tokens.streamable:
            return ""
        end = len(self._ids)
        # A run of byte tokens is decoded as a whole: one bad byte changes all of it.
        while end and self._ids[end - 1] in self._tokens.byte_ids:
            end -= 1
        return self._tokens.decode(self._ids[:end]).removesuffix(_REPLACEMENT)

    def _give(self, text: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        found = [at for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            self.stopped = True
            text = text[: min(found)]
        elif not final:
            text = text[: len(text) - _pending(text, self._stop)]
        if len(text) <= len(self.text):
            return ""
        part = text[len(self.text) :]
        self.text = text
        return part


def _pending(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    sizes = (n for s in stop for n in range(1, len(s)) if text.endswith(s[:n]))
    return max(sizes, default=0)


def _read_config(bundle: Bundle) -> dict[str, Any]:
    path = bundle.path / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BundleError(f"{path}: not JSON ({error})") from error
    return config if isinstance(config, dict) else {}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and the like; a token is a string, or an object with its `content`."""
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _decoder_types(decoder: dict[str, Any] | None) -> Iterable[str]:
    if decoder is None:
        yield "none"  # tokens joined with spaces
        return
    yield str(decoder.get("type"))
    for part in decoder.get("decoders", ()):
        yield from _decoder_types(part)
