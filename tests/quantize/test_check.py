"""The check after quantising, and that it bites: every planted fault must raise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir
import pytest

from headport.bundle import Bundle, draft_bundle
from headport.errors import ParityError
from headport.graphs import load_graphs, rewrite_bundle
from headport.manifest import Quantization
from headport.quantize.check import check_head
from headport.quantize.formats import FORMATS
from headport.quantize.head_pass import store_head_weight
from tests.toy_bundles import write_toy

V, H, BLOCK = 64, 64, 16  # square, so that a wrong axis still has the right shape
BIAS = np.linspace(-1, 1, V).astype(np.float32)
Change = Callable[[dict[str, np.ndarray]], None]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    weight = np.random.default_rng(0).normal(size=(V, H)).astype(np.float32)
    weight[7] *= 200
    return write_toy(
        tmp_path_factory.mktemp("toy") / "b", weight, bias=BIAS, scale=2.0, softcap=5.0
    )


def _written(
    source: Bundle,
    output: Path,
    change: Change = lambda tensors: None,
    rewrite: Callable[[ir.Model], None] = lambda model: None,
    **quantization: Any,
) -> Bundle:
    models = load_graphs(source)
    model = models["head.lm"]
    stored = FORMATS["int8"].store(model.graph.initializers["w"].const_value.numpy(), BLOCK)
    change(stored.tensors)
    name = store_head_weight(model, "w", stored, FORMATS["int8"], BLOCK)
    rewrite(model)
    made = {"format": "int8", "block": BLOCK, "activations": "exact"} | quantization
    with draft_bundle(output, force=False) as draft:
        manifest = rewrite_bundle(source, models, draft.path)
        head = msgspec.structs.replace(
            manifest.heads["lm"], weight=name, quantization=Quantization(**made)
        )
        return draft.commit(msgspec.structs.replace(manifest, heads={"lm": head}))


def test_an_honest_head_passes(source: Bundle, tmp_path: Path) -> None:
    found = check_head(source, _written(source, tmp_path / "b"), BIAS)
    assert found and found.logits == 13 * V
    assert 0 < found.largest_share_of_bound < 0.5 and found.max_abs_logit_error < 1e-4


def _off_by_one(tensors: dict[str, np.ndarray]) -> None:
    tensors["int8"][20, 5] += 1


def _transposed(tensors: dict[str, np.ndarray]) -> None:
    tensors["int8"] = np.ascontiguousarray(tensors["int8"].T)


def _row_left_out(tensors: dict[str, np.ndarray]) -> None:
    tensors["int8"][33] = 0


def _rows_swapped(tensors: dict[str, np.ndarray]) -> None:
    tensors["int8"][[3, 4]] = tensors["int8"][[4, 3]]


def _scales_of_rows_swapped(tensors: dict[str, np.ndarray]) -> None:
    tensors["scale"][[3, 4]] = tensors["scale"][[4, 3]]


def _scales_of_blocks_swapped(tensors: dict[str, np.ndarray]) -> None:
    tensors["scale"] = np.ascontiguousarray(tensors["scale"][:, ::-1])


def _one_scale(tensors: dict[str, np.ndarray]) -> None:
    tensors["scale"][50, 1] *= np.float32(1.001)


@pytest.mark.parametrize(
    "change",
    [
        _off_by_one,
        _transposed,
        _row_left_out,
        _rows_swapped,
        _scales_of_rows_swapped,
        _scales_of_blocks_swapped,
        _one_scale,
    ],
)
def test_wrong_tensors_are_caught(source: Bundle, tmp_path: Path, change: Change) -> None:
    with pytest.raises(ParityError, match="differ by more than rounding explains"):
        check_head(source, _written(source, tmp_path / "b", change), BIAS)


def _without(op_type: str) -> Callable[[ir.Model], None]:
    def rewrite(model: ir.Model) -> None:
        node = next(n for n in model.graph if n.op_type == op_type)
        before = node.inputs[0]
        assert before is not None
        ir.convenience.replace_all_uses_with(node.outputs[0], before)
        model.graph.remove(node, safe=True)

    return rewrite


def _without_bias(model: ir.Model) -> None:
    next(n for n in model.graph if n.op_type == "Gemm").resize_inputs(2)


@pytest.mark.parametrize(
    "rewrite", [_without_bias, _without("Mul"), _without("Tanh")], ids=["bias", "scale", "softcap"]
)
def test_lost_bias_scale_or_softcap_is_caught(
    source: Bundle, tmp_path: Path, rewrite: Callable[[ir.Model], None]
) -> None:
    with pytest.raises(ParityError, match="differ by more than rounding explains"):
        check_head(source, _written(source, tmp_path / "b", rewrite=rewrite), BIAS)


def test_a_block_size_that_was_only_recorded_is_caught(source: Bundle, tmp_path: Path) -> None:
    written = _written(source, tmp_path / "b", block=2 * BLOCK)
    with pytest.raises(ParityError, match="differ by more than rounding explains"):
        check_head(source, written, BIAS)


def test_a_head_left_as_it_was_is_caught(source: Bundle) -> None:
    made = Quantization(format="int8", block=BLOCK, activations="exact")
    head = msgspec.structs.replace(source.manifest.heads["lm"], quantization=made)
    claimed = Bundle(source.path, msgspec.structs.replace(source.manifest, heads={"lm": head}))
    with pytest.raises(ParityError, match="differ by more than rounding explains"):
        check_head(source, claimed, BIAS)
    with pytest.raises(ParityError, match="not quantised although"):
        check_head(source, source, BIAS)


def test_non_finite_logits_are_caught(source: Bundle, tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["scale"][11, 0] = np.nan

    with pytest.raises(ParityError, match="row 11 "):
        check_head(source, _written(source, tmp_path / "b", change), BIAS)


@pytest.mark.parametrize("H", [1500, 4096])
def test_one_step_of_one_weight_shows_in_a_long_row(tmp_path: Path, H: int) -> None:
    weight = np.random.default_rng(1).normal(size=(9, H)).astype(np.float32)
    source = write_toy(tmp_path / "toy", weight)
    assert check_head(source, _written(source, tmp_path / "honest"), None)
    caught = 0
    for n, h in enumerate(np.random.default_rng(2).integers(0, H, 12).tolist()):

        def change(tensors: dict[str, np.ndarray], n: int = n, h: int = h) -> None:
            tensors["int8"][n % 9, h] += 1 if tensors["int8"][n % 9, h] < 0 else -1

        written = _written(source, tmp_path / str(n), change)
        try:
            check_head(source, written, None)
        except ParityError as error:
            caught += f"of all row {n % 9} " in str(error)
    assert caught == 12
