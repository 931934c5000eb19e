"""The written files are checked before anything runs them."""

from __future__ import annotations

import shutil
from pathlib import Path

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
