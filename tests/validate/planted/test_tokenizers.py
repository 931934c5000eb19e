"""A fault of the tokenizer ends the run before any logit is looked at."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from headport.bundle import Bundle
from headport.errors import ParityError
from headport.validate.candidate import Candidate
from headport.validate.comparison import check_ids
from tests.validate.planted.conftest import materials_of
from tests.validate.planted.row import Row
from tests.validate.planted.tokenizers import ROWS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.fault)
def test_a_fault_of_the_tokenizer(
    row: Row, texts: Any, tiny_bundle: Path, reference_of: Any, tiny_llama: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, copy)
    row.plant(copy)
    candidate = Candidate(Bundle(copy, Bundle.open(tiny_bundle).manifest), threads=1)
    with pytest.raises(ParityError, match="tokenizer and the bundle's differ at token"):
        check_ids(materials_of(candidate, texts), candidate, reference_of(tiny_llama))
