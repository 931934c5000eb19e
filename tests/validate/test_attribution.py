"""The split of the drift adds up, and the reference's second path is the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headport.bundle import Bundle
from headport.metrics import score_rows
from headport.validate.attribution import attribute, noise_floor, sampled_jobs
from headport.validate.candidate import Candidate
from headport.validate.comparison import prepare
from headport.validate.documents import read_texts
from headport.validate.reference_sampler import philox_blocks
from headport.validate.wire import Ready
from tests.runtime.philox import philox4x64
from tests.validate.planted.row import weight


@pytest.fixture(scope="module")
def reference(reference_of: Any, tiny_llama: Path) -> Any:
    return reference_of(tiny_llama)


@pytest.fixture(scope="module")
def plain(tiny_bundle: Path) -> Candidate:
    return Candidate(Bundle.open(tiny_bundle), threads=1)


@pytest.fixture
def rounded(tiny_bundle: Path, tmp_path: Path) -> Candidate:
    """The bundle with a coarser head, as a quantised one would have."""
    import shutil

    copy = tmp_path / "rounded"
    shutil.copytree(tiny_bundle, copy)
    weight("lm_head", lambda w: np.round(w * 16) / 16)(copy)
    return Candidate(Bundle.open(copy, verify=False), threads=1)


def jobs(candidate: Candidate, texts: Any, tokens: int = 60) -> Any:
    return sampled_jobs(prepare(read_texts(texts), candidate, 0), 40, 0, tokens)


def test_parts_add_up_to_the_whole_drift(rounded: Any, reference: Any, texts: Any) -> None:
    chosen = jobs(rounded, texts)
    found = attribute(chosen, rounded, reference)
    assert found is not None and found.tokens == sum(len(j.window.token_ids) for j in chosen)
    whole = []
    for job in chosen:
        reference.ask_score(job.window.token_ids)
        (block,) = reference.read_score(10_000)
        (states,) = rounded.hidden_states([job.window.token_ids])
        scores = score_rows(
            block.logits.copy(), rounded.logits(states), job.window.targets, block.near_tie_bound
        )
        whole.append(scores.nll_candidate - scores.nll_reference)
    total = sum(part.nll_difference for part in found.parts)
    assert total == pytest.approx(np.concatenate(whole).mean(), abs=1e-6)
    assert found.largest == "head" and found.finding.startswith("100% of the KL")


def test_the_midpoint_tells_rounding_from_export(
    rounded: Any, plain: Any, reference: Any, texts: Any
) -> None:
    found = attribute(jobs(plain, texts), rounded, reference, plain)
    assert found is not None
    by_name = {part.part: part for part in found.parts}
    assert list(by_name) == ["exported head", "exported backbone", "head", "backbone"]
    assert found.largest == "head" and by_name["head"].kl_mean > 1e-5
    for name in ("exported head", "exported backbone", "backbone"):
        assert by_name[name].kl_mean < 1e-9, "both bundles have the same backbone"


def test_a_reference_without_a_head_matrix_is_not_split(plain: Any, texts: Any) -> None:
    class Headless:
        def ready(self) -> Any:
            return Ready(None, None, "", 0)  # type: ignore[arg-type]

    assert attribute(jobs(plain, texts), plain, Headless()) is None  # type: ignore[arg-type]
    assert noise_floor(jobs(plain, texts), Headless(), 5) is None  # type: ignore[arg-type]


def test_the_sample_is_spread_over_every_text(plain: Any, texts: Any) -> None:
    materials = prepare(read_texts(texts), plain, 0)
    chosen = sampled_jobs(materials, 8, 0, 32)
    assert {job.material for job in chosen} == {0, 1}
    assert len({job.window.start for job in chosen}) >= 2, "not only beginnings"
    assert 16 <= sum(len(job.window.token_ids) for job in chosen) <= 48


def test_the_noise_floor_is_rounding_and_not_nothing(
    plain: Any, reference: Any, texts: Any
) -> None:
    floor = noise_floor(jobs(plain, texts), reference, 7)
    assert floor is not None and "eager" in floor.path
    assert 0 < floor.max_abs_logit_error < 1e-4
    assert floor.kl_mean < 1e-9 and floor.top1_agreement == 1
    assert floor.perplexity_ratio == pytest.approx(1, abs=1e-6)


def test_halves_through_the_cache_are_the_same_model(reference: Any) -> None:
    import torch

    other = reference.inner._other
    token_ids = torch.arange(11)[None] % 257
    with torch.inference_mode():
        usual = reference.inner.model(input_ids=token_ids, use_cache=False).logits
        for path in (other._by_halves, other._by_attention):
            assert torch.allclose(path(token_ids), usual, atol=1e-4)
    assert str(reference.inner.model.config._attn_implementation) == other._usual, "put back"


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 11])
def test_the_references_noise_is_the_papers(seed: int) -> None:
    counters = np.array([0, 1, 5, 2**40], np.uint64)
    found = philox_blocks(counters, 3, 2, seed)
    for row, counter in zip(found, counters.tolist(), strict=True):
        assert tuple(row.tolist()) == philox4x64((counter, 3, 2, 0), (seed, 0))
