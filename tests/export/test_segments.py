"""Graphs cut by the bytes of their weights; every value that crosses a cut is handed over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from headport.errors import ExportError
from headport.export.segments import split_graph

# A residual (x) crosses every cut; w is used at both ends; the branch of If reads h from outside.
TEXT = """<ir_version: 10, opset_import: ["" : 23]>
g (float[2, 2] x, bool flag) => (float[2, 2] y)
<float[2, 2] w = {1, 2, 3, 4}, float[2, 2] v = {1, 0, 0, 2}> {
  h = MatMul (x, w)
  c = If (flag) <
    then_branch = t () => (float[2, 2] a) { a = MatMul (h, v) },
    else_branch = e () => (float[2, 2] b) { b = Identity (h) }
  >
  d = Add (c, x)
  y = MatMul (d, w)
}"""


def save(folder: Path) -> Path:
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(TEXT))
    onnx.save(model, folder / "g.onnx")
    loaded = onnx.load(folder / "g.onnx")
    for tensor in loaded.graph.initializer:  # as the ledger's tensors lie: outside
        tensor.raw_data = onnx.numpy_helper.to_array(tensor).tobytes()
        tensor.ClearField("float_data")
    onnx.save(
        loaded,
        folder / "g.onnx",
        save_as_external_data=True,
        location="g.bin",
        size_threshold=0,
        convert_attribute=False,
    )
    return folder / "g.onnx"


def run(folder: Path, pieces: list[tuple[object, bytes]], flag: bool) -> np.ndarray:
    values = {"x": np.array([[1, 2], [3, 5]], np.float32), "flag": np.array(flag)}
    for segment, data in pieces:
        (folder / "piece.onnx").write_bytes(data)
        model = onnx.load(folder / "piece.onnx")
        onnx.checker.check_model(model)
        inputs, outputs = segment.inputs, segment.outputs  # type: ignore[attr-defined]
        found = ReferenceEvaluator(model).run(outputs, {n: values[n] for n in inputs})
        values |= dict(zip(outputs, found, strict=True))
    return values["y"]


@pytest.mark.parametrize(("limit", "count"), [(1, 3), (16, 3), (1000, 1)])
@pytest.mark.parametrize("flag", [True, False])
def test_pieces_give_the_graphs_answer(limit: int, count: int, flag: bool, tmp_path: Path) -> None:
    pieces = list(split_graph(save(tmp_path), limit))
    assert len(pieces) == count
    x, w, v = np.array([[1, 2], [3, 5.0]]), np.array([[1, 2], [3, 4.0]]), np.diag([1, 2.0])
    expected = (x @ w @ (v if flag else np.eye(2)) + x) @ w
    np.testing.assert_array_equal(run(tmp_path, pieces, flag), expected.astype(np.float32))


def test_a_value_without_a_type_cannot_cross(tmp_path: Path) -> None:
    file = save(tmp_path)
    model = onnx.load(file, load_external_data=False)
    del model.graph.value_info[:]
    onnx.save(model, file)
    with pytest.raises(ExportError, match="no type for"):
        list(split_graph(file, 1))
