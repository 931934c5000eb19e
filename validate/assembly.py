"""From what was found to the report: sums, gates, facts, notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from headport import __version__
from headport.bundle import Bundle
from headport.metrics import RowScores, summarize
from headport.validate.candidate import CHUNK_TOKENS, Candidate
from headport.validate.comparison import Comparison, Material
from headport.validate.documents import MIN_DOCUMENT_TOKENS
from headport.validate.facts import candidate_facts, machine_facts
from headport.validate.gates import DEFAULT_GATES, GateRule, decide, evaluate
from headport.validate.greedy import PROMPT_TOKENS, PROMPTS_PER_TEXT
from headport.validate.report import (
    REPORT_SCHEMA_VERSION,
    CandidateFacts,
    GreedyRun,
    Protocol,
    Report,
    SliceReport,
    Timing,
    metrics_from_drift,
)
from headport.validate.wire import Ready

__all__ = ["Findings", "Settings", "assemble_report"]


@dataclass(frozen=True)
class Settings:
    """The options that belong in the protocol, and the gates."""

    window: int  # tokens, the context taken into account
    batch_size: int
    max_tokens: int
    greedy_tokens: int
    rules: tuple[GateRule, ...] | None  # None: the recipe's defaults
    rules_source: str | None


@dataclass(frozen=True)
class Findings:
    """All that was measured, text by text."""

    materials: Sequence[Material]
    comparison: Comparison
    greedy: Sequence[tuple[GreedyRun, ...]]
    greedy_seconds: float
    ready: Ready


def assemble_report(
    bundle: Bundle, candidate: Candidate, found: Findings, settings: Settings
) -> Report:
    """Sum up, hold the figures against the gates, and put every fact beside them."""
    facts = candidate_facts(bundle, candidate)
    scores = found.comparison.slices
    slices = tuple(
        _slice(material, of_text.rows, runs)
        for material, of_text, runs in zip(found.materials, scores, found.greedy, strict=True)
    )
    overall = RowScores.concatenate([of_text.rows for of_text in scores])
    bytes_scored = sum(part.bytes_scored for part in slices)
    metrics = metrics_from_drift(summarize(overall, bytes_scored))
    gates = evaluate(
        DEFAULT_GATES[facts.recipe] if settings.rules is None else settings.rules,
        metrics,
        {part.name: part.metrics for part in slices},
    )
    return Report(
        schema_version=REPORT_SCHEMA_VERSION,
        verdict=decide(gates, len(overall)),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        headport=__version__,
        gates=gates,
        gates_source=settings.rules_source or f"defaults of {facts.recipe}",
        tokens_scored=len(overall),
        documents=sum(part.documents for part in slices),
        bytes_scored=bytes_scored,
        metrics=metrics,
        slices=slices,
        worst=found.comparison.worst.positions(
            [material.text.name for material in found.materials],
            [material.documents for material in found.materials],
            candidate.tokens.decode,
        ),
        notes=(*_notes(found.ready, facts), *candidate.notes()),
        protocol=_protocol(settings, candidate, found),
        reference=found.ready.facts,
        candidate=facts,
        machine=machine_facts(),
        timing=Timing(
            reference=found.comparison.reference_seconds,
            candidate=found.comparison.candidate_seconds,
            metrics=found.comparison.metrics_seconds,
            total=found.comparison.seconds,
            greedy=found.greedy_seconds,
        ),
    )


def _slice(material: Material, rows: RowScores, greedy: tuple[GreedyRun, ...]) -> SliceReport:
    bytes_scored = sum(document.bytes_scored for document in material.documents)
    return SliceReport(
        name=material.text.name,
        file=material.text.file,
        sha256=material.text.sha256,
        bytes=material.text.bytes,
        bytes_scored=bytes_scored,
        documents=len(material.documents),
        tokens_scored=len(rows),
        metrics=metrics_from_drift(summarize(rows, bytes_scored)),
        greedy=greedy,
    )


def _protocol(settings: Settings, candidate: Candidate, found: Findings) -> Protocol:
    bounds = np.concatenate([part.near_tie_bound for part in found.comparison.slices])
    special = candidate.special_tokens()
    return Protocol(
        description=(
            f"consecutive windows of at most {settings.window} tokens, each token but a "
            f"document's first scored once, special tokens {special}, float32 logits of both "
            "sides, sums in float64"
        ),
        documents=(
            f"a block between blank lines of at least {MIN_DOCUMENT_TOKENS} tokens; shorter ones "
            "are joined to the next, a rest to the last"
        ),
        counting=(
            "every token that has another before it in its document is scored once; a document's "
            "first token (the one the tokenizer adds, where it adds one) is not; a window's "
            "context starts with the window"
        ),
        special_tokens=special,
        window=settings.window,
        context=candidate.context,
        batch_size=settings.batch_size,
        chunk=CHUNK_TOKENS,
        max_tokens=settings.max_tokens,
        near_tie_bound="2 · √H · 2⁻²⁴ · ‖h‖ · max_v ‖W_v‖ · head slope, in logits (float32)",
        near_tie_bound_median=float(np.median(bounds)) if len(bounds) else None,
        near_tie_bound_max=float(bounds.max()) if len(bounds) else None,
        head_slope=found.ready.head_slope,
        greedy_prompts=PROMPTS_PER_TEXT,
        greedy_prompt_tokens=PROMPT_TOKENS,
        greedy_new_tokens=settings.greedy_tokens,
    )


def _notes(ready: Ready, candidate: CandidateFacts) -> tuple[str, ...]:
    notes = []
    if ready.facts.sha256 != candidate.checkpoint_sha256:
        notes.append(
            f"The reference {ready.facts.checkpoint} is not the checkpoint this bundle was "
            f"exported from ({candidate.checkpoint}, sha256 {candidate.checkpoint_sha256[:16]}…)."
        )
    if ready.head_slope is None:
        notes.append(
            "The reference shows no single head matrix, so no rounding bound is known: nothing "
            "counts as a near tie, and tie-adjusted agreements equal the raw ones."
        )
    return tuple(notes)
