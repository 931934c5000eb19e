"""What the runtime gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from headport.errors import CancelledRequestError, DeadlineError
from headport.runtime.parameters import Parameters
from headport.runtime.sampling.choice import Choice, TopLogprob

__all__ = ["Choice", "FinishReason", "Generation", "Score", "Stats", "Token", "TopLogprob"]

FinishReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True)
class Generation:
    """The reply to one prompt. All ids are original ids."""

    text: str  # the new text; special tokens and a stop text are not in it
    token_ids: list[int]  # new tokens only, a stopping EOS included
    finish_reason: FinishReason
    seed: int | None  # what the noise was keyed with; None where none was drawn or given
    # Of an encoder-decoder bundle the decoder's start and prefix; never rows of embeddings.
    prompt_token_ids: list[int]
    parameters: Parameters
    # Place of the prompt in its request; equal replies are equal wherever they stood.
    index: int = field(default=0, compare=False)
    sample: int = 0  # place among the replies to one prompt
    logprobs: list[Choice] = field(default_factory=list)  # one per token, where asked for
    score: float | None = None  # of a beam: Σ ln p / tokens ^ length_penalty


@dataclass(frozen=True)
class Token:
    """One new token of a stream."""

    token_id: int
    text: str  # what became definite with it; joined over a stream this is the reply's text
    step: int  # 0 for the first new token
    finish_reason: FinishReason | None  # set on the last token only
    logprob: float | None = None  # as `Choice`, where asked for
    processed_logprob: float | None = None
    top_logprobs: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True)
class Score:
    """How well a text is predicted, token by token."""

    token_ids: list[int]  # [T], as they were given, padding included
    nll: npt.NDArray[np.float64]  # -ln p(token | tokens before), nats, [T]; 0 where not scored
    mask: npt.NDArray[np.bool_]  # which tokens are scored, [T]; never the first

    @property
    def tokens(self) -> int:
        """How many tokens are scored."""
        return int(self.mask.sum())

    @property
    def mean(self) -> float:
        """Mean NLL of the scored tokens, nats; NaN where there are none."""
        return float(self.nll[self.mask].mean()) if self.tokens else float("nan")


@dataclass
class Stats:
    """Counts since the generator was made."""

    slots: int = 0  # rows that are worked on at once
    context: int = 0  # tokens that a slot holds
    cache_bytes: int = 0  # of all slots; 0 before the first request
    prefill_chunk: int = 0  # prompt tokens per backbone run
    threads: int = 0  # of ONNX Runtime; 0 where a runner was given
    spinning: bool = False  # they wait for the next operator by spinning
    tuned: bool = False  # both as the bundle records for this kind of machine
    requests: int = 0  # calls of generate and stream that passed their checks
    prefill_runs: int = 0  # backbone runs over prompts, one per chunk
    steps: int = 0  # backbone runs after that, one per step for all rows
    prompt_tokens: int = 0  # that were run
    encoder_runs: int = 0  # of an encoder-decoder bundle: one per source of a request
    source_tokens: int = 0  # places of those sources
    condition_runs: int = 0  # conditions projected; named ones once each
    reused_tokens: int = 0  # prompt tokens taken over from an earlier prompt's cache
    new_tokens: int = 0
    moved_rows: int = 0  # caches copied so that running rows stay side by side
    most_rows: int = 0  # in slots at once
    most_waiting: int = 0  # rows without a slot at once
    refused: int = 0  # requests turned away because too many rows waited
    cancelled: int = 0  # requests
    timed_out: int = 0  # requests
    failed: int = 0  # requests, ended by any other error while they ran
    certified: int = 0  # tokens chosen from a head's candidates, proved to be the exact choice
    fallbacks: int = 0  # tokens that took all logits because candidates did not decide
    unproved: int = 0  # tokens chosen without proof, by `exact=False` or without a certificate
    few_rows: int = 0  # tokens chosen from logits of the few allowed ones alone
    # greedy, temperature or the first filter, and whether processors act → the three counts above
    modes: dict[str, dict[str, int]] = field(default_factory=dict)

    def count_mode(self, mode: str, kind: str) -> None:
        """Count one token of a mode as certified, fallbacks or unproved."""
        counts = self.modes.setdefault(mode, {"certified": 0, "fallbacks": 0, "unproved": 0})
        counts[kind] += 1

    def count_end(self, error: BaseException) -> None:
        """Count a request that ended with an error."""
        name = next((name for kind, name in _ENDS if isinstance(error, kind)), "failed")
        setattr(self, name, getattr(self, name) + 1)


_ENDS: tuple[tuple[type[BaseException], str], ...] = (
    (CancelledRequestError, "cancelled"),
    (DeadlineError, "timed_out"),
)
