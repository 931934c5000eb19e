"""Figures against their definitions, written down a second time in plain float64."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headport.bundle import Bundle
from headport.validate.candidate import Candidate
from headport.validate.comparison import compare, jobs_of, prepare
from headport.validate.documents import read_texts
from headport.validate.figures import figures


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents that differ in length, weight and in what is prompt."""
    file = tmp_path_factory.mktemp("records") / "records.jsonl"
    words = "The head is the last matrix of a language model. "
    lines = [
        {"text": words},
        {"prompt": words, "completion": words[:13]},
        {"prompt": words[:5], "completion": words, "weight": 2.5},
    ]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def rounded(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Candidate:
    """A bundle that drifts enough for every figure to show it."""
    from headport.quantize.command import Options, quantize

    output = tmp_path_factory.mktemp("rounded") / "bundle"
    options = Options(bundle=tiny_bundle, output=output, head="int4", block=16)
    return Candidate(Bundle.open(quantize(options).path), threads=1)


def log_softmax(logits: Any) -> Any:
    logits = logits.astype(np.float64)
    top = logits.max(axis=1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))


def by_numpy(materials: Any, candidate: Candidate, reference: Any) -> dict[str, float]:
    """The figures from float64 log-probabilities of the same logits."""
    columns: dict[str, list[Any]] = {name: [] for name in ("w", "z", "c", "kl", "rev", "tv", "dp")}
    for job in jobs_of(materials, 32):
        reference.ask_score(job.window.token_ids)
        (block,) = reference.read_score(10_000)
        (states,) = candidate.hidden_states([job.window.token_ids])
        log_p, log_q = log_softmax(block.logits), log_softmax(candidate.logits(states))
        p, q = np.exp(log_p), np.exp(log_q)
        y = np.arange(len(p)), job.window.targets
        found = {
            "w": np.full(len(p), job.document.weight),
            "z": -log_p[y],
            "c": -log_q[y],
            "kl": (p * (log_p - log_q)).sum(axis=1),
            "rev": (q * (log_q - log_p)).sum(axis=1),
            "tv": np.abs(p - q).sum(axis=1) / 2,
            "dp": (q - p)[y],
        }
        for name, values in found.items():
            columns[name].append(values[job.window.scored])
    all_of = {name: np.concatenate(parts) for name, parts in columns.items()}
    weights = all_of.pop("w")
    mean = {name: float(np.average(values, weights=weights)) for name, values in all_of.items()}
    return {
        "perplexity_reference": math.exp(mean["z"]),
        "perplexity_candidate": math.exp(mean["c"]),
        "perplexity_ratio": math.exp(mean["c"] - mean["z"]),
        "kl_mean": mean["kl"],
        "kl_reverse_mean": mean["rev"],
        "total_variation_mean": mean["tv"],
        "delta_p_mean": mean["dp"],
        "delta_p_rms": math.sqrt(np.average(all_of["dp"] ** 2, weights=weights)),
        **{f"kl_p{r}": float(np.quantile(all_of["kl"], r / 100)) for r in (1, 50, 90, 99)},
        **{f"delta_p_p{r}": float(np.quantile(all_of["dp"], r / 100)) for r in (5, 75, 95)},
    }


def test_every_mean_and_percentile_equals_plain_float64(
    records: Path, rounded: Candidate, reference_of: Any, tiny_llama: Path
) -> None:
    reference = reference_of(tiny_llama)
    materials = prepare(read_texts([records]), rounded, 0)
    found = figures(compare(materials, rounded, reference, window=32).sums.part())
    expected = by_numpy(materials, rounded, reference)
    assert expected["kl_mean"] > 1e-4 and abs(expected["delta_p_mean"]) > 1e-7
    for name, value in expected.items():
        # Percentiles keep seven digits of a position's figure.
        assert getattr(found, name).value == pytest.approx(value, rel=1e-6, abs=2e-10), name


def test_prompts_are_masked_as_transformers_masks_labels(
    records: Path, tiny_bundle: Path, tiny_llama: Path, reference_of: Any
) -> None:
    """Labels of −100, as trainers set them on prompts, and the model's own loss."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    total = count = 0.0
    for line in records.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        prompt, reply = record.get("prompt", ""), record.get("completion", record.get("text"))
        ids = torch.tensor([tokenizer(prompt + reply)["input_ids"]])
        labels = ids.clone()
        labels[0, : len(tokenizer(prompt)["input_ids"])] = -100
        scored = int((labels[0, 1:] >= 0).sum())
        with torch.inference_mode():
            loss = float(model(input_ids=ids, labels=labels).loss)
        total += record.get("weight", 1.0) * scored * loss
        count += record.get("weight", 1.0) * scored
    candidate = Candidate(Bundle.open(tiny_bundle), threads=1)
    materials = prepare(read_texts([records]), candidate, 0)
    part = compare(materials, candidate, reference_of(tiny_llama), window=64).sums.part()
    assert part.weights.sum() == count
    assert figures(part).perplexity_reference.value == pytest.approx(
        math.exp(total / count), rel=1e-6
    )
