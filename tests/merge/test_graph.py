"""Joining graphs, written as ONNX text and run on numbers that can be checked by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from headport.errors import MergeError
from headport.merge.graph import join_head, mask_from_lengths, store_once, take_position_ids
from headport.session import open_session

HEADER = '<ir_version: 10, opset_import: ["" : 23]>'
# hidden[b, t] = [id, 2 · id]; `weight` is also the name of the head's own weight.
BACKBONE = (
    HEADER
    + """
backbone (int64[batch, sequence] input_ids) => (float[batch, sequence, 2] hidden_states)
<float[1, 2] weight = {1, 2}>
{
  column = Constant <value_ints = [2]> ()
  floats = Cast <to = 1> (input_ids)
  logits_part = Unsqueeze (floats, column)
  hidden_states = MatMul (logits_part, weight)
}"""
)
HEAD = (
    HEADER
    + """
head (float[rows, 2] hidden_states) => (float[rows, 3] logits)
<float[3, 2] weight = {1, 0, 0, 1, 1, 1}>
{
  logits_part = Gemm <transB = 1> (hidden_states, weight)
  logits = Identity (logits_part)
}"""
)


def parse(text: str) -> ir.Model:
    return ir.serde.deserialize_model(onnx.parser.parse_model(text))


def run(model: ir.Model, folder: Path, **feeds: object) -> dict[str, np.ndarray]:
    file = folder / "model.onnx"
    ir.save(model, file)
    onnx.checker.check_model(str(file), full_check=True)
    session = open_session(file, {})
    return session.run({name: np.array(value, np.int64) for name, value in feeds.items()})


def test_logits_of_every_position(tmp_path: Path) -> None:
    backbone, head = parse(BACKBONE), parse(HEAD)
    backbone.graph[0].name = head.graph[0].name = "also_a_node"
    model = join_head(backbone, head)
    named = [node.name for node in model.graph if node.name]
    assert len(named) > 2 and len(set(named)) == len(named)
    found = run(model, tmp_path, input_ids=[[1, 2], [0, 5]])
    assert list(found) == ["logits"]
    expected = [[[1, 2, 3], [2, 4, 6]], [[0, 0, 0], [5, 10, 15]]]
    np.testing.assert_array_equal(found["logits"], expected)
    (port,) = model.graph.outputs
    assert str(port.shape) == "[batch,sequence,3]" and port.dtype == ir.DataType.FLOAT
    assert {"weight", "head.weight"} <= set(model.graph.initializers)


def test_operator_sets_must_agree() -> None:
    with pytest.raises(MergeError, match="the backbone 23"):
        join_head(parse(BACKBONE), parse(HEAD.replace("23", "22")))


def test_a_graph_without_the_port_is_refused() -> None:
    with pytest.raises(MergeError, match="'logits' was expected"):
        join_head(parse(BACKBONE), parse(HEAD.replace(" logits", " scores")))


def test_tensors_at_one_place_become_one(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(np.arange(12, dtype=np.float32).tobytes())
    model = join_head(parse(BACKBONE), parse(HEAD.replace("3, 2] weight", "1, 2] weight")))
    initializers = model.graph.initializers
    for name, offset in (("weight", 0), ("head.weight", 0)):
        tensor = ir.ExternalTensor(
            "data.bin", offset, 8, ir.DataType.FLOAT, shape=ir.Shape([1, 2]), name=name,
            base_dir=tmp_path,
        )  # fmt: skip
        initializers[name].const_value = tensor
    assert store_once(model) == 1
    assert "weight" in initializers and "head.weight" not in initializers
    assert len(initializers["weight"].uses()) == 2
    assert store_once(model) == 0


# The step's inputs come out as floats, so that the lengths themselves can be seen.
LOWERED = (
    HEADER
    + """
backbone (
  int64[batch, sequence] input_ids, int32[batch] seqlens_k, int32[batch] query_seqlens,
  int32 total_sequence_length, float[batch, 1, past_sequence, 2] past_key_values.0.key
) => (int32[batch] last, int32[batch] new, int32 slots, float[batch, 1, past_sequence, 2] kept)
{
  last = Identity (seqlens_k)
  new = Identity (query_seqlens)
  slots = Identity (total_sequence_length)
  kept = Identity (past_key_values.0.key)
}"""
)


@pytest.mark.parametrize(
    ("mask", "width", "capacity", "last", "new", "slots"),
    [
        ([[1, 1, 1], [1, 0, 0]], 3, 8, [2, 0], [3, 1], 8),  # a prompt, padded on the right
        ([[1, 1, 1, 1], [1, 0, 0, 1]], 1, 8, [3, 1], [1, 1], 8),  # the token after it
        ([[1, 1, 1, 1]], 2, 2, [3], [2], 4),  # caches that grow: two tokens behind two
        ([[0, 0]], 2, 8, [0], [0], 8),  # a row that holds nothing
    ],
)
def test_lengths_from_a_mask(
    mask: list[list[int]],
    width: int,
    capacity: int,
    last: list[int],
    new: list[int],
    slots: int,
    tmp_path: Path,
) -> None:
    model = parse(LOWERED.replace("past_key_values.0.key", "past_key"))
    next(v for v in model.graph.inputs if v.name == "past_key").name = "past_key_values.0.key"
    mask_from_lengths(model)
    names = [v.name for v in model.graph.inputs]
    assert names == ["input_ids", "attention_mask", "past_key_values.0.key"]
    ir.save(model, tmp_path / "model.onnx")
    session = open_session(tmp_path / "model.onnx", {})
    found = session.run(
        {
            "input_ids": np.zeros((len(mask), width), np.int64),
            "attention_mask": np.array(mask, np.int64),
            "past_key_values.0.key": np.zeros((len(mask), 1, capacity, 2), np.float32),
        }
    )
    assert found["last"].tolist() == last
    assert found["new"].tolist() == new
    assert found["slots"] == slots


def test_positions_become_an_input(tmp_path: Path) -> None:
    from headport.export.functions import define_functions

    text = """<ir_version: 10, opset_import: ["" : 23, "headport" : 1]>
    backbone (int64[batch, sequence] input_ids, int64[batch, total_sequence] attention_mask)
      => (int64[batch, sequence] doubled)
    {
      positions = headport.Positions (attention_mask, input_ids)
      doubled = Add (positions, positions)
    }"""
    model = parse(text)
    define_functions(model)
    assert take_position_ids(model)
    assert [v.name for v in model.graph.inputs][2:] == ["position_ids"] and not model.functions
    found = run(model, tmp_path, input_ids=[[7, 7]], attention_mask=[[0, 1]], position_ids=[[1, 0]])
    assert found["doubled"].tolist() == [[2, 0]]
    assert not take_position_ids(parse(BACKBONE))
