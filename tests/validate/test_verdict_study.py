"""The study of the verdict plants what it says it plants, and asks the tool's own gates."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks import verdict
from benchmarks.populations import Population, of_reports, simulated
from tests.validate.reports import report


@pytest.fixture(scope="module")
def population() -> Population:
    return simulated(documents=40)


@pytest.mark.parametrize(
    ("metric", "value"),
    [("perplexity_ratio", 1.01), ("top1_agreement", 0.98), ("kl_mean", 2e-3)],
)
def test_a_planted_truth_is_the_truth(population: Population, metric: str, value: float) -> None:
    planted = population.planted(metric, value)
    assert planted.truth(metric) == pytest.approx(value, rel=1e-12)
    for other in ("perplexity_ratio", "top1_agreement", "kl_mean"):
        if other != metric:
            assert planted.truth(other) == population.truth(other)


def test_draws_estimate_the_truth(population: Population) -> None:
    rng = np.random.default_rng(0)
    drawn = [
        verdict._judged(population.draw(rng, 40)).metrics.kl_mean.value or 0 for _ in range(200)
    ]
    assert np.mean(drawn) == pytest.approx(population.truth("kl_mean"), rel=0.05)


def test_the_study_asks_the_gates_and_sees_when_they_are_wrong(
    population: Population, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = verdict.study(population, runs=30)
    assert len(rows) == 9 + 1 + 9 + 9 + 3
    found = [row for row in rows if row.what.startswith("drift of 1.0")]
    assert found and all(found), "a drift of 1 % is found"
    evaluate = verdict.evaluate

    def lenient(*arguments: object) -> object:
        return tuple(
            msgspec.structs.replace(gate, verdict="passed") for gate in evaluate(*arguments)
        )

    monkeypatch.setattr(verdict, "evaluate", lenient)
    bad = [row.what for row in verdict.study(population, runs=5) if not row]
    assert any("verdict `passed`" in what for what in bad)
    assert any("drift of 1.0" in what for what in bad)


def test_reports_give_their_documents(tmp_path: Path) -> None:
    made = report()
    file = tmp_path / "report.json"
    file.write_bytes(msgspec.json.encode(made))
    rows = json.loads(file.read_text())["by_document"]
    found = of_reports([file])
    assert found.part.tokens == sum(row["tokens"] for row in rows)
    kl = sum(row["kl"] * row["tokens"] for row in rows) / found.part.tokens
    assert found.truth("kl_mean") == pytest.approx(kl)
