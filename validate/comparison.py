"""The comparison itself: first the ids, then the logits, window by window."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headport.errors import ParityError, UsageError
from headport.metrics import score_rows
from headport.progress import bar
from headport.runtime.text import Tokens as BundleTokens
from headport.validate.candidate import Candidate
from headport.validate.documents import (
    EARLY_POSITIONS,
    Document,
    Text,
    Window,
    cut_documents,
    record_documents,
    split_documents,
    windows_of,
)
from headport.validate.flips import FlipCounts
from headport.validate.given_source import GivenSource
from headport.validate.pairs import Pairing, check_form, check_sources, pair_documents, with_start
from headport.validate.reference_process import ScoredBlock
from headport.validate.sides import ReferenceSide, Tokenizing, TokenizingReference
from headport.validate.spread import Spread
from headport.validate.sums import DocumentSums, Positions
from headport.validate.worst import WorstPositions

__all__ = [
    "RARE_SHARE",
    "Comparison",
    "Job",
    "Material",
    "check_ids",
    "compare",
    "document_rows",
    "given_sources",
    "jobs_of",
    "prepare",
    "rare_ids",
    "target_counts",
]

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

RARE_SHARE = 0.1


class Speller(Protocol):
    """What knows the bundle's tokens."""

    @property
    def vocab_size(self) -> int:
        """Rows of the head, or of the embedding."""
        ...

    @property
    def tokens(self) -> BundleTokens:
        """The bundle's tokenizer."""
        ...


@dataclass(frozen=True)
class Material:
    """One text, cut into the documents that are scored."""

    text: Text
    documents: tuple[Document, ...]


@dataclass(frozen=True)
class Comparison:
    """What `compare` found, and where the time went."""

    sums: DocumentSums
    rows: tuple[slice, ...]  # rows of each text's documents in the sums
    worst: WorstPositions
    flips: FlipCounts
    spread: Spread
    seconds: float
    reference_seconds: float  # overlaps with the candidate's
    candidate_seconds: float
    metrics_seconds: float
    kl_bounds: tuple[float, float]  # of the mean, where the reference knows its top only; else 0


@dataclass(frozen=True)
class Job:
    """One window of one text."""

    material: int
    document: Document
    row: int  # of the document in the sums
    window: Window


def prepare(
    texts: Sequence[Text],
    tokenizer: Tokenizing,
    max_tokens: int,
    ignored_ids: Sequence[int] = (),
    pairing: Pairing | None = None,
) -> list[Material]:
    """Cut texts into documents.

    Args:
        texts: At least one.
        tokenizer: Cuts and encodes.
        max_tokens: Tokens to score in all, an equal share of each text; 0 for all.
        ignored_ids: Tokens that are fed, but not scored.
        pairing: How an encoder-decoder bundle reads sources; None of another bundle.

    Raises:
        UsageError: If a text holds no token to score, or is none for this kind of bundle.
    """
    materials = []
    for index, text in enumerate(texts):
        share = max_tokens // len(texts) + (index < max_tokens % len(texts))
        records = text.records()
        check_form(text, records, pairing)
        if pairing is not None:
            documents = tuple(pair_documents(text, tokenizer.encode, pairing, share, ignored_ids))
        elif records:
            documents = tuple(
                record_documents(records, tokenizer.encode, share, ignored_ids, tokenizer.render)
            )
        else:
            contents = split_documents(text.content, tokenizer.count_tokens)
            documents = tuple(cut_documents(contents, tokenizer.encode, share, ignored_ids))
        if not documents:
            raise UsageError(
                f"{text.file}: a token with another before it was expected, there is none to score"
            )
        materials.append(Material(text, documents))
    return materials


def check_ids(
    materials: Iterable[Material], candidate: Speller, reference: TokenizingReference
) -> None:
    """Compare the token ids of every document before any logit is looked at.

    Raises:
        ParityError: If they differ, naming the first differing piece.
        UsageError: If a text encodes to an id that the head does not know.
    """
    for material in materials:
        for document, wanted in _expected(material, reference):
            found = document.token_ids.tolist()
            if found != list(wanted):
                raise ParityError(_difference(material.text, document, list(wanted), candidate))
            if max(found) >= candidate.vocab_size:
                raise UsageError(
                    f"{material.text.file}: token id {max(found)} is outside the head's "
                    f"{candidate.vocab_size} rows; does the tokenizer belong to this model?"
                )


def _expected(
    material: Material, reference: TokenizingReference
) -> Iterator[tuple[Document, tuple[int, ...]]]:
    """Documents with the ids that the reference gives them: plain texts, then conversations."""
    plain = [document for document in material.documents if document.messages is None]
    chats = [document for document in material.documents if document.messages is not None]
    encoded = reference.encode([d.content for d in plain])
    start = reference.ready().start_token
    if start is not None:
        encoded = tuple(with_start(start, ids) for ids in encoded)
        told = [d for d in plain if d.source_text]
        check_sources(material.text, told, reference.encode([d.source_text for d in told]))
    yield from zip(plain, encoded, strict=True)
    if chats:
        found = reference.encode_chats([d.messages for d in chats if d.messages is not None])
        yield from zip(chats, found, strict=True)


def _difference(text: Text, document: Document, wanted: list[int], candidate: Speller) -> str:
    found = document.token_ids.tolist()
    at = next(
        (i for i, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b),
        min(len(wanted), len(found)),
    )

    kind = "tokenizer" if document.messages is None else "chat template or tokenizer"

    def piece(ids: list[int]) -> str:
        return f"{ids[at]} ({candidate.tokens.piece(ids[at])!r})" if at < len(ids) else "no token"

    return (
        f"{text.file}, document {document.index}: the reference's {kind} and the bundle's "
        f"differ at token {at}: {piece(wanted)} expected, {piece(found)} found "
        f"({len(wanted)} and {len(found)} tokens); export the bundle again from this checkpoint"
    )


def compare(
    materials: Sequence[Material],
    candidate: Candidate,
    reference: ReferenceSide,
    *,
    window: int,
    overlap: int = 0,
    batch_size: int = 1,
) -> Comparison:
    """Score every window on both sides.

    While the candidate works on one batch of windows, the reference works on the next. Memory:
    the reference holds the logits of two windows, this process two blocks of head rows.

    Args:
        materials: Texts.
        candidate: The bundle.
        reference: The PyTorch side; `ready`, with nothing asked.
        window: Tokens fed at most at once.
        overlap: Tokens that a window repeats of the one before it, as context.
        batch_size: Windows that the candidate runs together; no figure depends on it.

    Raises:
        NonFiniteError: If a logit of either side is not finite.
    """
    tokens = sum(d.tokens_scored for m in materials for d in m.documents)
    sums = DocumentSums(sum(len(m.documents) for m in materials), tokens)
    frequency = target_counts(materials, candidate.vocab_size)
    worst, flips, rare = WorstPositions(), FlipCounts(), rare_ids(frequency)
    spread = Spread(sum(len(m.documents) for m in materials), frequency)
    kl_sums = np.zeros(2)
    before, metrics_seconds = (candidate.seconds, reference.seconds), 0.0
    started = time.perf_counter()
    batches = _batches(jobs_of(materials, window, overlap), batch_size)
    ahead = next(batches)
    _ask(reference, ahead)
    with bar(tokens, "validate", "token") as progress:
        while batch := ahead:
            ahead = next(batches, ())
            _ask(reference, ahead)
            hidden = candidate.hidden_states(
                [job.window.token_ids for job in batch], given_sources(batch)
            )
            for job, states in zip(batch, hidden, strict=True):
                for block in reference.read_score(candidate.block_rows):
                    at = block.start + np.flatnonzero(
                        job.window.scored[block.start : block.start + len(block.logits)]
                    )
                    block = _only(block, at)  # noqa: PLW2901 - context is not scored
                    if not len(at):
                        continue
                    logits = candidate.logits(states[at])
                    counted = time.perf_counter()
                    targets = job.window.targets[at]
                    if block.top is not None:
                        z, least, most = block.top.completed(logits, targets)
                        block = replace(block, logits=z)  # noqa: PLW2901
                        kl_sums += [least.sum(), most.sum()]
                    scores = score_rows(block.logits, logits, targets, block.near_tie_bound)
                    sums.add(scores, _positions(job, at, rare[targets], block.near_tie_bound))
                    worst.offer(job.material, job.window, at, (block.logits, logits), scores)
                    flips.offer(
                        job.material, job.window, at, (block.logits, logits), block.near_tie_bound
                    )
                    spread.add(
                        (job.row, job.document.weight),
                        job.window.start + at,
                        targets,
                        (block.logits, logits),
                        scores,
                    )
                    metrics_seconds += time.perf_counter() - counted
                    progress.update(len(scores))
    return Comparison(
        sums=sums,
        rows=document_rows(materials),
        worst=worst,
        flips=flips,
        spread=spread,
        seconds=time.perf_counter() - started,
        candidate_seconds=candidate.seconds - before[0],
        reference_seconds=reference.seconds - before[1],
        metrics_seconds=metrics_seconds,
        kl_bounds=(float(kl_sums[0] / tokens), float(kl_sums[1] / tokens)),
    )


def _only(block: ScoredBlock, at: Int64) -> ScoredBlock:
    if len(at) == len(block.logits):
        return block
    rows = at - block.start
    hidden = None if block.hidden is None else block.hidden[rows]
    top = None if block.top is None else block.top[rows]
    return ScoredBlock(block.start, block.logits[rows], block.near_tie_bound[rows], hidden, top)


def _positions(job: Job, at: Int64, rare: Bool, bound: Float64) -> Positions:
    place = job.window.start + at  # the scored token's index in its document, minus one
    return Positions(
        document=job.row,
        weight=job.document.weight,
        bytes=job.document.token_bytes[place],
        early=place < EARLY_POSITIONS,
        rare=rare,
        near_tie_bound=bound,
    )


def target_counts(materials: Sequence[Material], vocab_size: int) -> Int64:
    """How often each token is scored, [V]."""
    counts = np.zeros(vocab_size, np.int64)
    for material in materials:
        for document in material.documents:
            targets = document.token_ids[1 : document.used][document.scored]
            counts += np.bincount(targets, minlength=vocab_size)
    return counts


def rare_ids(counts: Int64) -> Bool:
    """The least frequent target ids that together make up at most `RARE_SHARE` of all targets.

    Args:
        counts: How often each token is scored, [V].
    """
    order = np.argsort(counts, kind="stable")
    within = np.cumsum(counts[order]) <= RARE_SHARE * counts.sum()
    rare = np.zeros(len(counts), np.bool_)
    rare[order[within]] = True
    return rare


def document_rows(materials: Sequence[Material]) -> tuple[slice, ...]:
    """Rows of each text's documents, one after the other."""
    ends = np.cumsum([0, *(len(material.documents) for material in materials)]).tolist()
    return tuple(slice(start, end) for start, end in pairwise(ends))


def jobs_of(materials: Sequence[Material], length: int, overlap: int = 0) -> Iterator[Job]:
    """All windows, text by text."""
    row = 0
    for index, material in enumerate(materials):
        for document in material.documents:
            for window in windows_of(document, length, overlap):
                yield Job(index, document, row, window)
            row += 1


def given_sources(jobs: Sequence[Job]) -> list[GivenSource]:
    """What windows answer to, one each; nothing of a decoder-only bundle."""
    return [job.document.source for job in jobs if job.document.source is not None]


def _batches(jobs: Iterator[Job], size: int) -> Iterator[tuple[Job, ...]]:
    while batch := tuple(islice(jobs, size)):
        yield batch


def _ask(reference: ReferenceSide, batch: Sequence[Job]) -> None:
    for job in batch:
        reference.ask_score(job.window.token_ids, source=job.document.source)
