"""What a smaller vocabulary must hold whatever a corpus says, and what each token brings along.

Always kept, each for a reason that the report names: special and added tokens; what spells any
text, bytes or single characters; what the decoder turns into a space; the unknown token; what the
post-processor, the padding, the generation settings and the chat template name. A token of a BPE
model brings along the tokens on the way from its characters to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import pre_tokenizers

from headport.bundle import Bundle
from headport.errors import BundleError
from headport.quantize.prune.id_fields import ids_of
from headport.quantize.prune.merges import Merges
from headport.quantize.prune.template import template_ids
from headport.quantize.prune.tokens import TokenTable

__all__ = ["Closure", "always_kept"]


@dataclass(frozen=True)
class Closure:
    """Sets of ids that belong together in one vocabulary."""

    table: TokenTable
    size: int  # V, ids from 0 to V - 1
    always: dict[str, set[int]]  # reason → ids
    notes: tuple[str, ...]  # what was named and does not exist

    @cached_property
    def base(self) -> frozenset[int]:
        """All ids that are always kept."""
        return frozenset().union(*self.always.values())

    @cached_property
    def _merges(self) -> Merges | None:
        return Merges(self.table.model, self.table.vocabulary) if self.table.kind == "BPE" else None

    @cached_property
    def _paths(self) -> dict[int, frozenset[int]]:
        return {}

    def with_needs(self, token_id: int) -> frozenset[int]:
        """An id, and the ids without which its token could not come out of a text."""
        found = self._paths.get(token_id)
        if found is None:
            path = None
            if self._merges is not None and token_id not in self.table.added:
                piece = self.table.pieces.get(token_id)
                path = None if piece is None else self._merges.path(piece)
            found = frozenset({token_id}) | {i for i in path or () if 0 <= i < self.size}
            self._paths[token_id] = found
        return found


def always_kept(bundle: Bundle, table: TokenTable) -> Closure:
    """Collect what every vocabulary of this bundle must hold.

    Raises:
        BundleError: If a configuration file is no JSON object.
    """
    size = bundle.manifest.vocabulary.size
    always = {reason: collect(table) for reason, collect in _OF_TOKENIZER.items()}
    always["generation settings"] = ids_of(bundle.manifest.defaults) | ids_of(
        _read_json(bundle, "generation_config.json")
    )
    always["configuration"] = ids_of(_read_json(bundle, "config.json"))
    always["chat template"] = template_ids(bundle, table)
    notes = []
    for reason, ids in always.items():
        outside = sorted(i for i in ids if not 0 <= i < size)
        if outside:
            named = ", ".join(map(str, outside[:8]))
            notes.append(f"{reason}: no token has the id {named}")
        ids -= set(outside)
    return Closure(table, size, always, tuple(notes))


def _special(table: TokenTable) -> set[int]:
    return {i for i, special in table.added.items() if special}


def _added(table: TokenTable) -> set[int]:
    return {i for i, special in table.added.items() if not special}


def _bytes(table: TokenTable) -> set[int]:
    known = table.vocabulary
    names: list[str] = []
    if table.byte_level:
        names += pre_tokenizers.ByteLevel.alphabet()
    if table.byte_fallback:
        names += [f"<0x{byte:02X}>" for byte in range(256)]
    return {known[name] for name in names if name in known}


def _alphabet(table: TokenTable) -> set[int]:
    """Where no bytes stand in for it, a character that loses its piece could not be spelled."""
    symbols_of = _SYMBOLS.get(table.kind)
    if symbols_of is None or table.byte_level or table.byte_fallback:
        return set()
    spell, whole = symbols_of(table.model, table.vocabulary)
    found = set()
    for piece, token_id in table.vocabulary.items():
        if token_id in table.added:
            continue
        symbols = [table.vocabulary.get(symbol) for symbol in spell(piece)]
        found |= {symbol for symbol in symbols if symbol is not None}
        # A character without a piece of its own is known only as a part of others.
        if whole and None in symbols:
            found.add(token_id)
    return found


def _spaces(table: TokenTable) -> set[int]:
    found = {
        sign
        for part in ("normalizer", "pre_tokenizer", "decoder")
        for sign in _signs(table.document.get(part))
    }
    return {table.vocabulary[sign] for sign in found if sign in table.vocabulary}


def _signs(part: Any) -> Iterator[str]:
    # What stands for a space inside pieces: a decoder turns it back only where it is a piece.
    if isinstance(part, dict):
        if part.get("type") == "Metaspace":
            yield part["replacement"]
        if part.get("type") == "Replace":
            yield part["content"]
            if isinstance(part["pattern"].get("String"), str):
                yield part["pattern"]["String"]
        for value in part.values():
            yield from _signs(value)
    elif isinstance(part, list):
        for value in part:
            yield from _signs(value)


def _unknown(table: TokenTable) -> set[int]:
    if table.kind == "Unigram":
        unknown = table.model.get("unk_id")
        return set() if unknown is None else {unknown}
    token = table.model.get("unk_token")
    return {i for i, piece in table.pieces.items() if piece == token} if token else set()


def _lowest_score(table: TokenTable) -> set[int]:
    # An unknown character's score is measured from the lowest one.
    if table.kind != "Unigram":
        return set()
    scores = [score for _, score in table.model["vocab"]]
    return {min(range(len(scores)), key=scores.__getitem__)}


def _post_processor(table: TokenTable) -> set[int]:
    return set(_post_ids(table.document.get("post_processor")))


def _post_ids(part: Any) -> Iterator[int]:
    if isinstance(part, list):
        for each in part:
            yield from _post_ids(each)
    if not isinstance(part, dict):
        return
    for name in ("sep", "cls"):  # of BertProcessing and RobertaProcessing: [token, id]
        if isinstance(part.get(name), list):
            yield part[name][1]
    if part.get("type") == "TemplateProcessing":
        for token in part["special_tokens"].values():
            yield from token["ids"]
    yield from _post_ids(part.get("processors"))


def _padding(table: TokenTable) -> set[int]:
    padding = table.document.get("padding")
    return {padding["pad_id"]} if padding else set()


_OF_TOKENIZER: dict[str, Callable[[TokenTable], set[int]]] = {
    "special tokens": _special,
    "added tokens": _added,
    "bytes": _bytes,
    "alphabet": _alphabet,
    "signs of spaces": _spaces,
    "unknown token": _unknown,
    "lowest score": _lowest_score,
    "post-processor": _post_processor,
    "padding": _padding,
}

_Spelling = tuple[Callable[[str], list[str]], bool]


def _word_pieces(model: dict[str, Any], vocabulary: dict[str, int]) -> _Spelling:
    del vocabulary
    prefix = model["continuing_subword_prefix"]

    def spell(piece: str) -> list[str]:
        inside = piece.startswith(prefix)
        letters = piece.removeprefix(prefix)
        return [(prefix if inside or n else "") + letter for n, letter in enumerate(letters)]

    return spell, True


def _letters(model: dict[str, Any], vocabulary: dict[str, int]) -> _Spelling:
    del model, vocabulary
    return list, True


def _merge_symbols(model: dict[str, Any], vocabulary: dict[str, int]) -> _Spelling:
    # A piece that no symbols lead to never comes out, so nothing is lost with it.
    return Merges(model, vocabulary).symbols, False


_SYMBOLS: dict[str, Callable[[dict[str, Any], dict[str, int]], _Spelling]] = {
    "WordPiece": _word_pieces,
    "Unigram": _letters,
    "BPE": _merge_symbols,
}


def _read_json(bundle: Bundle, name: str) -> dict[str, Any]:
    path = bundle.path / name
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BundleError(f"{path}: not JSON ({error})") from error
    if not isinstance(found, dict):
        raise BundleError(f"{path}: a JSON object was expected, {type(found).__name__} found")
    return found
