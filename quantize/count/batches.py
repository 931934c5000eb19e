"""Documents in batches, and batches without what was counted before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import compress

from headport.errors import UsageError
from headport.quantize.count.corpus import Corpus
from headport.quantize.count.near_duplicates import SeenDocuments
from headport.quantize.count.workers import Workers

__all__ = ["Batch", "batches_of", "without_duplicates"]

_BATCH_CHARACTERS = 4 << 20
_BATCH_DOCUMENTS = 1 << 16  # damaged and empty ones have no characters


@dataclass(frozen=True)
class Batch:
    """Documents of about the same size together, and where the stream stands behind them."""

    texts: list[str] = field(default_factory=list)
    files: list[int] = field(default_factory=list)  # of every document, damaged ones too
    damaged: int = 0
    place: tuple[int, int] = (0, 0)
    duplicates: int = 0


def batches_of(
    corpus: Corpus, place: tuple[int, int], *, skip_damaged: bool = False
) -> Iterator[Batch]:
    """Batches of the documents from a place on.

    Raises:
        UsageError: If a document is damaged and `skip_damaged` is off.
    """
    batch, size = Batch(), 0
    for document in corpus.documents(*place):
        batch.files.append(document.file)
        batch = replace(batch, place=(document.file, document.end))
        if document.text is not None:
            batch.texts.append(document.text)
            size += len(document.text)
        else:
            if not skip_damaged:
                raise UsageError(
                    f"{corpus.files[document.file]}: a damaged document before {document.end} "
                    f"({document.fault}); pass --skip-damaged to leave such documents out"
                )
            batch = replace(batch, damaged=batch.damaged + 1)
        if size >= _BATCH_CHARACTERS or len(batch.files) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = Batch(), 0
    if batch.files:
        yield batch


def without_duplicates(
    workers: Workers, batches: Iterator[Batch], seen: SeenDocuments
) -> Iterator[Batch]:
    """The batches without documents that are nearly the same as one before them."""
    for batch, keys in workers.sign(batches, lambda b: b.texts):
        new = seen.add(keys)
        texts = list(compress(batch.texts, new))
        yield replace(batch, texts=texts, duplicates=len(new) - len(texts))
