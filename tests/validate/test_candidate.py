"""The candidate gives the same hidden states however it is batched and chunked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headport.bundle import Bundle
from headport.errors import BundleError, ParityError
from headport.validate import candidate as module
from headport.validate.candidate import Candidate


@pytest.fixture(scope="module", params=["tiny_bundle", "tiny_lowered"])
def candidate(request: pytest.FixtureRequest) -> Candidate:
    return Candidate(Bundle.open(request.getfixturevalue(request.param)), threads=1)


def windows() -> list[Any]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 257, length) for length in (40, 3, 17, 1, 64)]


def test_a_ragged_batch_equals_each_window_alone(candidate: Candidate) -> None:
    together = candidate.hidden_states(windows())
    for window, found in zip(windows(), together, strict=True):
        (alone,) = candidate.hidden_states([window])
        assert found.shape == alone.shape == (len(window), 64)
        np.testing.assert_allclose(found, alone, atol=2e-5)


def test_chunks_continue_through_the_cache(
    candidate: Candidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = candidate.hidden_states(windows())
    monkeypatch.setattr(module, "CHUNK_TOKENS", 7)
    for found, expected in zip(candidate.hidden_states(windows()), whole, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)


def test_greedy_tokens_are_repeated_argmax(candidate: Candidate) -> None:
    prompts = np.array([[5, 3, 8], [9, 9, 2]])
    history = prompts
    for _ in range(5):
        hidden = candidate.hidden_states(list(history))
        last = np.stack([states[-1] for states in hidden])
        history = np.concatenate([history, candidate.logits(last).argmax(axis=1)[:, None]], axis=1)
    np.testing.assert_array_equal(candidate.continue_greedily(prompts, 5), history[:, 3:])


def test_tokens_with_their_ends(candidate: Candidate) -> None:
    text = "a head 🙂"
    tokens = candidate.encode(text)
    assert len(tokens.ids) == len(tokens.ends) == candidate.count_tokens(text)
    assert tokens.ends.max() == len(text)
    assert candidate.special_tokens() == "nothing before, nothing after"


def test_blocks_of_head_rows_are_bounded(candidate: Candidate) -> None:
    assert candidate.block_rows * candidate.vocab_size * 4 <= 64 << 20


def test_a_head_that_says_candidates_without_saying_how_is_refused(tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    head = msgspec.structs.replace(bundle.manifest.heads["lm"], outputs="candidates")
    manifest = msgspec.structs.replace(bundle.manifest, heads={"lm": head})
    with pytest.raises(BundleError, match="one that gives candidates but not how is there"):
        Candidate(Bundle(bundle.path, manifest), threads=1)


@pytest.fixture(scope="module")
def certified(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    from headport.quantize import Options, quantize

    output = tmp_path_factory.mktemp("certified") / "int8"
    asked = Options(
        bundle=tiny_bundle, output=output, head="int8", block=16, certify=True, rescore=32
    )
    return quantize(asked)


def test_candidates_are_judged_by_rescored_logits(certified: Bundle, tiny_bundle: Path) -> None:
    judged = Candidate(certified, threads=1)
    plain = Candidate(Bundle.open(tiny_bundle), threads=1)
    states = np.concatenate(plain.hidden_states(windows()))
    found, full = judged.logits(states), plain.logits(states)
    leading = np.argsort(-full, axis=1)[:, :10]
    close = np.abs(np.take_along_axis(found - full, leading, axis=1))
    assert close.max() < 1e-5 < np.abs(found - full).max() < 0.1
    proved = judged.proved
    assert proved.positions == len(states) >= proved.first >= proved.ten > 0
    assert "32 candidates" in judged.notes()[0] and f"{len(states)} positions" in judged.notes()[1]
    prompts = np.array([[5, 3, 8], [9, 9, 2]])
    expected = plain.continue_greedily(prompts, 4)
    assert (judged.continue_greedily(prompts, 4) == expected).all()


def test_a_full_product_of_another_weight_is_found(
    certified: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = Candidate(certified, threads=1)
    honest = judged._runner.full_logits
    monkeypatch.setattr(judged._runner, "full_logits", lambda *given: honest(*given)[:, ::-1])
    with pytest.raises(ParityError, match="graphs do not belong together"):
        judged.logits(judged.hidden_states(windows())[0])
