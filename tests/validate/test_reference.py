"""The reference's own arithmetic: bounds, slopes, greedy text, and what it must not import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headport.validate.head_watch import HeadWatch
from headport.validate.reference import Reference
from headport.validate.wire import Score


class _Toy(torch.nn.Module):
    """logits = after(W h + b) of rows of an embedding."""

    def __init__(self, after: Any, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(16, 8)
        self.head = torch.nn.Linear(8, 16, bias=bias)
        self.after = after

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.after(self.head(self.embedding(token_ids)))
        return logits


def watch(after: Any, bias: bool = False) -> tuple[HeadWatch, torch.Tensor, _Toy]:
    toy = _Toy(after, bias)
    found = HeadWatch(toy)
    with torch.inference_mode():
        logits = toy(torch.arange(8)[None])
    return found, logits, toy


@pytest.mark.parametrize(
    ("after", "slope"),
    [
        (lambda x: x, 1.0),
        (lambda x: 0.0625 * x, 0.0625),
        (lambda x: x / 6, 1 / 6),
        (lambda x: 3 * x + torch.arange(16), 3.0),  # a bias outside the matrix
        (lambda x: 30 * torch.tanh(x / 30), 1.0),
    ],
)
def test_the_slope_after_the_head_is_measured(after: Any, slope: float) -> None:
    found, logits, _ = watch(after)
    assert found.slope(logits) == pytest.approx(slope, rel=2e-3)


def test_the_bound_is_the_formula_and_holds() -> None:
    found, _, toy = watch(lambda x: x)
    hidden = toy.embedding.weight[:8].detach().double().numpy()
    weight = toy.head.weight.detach().double().numpy()
    largest = np.linalg.norm(weight, axis=1).max()
    expected = 2 * np.sqrt(8) * 2.0**-24 * largest * np.linalg.norm(hidden, axis=1)
    np.testing.assert_allclose(found.product_bound(), expected[None], rtol=1e-12)
    exact = hidden @ weight.T
    rounded = (hidden.astype(np.float32) @ weight.T.astype(np.float32)).astype(np.float64)
    assert (2 * np.abs(rounded - exact).max(axis=1) <= expected).all()


def test_a_model_without_a_head_matrix_is_seen_but_not_bounded() -> None:
    toy = _Toy(lambda x: x)
    toy.get_output_embeddings = lambda: None  # type: ignore[method-assign, assignment, return-value]
    found = HeadWatch(toy)
    with torch.inference_mode():
        toy(torch.arange(8)[None])
    assert found.output is None


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> Reference:
    return Reference(str(tiny_llama))


def test_logits_are_the_models(reference: Reference, tiny_llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([[5, 3, 8, 1]])).logits[0].numpy()
    scored, (logits,) = reference.score(Score((5, 3, 8, 1)))
    np.testing.assert_array_equal(logits, expected)
    assert (scored.rows, scored.vocab_size, len(scored.near_tie_bound)) == (4, 257, 4)
    assert all(0 < bound < 1e-3 for bound in scored.near_tie_bound)


def test_greedy_continuation_is_repeated_argmax_without_cache(reference: Reference) -> None:
    history = [5, 3, 8, 1]
    for _ in range(6):
        _, (logits,) = reference.score(Score(tuple(history)))
        history.append(int(logits[-1].argmax()))
    found = reference.continue_greedily(((5, 3, 8, 1), (9, 9, 2, 2)), 6)
    assert found.token_ids[0] == tuple(history[4:])
    assert len(found.token_ids) == len(found.margins) == len(found.near_tie_bound) == 2
    last = np.sort(logits[-1].astype(np.float64))
    assert found.margins[0][-1] == pytest.approx(last[-1] - last[-2], abs=1e-4)


def test_facts(reference: Reference, tiny_llama: Path) -> None:
    facts = reference.ready.facts
    assert (facts.model, facts.dtype, facts.vocab_size) == ("LlamaForCausalLM", "float32", 257)
    assert facts.checkpoint == tiny_llama.name and len(facts.sha256) == 64
    assert reference.ready.head_slope == 1.0


def test_the_process_imports_no_graph_or_runtime_code() -> None:
    program = (
        "import sys, headport.validate.reference\n"
        "banned = ('onnx', 'onnxruntime', 'onnx_ir', 'onnxscript', 'headport.graphs',\n"
        "  'headport.lowering', 'headport.runner', 'headport.session', 'headport.runtime',\n"
        "  'headport.quantize')\n"
        "found = [m for m in sys.modules if m in banned or m.startswith(tuple(b + '.' for b in"
        " banned))]\n"
        "ours = sorted(m for m in sys.modules if m.startswith('headport.export.')\n"
        "  and not m.startswith('headport.export.tuning'))\n"
        "print(found, ours)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[] ['headport.export.checkpoint', 'headport.export.source']"
