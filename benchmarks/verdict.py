"""Whether the verdict can be trusted: coverage, false failures and power on thousands of runs.

    python -m benchmarks.verdict [--runs 4000] [--report report.json …]

A run draws documents again, plants a drift whose size is known, and asks `headport.validate` for
its interval and verdict. Documents come from `by_document` of real reports where they are given,
else from a population with the spread that INT8 heads show on English and code. Nothing else is
simulated: intervals, gates and recommended sample sizes are those of the package.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.validate.certainty import bootstrap, bounds, ratio, share_bounds, tokens_for

__all__ = ["Population", "main", "study"]

Float64 = npt.NDArray[np.float64]

# Per-token differences of NLL under an INT8 head (block 64, rounded activations) of SmolLM2-135M:
# heavy-tailed, RMS about 0.05 nats, and a document's own level of about 0.004.
_TOKEN_RMS, _DOCUMENT_RMS, _FREEDOM = 0.05, 0.004, 4.0
_FLIP_RATE, _FLIP_SPREAD = 0.02, 0.5
_DRIFTS = {0.003: 0.80, 0.005: 0.95, 0.01: 0.99}  # ln perplexity ratio → least power
_LIMIT = math.log(1.003)
_BATCH = 200  # runs at a time


@dataclass(frozen=True)
class Population:
    """Documents to draw from: tokens, sums of NLL differences and of flips, each [D]."""

    tokens: Float64
    differences: Float64
    flips: Float64
    source: str

    @classmethod
    def simulated(cls, documents: int = 20_000, seed: int = 1) -> Population:
        """A large population whose mean difference is exactly 0."""
        rng = np.random.default_rng(seed)
        tokens = np.clip(rng.lognormal(4.9, 0.6, documents).astype(np.int64), 64, 1024)
        level = _DOCUMENT_RMS * rng.standard_normal(documents)
        # A sum of n heavy-tailed differences: Student's t has variance f / (f − 2).
        scale = _TOKEN_RMS / math.sqrt(_FREEDOM / (_FREEDOM - 2))
        ends = np.cumsum(tokens)
        steps = scale * rng.standard_t(_FREEDOM, int(ends[-1]))
        sums = np.add.reduceat(steps, np.append(0, ends[:-1])) + level * tokens
        sums -= tokens * sums.sum() / tokens.sum()
        rate = np.minimum(_FLIP_RATE * rng.lognormal(0, _FLIP_SPREAD, documents), 0.5)
        return cls(
            tokens.astype(np.float64), sums, rng.binomial(tokens, rate).astype(float), "made"
        )

    @classmethod
    def of_reports(cls, files: list[Path]) -> Population:
        """The documents of reports, their mean difference taken out."""
        rows: list[dict[str, Any]] = []
        for file in files:
            rows += json.loads(file.read_text(encoding="utf-8"))["by_document"]
        tokens = np.array([row["tokens"] for row in rows], np.float64)
        found = np.array([row["nll_candidate"] - row["nll_reference"] for row in rows]) * tokens
        found -= tokens * found.sum() / tokens.sum()
        flips = np.array([1 - row["top1_agreement"] for row in rows]) * tokens
        names = ", ".join(file.name for file in files)
        return cls(tokens, found, flips, f"{len(rows)} documents of {names}")

    def draw(
        self, rng: np.random.Generator, runs: int, documents: int
    ) -> tuple[Float64, Float64, Float64]:
        """Tokens, differences and flips of `documents` documents drawn with replacement."""
        at = rng.integers(0, len(self.tokens), (runs, documents))
        return self.tokens[at], self.differences[at], self.flips[at]


@dataclass(frozen=True)
class Row:
    """One line of the study."""

    what: str
    documents: int
    tokens: int
    runs: int
    value: float
    least: float
    most: float

    def __bool__(self) -> bool:
        return self.least <= self.value <= self.most


def study(population: Population, runs: int, seed: int = 0) -> list[Row]:
    """Coverage, false failures and power."""
    rng = np.random.default_rng(seed)
    rows = [_coverage(population, rng, runs, documents) for documents in (20, 60, 200)]
    rows += [_share_coverage(population, rng, runs, documents) for documents in (60, 200)]
    rows.append(_bootstrap_coverage(population, rng, min(runs, 2000), 60))
    rows += [_false_failures(population, rng, runs, documents) for documents in (20, 60, 200)]
    rows += _power(population, rng, runs)
    return rows


def _blocks(runs: int) -> list[int]:
    return [min(_BATCH, runs - at) for at in range(0, runs, _BATCH)]


def _rate(hits: list[npt.NDArray[np.bool_]]) -> float:
    return float(np.concatenate(hits).mean())


def _coverage(population: Population, rng: Any, runs: int, documents: int) -> Row:
    hits = []
    for size in _blocks(runs):
        tokens, found, _ = population.draw(rng, size, documents)
        low, high = bounds(ratio(found, tokens))
        hits.append((low <= 0) & (high >= 0))
    return _Sample(population, documents, runs).row(
        "coverage, ln PPL ratio", _rate(hits), 0.93, 0.97
    )


def _share_coverage(population: Population, rng: Any, runs: int, documents: int) -> Row:
    truth = 1 - population.flips.sum() / population.tokens.sum()
    hits = []
    for size in _blocks(runs):
        tokens, _, flips = population.draw(rng, size, documents)
        low, high = share_bounds(ratio(tokens - flips, tokens), tokens.sum(axis=1))
        hits.append((low <= truth) & (high >= truth))
    return _Sample(population, documents, runs).row("coverage, top-1", _rate(hits), 0.93, 0.97)


def _bootstrap_coverage(population: Population, rng: Any, runs: int, documents: int) -> Row:
    tokens, found, _ = population.draw(rng, runs, documents)
    pairs = [
        bootstrap(f, n, draws=500, seed=i)
        for i, (f, n) in enumerate(zip(found, tokens, strict=True))
    ]
    hit = np.array([low <= 0 <= high for low, high in pairs])
    # Percentile intervals of few documents are known to be a little short.
    sample = _Sample(population, documents, runs)
    return sample.row("coverage, bootstrap", float(hit.mean()), 0.92, 0.97)


def _false_failures(population: Population, rng: Any, runs: int, documents: int) -> Row:
    """The truth lies exactly on the limit of the gate; a failed verdict is a false one."""
    hits = []
    for size in _blocks(runs):
        tokens, found, _ = population.draw(rng, size, documents)
        low, _ = bounds(ratio(found + _LIMIT * tokens, tokens))
        hits.append(low > _LIMIT)
    return _Sample(population, documents, runs).row(
        "false failures at the limit", _rate(hits), 0.0, 0.05
    )


def _power(population: Population, rng: Any, runs: int) -> list[Row]:
    """At the sample size that a first, small run recommends for a drift of 0.3 %."""
    tokens, found, _ = population.draw(rng, 200, 60)
    estimate = ratio(found, tokens)
    needed = [
        tokens_for(_LIMIT, float(error), int(count))
        for error, count in zip(estimate.error, tokens.sum(axis=1), strict=True)
    ]
    recommended = float(np.median([count for count in needed if count is not None]))
    documents = max(20, math.ceil(recommended / population.tokens.mean()))
    rows = []
    for drift, least in _DRIFTS.items():
        hits = []
        for size in _blocks(runs):
            tokens, found, _ = population.draw(rng, size, documents)
            low, _ = bounds(ratio(found + math.log1p(drift) * tokens, tokens))
            hits.append(low > 0)
        what = f"drift of {drift:.1%} found at the recommended size"
        rows.append(_Sample(population, documents, runs).row(what, _rate(hits), least, 1.0))
    return rows


@dataclass(frozen=True)
class _Sample:
    """How many runs of how many documents."""

    population: Population
    documents: int
    runs: int

    def row(self, what: str, value: float, least: float, most: float) -> Row:
        tokens = round(self.documents * float(self.population.tokens.mean()))
        return Row(what, self.documents, tokens, self.runs, value, least, most)


def main(arguments: list[str] | None = None) -> int:
    """Print the study; exit 1 if a row is outside its range."""
    parser = argparse.ArgumentParser(prog="benchmarks.verdict", description=__doc__)
    parser.add_argument("--runs", type=int, default=4000)
    parser.add_argument("--report", type=Path, nargs="*", default=[], metavar="FILE")
    found = parser.parse_args(arguments)
    populations = [Population.simulated()]
    if found.report:
        populations.append(Population.of_reports(found.report))
    bad = 0
    for population in populations:
        print(f"documents: {population.source}, {population.tokens.mean():.0f} tokens on average")
        for row in study(population, found.runs):
            bad += not row
            print(
                f"  {row.what:<46} {row.documents:>4} documents ({row.tokens:>6} tokens) "
                f"{row.runs} runs: {row.value:7.2%}  wanted {row.least:.0%} … {row.most:.0%}"
                f"{'' if row else '  OUTSIDE'}"
            )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
