"""The written files are checked before anything runs them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import onnx
import pytest

from headport.bundle import Bundle
from headport.errors import ExportError
from headport.export.written import check_written


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Bundle:
    return Bundle.open(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def test_an_exported_bundle_passes(bundle: Bundle) -> None:
    check_written(bundle)


@pytest.mark.parametrize(
    ("port", "axis"), [("input_ids", 1), ("past_key_values.1.value", 2), ("present.0.key", 0)]
)
def test_a_fixed_dimension_is_refused(bundle: Bundle, port: str, axis: int) -> None:
    file = bundle.path / "backbone.onnx"
    model = onnx.load(file, load_external_data=False)
    value = next(v for v in [*model.graph.input, *model.graph.output] if v.name == port)
    value.type.tensor_type.shape.dim[axis].dim_value = 3
    onnx.save(model, file)
    with pytest.raises(ExportError, match=rf"fixed dimensions: {port} .*axis {axis}"):
        check_written(bundle)


def test_a_graph_that_is_not_onnx_is_refused(bundle: Bundle) -> None:
    file = bundle.path / "head.lm.onnx"
    model = onnx.load(file, load_external_data=False)
    model.graph.node[0].op_type = "Gemmm"
    onnx.save(model, file)
    with pytest.raises(ExportError, match=r"head\.lm is not valid ONNX"):
        check_written(bundle)


def add_bytes(bundle: Bundle) -> None:
    with (bundle.path / "data" / "backbone.bin").open("ab") as stream:
        stream.write(b"left over")


def stale_file(bundle: Bundle) -> None:
    (bundle.path / "data" / "old.bin").write_bytes(b"\0")


def unclaimed_tensor(bundle: Bundle) -> None:
    kept = bundle.manifest.tensors[:2] + bundle.manifest.tensors[3:]
    object.__setattr__(bundle, "manifest", msgspec.structs.replace(bundle.manifest, tensors=kept))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (add_bytes, r"backbone\.bin: \d+ bytes of tensors expected"),
        (stale_file, r"do not agree on data/old\.bin"),
        (unclaimed_tensor, r"belong to no tensor"),
    ],
)
def test_every_byte_belongs_to_a_tensor(
    fault: Callable[[Bundle], None], message: str, bundle: Bundle
) -> None:
    fault(bundle)
    with pytest.raises(ExportError, match=message):
        check_written(bundle)


@pytest.mark.parametrize("name", ["", "model.layers.0.mlp.down_proj/MatMul"])
def test_a_node_without_a_name_of_its_own_is_refused(bundle: Bundle, name: str) -> None:
    file = bundle.path / "backbone.onnx"
    model = onnx.load(file, load_external_data=False)
    assert "model.layers.0.mlp.down_proj/MatMul" in [n.name for n in model.graph.node]
    model.graph.node[0].name = name
    onnx.save(model, file)
    with pytest.raises(ExportError, match="without a name of their own"):
        check_written(bundle)
