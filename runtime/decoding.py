"""The loop: one backbone run per step for all rows, finished rows idle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headport.runner import Runner
from headport.runtime.parameters import Parameters
from headport.runtime.results import FinishReason, Stats, Token
from headport.runtime.sampling.exact import CandidateChooser, Draw
from headport.runtime.sampling.noise import NoiseKey
from headport.runtime.sampling.sampler import check_finite, choose
from headport.runtime.text import TextStream
from headport.runtime.vocabulary import IdMap

__all__ = ["Decoder", "Row"]

Float32 = npt.NDArray[np.float32]


@dataclass
class Row:
    """One prompt being continued."""

    index: int  # the prompt's place in the request, for messages; no draw depends on it
    prompt_token_ids: list[int]
    parameters: Parameters
    seed: int | None  # None only where decoding is greedy
    text: TextStream
    watched: bool  # text is needed with every token, not only at the end
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def noise_key(self) -> NoiseKey | None:
        """Key of the next token's noise."""
        return None if self.seed is None else NoiseKey(self.seed, len(self.token_ids))

    def accept(self, token_id: int) -> Token:
        """Append a token. What ends a reply: EOS before a stop text before the limit."""
        self.token_ids.append(token_id)
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
        return Token(token_id, part, len(self.token_ids) - 1, self.finish_reason)


@dataclass(frozen=True)
class Decoder:
    """Continues rows with one runner and one of its heads."""

    runner: Runner
    head: str
    ids: IdMap
    stats: Stats
    chooser: CandidateChooser | None  # for a head that gives candidates

    def run(self, rows: Sequence[Row]) -> Iterator[list[Token | None]]:
        """Continue all rows to their end.

        Yields:
            After each step one entry per row: its new token, or None where it had ended.

        Raises:
            NonFiniteError: If a row's logits are not finite.
        """
        lengths = np.array([len(row.prompt_token_ids) for row in rows], np.int64)
        capacity = max(len(row.prompt_token_ids) + row.parameters.max_new_tokens for row in rows)
        cache = self.runner.new_cache(len(rows), capacity)
        token_ids = np.zeros((len(rows), int(lengths.max())), np.int64)
        for b, row in enumerate(rows):
            token_ids[b, : lengths[b]] = row.prompt_token_ids
        hidden = self.runner.forward(cache, token_ids, lengths)
        self.stats.prefill_runs += 1
        self.stats.prompt_tokens += int(lengths.sum())
        while True:
            alive = np.flatnonzero(lengths).tolist()
            chosen = self._choose(hidden[alive, lengths[alive] - 1], [rows[b] for b in alive])
            tokens: list[Token | None] = [None] * len(rows)
            for b, token_id in zip(alive, chosen, strict=True):
                tokens[b] = rows[b].accept(token_id)
            self.stats.new_tokens += len(alive)
            yield tokens
            lengths = np.array([row.finish_reason is None for row in rows], np.int64)
            if not lengths.any():
                return
            last = np.array([[row.token_ids[-1]] for row in rows], np.int64)
            hidden = self.runner.forward(cache, last, lengths)
            self.stats.steps += 1

    def _choose(self, hidden: Float32, rows: Sequence[Row]) -> list[int]:
        """One token per row from its last hidden state, [N, H]."""
        if self.chooser is not None:
            return self.chooser.choose(hidden, [_draw(row) for row in rows])
        output = self.runner.head(hidden, self.head)
        assert output.logits is not None
        logits = self.ids.rows(output.logits)
        _check(logits, rows)
        return [
            choose(logits[n], self.ids.ids, row.parameters.sampling, row.noise_key)
            for n, row in enumerate(rows)
        ]


def _draw(row: Row) -> Draw:
    return Draw(row.index, len(row.token_ids), row.parameters.sampling, row.noise_key)


def _check(logits: Float32, rows: Sequence[Row]) -> None:
    check_finite(logits, [row.index for row in rows], len(rows[0].token_ids))
