"""Graphs cut down by what reads their tensors."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from headport.errors import QuantizeError
from headport.quantize.prune.rows import keep_head_rows, keep_table_rows
from tests.toy_bundles import head_graph, lookup_backbone, register

KEPT = np.array([0, 2, 5])


def test_a_square_head_is_cut_along_its_rows() -> None:
    weight = np.arange(64, dtype=np.float32).reshape(8, 8)
    model = head_graph(weight, np.arange(8, dtype=np.float32), 2.0, 5.0)
    assert sorted(keep_head_rows(model, KEPT, 8)) == ["b", "w"]
    values = {name: v.const_value.numpy() for name, v in model.graph.initializers.items()}
    assert (values["w"] == weight[KEPT]).all() and values["b"].tolist() == [0, 2, 5]
    assert list(model.graph.outputs[0].shape) == ["rows", 3]


def test_a_tensor_that_nothing_explains_is_refused() -> None:
    model = head_graph(np.ones((8, 4), np.float32))
    value = ir.val("per_token", const_value=ir.tensor(np.ones(8, np.float32), name="per_token"))
    model.graph.register_initializer(value)
    node = ir.node("Mul", [model.graph.outputs[0], value])
    model.graph.append(node)
    with pytest.raises(QuantizeError, match=r"per_token \[8\] may have a row per token.*Mul"):
        keep_head_rows(model, KEPT, 8)


def test_a_head_of_another_width_is_refused() -> None:
    with pytest.raises(QuantizeError, match="w with 9 rows was expected"):
        keep_head_rows(head_graph(np.ones((8, 4), np.float32)), KEPT, 9)


def test_tables_are_cut_and_other_lookups_are_not() -> None:
    model = lookup_backbone(np.arange(32, dtype=np.float32).reshape(8, 4))
    assert keep_table_rows(model, KEPT) == ["embed"]
    found = model.graph.initializers["embed"].const_value.numpy()
    assert found[:, 0].tolist() == [0, 8, 20]


def test_a_backbone_that_looks_at_the_ids_themselves_is_refused() -> None:
    model = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["": 23]>
        backbone (int64[batch, sequence] input_ids, float[8, 4] embed, int64 image)
            => (float[batch, sequence, 4] hidden_states)
        {
            row = Gather (embed, input_ids)
            is_image = Equal (input_ids, image)
            flag = Cast <to = 1> (is_image)
            one = Constant <value_ints = [2]> ()
            column = Unsqueeze (flag, one)
            hidden_states = Mul (row, column)
        }
    """)
    register(model, "embed", np.ones((8, 4), np.float32))
    register(model, "image", np.array(7, np.int64))
    with pytest.raises(QuantizeError, match=r"gives token ids to Equal .*use --mode output"):
        keep_table_rows(model, KEPT)


def test_a_table_that_is_too_short_is_refused() -> None:
    model = lookup_backbone(np.ones((5, 4), np.float32))
    with pytest.raises(QuantizeError, match="has 5 rows, at least 6 were expected"):
        keep_table_rows(model, KEPT)
