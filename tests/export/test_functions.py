"""The bodies of the `headport` functions against attention written in NumPy, one row at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from headport.errors import ExportError
from headport.export.functions import DOMAIN, OPSET, define_functions, function_for

Array = npt.NDArray[Any]
B, HQ, KV, D, P, T = 2, 4, 2, 8, 5, 3
SCALE, WINDOW, CAP = 0.3, 4, 2.0
_FLOAT, _INT64 = ir.DataType.FLOAT, ir.DataType.INT64


def _run(name: str, inputs: dict[str, Array], outputs: dict[str, int], **attributes: Any) -> Any:
    """Run one function as the only node of a model."""
    values = [
        ir.val(n, _INT64 if a.dtype == np.int64 else _FLOAT, a.shape) for n, a in inputs.items()
    ]
    node = ir.node(name, values, attributes or None, domain=DOMAIN, num_outputs=len(outputs))
    for value, (output, rank) in zip(node.outputs, outputs.items(), strict=True):
        value.name = output
        value.shape = ir.Shape([f"{output}_{i}" for i in range(rank)])
        value.type = ir.TensorType(_INT64 if output == "position_ids" else _FLOAT)
    graph = ir.Graph(
        values, node.outputs, nodes=[node], opset_imports={"": OPSET, DOMAIN: 1}, name="g"
    )
    model = ir.Model(graph, ir_version=10)
    define_functions(model)
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, inputs)


def _attend(
    q: Array, k: Array, v: Array, mask: Array, row: int, at: int, features: frozenset[str], **x: Any
) -> Array:
    """Attention of query `at` of a row over the valid slots at or before it, [Hq, D], float64."""
    position = np.cumsum(mask[row]) - 1
    own = position[P + at]
    slots = [s for s in range(P + T) if mask[row, s] and position[s] <= own]
    if "window" in features:
        slots = [s for s in slots if own - position[s] < WINDOW]
    found = np.zeros((HQ, D))
    for h in range(HQ):
        group = h // (HQ // KV)
        scores = SCALE * (k[row, group, slots] @ q[row, h, at])
        if "softcap" in features:
            scores = CAP * np.tanh(scores / CAP)
        if "rounded" in features:
            products = (x["slopes"][h] * position).astype(np.float32)
            bias = torch.from_numpy(products).bfloat16().double().numpy()
            scores = scores + SCALE * (bias[slots] - bias[P + at])
        elif "slopes" in features:
            scores = scores - x["slopes"][h] * (own - position[slots])
        extra = np.exp(x["sinks"][h]) if "sinks" in features else 0.0
        weights = np.exp(scores)
        found[h] = (weights / (weights.sum() + extra)) @ v[row, group, slots]
    return found


MASKS = {
    "full": [[1] * 8, [1] * 8],
    "left padded": [[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8],
    "right padded past": [[1, 1, 1, 0, 0, 1, 1, 1], [1, 0, 0, 0, 0, 1, 1, 1]],
    "right padded prompt": [[1, 1, 1, 1, 1, 1, 0, 0], [1] * 8],
}
FEATURES = ["", "window", "softcap", "slopes", "sinks", "softcap_window", "sinks_slopes_window"]
FEATURES += ["slopes_rounded", "slopes_rounded_window"]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("features", FEATURES)
def test_cached_attention(features: str, mask: str) -> None:
    rng = np.random.default_rng(3)
    normal = lambda *shape: rng.normal(0, 1, shape).astype(np.float32)  # noqa: E731
    chosen = frozenset(filter(None, features.split("_")))
    inputs: dict[str, Array] = {
        "q": normal(B, HQ, T, D),
        "k": normal(B, KV, T, D),
        "v": normal(B, KV, T, D),
        "past_key": normal(B, KV, P, D),
        "past_value": normal(B, KV, P, D),
        "attention_mask": np.array(MASKS[mask], np.int64),
    }
    extras = {n: normal(HQ) for n in ("sinks", "slopes") if n in chosen}
    outputs = {"y": 4, "present_key": 4, "present_value": 4}
    name = "_".join(filter(None, ["CachedAttention", features]))
    attributes = {
        "scale": SCALE,
        "window": WINDOW if "window" in chosen else 0,
        "softcap": CAP if "softcap" in chosen else 0.0,
    }
    y, key, value = _run(name, inputs | extras, outputs, **attributes)
    np.testing.assert_array_equal(key, np.concatenate([inputs["past_key"], inputs["k"]], 2))
    np.testing.assert_array_equal(value, np.concatenate([inputs["past_value"], inputs["v"]], 2))
    assert np.isfinite(y).all()
    compared = 0
    for row in range(B):
        for at in range(T):
            if inputs["attention_mask"][row, P + at]:
                arguments = (inputs["q"], key, value, inputs["attention_mask"], row, at, chosen)
                expected = _attend(*arguments, **extras)
                np.testing.assert_allclose(y[row, at], expected, atol=2e-6)
                compared += 1
    assert compared >= 4


@pytest.mark.parametrize(
    ("mask", "tokens", "expected"),
    [
        ([1, 1, 1], 3, [0, 1, 2]),
        ([0, 0, 1, 1], 4, [0, 0, 0, 1]),
        ([1, 1, 0, 0], 4, [0, 1, 1, 1]),
        ([1, 1, 0, 0, 1], 1, [2]),
        ([0, 1, 1, 1], 2, [1, 2]),
    ],
)
def test_positions_count_valid_tokens(mask: list[int], tokens: int, expected: list[int]) -> None:
    inputs = {
        "attention_mask": np.array([mask], np.int64),
        "input_ids": np.zeros((1, tokens), np.int64),
    }
    [found] = _run("Positions", inputs, {"position_ids": 2})
    assert found.tolist() == [expected]


def test_an_unknown_function_is_refused() -> None:
    with pytest.raises(ExportError, match="CachedAttention_magic"):
        function_for("CachedAttention_magic")
