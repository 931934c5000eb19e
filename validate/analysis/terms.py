"""A watch-list: how likely each side finds the beginning of a term, anywhere in the texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headport.errors import UsageError
from headport.metrics import top_ids
from headport.validate.analysis.records import SideTerm, Term

__all__ = ["Watch", "read_terms"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

_MOST_TERMS = 1000
_TOP = 10


def read_terms(file: Path) -> tuple[str, ...]:
    """Terms, one a line; empty lines and those that begin with # are left out.

    Raises:
        UsageError: If the file cannot be read, is no UTF-8, or holds no term or too many.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: a UTF-8 text of terms was expected: {error}") from error
    terms = tuple(dict.fromkeys(t for line in lines if (t := line.strip()) and t[0] != "#"))
    if not 0 < len(terms) <= _MOST_TERMS:
        raise UsageError(f"{file}: 1 to {_MOST_TERMS} terms expected, {len(terms)} found")
    return terms


@dataclass
class _Side:
    total: float = 0.0
    largest: float = -1.0
    rank: int = 0
    top: int = 0
    place: tuple[int, int] = (0, 0)  # job and position of the largest


@dataclass
class _Watched:
    term: str
    ids: list[int]
    sides: tuple[_Side, _Side] = field(default_factory=lambda: (_Side(), _Side()))


class Watch:
    """Adds up what positions say about terms.

    A term's probability is that of the first tokens of its spellings, with a space before it and
    without: of a term of several tokens, that it begins.
    """

    def __init__(self, terms: Sequence[str], encode: Callable[[str], list[int]]) -> None:
        self._watched = [
            _Watched(term, sorted({encode(spelling)[0] for spelling in (term, f" {term}")}))
            for term in terms
        ]
        self._positions = 0

    def add(self, job: int, start: int, logits: tuple[Float32, Float32]) -> None:
        """Look at some positions.

        Args:
            job: Which window.
            start: Of the first row in it.
            logits: Reference and candidate, [N, V] each.
        """
        self._positions += len(logits[0])
        if not self._watched:
            return
        for side, z in enumerate(logits):
            shares, tenth = _shares(z)
            for found in self._watched:
                ids = np.array(found.ids)
                own = found.sides[side]
                p = shares(ids).sum(axis=1)
                own.total += float(p.sum())
                best = z[:, ids].max(axis=1)
                own.top += int(np.count_nonzero(best >= tenth))
                row = int(p.argmax())
                if p[row] > own.largest:
                    own.largest, own.place = float(p[row]), (job, start + row)
                    own.rank = 1 + int(np.count_nonzero(z[row] > best[row]))

    def terms(
        self, spell: Callable[[int], str], context: Callable[[tuple[int, int]], str]
    ) -> tuple[Term, ...]:
        """What was found, the largest rise of the candidate's mean first.

        Args:
            spell: Token id → text.
            context: Window and position → the text before it.
        """
        found = [
            Term(
                term=watched.term,
                tokens=tuple(spell(token_id) for token_id in watched.ids),
                reference=self._side(watched.sides[0]),
                candidate=self._side(watched.sides[1]),
                context=context(watched.sides[1].place),
            )
            for watched in self._watched
        ]
        rise = [t.candidate.mean_probability - t.reference.mean_probability for t in found]
        return tuple(found[at] for at in np.argsort(-np.array(rise), kind="stable"))

    def _side(self, side: _Side) -> SideTerm:
        return SideTerm(
            mean_probability=side.total / max(1, self._positions),
            max_probability=max(side.largest, 0.0),
            best_rank=side.rank,
            in_top_10=side.top,
        )


def _shares(z: Float32) -> tuple[Callable[[npt.NDArray[np.int64]], Float64], Float32]:
    """Probabilities of chosen ids, [N, ids]; and the tenth largest logit of each row, [N]."""
    best = top_ids(z, _TOP)
    top = np.take_along_axis(z, best, axis=1)
    total = np.exp(z - top[:, :1]).sum(axis=1, dtype=np.float64)

    def shares(ids: npt.NDArray[np.int64]) -> Float64:
        found: Float64 = np.exp((z[:, ids] - top[:, :1]).astype(np.float64)) / total[:, None]
        return found

    return shares, top[:, -1]
