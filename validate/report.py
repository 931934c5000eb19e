"""The report of a validation: these records are its published JSON schema.

`report.schema.json` beside this file is written from them (`python -m headport.validate.report`).
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from headport.metrics import Drift

__all__ = [
    "REPORT_SCHEMA_VERSION",
    "CandidateFacts",
    "GateResult",
    "GreedyRun",
    "MachineFacts",
    "Metric",
    "Metrics",
    "Position",
    "Protocol",
    "ReferenceFacts",
    "Report",
    "SliceReport",
    "Timing",
    "Verdict",
    "metrics_from_drift",
    "report_schema",
]

REPORT_SCHEMA_VERSION: Final = 1
SCHEMA_FILE = Path(__file__).with_name("report.schema.json")

Verdict = Literal["passed", "failed", "undecided"]


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every record of the report."""


class Metric(_Record, frozen=True):
    """One figure; `low` and `high` bound it where an interval is known.

    `value` is null where the figure has no meaning, such as a rate over no position, or is not
    finite.
    """

    value: float | None
    low: float | None = None
    high: float | None = None


class Metrics(_Record, frozen=True):
    """All figures of one text, or of all texts together.

    Agreements are shares in [0, 1]; KL is KL(reference ‖ candidate) per position in nats; the
    ratio is candidate / reference; errors are in logits.
    """

    top1_agreement: Metric
    top5_agreement: Metric
    top10_agreement: Metric
    top1_agreement_tie_adjusted: Metric
    top5_agreement_tie_adjusted: Metric
    top10_agreement_tie_adjusted: Metric
    perplexity_reference: Metric
    perplexity_candidate: Metric
    perplexity_ratio: Metric
    bits_per_byte_reference: Metric
    bits_per_byte_candidate: Metric
    kl_mean: Metric
    kl_p99: Metric
    kl_max: Metric
    max_abs_logit_error: Metric


class GateResult(_Record, frozen=True):
    """One limit and how the figure lies to it; a null bound is no bound."""

    metric: str
    slice: str | None  # None: all texts together
    min: float | None
    max: float | None
    value: float | None
    verdict: Verdict


class Protocol(_Record, frozen=True):
    """How the figures were obtained: with other settings they would be others."""

    description: str  # one sentence that may stand beside any figure
    documents: str  # what a document is
    counting: str  # which tokens are scored
    special_tokens: str  # what the tokenizer adds to a document
    window: int  # tokens fed at most per window
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


class ReferenceFacts(_Record, frozen=True):
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


class CandidateFacts(_Record, frozen=True):
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


class MachineFacts(_Record, frozen=True):
    """Where it ran."""

    system: str
    cpu: str
    cpus: int  # usable by this process
    memory_bytes: int | None
    python: str


class Timing(_Record, frozen=True):
    """Seconds. Reference and candidate overlap, so the parts add up to more than `total`."""

    reference: float  # forward passes of the reference
    candidate: float  # backbone and head of the bundle
    metrics: float
    total: float  # scoring, loading excluded
    greedy: float


class Position(_Record, frozen=True):
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


class GreedyRun(_Record, frozen=True):
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


class SliceReport(_Record, frozen=True):
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


class Report(_Record, frozen=True):
    """The outcome of one validation."""

    schema_version: Literal[1]
    verdict: Verdict
    date: str  # UTC, ISO 8601
    headport: str
    gates: tuple[GateResult, ...]
    gates_source: str
    tokens_scored: int
    documents: int
    bytes_scored: int
    metrics: Metrics
    slices: tuple[SliceReport, ...]
    worst: tuple[Position, ...]
    notes: tuple[str, ...]
    protocol: Protocol
    reference: ReferenceFacts
    candidate: CandidateFacts
    machine: MachineFacts
    timing: Timing

    def __bool__(self) -> bool:
        return self.verdict == "passed"


def metrics_from_drift(drift: Drift) -> Metrics:
    """The figures as the report holds them; no interval is known yet."""
    values = dataclasses.asdict(drift)
    return Metrics(**{name: Metric(value=_finite(value)) for name, value in values.items()})


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def report_schema() -> dict[str, Any]:
    """The JSON schema (2020-12) of `report.json`."""
    schema = msgspec.json.schema(Report)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def schema_text() -> str:
    """The schema as the text of `report.schema.json`."""
    return msgspec.json.format(msgspec.json.encode(report_schema()), indent=2).decode() + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
