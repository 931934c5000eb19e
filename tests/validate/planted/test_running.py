"""Each fault of a runtime fails all gates, and the split names the backbone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headport.validate.candidate import Candidate
from tests.validate.planted import running
from tests.validate.planted.conftest import judge
from tests.validate.planted.row import Row


@pytest.mark.parametrize("row", running.ROWS, ids=lambda row: row.fault)
def test_a_fault_of_the_runtime(
    row: Row,
    llama: Candidate,
    texts: Any,
    reference_of: Any,
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(llama, "hidden_states", row.plant(llama.hidden_states))
    verdicts, named = judge(llama, texts, reference_of(tiny_llama))
    assert verdicts["failed"] == row.gates and named == row.part
