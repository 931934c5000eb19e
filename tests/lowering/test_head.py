"""The INT8 head on ONNX Runtime's 8-bit kernel: exact where promised, bounded where rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir
import pytest

from headport.bundle import Bundle
from headport.errors import LoweringError, ParityError
from headport.ledger import find_tensor, read_tensor
from headport.lowering import Options, head, lower
from headport.lowering.bounds import head_bound
from headport.lowering.head import lower_head
from headport.quantize import Options as QuantizeOptions
from headport.quantize import quantize
from headport.quantize.blocks import BLOCKS, dequantize_blocks
from headport.runner import open_runner
from tests.lowering.backbones import Layer, attention_backbone
from tests.toy_bundles import write_toy


def _quantized(folder: Path, V: int, H: int, **changes: Any) -> Bundle:
    weight = np.random.default_rng(0).normal(size=(V, H)).astype(np.float32)
    source = write_toy(folder / "toy", weight, bias=np.linspace(-2, 2, V).astype(np.float32))
    options = {"head": "int8", "output": folder / "int8", "bundle": source.path} | changes
    return quantize(QuantizeOptions(**options))


def _lowered_model(bundle: Bundle) -> tuple[ir.Model, list[Any]]:
    model = ir.load(bundle.path / "head.lm.onnx")
    return model, lower_head(model, bundle.manifest.heads["lm"], "lm")


def _run(model: ir.Model, folder: Path, hidden: np.ndarray) -> np.ndarray:
    from headport.session import open_session

    for value in model.graph.initializers.values():
        tensor = value.const_value
        assert tensor is not None
        value.const_value = ir.tensor(tensor.numpy().copy(), name=value.name)
    ir.save(model, folder / "lowered.onnx")
    return open_session(folder / "lowered.onnx", {}).run({"hidden_states": hidden})["logits"]


def _exact(bundle: Bundle, hidden: np.ndarray, block: int) -> np.ndarray:
    tensors = [
        read_tensor(bundle, find_tensor(bundle.manifest, "head.lm", f"w.{suffix}"))
        for suffix in ("int8", "scale")
    ]
    W = dequantize_blocks(tensors[0], tensors[1], block)
    return hidden.astype(np.float64) @ W.T + np.linspace(-2, 2, len(W)).astype(np.float32)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("V", "H"), [(257, 61), (31, 320)])
def test_errors_stay_within_their_bounds(tmp_path: Path, V: int, H: int, block: int) -> None:
    hidden = np.random.default_rng(1).normal(0, 2, (5, H)).astype(np.float32)
    hidden[3] = 0
    hidden[4, 7] = 300.0  # one huge activation costs its block's others their precision
    worst = {}
    for activations in ("residual", "rounded"):
        folder = tmp_path / activations
        folder.mkdir()
        bundle = _quantized(folder, V, H, block=block, activations=activations)
        model, _ = _lowered_model(bundle)
        error = np.abs(_run(model, folder, hidden) - _exact(bundle, hidden, block))
        bound = head_bound(bundle, "lm", hidden.astype(np.float64))
        assert (error <= bound).all()
        worst[activations] = error[:3].max()
        assert error[3].max() == 0.0
    assert worst["rounded"] > 0.01 and worst["residual"] < worst["rounded"] / 50


@pytest.mark.parametrize("activations", ["residual", "rounded"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_hidden_states_are_not_hidden(
    tmp_path: Path, activations: str, value: float
) -> None:
    bundle = _quantized(tmp_path, 31, 48, activations=activations)
    hidden = np.ones((2, 48), np.float32)
    hidden[1, 5] = value
    logits = _run(_lowered_model(bundle)[0], tmp_path, hidden)
    assert np.isfinite(logits[0]).all() and not np.isfinite(logits[1]).any()


def test_largest_products_do_not_saturate(tmp_path: Path) -> None:
    # Kernels that add pairs of 8-bit products in 16 bits clip at ±127 · ±127 · 2.
    source = write_toy(tmp_path / "toy", np.where(np.eye(32, 256) > 0, -1, 1).astype(np.float32))
    bundle = quantize(
        QuantizeOptions(
            bundle=source.path, output=tmp_path / "o", head="int8", activations="rounded"
        )
    )
    model, _ = _lowered_model(bundle)
    for sign in (1, -1):
        logits = _run(model, tmp_path, np.full((1, 256), sign, np.float32))
        assert np.abs(logits - sign * 254.0).max() < 1e-3


def test_packing_and_names(tmp_path: Path) -> None:
    bundle = _quantized(tmp_path, 3, 40, block=16)
    model, matches = _lowered_model(bundle)
    assert [(m.where, m.became) for m in matches] == [
        ("head lm", "MatMulNBits, residual activations")
    ]
    assert sorted(n for n in model.graph.initializers if "headport" not in n) == [
        "b",
        "w.int8.nbits",
        "w.scale",
    ]
    packed = model.graph.initializers["w.int8.nbits"].const_value.numpy()
    plain = read_tensor(bundle, find_tensor(bundle.manifest, "head.lm", "w.int8"))
    assert packed.shape == (3, 3, 16) and packed.dtype == np.uint8
    flat = packed.reshape(3, 48).astype(int) - 128
    assert (flat[:, :40] == plain).all() and not flat[:, 40:].any()
    node = next(n for n in model.graph if n.op_type == "MatMulNBits")
    assert {name: a.value for name, a in node.attributes.items()} == {
        "K": 40,
        "N": 3,
        "bits": 8,
        "block_size": 16,
        "accuracy_level": 4,
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"activations": "exact"}, "exact activations were asked for"),
        ({"head": "fp16"}, "no faster operator for a weight stored as fp16"),
    ],
)
def test_what_stays_portable_says_why(tmp_path: Path, changes: dict[str, str], reason: str) -> None:
    bundle = _quantized(tmp_path, 31, 48, **changes)
    before = [n.op_type for n in ir.load(bundle.path / "head.lm.onnx").graph]
    model, (match,) = _lowered_model(bundle)
    assert match.became is None and reason in match.reason
    assert [n.op_type for n in model.graph] == before


def test_a_head_that_is_not_what_the_manifest_says_is_refused(tmp_path: Path) -> None:
    bundle = _quantized(tmp_path, 31, 48)
    model = ir.load(tmp_path / "toy" / "head.lm.onnx")
    with pytest.raises(LoweringError, match="head lm: the manifest says integers, but"):
        lower_head(model, bundle.manifest.heads["lm"], "lm")


def _whole_bundle(folder: Path, activations: str) -> Bundle:
    weight = np.random.default_rng(3).normal(size=(31, 24)).astype(np.float32)
    source = write_toy(
        folder / "toy",
        weight,
        backbone=attention_backbone([Layer()]),
        bias=np.ones(31),
        softcap=8.0,
    )
    return quantize(
        QuantizeOptions(
            bundle=source.path,
            output=folder / "int8",
            head="int8",
            block=16,
            activations=activations,
        )
    )


def _swap_scales(model: ir.Model, name: str) -> None:
    value = model.graph.initializers["w.scale"]
    array = value.const_value.numpy().copy()
    value.const_value = ir.tensor(array[::-1].copy(), name="w.scale")


def _shift_weight(model: ir.Model, name: str) -> None:
    value = model.graph.initializers["w.int8.nbits"]
    array = value.const_value.numpy().copy()
    array[4] += 1
    value.const_value = ir.tensor(array, name=value.name)


def _lose_rest(model: ir.Model, name: str) -> None:
    total = next(n for n in model.graph if n.op_type == "Sum")
    total.replace_input_with(1, total.inputs[2])


def _lose_bias(model: ir.Model, name: str) -> None:
    total = next(n for n in model.graph if n.op_type == "Sum")
    total.resize_inputs(len(total.inputs) - 1)


@pytest.mark.parametrize(
    ("activations", "sabotage"),
    [
        ("residual", _swap_scales),
        ("rounded", _swap_scales),
        ("residual", _shift_weight),
        ("residual", _lose_rest),
        ("residual", _lose_bias),
        ("rounded", _lose_bias),
    ],
)
def test_planted_faults_are_caught(
    tmp_path: Path, activations: str, sabotage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from headport.lowering.targets import TARGETS

    def faulty(model: ir.Model, head: Any, name: str) -> list[Any]:
        sabotage(model, name)
        return []

    honest = TARGETS["ort-cpu"]
    monkeypatch.setitem(TARGETS, "ort-cpu", replace(honest, head=(*honest.head, faulty)))
    source = _whole_bundle(tmp_path, activations)
    with pytest.raises(ParityError, match="lowered head lm does not answer like"):
        lower(Options(bundle=source.path, output=tmp_path / "cpu", target="ort-cpu"))
    assert not (tmp_path / "cpu").exists()


@pytest.mark.parametrize("activations", ["residual", "rounded", "exact"])
def test_whole_bundle(tmp_path: Path, activations: str) -> None:
    source = _whole_bundle(tmp_path, activations)
    bundle = Bundle.open(
        lower(Options(bundle=source.path, output=tmp_path / "cpu", target="ort-cpu")).path
    )
    entry = bundle.manifest.heads["lm"]
    assert entry.weight == ("w.int8" if activations == "exact" else head.packed_name("w.int8"))
    found = find_tensor(bundle.manifest, "head.lm", entry.weight)
    assert found.dtype == ("int8" if activations == "exact" else "uint8")
    assert msgspec.to_builtins(entry.quantization) == msgspec.to_builtins(
        source.manifest.heads["lm"].quantization
    )
    parity = bundle.manifest.provenance.stages[-1].report["parity"]["heads"]["lm"]
    assert 0 <= parity["largest_share_of_bound"] <= 1
    tolerance = bundle.manifest.selftest.logits  # softcap 8, so logits are at most 8
    assert tolerance <= 8e-4 if activations != "rounded" else 8e-4 < tolerance <= 1.6e-2
    hidden = np.random.default_rng(4).normal(size=(4, 24)).astype(np.float32)
    a, b = (open_runner(x).head(hidden).logits for x in (source, bundle))
    assert np.abs(a - b).max() < {"residual": 2e-3, "rounded": 0.2, "exact": 1e-6}[activations]
