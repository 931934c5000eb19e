"""The loop: one backbone run per step for all rows, finished rows idle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headport.errors import HeadportError
from headport.runner import Runner
from headport.runtime.results import Stats, Token
from headport.runtime.row import Row
from headport.runtime.sampling.chooser import Chooser

__all__ = ["Decoder"]


@dataclass(frozen=True)
class Decoder:
    """Continues rows with one runner and one of its heads."""

    runner: Runner
    stats: Stats
    chooser: Chooser

    def run(self, rows: Sequence[Row]) -> Iterator[list[Token | None]]:
        """Continue all rows to their end.

        Yields:
            After each step one entry per row: its new token, or None where it had ended.

        Raises:
            NonFiniteError: If a row's logits are not finite.
            RequestError: If a row's rules ban every token, or a callback fails.
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
            last_hidden = hidden[alive, lengths[alive] - 1]
            chosen = self.chooser.choose(last_hidden, [rows[b] for b in alive])
            tokens: list[Token | None] = [None] * len(rows)
            for b, choice in zip(alive, chosen, strict=True):
                if isinstance(choice, HeadportError):
                    raise choice
                tokens[b] = rows[b].accept(choice)
            self.stats.new_tokens += len(alive)
            yield tokens
            lengths = np.array([row.finish_reason is None for row in rows], np.int64)
            if not lengths.any():
                return
            last = np.array([[row.token_ids[-1]] for row in rows], np.int64)
            hidden = self.runner.forward(cache, last, lengths)
            self.stats.steps += 1
