"""One sequence being continued: what it asks for, what it has got, and when it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from headport.runtime.parameters import Parameters
from headport.runtime.parts import token_ids_of
from headport.runtime.results import FinishReason, Token
from headport.runtime.sampling.choice import Choice
from headport.runtime.sampling.noise import NoiseKey
from headport.runtime.sampling.settings import Context, Sampling
from headport.runtime.sources import ReadSource
from headport.runtime.text import TextStream

__all__ = ["Row"]

Float32 = npt.NDArray[np.float32]


@dataclass
class Row:
    """One sample of one prompt. It knows nothing of the batch it runs in.

    Args:
        index: The prompt's place in its request, for messages; no draw depends on it.
        prompt_token_ids: Original ids; those below 0 stand for rows of embeddings.
        parameters: What the request asks for.
        seed: Key of the noise; None only where decoding is greedy.
        text: The reply's text so far.
        watched: Text is needed with every token, not only at the end.
        source: What it reads beside its tokens, of an encoder-decoder bundle.
        sample: Index among the samples of one prompt; a part of the noise's key.
        condition: What its hidden states get added before the head, [H].
    """

    index: int
    prompt_token_ids: list[int]
    parameters: Parameters
    seed: int | None
    text: TextStream
    watched: bool
    source: ReadSource | None = field(default=None, compare=False)
    sample: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Choice] = field(default_factory=list)  # one per token, where asked for
    finish_reason: FinishReason | None = None
    score: float | None = None  # of a beam
    condition: Float32 | None = field(default=None, compare=False)

    @property
    def step(self) -> int:
        """Index of the next new token."""
        return len(self.token_ids)

    @property
    def sampling(self) -> Sampling:
        """How its tokens are chosen."""
        return self.parameters.sampling

    @property
    def noise_key(self) -> NoiseKey | None:
        """Key of the next token's noise."""
        return None if self.seed is None else NoiseKey(self.seed, self.step, self.sample)

    @property
    def context(self) -> Context:
        """What processors and callbacks may look at before the next token."""
        tokens = self.token_prompt
        return Context(
            tokens,
            tuple(self.token_ids),  # a callback may keep it
            self.parameters.eos_token_ids,
            self.index,
            self.sample,
            self.parameters.max_new_tokens,
            len(self.prompt_token_ids) - len(tokens),
        )

    @cached_property
    def token_prompt(self) -> list[int]:
        """The tokens of the prompt, without rows of embeddings."""
        return token_ids_of(self.prompt_token_ids)

    def accept(self, choice: Choice) -> Token:
        """Append a token. What ends a reply: EOS before a stop text before the limit."""
        token_id = choice.token_id
        self.token_ids.append(token_id)
        if self.parameters.logprobs is not None:
            self.logprobs.append(choice)
        part = self.text.push(token_id, look=self.watched)
        if token_id in self.parameters.eos_token_ids:
            self.finish_reason = "eos"
        elif self.text.stopped:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.parameters.max_new_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            part += self.text.finish()
            if self.text.stopped and self.finish_reason == "length":
                self.finish_reason = "stop"  # it stood in text that was held back until now
        return Token(
            token_id,
            part,
            len(self.token_ids) - 1,
            self.finish_reason,
            choice.logprob,
            choice.processed_logprob,
            choice.top_logprobs,
        )
