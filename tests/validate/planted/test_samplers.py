"""Each fault of a sampler is found on shared noise, in the row of the grid that it concerns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headport.runtime.sampling.filters import FILTERS
from headport.runtime.sampling.noise import NoiseKey
from headport.runtime.sampling.sampler import choose, process
from headport.runtime.sampling.settings import Sampling
from headport.validate import sampler_parity as samplers
from headport.validate.candidate import Candidate
from headport.validate.comparison import jobs_of
from headport.validate.sampler_parity import sampler_parity
from headport.validate.wire import SamplingCase
from tests.validate.planted.conftest import materials_of
from tests.validate.planted.row import Row
from tests.validate.planted.samplers import PROCESSORS, ROWS, last_tie


def parity(candidate: Candidate, texts: Any, reference: Any) -> Any:
    jobs = list(jobs_of(materials_of(candidate, texts), 16))
    return sampler_parity(jobs, reference)


def use(draw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the runtime draw so, and its free draws be few."""
    keep = samplers.RUNTIMES["python"][1]
    monkeypatch.setitem(samplers.RUNTIMES, "python", (draw, keep))
    monkeypatch.setattr(samplers, "_FREE_DRAWS", 50)


def test_the_sampler_without_a_fault_draws_the_same_tokens(
    llama: Candidate, texts: Any, reference_of: Any, tiny_llama: Path
) -> None:
    found = parity(llama, texts, reference_of(tiny_llama))
    assert found.verdict == "passed"
    assert [case.first_difference for case in found.cases] == [""] * len(samplers.GRID)
    assert found.distribution_p_value > 1e-3


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.fault)
def test_a_fault_of_the_sampler(
    row: Row,
    llama: Candidate,
    texts: Any,
    reference_of: Any,
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def draw(logits: Any, case: SamplingCase, key: tuple[int, int, int]) -> int:
        ids = np.arange(len(logits), dtype=np.int64)
        asked = samplers.sampling_of(case)
        scores, left = process(logits, ids, asked, samplers.context_of(case))
        filters = {each.name: getattr(asked, each.name) for each in FILTERS}
        sampling = Sampling(case.temperature, **filters)
        return int(row.plant(scores, left, sampling, NoiseKey(*key)))

    use(draw, monkeypatch)
    reference = reference_of(tiny_llama)
    if row.plant is last_tie:  # two tokens share the maximum
        reference = _Tied(reference)
    found = parity(llama, texts, reference)
    assert found.verdict == "failed"
    differing = [case.parameters for case in found.cases if case.first_difference]
    assert any(row.part in parameters for parameters in differing), differing


@pytest.mark.parametrize("row", PROCESSORS, ids=lambda row: row.fault)
def test_a_fault_of_what_changes_scores(
    row: Row,
    llama: Candidate,
    texts: Any,
    reference_of: Any,
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def draw(logits: Any, case: SamplingCase, key: tuple[int, int, int]) -> int:
        ids = np.arange(len(logits), dtype=np.int64)
        heeded = row.plant(samplers.sampling_of(case))
        return choose(logits, ids, heeded, NoiseKey(*key), samplers.context_of(case))

    use(draw, monkeypatch)
    found = parity(llama, texts, reference_of(tiny_llama))
    assert found.verdict == "failed"
    differing = [case.parameters for case in found.cases if case.first_difference]
    assert differing and all(row.part in parameters for parameters in differing), differing


class _Tied:
    """A reference whose two best logits are equal."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner.inner

    def draw(self, request: Any) -> Any:
        import torch

        from headport.validate.reference_sampler import distribution, draw
        from headport.validate.wire import Drawn

        row = torch.linspace(-3, 3, 257)
        row[[40, 90]] = 4.0
        found = [draw(row, case, request.keys) for case in request.cases]
        tokens, kept = zip(*found, strict=True)
        return Drawn(257, tokens, kept, distribution(row, request.free)), row.numpy()
