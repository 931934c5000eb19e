"""Ports of in-place caches, and the guards against what they cannot serve."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from headport.errors import LoweringError
from headport.lowering.in_place import add_step_inputs, drop_growing_inputs, graph_input
from headport.lowering.targets import TARGETS
from tests.lowering.backbones import CONTEXT, Layer, attention_backbone


def _lower(model: ir.Model) -> ir.Model:
    for rewrite in TARGETS["ort-cpu"].passes(model, CONTEXT):
        rewrite(model)
    return model


def _ports(values: list[ir.Value]) -> dict[str, tuple[str, list[object]]]:
    return {
        v.name or "": (
            v.dtype.name if v.dtype else "",
            [getattr(d, "value", d) for d in v.shape or ()],
        )
        for v in values
    }


def test_ports() -> None:
    model = _lower(attention_backbone([Layer()]))
    cache = ("FLOAT", ["batch", 2, "past_sequence", 8])
    assert list(_ports(list(model.graph.inputs)).items()) == [
        ("input_ids", ("INT64", ["batch", "sequence"])),
        ("seqlens_k", ("INT32", ["batch"])),
        ("query_seqlens", ("INT32", ["batch"])),
        ("total_sequence_length", ("INT32", [])),
        ("past_key_values.0.key", cache),
        ("past_key_values.0.value", cache),
    ]
    assert list(_ports(list(model.graph.outputs)).items()) == [
        ("hidden_states", ("FLOAT", ["batch", "sequence", 24])),
        ("present.0.key", cache),
        ("present.0.value", cache),
    ]
    assert not model.functions and "headport" not in model.opset_imports


def test_batch_sizes_are_read_off_the_ids() -> None:
    extra = """
        batch_a = Shape <start = 0, end = 1> (attention_mask)
        batch_b = Shape <start = 0, end = 1> (past_0_key)
        heads = Shape <start = 1, end = 2> (past_0_key)
        size = Concat <axis = 0> (batch_a, batch_b, heads)
        count = Size (size)
        zero = Sub (count, count)
        zero_float = CastLike (zero, h1)
        shifted = Add (h1, zero_float)
    """
    model = _lower(attention_backbone([Layer()], extra=extra, result="shifted"))
    shapes = [n for n in model.graph if n.op_type == "Shape" and n.attributes["start"].value == 0]
    assert shapes and all(n.inputs[0] is graph_input(model, "input_ids") for n in shapes)


@pytest.mark.parametrize(
    ("extra", "fault"),
    [
        (
            "x = CastLike (attention_mask, h1) y = ReduceSum <keepdims = 0> (x)",
            "CastLike reads atten",
        ),
        (
            "x = Shape <start = 2, end = 3> (past_0_key) y = CastLike (x, h1)",
            "Shape reads past_key_v",
        ),
        (
            "x = Shape (attention_mask) z = ReduceMax (x) y = CastLike (z, h1)",
            "Shape reads attention",
        ),
        (
            "x = Shape <start = 2, end = 3> (present_0_key) y = CastLike (x, h1)",
            "Shape reads present",
        ),
        ("y = ReduceSum <keepdims = 0> (past_0_value)", "ReduceSum reads past_key_values.0.value"),
    ],
)
def test_dependence_on_mask_or_past_is_refused(extra: str, fault: str) -> None:
    model = attention_backbone([Layer()], extra=extra + " z9 = Add (h1, y)", result="z9")
    with pytest.raises(LoweringError, match=fault):
        _lower(model)


def test_an_attention_left_portable_is_refused() -> None:
    model = attention_backbone([Layer()])
    add_step_inputs(model)
    with pytest.raises(LoweringError, match="CachedAttention reads attention_mask"):
        drop_growing_inputs(model)


def test_caches_that_no_attention_writes_are_refused() -> None:
    model = attention_backbone([Layer()])
    call = next(n for n in model.graph if n.op_type == "CachedAttention")
    copied = ir.node("Identity", [call.outputs[1]])
    model.graph.insert_after(call, copied)
    copied.outputs[0].type, copied.outputs[0].shape = call.outputs[1].type, call.outputs[1].shape
    call.outputs[1].name, copied.outputs[0].name = "inner", "present.0.key"
    model.graph.outputs[1] = copied.outputs[0]
    with pytest.raises(LoweringError, match=r"present\.0\.key is not written by GroupQueryAtt"):
        _lower(model)


def test_unknown_inputs_are_refused() -> None:
    model = attention_backbone([Layer()])
    model.graph.inputs.append(ir.val("token_type_ids", ir.DataType.INT64, ["batch", "sequence"]))
    with pytest.raises(LoweringError, match="cannot serve: token_type_ids"):
        add_step_inputs(model)


def test_a_graph_that_is_no_backbone_is_refused() -> None:
    model = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["": 23]> g (float[2] x) => (float[2] y) { y = Neg (x) }'
    )
    model.graph.inputs[0].name = "attention_mask"
    with pytest.raises(LoweringError, match="no input 'input_ids'"):
        add_step_inputs(model)
