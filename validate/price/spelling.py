"""Bits per byte before and after: the same text, predicted in the tokens that each side has.

A removed token's text is spelled with kept ones; how likely that spelling is, step by step, is what
the pruned bundle makes of the text. Bits over UTF-8 bytes can be compared across vocabularies,
perplexities per token cannot.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headport.progress import track
from headport.validate.candidate import Candidate
from headport.validate.documents import Document, cut_document, windows_of
from headport.validate.price.kept import Kept, KeptTokenizer
from headport.validate.price.material import Priced
from headport.validate.price.measure import ALL
from headport.validate.price.report import Longer, Spelling

__all__ = ["Spelled", "longest", "spell", "spelling"]

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

_LONGEST = 8


@dataclass(frozen=True)
class Spelled:
    """A document in both spellings and what each costs."""

    priced: Priced
    after: Document  # in kept tokens, original ids
    nats_before: float
    nats_after: float


def spell(
    documents: Sequence[Priced],
    before: Candidate,
    pruned: Candidate,
    tokenizer: KeptTokenizer,
    kept: Kept,
    *,
    window: int,
) -> list[Spelled]:
    """Predict documents with the bundle before, and their spelling with the pruned one.

    Args:
        documents: Texts.
        before: The bundle before pruning.
        pruned: The bundle after.
        tokenizer: Spells with kept tokens.
        kept: What was kept.
        window: Tokens fed at once.
    """
    columns = np.arange(len(kept.is_kept))
    found = []
    for priced in track(documents, "spell", len(documents), "document"):
        document = priced.document
        after = _respelled(priced, tokenizer)
        nats = _nats(document, before, columns, columns, window)
        fed = kept.column if kept.renumbered else columns
        found.append(Spelled(priced, after, nats, _nats(after, pruned, fed, kept.column, window)))
    return found


def _respelled(priced: Priced, tokenizer: KeptTokenizer) -> Document:
    content = priced.document.content
    after = cut_document(priced.document.index, content, tokenizer.encode(content), 0)
    assert after is not None, "a text has no fewer kept tokens than it had tokens"
    return after


def _nats(
    document: Document, candidate: Candidate, fed: Int64, columns: Int64, window: int
) -> float:
    """Negative log-likelihood of a document's tokens but the first, in nats."""
    nats = 0.0
    for part in windows_of(document, window):
        [states] = candidate.hidden_states([fed[part.token_ids]])
        for start in range(0, len(states), candidate.block_rows):
            rows = slice(start, start + candidate.block_rows)
            logits = candidate.logits(states[rows]).astype(np.float64)
            top = logits.max(axis=1)
            own = logits[np.arange(len(logits)), columns[part.targets[rows]]]
            nats += float((np.log(np.exp(logits - top[:, None]).sum(axis=1)) + top - own).sum())
    return nats


def spelling(
    spelled: Sequence[Spelled], nats_reference: Float64, names: Sequence[str]
) -> tuple[Spelling, ...]:
    """Figures of all documents and of each text's.

    Args:
        spelled: Documents.
        nats_reference: Of each text by the reference, [texts].
        names: Of the texts.
    """
    parts = [(ALL, list(spelled), float(nats_reference.sum()))]
    for index, name in enumerate(names):
        own = [s for s in spelled if s.priced.text == index]
        parts.append((f"text {name}", own, float(nats_reference[index])))
    return tuple(_figures(name, own, nats) for name, own, nats in parts if own)


def _figures(name: str, spelled: Sequence[Spelled], nats_reference: float) -> Spelling:
    size = sum(s.priced.document.bytes_scored for s in spelled)
    size_after = sum(s.after.bytes_scored for s in spelled)
    counts = [(len(s.priced.document.token_ids), len(s.after.token_ids)) for s in spelled]
    return Spelling(
        name=name,
        bytes=size,
        bits_per_byte_reference=_bits(nats_reference, size),
        bits_per_byte_before=_bits(sum(s.nats_before for s in spelled), size),
        bits_per_byte_after=_bits(sum(s.nats_after for s in spelled), size_after),
        tokens_before=sum(before for before, _ in counts),
        tokens_after=sum(after for _, after in counts),
        documents=len(spelled),
        longer_documents=sum(after > before for before, after in counts),
    )


def _bits(nats: float, size: int) -> float:
    return nats / math.log(2) / max(1, size)


def longest(spelled: Sequence[Spelled], kept: Kept, candidate: Candidate) -> tuple[Longer, ...]:
    """The documents that grew most, as a share of their tokens."""

    def growth(each: Spelled) -> float:
        return len(each.after.token_ids) / len(each.priced.document.token_ids)

    longer = [s for s in spelled if growth(s) > 1]
    return tuple(
        Longer(
            text=s.priced.name,
            document=s.priced.document.index,
            tokens_before=len(s.priced.document.token_ids),
            tokens_after=len(s.after.token_ids),
            removed=_removed_pieces(s.priced.document.token_ids, kept, candidate),
        )
        for s in sorted(longer, key=growth, reverse=True)[:_LONGEST]
    )


def _removed_pieces(token_ids: Int64, kept: Kept, candidate: Candidate) -> tuple[str, ...]:
    gone = Counter(token_ids[~kept.is_kept[token_ids]].tolist())
    return tuple(candidate.tokens.piece(token_id) for token_id, _ in gone.most_common(6))
