"""The head's graph gives what its formula says, for every combination of parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from headport.export.head import HeadTransform, apply_transform
from headport.export.head_graph import build_head
from headport.session import open_session

V, H, N = 31, 13, 5


def head(dtype: torch.dtype, bias: bool, scale: float, softcap: float | None) -> HeadTransform:
    weight = torch.randn((V, H), generator=torch.Generator().manual_seed(0)).to(dtype)
    return HeadTransform(
        weight=weight,
        weight_name="lm_head.weight",
        bias=torch.linspace(-1, 2, V) if bias else None,
        scale=scale,
        softcap=softcap,
        tied=False,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("bias", "scale", "softcap", "operators"),
    [
        (False, 1.0, None, ["Gemm"]),
        (True, 1.0, None, ["Gemm"]),
        (False, 0.0625, None, ["Gemm", "Mul"]),
        (True, 16.0, 2.0, ["Gemm", "Mul", "Div", "Tanh", "Mul"]),
    ],
)
def test_graph_equals_formula(
    tmp_path: Path,
    dtype: torch.dtype,
    bias: bool,
    scale: float,
    softcap: float | None,
    operators: list[str],
) -> None:
    transform = head(dtype, bias, scale, softcap)
    model = build_head(transform, "head.lm")
    assert [n.op_type for n in model.graph if n.op_type != "Cast"] == operators
    assert model.graph.initializers["lm_head.weight"].shape == (V, H)
    ir.save(model, tmp_path / "head.onnx")
    session = open_session(tmp_path / "head.onnx", {})
    hidden = torch.randn((N, H), generator=torch.Generator().manual_seed(1)).to(dtype)
    found = session.run({"hidden_states": hidden.numpy()})["logits"]
    expected = apply_transform(
        hidden.float(), transform.weight.float(), transform.bias, scale, softcap
    )
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.numpy(), rtol=2e-5, atol=2e-5)
