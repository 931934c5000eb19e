"""What an analysis found: of each figure the reference's value and the candidate's."""

from __future__ import annotations

from typing import Final

from headport.validate.evidence import Record

__all__ = [
    "ANALYSIS_SCHEMA_VERSION",
    "AnalysisReport",
    "Certainty",
    "Ends",
    "Lens",
    "LensLayer",
    "LoopRun",
    "Quantiles",
    "SideTerm",
    "Term",
]

ANALYSIS_SCHEMA_VERSION: Final = 2  # 2: lens


class SideTerm(Record, frozen=True):
    """How one side stands to a term, over all positions."""

    mean_probability: float
    max_probability: float
    best_rank: int  # at the position with the largest probability, from 1
    in_top_10: int  # positions


class Term(Record, frozen=True):
    """A term of the watch-list, by the first tokens of its spellings."""

    term: str
    tokens: tuple[str, ...]  # with and without a space before it
    reference: SideTerm
    candidate: SideTerm
    context: str  # before the position at which the candidate's probability is largest


class Ends(Record, frozen=True):
    """Probability of the end-of-text tokens; null where there is no such position."""

    tokens: tuple[str, ...]
    documents: int  # with a true end
    reference_at_end: float | None  # mean, after the last token of a document
    candidate_at_end: float | None
    reference_elsewhere: float | None  # mean over all other positions
    candidate_elsewhere: float | None


class LoopRun(Record, frozen=True):
    """A greedy continuation that ends in a repetition on at least one side."""

    slice: str
    document: int
    new_tokens: int
    reference_period: int | None  # tokens; None: no repetition
    candidate_period: int | None
    reference_text: str  # what is repeated
    candidate_text: str


class Quantiles(Record, frozen=True):
    """Of a figure over all positions."""

    p1: float
    p10: float
    p50: float
    p90: float
    p99: float


class Certainty(Record, frozen=True):
    """How sure each side is."""

    reference_entropy: Quantiles  # nats
    candidate_entropy: Quantiles
    reference_margin: Quantiles  # logits, first choice minus second
    candidate_margin: Quantiles


class LensLayer(Record, frozen=True):
    """What the reference would say if it ended after a layer."""

    after: str
    choices: tuple[str, ...]  # likeliest token at each shown position
    probabilities: tuple[float, ...]  # of it
    agreement: float  # share of all positions at which it is what the whole model chooses
    of_final: float  # mean probability of what the whole model chooses, over all positions


class Lens(Record, frozen=True):
    """The reference's layers, each read through its own last norm and head."""

    positions: int  # at the beginning of the first text
    tokens: tuple[str, ...]  # at the shown positions, which are the last of those
    layers: tuple[LensLayer, ...]  # the embedding first, the whole model last


class AnalysisReport(Record, frozen=True):
    """The outcome of `headport analyse`."""

    schema_version: int
    bundle: str
    manifest_sha256: str
    reference: str
    reference_sha256: str
    texts: tuple[str, ...]
    tokens: int  # positions looked at
    terms: tuple[Term, ...]
    ends: Ends | None  # None: no end-of-text token is known
    prompts: int  # continued greedily
    loops: tuple[LoopRun, ...]
    certainty: Certainty
    lens: Lens | None = None  # where it was asked for
