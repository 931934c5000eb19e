"""Figures against an independent float64 computation, invariant to batches; ids come first."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headport.bundle import Bundle
from headport.errors import NonFiniteError, ParityError, UsageError
from headport.validate.candidate import Candidate
from headport.validate.comparison import (
    RARE_SHARE,
    Comparison,
    check_ids,
    compare,
    prepare,
)
from headport.validate.documents import read_texts
from headport.validate.figures import figures
from headport.validate.report import Metrics
from headport.validate.sums import CELLS


@pytest.fixture(scope="module")
def candidate(tiny_bundle: Path) -> Candidate:
    return Candidate(Bundle.open(tiny_bundle), threads=1)


@pytest.fixture(scope="module")
def reference(reference_of: Any, tiny_llama: Path) -> Any:
    return reference_of(tiny_llama)


def comparison(texts: Any, candidate: Any, reference: Any, **options: Any) -> Comparison:
    materials = prepare(read_texts(texts), candidate, 0)
    return compare(materials, candidate, reference, **({"window": 64} | options))


def same(one: Metrics, other: Metrics, **tolerance: float) -> None:
    """Every figure of two runs agrees."""
    for name in Metrics.__struct_fields__:
        a, b = getattr(one, name).value, getattr(other, name).value
        assert a == pytest.approx(b, **tolerance), name


def independent(texts: Any, checkpoint: Path, window: int) -> tuple[float, int]:
    """ΣNLL and N of PyTorch in float64, straight from the definition."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    total, count = 0.0, 0
    for file in texts:
        # Both texts are a single document: no block but the last reaches 64 tokens alone.
        ids = tokenizer(file.read_text(encoding="utf-8").strip("\n"))["input_ids"]
        for at in range(0, len(ids) - 1, window):
            fed = ids[at : at + window]
            labels = ids[at + 1 : at + 1 + len(fed)]
            with torch.inference_mode():
                log_p = model(torch.tensor([fed])).logits[0].log_softmax(-1)
            picked = log_p[torch.arange(len(labels)), torch.tensor(labels)]
            total, count = total - float(picked.sum()), count + len(labels)
    return total, count


def test_perplexity_agrees_with_an_independent_computation(
    tmp_path: Path, candidate: Any, reference: Any, tiny_llama: Path
) -> None:
    file = tmp_path / "one.txt"
    file.write_text("The head is the last matrix of a language model. " * 6, encoding="utf-8")
    found = comparison([file], candidate, reference)
    part = found.sums.part()
    total, count = independent([file], tiny_llama, 64)
    assert part.tokens == count > 64, "several windows"
    for metric in (figures(part).perplexity_reference, figures(part).perplexity_candidate):
        assert metric.value == pytest.approx(math.exp(total / count), rel=1e-6)


@pytest.mark.parametrize("batch_size", [2, 7])
def test_figures_do_not_depend_on_batches(
    batch_size: int, texts: Any, candidate: Any, reference: Any
) -> None:
    alone = comparison(texts, candidate, reference, window=16)
    batched = comparison(texts, candidate, reference, window=16, batch_size=batch_size)
    for rows in alone.rows:
        one, other = (figures(found.sums.part(rows)) for found in (alone, batched))
        same(one, other, rel=1e-4, abs=2e-5)
        assert one.perplexity_candidate.value == pytest.approx(
            other.perplexity_candidate.value, rel=1e-6
        )


@pytest.mark.parametrize("window", [3, 7, 64])
def test_windows_change_the_context_but_not_what_is_scored(
    window: int, texts: Any, candidate: Any, reference: Any
) -> None:
    materials = prepare(read_texts(texts), candidate, 0)
    found = compare(materials, candidate, reference, window=window, batch_size=3)
    expected = [sum(len(d.token_ids) - 1 for d in m.documents) for m in materials]
    assert [found.sums.part(rows).tokens for rows in found.rows] == expected


def test_an_overlap_gives_context_and_scores_nothing_twice(
    texts: Any, candidate: Any, reference: Any
) -> None:
    alone = comparison(texts, candidate, reference, window=16)
    lapped = comparison(texts, candidate, reference, window=16, overlap=12)
    whole = comparison(texts, candidate, reference)
    parts = [found.sums.part() for found in (alone, lapped, whole)]
    assert len({part.tokens for part in parts}) == 1
    values = [figures(part).perplexity_reference.value for part in parts]
    assert len({round(value, 6) for value in values if value}) == 3, "context changes the figure"


def test_kinds_of_positions_add_up(texts: Any, candidate: Any, reference: Any) -> None:
    found = comparison(texts, candidate, reference)
    whole = found.sums.part()
    for pair in (("early", "late"), ("rare", "common")):
        parts = [found.sums.part(cells=CELLS[name]) for name in pair]
        assert sum(part.tokens for part in parts) == whole.tokens
        total = sum(part.column("kl").sum() for part in parts)
        assert total == pytest.approx(whole.column("kl").sum(), rel=1e-12)
    rare = found.sums.part(cells=CELLS["rare"])
    assert 0 < rare.tokens <= RARE_SHARE * whole.tokens


def test_bytes_of_all_tokens_are_those_of_the_text(
    texts: Any, candidate: Any, reference: Any
) -> None:
    materials = prepare(read_texts(texts), candidate, 0)
    found = comparison(texts, candidate, reference)
    expected = [sum(d.bytes_scored for d in m.documents) for m in materials]
    assert [found.sums.part(rows).bytes.sum() for rows in found.rows] == expected


def test_blocks_of_head_rows_change_nothing(
    texts: Any, candidate: Any, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = comparison(texts, candidate, reference)
    monkeypatch.setattr(candidate, "block_rows", 5)
    split = comparison(texts, candidate, reference)
    same(figures(whole.sums.part()), figures(split.sums.part()), rel=1e-4, abs=2e-5)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_logits_that_are_not_finite_end_the_run(
    broken: float, texts: Any, candidate: Any, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = candidate.logits

    def spoiled(hidden: Any) -> Any:
        found = logits(hidden).copy()
        found[-1, 5] = broken
        return found

    monkeypatch.setattr(candidate, "logits", spoiled)
    with pytest.raises(NonFiniteError, match=r"the candidate gives (nan|inf) for token id 5"):
        comparison(texts, candidate, reference)
    reference._scores.clear()


def test_the_budget_is_shared_among_texts(texts: Any, candidate: Any) -> None:
    materials = prepare(read_texts(texts), candidate, 31)
    assert [sum(d.tokens_scored for d in m.documents) for m in materials] == [16, 15]


def test_a_text_of_one_token_is_refused(tmp_path: Path, candidate: Any) -> None:
    (tmp_path / "one.txt").write_text("a")
    with pytest.raises(UsageError, match=r"one\.txt: .*none to score"):
        prepare(read_texts([tmp_path / "one.txt"]), candidate, 0)


def test_other_token_ids_are_an_error_that_names_the_piece(
    tmp_path: Path, texts: Any, tiny_bundle: Path, reference: Any
) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, copy)
    tokenizer = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["h"], vocabulary["e"] = vocabulary["e"], vocabulary["h"]
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    other = Candidate(Bundle(copy, Bundle.open(tiny_bundle).manifest), threads=1)
    materials = prepare(read_texts(texts), other, 0)
    with pytest.raises(
        ParityError, match=r"prose\.txt, document 0: .* differ at token \d+: \d+ \("
    ):
        check_ids(materials, other, reference)


def test_equal_token_ids_pass(texts: Any, candidate: Any, reference: Any) -> None:
    check_ids(prepare(read_texts(texts), candidate, 0), candidate, reference)
