"""Matrices of the backbone on ort-cpu: right on every kernel, and every planted fault is caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir
import pytest

from headport.bundle import Bundle
from headport.errors import LoweringError, ParityError
from headport.inspection import describe
from headport.ledger import find_tensor, read_tensor
from headport.lowering import Options as LowerOptions
from headport.lowering import lower, product_kernels, product_parity
from headport.lowering.packed import PackedWeight
from headport.lowering.product_kernels import check_matrices, kernel_of
from headport.manifest import BackboneQuantization, StoredMatrix, encode_manifest
from headport.quantize import Options, quantize
from headport.runner import open_runner
from headport.selftest import run_selftest
from tests.quantize import mlp_bundles as mlp

OPTION = "session.qdq_matmulnbits_accuracy_level"
IDS = np.array([[3, 0, 30, 7, 7], [1, 2, 3, 4, 5]])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return mlp.mlp_bundle(tmp_path_factory.mktemp("mlp") / "b")


@pytest.fixture(scope="module")
def int8(source: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return _quantized(source, tmp_path_factory.mktemp("q") / "b", backbone="int8")


def _quantized(source: Bundle, folder: Path, **changes: Any) -> Bundle:
    return quantize(Options(bundle=source.path, output=folder, **changes))


def _lowered(bundle: Bundle, folder: Path) -> Bundle:
    return lower(LowerOptions(bundle=bundle.path, output=folder, target="ort-cpu"))


def _hidden_states(bundle: Bundle) -> np.ndarray:
    runner = open_runner(bundle, heads=())
    return runner.forward(runner.new_cache(2, 8), IDS, np.array([5, 5]))


def _operators(bundle: Bundle) -> list[str]:
    return [node.op_type for node in ir.load(bundle.path / "backbone.onnx").graph]


def _scales(bundle: Bundle) -> np.ndarray:
    tensors = [t for t in bundle.manifest.tensors if t.name.endswith(".scale")]
    return np.concatenate([read_tensor(bundle, t).ravel() for t in tensors])


def test_a_zero_point_of_negative_scales_widens_the_bound(source: Bundle, tmp_path: Path) -> None:
    portable = _quantized(source, tmp_path / "q", backbone="int4")
    record = portable.manifest.backbone_quantization
    assert record is not None
    expected = product_parity._expected(
        portable, "backbone", mlp.MIX, record.matrices[mlp.MIX], "rounded"
    )
    assert expected.offset is not None
    entry = find_tensor(portable.manifest, "backbone", f"{mlp.MIX}.scale")
    scale = read_tensor(portable, entry)
    assert scale.min() < 0 and (expected.offset(slice(None)) == 8 * np.abs(scale)).all()


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
def test_every_format_and_block(source: Bundle, tmp_path: Path, form: str, block: int) -> None:
    portable = _quantized(source, tmp_path / "q", backbone=form, backbone_block=block)
    bundle = _lowered(portable, tmp_path / "l")
    assert _operators(bundle).count("MatMulNBits") == 5
    assert "DequantizeLinear" not in _operators(bundle) and "Gemm" not in _operators(bundle)
    assert (_scales(portable) < 0).any() == (form == "int4")
    was, now = _hidden_states(portable), _hidden_states(bundle)
    change = np.linalg.norm(now - was) / np.linalg.norm(was)
    assert 1e-4 < change < 0.02, "activations are rounded, and no more"
    report = bundle.manifest.provenance.stages[-1].report
    check = report["products"]["check"]
    assert check["products"] == 5 and 1e-3 < check["real_relative_error"] < 0.05
    assert check["exact_share_of_bound"] < 0.2 < 1 > check["real_share_of_bound"] > 0.1
    assert report["lowered"][f"DequantizeLinear + Gemm → MatMulNBits ({form}), rounded activations"]
    assert max(report["parity"]["hidden_states"].values()) < 1e-5, "all else is compared exactly"
    assert run_selftest(bundle)


@pytest.mark.parametrize(("form", "block"), [("int8", 64), ("int8", 32), ("int4", 32)])
def test_residual_activations(source: Bundle, tmp_path: Path, form: str, block: int) -> None:
    portable = _quantized(
        source,
        tmp_path / "q",
        backbone=form,
        backbone_block=block,
        backbone_activations="residual",
    )
    bundle = _lowered(portable, tmp_path / "l")
    assert _operators(bundle).count("MatMulNBits") == 5
    was, now = _hidden_states(portable), _hidden_states(bundle)
    assert np.linalg.norm(now - was) < 1e-4 * np.linalg.norm(was), "a hundredth of one rounding"
    report = bundle.manifest.provenance.stages[-1].report
    assert report["products"]["check"]["real_relative_error"] < 2e-4
    assert report["lowered"][
        f"DequantizeLinear + Gemm → MatMulNBits ({form}), residual activations"
    ]
    assert run_selftest(bundle)


def test_residual_activations_of_some_matrices(tiny_bundle: Path, tmp_path: Path) -> None:
    exact = Bundle.open(tiny_bundle)
    overrides = ("*.v_proj=int8:residual", "*.gate_proj=int8:32:residual", "*.up_proj=int8:32")
    changed = _quantized(exact, tmp_path / "q", backbone="int8", override=overrides)
    assert changed.manifest.provenance.stages[-1].options["override"] == [
        "*.v_proj=int8:64:residual", "*.gate_proj=int8:32:residual", "*.up_proj=int8:32"
    ]  # fmt: skip
    shown = describe(changed).text()
    assert "2 × int8 block 64 matrices with residual activations" in shown
    assert "2 × int8 block 32 matrices with residual activations" in shown
    bundle = _lowered(changed, tmp_path / "l")
    lowered = bundle.manifest.provenance.stages[-1].report["lowered"]
    assert lowered["DequantizeLinear + Gemm → MatMulNBits (int8), residual activations"] == 2 * 2
    assert lowered["DequantizeLinear + Gemm → MatMulNBits (int8), rounded activations"] == 2 * 5
    assert lowered["2 × MatMulNBits of the same input → MatMulNBits + Split"] == 2  # q and k


def test_residual_products_are_packed_and_checked_one_by_one(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    changed = _quantized(
        Bundle.open(tiny_bundle), tmp_path / "q", backbone="int8", backbone_activations="residual"
    )
    bundle = _lowered(changed, tmp_path / "l")
    report = bundle.manifest.provenance.stages[-1].report
    assert _operators(bundle).count("MatMulNBits") == 2 * 4
    assert report["products"]["check"]["products"] == 2 * 7
    assert report["products"]["hidden_states_change"] < 1e-3


def test_the_selftest_allows_for_rounding_only_where_something_rounds(
    source: Bundle, tmp_path: Path
) -> None:
    # Each matrix's own activations decide, not what the others' are.
    tolerances = {}
    for name, whole, own in (
        ("rounded", "rounded", "residual"),
        ("mixed", "residual", "rounded"),
        ("residual", "residual", "residual"),
    ):
        pattern = "*" if name != "mixed" else "*.down"
        portable = _quantized(
            source,
            tmp_path / f"{name}.q",
            backbone="int8",
            backbone_activations=whole,
            override=(f"{pattern}=int8:{own}",),
        )
        tolerance = _lowered(portable, tmp_path / name).manifest.selftest
        assert tolerance is not None
        tolerances[name] = tolerance.hidden_states
    assert tolerances["mixed"] > 100 * tolerances["residual"]
    assert tolerances["rounded"] < 2 * tolerances["residual"]


def test_a_rest_that_is_left_out_is_caught(
    source: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    portable = _quantized(source, tmp_path / "q", backbone="int8", backbone_activations="residual")
    honest = product_kernels.round_activations

    def sabotage(emit: Any, x: Any, H: int, block: int) -> Any:
        made = honest(emit, x, H, block)  # nothing is rounded, so that nothing is left
        return replace(made, first=x)

    monkeypatch.setattr(product_kernels, "round_activations", sabotage)
    with pytest.raises(ParityError, match="as stored"):
        _lowered(portable, tmp_path / "l")


@pytest.mark.parametrize(
    ("form", "operator"), [("int8", "DequantizeLinear"), ("int4", "MatMulNBits"), ("fp16", "Cast")]
)
def test_exact_activations(source: Bundle, tmp_path: Path, form: str, operator: str) -> None:
    portable = _quantized(
        source, tmp_path / "q", backbone=form, backbone_activations="exact", embedding="int8"
    )
    bundle = _lowered(portable, tmp_path / "l")
    assert operator in _operators(bundle)
    was, now = _hidden_states(portable), _hidden_states(bundle)
    assert np.abs(now - was).max() < 2e-6 * np.abs(was).max()
    report = bundle.manifest.provenance.stages[-1].report
    assert report["products"]["check"]["real_share_of_bound"] <= 1
    assert any("int8 embedding" in line for line in report["portable"])


def test_formats_may_be_mixed(source: Bundle, tmp_path: Path) -> None:
    overrides = ("*.up=int4:16", "*.gate=fp16", "*.down=none")
    portable = _quantized(source, tmp_path / "q", backbone="int8", override=overrides)
    bundle = _lowered(portable, tmp_path / "l")
    assert [_operators(bundle).count(o) for o in ("MatMulNBits", "Gemm", "Cast")] == [3, 1, 1]
    np.testing.assert_allclose(_hidden_states(bundle), _hidden_states(portable), atol=0.3)


def test_an_exported_model(tiny_bundle: Path, tmp_path: Path) -> None:
    exact = Bundle.open(tiny_bundle)
    portable = _quantized(exact, tmp_path / "q", backbone="int8", embedding="int8", head="int8")
    bundle = _lowered(portable, tmp_path / "l")
    assert _operators(bundle).count("MatMulNBits") == 2 * 4  # q k v, output, gate up, down
    assert not {"Gemm", "MatMul"} & set(_operators(bundle))
    # ONNX Runtime runs what nobody reads: the shapes around 7 products were 5 % of a step.
    assert not {"Shape", "Reshape", "Concat"} & set(_operators(bundle))
    runners = [open_runner(b, heads=("lm",)) for b in (exact, portable, bundle)]
    caches = [runner.new_cache(2, 8) for runner in runners]
    for ids, new in ((IDS, [5, 3]), (IDS[:, :1], [1, 1])):
        hidden = [
            runner.forward(cache, ids, np.array(new))[:, : min(new)]
            for runner, cache in zip(runners, caches, strict=True)
        ]
        change = [np.linalg.norm(h - hidden[0]) / np.linalg.norm(hidden[0]) for h in hidden[1:]]
        assert 1e-3 < change[0] < 0.1 and 1e-3 < change[1] < 0.1


@pytest.mark.parametrize("head", ["none", "int8"])
def test_an_embedding_alone(tiny_bundle: Path, tmp_path: Path, head: str) -> None:
    exact = Bundle.open(tiny_bundle)
    portable = _quantized(exact, tmp_path / "q", embedding="int8", head=head)
    bundle = _lowered(portable, tmp_path / "l")
    states = []
    for each in (portable, bundle):
        runner = open_runner(each)
        states.append(runner.forward(runner.new_cache(2, 8), IDS, np.array([5, 3]))[:, :3])
    np.testing.assert_allclose(states[0], states[1], atol=1e-4)
    with pytest.raises(LoweringError, match="ort-cuda has no proved kernel for an embedding"):
        lower(LowerOptions(bundle=portable.path, output=tmp_path / "c", target="ort-cuda"))


@pytest.mark.parametrize("value", ["1", "4"])
@pytest.mark.parametrize("lowered", [False, True], ids=["portable", "ort-cpu"])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_other_session_options_change_no_answer(
    source: Bundle, tmp_path: Path, form: str, lowered: bool, value: str
) -> None:
    bundle = _quantized(source, tmp_path / "q", backbone=form, embedding="int8")
    if lowered:
        bundle = _lowered(bundle, tmp_path / "l")
    expected = _hidden_states(bundle)
    options = {**bundle.manifest.session_options, OPTION: value}
    changed = msgspec.structs.replace(bundle.manifest, session_options=options)
    (bundle.path / "manifest.json").write_bytes(encode_manifest(changed))
    np.testing.assert_array_equal(_hidden_states(Bundle.open(bundle.path)), expected)


def test_what_a_target_cannot_run_is_refused_before_work_starts(
    int8: Bundle, tmp_path: Path
) -> None:
    with pytest.raises(LoweringError, match=r"ort-cuda has no proved kernel .* 4 × int8 block 64"):
        lower(LowerOptions(bundle=int8.path, output=tmp_path / "o", target="ort-cuda"))
    wide = StoredMatrix(format="int4", block=512)
    record = BackboneQuantization(matrices={"m": wide}, embedding={}, activations="rounded")
    with pytest.raises(LoweringError, match="int4 block 512 with rounded activations"):
        check_matrices(record, "ort-cpu")
    check_matrices(None, "ort-cuda")
    assert kernel_of("ort-cpu", StoredMatrix(format="int4", block=16), "exact") is not None
    assert not list(tmp_path.iterdir())


def _pack(monkeypatch: pytest.MonkeyPatch, change: Callable[[np.ndarray], np.ndarray]) -> None:
    honest = product_kernels.pack_weight

    def sabotage(restore: ir.Node) -> PackedWeight:
        packed = honest(restore)
        values = change(packed.values.copy())
        return PackedWeight(values, packed.scale, packed.zero, packed.bits, packed.block)

    monkeypatch.setattr(product_kernels, "pack_weight", sabotage)


def _zero_point(values: np.ndarray) -> np.ndarray:
    return values - np.uint8(1)


def _rows_swapped(values: np.ndarray) -> np.ndarray:
    values[[3, 4]] = values[[4, 3]]
    return values


def _one_weight(values: np.ndarray) -> np.ndarray:
    values[3, 0, 9] ^= np.uint8(1)
    return values


def _blocks_turned(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values[:, :, ::-1])


@pytest.mark.parametrize("change", [_zero_point, _rows_swapped, _one_weight, _blocks_turned])
def test_wrong_packing_is_caught(
    int8: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    _pack(monkeypatch, change)
    with pytest.raises(ParityError, match="does not multiply with"):
        _lowered(int8, tmp_path / "l")
    assert not list(tmp_path.iterdir())


def test_a_product_left_out_is_caught(
    int8: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = product_kernels._lower
    seen: list[str] = []

    def sabotage(model: ir.Model, product: Any, *others: Any) -> None:
        seen.append(product.name)
        if seen.count(mlp.MIX) == 2 and product.name == mlp.MIX:
            weight = ir.tensor(np.ones((mlp.H, mlp.H), np.float32), name="float")
            value = ir.val("float", const_value=weight)
            model.graph.register_initializer(value)
            product.product.replace_input_with(1, value)
        else:
            honest(model, product, *others)

    monkeypatch.setattr(product_kernels, "_lower", sabotage)
    with pytest.raises(ParityError, match=rf"{mlp.MIX} \(1 products instead of 2\)"):
        _lowered(int8, tmp_path / "l")


def test_swapped_scales_are_caught(
    int8: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = product_kernels.replace

    def sabotage(graph: ir.Graph, node: ir.Node, values: Any) -> None:
        made = values[0].producer()
        if made.inputs[1].name == f"{mlp.MIX}.int8.nbits":
            made.replace_input_with(2, graph.initializers[f"{mlp.GATE}.scale"])
        honest(graph, node, values)

    monkeypatch.setattr(product_kernels, "replace", sabotage)
    with pytest.raises(ParityError, match=f"{mlp.MIX} as stored"):
        _lowered(int8, tmp_path / "l")


def test_a_kernel_that_rounds_where_none_was_asked_for_is_caught(
    source: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    portable = _quantized(source, tmp_path / "q", backbone="int4", backbone_activations="exact")
    monkeypatch.setattr(product_kernels, "_FLOAT_ACTIVATIONS", 4)
    key = ("ort-cpu", "int4", "exact")
    row = product_kernels._KERNELS[key]
    changed = product_kernels.ProductKernel(4, row.blocks)
    monkeypatch.setitem(product_kernels._KERNELS, key, changed)
    with pytest.raises(ParityError, match="differ by more than rounding explains"):
        _lowered(portable, tmp_path / "l")


def test_hidden_states_that_move_too_far_are_caught(
    int8: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product_parity, "_LIMIT", 1e-6)
    with pytest.raises(ParityError, match="move hidden states by"):
        _lowered(int8, tmp_path / "l")


def test_a_fault_elsewhere_does_not_hide_behind_rounding(
    int8: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headport.lowering import command

    honest = command.apply_passes

    def sabotage(target: Any, manifest: Any, models: Any) -> Any:
        matches = honest(target, manifest, models)
        graph = models["backbone"].graph
        stack = graph.initializers[mlp.STACK]
        array = stack.const_value.numpy() * np.float32(1.001)  # far less than what rounding moves
        stack.const_value = ir.tensor(array, name=mlp.STACK)
        return matches

    monkeypatch.setattr(command, "apply_passes", sabotage)
    with pytest.raises(ParityError, match="does not answer like the portable one"):
        _lowered(int8, tmp_path / "l")
