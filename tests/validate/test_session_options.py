"""Session options that would change answers: our INT8 heads ignore them, or the self-test tells.

ONNX Runtime turns DequantizeLinear → MatMul into a kernel that rounds activations to INT8 unless
an option says otherwise. Our portable form is DequantizeLinear → Gemm, which it leaves alone.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import onnx_ir as ir
import pytest

from headport.bundle import Bundle, file_entry
from headport.lowering.command import Options as LowerOptions
from headport.lowering.command import lower
from headport.quantize.command import Options as QuantizeOptions
from headport.quantize.command import quantize
from headport.runner import open_runner
from headport.selftest import run_selftest
from tests.validate import sabotage as faults

OPTION = "session.qdq_matmulnbits_accuracy_level"


@pytest.fixture(scope="module")
def int8(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Portable INT8 bundle of the tiny Llama."""
    output = tmp_path_factory.mktemp("int8") / "portable"
    return quantize(QuantizeOptions(bundle=tiny_bundle, output=output, head="int8")).path


def _with_option(source: Path, target: Path, value: str) -> Path:
    """A copy that asks for another option; its self-test stays that of the original."""
    faults.sabotage(source, target, lambda folder: None)
    faults.set_session_option(OPTION, value)(target)
    return target


def _matmul_layout(folder: Path) -> None:
    """Give the head the layout other tools write: DequantizeLinear → MatMul on Wᵀ."""
    manifest = faults.read_manifest(folder)
    file = folder / manifest.graphs["head.lm"].file
    model = ir.load(file)
    graph = model.graph
    (gemm,) = (node for node in graph if node.op_type == "Gemm")
    (restore,) = (node for node in graph if node.op_type == "DequantizeLinear")
    turned = []
    for value in restore.inputs:
        assert value is not None and value.const_value is not None
        array = np.ascontiguousarray(value.const_value.numpy().T)
        name = f"{value.name}.turned"
        turned.append(ir.val(name, const_value=ir.tensor(array, name=name)))
        graph.register_initializer(turned[-1])
    block = restore.attributes["block_size"].as_int()
    again = ir.node("DequantizeLinear", turned, {"axis": 0, "block_size": block})
    product = ir.node("MatMul", [gemm.inputs[0], again.outputs[0]])
    output = gemm.outputs[0]
    made = product.outputs[0]
    made.name, made.shape, made.type = output.name, output.shape, output.type
    output.name = "was_logits"
    ir.convenience.replace_all_uses_with(output, made, replace_graph_outputs=True)
    graph.insert_before(gemm, [again, product])
    graph.remove([gemm, restore], safe=True)
    for name in [n for n in graph.initializers if not n.endswith(".turned")]:
        del graph.initializers[name]
    ir.save(model, file)
    # The ledger follows `sabotage.reseal`; the head's weight now has another name.
    head = msgspec.structs.replace(manifest.heads["lm"], weight=turned[0].name)
    kept = tuple(t for t in manifest.tensors if "head.lm:" not in "".join(t.consumers))
    changed = msgspec.structs.replace(manifest, heads={"lm": head}, tensors=kept)
    files = {n: file_entry(folder / n) for n in manifest.files}
    faults.write_manifest(folder, msgspec.structs.replace(changed, files=files))


@pytest.mark.parametrize("lowered", [False, True], ids=["portable", "ort-cpu"])
@pytest.mark.parametrize("value", ["1", "4"])
def test_our_int8_heads_answer_the_same_under_other_options(
    int8: Path, tmp_path: Path, lowered: bool, value: str
) -> None:
    source = int8
    if lowered:
        options = LowerOptions(bundle=int8, output=tmp_path / "lowered", target="ort-cpu")
        source = lower(options).path
    changed = _with_option(source, tmp_path / "changed", value)
    rows = np.random.default_rng(0).normal(0, 3, (5, 64)).astype(np.float32)
    found = [open_runner(Bundle.open(path)).head(rows).logits for path in (source, changed)]
    np.testing.assert_array_equal(found[0], found[1])
    assert run_selftest(Bundle.open(changed))


def test_a_head_in_the_fusible_layout_is_told_by_the_self_test(int8: Path, tmp_path: Path) -> None:
    fusible = faults.sabotage(int8, tmp_path / "fusible", _matmul_layout)
    assert run_selftest(Bundle.open(fusible)), "with our option the layout changes no answer"
    faults.set_session_option(OPTION, "4")(fusible)
    result = run_selftest(Bundle.open(fusible))
    assert not result
    assert result.logits_error["lm"] > 10 * result.tolerance.logits
    assert result.hidden_states_error <= result.tolerance.hidden_states
