"""W8A8: hidden states rounded in the head's graph by one scale of the calibration texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from headport.bundle import Bundle
from headport.errors import ParityError, QuantizeError, UsageError
from headport.ledger import find_tensor, head_weight, read_tensor
from headport.lowering import Options as LowerOptions
from headport.lowering import lower
from headport.quantize import head as head_module
from headport.quantize.calibration import calibrate
from headport.quantize.command import Options, quantize
from headport.quantize.states import WINDOW
from headport.runner import open_runner
from headport.selftest import run_selftest
from headport.static_rounding import is_static, round_statically, static_step
from tests.conftest import TEXTS


def test_numbers_by_hand():
    step = np.float32(0.5)
    x = np.array([[0.25, 0.75, -0.74, 63.5, 900.0, -900.0]])
    expected = [[0.0, 1.0, -0.5, 63.5, 63.5, -64.0]]  # ties to even, both ends cut off
    np.testing.assert_array_equal(round_statically(x, step), expected)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n".join(TEXTS * 8))
    return file


def test_the_largest_magnitude_is_that_of_all_parts_and_signs() -> None:
    parts = [np.eye(2, dtype=np.float32) * size for size in (1, -5, 3)]
    assert calibrate(parts, 2).largest == 5.0


def options_for(source: Path, output: Path, text: Path, **changes: Any) -> Options:
    chosen = {"bundle": source, "output": output, "head": "int8-row"}
    chosen |= {"activations": "static", "calibration": (text,)}
    return Options(**(chosen | changes))


@pytest.fixture(scope="module")
def static(tiny_bundle: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    output = tmp_path_factory.mktemp("static") / "bundle"
    return quantize(options_for(tiny_bundle, output, text))


def test_the_graph_multiplies_rounded_states_with_rounded_weights(static: Bundle) -> None:
    head = static.manifest.heads["lm"]
    assert is_static(head) and head.quantization.format == "int8-row"
    operators = [node.op_type for node in ir.load(static.path / "head.lm.onnx").graph]
    assert operators.count("QuantizeLinear") == 1 and operators.count("DequantizeLinear") == 2
    step = static_step(static, head)
    x = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32) * step * 60
    entry, name = head_weight(static.manifest, head)
    scale = find_tensor(static.manifest, head.graph, name.replace(".int8", ".scale"))
    whole, steps = read_tensor(static, entry), read_tensor(static, scale)
    weight = whole.astype(np.float64) * steps[:, None]
    expected = round_statically(x, step).astype(np.float64) @ weight.T
    np.testing.assert_allclose(open_runner(static).head(x).logits, expected, atol=1e-4)
    assert run_selftest(static)


def test_the_scale_is_the_largest_magnitude_of_the_texts(static: Bundle, text: Path) -> None:
    from headport.runtime.text import Tokens

    runner = open_runner(static)
    ids = np.array(Tokens(static).encode(text.read_text()))[:-1]
    largest = 0.0
    for start in range(0, len(ids), WINDOW):
        part = ids[start : start + WINDOW]
        hidden = runner.forward(runner.new_cache(1, WINDOW), part[None], np.array([len(part)]))
        largest = max(largest, float(np.abs(hidden).max()))
    step = static_step(static, static.manifest.heads["lm"])
    assert largest / 127 == pytest.approx(float(step), rel=1e-5)


@pytest.mark.parametrize("target", ["ort-cpu", "tensorrt"])
def test_lowering_leaves_it_as_it_is(static: Bundle, tmp_path: Path, target: str) -> None:
    lowered = lower(LowerOptions(bundle=static.path, output=tmp_path / "b", target=target))
    report = lowered.manifest.provenance.stages[-1].report
    assert report["parity"]["heads"]["lm"]["max_abs_logit_error"] == 0.0
    assert is_static(lowered.manifest.heads["lm"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": "int8"}, "needs --head int8-row and --calibration"),
        ({"calibration": ()}, "needs --head int8-row and --calibration"),
        ({"rescore": 8}, "leave out --rescore"),
    ],
)
def test_what_contradicts_it_is_refused(
    tiny_bundle: Path, text: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        quantize(options_for(tiny_bundle, tmp_path / "b", text, **changes))


def test_states_that_are_not_rounded_fail(
    tiny_bundle: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = head_module.round_hidden_states

    def wrong(model: ir.Model, product: ir.Node, largest: float) -> None:
        x = product.inputs[0]
        right(model, product, largest)
        product.replace_input_with(0, x)

    monkeypatch.setattr(head_module, "round_hidden_states", wrong)
    with pytest.raises(ParityError, match="does not multiply with the rounded weight"):
        quantize(options_for(tiny_bundle, tmp_path / "b", text))


def test_states_of_zero_give_no_scale() -> None:
    from headport.quantize.static_pass import round_hidden_states

    with pytest.raises(QuantizeError, match="hidden states of 0 only"):
        round_hidden_states(None, None, 0.0)  # type: ignore[arg-type]
