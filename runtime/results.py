"""What the runtime gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from headport.runtime.parameters import Parameters

__all__ = ["FinishReason", "Generation", "Score", "Stats", "Token"]

FinishReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True)
class Generation:
    """The reply to one prompt. All ids are original ids."""

    text: str  # the new text; special tokens and a stop text are not in it
    token_ids: list[int]  # new tokens only, a stopping EOS included
    finish_reason: FinishReason
    seed: int | None  # what the noise was keyed with; None where none was drawn or given
    prompt_token_ids: list[int]
    parameters: Parameters


@dataclass(frozen=True)
class Token:
    """One new token of a stream."""

    token_id: int
    text: str  # what became definite with it; joined over a stream this is the reply's text
    step: int  # 0 for the first new token
    finish_reason: FinishReason | None  # set on the last token only


@dataclass(frozen=True)
class Score:
    """How well a text is predicted, token by token."""

    token_ids: list[int]  # [T]
    nll: npt.NDArray[np.float64]  # -ln p(token | tokens before), nats, [T]; 0 where not scored
    mask: npt.NDArray[np.bool_]  # which tokens are scored, [T]: all but the first


@dataclass
class Stats:
    """Counts since the generator was made."""

    requests: int = 0  # calls of generate and stream that passed their checks
    prefill_runs: int = 0  # backbone runs over prompts, one per request
    steps: int = 0  # backbone runs after that, one per step for all rows of a request
    prompt_tokens: int = 0
    new_tokens: int = 0
    certified: int = 0  # tokens chosen from a head's candidates, proved to be the exact choice
    fallbacks: int = 0  # tokens that took all logits because candidates did not decide
    unproved: int = 0  # tokens chosen without proof, by `exact=False` or without a certificate
    # greedy, temperature, min_p, top_p, top_k → the three counts above
    modes: dict[str, dict[str, int]] = field(default_factory=dict)

    def count_mode(self, mode: str, kind: str) -> None:
        """Count one token of a mode as certified, fallbacks or unproved."""
        counts = self.modes.setdefault(mode, {"certified": 0, "fallbacks": 0, "unproved": 0})
        counts[kind] += 1
