"""Whether the verdict can be trusted: thousands of runs whose truth is known, judged by the gates.

    python -m benchmarks.verdict [--runs 4000] [--store ref/] [--report report.json …]

A population of documents is scored once, as `headport validate` scores them. A run draws some of
them with replacement, so the truth is the population's own figure, or one that was planted; then
`headport.validate.figures` and `headport.validate.gates.evaluate` say what they say of a real run.

Populations: simulated logits with zero-mean noise of the size that an INT8 head has; the same noise
on the logits of a stored reference; the documents of real reports, with the drift they have.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.populations import Population, of_reports, of_store, simulated
from headport.validate.certainty import bootstrap
from headport.validate.figures import FIGURES
from headport.validate.gates import DEFAULT_GATES, GateRule, Judged, evaluate
from headport.validate.report import GateResult, Metric, Metrics
from headport.validate.sums import Part

__all__ = ["main", "study"]

_GATES = DEFAULT_GATES["int8"]
_OF_GATES = tuple(gate.metric for gate in _GATES)
_DRIFTS = {0.003: 0.80, 0.005: 0.95, 0.01: 0.99}  # planted perplexity drift → least power
_SIZES = (20, 60, 200)  # documents
_FIRST_RUN = 60  # documents from which the tool recommends a sample size
_NO_DRIFT = (GateRule(metric="perplexity_ratio", max=1.0),)  # fails where a drift is found


@dataclass(frozen=True)
class Row:
    """One line of the study: how often something happened, and how often it may."""

    what: str
    documents: str
    tokens: int
    runs: int
    share: float
    least: float
    most: float

    def __bool__(self) -> bool:
        return self.least <= self.share <= self.most

    def cells(self) -> tuple[str, ...]:
        """As the table shows it."""
        wanted = f"{self.least * 100:g}–{self.most * 100:g} %"
        if self.least == 0:
            wanted = f"≤ {self.most * 100:g} %"
        elif self.most == 1:
            wanted = f"≥ {self.least * 100:g} %"
        return (
            self.what,
            self.documents,
            str(self.tokens),
            str(self.runs),
            f"{self.share:.1%}".replace("%", " %"),
            wanted + ("" if self else " OUTSIDE"),
        )


def study(population: Population, runs: int, seed: int = 0) -> list[Row]:
    """Coverage, false failures, false passes, and power at the recommended size."""
    trial = _Trial(population, np.random.default_rng(seed), runs)
    return [
        *trial.coverage(),
        trial.bootstrap_coverage(),
        *trial.wrong_verdicts("failed", 0.05),
        *trial.wrong_verdicts("passed", 0.05),
        *trial.power(),
    ]


def _judged(part: Part) -> Judged:
    """The figures that gates look at; percentiles, which draws do not keep, are left out."""
    none = Metric(value=None)
    found = {f.name: f.of(part) if f.name in _OF_GATES else none for f in FIGURES}
    return Judged(Metrics(**found), part.tokens, len(part.counts))


def _verdicts(part: Part, rules: Sequence[GateRule] = _GATES) -> tuple[GateResult, ...]:
    return evaluate(rules, _judged(part), {})


@dataclass(frozen=True)
class _Trial:
    population: Population
    rng: np.random.Generator
    runs: int

    def _row(
        self, what: str, documents: float, hits: int, bounds: tuple[float, float], runs: int = 0
    ) -> Row:
        runs = runs or self.runs
        tokens = round(documents * self.population.tokens_per_document)
        shown = f"{documents:.0f}"
        return Row(what, shown, tokens, runs, float(hits / runs), *bounds)

    def _count(self, documents: int, counts: Callable[[Part], bool], of: Population) -> int:
        return sum(counts(of.draw(self.rng, documents)) for _ in range(self.runs))

    def coverage(self) -> list[Row]:
        """How often the interval of a figure holds the population's own."""
        truth = {metric: self.population.truth(metric) for metric in _OF_GATES}
        rows = []
        for documents in _SIZES:
            hits = dict.fromkeys(_OF_GATES, 0)
            for _ in range(self.runs):
                metrics = _judged(self.population.draw(self.rng, documents)).metrics
                for name, value in truth.items():
                    found: Metric = getattr(metrics, name)
                    assert found.low is not None and found.high is not None
                    hits[name] += found.low <= value <= found.high
            rows += [
                self._row(f"interval of `{name}` holds the truth", documents, hit, (0.93, 0.97))
                for name, hit in hits.items()
            ]
        return rows

    def bootstrap_coverage(self) -> Row:
        """The same of the bootstrap, which the report gives as a check of the formula."""
        truth, runs = np.log(self.population.truth("perplexity_ratio")), min(self.runs, 2000)
        hits = 0
        for seed in range(runs):
            part = self.population.draw(self.rng, _FIRST_RUN)
            drift = part.column("nll_candidate") - part.column("nll_reference")
            low, high = bootstrap(drift, part.weights, draws=500, seed=seed)
            hits += low <= truth <= high
        # Percentile intervals of few documents are known to be a little short.
        what = "bootstrap interval of ln `perplexity_ratio` holds the truth"
        return self._row(what, _FIRST_RUN, hits, (0.92, 0.97), runs)

    def wrong_verdicts(self, verdict: str, most: float) -> list[Row]:
        """The truth lies just on the limit (no failure is right) or margin (no pass is)."""
        rows = []
        for place, rule in enumerate(_GATES):
            beyond = rule.margin if verdict == "passed" else 0.0
            limit = rule.max + beyond if rule.max is not None else (rule.min or 0.0) - beyond
            where = "limit + margin" if beyond else "limit"
            planted = self.population.planted(rule.metric, limit)
            for documents in _SIZES:
                hits = self._count(
                    documents,
                    lambda part, place=place: _verdicts(part)[place].verdict == verdict,  # type: ignore[misc]
                    planted,
                )
                what = f"`{rule.metric}` truly on its {where}, verdict `{verdict}`"
                rows.append(self._row(what, documents, hits, (0.0, most)))
        return rows

    def power(self) -> list[Row]:
        """At the size that a first run's gate recommends; each run has a first run of its own."""
        quiet = self.population.planted("perplexity_ratio", 1.0)
        rows = []
        for drift, least in _DRIFTS.items():
            planted = self.population.planted("perplexity_ratio", 1 + drift)
            hits, sizes = 0, []
            for _ in range(self.runs):
                first = quiet.draw(self.rng, _FIRST_RUN)
                gate = next(g for g in _verdicts(first) if g.metric == "perplexity_ratio")
                assert gate.tokens_recommended is not None
                documents = max(2, round(gate.tokens_recommended * _FIRST_RUN / first.tokens))
                sizes.append(documents)
                (found,) = _verdicts(planted.draw(self.rng, documents), _NO_DRIFT)
                hits += found.verdict == "failed"
            what = f"drift of {drift:.1%} found at the recommended size".replace("%", " %")
            rows.append(self._row(what, float(np.mean(sizes)), hits, (least, 1.0)))
        return rows


def main(arguments: list[str] | None = None) -> int:
    """Print the study as Markdown; exit 1 if a row is outside its range."""
    parser = argparse.ArgumentParser(prog="benchmarks.verdict", description=__doc__)
    parser.add_argument("--runs", type=int, default=4000)
    parser.add_argument("--store", type=Path, metavar="FOLDER", help="of `headport reference`")
    parser.add_argument("--report", type=Path, nargs="*", default=[], metavar="FILE")
    given = parser.parse_args(arguments)
    populations = [simulated()]
    populations += [of_store(given.store)] if given.store else []
    populations += [of_reports(given.report)] if given.report else []
    bad = 0
    for population in populations:
        print(f"\n{population.source}; {population.words()}\n")
        head = ("", "documents", "tokens", "runs", "found", "wanted")
        rows = study(population, given.runs)
        for cells in (head, ("---",) * len(head), *(row.cells() for row in rows)):
            print("| " + " | ".join(cells) + " |")
        bad += sum(not row for row in rows)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
