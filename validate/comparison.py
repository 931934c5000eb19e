"""The comparison itself: first the ids, then the logits, window by window."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from headport.errors import ParityError, UsageError
from headport.metrics import RowScores, score_rows
from headport.progress import bar
from headport.validate.candidate import Candidate
from headport.validate.documents import (
    Document,
    Text,
    Window,
    cut_documents,
    split_documents,
    windows_of,
)
from headport.validate.reference_process import ReferenceProcess
from headport.validate.worst import WorstPositions

__all__ = ["Comparison", "Material", "SliceScores", "check_ids", "compare", "prepare"]

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Material:
    """One text, cut into the documents that are scored."""

    text: Text
    documents: tuple[Document, ...]


@dataclass(frozen=True)
class SliceScores:
    """Figures of one text's positions, in order."""

    rows: RowScores
    near_tie_bound: Float64  # [N], logits


@dataclass(frozen=True)
class Comparison:
    """What `compare` found, text by text, and where the time went."""

    slices: tuple[SliceScores, ...]
    worst: WorstPositions
    seconds: float
    reference_seconds: float  # overlaps with the candidate's
    candidate_seconds: float
    metrics_seconds: float


@dataclass(frozen=True)
class _Job:
    material: int
    window: Window


def prepare(texts: Sequence[Text], candidate: Candidate, max_tokens: int) -> list[Material]:
    """Cut texts into documents with the bundle's tokenizer.

    Args:
        texts: At least one.
        candidate: Its tokenizer is used.
        max_tokens: Tokens to score in all, an equal share of each text; 0 for all.

    Raises:
        UsageError: If a text holds no token to score.
    """
    materials = []
    for index, text in enumerate(texts):
        share = max_tokens // len(texts) + (index < max_tokens % len(texts))
        contents = split_documents(text.content, candidate.count_tokens)
        documents = tuple(cut_documents(contents, candidate.encode, share))
        if not documents:
            raise UsageError(
                f"{text.file}: a token with another before it was expected, there is none to score"
            )
        materials.append(Material(text, documents))
    return materials


def check_ids(
    materials: Iterable[Material], candidate: Candidate, reference: ReferenceProcess
) -> None:
    """Compare the token ids of every document before any logit is looked at.

    Raises:
        ParityError: If they differ, naming the first differing piece.
        UsageError: If a text encodes to an id that the head does not know.
    """
    for material in materials:
        expected = reference.encode([document.content for document in material.documents])
        for document, wanted in zip(material.documents, expected, strict=True):
            found = document.token_ids.tolist()
            if found != list(wanted):
                raise ParityError(_difference(material.text, document, list(wanted), candidate))
            if max(found) >= candidate.vocab_size:
                raise UsageError(
                    f"{material.text.file}: token id {max(found)} is outside the head's "
                    f"{candidate.vocab_size} rows; does the tokenizer belong to this model?"
                )


def _difference(text: Text, document: Document, wanted: list[int], candidate: Candidate) -> str:
    found = document.token_ids.tolist()
    at = next(
        (i for i, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b),
        min(len(wanted), len(found)),
    )

    def piece(ids: list[int]) -> str:
        return f"{ids[at]} ({candidate.tokens.piece(ids[at])!r})" if at < len(ids) else "no token"

    return (
        f"{text.file}, document {document.index}: the reference's tokenizer and the bundle's "
        f"differ at token {at}: {piece(wanted)} expected, {piece(found)} found "
        f"({len(wanted)} and {len(found)} tokens); export the bundle again from this checkpoint"
    )


def compare(
    materials: Sequence[Material],
    candidate: Candidate,
    reference: ReferenceProcess,
    *,
    window: int,
    batch_size: int,
) -> Comparison:
    """Score every window on both sides.

    While the candidate works on one batch of windows, the reference works on the next. Memory:
    the reference holds the logits of two windows, this process two blocks of head rows.

    Args:
        materials: Texts.
        candidate: The bundle.
        reference: The process that holds the PyTorch model; `ready`, with nothing asked.
        window: Tokens fed at most at once.
        batch_size: Windows that the candidate runs together; no figure depends on it.

    Raises:
        NonFiniteError: If a logit of either side is not finite.
    """
    parts: list[list[RowScores]] = [[] for _ in materials]
    bounds: list[list[Float64]] = [[] for _ in materials]
    worst = WorstPositions()
    before, metrics_seconds = (candidate.seconds, reference.seconds), 0.0
    started = time.perf_counter()
    batches = _batches(_jobs(materials, window), batch_size)
    ahead = next(batches)
    _ask(reference, ahead)
    tokens = sum(d.tokens_scored for m in materials for d in m.documents)
    with bar(tokens, "validate", "token") as progress:
        while batch := ahead:
            ahead = next(batches, ())
            _ask(reference, ahead)
            hidden = candidate.hidden_states([job.window.token_ids for job in batch])
            for job, states in zip(batch, hidden, strict=True):
                for block in reference.read_score(candidate.block_rows):
                    rows = slice(block.start, block.start + len(block.logits))
                    logits = candidate.logits(states[rows])
                    at = time.perf_counter()
                    scores = score_rows(
                        block.logits, logits, job.window.targets[rows], block.near_tie_bound
                    )
                    worst.offer(job.material, job.window, block, logits, scores)
                    metrics_seconds += time.perf_counter() - at
                    parts[job.material].append(scores)
                    bounds[job.material].append(block.near_tie_bound)
                    progress.update(len(scores))
    return Comparison(
        slices=tuple(
            SliceScores(RowScores.concatenate(rows), np.concatenate(bound))
            for rows, bound in zip(parts, bounds, strict=True)
        ),
        worst=worst,
        seconds=time.perf_counter() - started,
        candidate_seconds=candidate.seconds - before[0],
        reference_seconds=reference.seconds - before[1],
        metrics_seconds=metrics_seconds,
    )


def _jobs(materials: Sequence[Material], length: int) -> Iterator[_Job]:
    for index, material in enumerate(materials):
        for document in material.documents:
            for window in windows_of(document, length):
                yield _Job(index, window)


def _batches(jobs: Iterator[_Job], size: int) -> Iterator[tuple[_Job, ...]]:
    while batch := tuple(islice(jobs, size)):
        yield batch


def _ask(reference: ReferenceProcess, batch: Sequence[_Job]) -> None:
    for job in batch:
        reference.ask_score(job.window.token_ids)
