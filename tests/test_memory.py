"""Measured memory: a head of fewer bits takes less, and what cannot be measured says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headport.cli import main
from headport.errors import BundleError
from headport.lowering import Options as LowerOptions
from headport.lowering import lower
from headport.memory import measure_graph, measure_memory
from headport.quantize import Options, quantize
from tests.toy_bundles import write_toy

V, H = 16384, 256  # 16.8 MB of float32


def test_an_int8_head_takes_a_quarter(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(V, H)).astype(np.float32)
    source = write_toy(tmp_path / "toy", weight)
    portable = quantize(Options(bundle=source.path, output=tmp_path / "q", head="int8"))
    lowered = lower(LowerOptions(bundle=portable.path, output=tmp_path / "l", target="ort-cpu"))
    before, after = measure_memory(source.path, 1), measure_memory(lowered.path, 1)
    assert 0.9 * 4 * V * H < before.heads < 2.5 * 4 * V * H
    assert after.heads < before.heads / 2
    assert after.total == after.backbone + after.heads + after.first_run


def test_a_graph_alone_takes_what_its_weight_does(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(V, H)).astype(np.float32)
    source = write_toy(tmp_path / "toy", weight)
    file = source.path / source.manifest.graphs["head.lm"].file
    found = measure_graph(file, source.manifest.session_options, 1)
    assert 0.9 * 4 * V * H < found < 2.5 * 4 * V * H
    with pytest.raises(BundleError, match=r"gone.onnx: loading it to measure its memory failed"):
        measure_graph(tmp_path / "gone.onnx", {}, 1)


def test_a_bundle_that_does_not_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BundleError, match=r"measure its memory failed: .*folder was expected"):
        measure_memory(tmp_path / "nothing")
    source = write_toy(tmp_path / "toy", np.eye(40, 24, dtype=np.float32))
    assert main(["inspect", str(source.path), "--memory"]) == 0
    assert "MB resident after one token" in capsys.readouterr().out
