"""The check after quantising a backbone, and that it bites: every planted fault must raise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from headport.bundle import Bundle
from headport.errors import HeadportError, ParityError
from headport.lowering.matrices import Matrix
from headport.quantize import Options, backbone, quantize
from headport.quantize.formats import FORMATS, StoredWeight
from tests.quantize import mlp_bundles as mlp

Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    found = mlp.weights()
    found[mlp.MIX][7] *= 200  # a scale that others are not
    return mlp.mlp_bundle(tmp_path_factory.mktemp("mlp") / "b", found)


def _quantize(source: Bundle, folder: Path, form: str = "int8") -> Bundle:
    options = Options(bundle=source.path, output=folder, backbone=form, backbone_block=16)  # type: ignore[arg-type]
    return quantize(options)


def _on_mix(monkeypatch: pytest.MonkeyPatch, store: Callable[..., None] | None) -> None:
    """Have the square matrix that is read twice stored otherwise."""
    honest = backbone.store_matrix

    def sabotage(model: ir.Model, matrix: Matrix, *rest: Any) -> None:
        if matrix.name != mlp.MIX:
            honest(model, matrix, *rest)
        elif store is not None:
            store(honest, model, matrix, *rest)

    monkeypatch.setattr(backbone, "store_matrix", sabotage)


def _off_by_one(tensors: Tensors) -> None:
    tensors["int8"][20, 5] += 1 if tensors["int8"][20, 5] < 0 else -1


def _transposed(tensors: Tensors) -> None:
    tensors["int8"] = np.ascontiguousarray(tensors["int8"].T)


def _output_left_out(tensors: Tensors) -> None:
    tensors["int8"][33] = 0


def _scales_of_outputs_swapped(tensors: Tensors) -> None:
    tensors["scale"][[3, 4]] = tensors["scale"][[4, 3]]


def _scales_of_blocks_swapped(tensors: Tensors) -> None:
    tensors["scale"] = np.ascontiguousarray(tensors["scale"][:, ::-1])


def _one_scale(tensors: Tensors) -> None:
    tensors["scale"][30, 1] *= np.float32(1.001)


def _scale_not_a_number(tensors: Tensors) -> None:
    tensors["scale"][11, 0] = np.nan


@pytest.mark.parametrize(
    "change",
    [
        _off_by_one,
        _transposed,
        _output_left_out,
        _scales_of_outputs_swapped,
        _scales_of_blocks_swapped,
        _one_scale,
        _scale_not_a_number,
    ],
)
def test_wrong_tensors_are_caught(
    source: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[..., None]
) -> None:
    def store(honest: Any, model: Any, matrix: Any, stored: StoredWeight, *rest: Any) -> None:
        change(stored.tensors)
        honest(model, matrix, stored, *rest)

    _on_mix(monkeypatch, store)
    with pytest.raises(ParityError, match=mlp.MIX):
        _quantize(source, tmp_path / "o")
    assert not list(tmp_path.iterdir())


def test_wrong_integers_of_four_bits_are_caught(
    source: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def store(honest: Any, model: Any, matrix: Any, stored: StoredWeight, *rest: Any) -> None:
        whole = stored.tensors["int4"].astype(np.int8)
        whole[20, 5] += 1 if whole[20, 5] < 0 else -1
        stored.tensors["int4"] = whole.astype(stored.tensors["int4"].dtype)
        honest(model, matrix, stored, *rest)

    _on_mix(monkeypatch, store)
    with pytest.raises(ParityError, match=f"{mlp.MIX} as stored: 1 of {mlp.H} outputs"):
        _quantize(source, tmp_path / "o", "int4")


@pytest.mark.parametrize("factor", [1.3, 0.7, -1.0, np.nan, 0.0], ids=str)
def test_wrong_scales_of_four_bits_are_caught(
    source: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    def store(honest: Any, model: Any, matrix: Any, stored: StoredWeight, *rest: Any) -> None:
        assert (stored.tensors["scale"] < 0).any()
        stored.tensors["scale"][20, 1] *= np.float32(factor)
        honest(model, matrix, stored, *rest)

    _on_mix(monkeypatch, store)
    with pytest.raises(ParityError, match="scale of output 20 is not one its weights can have"):
        _quantize(source, tmp_path / "o", "int4")


def test_a_matrix_left_as_it_was_is_caught(
    source: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _on_mix(monkeypatch, None)
    # Its scales are looked for first, and are not there.
    with pytest.raises(HeadportError, match=mlp.MIX):
        _quantize(source, tmp_path / "o")


def test_a_wrong_zero_point_is_caught(
    source: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def store(honest: Any, model: ir.Model, matrix: Any, stored: StoredWeight, *rest: Any) -> None:
        honest(model, matrix, stored, *rest)
        (node,) = (n for n in model.graph if f"{mlp.MIX}.int8" in {v.name for v in n.inputs if v})
        array = np.zeros(stored.tensors["scale"].shape, np.int8)
        array[12, 1] = 1
        zero = ir.val("zero", const_value=ir.tensor(array, name="zero"))
        model.graph.register_initializer(zero)
        node.resize_inputs(3)
        node.replace_input_with(2, zero)

    _on_mix(monkeypatch, store)
    with pytest.raises(ParityError, match=f"{mlp.MIX} as stored: 1 of {mlp.H} .* output 12 "):
        _quantize(source, tmp_path / "o")


@pytest.mark.parametrize("block", [32, 64])
def test_another_block_than_recorded_is_caught(
    source: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    def store(honest: Any, model: Any, matrix: Matrix, stored: Any, kind: Any, _: int) -> None:
        array = matrix.value.const_value.numpy()  # type: ignore[union-attr]
        honest(model, matrix, FORMATS["int8"].store(array, block, None), kind, block)

    _on_mix(monkeypatch, store)
    with pytest.raises(ParityError, match=r"scales float32 .* expected for block 16"):
        _quantize(source, tmp_path / "o")


def test_scales_right_for_half_the_block_only_are_caught(
    source: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def store(honest: Any, model: Any, matrix: Any, stored: StoredWeight, *rest: Any) -> None:
        # Scales of blocks half as large, every second one kept.
        array = matrix.value.const_value.numpy()
        half = np.abs(array[:, : 2 * 16].reshape(-1, 4, 8)).max(axis=2)[:, ::2] / np.float32(127)
        stored.tensors["scale"][:, :2] = half
        honest(model, matrix, stored, *rest)

    _on_mix(monkeypatch, store)
    with pytest.raises(ParityError, match="is not one its weights can have"):
        _quantize(source, tmp_path / "o")


def test_one_of_two_products_skipped_is_caught(
    source: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def store(honest: Any, model: ir.Model, matrix: Matrix, *rest: Any) -> None:
        weight = matrix.value.const_value
        assert weight is not None
        honest(model, matrix, *rest)
        second = [n for n in model.graph if n.op_type == "Gemm" and "restored" in _names(n)][-1]
        value = ir.val("float", const_value=ir.tensor(weight.numpy().copy(), name="float"))
        model.graph.register_initializer(value)
        second.replace_input_with(1, value)

    _on_mix(monkeypatch, store)
    with pytest.raises(ParityError, match=rf"{mlp.MIX} \(1 products instead of 2\)"):
        _quantize(source, tmp_path / "o")


def _names(node: ir.Node) -> str:
    return " ".join(str(value.name) for value in node.inputs if value is not None)


def _bits_of_row(tensors: Tensors) -> None:
    tensors["int8"][[5, 6]] = tensors["int8"][[6, 5]]


@pytest.mark.parametrize("change", [_bits_of_row, _one_scale])
def test_a_wrong_row_of_the_embedding_is_caught(
    source: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[..., None]
) -> None:
    honest = backbone.store_table

    def sabotage(model: Any, table: Any, stored: StoredWeight, how: Any) -> None:
        change(stored.tensors)
        honest(model, table, stored, how)

    monkeypatch.setattr(backbone, "store_table", sabotage)
    options = Options(
        bundle=source.path, output=tmp_path / "o", embedding="int8", embedding_block=16
    )
    with pytest.raises(ParityError, match=mlp.EMBED):
        quantize(options)
