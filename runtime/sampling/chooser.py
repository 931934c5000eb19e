"""Hidden states of many rows → one choice per row. What a head gives decides how it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headport.errors import HeadportError
from headport.manifest import Head
from headport.runner import Runner
from headport.runtime.results import Stats
from headport.runtime.row import Row
from headport.runtime.sampling.choice import Choice
from headport.runtime.sampling.draws import Chooser, choose_each
from headport.runtime.sampling.exact import CandidateChooser
from headport.runtime.sampling.subset import RowsRunner, SubsetChooser
from headport.runtime.vocabulary import IdMap

__all__ = ["Chooser", "LogitsChooser", "make_chooser"]

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LogitsChooser:
    """Chooses from a head that gives all logits."""

    runner: Runner
    name: str
    ids: IdMap

    def choose(self, hidden: Float32, rows: Sequence[Row]) -> list[Choice | HeadportError]:
        """See `Chooser`."""
        return choose_each(self.logits(hidden), self.ids.ids, rows)

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
            return SubsetChooser(runner, name, ids, whole, stats)
        return whole
    return CandidateChooser(runner, name, head, ids, stats, exact)
