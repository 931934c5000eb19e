"""What is chosen from a row."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Choice", "TopLogprob"]


@dataclass(frozen=True)
class TopLogprob:
    """One of the most likely tokens of a row."""

    token_id: int
    logprob: float  # natural logarithm, of the model's own distribution


@dataclass(frozen=True)
class Choice:
    """A token, and how likely it was where that was asked for."""

    token_id: int  # original id
    logprob: float | None = None  # ln softmax(z): of the model, before any rule acts
    # ln of the probability that it was drawn with, after processors and filters; where decoding is
    # greedy, of the processed scores
    processed_logprob: float | None = None
    top_logprobs: tuple[TopLogprob, ...] = ()  # most likely first, ties by lowest id
