"""Heads for TensorRT: the type they multiply in, what is refused, and the best K in the graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from headport.bundle import Bundle
from headport.errors import LoweringError, ParityError, UsageError
from headport.lowering import Options, lower
from headport.lowering.command import run
from headport.lowering.tensorrt import head as head_pass
from headport.quantize.command import Options as QuantizeOptions
from headport.quantize.command import quantize
from headport.session import open_session
from tests.tensorrt.bundles import cut_head
from tests.toy_bundles import lookup_backbone, write_toy

V, H = 67, 48


def toy(folder: Path, *, half: bool, bias: bool = False, **changes: Any) -> Bundle:
    kind = np.float16 if half else np.float32
    rng = np.random.default_rng(5)
    weight, table = (rng.normal(size=(V, H)).astype(kind) for _ in range(2))
    added = rng.normal(size=V).astype(np.float32) if bias else None
    return write_toy(folder, weight, bias=added, backbone=lookup_backbone(table), **changes)


def quantised(source: Bundle, output: Path, head: str, **options: Any) -> Bundle:
    return quantize(QuantizeOptions(bundle=source.path, output=output, head=head, **options))


def lowered(source: Bundle, output: Path, **options: Any) -> tuple[Bundle, dict[str, Any]]:
    chosen = Options(bundle=source.path, output=output, target="tensorrt", **options)
    bundle = lower(chosen)
    return bundle, bundle.manifest.provenance.stages[-1].report


def products(bundle: Bundle) -> list[ir.Node]:
    graph = ir.load(bundle.path / "head.lm.onnx").graph
    return [node for node in graph if node.op_type in ("Gemm", "MatMul", "MatMulNBits")]


@pytest.mark.parametrize(
    ("head", "options"),
    [
        ("none", {}),
        ("int8", {"block": 16}),
        ("int8-row", {}),
        ("int4", {"block": 16, "positive_scales": True}),
        ("fp8", {}),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_half_precision_multiplies_in_half_precision(
    tmp_path: Path, head: str, options: dict[str, Any], bias: bool
) -> None:
    source = toy(tmp_path / "a", half=True, bias=bias, scale=0.5, softcap=3.0)
    if head != "none":
        source = quantised(source, tmp_path / "q", head, **options)
    bundle, report = lowered(source, tmp_path / "b")
    [product] = products(bundle)
    types = {value.dtype for value in product.inputs}
    assert product.op_type == "Gemm" and len(product.inputs) == 2
    assert types <= {ir.DataType.FLOAT16, None}
    [text] = report["lowered"]
    assert "float16" in text
    assert report["parity"]["heads"]["lm"]["largest_share_of_bound"] < 0.5
    stored = {t.name: t.dtype for t in bundle.manifest.tensors}
    assert stored[bundle.manifest.heads["lm"].weight] == (
        {"none": "float16", "int8-row": "int8", "fp8": "float8e4m3fn"}.get(head, head)
    )


@pytest.mark.parametrize("head", ["none", "int8-row", "int4"])
def test_float32_stays_as_it_is(tmp_path: Path, head: str) -> None:
    source = toy(tmp_path / "a", half=False)
    if head != "none":
        source = quantised(source, tmp_path / "q", head, positive_scales=head == "int4")
    bundle, report = lowered(source, tmp_path / "b")
    assert report["parity"]["heads"]["lm"]["max_abs_logit_error"] == 0.0
    assert "float" in next(line for line in report["portable"] if "head lm" in line)
    quantization = bundle.manifest.heads["lm"].quantization
    assert quantization is None or quantization.activations == "exact"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "int4", "asymmetric": True}, "--positive-scales in place of --asymmetric"),
        ({"head": "int4"}, "positive scales alone; quantise with --positive-scales"),
        ({"head": "int8", "rescore": 8}, "without --rescore.*--top-k"),
        ({"head": "int8", "certify": True}, "float64"),
    ],
)
def test_what_it_has_no_kernel_for_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    source = quantised(toy(tmp_path / "a", half=False), tmp_path / "q", **options)
    with pytest.raises(LoweringError, match=message):
        lowered(source, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_lost_bias_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = head_pass._lower

    def wrong(graph: Any, product: Any, x: Any, weight: Any) -> None:
        product.resize_inputs(2)
        right(graph, product, x, weight)

    monkeypatch.setattr(head_pass, "_lower", wrong)
    with pytest.raises(ParityError, match="head lm"):
        lowered(toy(tmp_path / "a", half=True, bias=True), tmp_path / "b")


def test_the_best_come_with_original_ids(tmp_path: Path) -> None:
    ids = np.arange(1, V, 2)
    source = cut_head(toy(tmp_path / "a", half=True), tmp_path / "cut", ids)
    bundle, _ = lowered(source, tmp_path / "b", top_k=5)
    assert bundle.manifest.provenance.stages[-1].options == {"target": "tensorrt", "top_k": 5}
    session = open_session(bundle.path / "head.lm.onnx", bundle.manifest.session_options)
    x = np.random.default_rng(0).normal(size=(3, H)).astype(np.float16)
    found = session.run({"hidden_states": x})
    logits = found["logits"].astype(np.float64)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :5]
    np.testing.assert_array_equal(found["top_ids"], ids[order])
    np.testing.assert_array_equal(
        found["top_logits"], np.take_along_axis(found["logits"], order, 1)
    )
    total = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
    np.testing.assert_allclose(found["logsumexp"], total, rtol=1e-6)
    ports = {port.name: port for port in bundle.manifest.graphs["head.lm"].outputs}
    assert ports["top_ids"].dtype == "int64" and ports["top_ids"].shape == ("rows", 5)


@pytest.mark.parametrize("count", [0, -1, V + 1, 3841])
def test_a_count_out_of_range_is_refused(tmp_path: Path, count: int) -> None:
    with pytest.raises(LoweringError, match=rf"--top-k {count}: 1 to {V} were expected"):
        lowered(toy(tmp_path / "a", half=True), tmp_path / "b", top_k=count)


def test_other_targets_take_no_count(tmp_path: Path) -> None:
    source = toy(tmp_path / "a", half=False)
    with pytest.raises(UsageError, match="--top-k needs --target tensorrt"):
        lower(Options(bundle=source.path, output=tmp_path / "b", target="ort-cpu", top_k=5))


def test_the_command_says_what_is_unproved(tmp_path: Path) -> None:
    source = toy(tmp_path / "a", half=True)
    outcome = run(Options(bundle=source.path, output=tmp_path / "b", target="tensorrt"))
    assert "unproved on TensorRT until `headport gpu-check`" in outcome.text
    assert outcome.exit_code == 0
