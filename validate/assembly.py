"""From what was found to the report: sums, gates, facts, notes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np

from headport import __version__
from headport.bundle import Bundle
from headport.validate.baseline import regressions
from headport.validate.candidate import CHUNK_TOKENS, Candidate
from headport.validate.certainty import CONFIDENCE, bootstrap
from headport.validate.comparison import RARE_SHARE, Comparison, Material
from headport.validate.documents import EARLY_POSITIONS, MIN_DOCUMENT_TOKENS
from headport.validate.evidence import Attribution, Bisection, NoiseFloor, SamplerParity, Verdict
from headport.validate.facts import candidate_facts, machine_facts
from headport.validate.figures import figures
from headport.validate.gates import DEFAULT_GATES, GateRule, Judged, decide, evaluate
from headport.validate.greedy import PROMPT_TOKENS, PROMPTS_PER_TEXT
from headport.validate.report import (
    REPORT_SCHEMA_VERSION,
    CandidateFacts,
    DocumentSummary,
    GateResult,
    GreedyRun,
    PositionSlice,
    Protocol,
    Report,
    SliceReport,
    Timing,
)
from headport.validate.sums import CELLS, Part
from headport.validate.wire import Ready

__all__ = ["Evidence", "Findings", "Settings", "assemble_report"]

_DEFINITIONS = {
    "early": f"the first {EARLY_POSITIONS} scored tokens of a document",
    "late": f"all after the first {EARLY_POSITIONS}",
    "rare": f"the least frequent tokens that make up {RARE_SHARE:.0%} of these texts at most",
    "common": "all other tokens",
}
_DOCUMENTS = (
    f"a block between blank lines of at least {MIN_DOCUMENT_TOKENS} tokens; shorter ones are "
    "joined to the next, a rest to the last; of a .jsonl file, each line, of which a prompt, and "
    "all but the assistant's messages, are context only"
)
_PAIRS = (
    "a pair: the encoder reads its source alone, without padding; the decoder its own start token "
    "and the target"
)
_COUNTING = (
    "every token that has another before it in its document is scored once; a document's first "
    "token (the one the tokenizer adds, where it adds one) is not; a window's context starts with "
    "the window"
)
_COUNTING_PAIRS = (
    "every token of a target is scored once, those that the tokenizer adds included; sources and "
    "the start token are not"
)
_BOOTSTRAPPED = {"kl_mean": "kl", "top1_agreement": "top1", "ln_perplexity_ratio": ""}


@dataclass(frozen=True)
class Settings:
    """The options that belong in the protocol, and the gates."""

    window: int  # tokens, the context taken into account
    overlap: int
    batch_size: int
    max_tokens: int
    greedy_tokens: int
    ignored_ids: tuple[int, ...]
    rules: tuple[GateRule, ...] | None  # None: the recipe's defaults
    rules_source: str | None
    baseline: tuple[Path, Report] | None
    bounded: tuple[str, ...] = ()  # beginnings of metrics that only a bound is known of
    condition: str = ""  # what hidden states were told; "": nothing
    start: str | None = None  # token that a decoder starts with, where it answers to a source


@dataclass(frozen=True)
class Evidence:
    """What explains the figures; each part is optional."""

    attribution: Attribution | None = None
    bisection: Bisection | None = None
    noise_floor: NoiseFloor | None = None
    sampler: SamplerParity | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Findings:
    """All that was measured, text by text."""

    materials: Sequence[Material]
    comparison: Comparison
    greedy: Sequence[tuple[GreedyRun, ...]]
    greedy_seconds: float
    ready: Ready
    evidence: Evidence = field(default_factory=Evidence)


def assemble_report(
    bundle: Bundle, candidate: Candidate, found: Findings, settings: Settings
) -> Report:
    """Sum up, hold the figures against the gates, and put every fact beside them."""
    facts = candidate_facts(bundle, candidate)
    comparison, evidence = found.comparison, found.evidence
    overall = comparison.sums.part()
    metrics = figures(overall)
    slices = tuple(_slices(found))
    kinds = tuple(_position_slices(comparison))
    rules = settings.rules
    if rules is None:
        rules = DEFAULT_GATES[facts.recipe]
        rules = tuple(r for r in rules if not r.metric.startswith(settings.bounded))
    gates = evaluate(
        rules,
        Judged(metrics, overall.tokens, len(overall.counts)),
        {part.name: Judged(part.metrics, part.tokens_scored, part.documents) for part in slices}
        | {kind.name: Judged(kind.metrics, kind.tokens_scored) for kind in kinds},
    )
    names = [material.text.name for material in found.materials]
    report = Report(
        schema_version=REPORT_SCHEMA_VERSION,
        verdict="undecided",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        headport=__version__,
        gates=gates,
        gates_source=settings.rules_source or f"defaults of {facts.recipe}",
        baseline=None if settings.baseline is None else settings.baseline[0].name,
        regressions=(),
        tokens_scored=overall.tokens,
        documents=sum(part.documents for part in slices),
        bytes_scored=sum(part.bytes_scored for part in slices),
        metrics=metrics,
        bootstrap=_bootstrap(overall),
        slices=slices,
        position_slices=kinds,
        by_document=tuple(_by_document(found)),
        distributions=comparison.spread.distributions(overall.kept),
        flips=comparison.flips.flips(names, candidate.tokens.decode),
        attribution=evidence.attribution,
        bisection=evidence.bisection,
        noise_floor=evidence.noise_floor,
        sampler=evidence.sampler,
        worst=comparison.worst.positions(
            names,
            [material.documents for material in found.materials],
            candidate.tokens.decode,
        ),
        notes=(
            *_notes(found, facts, gates),
            *_doubled(found.materials, candidate.tokens.leading_ids(), candidate.tokens.piece),
            *candidate.notes(),
        ),
        protocol=_protocol(settings, candidate, found, overall),
        reference=found.ready.facts,
        candidate=facts,
        machine=machine_facts(),
        timing=Timing(
            reference=comparison.reference_seconds,
            candidate=comparison.candidate_seconds,
            metrics=comparison.metrics_seconds,
            total=comparison.seconds,
            greedy=found.greedy_seconds,
            extra=evidence.seconds,
        ),
    )
    return _judged(report, settings)


def _judged(report: Report, settings: Settings) -> Report:
    """The report with its regressions and verdict."""
    if settings.baseline is not None:
        file, earlier = settings.baseline
        held = regressions(earlier, report, file)
        report = msgspec.structs.replace(report, regressions=held)
    verdicts: list[Verdict] = [gate.verdict for gate in report.gates]
    verdicts += [regression.verdict for regression in report.regressions]
    if report.sampler is not None:
        verdicts.append(report.sampler.verdict)
    return msgspec.structs.replace(report, verdict=decide(verdicts, report.tokens_scored))


def _slices(found: Findings) -> Sequence[SliceReport]:
    parts = []
    for material, rows, greedy in zip(
        found.materials, found.comparison.rows, found.greedy, strict=True
    ):
        part = found.comparison.sums.part(rows)
        parts.append(
            SliceReport(
                name=material.text.name,
                file=material.text.file,
                sha256=material.text.sha256,
                bytes=material.text.bytes,
                bytes_scored=sum(document.bytes_scored for document in material.documents),
                documents=len(material.documents),
                tokens_scored=part.tokens,
                metrics=figures(part),
                greedy=greedy,
            )
        )
    return parts


def _position_slices(comparison: Comparison) -> Sequence[PositionSlice]:
    parts = []
    for name, cells in CELLS.items():
        part = comparison.sums.part(cells=cells)
        parts.append(
            PositionSlice(
                name=f"@{name}",
                definition=_DEFINITIONS[name],
                tokens_scored=part.tokens,
                metrics=figures(part),
            )
        )
    return parts


def _by_document(found: Findings) -> Sequence[DocumentSummary]:
    part = found.comparison.sums.part()
    names = ("nll_reference", "nll_candidate", "kl", "top1")
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.stack([part.column(name) for name in names], axis=1) / part.weights[:, None]
    documents = [(m.text.name, d) for m in found.materials for d in m.documents]
    return [
        DocumentSummary(
            slice=name,
            document=document.index,
            tokens=int(count),
            weight=document.weight,
            nll_reference=float(row[0]),
            nll_candidate=float(row[1]),
            kl=float(row[2]),
            top1_agreement=float(row[3]),
        )
        for (name, document), row, count in zip(documents, means, part.counts, strict=True)
        if np.isfinite(row).all()
    ]


def _bootstrap(part: Part) -> dict[str, tuple[float | None, float | None]]:
    found: dict[str, tuple[float | None, float | None]] = {}
    for name, column in _BOOTSTRAPPED.items():
        drift = part.column("nll_candidate") - part.column("nll_reference")
        sums = part.column(column) if column else drift
        low, high = bootstrap(sums, part.weights)
        found[name] = (low, high) if np.isfinite(low + high) else (None, None)
    return found


def _protocol(settings: Settings, candidate: Candidate, found: Findings, overall: Part) -> Protocol:
    bound = overall.kept["near_tie_bound"]
    special = candidate.special_tokens()
    if any(d.messages is not None for m in found.materials for d in m.documents):
        special += "; conversations: those of the chat template alone"
    fed = f"consecutive windows of at most {settings.window} tokens"
    scored = "each token but a document's first scored once"
    if settings.start is not None:
        special += f", around a source as around a target; {settings.start!r} starts the decoder"
        fed, scored = "given targets, each behind its own source", "each token scored once"
    weights = {document.weight for m in found.materials for document in m.documents}
    context = f", {settings.overlap} of them context" if settings.overlap else ""
    return Protocol(
        description=(
            f"{fed}{context}, {scored}, special tokens {special}, float32 logits of both sides, "
            "sums in float64"
        ),
        documents=_DOCUMENTS if settings.start is None else _PAIRS,
        condition=settings.condition,
        counting=_COUNTING if settings.start is None else _COUNTING_PAIRS,
        special_tokens=special,
        window=settings.window,
        overlap=settings.overlap,
        ignored_ids=settings.ignored_ids,
        top_only=bool(settings.bounded),
        weights="every token counts once" if weights <= {1.0} else "by the weight of its document",
        confidence=(
            f"{CONFIDENCE:.0%} intervals, clustered by document: value ± t · SE for means, on the "
            "logarithm for KL and total variation, Wilson with the effective sample size for "
            "shares; percentiles and extremes have none"
        ),
        context=candidate.context,
        batch_size=settings.batch_size,
        chunk=CHUNK_TOKENS,
        max_tokens=settings.max_tokens,
        near_tie_bound="2 · √H · 2⁻²⁴ · ‖h‖ · max_v ‖W_v‖ · head slope, in logits (float32)",
        near_tie_bound_median=float(np.median(bound)) if len(bound) else None,
        near_tie_bound_max=float(bound.max()) if len(bound) else None,
        head_slope=found.ready.head_slope,
        greedy_prompts=PROMPTS_PER_TEXT,
        greedy_prompt_tokens=PROMPT_TOKENS if settings.start is None else 1,
        greedy_new_tokens=settings.greedy_tokens,
    )


def _doubled(
    materials: Sequence[Material], leading: Sequence[int], piece: Callable[[int], str]
) -> tuple[str, ...]:
    """A note where texts hold the tokens that the tokenizer adds anyway, such as a second BOS."""
    count = len(leading)
    twice = [
        document
        for material in materials
        for document in material.documents
        if count and document.token_ids[: 2 * count].tolist() == [*leading, *leading]
    ]
    if not twice:
        return ()
    shown = " ".join(map(piece, leading))
    return (
        f"{len(twice)} documents begin with {shown} twice: their text holds it and the tokenizer "
        "adds it once more. No model was trained on that; take it out of the texts.",
    )


def _notes(
    found: Findings, candidate: CandidateFacts, gates: Sequence[GateResult]
) -> tuple[str, ...]:
    ready, floor = found.ready, found.evidence.noise_floor
    notes = []
    if ready.facts.sha256 != candidate.checkpoint_sha256:
        notes.append(
            f"The reference {ready.facts.checkpoint} is not the checkpoint this bundle was "
            f"exported from ({candidate.checkpoint}, sha256 {candidate.checkpoint_sha256[:16]}…)."
        )
    if ready.head_slope is None:
        notes.append(
            "The reference shows no single head matrix, so no rounding bound is known: nothing "
            "counts as a near tie, tie-adjusted agreements equal the raw ones, and the drift is "
            "not split into parts."
        )
    least, most = found.comparison.kl_bounds
    if most:
        notes.append(
            "Of the reference only the likeliest tokens of each position are known: KL, total "
            "variation, rank and logit errors are the least that fit, and are no gates. The true "
            f"mean KL lies between {least:.3e} and {most:.3e}."
        )
    for gate in gates:
        own = None if floor is None else getattr(floor, gate.metric, None)
        if own is None or gate.max is None or "perplexity" in gate.metric:
            continue
        if gate.max + gate.margin < own:
            notes.append(
                f"The limit {gate.max:g} on {gate.metric} lies below what the reference shows "
                f"against itself ({own:.2e}): no runtime can be expected to pass it."
            )
    return tuple(notes)
