"""Where the drift comes from: a chain from the reference to the candidate, one part at a time.

With h the hidden states of the reference, h' those of the candidate, and head and head' their
heads, the chain is head(h) → head'(h) → head'(h'): the first step exchanges the head alone, the
second the backbone. With the unquantised bundle as a midpoint, the chain goes through it, which
tells what export and runtime cost from what rounding costs. NLL differences add up exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from headport.metrics import RowScores, score_rows
from headport.validate.candidate import Candidate
from headport.validate.comparison import Job, Material, given_sources, jobs_of
from headport.validate.documents import Window
from headport.validate.evidence import AttributedPart, Attribution, NoiseFloor
from headport.validate.sides import ReferenceSide
from headport.validate.store import PREFIX_TOKENS

__all__ = ["attribute", "noise_floor", "sampled_jobs"]

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class _Step:
    part: str
    measured: str


_STEPS = (
    _Step("head", "reference's head and candidate's head on the reference's hidden states"),
    _Step("backbone", "candidate's head on the reference's and on the candidate's hidden states"),
)
_STEPS_BY_MIDPOINT = (
    _Step("exported head", "reference's and unquantised head on the reference's hidden states"),
    _Step("exported backbone", "unquantised head on the reference's and on the bundle's states"),
    _Step("head", "unquantised and quantised head on the unquantised bundle's hidden states"),
    _Step("backbone", "quantised head on the unquantised and on the candidate's hidden states"),
)


def sampled_jobs(
    materials: Sequence[Material], window: int, overlap: int, tokens: int
) -> list[Job]:
    """About `tokens` tokens in all, an equal share of each text, spread over it.

    They are beginnings of the windows that are scored, so that a stored reference knows them.
    """
    share = max(1, tokens // max(1, len(materials)))
    by_text: dict[int, list[Job]] = {}
    for job in jobs_of(materials, window, overlap):
        by_text.setdefault(job.material, []).append(_beginning(job))
    found = []
    for jobs in by_text.values():
        total = sum(len(job.window.token_ids) for job in jobs)
        left = share
        for job in jobs[:: max(1, total // share)]:
            if left <= 0:
                break
            found.append(job)
            left -= len(job.window.token_ids)
    return found


def _beginning(job: Job) -> Job:
    window = job.window
    kept = slice(0, PREFIX_TOKENS)
    short = Window(
        window.document,
        window.start,
        window.token_ids[kept],
        window.targets[kept],
        window.scored[kept],
    )
    return replace(job, window=short)


def attribute(
    jobs: Sequence[Job],
    candidate: Candidate,
    reference: ReferenceSide,
    midpoint: Candidate | None = None,
) -> Attribution | None:
    """Split the drift of some windows.

    Args:
        jobs: The windows.
        candidate: The bundle.
        reference: The reference, with nothing asked.
        midpoint: The bundle before quantisation.

    Returns:
        None if the reference shows no single head matrix, or of another hidden size.
    """
    if not jobs or reference.ready().hidden_size != candidate.hidden_size:
        return None
    proved = candidate.proved  # counts the positions of the comparison, not these
    steps = _STEPS if midpoint is None else _STEPS_BY_MIDPOINT
    rows: list[list[RowScores]] = [[] for _ in steps]

    def ask_hidden(job: Job) -> None:
        reference.ask_score(job.window.token_ids, hidden=True, source=job.document.source)

    for job in _asked_ahead(jobs, ask_hidden):
        fed = [job.window.token_ids], given_sources([job])
        states = [c.hidden_states(*fed)[0] for c in _sides(candidate, midpoint)]
        for block in reference.read_score(candidate.block_rows):
            assert block.hidden is not None
            at = slice(block.start, block.start + len(block.logits))
            chain = _chain(block.logits, block.hidden, [s[at] for s in states], candidate, midpoint)
            for found, (before, after) in zip(rows, pairwise(chain), strict=True):
                bound = block.near_tie_bound
                found.append(score_rows(before, after, job.window.targets[at], bound))
    candidate.proved = proved
    parts = tuple(
        _part(step, RowScores.concatenate(found)) for step, found in zip(steps, rows, strict=True)
    )
    largest = max(parts, key=lambda part: part.kl_mean)
    return Attribution(
        tokens=sum(len(found) for found in rows[0]),
        parts=parts,
        largest=largest.part,
        finding=_finding(parts, largest),
    )


def _asked_ahead(jobs: Sequence[Job], ask: Callable[[Job], None]) -> Iterator[Job]:
    """Windows that the reference works on while the one before is looked at here."""
    for job in jobs[:1]:
        ask(job)
    for at, job in enumerate(jobs):
        for later in jobs[at + 1 : at + 2]:
            ask(later)
        yield job


def _sides(candidate: Candidate, midpoint: Candidate | None) -> tuple[Candidate, ...]:
    return (candidate,) if midpoint is None else (midpoint, candidate)


def _chain(
    logits: Float32,
    hidden: Float32,
    states: Sequence[Float32],
    candidate: Candidate,
    midpoint: Candidate | None,
) -> Iterator[Float32]:
    yield logits
    if midpoint is None:
        yield candidate.logits(hidden)
    else:
        yield midpoint.logits(hidden)
        yield midpoint.logits(states[0])
        yield candidate.logits(states[0])
    yield candidate.logits(states[-1])


def _part(step: _Step, scores: RowScores) -> AttributedPart:
    return AttributedPart(
        part=step.part,
        measured=step.measured,
        kl_mean=float(scores.kl.mean()),
        top1_agreement=float(scores.agreement[:, 0].mean()),
        nll_difference=float((scores.nll_candidate - scores.nll_reference).mean()),
        max_abs_logit_error=float(scores.max_abs_error.max()),
    )


def _finding(parts: Sequence[AttributedPart], largest: AttributedPart) -> str:
    total = sum(part.kl_mean for part in parts)
    share = largest.kl_mean / total if total else 0.0
    others = ", ".join(f"{p.part} {p.kl_mean:.2e}" for p in parts if p is not largest)
    return (
        f"{share:.0%} of the KL comes from the {largest.part} "
        f"({largest.kl_mean:.2e}; {others}), its share of ln(perplexity ratio) is "
        f"{largest.nll_difference:+.2e}"
    )


def noise_floor(jobs: Sequence[Job], reference: ReferenceSide, rows: int) -> NoiseFloor | None:
    """The reference against itself through its second code path; None if it knows only one.

    Args:
        jobs: Windows to run.
        reference: The reference, with nothing asked.
        rows: Positions per block.
    """
    path = reference.ready().other_path
    if not path or not jobs:
        return None
    found = []

    def ask(job: Job) -> None:
        fed, source = job.window.token_ids, job.document.source
        reference.ask_score(fed, source=source)
        reference.ask_score(fed, other_path=True, source=source)

    for job in _asked_ahead(jobs, ask):
        kept = [block.logits.copy() for block in reference.read_score(rows)]
        for usual, block in zip(kept, reference.read_score(rows), strict=True):
            targets = job.window.targets[block.start : block.start + len(usual)]
            found.append(score_rows(usual, block.logits, targets, np.zeros(len(usual))))
    scores = RowScores.concatenate(found)
    return NoiseFloor(
        path=path,
        tokens=len(scores),
        kl_mean=float(scores.kl.mean()),
        top1_agreement=float(scores.agreement[:, 0].mean()),
        max_abs_logit_error=float(scores.max_abs_error.max()),
        perplexity_ratio=float(np.exp((scores.nll_candidate - scores.nll_reference).mean())),
    )
