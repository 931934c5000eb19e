"""Parity crosses what it must cross, and notices a fault in the written files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from headport.bundle import Bundle
from headport.errors import ExportError, ParityError
from headport.export.checkpoint import find_checkpoint, load_model
from headport.export.functions import ATTENTION
from headport.export.parity import plan_parity, prove, reference_logits
from headport.graphs import load_graphs, write_graphs
from tests.export.conftest import FamilyBundle

Fault = Callable[[dict[str, ir.Model]], None]


def test_rows_are_shorter_and_longer_than_the_traced_example() -> None:
    plan = plan_parity(257, 8192, ())
    assert sorted(plan.prompts) == [2, 3, 9, 18]
    assert all((row >= 0).all() and (row < 257).all() for row in plan.token_ids)
    assert [len(scored) for scored in plan.scored] == [len(row) for row in plan.token_ids]


def test_a_short_context_is_filled_to_its_edge() -> None:
    assert max(len(row) for row in plan_parity(257, 48, ()).token_ids) == 48


@pytest.mark.parametrize(("window", "longest"), [(8, 24), (128, 136), (4096, 24), (640, 648)])
def test_windows_within_reach_are_crossed(window: int, longest: int) -> None:
    plan = plan_parity(257, 8192, (window, 0))
    assert max(len(row) for row in plan.token_ids) == longest
    plan.check_windows((window, 0), 8192)


def test_a_window_the_plan_missed_is_an_error() -> None:
    with pytest.raises(ExportError, match=r"\[128\]"):
        plan_parity(257, 8192, ()).check_windows((128, 0), 8192)


def drop_bias(graphs: dict[str, ir.Model]) -> None:
    gemm = next(node for node in graphs["head.lm"].graph if node.op_type == "Gemm")
    assert len(gemm.inputs) == 3
    gemm.resize_inputs(2)


def drop_scale(graphs: dict[str, ir.Model]) -> None:
    graph = graphs["head.lm"].graph
    mul = next(node for node in graph if node.op_type == "Mul")
    gemm, logits = mul.inputs[0], mul.outputs[0]
    assert gemm is not None
    ir.convenience.replace_all_uses_with(logits, gemm, replace_graph_outputs=True)
    graph.remove(mul, safe=True)
    gemm.name, gemm.type, gemm.shape = "logits", logits.type, logits.shape


def change_windows(by: int) -> Fault:
    def fault(graphs: dict[str, ir.Model]) -> None:
        nodes = [n for n in graphs["backbone"].graph if n.op_type.startswith(ATTENTION)]
        assert nodes
        for node in nodes:
            window = node.attributes["window"].as_int()
            node.attributes["window"] = ir.AttrInt64("window", window + by)

    return fault


def swap_rows(graphs: dict[str, ir.Model]) -> None:
    weight = graphs["head.lm"].graph.initializers["lm_head.weight"]
    assert weight.const_value is not None
    rows = weight.const_value.numpy().copy()
    rows[[3, 4]] = rows[[4, 3]]
    weight.const_value = ir.Tensor(rows, name=weight.name)


def poison(graphs: dict[str, ir.Model]) -> None:
    weight = graphs["head.lm"].graph.initializers["lm_head.weight"]
    assert weight.const_value is not None
    rows = weight.const_value.numpy().copy()
    rows[5, 0] = np.nan
    weight.const_value = ir.Tensor(rows, name=weight.name)


def nothing(graphs: dict[str, ir.Model]) -> None:
    assert graphs


def rewritten(bundle: Bundle, fault: Fault, folder: Path) -> Bundle:
    graphs = load_graphs(bundle)
    fault(graphs)
    write_graphs(graphs, {n: g.file for n, g in bundle.manifest.graphs.items()}, folder)
    return Bundle(folder, bundle.manifest)


@pytest.mark.parametrize(
    ("family", "fault"),
    [
        ("phi", drop_bias),
        ("granite", drop_scale),
        ("mistral", change_windows(1)),
        ("mistral", change_windows(-1)),
        ("mistral", swap_rows),
        ("mistral", poison),
        ("mistral", nothing),
    ],
)
def test_faults_are_noticed(
    family: str, fault: Fault, family_bundle: FamilyBundle, tmp_path: Path
) -> None:
    checkpoint, bundle = family_bundle(family)
    model = load_model(find_checkpoint(str(checkpoint)))
    plan = plan_parity(model.config.vocab_size, 48, (8,))
    reference = reference_logits(model, plan)
    damaged = rewritten(bundle, fault, tmp_path)
    if fault is nothing:
        report = prove(damaged, plan, reference).report
        assert report
        assert report.pieces == 1
        assert len(report.cases) == 5
        return
    with pytest.raises(ParityError, match="do not answer like the checkpoint"):
        prove(damaged, plan, reference)


def test_files_that_cannot_run_are_a_parity_error(
    family_bundle: FamilyBundle, tmp_path: Path
) -> None:
    def fault(graphs: dict[str, ir.Model]) -> None:
        # A gather that reaches beyond its table fails only while it runs.
        value = graphs["backbone"].graph.initializers["transformer.wpe.weight"]
        assert value.const_value is not None
        value.const_value = ir.Tensor(value.const_value.numpy()[:4], name=value.name)
        value.shape = ir.Shape(value.const_value.shape)

    _, bundle = family_bundle("gpt2")
    plan = plan_parity(257, 32, ())
    reference = [np.zeros((len(scored), 257), np.float32) for scored in plan.scored]
    with pytest.raises(ParityError, match="cannot run the written files"):
        prove(rewritten(bundle, fault, tmp_path), plan, reference)
