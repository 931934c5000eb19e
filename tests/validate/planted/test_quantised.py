"""Each fault of a quantised bundle fails gates of its own recipe that hold without the fault."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headport.bundle import Bundle
from headport.quantize.command import Options, quantize
from headport.validate.candidate import Candidate
from tests.validate import sabotage
from tests.validate.conftest import CODE, PROSE
from tests.validate.planted.conftest import judge
from tests.validate.planted.quantised import BUNDLES, ROWS
from tests.validate.planted.row import Row

TOKENS = 1500  # documents enough for intervals that decide


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """A text of many documents."""
    rng = np.random.default_rng(0)
    words = (PROSE + CODE).split()
    file = tmp_path_factory.mktemp("many") / "many.txt"
    documents = (" ".join(rng.choice(words, 20)) for _ in range(24))
    file.write_text("\n\n".join(documents), encoding="utf-8")
    return (file,)


@pytest.fixture(scope="module")
def bundle_of(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(name: str) -> Path:
        options: dict[str, Any] = BUNDLES[name][0]
        output = tmp_path_factory.mktemp("quantised") / "bundle"
        return quantize(Options(bundle=tiny_bundle, output=output, **options)).path

    return make


@pytest.mark.parametrize("name", BUNDLES)
def test_without_a_fault_its_gates_hold(
    name: str, bundle_of: Any, many: Any, reference_of: Any, tiny_llama: Path
) -> None:
    candidate = Candidate(Bundle.open(bundle_of(name)), threads=1)
    _, recipe, holding = BUNDLES[name]
    verdicts, _ = judge(candidate, many, reference_of(tiny_llama), recipe, TOKENS)
    assert verdicts["passed"] >= holding


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.bundle}-{row.fault}")
def test_a_fault_of_a_quantised_bundle(
    row: Row, bundle_of: Any, many: Any, reference_of: Any, tiny_llama: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "damaged"
    shutil.copytree(bundle_of(row.bundle), copy)
    row.plant(copy)
    _, recipe, holding = BUNDLES[row.bundle]
    candidate = Candidate(Bundle(copy, sabotage.read_manifest(copy)), threads=1)
    verdicts, named = judge(candidate, many, reference_of(tiny_llama), recipe, TOKENS)
    assert row.gates <= holding, "a gate that fails without the fault proves nothing"
    assert verdicts["failed"] >= row.gates
    assert named == row.part
