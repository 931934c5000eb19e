"""`headport lower` on exported bundles, from options to files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from headport.bundle import Bundle
from headport.cli import main
from headport.errors import LoweringError, OutputError, UsageError
from headport.lowering import Options, lower
from headport.runner import InPlaceRunner, open_runner
from headport.selftest import run_selftest


@pytest.fixture(scope="module")
def gemma2(tiny_gemma2: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Portable bundle with softcaps and a window on every other layer."""
    from headport.export.command import Options as ExportOptions
    from headport.export.command import export

    output = tmp_path_factory.mktemp("gemma2") / "bundle"
    return export(ExportOptions(model=str(tiny_gemma2), output=output))


def test_lowered_llama(tiny_bundle: Path, tiny_lowered: Path) -> None:
    bundle, source = Bundle.open(tiny_lowered), Bundle.open(tiny_bundle)
    assert bundle.manifest.target == "ort-cpu" and run_selftest(bundle)
    assert isinstance(open_runner(bundle), InPlaceRunner)
    stage = bundle.manifest.provenance.stages[-1]
    assert (stage.stage, stage.options) == ("lower", {"target": "ort-cpu"})
    assert stage.report["lowered"] == {
        "Positions → seqlens_k, query_seqlens": 1,
        "CachedAttention → GroupQueryAttention": 2,
        "RotaryEmbedding of q and k → inside GroupQueryAttention": 2,
        "Transpose pair that does nothing → nothing": 2 * 3,
        "Reshape pair that does nothing → nothing": 2 * 4,
        "Add + RMSNormalization → SkipSimplifiedLayerNormalization": 2 * 2,
        "3 × MatMul of the same input → MatMul + Split": 2,
        "2 × MatMul of the same input → MatMul + Split": 2,
        "Split into q, k, v → packed q, k, v": 2,
    }
    assert stage.report["portable"] == ["head lm: Gemm (its weight is not quantised)"]
    assert stage.report["parity"]["max_abs_logit_error"] < 1e-3
    assert set(bundle.manifest.files) == set(source.manifest.files)
    kept = {t.sha256 for t in bundle.manifest.tensors}
    apart = {t.name for t in source.manifest.tensors if t.sha256 not in kept}
    packed = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    assert len(apart) == 2 * len(packed) and all(name.split(".")[-3] in packed for name in apart)
    assert not ir.load(bundle.path / "backbone.onnx").functions


def test_gemma2_features(gemma2: Bundle, tmp_path: Path) -> None:
    bundle = lower(Options(bundle=gemma2.path, output=tmp_path / "cpu", target="ort-cpu"))
    report = bundle.manifest.provenance.stages[-1].report
    assert report["lowered"]["CachedAttention_softcap_window → GroupQueryAttention"] == 1
    assert report["lowered"]["CachedAttention_softcap → GroupQueryAttention"] == 1
    assert not report["parity"]["windows_not_crossed"]
    assert max(report["parity"]["hidden_states"].values()) < 1e-5
    # and once more, through nothing but the runners
    ids = np.random.default_rng(0).integers(0, 257, (2, 40))
    found = []
    for each in (gemma2, bundle):
        runner = open_runner(each)
        cache = runner.new_cache(2, 41)
        hidden = runner.forward(cache, ids, np.array([40, 3]))
        step = runner.forward(cache, ids[:, :1], np.array([1, 1]))
        found.append(np.concatenate([hidden[0], hidden[1, :3], step[:, 0]]))
    assert np.abs(found[0] - found[1]).max() < 1e-4 * np.abs(found[0]).max()


def test_refusals_write_nothing(tiny_bundle: Path, tiny_lowered: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(LoweringError, match="already lowered to ort-cpu; lower the portable"):
        lower(Options(bundle=tiny_lowered, output=out, target="ort-cpu"))
    with pytest.raises(UsageError, match="--target tpu: use one of ort-cpu"):
        lower(Options(bundle=tiny_bundle, output=out, target="tpu"))  # type: ignore[arg-type]
    with pytest.raises(OutputError, match="exists"):
        lower(Options(bundle=tiny_bundle, output=tiny_lowered, target="ort-cpu"))
    assert not list(tmp_path.iterdir())


def test_command_line(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["lower", str(tiny_bundle), "-o", str(tmp_path / "cpu"), "--target"]
    assert main([*arguments, "ort-cpu"]) == 0
    text = capsys.readouterr().out
    assert "lowered   2 × CachedAttention → GroupQueryAttention" in text
    assert "portable  head lm: Gemm (its weight is not quantised)" in text
    with pytest.raises(SystemExit) as exit_info:
        main([*arguments, "tpu"])
    assert exit_info.value.code == 2
