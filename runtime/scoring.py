"""Hidden states, logits and scores of given tokens: no sampling, no defaults, each token once.

All are jobs: iterators that do one bounded piece of work per step, so that a scheduler can fit them
between the steps of other requests, and that return their result.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headport.runner import Runner
from headport.runtime.results import Score
from headport.runtime.sources import ReadSource
from headport.runtime.vocabulary import IdMap

__all__ = ["Scorer", "target_mask"]

Float32 = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Steps = Generator[None, None, Float32]

_ROWS = 256  # head rows at a time: bounds the memory that a long text with a large V needs


def target_mask(
    token_ids: Sequence[int],
    valid: Bools,
    prompt_tokens: int = 0,
    ignore_ids: Collection[int] = (),
) -> Bools:
    """Which tokens of a text count: [T] → bool [T].

    Not the first, which nothing predicts; not the `prompt_tokens` first ones; none of `ignore_ids`;
    no padding, for which `valid` [T] is False. Padding is not counted among the first ones either.
    """
    place = np.cumsum(valid) - 1
    ignored = np.isin(np.asarray(token_ids, np.int64), list(ignore_ids))
    mask: Bools = valid & (place >= max(1, prompt_tokens)) & ~ignored
    return mask


@dataclass(frozen=True)
class Scorer:
    """Runs given tokens through a backbone and its heads.

    Tokens are run in chunks on the grid that generation runs its prompts on, so a prompt has the
    same logits here and there.
    """

    runner: Runner
    ids: IdMap
    chunk: int  # tokens per backbone run

    def hidden_states(self, token_ids: Sequence[int], source: ReadSource | None = None) -> Steps:
        """Hidden states after the final norm, [T] → float32 [T, H].

        Args:
            token_ids: [T].
            source: What they answer to, of an encoder-decoder bundle.
        """
        ids = np.array([token_ids], np.int64)
        cache = self.runner.new_cache(1, len(token_ids))
        if source is not None:
            source.fill(cache)
        parts = []
        for start in range(0, len(token_ids), self.chunk):
            piece = ids[:, start : start + self.chunk]
            parts.append(self.runner.forward(cache, piece, np.array([piece.shape[1]]))[0])
            yield
        return np.concatenate(parts)

    def outputs(
        self, token_ids: Sequence[int], head: str, source: ReadSource | None = None
    ) -> Steps:
        """What a head gives after each token, as its graph gives it: [T] → float32 [T, width]."""
        hidden = yield from self.hidden_states(token_ids, source)
        parts = []
        for start in range(0, len(hidden), _ROWS):
            parts.append(self.runner.full_logits(hidden[start : start + _ROWS], head))
            yield
        return np.concatenate(parts)

    def logits(
        self,
        token_ids: Sequence[int],
        head: str,
        source: ReadSource | None = None,
        condition: Float32 | None = None,
    ) -> Steps:
        """Raw logits after each token, by original id, -inf where an id was pruned.

        [T] → float32 [T, V]; `condition` [H] is added to the hidden states.
        """
        hidden = yield from self.hidden_states(token_ids, source)
        hidden = hidden if condition is None else hidden + condition
        found = np.empty((len(token_ids), self.ids.size), np.float32)
        for start in range(0, len(hidden), _ROWS):
            rows = self._rows(hidden[start : start + _ROWS], head)
            found[start : start + _ROWS] = self.ids.spread(rows)
            yield
        return found

    def score(
        self,
        token_ids: Sequence[int],
        mask: Bools,
        valid: Bools,
        head: str,
        source: ReadSource | None = None,
        *,
        condition: Float32 | None = None,
    ) -> Generator[None, None, Score]:
        """Negative log-likelihood of each token given those before it, in float64.

        nll[t] = ln Σ_v exp z[t-1, v] - z[t-1, token_ids[t]]. A pruned id scores infinity.

        Args:
            token_ids: [T].
            mask: Which tokens are scored, [T]; the others have nll 0.
            valid: Which tokens are there at all, [T]; the others are padding, on either side, and
                are not run.
            head: The head.
            source: What the tokens answer to, of an encoder-decoder bundle.
            condition: What is added to the hidden states, [H].
        """
        given = np.asarray(token_ids, np.int64)[valid]
        nll = np.zeros(len(given), np.float64)
        wanted = mask[valid]
        if wanted.any():
            hidden = (yield from self.hidden_states(given.tolist(), source))[:-1]
            hidden = hidden if condition is None else hidden + condition
            for start in range(0, len(hidden), _ROWS):
                rows = self._rows(hidden[start : start + _ROWS], head)
                targets = given[start + 1 : start + 1 + len(rows)]
                nll[start + 1 : start + 1 + len(rows)] = self._nll(rows, targets)
                yield
        whole = np.zeros(len(token_ids), np.float64)
        whole[valid] = np.where(wanted, nll, 0.0)
        return Score(list(token_ids), whole, mask)

    def _nll(self, logits: Float32, targets: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        rows = logits.astype(np.float64)
        largest = rows.max(axis=1, keepdims=True)
        logsumexp = np.log(np.exp(rows - largest).sum(axis=1)) + largest[:, 0]
        columns = np.minimum(np.searchsorted(self.ids.ids, targets), len(self.ids.ids) - 1)
        found = rows[np.arange(len(rows)), columns]
        known = self.ids.ids[columns] == targets
        return np.where(known, logsumexp - found, np.inf)

    def _rows(self, hidden: Float32, head: str) -> Float32:
        return self.ids.rows(self.runner.full_logits(hidden, head))
