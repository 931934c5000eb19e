"""What a price tag says. Perplexities over different vocabularies are not in it."""

from __future__ import annotations

import msgspec

__all__ = [
    "SCHEMA_VERSION",
    "Curve",
    "CurvePoint",
    "Longer",
    "PriceReport",
    "Removed",
    "Slice",
    "Spelling",
    "Suggestion",
    "Worst",
]

SCHEMA_VERSION = 1


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every record."""


class Slice(_Record, frozen=True):
    """Figures of some scored tokens, by the full vocabulary's tokenizer."""

    name: str
    tokens: int
    bytes: int  # UTF-8, of these tokens
    covered_tokens: float  # share of the tokens whose id is kept
    covered_bytes: float  # share of their bytes
    lost_mass: float  # mean probability that the reference gives to removed ids
    kl: float | None  # nats; reference renormalised on kept ids to the pruned bundle; None: none
    kl_tokens: int  # positions that could be compared


class Spelling(_Record, frozen=True):
    """The same bytes, predicted before and after pruning."""

    name: str
    bytes: int
    bits_per_byte_reference: float
    bits_per_byte_before: float  # the bundle that was pruned
    bits_per_byte_after: float  # the pruned one, of the text in kept tokens
    tokens_before: int
    tokens_after: int
    documents: int
    longer_documents: int  # with more tokens than before


class Longer(_Record, frozen=True):
    """A document that takes more tokens than before."""

    text: str  # slice
    document: int
    tokens_before: int
    tokens_after: int
    removed: tuple[str, ...]  # its most frequent tokens that are gone


class Worst(_Record, frozen=True):
    """A position at which much of the reference's probability lies on removed ids."""

    text: str
    document: int
    before: str  # the text that leads up to it
    token: str  # that followed
    kept: bool  # whether that one is kept
    lost_mass: float
    removed: str  # the likeliest removed token
    removed_probability: float


class Removed(_Record, frozen=True):
    """A removed token and what the reference thinks of it, over all positions."""

    token: str
    id: int
    mass: float  # share of all probability
    occurrences: int  # in the scored text
    count: int | None  # in the counted corpus


class CurvePoint(_Record, frozen=True):
    """A vocabulary of K tokens: what is always kept, then the most frequent and their parts."""

    kept: int  # K
    lost_mass: float
    covered_tokens: float
    head_bytes: int
    step_ms: float | None  # of the head, one row; between the two measured ones a straight line


class Suggestion(_Record, frozen=True):
    """Where to cut."""

    kept: int | None  # K; None: no size on the curve is good enough
    reason: str


class Curve(_Record, frozen=True):
    """Size, quality and time over K, from one pass over the reference."""

    points: tuple[CurvePoint, ...]
    suggestion: Suggestion
    order: str  # in words


class PriceReport(_Record, frozen=True):
    """The whole price tag."""

    schema_version: int
    bundle: str
    pruned: str
    reference: str
    mode: str  # output, both, or none
    size: int  # V of the bundle
    kept: int  # K
    kept_by_reason: dict[str, int]
    head_bytes_before: int
    head_bytes_after: int
    step_ms_before: float  # head, one row, median
    step_ms_after: float
    slices: tuple[Slice, ...]  # all, by text, by script
    spelling: tuple[Spelling, ...]  # all, by text; empty where the tokenizer cannot be rewritten
    longest: tuple[Longer, ...]
    worst: tuple[Worst, ...]
    removed: tuple[Removed, ...]
    curve: Curve | None
    notes: tuple[str, ...]
