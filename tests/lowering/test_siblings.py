"""Products of the same input in one: same numbers, and nothing else is touched."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from headport.lowering.siblings import PARTS, pack_siblings
from tests.lowering.running import run
from tests.toy_bundles import register

K, BLOCK = 32, 16
WIDTHS = {"a": 5, "b": 3, "c": 2}
RNG = np.random.default_rng(0)
FLOATS = {name: RNG.normal(size=(K, n)).astype(np.float32) for name, n in WIDTHS.items()}
BYTES = {name: RNG.integers(0, 256, (n, K // BLOCK, BLOCK), np.uint8) for name, n in WIDTHS.items()}
SCALES = {name: RNG.random((n, K // BLOCK), np.float32) for name, n in WIDTHS.items()}
X = {"x": RNG.normal(size=(2, 3, K)).astype(np.float32)}


def _model(nodes: str, arrays: dict[str, np.ndarray]) -> ir.Model:
    kinds = {"float32": "float", "uint8": "uint8"}
    declared = "".join(
        f", {kinds[a.dtype.name]}[{', '.join(map(str, a.shape))}] {n}" for n, a in arrays.items()
    )
    outputs = ", ".join(f"float[batch, sequence, {WIDTHS[n]}] y{n}" for n in WIDTHS)
    model = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["": 23, "com.microsoft": 1]>'
        f"g (float[batch, sequence, {K}] x{declared}) => ({outputs}) {{ {nodes} }}"
    )
    for name, array in arrays.items():
        register(model, name, array)
    return model


def _floats() -> ir.Model:
    nodes = "".join(f"y{name} = MatMul (x, w{name})\n" for name in WIDTHS)
    return _model(nodes, {f"w{name}": array for name, array in FLOATS.items()})


def _integers(levels: str = "444") -> ir.Model:
    nodes = "".join(
        f"y{name} = com.microsoft.MatMulNBits <K = {K}, N = {count}, bits = 8, "
        f"block_size = {BLOCK}, accuracy_level = {level}> (x, q{name}, s{name})\n"
        for (name, count), level in zip(WIDTHS.items(), levels, strict=True)
    )
    arrays = {f"q{n}": a for n, a in BYTES.items()} | {f"s{n}": a for n, a in SCALES.items()}
    return _model(nodes, arrays)


def _count(model: ir.Model, op_type: str) -> int:
    return sum(n.op_type == op_type for n in model.graph)


@pytest.mark.parametrize(("make", "op_type"), [(_floats, "MatMul"), (_integers, "MatMulNBits")])
def test_same_numbers(make: object, op_type: str) -> None:
    assert callable(make)
    before, after = make(), make()
    [match] = pack_siblings(after)
    assert match.was == f"3 × {op_type} of the same input"
    assert _count(after, op_type) == 1
    expected, found = run(before, X), run(after, X)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-4)
    names = list(after.graph.initializers)
    assert any(name.split(PARTS) == ["wa", "wb", "wc"] for name in names) or any(
        name.split(PARTS) == ["qa", "qb", "qc"] for name in names
    )


def test_a_swapped_order_would_be_noticed() -> None:
    after = _floats()
    pack_siblings(after)
    split = next(n for n in after.graph if n.op_type == "Split")
    expected = run(_floats(), X)
    found = run(after, X)
    assert [v.name for v in split.outputs] == ["ya", "yb", "yc"]
    assert not np.allclose(found["ya"][..., :2], expected["yc"])


def test_a_weight_read_elsewhere_stays() -> None:
    model = _floats()
    tied = model.graph.initializers["wb"]
    other = ir.node("Identity", [tied])
    model.graph.append(other)
    [match] = pack_siblings(model)
    assert match.was == "2 × MatMul of the same input"
    assert _count(model, "MatMul") == 2
    assert "wb" in model.graph.initializers


def test_different_kernels_are_not_mixed() -> None:
    model = _integers("414")
    [match] = pack_siblings(model)
    assert match.was == "2 × MatMulNBits of the same input"
    expected, found = run(_integers("414"), X), run(model, X)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-4)


def test_a_lone_product_stays() -> None:
    model = _floats()
    nodes = list(model.graph)
    other = ir.node("Neg", [model.graph.inputs[0]])
    model.graph.insert_before(nodes[0], other)
    nodes[0].replace_input_with(0, other.outputs[0])
    nodes[1].replace_input_with(0, nodes[2].outputs[0])  # reads another product's result
    assert pack_siblings(model) == []
