"""Rows that may only be continued with few tokens: the head computes nothing but these.

A row whose request names its `allowed` tokens as a list needs their logits alone. All others would
be banned, so what is chosen is what would be chosen from all logits; only float rounding differs,
as `headport.head_rows` says. Whatever looks at the whole distribution keeps the whole head:
likelihoods, and a callback that is given all scores.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from headport.errors import HeadportError
from headport.runtime.results import Stats
from headport.runtime.row import Row
from headport.runtime.sampling.choice import Choice
from headport.runtime.sampling.draws import Chooser, choose_each
from headport.runtime.sampling.settings import FixedIds
from headport.runtime.vocabulary import IdMap

__all__ = ["AllowedTokens", "RowsRunner", "SubsetChooser"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

_SMALL_SHARE = 1 / 8  # of the vocabulary; above it the whole head is as fast
_REMEMBERED = 64


@runtime_checkable
class RowsRunner(Protocol):
    """A runner that computes the rows of some tokens."""

    def rows(self, hidden_states: Float32, token_ids: Int64, name: str = "lm") -> Float32:
        """As `headport.session_runner.SessionRunner.rows`."""
        ...


@dataclass(frozen=True)
class AllowedTokens:
    """Tokens that a request names, as a head knows them."""

    ids: Int64  # original ids that the bundle has, ascending, [n]
    columns: Int64  # of the head, [n]

    @classmethod
    def of(cls, token_ids: Sequence[int], ids: IdMap) -> AllowedTokens:
        """Named ids without those that do not exist or were pruned, each once."""
        wanted = np.unique(np.array(token_ids, np.int64))
        columns = np.flatnonzero(np.isin(ids.ids, wanted, assume_unique=True))
        return cls(ids.ids[columns], columns)

    def logits(self, runner: RowsRunner, hidden: Float32, head: str = "lm") -> Float32:
        """Logits of hidden states [N, H] by ascending original id, [N, n]."""
        return runner.rows(hidden, self.columns, head)


@dataclass(frozen=True)
class SubsetChooser:
    """Chooses from rows of the head where a request allows few tokens, else as `whole` does.

    Args:
        runner: Runs the head.
        name: The head's name.
        ids: Original ids of its columns.
        whole: Chooses from all logits.
        stats: Where `few_rows` is counted.
    """

    runner: RowsRunner
    name: str
    ids: IdMap
    whole: Chooser
    stats: Stats
    _known: OrderedDict[tuple[int, ...], AllowedTokens] = field(default_factory=OrderedDict)

    def choose(self, hidden: Float32, rows: Sequence[Row]) -> list[Choice | HeadportError]:
        """See `headport.runtime.sampling.draws.Chooser`."""
        few = [self._few(row) for row in rows]
        groups: dict[int, list[int]] = {}
        for place, allowed in enumerate(few):
            groups.setdefault(id(allowed), []).append(place)
        found: dict[int, Choice | HeadportError] = {}
        for places in groups.values():
            own, states = [rows[n] for n in places], np.ascontiguousarray(hidden[places])
            allowed = few[places[0]]
            if allowed is None:
                choices = self.whole.choose(states, own)
            else:
                logits = allowed.logits(self.runner, states, self.name)
                choices = choose_each(logits, allowed.ids, own)
                self.stats.few_rows += sum(isinstance(choice, Choice) for choice in choices)
            found |= dict(zip(places, choices, strict=True))
        return [found[n] for n in range(len(rows))]

    def logits(self, hidden: Float32) -> Float32:
        """All logits; see `headport.runtime.sampling.draws.Chooser`."""
        return self.whole.logits(hidden)

    def _few(self, row: Row) -> AllowedTokens | None:
        """The tokens that a row may be continued with, if they are few and nothing else counts."""
        sampling = row.sampling
        if not isinstance(sampling.allowed, FixedIds) or sampling.process_scores is not None:
            return None
        if row.parameters.logprobs is not None:
            return None
        if sampling.forced_bos is not None or sampling.forced_eos:  # may be none of them
            return None
        named = sampling.allowed.token_ids
        if len(named) > _SMALL_SHARE * len(self.ids.ids):
            return None
        allowed = self._known.pop(named, None) or AllowedTokens.of(named, self.ids)
        self._known[named] = allowed
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return allowed if len(allowed.ids) else None
