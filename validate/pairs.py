"""Pairs of source and target: the documents of an encoder-decoder bundle.

    the encoder reads    the source
    the decoder reads    start  y1 … yn-1     and is scored on  y1 … yn

with y the target as the tokenizer encodes any text, end-of-text token included. Some models (mBART,
NLLB) were trained on targets that their tokenizer encodes in another way; both sides read these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from headport.errors import ParityError, PromptError, UsageError
from headport.validate.documents import Document, Encode, Text, Tokens, cut_document
from headport.validate.given_source import GivenSource
from headport.validate.records import Record

__all__ = [
    "Pairing",
    "check_form",
    "check_sources",
    "check_targets",
    "pair_documents",
    "with_start",
]


class Pairing(Protocol):
    """How a bundle reads sources."""

    start_token: int  # of its decoder
    takes_features: bool

    def check(self, source: GivenSource) -> None:
        """Refuse a source that the bundle cannot read; see `SourceReader`."""
        ...


def check_form(text: Text, records: Sequence[Record], pairing: Pairing | None) -> None:
    """Refuse texts for another kind of model.

    Raises:
        UsageError: If a model that reads sources is given anything but pairs, or another is.
    """
    if pairing is None:
        if any(record.is_pair for record in records):
            raise UsageError(
                f"{text.file}: pairs of source and target are for encoder-decoder bundles, this is "
                'none; give plain texts, or lines {"prompt": …, "completion": …}'
            )
        return
    field = "features" if pairing.takes_features else "source"
    wrong = next((n for n, r in enumerate(records) if getattr(r, field) is None), None)
    if not records or wrong is not None:
        found = f"record {wrong} is another" if records else "plain text found"
        raise UsageError(
            f'{text.file}: a .jsonl file of lines {{"{field}": …, "target": …}} was expected, as '
            f"the bundle answers to {'features' if pairing.takes_features else 'a text'} that its "
            f"encoder reads; {found}"
        )


def pair_documents(
    text: Text,
    encode: Encode,
    pairing: Pairing,
    budget: int,
    ignored_ids: Sequence[int] = (),
) -> Iterator[Document]:
    """Documents of pairs; each is a target behind the decoder's start token.

    Args:
        text: A file of pairs in the form that `check_form` wants.
        encode: The tokenizer.
        pairing: How sources are read.
        budget: Tokens to score, 0 for all; the last target is cut to fit.
        ignored_ids: Tokens that are fed, but not scored.

    Raises:
        UsageError: If the bundle cannot read a source.
    """
    left = budget
    for index, record in enumerate(text.records()):
        if record.weight == 0:
            continue
        source = _source(text, record, encode)
        try:
            pairing.check(source)
        except (PromptError, OSError, ValueError) as error:
            raise UsageError(f"{text.file}, pair {index}: {error}") from error
        tokens = _decoder_tokens(pairing.start_token, encode(record.content))
        document = cut_document(index, record.content, tokens, left, ignored_ids=ignored_ids)
        if document is None:
            continue
        yield replace(
            document, weight=record.weight, source=source, source_text=record.source or ""
        )
        left -= document.tokens_scored
        if budget and left <= 0:
            return


def _source(text: Text, record: Record, encode: Encode) -> GivenSource:
    if record.features is not None:
        return GivenSource(features=str((text.folder / record.features).resolve()))
    assert record.source is not None
    return GivenSource(token_ids=tuple(encode(record.source).ids.tolist()))


def with_start(start: int, target: Sequence[int]) -> tuple[int, ...]:
    """What a decoder is fed and scored on: its start token, then the target.

    A start token that the tokenizer writes itself, as that of Whisper does, is not doubled.
    """
    ids = tuple(target)
    return ids if ids[:1] == (start,) else (start, *ids)


def _decoder_tokens(start: int, target: Tokens) -> Tokens:
    ids = np.array(with_start(start, tuple(target.ids.tolist())), np.int64)
    return Tokens(ids, np.append(np.zeros(len(ids) - len(target.ids), np.int64), target.ends))


def check_targets(text: Text, documents: Sequence[Document], window: int) -> None:
    """Refuse targets that a decoder cannot be fed at once: a part of one has no start token.

    Raises:
        UsageError: Naming the first.
    """
    for document in documents:
        if document.used - 1 > window:
            raise UsageError(
                f"{text.file}, pair {document.index}: its target takes {document.used - 1} tokens, "
                f"start included, the window holds {window}; shorten it"
            )


def check_sources(
    text: Text, documents: Sequence[Document], wanted: Sequence[Sequence[int]]
) -> None:
    """Compare the ids of sources that are texts.

    Args:
        text: Where they come from.
        documents: Pairs.
        wanted: What the reference makes of each source.

    Raises:
        ParityError: Naming the first pair that differs, and where.
    """
    for document, ids in zip(documents, wanted, strict=True):
        assert document.source is not None
        found = list(document.source.token_ids)
        if found != list(ids):
            at = next((i for i, (a, b) in enumerate(zip(ids, found, strict=False)) if a != b), None)
            at = min(len(ids), len(found)) if at is None else at
            raise ParityError(
                f"{text.file}, pair {document.index}: the reference's tokenizer and the bundle's "
                f"differ at token {at} of the source ({len(ids)} and {len(found)} tokens); export "
                "the bundle again from this checkpoint"
            )
