"""Graphs written by hand, one step of the clean-up each."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from headport.errors import ExportError
from headport.export.hygiene import (
    check_attention,
    check_constants,
    finish_graph,
    store_transposed,
)


def graph_from(text: str, **weights: np.ndarray) -> ir.Model:
    model = ir.from_onnx_text(text)
    for name, array in weights.items():
        value = ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
            shape=ir.Shape(array.shape),
            const_value=ir.Tensor(array, name=name),
        )
        for node in model.graph:
            for i, used in enumerate(node.inputs):
                if used is not None and used.name == name:
                    node.replace_input_with(i, value)
        model.graph.register_initializer(value)
    return model


WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)
TRANSPOSE = """<ir_version: 10, opset_import: ["" : 23]>
g (float[n, 3] x) => (float[n, 2] y) <float[2, 3] w = {0, 1, 2, 3, 4, 5}> {
  t = Transpose <perm = PERM> (w)
  y = MatMul (x, t)
}"""


def test_a_transposed_weight_is_stored_transposed() -> None:
    model = graph_from(TRANSPOSE.replace("PERM", "[1, 0]"))
    store_transposed(model)
    assert [node.op_type for node in model.graph] == ["MatMul"]
    value = model.graph.initializers["w.transposed"]
    assert value.const_value is not None
    np.testing.assert_array_equal(value.const_value.numpy(), WEIGHT.T)
    assert value.const_value.tobytes() == np.ascontiguousarray(WEIGHT.T).tobytes()


def test_a_transpose_that_keeps_the_order_is_left_alone() -> None:
    model = graph_from(TRANSPOSE.replace("PERM", "[0, 1]"))
    store_transposed(model)
    assert [node.op_type for node in model.graph] == ["Transpose", "MatMul"]


def test_a_weight_used_twice_is_not_stored_twice() -> None:
    model = graph_from(
        """<ir_version: 10, opset_import: ["" : 23]>
        g (float[n, 3] x, int64[n] i) => (float[n, 2] y, float[n, 3] e)
        <float[2, 3] w = {0, 1, 2, 3, 4, 5}> {
          e = Gather (w, i)
          t = Transpose <perm = [1, 0]> (w)
          y = MatMul (x, t)
        }"""
    )
    store_transposed(model)
    assert list(model.graph.initializers) == ["w"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_non_finite_constants_are_refused(dtype: type[np.floating], value: float) -> None:
    text = """<ir_version: 10, opset_import: ["" : 23]>
    g (float[2] x) => (float[2] y) { y = Identity (x) }"""
    check_constants(graph_from(text, c=np.array([1.0, 65504.0], dtype)))
    with pytest.raises(ExportError, match="c holds a value"):
        check_constants(graph_from(text, c=np.array([1.0, value], dtype)))


BACKBONE = """<ir_version: 10, opset_import: ["" : 23, "headport" : 1]>
main (int64[s0, s1] input_ids, int64[s0, s2] attention_mask,
      float[s3, 2, s4, 8] past_key_values_0_value, float[s3, 2, s4, 8] past_key_values_0_key)
  => (float[s0, HIDDEN, 8] hidden_states,
      float[s3, 2, s2, 8] present_0_value, float[s3, 2, s2, 8] present_0_key) {
  b = Shape <start = 0, end = 1> (past_key_values_0_key)
  t = Shape <start = 1, end = 2> (input_ids)
  rest = Constant <value_ints = [2, 8]> ()
  s = Concat <axis = 0> (b, rest, t)
  zero = ConstantOfShape (s)
  k = Transpose <perm = [0, 1, 3, 2]> (zero)
  y, present_0_key, present_0_value = headport.CachedAttention
    <scale = 1.0, window = 0, softcap = 0.0>
    (k, k, k, past_key_values_0_key, past_key_values_0_value, attention_mask)
  axes = Constant <value_ints = [2]> ()
  hidden_states = ReduceSum <keepdims = 0> (y, axes)
}"""
DIMS = {f"{p}.0.{k}": (2, 8) for p in ("past_key_values", "present") for k in ("key", "value")}


def backbone(hidden: str = "s1") -> ir.Model:
    model = ir.from_onnx_text(BACKBONE.replace("HIDDEN", hidden))
    for value in [*model.graph.inputs, *model.graph.outputs]:
        assert value.name is not None
        value.name = value.name.replace("_0_", ".0.")  # the text form has no dots in names
    model.graph.metadata_props["source"] = "/home/someone/model.py"
    for node in model.graph:
        node.metadata_props["pkg.torch.onnx.stack_trace"] = 'File "/home/someone/model.py"'
        node.outputs[0].metadata_props["origin"] = "/home/someone"
    return model


def test_ports_are_ordered_and_dimensions_named() -> None:
    model = backbone()
    finish_graph(model, DIMS)
    ports = {v.name: [str(d) for d in v.shape or ()] for v in model.graph.inputs}
    assert list(ports) == [
        "input_ids",
        "attention_mask",
        "past_key_values.0.key",
        "past_key_values.0.value",
    ]
    assert ports["attention_mask"] == ["batch", "total_sequence"]
    assert ports["past_key_values.0.key"] == ["batch", "2", "past_sequence", "8"]
    outputs = {v.name: [str(d) for d in v.shape or ()] for v in model.graph.outputs}
    assert list(outputs) == ["hidden_states", "present.0.key", "present.0.value"]
    assert outputs["hidden_states"] == ["batch", "sequence", "8"]
    assert outputs["present.0.key"] == ["batch", "2", "total_sequence", "8"]


def test_the_batch_size_is_read_off_the_ids_only() -> None:
    model = backbone()
    finish_graph(model, DIMS)
    shapes = [n for n in model.graph if n.op_type == "Shape"]
    assert {n.inputs[0].name for n in shapes if n.inputs[0] is not None} == {"input_ids"}


def test_functions_are_defined_and_nothing_names_the_machine() -> None:
    model = backbone()
    finish_graph(model, DIMS)
    assert [key[1] for key in model.functions] == ["CachedAttention"]
    assert b"someone" not in ir.to_proto(model).SerializeToString()


def test_a_fixed_dimension_is_refused() -> None:
    with pytest.raises(ExportError, match="hidden_states was traced with shape"):
        finish_graph(backbone(hidden="3"), DIMS)


def test_attention_is_counted() -> None:
    check_attention(backbone(), 1, "M")
    with pytest.raises(ExportError, match="M: 2 attention layers expected in the graph, 1 found"):
        check_attention(backbone(), 2, "M")


@pytest.mark.parametrize(
    ("number", "op_type", "bounded"),
    [(-np.inf, "Where", True), (np.inf, "Where", True), (-np.inf, "Add", False)],
)
def test_masks_are_finite(number: float, op_type: str, bounded: bool) -> None:
    model = backbone()
    inputs = {value.name: value for value in model.graph.inputs}
    mask = ir.node("Cast", [inputs["input_ids"]], {"to": ir.DataType.BOOL})
    far = ir.val("far", const_value=ir.Tensor(np.array(number, np.float32), name="far"))
    model.graph.register_initializer(far)
    key = inputs["past_key_values.0.key"]
    masked = ir.node(op_type, [mask.outputs[0], far, key] if op_type == "Where" else [far, key])
    masked.outputs[0].name, mask.outputs[0].name = "masked", "mask"
    model.graph.insert_before(model.graph[0], [mask, masked])
    masked.outputs[0].shape, masked.outputs[0].type = ir.Shape(["a"]), key.type
    finish_graph(model, DIMS)
    value = far.const_value
    assert value is not None
    expected = np.copysign(np.finfo(np.float32).max, number) if bounded else number
    assert value.numpy() == expected
