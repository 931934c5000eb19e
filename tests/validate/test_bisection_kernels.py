"""The layer that leaves the reference is named where own kernels have taken norms and sums in."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from headport.lowering.command import Options as LowerOptions
from headport.lowering.command import lower
from headport.quantize.command import Options, quantize
from headport.validate.boundaries import boundaries_of
from tests.conftest import llama_config, save_model
from tests.kernels.conftest import BUILD, built, missing
from tests.validate.conftest import export_to
from tests.validate.planted.row import weight
from tests.validate.sabotage import read_manifest
from tests.validate.test_bisection import run, stages


@pytest.fixture(scope="module")
def library() -> Path:
    if reason := missing():
        pytest.skip(reason)
    return next(built(BUILD).glob("libheadport_kernels.*"))


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("own")
    config = llama_config(hidden_size=32, intermediate_size=48, num_hidden_layers=4)
    checkpoint = save_model(folder / "checkpoint", config)
    return checkpoint, export_to(checkpoint, folder / "bundle")


@pytest.fixture(autouse=True)
def named(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADPORT_KERNELS", str(library))


def _lowered(source: Path, folder: Path, library: Path, *override: str) -> tuple[Path, Path]:
    how = {"backbone": "int8", "backbone_block": 32, "override": override}
    portable = quantize(Options(bundle=source, output=folder / "int8", **how))
    own = LowerOptions(
        bundle=portable.path, output=folder / "own", target="ort-cpu", kernels=library
    )
    return portable.path, lower(own).path


@pytest.mark.parametrize("override", [(), ("model.layers.0.*=none",), ("*.v_proj=none",)])
def test_states_are_those_of_the_portable_bundle(
    deep: tuple[Path, Path],
    tmp_path: Path,
    library: Path,
    texts: Any,
    reference_of: Any,
    override: tuple[str, ...],
) -> None:
    portable, own = _lowered(deep[1], tmp_path, library, *override)
    assert len(boundaries_of(own / "backbone.onnx")) == 5
    reference = reference_of(deep[0])
    expected, found = (run(folder, texts, reference) for folder in (portable, own))
    assert stages(found) == stages(expected) and found.first == expected.first
    for one, other in zip(expected.stages, found.stages, strict=True):
        assert other.error == pytest.approx(one.error, rel=0.02, abs=1e-4)
        assert other.own_error == pytest.approx(one.own_error, rel=0.02, abs=1e-4)


def test_the_layer_with_the_fault_is_named(
    deep: tuple[Path, Path], tmp_path: Path, library: Path, texts: Any, reference_of: Any
) -> None:
    _, own = _lowered(deep[1], tmp_path, library)
    assert run(own, texts, reference_of(deep[0])).first is None
    copy = tmp_path / "copy"
    shutil.copytree(own, copy)
    scales = [t.name for t in read_manifest(copy).tensors if t.name.endswith(".scale")]
    weight(next(n for n in scales if "layers.2.mlp.down_proj" in n), lambda s: s * 1.5)(copy)
    assert run(copy, texts, reference_of(deep[0])).first == "layer 2"
