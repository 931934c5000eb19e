"""`headport quantize` from options to files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headport.bundle import Bundle
from headport.cli import main
from headport.errors import OutputError, ParityError, QuantizeError, UsageError
from headport.ledger import find_tensor, read_tensor
from headport.quantize import Options, head, quantize
from headport.quantize.blocks import BLOCKS, dequantize_blocks
from headport.runner import open_runner
from headport.selftest import run_selftest
from tests.toy_bundles import write_toy


def _weight(V: int, H: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(V, H)).astype(np.float32)


def _options(bundle: Bundle, output: Path, **changes: Any) -> Options:
    return Options(**({"bundle": bundle.path, "output": output, "head": "int8"} | changes))


@pytest.fixture
def toy(tmp_path: Path) -> Bundle:
    return write_toy(tmp_path / "toy", _weight(31, 48), bias=np.ones(31, np.float32), softcap=9.0)


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_size_runs_right(tmp_path: Path, block: int) -> None:
    source = write_toy(tmp_path / "toy", _weight(33, 1024))
    bundle = quantize(_options(source, tmp_path / "out", block=block))
    rounded = read_tensor(bundle, find_tensor(bundle.manifest, "head.lm", "w.int8"))
    scale = read_tensor(bundle, find_tensor(bundle.manifest, "head.lm", "w.scale"))
    assert rounded.shape == (33, 1024) and scale.shape == (33, 1024 // block)
    hidden = np.random.default_rng(1).normal(size=(3, 1024)).astype(np.float32)
    expected = hidden.astype(np.float64) @ dequantize_blocks(rounded, scale, block).T
    logits = open_runner(bundle).head(hidden).logits
    assert np.abs(logits - expected).max() < 2e-4
    assert np.abs(logits).max() > 10  # not the zeros that an unsupported block would give


@pytest.mark.parametrize(("V", "H"), [(1, 1), (2, 7), (31, 61), (33, 48), (1009, 31), (64, 64)])
@pytest.mark.parametrize("block", [16, 64])
def test_any_shape_passes_its_own_check(tmp_path: Path, V: int, H: int, block: int) -> None:
    bundle = quantize(
        _options(write_toy(tmp_path / "t", _weight(V, H)), tmp_path / "o", block=block)
    )
    report = bundle.manifest.provenance.stages[-1].report
    assert report["check"]["logits"] == 13 * V and report["row_error_max"] < 0.02


def test_manifest_and_report(toy: Bundle, tmp_path: Path) -> None:
    bundle = Bundle.open(quantize(_options(toy, tmp_path / "out", block=32)).path)
    head = bundle.manifest.heads["lm"]
    assert head.weight == "w.int8" and not head.tied
    assert msgspec.to_builtins(head.quantization) == {
        "format": "int8",
        "block": 32,
        "activations": "residual",
        "symmetric": True,
        "rounding": "nearest",
    }
    assert (head.bias, head.softcap, head.vocab_size) == (True, 9.0, 31)
    stage = bundle.manifest.provenance.stages[-1]
    assert stage.stage == "quantize"
    assert stage.options == {
        "head": "int8",
        "block": 32,
        "activations": "residual",
        "symmetric": True,
        "rounding": "nearest",
    }
    assert stage.report["weight_bytes_before"] == 31 * 48 * 4
    assert stage.report["weight_bytes_after"] == 31 * 48 + 31 * 2 * 4
    assert 0 < stage.report["row_error_p99"] <= stage.report["row_error_max"] < 0.01
    assert (bundle.path / "LICENSE").is_file() and run_selftest(bundle)
    assert bundle.manifest.model == toy.manifest.model and not bundle.unlisted_files()


def test_a_tied_embedding_stays_and_is_stored_once(tmp_path: Path) -> None:
    weight = _weight(31, 48)
    source = write_toy(tmp_path / "toy", weight, tied=True)
    assert len(source.manifest.tensors) == 1 and source.manifest.heads["lm"].tied
    bundle = quantize(_options(source, tmp_path / "out"))
    kept = find_tensor(bundle.manifest, "backbone", "embed")
    assert (read_tensor(bundle, kept) == weight).all() and kept.consumers == ("backbone:embed",)
    assert {t.name for t in bundle.manifest.tensors} == {"embed", "w.int8", "w.scale"}
    report = bundle.manifest.provenance.stages[-1].report
    assert report["was_tied"]
    assert report["tensor_bytes_after"] - report["tensor_bytes_before"] == 31 * 48 + 31 * 4


def test_zero_tiny_and_outlier_rows(tmp_path: Path) -> None:
    weight = _weight(40, 48)
    weight[5], weight[6, 16:32], weight[7] = 0, 0, weight[7] * 200
    weight[8] *= np.float32(1e-6)
    weight[9] *= np.float32(1e-38)
    source = write_toy(tmp_path / "toy", weight)
    bundle = quantize(_options(source, tmp_path / "out", block=16))
    report = bundle.manifest.provenance.stages[-1].report
    assert report["row_error_max"] < 0.02 and report["rows_lost"] == 0
    logits = open_runner(bundle).head(np.ones((1, 48), np.float32)).logits
    assert logits[0, 5] == 0.0
    assert logits[0, 9] == pytest.approx(float(weight[9].astype(np.float64).sum()), rel=0.05)


def test_fp16_head(toy: Bundle, tmp_path: Path) -> None:
    bundle = quantize(_options(toy, tmp_path / "out", head="fp16"))
    head = bundle.manifest.heads["lm"]
    assert head.weight == "w.fp16" and head.quantization.format == "fp16"
    assert (head.quantization.block, head.quantization.activations) == (None, "exact")
    hidden = np.random.default_rng(1).normal(size=(3, 48)).astype(np.float32)
    a, b = (open_runner(x).head(hidden).logits for x in (toy, bundle))
    assert 0 < np.abs(a - b).max() < 0.02


def test_half_precision_bundle(tmp_path: Path) -> None:
    source = write_toy(tmp_path / "toy", _weight(31, 48).astype(np.float16))
    bundle = quantize(_options(source, tmp_path / "out"))
    assert find_tensor(bundle.manifest, "head.lm", "w.scale").dtype == "float"
    assert run_selftest(bundle)
    with pytest.raises(QuantizeError, match="already stored as float16"):
        quantize(_options(source, tmp_path / "out2", head="fp16"))


def test_refusals_write_nothing(toy: Bundle, tmp_path: Path) -> None:
    done = quantize(_options(toy, tmp_path / "done"))
    out = tmp_path / "out"
    for options, error, text in (
        (_options(done, out), QuantizeError, "already stored as int8"),
        (_options(toy, out, head="fp16", activations="rounded"), UsageError, "no meaning"),
        (_options(toy, out, head="int3"), UsageError, "use one of int8"),
        (_options(toy, out, block=48), UsageError, "--head int8 takes 16, 32, 64, 128, 256"),
        (_options(toy, out, head="int4", block=256), UsageError, "int4 takes 16, 32, 64, 128$"),
        (_options(toy, out, head="int8-row", block=32), UsageError, "it has no blocks"),
        (_options(toy, out, asymmetric=True), UsageError, "needs --head int4"),
        (_options(toy, out, positive_scales=True), UsageError, "has no scale below 0"),
        (
            _options(toy, out, head="int4", asymmetric=True, positive_scales=True),
            UsageError,
            "beside zero points are positive",
        ),
        (_options(toy, out, head="int4", certify=True), UsageError, "--certify needs --head int8"),
        (_options(toy, out, head="bf16", calibration=(Path("x"),)), UsageError, "no meaning"),
        (_options(toy, out, activations="maybe"), UsageError, "use one of residual"),
        (_options(toy, done.path), OutputError, "exists"),
    ):
        with pytest.raises(error, match=text):
            quantize(options)
    assert {p.name for p in tmp_path.iterdir()} == {"toy", "done"}


def test_a_lowered_bundle_is_refused(toy: Bundle, tmp_path: Path) -> None:
    file = toy.path / "manifest.json"
    file.write_bytes(file.read_bytes().replace(b'"target": "portable"', b'"target": "ort-cpu"'))
    with pytest.raises(QuantizeError, match="lowered to ort-cpu; quantise the portable bundle"):
        quantize(_options(toy, tmp_path / "out"))


def test_non_finite_rows_are_refused(tmp_path: Path) -> None:
    source = write_toy(tmp_path / "toy", _weight(31, 48))
    tensor = find_tensor(source.manifest, "head.lm", "w")
    with (source.path / tensor.file).open("r+b") as stream:
        stream.seek(tensor.offset + 4 * (48 * 12 + 3))
        stream.write(np.float32(np.nan).tobytes())
    _trust(source)
    with pytest.raises(QuantizeError, match="NaN or infinity in row 12;"):
        quantize(_options(source, tmp_path / "out"))


def _trust(bundle: Bundle) -> None:
    # Write the checksums of the files as they are now.
    from headport.bundle import file_entry
    from headport.manifest import encode_manifest

    files = {name: file_entry(bundle.path / name) for name in bundle.manifest.files}
    changed = msgspec.structs.replace(bundle.manifest, files=files)
    (bundle.path / "manifest.json").write_bytes(encode_manifest(changed))


def test_a_failed_check_writes_nothing(
    toy: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = head.store_head_weight

    def sabotage(model: Any, weight: str, stored: Any, *rest: Any) -> str:
        stored.tensors["int8"][3] = 0
        return store(model, weight, stored, *rest)

    monkeypatch.setattr(head, "store_head_weight", sabotage)
    with pytest.raises(ParityError, match="row 3 "):
        quantize(_options(toy, tmp_path / "out"))
    assert {p.name for p in tmp_path.iterdir()} == {"toy"}


def test_command_line(toy: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["quantize", str(toy.path), "-o", str(tmp_path / "out"), "--head", "int8"]
    assert main([*arguments, "--block", "16", "--activations", "rounded"]) == 0
    text = capsys.readouterr().out
    assert "int8, block 16, activations rounded" in text and "relative error of a row" in text
    assert main(arguments) == 2 and "--force" in capsys.readouterr().err
    assert main([*arguments, "--force"]) == 0
    with pytest.raises(SystemExit) as exit_info:
        main([*arguments, "--force", "--block", "48"])
    assert exit_info.value.code == 2
