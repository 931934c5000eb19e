"""The report of a validation: these records are its published JSON schema.

`report.schema.json` beside this file is written from them (`python -m headport.validate.report`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from headport.validate.distributions import Distributions
from headport.validate.evidence import (
    Attribution,
    Bisection,
    Flips,
    Metric,
    NoiseFloor,
    Record,
    SamplerParity,
    Verdict,
)

__all__ = [
    "REPORT_SCHEMA_VERSION",
    "CandidateFacts",
    "Choice",
    "DocumentSummary",
    "GateResult",
    "GreedyRun",
    "MachineFacts",
    "Metric",
    "Metrics",
    "Position",
    "PositionSlice",
    "Protocol",
    "ReferenceFacts",
    "Regression",
    "Report",
    "SliceReport",
    "Timing",
    "Verdict",
    "report_schema",
]

REPORT_SCHEMA_VERSION: Final = 5
SCHEMA_FILE = Path(__file__).with_name("report.schema.json")


class Metrics(Record, frozen=True):
    """All figures of one slice, or of all texts together.

    Agreements, orders and total variation are shares in [0, 1]; KL is KL(reference ‖ candidate)
    per position in nats, `kl_reverse` the other way round; Δp = q(y) − p(y) of the token y that
    follows; the ratio is candidate / reference; errors are in logits.
    """

    top1_agreement: Metric
    top5_agreement: Metric
    top10_agreement: Metric
    top1_agreement_tie_adjusted: Metric
    top5_agreement_tie_adjusted: Metric
    top10_agreement_tie_adjusted: Metric
    top5_order: Metric
    top10_order: Metric
    top5_order_tie_adjusted: Metric
    top10_order_tie_adjusted: Metric
    reference_top1_rank_mean: Metric
    perplexity_reference: Metric
    perplexity_candidate: Metric
    perplexity_ratio: Metric
    bits_per_byte_reference: Metric
    bits_per_byte_candidate: Metric
    kl_mean: Metric
    kl_max: Metric
    kl_p99_9: Metric
    kl_p99: Metric
    kl_p95: Metric
    kl_p90: Metric
    kl_p50: Metric
    kl_p10: Metric
    kl_p5: Metric
    kl_p1: Metric
    kl_p0_1: Metric
    kl_min: Metric
    kl_reverse_mean: Metric
    total_variation_mean: Metric
    delta_p_mean: Metric
    delta_p_rms: Metric
    delta_p_max: Metric
    delta_p_p99_9: Metric
    delta_p_p99: Metric
    delta_p_p95: Metric
    delta_p_p90: Metric
    delta_p_p75: Metric
    delta_p_p50: Metric
    delta_p_p25: Metric
    delta_p_p10: Metric
    delta_p_p5: Metric
    delta_p_p1: Metric
    delta_p_p0_1: Metric
    delta_p_min: Metric
    max_abs_logit_error: Metric
    max_abs_logit_error_p99: Metric
    max_abs_logit_error_p50: Metric


class GateResult(Record, frozen=True):
    """One limit and how the figure lies to it; a null bound is no bound.

    By interval, a gate passes if the figure lies within [min, max] and its interval within
    [min − margin, max + margin], fails if the whole interval lies beyond a limit, and is undecided
    in between; by value, the figure alone counts.
    """

    metric: str
    slice: str | None  # None: all texts together
    min: float | None
    max: float | None
    margin: float
    by: Literal["interval", "value"]
    value: float | None
    low: float | None
    high: float | None
    verdict: Verdict
    reason: str  # why it is undecided; else empty
    detectable: (
        float | None
    )  # smallest change of the figure that this sample finds in 90 % of cases
    tokens_needed: int | None  # undecided: tokens with which the interval would clear the limit
    tokens_recommended: int | None  # with which a drift as large as the limit allows is found


class Regression(Record, frozen=True):
    """A figure against that of an earlier report on the same texts; worse is positive."""

    metric: str
    margin: float  # worsening that is let go
    baseline: float | None
    value: float | None
    worsening: float | None
    low: float | None  # 95 % interval of the worsening
    high: float | None
    paired: bool  # over the same documents; else the two intervals are taken as independent
    verdict: Verdict


class Protocol(Record, frozen=True):
    """How the figures were obtained: with other settings they would be others."""

    description: str  # one sentence that may stand beside any figure
    documents: str  # what a document is
    counting: str  # which tokens are scored
    special_tokens: str  # what the tokenizer adds to a document
    window: int  # tokens fed at most per window
    overlap: int  # tokens that a window repeats of the one before it, as context only
    ignored_ids: tuple[int, ...]  # not scored as targets
    top_only: bool  # of the reference, the likeliest tokens alone are known: KL is the least one
    weights: str  # how documents are weighted
    confidence: str  # how intervals come about
    context: int  # tokens the model takes at most
    batch_size: int  # windows per run of the candidate
    chunk: int  # tokens per run of the candidate; longer windows continue through the cache
    max_tokens: int  # 0: all
    near_tie_bound: str  # the formula
    near_tie_bound_median: float | None  # logits
    near_tie_bound_max: float | None  # logits
    head_slope: float | None  # measured |Δlogit / Δhead output|; None: head not found
    greedy_prompts: int  # per text, at most
    greedy_prompt_tokens: int
    greedy_new_tokens: int
    condition: str = ""  # what hidden states were told on both sides; "": nothing


class ReferenceFacts(Record, frozen=True):
    """The PyTorch side, as it ran in its own process."""

    checkpoint: str
    format: str
    sha256: str  # over the checkpoint's weight files
    model: str  # class name
    dtype: str
    parameters: int
    attention: str
    tokenizer: str  # class name
    vocab_size: int  # width of the logits
    threads: int
    versions: dict[str, str]


class CandidateFacts(Record, frozen=True):
    """The bundle, as it ran."""

    bundle: str
    manifest_sha256: str
    files: dict[str, str]  # name → sha256
    checkpoint: str
    checkpoint_sha256: str
    stages: tuple[str, ...]
    target: str
    dtype: str
    recipe: str  # the row of the default gates
    head: str
    session_options: dict[str, str]
    provider: str
    threads: int
    versions: dict[str, str]


class MachineFacts(Record, frozen=True):
    """Where it ran."""

    system: str
    cpu: str
    cpus: int  # usable by this process
    memory_bytes: int | None
    python: str


class Timing(Record, frozen=True):
    """Seconds. Reference and candidate overlap, so the parts add up to more than `total`."""

    reference: float  # forward passes of the reference
    candidate: float  # backbone and head of the bundle
    metrics: float
    total: float  # scoring, loading excluded
    greedy: float
    extra: float  # noise floor, attribution, bisection, samplers


class Choice(Record, frozen=True):
    """A token among the likeliest of one side."""

    token: str
    token_id: int
    probability: float


class Position(Record, frozen=True):
    """A position with large KL. Texts are pieces of the document, cut short."""

    slice: str
    document: int
    token: int  # index of the scored token in its document
    kl: float
    context: str
    target: str
    reference_top1: str
    candidate_top1: str
    reference_margin: float  # reference logit of its own choice minus that of the candidate's
    reference_top: tuple[Choice, ...]  # ten, likeliest first; none from earlier releases
    candidate_top: tuple[Choice, ...]


class GreedyRun(Record, frozen=True):
    """Greedy continuation of one prompt on both sides, each fed its own tokens."""

    document: int
    prompt_tokens: int
    new_tokens: int
    first_divergence: int | None  # index among the new tokens; None: all equal
    reference_margin: float | None  # best minus second-best reference logit there
    near_tie_bound: float | None
    near_tie: bool | None  # the margin is within the bound
    reference_text: str
    candidate_text: str


class SliceReport(Record, frozen=True):
    """One `--text` file."""

    name: str
    file: str
    sha256: str
    bytes: int
    bytes_scored: int
    documents: int
    tokens_scored: int
    metrics: Metrics
    greedy: tuple[GreedyRun, ...]


class PositionSlice(Record, frozen=True):
    """Scored positions of one kind, over all texts."""

    name: str  # @early, @late, @rare, @common
    definition: str
    tokens_scored: int
    metrics: Metrics


class DocumentSummary(Record, frozen=True):
    """Means over one document: what a later report on the same texts is paired with."""

    slice: str
    document: int
    tokens: int
    weight: float
    nll_reference: float
    nll_candidate: float
    kl: float
    top1_agreement: float


class Report(Record, frozen=True):
    """The outcome of one validation."""

    schema_version: Literal[5]
    verdict: Verdict
    date: str  # UTC, ISO 8601
    headport: str
    gates: tuple[GateResult, ...]
    gates_source: str
    baseline: str | None  # the report that `regressions` compares with
    regressions: tuple[Regression, ...]
    tokens_scored: int
    documents: int
    bytes_scored: int
    metrics: Metrics
    bootstrap: dict[str, tuple[float | None, float | None]]  # metric → interval, as a check
    slices: tuple[SliceReport, ...]
    position_slices: tuple[PositionSlice, ...]
    by_document: tuple[DocumentSummary, ...]
    distributions: Distributions | None  # None: written by an earlier release
    flips: Flips
    attribution: Attribution | None
    bisection: Bisection | None
    noise_floor: NoiseFloor | None
    sampler: SamplerParity | None
    worst: tuple[Position, ...]
    notes: tuple[str, ...]
    protocol: Protocol
    reference: ReferenceFacts
    candidate: CandidateFacts
    machine: MachineFacts
    timing: Timing

    def __bool__(self) -> bool:
        return self.verdict == "passed"


def report_schema() -> dict[str, Any]:
    """The JSON schema (2020-12) of `report.json`."""
    schema = msgspec.json.schema(Report)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def schema_text() -> str:
    """The schema as the text of `report.schema.json`."""
    return msgspec.json.format(msgspec.json.encode(report_schema()), indent=2).decode() + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
