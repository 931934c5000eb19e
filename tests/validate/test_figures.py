"""Figures of a slice on numbers checkable by hand; intervals where there are documents."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from headport.metrics import RowScores, score_rows
from headport.validate.figures import figures
from headport.validate.report import Metrics
from headport.validate.sums import DocumentSums, Positions


def scores(nll_reference: Any, nll_candidate: Any, kl: Any = 0.0, **changes: Any) -> RowScores:
    """Positions with these figures, and perfect agreement."""
    count = len(nll_reference)
    ones = np.ones(count)
    fields = dict.fromkeys(RowScores.__dataclass_fields__, 0 * ones)
    wide = {n: np.ones((count, 3)) for n in fields if n.startswith(("agreement", "order"))}
    given = {"nll_reference": nll_reference, "nll_candidate": nll_candidate, "kl": kl * ones}
    given = {name: np.asarray(value, np.float64) * ones for name, value in given.items()}
    return RowScores(**(fields | wide | given | {"rank": ones} | changes))


def summed(
    *documents: RowScores, bytes_each: int = 1, weights: tuple[float, ...] | None = None
) -> DocumentSums:
    sums = DocumentSums(len(documents), sum(map(len, documents)))
    for row, found in enumerate(documents):
        count = len(found)
        no = np.zeros(count, np.bool_)
        sums.add(
            found,
            Positions(
                document=row,
                weight=1.0 if weights is None else weights[row],
                bytes=np.full(count, bytes_each),
                early=np.arange(count) < 2,
                rare=no,
                near_tie_bound=np.zeros(count),
            ),
        )
    return sums


def of(*documents: RowScores, **options: Any) -> Metrics:
    return figures(summed(*documents, **options).part())


def constant(count: int, nll: float) -> RowScores:
    return scores(np.full(count, nll), np.full(count, 2 * nll))


def test_perplexity_weighs_tokens_not_texts() -> None:
    found = of(constant(3, 1.0), constant(300, 2.0))
    mean = (3 * 1.0 + 300 * 2.0) / 303
    assert found.perplexity_reference.value == pytest.approx(math.exp(mean), rel=1e-12)
    assert found.perplexity_ratio.value == pytest.approx(math.exp(mean), rel=1e-12)


def test_documents_count_by_their_weight() -> None:
    found = of(constant(10, 1.0), constant(10, 3.0), weights=(3.0, 1.0))
    assert found.perplexity_reference.value == pytest.approx(math.exp(1.5), rel=1e-12)
    nothing = of(constant(10, 1.0), constant(10, 3.0), weights=(1.0, 0.0))
    assert nothing.perplexity_reference.value == pytest.approx(math.e, rel=1e-12)


def test_a_uniform_byte_costs_eight_bits() -> None:
    uniform = np.zeros((5, 256), np.float32)
    found = of(score_rows(uniform, uniform, np.arange(5), np.zeros(5)))
    assert found.bits_per_byte_reference.value == pytest.approx(8, abs=1e-6)
    assert found.perplexity_candidate.value == pytest.approx(256, rel=1e-6)


def test_percentiles_are_linear_between_ranks() -> None:
    found = of(scores(np.ones(101), np.ones(101), np.arange(101) / 100))
    assert found.kl_mean.value == pytest.approx(0.5)
    assert (found.kl_max.value, found.kl_min.value) == (1.0, 0.0)
    assert found.kl_p99.value == pytest.approx(0.99, rel=1e-6)
    assert found.kl_p99_9.value == pytest.approx(0.999, rel=1e-6)
    assert found.kl_p0_1.value == pytest.approx(0.001, rel=1e-4)


def test_delta_p_by_hand() -> None:
    half, quarter = math.log(2), math.log(4)  # p = ½ ¼, q = ¼ ½
    found = of(scores([half, quarter], [quarter, half]))
    assert found.delta_p_mean.value == pytest.approx(0, abs=1e-12)
    assert found.delta_p_rms.value == pytest.approx(0.25)
    assert found.delta_p_max.value == pytest.approx(0.25)
    assert found.delta_p_p75.value == pytest.approx(0.125)


def test_intervals_by_hand() -> None:
    # Means per document 1 and 3, four tokens each: SE² = 2/1 · (4² + 4²) / 8² = 1.
    found = of(constant(4, 1.0), constant(4, 3.0)).perplexity_reference
    t = 12.706204736
    assert found.value == pytest.approx(math.exp(2)) and found.error == pytest.approx(math.exp(2))
    assert found.low == pytest.approx(math.exp(2 - t), rel=1e-6)
    assert found.high == pytest.approx(math.exp(2 + t), rel=1e-6)


def test_one_document_has_no_interval() -> None:
    found = of(constant(400, 1.0))
    assert found.kl_mean.value == 0 and found.kl_mean.low is None and found.kl_mean.error is None
    assert found.top1_agreement.low is None


def test_full_agreement_still_has_room_for_doubt() -> None:
    found = of(*(constant(50, 1.0) for _ in range(20))).top1_agreement
    assert found.value == 1 and found.low is not None and 0.99 < found.low < 1
    assert found.high == 1


def test_nothing_scored_has_no_figures() -> None:
    found = figures(DocumentSums(1, 0).part())
    assert found.kl_mean.value is None and found.top1_agreement.value is None
    assert found.perplexity_ratio.value is None and found.kl_p99.value is None


def test_no_bytes_no_bits_per_byte_and_no_overflow() -> None:
    found = of(constant(2, 1000.0), bytes_each=0)
    assert found.bits_per_byte_candidate.value is None
    assert found.perplexity_reference.value is None, "not finite"


def test_blocks_add_up_in_any_cut() -> None:
    rng = np.random.default_rng(0)
    whole = scores(rng.random(40), rng.random(40), rng.random(40))
    parts = [
        RowScores(*(getattr(whole, name)[at : at + 7] for name in RowScores.__dataclass_fields__))
        for at in range(0, 40, 7)
    ]
    sums = DocumentSums(1, 40)
    for part in parts:
        no = np.zeros(len(part), np.bool_)
        sums.add(part, Positions(0, 1.0, np.ones(len(part), np.int64), no, no, np.zeros(len(part))))
    for name in Metrics.__struct_fields__:
        one, other = getattr(of(whole), name).value, getattr(figures(sums.part()), name).value
        assert one == pytest.approx(other, rel=1e-12), name
