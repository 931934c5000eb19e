"""One token per row from a head that gives candidates: proved, else by the full product.

filters or greedy ─► candidates by bound ─► decided? ─► token
temperature alone ─► candidates by bound + noise ─► decided? ─► token
min-p undecided   ─► candidates by bound + noise ─► decided? ─► token
still undecided   ─► all logits of that row, counted as a fallback

Where processors act, both kinds of candidates are picked with their bans and lifts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from headport.errors import HeadportError
from headport.manifest import Head
from headport.runner import Candidates, Runner
from headport.runtime.results import Stats
from headport.runtime.row import Row
from headport.runtime.sampling.candidates import (
    CandidateRow,
    decide,
    decide_noisy,
    needs_all,
    noise_row,
    wants_noise,
)
from headport.runtime.sampling.choice import Choice
from headport.runtime.sampling.draws import Draw, choose_from, draw_of
from headport.runtime.sampling.filters import FILTERS
from headport.runtime.sampling.processed_candidates import Plan, plan_row, process_row, steer
from headport.runtime.sampling.sampler import faults, processing
from headport.runtime.sampling.settings import Sampling
from headport.runtime.vocabulary import IdMap

__all__ = ["CandidateChooser", "mode_of"]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def mode_of(sampling: Sampling) -> str:
    """The row of the statistics that a draw belongs to: its first filter, or what it is without."""
    mode = "greedy"
    if sampling.temperature > 0.0:
        mode = next((each.name for each in FILTERS if each.acts(sampling)), "temperature")
    return f"{mode}, processed" if processing(sampling) else mode


@dataclass(frozen=True)
class _Asked:
    """A draw, its hidden state, and what its processors ban and lift."""

    draw: Draw
    hidden: Float32  # [H]
    plan: Plan | None  # None where no processor acts


@dataclass(frozen=True)
class CandidateChooser:
    """Chooses tokens with one runner's candidate head.

    With `exact` a row that its candidates do not decide is chosen from all logits of the original
    weight. Without, it is chosen from the quantised logits of all tokens, into which the exact
    logits of the candidates are written, and counted as unproved. Likelihoods, where asked for,
    take the same logits; they are not counted there.
    """

    runner: Runner
    name: str
    head: Head
    ids: IdMap
    stats: Stats
    exact: bool

    def choose(self, hidden: Float32, rows: Sequence[Row]) -> list[Choice | HeadportError]:
        """See `headport.runtime.sampling.draws.Chooser`."""
        found: dict[int, Choice | HeadportError] = {}
        draws: dict[int, Draw] = {}
        for n, row in enumerate(rows):
            each = draw_of(row)
            if isinstance(each, Draw):
                draws[n] = each
            else:
                found[n] = each
        assert self.head.candidates is not None
        decided: dict[int, int | HeadportError | None] = {}
        if self.head.candidates.certified:
            decided = self._decided(hidden, draws)
        for n, token in decided.items():
            if isinstance(token, HeadportError):
                found[n] = token
                del draws[n]
        tokens = {n: token for n, token in decided.items() if isinstance(token, int)}
        self._count([draws[n] for n in tokens], "certified")
        found |= {n: Choice(t) for n, t in tokens.items() if draws[n].logprobs is None}
        found |= self._from_all(
            hidden, {n: each for n, each in draws.items() if n not in found}, tokens
        )
        return [found[n] for n in range(len(rows))]

    def logits(self, hidden: Float32) -> Float32:
        """See `headport.runtime.sampling.draws.Chooser`."""
        given: Callable[[Float32, str], Float32]
        given = self.runner.full_logits if self.exact else self.runner.rescored_logits
        return self.ids.rows(given(hidden, self.name))

    def _decided(
        self, hidden: Float32, draws: dict[int, Draw]
    ) -> dict[int, int | HeadportError | None]:
        """What candidates decide: a token, an error that ends the row, or None."""
        plain: dict[int, _Asked] = {}
        noisy: dict[int, _Asked] = {}
        failed: dict[int, int | HeadportError | None] = {}
        for n, each in draws.items():
            if needs_all(each.sampling):
                continue
            plan = None
            if processing(each.sampling):
                try:
                    plan = plan_row(self.ids.ids, each.sampling, each.context)
                except HeadportError as error:
                    failed[n] = error
                if plan is None:
                    continue
            asked = noisy if wants_noise(each.sampling) else plain
            asked[n] = _Asked(each, hidden[n], plan)
        return failed | self._by_noise(noisy, {}) | self._by_bound(plain)

    def _by_bound(self, asked: dict[int, _Asked]) -> dict[int, int | HeadportError | None]:
        found: dict[int, int | HeadportError | None] = {}
        again: dict[int, _Asked] = {}
        largest: dict[int, float] = {}
        steered = {n: each for n, each in asked.items() if each.plan is not None}
        bare = {n: each for n, each in asked.items() if each.plan is None}
        noise = [self._steered(self._no_noise(), each.plan) for each in steered.values()]
        rows = self._rows(bare, None) | self._rows(steered, noise)
        for n, row in rows.items():
            if not isinstance(row, CandidateRow):
                found[n] = row
                continue
            each = asked[n]
            masses = partial(self._tail_mass, each, row)
            found[n] = decide(row, each.draw.sampling, each.draw.key, masses)
            if found[n] is None and mode_of(each.draw.sampling).startswith("min_p") and row.proved:
                again[n], largest[n] = each, float(row.logits[0])
        return found | self._by_noise(again, largest)

    def _by_noise(
        self, asked: dict[int, _Asked], largest: dict[int, float]
    ) -> dict[int, int | HeadportError | None]:
        noise = [self._steered(self._noise(each.draw), each.plan) for each in asked.values()]
        found: dict[int, int | HeadportError | None] = {}
        for n, row in self._rows(asked, noise).items():
            if not isinstance(row, CandidateRow):
                found[n] = row
                continue
            each = asked[n].draw
            assert each.key is not None
            found[n] = decide_noisy(row, each.sampling, each.key, largest.get(n))
        return found

    def _noise(self, each: Draw) -> Float32:
        assert each.key is not None
        columns = self.head.vocab_size
        return noise_row(self.ids.ids, columns, each.sampling.temperature, each.key)

    def _no_noise(self) -> Float32:
        noise = np.full(self.head.vocab_size, -np.inf, np.float32)
        noise[: len(self.ids.ids)] = 0.0
        return noise

    def _steered(self, noise: Float32, plan: Plan | None) -> Float32:
        return noise if plan is None else steer(noise, plan)

    def _rows(
        self, asked: dict[int, _Asked], noise: list[Float32] | None
    ) -> dict[int, CandidateRow | HeadportError | None]:
        """Candidates of each row, processed; its error, or None where all of them are banned."""
        if not asked:
            return {}
        hidden = np.stack([each.hidden for each in asked.values()])
        given = None if noise is None else np.stack(noise)
        output = self.runner.head(hidden, self.name, given).candidates
        assert output is not None
        broken = faults(output.logits, [each.draw.name for each in asked.values()])
        found: dict[int, CandidateRow | HeadportError | None] = {}
        for place, (n, each) in enumerate(asked.items()):
            row = self._row(output, place)
            if place in broken:
                found[n] = broken[place]
            elif each.plan is None:
                found[n] = row
            else:
                sampling, context = each.draw.sampling, each.draw.context
                found[n] = process_row(row, each.plan, self.ids.ids, sampling, context)
        return found

    def _row(self, candidates: Candidates, n: int) -> CandidateRow:
        own = candidates.ids[n]
        real = own < len(self.ids.ids)  # a padded column is no token
        return CandidateRow(
            ids=self.ids.ids[own[real]],
            logits=candidates.logits[n][real],
            proved=int(real[: candidates.certified_k[n]].sum()),
            cut=float(candidates.cut[n]),
            error=float(candidates.error[n]),
        )

    def _tail_mass(
        self, asked: _Asked, row: CandidateRow, temperature: float
    ) -> tuple[float, float]:
        quantised = self.runner.quantised(asked.hidden[None], self.name)
        outside = np.ones(len(self.ids.ids), np.bool_)
        outside[np.searchsorted(self.ids.ids, row.ids)] = False
        if asked.plan is not None:
            outside &= asked.plan.alive
        logits, upper = (
            self.ids.rows(each)[0, outside].astype(np.float64)
            for each in (quantised.logits, quantised.upper_bounds)
        )
        high = _mass(upper, row.logits[0], temperature)
        # A softcap's slope falls, so that the bound below is not the one above; a processor may
        # lower any token.
        if self.head.softcap is not None or asked.plan is not None:
            return 0.0, high
        lower = 2 * logits - upper
        lower -= 2.0**-22 * (np.abs(logits) + np.abs(upper))
        return _mass(lower, row.logits[0], temperature), high

    def _from_all(
        self, hidden: Float32, draws: dict[int, Draw], tokens: dict[int, int]
    ) -> dict[int, Choice | HeadportError]:
        if not draws:
            return {}
        kind = "fallbacks" if self.exact else "unproved"
        self._count([each for n, each in draws.items() if n not in tokens], kind)
        logits = self.logits(hidden[list(draws)])
        broken = faults(logits, [each.name for each in draws.values()])
        found: dict[int, Choice | HeadportError] = {}
        for place, (n, each) in enumerate(draws.items()):
            found[n] = broken.get(place) or choose_from(
                logits[place], self.ids.ids, each, tokens.get(n)
            )
        return found

    def _count(self, draws: Sequence[Draw], kind: str) -> None:
        setattr(self.stats, kind, getattr(self.stats, kind) + len(draws))
        for each in draws:
            self.stats.count_mode(mode_of(each.sampling), kind)


def _mass(logits: Float64, largest: float, temperature: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp((logits - largest) / temperature).sum())
