"""Positions of a step from its lengths: numbers checkable by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from headport.lowering.in_place import add_step_inputs
from headport.lowering.positions import lower_positions, step_positions
from headport.session import open_session


def _model() -> ir.Model:
    return ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["": 23, "headport": 1]>
        g (int64[batch, sequence] input_ids, int64[batch, total_sequence] attention_mask)
            => (int64[batch, sequence] position_ids)
        { position_ids = headport.Positions (attention_mask, input_ids) }
    """)


def test_positions_continue_where_each_row_stands(tmp_path: Path) -> None:
    model = _model()
    add_step_inputs(model)
    (match,) = lower_positions(model)
    assert match.was == "Positions" and match.became is not None
    common_passes.RemoveUnusedNodesPass()(model)
    ir.save(model, tmp_path / "m.onnx")
    # after the step: 5, 1, 3 and 7 tokens, of which 3, 1, 0 and 2 are new
    feeds = {
        "input_ids": np.zeros((4, 3), np.int64),
        "attention_mask": np.zeros((4, 0), np.int64),
        "seqlens_k": np.array([4, 0, 2, 6], np.int32),
        "query_seqlens": np.array([3, 1, 0, 2], np.int32),
        "total_sequence_length": np.array(9, np.int32),
    }
    found = open_session(tmp_path / "m.onnx", {}).run(feeds)["position_ids"]
    # Padding repeats the last token's position, and never leaves what the row holds.
    assert found.tolist() == [[2, 3, 4], [0, 0, 0], [2, 2, 2], [5, 6, 6]]


def test_positions_are_computed_once() -> None:
    model = _model()
    add_step_inputs(model)
    lower_positions(model)
    first = step_positions(model)
    nodes = len(model.graph)
    assert step_positions(model) is first and len(model.graph) == nodes
