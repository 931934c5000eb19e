"""What a pruned bundle kept, in the ids of the bundle that it was made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from headport.bundle import Bundle
from headport.errors import QuantizeError, UsageError
from headport.quantize.prune.rewrite import rewrite_tokenizer
from headport.quantize.prune.tokens import read_tokens
from headport.validate.documents import Tokens
from headport.vocabulary_map import read_map

__all__ = ["Kept", "KeptTokenizer", "kept_tokenizer", "read_kept"]

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Kept:
    """Kept ids and how the pruned bundle names them."""

    ids: Int64  # [K], original id of each column of the pruned head
    is_kept: Bool  # [V]
    column: Int64  # [V], column of each original id; -1 where it is gone
    renumbered: bool  # the pruned bundle is fed its own ids, which are its columns
    by_reason: dict[str, int]
    notes: tuple[str, ...]

    def fed(self, token_ids: Int64) -> Int64:
        """Kept original ids as the pruned bundle's input."""
        return self.column[token_ids] if self.renumbered else token_ids


def read_kept(bundle: Bundle, pruned: Bundle) -> Kept:
    """Which of a bundle's ids a pruned one kept.

    Raises:
        UsageError: If the second was not made from the first by pruning.
    """
    vocabulary = pruned.manifest.vocabulary
    size = bundle.manifest.heads["lm"].vocab_size
    if bundle.manifest.vocabulary.map or bundle.manifest.vocabulary.checkpoint_ids:
        raise UsageError(
            f"{bundle.path}: the bundle before all pruning was expected, this one is pruned itself"
        )
    if pruned.manifest.provenance.sha256 != bundle.manifest.provenance.sha256:
        raise UsageError(
            f"--pruned {pruned.path}: a bundle made from the same checkpoint as {bundle.path} was "
            "expected, it is another's"
        )
    ids = _column_ids(pruned)
    outside = ids[(ids < 0) | (ids >= size)]
    if len(outside):
        raise UsageError(
            f"{pruned.path}: ids below {size} expected in its map, {outside[:5].tolist()} found"
        )
    column = np.full(size, -1, np.int64)
    column[ids] = np.arange(len(ids))
    report = _last_report(pruned)
    return Kept(
        ids=ids,
        is_kept=column >= 0,
        column=column,
        renumbered=vocabulary.checkpoint_ids is not None,
        by_reason=dict(report.get("by_reason", {})),
        notes=tuple(report.get("notes", ())),
    )


def _column_ids(pruned: Bundle) -> Int64:
    vocabulary = pruned.manifest.vocabulary
    kept = read_map(pruned)
    ids = np.arange(pruned.manifest.heads["lm"].vocab_size) if kept is None else kept
    if vocabulary.checkpoint_ids is not None:
        own = np.load(pruned.file(vocabulary.checkpoint_ids), allow_pickle=False)
        ids = own.astype(np.int64)[ids]
    return ids


def _last_report(pruned: Bundle) -> dict[str, Any]:
    stages = [s.report for s in pruned.manifest.provenance.stages if s.stage == "prune"]
    if not stages:
        raise UsageError(
            f"--pruned {pruned.path}: a bundle that `headport prune` wrote was expected; its "
            "record names no such stage"
        )
    return stages[-1]


class KeptTokenizer:
    """Spells texts with kept tokens only, as the pruned bundle's own tokenizer does or would.

    Args:
        bundle: The bundle before pruning.
        pruned: The bundle after.
        kept: What it kept.

    Raises:
        QuantizeError: If the tokenizer is of a kind that cannot be rewritten.
    """

    def __init__(self, bundle: Bundle, pruned: Bundle, kept: Kept) -> None:
        if kept.renumbered:
            source = (pruned.path / "tokenizer.json").read_text(encoding="utf-8")
            self._ids = kept.ids
        else:
            self._ids = np.sort(kept.ids)  # what the rewritten tokenizer numbers by
            source = rewrite_tokenizer(read_tokens(bundle), self._ids)
        self._inner = Tokenizer.from_str(source)
        self._inner.no_truncation()
        self._inner.no_padding()

    def encode(self, text: str) -> Tokens:
        """Original ids of a text in kept tokens, and where each ends."""
        found = self._inner.encode(text)
        ends: Sequence[int] = [end for _, end in found.offsets]
        return Tokens(self._ids[np.array(found.ids, np.int64)], np.array(ends, np.int64))


def kept_tokenizer(bundle: Bundle, pruned: Bundle, kept: Kept) -> KeptTokenizer | str:
    """A `KeptTokenizer`, or in words why there is none."""
    try:
        return KeptTokenizer(bundle, pruned, kept)
    except QuantizeError as error:
        return str(error)
