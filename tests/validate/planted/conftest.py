"""Good bundles to damage, and how a damaged one is judged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headport.bundle import Bundle
from headport.validate.attribution import attribute, sampled_jobs
from headport.validate.candidate import Candidate
from headport.validate.comparison import Material, compare, prepare
from headport.validate.documents import read_texts
from headport.validate.figures import figures
from headport.validate.gates import DEFAULT_GATES, Judged, evaluate

_SOURCES = {
    "llama": ("tiny_llama", "tiny_bundle"),
    "phi": ("tiny_phi", "phi_bundle"),
    "cohere": ("tiny_cohere", "cohere_bundle"),
    "gemma": ("tiny_gemma2", "gemma_bundle"),
}


@pytest.fixture(scope="module")
def sources(request: pytest.FixtureRequest) -> Callable[[str], tuple[Path, Path]]:
    """Checkpoint and bundle by the name that rows use."""

    def find(name: str) -> tuple[Path, Path]:
        checkpoint, bundle = (request.getfixturevalue(n) for n in _SOURCES[name])
        return checkpoint, bundle

    return find


@pytest.fixture(scope="module")
def llama(tiny_bundle: Path) -> Candidate:
    """A good bundle, loaded."""
    return Candidate(Bundle.open(tiny_bundle), threads=1)


def materials_of(candidate: Candidate, texts: Any, tokens: int = 80) -> list[Material]:
    """Documents of texts, cut to a few tokens."""
    return prepare(read_texts(texts), candidate, tokens)


def judge(
    candidate: Candidate, texts: Any, reference: Any, recipe: str = "fp32", tokens: int = 80
) -> tuple[dict[str, set[str]], str]:
    """Gates of a recipe by verdict, and the part that the split names."""
    materials = materials_of(candidate, texts, tokens)
    found = compare(materials, candidate, reference, window=40)
    part = found.sums.part()
    gates = evaluate(DEFAULT_GATES[recipe], Judged(figures(part), part.tokens), {})
    split = attribute(sampled_jobs(materials, 40, 0, 80), candidate, reference)
    assert split is not None
    verdicts: dict[str, set[str]] = {"passed": set(), "failed": set(), "undecided": set()}
    for gate in gates:
        verdicts[gate.verdict].add(gate.metric)
    return verdicts, split.largest
