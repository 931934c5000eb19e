"""Every row of the grid: the runtime's sampler and the reference's give the same tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headport.errors import RequestError
from headport.runtime.sampling import filters, processors
from headport.runtime.sampling.filters import FILTERS
from headport.runtime.sampling.processors import PROCESSORS
from headport.validate.reference_sampler import draw
from headport.validate.sampler_parity import GRID, RUNTIMES

KEYS = ((0, 0, 0), (7, 1, 1), (2**64 - 1, 3, 2))
ROWS = [
    (np.random.default_rng(size).normal(size=size) * 3).astype(np.float32) for size in (99, 257)
]


def differing() -> list[int]:
    """Rows of the grid in which a token, or the number of kept ones, is not the reference's."""
    choose, keep = RUNTIMES["python"]
    found = []
    for index, case in enumerate(GRID):
        for row in ROWS:
            tokens, kept = draw(torch.from_numpy(row), case, KEYS)
            try:
                same = tuple(choose(row, case, key) for key in KEYS) == tokens
                same &= keep(row, case) == kept
            except RequestError:
                same = False
            if not same:
                found.append(index)
                break
    return found


def test_all_rows_agree():
    assert differing() == []


_ELSEWHERE = {"process_scores", "forced_bos, forced_eos"}
TABLES = [
    # Without the caller's own, and what encoder-decoder models alone have.
    *((processors, "PROCESSORS", p.name) for p in PROCESSORS if p.name not in _ELSEWHERE),
    *((filters, "FILTERS", f.name) for f in FILTERS),
]


_OPTIONS = {
    "presence_and_frequency_penalty": "presence_penalty",
    "min_length, min_new_tokens": "min_new_tokens",
}


@pytest.mark.parametrize(("module", "table", "name"), TABLES, ids=[name for *_, name in TABLES])
def test_a_missing_rule_is_found_in_its_rows(
    module: Any, table: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = getattr(module, table)
    monkeypatch.setattr(module, table, tuple(each for each in rows if each.name != name))
    option = _OPTIONS.get(name, name)
    neutral = GRID[3]
    concerned = [n for n in differing() if getattr(GRID[n], option) != getattr(neutral, option)]
    assert concerned
