"""Greedy runs: the first divergence and the reference's margin there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headport.bundle import Bundle
from headport.validate.candidate import Candidate
from headport.validate.comparison import Material, prepare
from headport.validate.documents import read_texts
from headport.validate.greedy import run_greedy


@pytest.fixture
def candidate(tiny_bundle: Path) -> Candidate:
    return Candidate(Bundle.open(tiny_bundle), threads=1)


@pytest.fixture
def materials(texts: Any, candidate: Candidate) -> list[Material]:
    return prepare(read_texts(texts), candidate, 0)


def test_a_faithful_bundle_never_diverges(
    materials: Any, candidate: Any, reference_of: Any, tiny_llama: Path
) -> None:
    runs = run_greedy(materials, candidate, reference_of(tiny_llama), 8)
    assert [len(of_text) for of_text in runs] == [len(m.documents[:2]) for m in materials]
    for run in (run for of_text in runs for run in of_text):
        assert (run.first_divergence, run.near_tie, run.new_tokens) == (None, None, 8)
        assert run.reference_text == run.candidate_text


def test_a_divergence_is_placed_and_judged_by_the_margin(
    materials: Any,
    candidate: Any,
    reference_of: Any,
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faithful = candidate.continue_greedily

    def other(prompts: Any, steps: int, _sources: Any) -> Any:
        chosen = faithful(prompts, steps)
        chosen[:, 3] = (chosen[:, 3] + 1) % 257
        return chosen

    monkeypatch.setattr(candidate, "continue_greedily", other)
    reference = reference_of(tiny_llama)
    (run, *_), *_ = run_greedy(materials, candidate, reference, 8)
    prompt = materials[0].documents[0].token_ids[: run.prompt_tokens]
    wanted = reference.inner.continue_greedily((tuple(prompt.tolist()),), 8)
    assert run.first_divergence == 3
    assert run.reference_margin == pytest.approx(wanted.margins[0][3], abs=1e-4)
    assert run.near_tie == (run.reference_margin <= run.near_tie_bound) is False


def test_prompt_and_steps_stay_within_the_context(
    materials: Any, candidate: Any, reference_of: Any, tiny_llama: Path
) -> None:
    ((run, *_), *_) = run_greedy(materials, candidate, reference_of(tiny_llama), 10_000)
    assert run.prompt_tokens + run.new_tokens == candidate.context == 64


def test_no_steps_no_runs(materials: Any, candidate: Any) -> None:
    assert run_greedy(materials, candidate, None, 0) == [() for _ in materials]  # type: ignore[arg-type]


def test_prompts_of_different_length_are_run_apart(
    tmp_path: Path, candidate: Any, reference_of: Any, tiny_llama: Path
) -> None:
    (tmp_path / "short.txt").write_text("a head")
    (tmp_path / "long.txt").write_text("the last matrix of a model " * 8)
    files = [tmp_path / "short.txt", tmp_path / "long.txt"]
    found = prepare(read_texts(files), candidate, 0)
    runs = run_greedy(found, candidate, reference_of(tiny_llama), 4)
    lengths = [of_text[0].prompt_tokens for of_text in runs]
    assert lengths == [len(found[0].documents[0].token_ids), 32]
    assert np.all([run.first_divergence is None for of_text in runs for run in of_text])
