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
from headport.metrics import RowScores, summarize
from headport.validate.candidate import Candidate
from headport.validate.comparison import Comparison, check_ids, compare, prepare
from headport.validate.documents import read_texts


@pytest.fixture(scope="module")
def candidate(tiny_bundle: Path) -> Candidate:
    return Candidate(Bundle.open(tiny_bundle), threads=1)


@pytest.fixture(scope="module")
def reference(reference_of: Any, tiny_llama: Path) -> Any:
    return reference_of(tiny_llama)


def comparison(
    texts: Any, candidate: Any, reference: Any, window: int = 64, batch_size: int = 1
) -> Comparison:
    materials = prepare(read_texts(texts), candidate, 0)
    return compare(materials, candidate, reference, window=window, batch_size=batch_size)


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
    rows = found.slices[0].rows
    total, count = independent([file], tiny_llama, 64)
    assert len(rows) == count > 64, "several windows"
    assert summarize(rows, 1).perplexity_reference == pytest.approx(
        math.exp(total / count), rel=1e-6
    )
    assert summarize(rows, 1).perplexity_candidate == pytest.approx(
        math.exp(total / count), rel=1e-6
    )


@pytest.mark.parametrize("batch_size", [2, 7])
def test_figures_do_not_depend_on_batches(
    batch_size: int, texts: Any, candidate: Any, reference: Any
) -> None:
    alone = comparison(texts, candidate, reference, window=16)
    batched = comparison(texts, candidate, reference, window=16, batch_size=batch_size)
    for one, other in zip(alone.slices, batched.slices, strict=True):
        np.testing.assert_allclose(
            one.rows.nll_candidate, other.rows.nll_candidate, rtol=1e-6, atol=1e-6
        )
        np.testing.assert_array_equal(one.rows.agreement, other.rows.agreement)
        a, b = summarize(one.rows, 1), summarize(other.rows, 1)
        assert a.perplexity_candidate == pytest.approx(b.perplexity_candidate, rel=1e-6)


@pytest.mark.parametrize("window", [3, 7, 64])
def test_windows_change_the_context_but_not_what_is_scored(
    window: int, texts: Any, candidate: Any, reference: Any
) -> None:
    materials = prepare(read_texts(texts), candidate, 0)
    found = compare(materials, candidate, reference, window=window, batch_size=3)
    expected = [sum(len(d.token_ids) - 1 for d in m.documents) for m in materials]
    assert [len(part.rows) for part in found.slices] == expected
    assert all(len(part.near_tie_bound) == len(part.rows) for part in found.slices)


def test_blocks_of_head_rows_change_nothing(
    texts: Any, candidate: Any, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = comparison(texts, candidate, reference)
    monkeypatch.setattr(candidate, "block_rows", 5)
    split = comparison(texts, candidate, reference)
    rows = [RowScores.concatenate([p.rows for p in c.slices]) for c in (whole, split)]
    np.testing.assert_allclose(rows[0].nll_candidate, rows[1].nll_candidate, atol=1e-6)
    np.testing.assert_allclose(rows[0].nll_reference, rows[1].nll_reference, atol=1e-12)


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
    reference._asked.clear()


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
