"""What a generator says about tokens it is given: text, hidden states, logits, likelihoods."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.bundle import Bundle
from headport.condition import Conditions
from headport.errors import PromptError, RequestError
from headport.runtime.chat import chat_ids
from headport.runtime.conditions import Condition, read_vector
from headport.runtime.inputs import Input, Inputs
from headport.runtime.parts import Parts
from headport.runtime.prompts import Prompt, read_masks, read_prompts, read_starts, unknown_ids
from headport.runtime.results import Score, Stats
from headport.runtime.scheduling.scheduler import Scheduler
from headport.runtime.scoring import Scorer, target_mask
from headport.runtime.text import Tokens
from headport.runtime.vocabulary import IdMap

__all__ = ["GivenTokens"]


class GivenTokens:
    """The part of `Generator` that samples nothing. All ids it takes and gives are original ids."""

    bundle: Bundle
    head: str
    max_context: int
    _conditions: Conditions | None
    _ids: IdMap
    _inputs: Inputs
    _tokens: Tokens
    _scheduler: Scheduler
    _scorer: Scorer
    _stats: Stats

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Token ids of a conversation by the bundle's chat template: a prompt for `generate`.

        Args:
            messages: Mappings with `role` and `content`, oldest first.
            **variables: More names the template may read, such as `tools`.

        Raises:
            BundleError: If the bundle has no usable chat template.
            RequestError: If the template refuses the messages.
        """
        return chat_ids(self.bundle, self._tokens, messages, variables)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, as a prompt has them."""
        return self._tokens.encode(text)

    def spell(self, token_id: int) -> str:
        """Text of one token alone; of a special token its name. Errors as `decode`."""
        return self.decode([token_id]) or self._tokens.piece(token_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out.

        Raises:
            PromptError: Naming the ids that the vocabulary does not have.
        """
        if unknown := unknown_ids(token_ids, self._ids.size):
            raise PromptError(unknown)
        return self._tokens.decode(token_ids)

    def logits(
        self,
        token_ids: Sequence[int] | Parts,
        *,
        source: Input | None = None,
        condition: Condition | None = None,
    ) -> npt.NDArray[np.float32]:
        """Raw logits after each token: no temperature, no filter.

        Args:
            token_ids: Original ids, [T]; or parts with rows of embeddings.
            source: Of an encoder-decoder bundle: what they answer to.
            condition: Of a bundle with conditions: a stored name or values [C].

        Returns:
            float32 [T, V]; -inf where an id was pruned.

        Raises:
            PromptError: If there are none, or unknown ones, or more than the context holds.
            RequestError: If the condition is unknown or of another size.
        """
        ids, read = self._read(token_ids), self._inputs.source(source)
        vector = read_vector(condition, self._conditions, self._stats)
        found: npt.NDArray[np.float32] = self._scheduler.run(
            self._scorer.logits(ids, self.head, read, vector)
        )
        return found

    def hidden_states(
        self, token_ids: Sequence[int] | Parts, *, source: Input | None = None
    ) -> npt.NDArray[np.float32]:
        """Hidden states after the final norm, of each token: what the heads are given.

        Args:
            token_ids: Original ids, [T]; or parts with rows of embeddings.
            source: As `logits`.

        Returns:
            float32 [T, H].

        Raises:
            PromptError: As `logits`.
        """
        ids, read = self._read(token_ids), self._inputs.source(source)
        found: npt.NDArray[np.float32] = self._scheduler.run(self._scorer.hidden_states(ids, read))
        return found

    def outputs(
        self, token_ids: Sequence[int] | Parts, head: str, *, source: Input | None = None
    ) -> npt.NDArray[np.float32]:
        """What any head of the bundle gives after each token, columns as the head has them.

        Args:
            token_ids: Original ids, [T]; or parts with rows of embeddings.
            head: Its name: the one that tokens are chosen with, or one of `more_heads`.
            source: As `logits`.

        Returns:
            float32 [T, width of the head].

        Raises:
            PromptError: As `logits`.
            BundleError: If the head is not loaded.
        """
        ids, read = self._read(token_ids), self._inputs.source(source)
        found: npt.NDArray[np.float32] = self._scheduler.run(self._scorer.outputs(ids, head, read))
        return found

    def score(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        prompt_tokens: int | Sequence[int] = 0,
        ignore_ids: Collection[int] = (),
        attention_masks: Sequence[Sequence[int]] | None = None,
        sources: Sequence[Input] | None = None,
        condition: Condition | None = None,
    ) -> list[Score]:
        """Negative log-likelihood of each token of each text, one text at a time.

        The first token of a text has nothing before it and is never scored. The arguments below
        leave more out; what is left out is still read as context, padding apart.

        Args:
            texts: Texts or id lists, or one of them, each within the context.
            prompt_tokens: How many tokens at the start of each text are a prompt, which counts for
                nothing; one number for all, or one each.
            ignore_ids: Tokens that are not scored wherever they stand.
            attention_masks: Of id lists that are padded, on either side: 1 for each token and 0
                for each padding, as a tokenizer gives them.
            sources: Of an encoder-decoder bundle: what each text answers to. Its start token is
                part of the text.
            condition: As `logits`, for all texts.

        Raises:
            PromptError: As `logits`; if a mask does not fit its text.
            RequestError: If `prompt_tokens` are not one number or one per text.
        """
        found = read_prompts(texts, self._tokens, self._ids.size)
        masks = read_masks(attention_masks, found)
        starts = read_starts(prompt_tokens, len(found))
        given = [None] * len(found) if sources is None else sources
        if len(given) != len(found):
            raise RequestError(
                f"one source per text was expected: {len(found)}, {len(given)} given"
            )
        read = [self._inputs.source(each) for each in given]
        vector = read_vector(condition, self._conditions, self._stats)
        scores = []
        for ids, valid, start, source in zip(found, masks, starts, read, strict=True):
            self._checked(np.asarray(ids)[valid].tolist())
            mask = target_mask(ids, valid, start, ignore_ids)
            steps = self._scorer.score(ids, mask, valid, self.head, source, condition=vector)
            scores.append(self._scheduler.run(steps))
        return scores

    def _checked(self, token_ids: Sequence[int]) -> None:
        self._fitting(read_prompts([token_ids], self._tokens, self._ids.size)[0])

    def _read(self, token_ids: Sequence[int] | Parts) -> list[int]:
        return self._fitting(self._inputs.tokens_of(token_ids))

    def _fitting(self, ids: list[int]) -> list[int]:
        if len(ids) > self.max_context:
            raise PromptError(
                f"{len(ids)} tokens were given, but the context holds {self.max_context}; "
                "cut the text into windows"
            )
        return ids
