"""Hidden states of many rows → one choice per row. What a head gives decides how it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headport.errors import HeadportError
from headport.manifest import Head
from headport.runner import Runner
from headport.runtime.results import Stats
from headport.runtime.row import Row
from headport.runtime.sampling.choice import Choice
from headport.runtime.sampling.draws import choose_from, draw_of
from headport.runtime.sampling.exact import CandidateChooser
from headport.runtime.sampling.sampler import faults
from headport.runtime.sampling.subset import RowsRunner, SubsetChooser
from headport.runtime.vocabulary import IdMap

__all__ = ["Chooser", "LogitsChooser", "make_chooser"]

Float32 = npt.NDArray[np.float32]


class Chooser(Protocol):
    """Chooses tokens with one head of one runner."""

    def choose(self, hidden: Float32, rows: Sequence[Row]) -> list[Choice | HeadportError]:
        """One choice per row. Rows may be of any requests; none knows of the others.

        Args:
            hidden: The last hidden state of each row, [N, H].
            rows: Each with its own parameters, [N]; they are not changed, see `Row.accept`.

        Returns:
            For each row its choice, or the error that ends it: `NonFiniteError` where its logits
            are not finite, `RequestError` where its rules ban every token or a callback fails.
        """
        ...

    def logits(self, hidden: Float32) -> Float32:
        """All logits of hidden states [N, H], by ascending original id, [N, K]."""
        ...


@dataclass(frozen=True)
class LogitsChooser:
    """Chooses from a head that gives all logits."""

    runner: Runner
    name: str
    ids: IdMap

    def choose(self, hidden: Float32, rows: Sequence[Row]) -> list[Choice | HeadportError]:
        """See `Chooser`."""
        logits = self.logits(hidden)
        broken = faults(logits, [(row.index, row.step) for row in rows])
        return [broken.get(n) or self._one(logits[n], row) for n, row in enumerate(rows)]

    def _one(self, logits: Float32, row: Row) -> Choice | HeadportError:
        each = draw_of(row)
        return each if isinstance(each, HeadportError) else choose_from(logits, self.ids.ids, each)

    def logits(self, hidden: Float32) -> Float32:
        """See `Chooser`."""
        output = self.runner.head(hidden, self.name)
        assert output.logits is not None
        return self.ids.rows(output.logits)


def make_chooser(
    runner: Runner, name: str, head: Head, ids: IdMap, stats: Stats, *, exact: bool
) -> Chooser:
    """The chooser for what a head gives.

    Args:
        runner: Runs the head.
        name: The head's name.
        head: Its manifest entry.
        ids: Original ids of its columns.
        stats: Where tokens are counted by how they were decided.
        exact: Of a head that gives candidates: take all original logits where these do not decide.
    """
    if head.candidates is None:
        whole = LogitsChooser(runner, name, ids)
        if isinstance(runner, RowsRunner):
            return SubsetChooser(runner, name, ids, whole)
        return whole
    return CandidateChooser(runner, name, head, ids, stats, exact)
