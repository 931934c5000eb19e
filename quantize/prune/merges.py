"""Byte-pair merging, followed step by step: what has to be there before a token can come out.

A token that is the outcome of merging is reached by the same merges wherever it stands in a text:
no merge ever crosses its ends, and those inside depend on nothing outside. So the tokens on the way
from its characters to it are all it needs; a vocabulary that holds them for each of its tokens, and
every merge whose three tokens it holds, in their old order, splits a text of such tokens as before.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

__all__ = ["Merges"]

_NONE = (1 << 62, -1)


class Merges:
    """The merges of a BPE model, by the ids of their parts.

    Args:
        model: The model as `tokenizer.json` has it.
        vocabulary: Its pieces → id.
    """

    def __init__(self, model: Mapping[str, Any], vocabulary: Mapping[str, int]) -> None:
        self._vocabulary = vocabulary
        self._prefix = model.get("continuing_subword_prefix") or ""
        self._suffix = model.get("end_of_word_suffix") or ""
        self._byte_fallback = bool(model.get("byte_fallback"))
        self._ranks: dict[tuple[int, int], tuple[int, int]] = {}  # parts → (rank, outcome)
        for rank, (left, right) in enumerate(model["merges"]):
            outcome = left + right[len(self._prefix) :]
            if {left, right, outcome} <= vocabulary.keys():
                key = (vocabulary[left], vocabulary[right])
                self._ranks[key] = (rank, vocabulary[outcome])

    def outcome(self, left: str, right: str) -> int | None:
        """Id of what two pieces merge to."""
        return self._vocabulary.get(left + right[len(self._prefix) :])

    def symbols(self, piece: str) -> list[str]:
        """The single characters a word that is spelled like `piece` starts from."""
        word = piece.removesuffix(self._suffix) if self._suffix else piece
        inside = bool(self._prefix) and word.startswith(self._prefix)
        word = word.removeprefix(self._prefix) if inside else word
        found = [
            (self._prefix if inside or n else "") + character for n, character in enumerate(word)
        ]
        if found and word != piece and piece.endswith(self._suffix):
            found[-1] += self._suffix
        return found

    def path(self, piece: str) -> frozenset[int] | None:
        """All ids that occur while a piece's characters are merged, its own among them.

        Returns:
            None where merging does not end in the piece: it is then never the outcome of merging.
        """
        ids: list[int] = []
        for symbol in self.symbols(piece):
            found = self._vocabulary.get(symbol)
            ids += [found] if found is not None else self._bytes(symbol)
        seen = set(ids)
        while len(ids) > 1:
            pairs = [self._ranks.get(pair, _NONE) for pair in pairwise(ids)]
            best = min(range(len(pairs)), key=pairs.__getitem__)  # the leftmost of equal ranks
            if pairs[best] == _NONE:
                return None
            ids[best : best + 2] = [pairs[best][1]]
            seen.add(ids[best])
        return frozenset(seen) if ids == [self._vocabulary.get(piece)] else None

    def _bytes(self, symbol: str) -> list[int]:
        # -1 stands for a character that has no token; nothing merges with it.
        names = [f"<0x{byte:02X}>" for byte in symbol.encode()] if self._byte_fallback else []
        found = [self._vocabulary.get(name, -1) for name in names]
        return found or [-1]
