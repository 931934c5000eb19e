"""One small graph per lint rule that breaks it, and its like that keeps it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

V, H, N = 96, 64, 4


def graph(body: str, inputs: str, outputs: str, **constants: Any) -> ir.Model:
    """A graph from ONNX text and arrays by name; types of all values are inferred."""
    text = (
        '<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>\n'
        f"g ({inputs}) => ({outputs}) {{{body}}}"
    )
    proto = onnx.parser.parse_model(text)
    model = ir.serde.deserialize_model(proto)
    for name, array in constants.items():
        value = ir.val(name, const_value=ir.tensor(array, name=name))
        for node in model.graph.all_nodes():
            for place, given in enumerate(node.inputs):
                if given is not None and given.name == name:
                    node.replace_input_with(place, value)
        model.graph.register_initializer(value)
    proto = ir.serde.serialize_model(model)
    return ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(proto, data_prop=True))


def integers(dtype: Any = np.int8, rows: int = V, width: int = H) -> Any:
    rng = np.random.Generator(np.random.Philox(key=1))
    return rng.integers(-7, 8, (rows, width)).astype(dtype)


def floats(*shape: int, dtype: Any = np.float32) -> Any:
    rng = np.random.Generator(np.random.Philox(key=2))
    return rng.normal(size=shape).astype(dtype)


_X = f"float[{N},{H}] x"
_LOGITS = f"float[{N},{V}] y"
_SCALE = np.full(V, 0.01, np.float32)


def restored(weight: Any, zero: Any = None, scale: Any = _SCALE) -> ir.Model:
    """Gemm with restored integers."""
    given = ", z" if zero is not None else ""
    body = f"w = DequantizeLinear <axis = 0> (q, s{given}) y = Gemm <transB = 1> (x, w)"
    more = {} if zero is None else {"z": zero}
    return graph(body, _X, _LOGITS, q=weight, s=scale, **more)


def rounded(zero: Any) -> ir.Model:
    """A product whose activations are rounded by a static scale."""
    body = (
        "r = QuantizeLinear (x, a, z) d = DequantizeLinear (r, a, z) "
        "w = DequantizeLinear <axis = 0> (q, s) y = Gemm <transB = 1> (d, w)"
    )
    step = np.array(0.05, np.float32)
    return graph(body, _X, _LOGITS, q=integers(), s=_SCALE, a=step, z=zero)


def loose() -> ir.Model:
    body = "w = Cast <to = 1> (q) y = Gemm <transB = 1> (x, w)"
    return graph(body, _X, _LOGITS, q=integers())


def widened(dtype: Any = np.float16) -> ir.Model:
    if dtype == np.float32:
        return graph("y = Gemm <transB = 1> (x, h)", _X, _LOGITS, h=floats(V, H))
    body = "w = Cast <to = 1> (h) y = Gemm <transB = 1> (x, w)"
    return graph(body, _X, _LOGITS, h=floats(V, H, dtype=dtype))


def attention(
    *,
    kind: str = "float16",
    size: int = 32,
    value_size: int | None = None,
    attributes: str = "",
    extra: str = "",
    outputs: str = "y",
    **constants: Any,
) -> ir.Model:
    """Attention of 2 heads over 8 slots, q of 4 tokens."""
    last = value_size or size
    inputs = (
        f"{kind}[1,2,4,{size}] q, {kind}[1,2,8,{size}] k, {kind}[1,2,8,{last}] v, {kind}[1,1,4,8] m"
    )
    mask = "" if "no-mask" in attributes else ", m"
    attributes = attributes.replace("no-mask", "").strip(", ")
    listed = f"<{attributes}>" if attributes else ""
    body = f"{outputs} = Attention {listed} (q, k, v{mask}{extra})"
    if not mask:
        inputs = inputs.rsplit(", ", 1)[0]
    more = f", {kind}[1,2,16,{size}] pk, {kind}[1,2,16,{last}] pv" if "," in outputs else ""
    return graph(body, inputs, f"{kind}[1,2,4,{last}] y{more}", **constants)


def cached() -> ir.Model:
    inputs = (
        "float16[1,2,4,32] q, float16[1,2,4,32] k, float16[1,2,4,32] v, float16[1,1,4,8] m, "
        "float16[1,2,4,32] a, float16[1,2,4,32] b"
    )
    outputs = "float16[1,2,4,32] y, float16[1,2,8,32] pk, float16[1,2,8,32] pv"
    return graph("y, pk, pv = Attention (q, k, v, m, a, b)", inputs, outputs)


def padded() -> ir.Model:
    inputs = (
        "float16[1,2,4,32] q, float16[1,2,8,32] k, float16[1,2,8,32] v, float16[1,1,4,8] m, "
        "int64[1] n"
    )
    text = (
        '<ir_version: 11, opset_import: ["" : 24]>\n'
        f"g ({inputs}) => (float16[1,2,4,32] y) {{y = Attention (q, k, v, m, , , n)}}"
    )
    return ir.serde.deserialize_model(onnx.parser.parse_model(text))


def integer_product() -> ir.Model:
    body = (
        "r, a, z = DynamicQuantizeLinear (x) p = MatMulInteger (r, q, z) "
        "f = Cast <to = 1> (p) y = Mul (f, a)"
    )
    weight = np.ascontiguousarray(integers().T)
    return graph(body, _X, _LOGITS, q=weight)


def packed(kind: str) -> ir.Model:
    body = f"y = com.microsoft.MatMulNBits <K = {H}, N = {V}, bits = 8, block_size = 32> (x, q, s)"
    stored = integers(np.uint8, V, H).reshape(V, H // 32, 32)
    dtype = np.float32 if kind == "float" else np.float16
    scale = np.full((V, H // 32), 0.01, dtype)
    return graph(body, f"{kind}[{N},{H}] x", f"{kind}[{N},{V}] y", q=stored, s=scale)


def mixed(dtype: Any = np.float16) -> ir.Model:
    text = (
        '<ir_version: 10, opset_import: ["" : 23]>\n'
        f"g (float[{N},{H}] x) => (float[{N},{V}] y) {{y = MatMul (x, h)}}"
    )
    model = ir.serde.deserialize_model(onnx.parser.parse_model(text))
    value = ir.val("h", const_value=ir.tensor(floats(H, V, dtype=dtype), name="h"))
    model.graph[0].replace_input_with(1, value)
    model.graph.register_initializer(value)
    return model


def top(count: int) -> ir.Model:
    body = "w, y = TopK <axis = 1> (x, k)"
    outputs = f"float[{N},{count}] w, int64[{N},{count}] y"
    return graph(body, f"float[{N},5000] x", outputs, k=np.array([count], np.int64))


def computed_top() -> ir.Model:
    body = "n = Shape <start = 1, end = 2> (x) w, y = TopK <axis = 1> (x, n)"
    return graph(body, f"float[{N},m] x", f"float[{N},m] w, int64[{N},m] y")


def doubled() -> ir.Model:
    body = "d = Cast <to = 11> (x) e = Mul (d, d) y = Cast <to = 1> (e)"
    return graph(body, _X, f"float[{N},{H}] y")


def masked(number: float, kind: Any = np.float16) -> ir.Model:
    inputs = f"float16[{N},{H}] x"
    if kind == np.float16:
        body, constants = "y = Add (x, c)", {"c": np.array([number], np.float16)}
    else:
        body, constants = "h = Cast <to = 10> (c) y = Add (x, h)", {"c": np.array([number], kind)}
    return graph(body, inputs, f"float16[{N},{H}] y", **constants)


@dataclass(frozen=True)
class Case:
    """A graph that breaks a rule, what TensorRT-RTX 1.7 answers, and a graph that keeps it."""

    rule: str
    breaks: Callable[[], ir.Model]
    keeps: Callable[[], ir.Model]


_U8 = np.zeros(V, np.uint8)
CASES = (
    Case(
        "zero-points",
        lambda: restored(integers(), np.full(V, 3, np.int8)),
        lambda: restored(integers(), np.zeros(V, np.int8)),
    ),
    Case(
        "negative-scales",
        lambda: restored(integers().astype(ml_dtypes.int4), scale=-_SCALE),
        lambda: restored(integers().astype(ml_dtypes.int4)),
    ),
    Case(
        "unsigned-integers",
        lambda: restored(integers(np.uint8), _U8),
        lambda: restored(integers()),
    ),
    Case(
        "unsigned-integers",
        lambda: restored(np.abs(integers()).astype(ml_dtypes.uint4), _U8.astype(ml_dtypes.uint4)),
        lambda: restored(integers().astype(ml_dtypes.int4)),
    ),
    Case(
        "unsigned-integers",
        lambda: rounded(np.array(128, np.uint8)),
        lambda: rounded(np.array(0, np.int8)),
    ),
    Case("loose-integers", loose, lambda: restored(integers())),
    Case("widened-weight", widened, lambda: widened(np.float32)),
    Case("attention-cache", cached, attention),
    Case("attention-type", lambda: attention(kind="float"), attention),
    Case("attention-softcap", lambda: attention(attributes="softcap = 5.0"), attention),
    Case("attention-precision", lambda: attention(attributes="softmax_precision = 1"), attention),
    Case(
        "attention-two-masks",
        lambda: attention(attributes="is_causal = 1"),
        lambda: attention(attributes="is_causal = 1, no-mask"),
    ),
    Case("attention-wide-heads", lambda: attention(size=512), lambda: attention(size=256)),
    Case("attention-unequal-heads", lambda: attention(value_size=64), attention),
    Case("attention-padding", padded, attention),
    Case("no-kernel", integer_product, lambda: restored(integers())),
    Case("no-kernel", lambda: packed("float"), lambda: restored(integers())),
    Case("no-kernel", lambda: packed("float16"), lambda: restored(integers())),
    Case("mixed-product", mixed, lambda: mixed(np.float32)),
    Case("large-top-k", lambda: top(3841), lambda: top(3840)),
    Case("computed-top-k", computed_top, lambda: top(8)),
    Case("float64", doubled, lambda: masked(1.0)),
    Case("infinite-constant", lambda: masked(-np.inf), lambda: masked(-32768.0)),
    Case(
        "overflowing-constant",
        lambda: masked(-1e9, np.float32),
        lambda: masked(-32768.0, np.float32),
    ),
)
