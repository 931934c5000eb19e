"""Beam search with a model: one prompt, `num_beams` rows of one cache.

prompt in row 0 ─► its cache to all rows ─► ln p of the open beams ─► processors ─► BeamState
      ▲                                                                                │
      └────────────── last tokens ◄── rows reordered to what each beam continues ◄──────┘
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from headport.errors import RequestError
from headport.runner import Cache, Runner
from headport.runtime.conditions import conditioned
from headport.runtime.row import Row
from headport.runtime.sampling.allowed import ask_allowed
from headport.runtime.sampling.beam_state import BeamState, Hypothesis
from headport.runtime.sampling.choice import Choice
from headport.runtime.sampling.chooser import Chooser
from headport.runtime.sampling.filters import log_softmax
from headport.runtime.sampling.processors import apply_processors, overruled
from headport.runtime.sampling.sampler import faults
from headport.runtime.sampling.settings import Context

__all__ = ["BeamSearch"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


class BeamSearch:
    """One prompt on its way; a step is a piece of the prompt, or one more token for every beam.

    Args:
        runner: Runs the backbone.
        chooser: Gives the logits; its choices are not asked for.
        new_row: Makes an empty row of the prompt, for each reply.
        ids: Original ids, ascending, [K].
        chunk: Prompt tokens per run of the backbone.

    Raises:
        PromptError: If the prompt and its reply do not fit the context.
    """

    def __init__(
        self,
        runner: Runner,
        chooser: Chooser,
        new_row: Callable[[], Row],
        ids: Int64,
        chunk: int,
    ) -> None:
        self._runner = runner
        self._chooser = chooser
        self._new_row = new_row
        self._ids = ids
        self._prompt = new_row()
        self._parameters = self._prompt.parameters
        self._ends = frozenset(self._parameters.eos_token_ids)
        self._state = BeamState(
            self._parameters.beams,
            self._parameters.max_new_tokens,
            len(self._parameters.eos_token_ids),
            self._is_complete,
        )
        self._chunk = chunk
        self._fed = 0  # prompt tokens in the cache
        self._cache: Cache | None = None
        self._origins: list[int] = []

    @property
    def done(self) -> bool:
        """Whether the replies are there."""
        return self._state.done

    def run(self) -> list[Row]:
        """Take all steps; see `replies`."""
        while not self.done:
            self.step()
        return self.replies()

    def step(self) -> None:
        """Run a piece of the prompt; behind its end, continue every open beam by one token.

        Raises:
            NonFiniteError: If a row's logits are not finite.
            RequestError: If the request's rules ban every token, or a callback fails.
        """
        hidden = self._prefill() if self._fed < self._length else self._decode()
        if self._fed < self._length:
            return
        logits = self._chooser.logits(conditioned(hidden, [self._prompt] * len(hidden)))
        contexts = [self._context(rank, beam) for rank, beam in enumerate(self._state.open)]
        broken = faults(logits, [(c.index, len(c.token_ids)) for c in contexts])
        for error in broken.values():
            raise error
        self._origins = self._state.advance(self._processed(logits, contexts), self._ids)
        if not self._state.open and not self._state.complete:
            raise RequestError(
                f"prompt {self._prompt.index}, step {len(contexts[0].token_ids)}: the request's "
                "rules ban every token after every beam; loosen them"
            )

    def replies(self) -> list[Row]:
        """The best replies, best first, as rows that have ended; each with its score."""
        return [self._reply(rank, each) for rank, each in enumerate(self._best())]

    def _best(self) -> list[Hypothesis]:
        return list(self._state.best(self._parameters.n))

    def _reply(self, rank: int, found: Hypothesis) -> Row:
        row = replace(self._played(found.token_ids), sample=rank, score=found.score)
        assert row.finish_reason is not None
        return row

    @property
    def _length(self) -> int:
        return len(self._prompt.prompt_token_ids)

    def _prefill(self) -> Float32:
        """States of the last token that was run, [1, H]."""
        beams, cache = self._parameters.beams.num_beams, self._cache
        if cache is None:
            room = self._length + self._parameters.max_new_tokens
            cache = self._cache = self._runner.new_cache(beams, room)
            if self._prompt.source is not None:
                self._prompt.source.fill(cache)
        piece = self._prompt.prompt_token_ids[self._fed : self._fed + self._chunk]
        tokens, lengths = np.zeros((beams, len(piece)), np.int64), np.zeros(beams, np.int64)
        tokens[0], lengths[0] = piece, len(piece)
        hidden = self._runner.forward(cache, tokens, lengths)[:1, len(piece) - 1]
        self._fed += len(piece)
        if self._fed == self._length:
            self._runner.reorder(cache, np.zeros(beams, np.int64))
        return hidden

    def _decode(self) -> Float32:
        cache = self._cache
        assert cache is not None
        beams, count = self._parameters.beams.num_beams, len(self._state.open)
        rows, tokens = np.zeros(beams, np.int64), np.zeros((beams, 1), np.int64)
        rows[:count] = self._origins
        tokens[:count, 0] = [beam.token_ids[-1] for beam in self._state.open]
        self._runner.reorder(cache, rows)
        return self._runner.forward(cache, tokens, (np.arange(beams) < count).astype(np.int64))[
            :count, 0
        ]

    def _context(self, rank: int, beam: Hypothesis) -> Context:
        return replace(self._prompt.context, token_ids=beam.token_ids, sample=rank)

    def _processed(self, logits: Float32, contexts: list[Context]) -> Float64:
        """Ln softmax of each row, then the processors, as beam search of transformers has it."""
        found, banned = [], []
        for row, context in zip(logits, contexts, strict=True):
            sampling = ask_allowed(self._parameters.sampling, context)
            found.append(apply_processors(log_softmax(row), self._ids, sampling, context))
            banned.append(overruled(self._ids, sampling, context))
        log_p = np.stack(found)
        if not all(banned):  # a beam that must end does not win while others may go on
            log_p[banned] = -np.inf
        return log_p

    def _is_complete(self, token_ids: tuple[int, ...]) -> bool:
        if token_ids[-1] in self._ends or len(token_ids) == self._parameters.max_new_tokens:
            return True
        return bool(self._parameters.stop) and self._played(token_ids).finish_reason is not None

    def _played(self, token_ids: tuple[int, ...]) -> Row:
        row = self._new_row()
        for token_id in token_ids:
            row.accept(Choice(token_id))
        return row
