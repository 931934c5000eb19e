"""Building plans on a machine with a GPU, with stand-ins for the card and the library."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headport.bundle import Bundle
from headport.errors import EngineError
from headport.gpu_probe import Gpu, GpuProbe
from headport.lowering import Options as LowerOptions
from headport.lowering import lower
from headport.runner import open_runner
from headport.session import SessionSettings
from headport.validate.gpu import plans
from headport.validate.gpu.steps import Context, Finding, Unproven
from tests.lowering.backbones import CONTEXT, HIDDEN, VOCAB, Layer, attention_backbone
from tests.runtime.engine.conftest import fake_backend, separate_backend
from tests.toy_bundles import write_toy

__all__ = ["fake_backend", "separate_backend"]  # fixtures

CARD = GpuProbe("13.0", (Gpu("card", "8.9", 1 << 34),), None)


def bundle(folder: Path, seed: int = 1) -> Bundle:
    weight = np.random.default_rng(seed).normal(size=(VOCAB, HIDDEN)).astype(np.float16)
    backbone = attention_backbone([Layer(window=5)], half=True)
    return write_toy(folder, weight, backbone=backbone, max_context=CONTEXT)


@pytest.fixture
def context(tmp_path: Path, fake_backend: str, monkeypatch: pytest.MonkeyPatch) -> Context:
    """A bundle on a machine with a card and TensorRT-RTX, whose plans run on ONNX Runtime."""
    installed = {fake_backend: "1.7.1"}
    monkeypatch.setattr(plans, "installed_backend", installed.get)
    monkeypatch.setattr(plans, "probe_gpu", lambda: CARD)
    monkeypatch.setattr(plans, "open_plans", open_runner)
    return Context(SimpleNamespace(), bundle(tmp_path / "bundle"), SessionSettings())


def test_plans_are_built_and_held_to_the_selftest(context: Context) -> None:
    found = plans.check_build(context)
    assert found.status == "proved" and found.figures["decode_ms"]["median"] > 0
    assert "a decode step takes" in found.text and "of logits lm" in found.text


def test_other_answers_fail(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = bundle(tmp_path / "other", seed=2)
    monkeypatch.setattr(plans, "open_plans", lambda _: open_runner(other))
    for check in (plans.check_build, plans.check_refit):
        assert check(context).status == "failed"


def test_plans_without_weights_are_refitted(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = []

    def note(built: Bundle) -> Any:
        flags.append((built.path / "engines" / "backbone.json").read_text())
        return open_runner(built)

    monkeypatch.setattr(plans, "open_plans", note)
    assert plans.check_refit(context).status == "proved"
    assert '"STRIP_PLAN"' in flags[0] and '"SM89"' in flags[0]


def test_timings_are_kept(context: Context) -> None:
    found = plans.check_timing_cache(context)
    assert found.status == "proved" and found.figures["cache_bytes"] == len(b"timings")


@pytest.mark.parametrize(
    ("size", "selftest", "status"),
    [(9, "proved", "proved"), (0, "proved", "failed"), (9, "failed", "failed")],
)
def test_judging_timings(size: int, selftest: Any, status: str) -> None:
    found = plans.judge_timing_cache(4.0, 1.0, size, Finding(selftest, "the self-test", {"x": 1}))
    assert found.status == status and "4.0 s without timings, 1.0 s with them" in found.text
    assert found.figures["second_seconds"] == 1.0


def test_what_a_backend_has_no_means_for_is_unproven(context: Context) -> None:
    with pytest.raises(Unproven, match=r"--version-compatible: tensorrt-rtx .* no such option"):
        plans.check_version_compatible(context)


def test_a_library_that_builds_nothing_fails(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADPORT_FAKE", "builder")
    with pytest.raises(EngineError, match="builds no plan"):
        plans.check_build(context)


def test_machines_and_bundles_that_plans_are_not_built_on(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = GpuProbe("13.0", (Gpu("card", "9.0", 1),), None)
    monkeypatch.setattr(plans, "probe_gpu", lambda: older)
    with pytest.raises(Unproven, match=r"tensorrt-rtx builds for .*SM89.*; the GPU here is SM90"):
        plans.check_build(context)
    monkeypatch.setattr(plans, "installed_backend", lambda _: None)
    with pytest.raises(Unproven, match="none of tensorrt, tensorrt-rtx is installed here"):
        plans.check_build(context)
    options = LowerOptions(
        bundle=context.bundle.path, output=tmp_path / "lowered", target="ort-cuda"
    )
    lowered = Context(context.options, lower(options), context.settings)
    with pytest.raises(Unproven, match="is lowered to ort-cuda; plans are built of the portable"):
        plans.check_build(lowered)
