"""Each fault of the files fails the gate that is made for it, and the split names the part."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from headport.bundle import Bundle
from headport.validate.candidate import Candidate
from tests.validate import sabotage
from tests.validate.planted import files
from tests.validate.planted.conftest import judge
from tests.validate.planted.row import Row


@pytest.mark.parametrize("row", files.ROWS, ids=lambda row: row.fault)
def test_a_fault_of_the_files(
    row: Row, sources: Any, texts: Any, reference_of: Any, tmp_path: Path
) -> None:
    checkpoint, source = sources(row.bundle)
    copy = tmp_path / "damaged"
    shutil.copytree(source, copy)
    row.plant(copy)
    candidate = Candidate(Bundle(copy, sabotage.read_manifest(copy)), threads=1)
    verdicts, named = judge(candidate, texts, reference_of(checkpoint))
    assert verdicts["failed"] >= row.gates
    assert named == row.part


@pytest.mark.parametrize("bundle", ["llama", "phi", "cohere", "gemma"])
def test_without_a_fault_everything_passes(
    bundle: str, sources: Any, texts: Any, reference_of: Any
) -> None:
    checkpoint, source = sources(bundle)
    candidate = Candidate(Bundle.open(source), threads=1)
    assert judge(candidate, texts, reference_of(checkpoint))[0]["passed"] == files.ALL
