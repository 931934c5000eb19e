"""The bodies of the recurrent functions against recurrences written in NumPy, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from headport.export.functions import DOMAIN, OPSET, define_functions
from headport.export.recurrent_functions import CONVOLUTION, NEW_TOKENS
from headport.export.scan_functions import DELTA_RULE, DUAL_SCAN, LINEAR_SCAN, SELECTIVE_SCAN

Array = npt.NDArray[Any]
B, D, N, H, P, G = 5, 6, 3, 4, 5, 2
_TYPES = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "int64": ir.DataType.INT64}


def _run(name: str, inputs: dict[str, Array], outputs: dict[str, Array]) -> Any:
    """Run one function as the only node of a model; `outputs` show each output's type and rank."""
    values = [ir.val(n, _TYPES[str(a.dtype)], a.shape) for n, a in inputs.items()]
    node = ir.node(name, values, domain=DOMAIN, num_outputs=len(outputs))
    for value, (output, like) in zip(node.outputs, outputs.items(), strict=True):
        value.name, value.type = output, ir.TensorType(_TYPES[str(like.dtype)])
        value.shape = ir.Shape([f"{output}_{i}" for i in range(like.ndim)])
    graph = ir.Graph(
        values, node.outputs, nodes=[node], opset_imports={"": OPSET, DOMAIN: 1}, name="g"
    )
    model = ir.Model(graph, ir_version=10)
    define_functions(model)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, inputs)


def _new_tokens(T: int) -> Array:
    # One row each: all tokens, padded behind, padded in front, none, with holes.
    found = np.ones((B, T), np.int64)
    found[1, (T + 1) // 2 :] = 0
    found[2, : T // 3] = 0
    found[3] = 0
    found[4] = np.arange(T) % 3 != 1
    return found


class _Normal:
    """Inputs and states, by shape."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(5)

    def __call__(self, *shape: int, dtype: Any = np.float32) -> Array:
        return self._rng.normal(0, 1, shape).astype(dtype)


def _check(y: Array, expected: Array, valid: Array, atol: float) -> None:
    mask = valid.reshape(*valid.shape, *[1] * (y.ndim - 2)) == 1
    np.testing.assert_allclose(np.where(mask, y, 0), np.where(mask, expected, 0), atol=atol)


@pytest.mark.parametrize(("mask", "tokens"), [([0, 1, 1, 0, 1], 3), ([1], 1), ([0, 0, 1, 1], 4)])
def test_new_tokens_are_the_last_columns_of_the_mask(mask: list[int], tokens: int) -> None:
    inputs = {
        "attention_mask": np.array([mask], np.int64),
        "input_ids": np.zeros((1, tokens), np.int64),
    }
    [found] = _run(NEW_TOKENS, inputs, {"new_tokens": inputs["input_ids"]})
    assert found.tolist() == [mask[-tokens:]]


def test_a_convolution_by_hand() -> None:
    # Kernel (1, 10, 100) over one channel that saw 1, 2; then padding, 3, padding, 4.
    inputs = {
        "x": np.array([[[9.0], [3.0], [9.0], [4.0]]], np.float32),
        "past_state": np.array([[[1.0, 2.0]]], np.float32),
        "new_tokens": np.array([[0, 1, 0, 1]], np.int64),
        "weight": np.array([[1.0, 10.0, 100.0]], np.float32),
    }
    shapes = {"y": inputs["x"], "state": inputs["past_state"]}
    y, state = _run(f"{CONVOLUTION}_3", inputs, shapes)
    assert y[0, [1, 3], 0].tolist() == [1 + 20 + 300, 2 + 30 + 400]
    assert state.tolist() == [[[3.0, 4.0]]]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("T", "K"), [(1, 4), (2, 4), (9, 4), (9, 2), (2, 1)])
def test_convolution(T: int, K: int, dtype: str) -> None:
    normal = _Normal()
    x, state = normal(B, T, D, dtype=dtype), normal(B, D, K - 1, dtype=dtype)
    weight, valid = normal(D, K, dtype=dtype), _new_tokens(T)
    inputs = {"x": x, "past_state": state, "new_tokens": valid, "weight": weight}
    y, present = _run(f"{CONVOLUTION}_{K}", inputs, {"y": x, "state": state})
    expected, seen = np.zeros((B, T, D)), state.astype(np.float64)
    for b in range(B):
        for t in np.flatnonzero(valid[b]):
            window = np.concatenate([seen[b], x[b, t, :, None]], axis=1)
            expected[b, t], seen[b] = (window * weight).sum(axis=1), window[:, 1:]
    _check(y, expected, valid, 1e-5 if dtype == "float32" else 1e-2)
    np.testing.assert_array_equal(present, seen.astype(dtype))


@pytest.mark.parametrize("T", [1, 2, 9])
def test_selective_scan(T: int) -> None:
    normal, valid = _Normal(), _new_tokens(T)
    x, dt, A = normal(B, T, D), np.abs(normal(B, T, D)), -np.exp(normal(D, N))
    b, c, h = normal(B, T, N), normal(B, T, N), normal(B, D, N)
    inputs = {"x": x, "dt": dt, "A": A, "B": b, "C": c, "past_state": h, "new_tokens": valid}
    y, present = _run(SELECTIVE_SCAN, inputs, {"y": x, "state": h})
    expected = np.zeros((B, T, D))
    for t in range(T):
        step = dt[:, t] * valid[:, t, None]
        h = np.exp(step[..., None] * A) * h + (step * x[:, t])[..., None] * b[:, t, None]
        expected[:, t] = (h * c[:, t, None]).sum(axis=-1)
    _check(y, expected, valid, 1e-5)
    np.testing.assert_allclose(present, h, atol=1e-5)
    np.testing.assert_array_equal(present[3], inputs["past_state"][3])  # no token, no change


# 1: decode; 64: exactly a chunk; 130: two chunks and a rest.
@pytest.mark.parametrize("T", [1, 9, 64, 130])
def test_dual_scan(T: int) -> None:
    normal, valid = _Normal(), _new_tokens(T)
    x, dt, A = normal(B, T, H, P), np.abs(normal(B, T, H)), -np.exp(normal(H))
    b, c, h = normal(B, T, G, N), normal(B, T, G, N), normal(B, H, P, N)
    inputs = {"x": x, "dt": dt, "A": A, "B": b, "C": c, "past_state": h, "new_tokens": valid}
    y, present = _run(DUAL_SCAN, inputs, {"y": x, "state": h})
    expected = np.zeros((B, T, H, P))
    for t in range(T):
        step = dt[:, t] * valid[:, t, None]
        rows, columns = (np.repeat(z[:, t], H // G, axis=1)[..., None, :] for z in (b, c))
        h = np.exp(step * A)[..., None, None] * h + (step[..., None] * x[:, t])[..., None] * rows
        expected[:, t] = (h * columns).sum(axis=-1)
    _check(y, expected, valid, 5e-5)
    np.testing.assert_allclose(present, h, atol=5e-5)
    np.testing.assert_array_equal(present[3], inputs["past_state"][3])


@pytest.mark.parametrize("T", [1, 9])
def test_delta_rule(T: int) -> None:
    normal, valid = _Normal(), _new_tokens(T)
    q, k, v = normal(B, T, G, N), normal(B, T, G, N) / 2, normal(B, T, H, P)
    g, beta, h = -np.abs(normal(B, T, H)), 1 / (1 + np.abs(normal(B, T, H))), normal(B, H, N, P)
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "past_state": h, "new_tokens": valid}
    y, present = _run(DELTA_RULE, inputs, {"y": v, "state": h})
    expected = np.zeros((B, T, H, P))
    for t in range(T):
        query, key = (np.repeat(z[:, t], H // G, axis=1)[..., None] for z in (q, k))
        held = np.exp(g[:, t])[..., None, None] * h
        delta = beta[:, t, :, None] * (v[:, t] - (held * key).sum(axis=-2))
        new = held + key * delta[..., None, :]
        h = np.where(valid[:, t, None, None, None] == 1, new, h)
        expected[:, t] = (h * query).sum(axis=-2)
    _check(y, expected, valid, 1e-5)
    np.testing.assert_allclose(present, h, atol=1e-5)
    np.testing.assert_array_equal(present[3], inputs["past_state"][3])


@pytest.mark.parametrize("T", [1, 9])
def test_linear_recurrence(T: int) -> None:
    normal, valid = _Normal(), _new_tokens(T)
    x, a, h = normal(B, T, D), 1 / (1 + np.abs(normal(B, T, D))), normal(B, D)
    inputs = {"x": x, "a": a, "past_state": h, "new_tokens": valid}
    y, present = _run(LINEAR_SCAN, inputs, {"y": x, "state": h})
    expected = np.zeros((B, T, D))
    for t in range(T):
        h = np.where(valid[:, t, None] == 1, a[:, t] * h + x[:, t], h)
        expected[:, t] = h
    _check(y, expected, valid, 1e-5)
    np.testing.assert_allclose(present, h, atol=1e-5)
    np.testing.assert_array_equal(present[3], inputs["past_state"][3])


def test_sums_within_a_chunk_keep_what_follows_a_reset() -> None:
    # Every fourth token forgets everything; sums in float32 would lose what the others add to it.
    T, normal, valid = 64, _Normal(), np.ones((1, 64), np.int64)
    x, A = normal(1, T, H, P), np.array([-4, -8, -12, -16], np.float32)
    dt = np.full((1, T, H), 1e-3, np.float32)
    dt[:, ::4] = 5.0
    b, c, h = normal(1, T, G, N), normal(1, T, G, N), normal(1, H, P, N)
    inputs = {"x": x, "dt": dt, "A": A, "B": b, "C": c, "past_state": h, "new_tokens": valid}
    y, _ = _run(DUAL_SCAN, inputs, {"y": x, "state": h})
    state, expected = h.astype(np.float64), np.zeros((1, T, H, P))
    for t in range(T):
        step = dt[:, t].astype(np.float64)
        rows, columns = (np.repeat(z[:, t], H // G, axis=1)[..., None, :] for z in (b, c))
        state = np.exp(step * A)[..., None, None] * state
        state = state + (step[..., None] * x[:, t])[..., None] * rows
        expected[:, t] = (state * columns).sum(axis=-1)
    np.testing.assert_allclose(y, expected, atol=1e-6 * np.abs(expected).max())


def test_long_decays_do_not_overflow() -> None:
    # exp of the running sum between two tokens taken the wrong way round would be infinite.
    T, valid = 64, np.ones((1, 64), np.int64)
    x, dt = np.ones((1, T, 1, 1), np.float32), np.full((1, T, 1), 40.0, np.float32)
    A, ones = np.array([-5.0], np.float32), np.ones((1, T, 1, 1), np.float32)
    state = np.ones((1, 1, 1, 1), np.float32)
    inputs = {"x": x, "dt": dt, "A": A, "B": ones, "C": ones, "past_state": state}
    y, present = _run(DUAL_SCAN, inputs | {"new_tokens": valid}, {"y": x, "state": state})
    np.testing.assert_allclose(y, 40.0)  # everything before a token is forgotten
    np.testing.assert_allclose(present, 40.0)
