"""Beam search without a model: log-probabilities in, the beams to go on with out.

The rules are those of transformers 5.24 (`generation/utils.py`, `_beam_search`), one prompt at a
time and in float64. Where transformers marks what is no beam with a score of -1e9, nothing is kept
here, so that what is returned is always a real reply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headport.runtime.sampling.largest import largest
from headport.runtime.sampling.settings import Beams

__all__ = ["BeamState", "Hypothesis"]

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Hypothesis:
    """A reply, complete or not."""

    token_ids: tuple[int, ...]  # new tokens, original ids
    log_p: float  # Σ of the processed ln p of its tokens
    score: float = 0.0  # of a complete one: log_p / tokens ^ length_penalty


@dataclass
class BeamState:
    """The beams of one prompt.

    Args:
        beams: How many there are, and when to end.
        max_new_tokens: Where every beam ends.
        end_tokens: Number of end tokens; more of them make more candidates.
        ends: Whether a reply ends with its last token.
    """

    beams: Beams
    max_new_tokens: int
    end_tokens: int
    ends: Callable[[tuple[int, ...]], bool]
    open: list[Hypothesis] = field(default_factory=lambda: [Hypothesis((), 0.0)])  # best first
    complete: list[Hypothesis] = field(default_factory=list)  # best first, at most num_beams
    done: bool = False

    def advance(self, log_p: Float64, ids: Int64) -> list[int]:
        """One step: the best continuations become complete or stay open.

        Args:
            log_p: Processed ln p of each token after each open beam, [open, K]; -inf is banned.
            ids: Original id of each column, ascending, [K].

        Returns:
            For each beam that is open now, which of the open ones before it continues; its token
            is its last.
        """
        total = np.array([beam.log_p for beam in self.open])[:, None] + log_p
        best = largest(total.ravel(), max(2, 1 + self.end_tokens) * self.beams.num_beams)
        sources, columns = np.divmod(best, len(ids))
        opened: list[Hypothesis] = []
        origins: list[int] = []
        for rank, (source, column) in enumerate(
            zip(sources.tolist(), columns.tolist(), strict=True)
        ):
            tokens = (*self.open[source].token_ids, int(ids[column]))
            found = Hypothesis(tokens, float(total[source, column]))
            if not self.ends(tokens):
                opened.append(found)
                origins.append(source)
            elif rank < self.beams.num_beams:  # the others only stand by for beams that end
                self._complete(found)
        self.open, origins = opened[: self.beams.num_beams], origins[: self.beams.num_beams]
        self.done = not self.open or self._settled()
        return origins

    def _complete(self, found: Hypothesis) -> None:
        score = found.log_p / len(found.token_ids) ** self.beams.length_penalty
        self.complete.append(Hypothesis(found.token_ids, found.log_p, score))
        self.complete.sort(key=lambda each: -each.score)  # stable: of equal ones the older is first
        del self.complete[self.beams.num_beams :]

    def _settled(self) -> bool:
        """Whether there are enough complete replies, and no open beam is taken to become better."""
        if len(self.complete) < self.beams.num_beams:
            return False
        if self.beams.early_stopping is True:
            return True
        lasting = self.beams.early_stopping == "never" and self.beams.length_penalty > 0
        length = self.max_new_tokens if lasting else len(self.open[0].token_ids)
        hope = self.open[0].log_p / length**self.beams.length_penalty
        return bool(hope <= self.complete[-1].score)

    def best(self, n: int) -> Sequence[Hypothesis]:
        """The n best complete replies, best first; fewer where fewer were found."""
        return self.complete[:n]
