"""The head that gives candidates: what it gives, what it costs, what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headport.bundle import Bundle
from headport.certificate_check import check_certificate, require_certificate
from headport.errors import BundleError, ParityError, QuantizeError, UsageError
from headport.inspection import Options as InspectOptions
from headport.inspection import inspect
from headport.lowering import Options as LowerOptions
from headport.lowering import lower
from headport.quantize import Options, quantize
from headport.runner import open_runner
from tests.toy_bundles import write_toy

V, H, M = 67, 24, 10
WEIGHT = np.random.default_rng(0).normal(size=(V, H)).astype(np.float32)
STATES = np.random.default_rng(1).normal(size=(40, H)).astype(np.float32)
TRUTH = STATES.astype(np.float64) @ WEIGHT.T.astype(np.float64)


def _made(folder: Path, *, toy: dict[str, Any] | None = None, **options: Any) -> Bundle:
    source = write_toy(folder / "toy", WEIGHT, **(toy or {}))
    asked: dict[str, Any] = {"certify": True, "rescore": M, "block": 16, **options}
    return quantize(Options(bundle=source.path, output=folder / "int8", head="int8", **asked))


def test_candidates_are_exact_sorted_and_counted(tmp_path: Path) -> None:
    found = open_runner(_made(tmp_path)).head(STATES).candidates
    assert found is not None and found.ids.shape == found.logits.shape == (40, M)
    exact = np.take_along_axis(TRUTH, found.ids, axis=1)
    assert np.abs(found.logits - exact).max() < 1e-13
    order = np.argsort(-TRUTH, axis=1, kind="stable")
    for n, k in enumerate(found.certified_k):
        assert (found.ids[n, :k] == order[n, :k]).all()
    assert np.median(found.certified_k) >= 5
    assert (found.cut >= np.sort(TRUTH, axis=1)[:, -M - 1]).all()
    logsumexp = np.log(np.exp(TRUTH).sum(axis=1))
    assert np.abs(found.logsumexp - logsumexp).max() < 1e-2


def test_rows_are_independent_of_their_batch(tmp_path: Path) -> None:
    runner = open_runner(_made(tmp_path))
    together = runner.head(STATES).candidates
    alone = runner.head(STATES[7:8]).candidates
    assert together is not None and alone is not None
    assert (together.ids[7] == alone.ids[0]).all()
    assert np.abs(together.logits[7] - alone.logits[0]).max() < 1e-13


def test_full_rescored_and_quantised_logits(tmp_path: Path) -> None:
    runner = open_runner(_made(tmp_path))
    full, quantised = runner.full_logits(STATES), runner.quantised(STATES)
    rescored = runner.rescored_logits(STATES)
    assert np.abs(full - TRUTH).max() < 1e-5 < np.abs(quantised.logits - TRUTH).max() < 0.3
    assert (quantised.upper_bounds >= TRUTH).all()
    exact = np.abs(rescored - TRUTH) < 1e-5
    assert (exact.sum(axis=1) >= M).all() and not exact.all()
    found = runner.head(STATES).candidates
    assert found is not None and np.take_along_axis(exact, found.ids, axis=1).all()


def test_noise_moves_what_is_picked_and_proves_no_rank(tmp_path: Path) -> None:
    runner = open_runner(_made(tmp_path))
    noise = np.zeros((40, V), np.float32)
    noise[:, 3] = 1000.0
    found = runner.head(STATES, noise=noise).candidates
    assert found is not None and (found.ids == 3).any(axis=1).all()
    assert (found.certified_k == 0).all()


@pytest.mark.parametrize("activations", ["residual", "rounded", "exact"])
def test_states_that_are_not_finite_prove_nothing(tmp_path: Path, activations: str) -> None:
    states = STATES[:4].copy()
    states[0, 5], states[1, 5], states[2] = np.nan, np.inf, 1e30
    portable = _made(tmp_path, activations=activations)
    lowered = lower(LowerOptions(bundle=portable.path, output=tmp_path / "cpu", target="ort-cpu"))
    for bundle in (portable, lowered):
        found = open_runner(bundle).head(states).candidates
        assert found is not None and found.certified_k[:3].tolist() == [0, 0, 0]
        assert np.isposinf(found.cut[:3]).all() and not np.isfinite(found.logits[:2]).all(1).any()
        assert found.certified_k[3] > 0 and np.isfinite(found.cut[3])


def test_without_a_certificate_nothing_is_proved_and_exact_is_refused(tmp_path: Path) -> None:
    bundle = _made(tmp_path, certify=False)
    runner = open_runner(bundle)
    found = runner.head(STATES).candidates
    assert found is not None and not found.certified_k.any() and np.isposinf(found.cut).all()
    assert np.abs(found.logits - np.take_along_axis(TRUTH, found.ids, axis=1)).max() < 1e-13
    with pytest.raises(BundleError, match="need a certified head, this one gives candidates"):
        require_certificate(bundle, runner)


@pytest.mark.parametrize("tied", [False, True])
def test_the_original_weight_is_stored_once(tmp_path: Path, tied: bool) -> None:
    bundle = _made(tmp_path, toy={"tied": tied})
    held = [t for t in bundle.manifest.tensors if t.dtype == "float" and t.shape == (V, H)]
    assert len(held) == (1 if tied else 2)  # untied: the embedding is another matrix
    sizes = bundle.manifest.provenance.stages[-1].report["rescoring"]
    int8, scale, bounds = V * H, V * 2 * 4, V * 2 * 4
    assert sizes == {
        "certificate": bounds,
        "original": V * H * 4,
        "original_shared": tied,
        "resident": int8 + scale + bounds + V * H * 4,
        "read_per_token": int8 + scale + bounds + M * H * 4,
        "read_per_fallback": V * H * 4,
    }


def test_a_certificate_with_a_short_bias_is_checked(tmp_path: Path) -> None:
    from headport.certificate_check import check_certificate
    from headport.graphs import INLINE_BYTES

    bias = np.random.default_rng(2).normal(size=V).astype(np.float32)
    assert bias.nbytes < INLINE_BYTES
    bundle = _made(tmp_path, toy={"bias": bias})
    assert check_certificate(bundle, open_runner(bundle))


def test_more_candidates_than_tokens_are_all_but_one(tmp_path: Path) -> None:
    bundle = _made(tmp_path, rescore=500)
    form = bundle.manifest.heads["lm"].candidates
    assert form is not None and form.count == V - 1


def test_inspect_names_it_and_checks_it(tmp_path: Path) -> None:
    bundle = _made(tmp_path)
    description, passed = inspect(InspectOptions(bundle=bundle.path, selftest=True))
    text = description.text()
    assert passed and "10 candidates" in text and "certified per row" in text
    assert "certificate holds" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "fp16"}, "need integers"),
        ({"rescore": -1}, "at least 1 candidate"),
    ],
)
def test_wrong_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    asked: dict[str, Any] = {"head": "int8", "rescore": 5, **options}
    with pytest.raises(UsageError, match=message):
        quantize(Options(bundle=tmp_path, output=tmp_path / "o", **asked))


def test_a_scale_that_turns_the_order_round_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match="scale > 0 was expected, -2 found"):
        _made(tmp_path, toy={"scale": -2.0})
    assert not (tmp_path / "int8").exists()


def test_a_wrong_quantised_weight_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headport.quantize import head

    honest = head.add_rescoring

    def faulty(source: Any, model: Any, entry: Any, asked: Any) -> Any:
        made = honest(source, model, entry, asked)
        value = model.graph.initializers["w.scale"]
        value.const_value = type(value.const_value)(value.const_value.numpy()[::-1].copy())
        return made

    monkeypatch.setattr(head, "add_rescoring", faulty)
    with pytest.raises(ParityError, match="does not multiply with the rounded weight"):
        _made(tmp_path)
    assert not (tmp_path / "int8").exists()


def test_a_head_that_gives_all_logits_has_no_quantised_ones(tmp_path: Path) -> None:
    bundle = write_toy(tmp_path / "toy", WEIGHT)
    runner = open_runner(bundle)
    with pytest.raises(BundleError, match="gives logits, candidates were expected"):
        runner.quantised(STATES)
    assert (runner.full_logits(STATES) == runner.head(STATES).logits).all()


def test_a_certified_head_of_a_half_precision_model(tiny_half_bundle: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"bundle": tiny_half_bundle, "head": "int8", "certify": True}
    portable = quantize(Options(output=tmp_path / "q", **asked))
    lowered = lower(LowerOptions(bundle=portable.path, output=tmp_path / "l", target="ort-cpu"))
    for bundle in (portable, lowered):
        assert check_certificate(bundle, open_runner(bundle))
