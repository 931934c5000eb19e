"""Records of what explains a verdict: flips, attribution, noise floor, sampler; a figure's."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = [
    "AttributedPart",
    "Attribution",
    "BisectedStage",
    "Bisection",
    "Flip",
    "Flips",
    "Metric",
    "NoiseFloor",
    "Record",
    "SamplerCase",
    "SamplerParity",
    "Verdict",
]

Verdict = Literal["passed", "failed", "undecided"]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every record of the report."""


class Metric(Record, frozen=True):
    """One figure with its 95 % confidence interval [low, high] and standard error.

    `value` is null where the figure has no meaning, such as a rate over no position, or is not
    finite. Interval and error are null where none is known: for extremes and percentiles, and for
    fewer than two documents.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    error: float | None = None


class Flip(Record, frozen=True):
    """A position where the two sides choose another token, widest margin first."""

    slice: str
    document: int
    token: int
    reference_top1: str
    candidate_top1: str
    margin: float  # reference logit of its own choice minus that of the candidate's
    logit_noise: float  # RMS over the vocabulary at this position, mean removed


class Flips(Record, frozen=True):
    """Every position where the two sides choose another token, explained by its margin.

    `noise` is σ, the median over the run of a position's RMS of logit differences, their mean
    removed. A difference of two logits that each move by noise of RMS σ has RMS √2 σ; a margin
    within `noise_factor` of that is what noise of this size overcomes now and then.
    """

    positions: int  # compared
    noise: float | None  # σ, logits; None: written by an earlier release
    noise_factor: float
    near_ties: int  # margin within the near-tie bound: float32 rounding decides
    within_noise: int  # margin within noise_factor · √2 · σ
    beyond_noise: int  # wider: something else than this run's noise is at work there
    widest: tuple[Flip, ...]


class AttributedPart(Record, frozen=True):
    """What exchanging one part of the reference for the candidate's does."""

    part: str
    measured: str  # which two logits are compared
    kl_mean: float
    top1_agreement: float
    nll_difference: float  # nats per token; these add up to the whole drift
    max_abs_logit_error: float


class Attribution(Record, frozen=True):
    """The drift split along a chain from the reference to the candidate, on some of the tokens."""

    tokens: int
    parts: tuple[AttributedPart, ...]
    largest: str  # part with the largest KL
    finding: str  # one sentence


class NoiseFloor(Record, frozen=True):
    """The reference against itself through another code path."""

    path: str
    tokens: int
    kl_mean: float
    top1_agreement: float
    max_abs_logit_error: float
    perplexity_ratio: float


class BisectedStage(Record, frozen=True):
    """One stage of the backbone: the embedding, a layer, the final norm.

    Errors are RMS over the state, as a share of what they are compared with, mean over positions.
    """

    stage: str
    error: float  # of the state behind it in the whole run, as a share of that state
    own_error: float  # fed the reference's own state, as a share of what the stage adds to it
    noise: float  # what rounding explains of `own_error`
    limit: float  # above it the stage counts as leaving the reference


class Bisection(Record, frozen=True):
    """Which stage of the backbone first leaves the reference by more than the noise."""

    tokens: int
    noise: str  # what the noise was taken from
    stages: tuple[BisectedStage, ...]
    first: str | None  # None: no stage does
    finding: str  # one sentence


class SamplerCase(Record, frozen=True):
    """One row of the grid of sampling parameters."""

    runtime: str
    parameters: str
    draws: int
    equal: int
    first_difference: str  # empty where all are equal


class SamplerParity(Record, frozen=True):
    """Tokens drawn from the same logits with the same noise on both sides."""

    reference: str  # what drew on the reference's side
    positions: int
    cases: tuple[SamplerCase, ...]
    distribution: str  # what the free-running test compared
    distribution_p_value: float | None  # smallest, times the number of tests
    verdict: Verdict
