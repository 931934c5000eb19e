"""One token per row from a head that gives candidates: proved, else by the full product.

filters or greedy ─► candidates by bound ─► decided? ─► token
temperature alone ─► candidates by bound + noise ─► decided? ─► token
min-p undecided   ─► candidates by bound + noise ─► decided? ─► token
still undecided   ─► all logits of that row, counted as a fallback
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from headport.manifest import Head
from headport.runner import Candidates, Runner
from headport.runtime.results import Stats
from headport.runtime.sampling.candidates import (
    CandidateRow,
    decide,
    decide_noisy,
    noise_row,
    wants_noise,
)
from headport.runtime.sampling.noise import NoiseKey
from headport.runtime.sampling.sampler import Sampling, check_finite, choose
from headport.runtime.vocabulary import IdMap

__all__ = ["CandidateChooser", "Draw", "mode_of"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Draw:
    """What one row asks for."""

    index: int  # the caller's name of the row, for messages
    step: int
    sampling: Sampling
    key: NoiseKey | None  # None only where the temperature is 0


def mode_of(sampling: Sampling) -> str:
    """The row of the statistics that a draw belongs to: its first filter, or what it is without."""
    if sampling.temperature == 0.0:
        return "greedy"
    if sampling.top_k > 0:
        return "top_k"
    if sampling.top_p < 1.0:
        return "top_p"
    return "min_p" if sampling.min_p > 0.0 else "temperature"


@dataclass(frozen=True)
class CandidateChooser:
    """Chooses tokens with one runner's candidate head.

    With `exact` a row that its candidates do not decide is chosen from all logits of the original
    weight. Without, it is chosen from the quantised logits of all tokens, into which the exact
    logits of the candidates are written, and counted as unproved.
    """

    runner: Runner
    name: str
    head: Head
    ids: IdMap
    stats: Stats
    exact: bool

    def choose(self, hidden: Float32, draws: Sequence[Draw]) -> list[int]:
        """One original id per row of hidden states [N, H].

        Raises:
            NonFiniteError: If a row's logits are not finite.
        """
        found: list[int | None] = [None] * len(draws)
        assert self.head.candidates is not None
        if self.head.candidates.certified:
            noisy = [n for n, draw in enumerate(draws) if wants_noise(draw.sampling)]
            plain = [n for n, draw in enumerate(draws) if not wants_noise(draw.sampling)]
            for n, token in self._by_noise(hidden, draws, noisy, {}).items():
                found[n] = token
            for n, token in self._by_bound(hidden, draws, plain).items():
                found[n] = token
        self._count(draws, [n for n, token in enumerate(found) if token is not None], "certified")
        rest = [n for n, token in enumerate(found) if token is None]
        if rest:
            for n, token in zip(rest, self._undecided(hidden, draws, rest), strict=True):
                found[n] = token
        return [token for token in found if token is not None]

    def _by_bound(
        self, hidden: Float32, draws: Sequence[Draw], rows: list[int]
    ) -> dict[int, int | None]:
        if not rows:
            return {}
        candidates = self._candidates(hidden, draws, rows, None)
        found: dict[int, int | None] = {}
        largest: dict[int, float | None] = {}
        for place, n in enumerate(rows):
            row, draw = self._row(candidates, place), draws[n]
            masses = partial(self._tail_mass, hidden[n], row)
            found[n] = decide(row, draw.sampling, draw.key, masses)
            if found[n] is None and mode_of(draw.sampling) == "min_p" and row.proved:
                largest[n] = float(row.logits[0])
        return found | self._by_noise(hidden, draws, list(largest), largest)

    def _by_noise(
        self,
        hidden: Float32,
        draws: Sequence[Draw],
        rows: list[int],
        largest: dict[int, float | None],
    ) -> dict[int, int | None]:
        if not rows:
            return {}
        noise = np.stack([self._noise(draws[n]) for n in rows])
        candidates = self._candidates(hidden, draws, rows, noise)
        found: dict[int, int | None] = {}
        for place, n in enumerate(rows):
            draw = draws[n]
            assert draw.key is not None
            row = self._row(candidates, place)
            found[n] = decide_noisy(row, draw.sampling, draw.key, largest.get(n))
        return found

    def _noise(self, draw: Draw) -> Float32:
        assert draw.key is not None
        columns = self.head.vocab_size
        return noise_row(self.ids.own, columns, draw.sampling.temperature, draw.key)

    def _candidates(
        self, hidden: Float32, draws: Sequence[Draw], rows: list[int], noise: Float32 | None
    ) -> Candidates:
        output = self.runner.head(hidden[rows], self.name, noise)
        assert output.candidates is not None
        _check(output.candidates.logits.astype(np.float32), [draws[n] for n in rows])
        return output.candidates

    def _row(self, candidates: Candidates, n: int) -> CandidateRow:
        own = candidates.ids[n]
        real = own < len(self.ids.own)  # a padded column is no token
        return CandidateRow(
            ids=self.ids.own[own[real]],
            logits=candidates.logits[n][real],
            proved=int(real[: candidates.certified_k[n]].sum()),
            cut=float(candidates.cut[n]),
            error=float(candidates.error[n]),
        )

    def _tail_mass(
        self, hidden: Float32, row: CandidateRow, temperature: float
    ) -> tuple[float, float]:
        quantised = self.runner.quantised(hidden[None], self.name)
        outside = np.ones(len(self.ids.ids), np.bool_)
        outside[np.searchsorted(self.ids.ids, row.ids)] = False
        logits, upper = (
            self.ids.rows(each)[0, outside].astype(np.float64)
            for each in (quantised.logits, quantised.upper_bounds)
        )
        high = _mass(upper, row.logits[0], temperature)
        if self.head.softcap is not None:  # its slope falls: the bound below is not the one above
            return 0.0, high
        lower = 2 * logits - upper
        lower -= 2.0**-22 * (np.abs(logits) + np.abs(upper))
        return _mass(lower, row.logits[0], temperature), high

    def _undecided(self, hidden: Float32, draws: Sequence[Draw], rows: list[int]) -> list[int]:
        given: Callable[[Float32, str], Float32]
        if self.exact:
            given, kind = self.runner.full_logits, "fallbacks"
        else:
            given, kind = self.runner.rescored_logits, "unproved"
        self._count(draws, rows, kind)
        logits = self.ids.rows(given(hidden[rows], self.name))
        asked = [draws[n] for n in rows]
        _check(logits, asked)
        return [
            choose(each, self.ids.ids, draw.sampling, draw.key)
            for each, draw in zip(logits, asked, strict=True)
        ]

    def _count(self, draws: Sequence[Draw], rows: list[int], kind: str) -> None:
        setattr(self.stats, kind, getattr(self.stats, kind) + len(rows))
        for n in rows:
            self.stats.count_mode(mode_of(draws[n].sampling), kind)


def _mass(logits: Float64, largest: float, temperature: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp((logits - largest) / temperature).sum())


def _check(logits: Float32, draws: Sequence[Draw]) -> None:
    check_finite(logits, [draw.index for draw in draws], draws[0].step)
