"""Rotary positions inside the attention operator, from tables made once.

    q, k = RotaryEmbedding(q, cos(p), sin(p)), RotaryEmbedding(k, cos(p), sin(p))
    GroupQueryAttention(q, k, …)
      →  GroupQueryAttention(q, k, …, cos_cache, sin_cache) <do_rotary = 1>

The tables are what the graph itself computes for positions 0, 1, 2, …: whatever scales a model's
angles is in them. Angles that depend on more than a token's own position, as where a scaling sets
in beyond a length, have no table; their rotation stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from headport.lowering.emit import attribute
from headport.lowering.match import Match
from headport.lowering.positions import step_positions
from headport.lowering.subgraphs import run_between

__all__ = ["rotate_inside"]

_OPERATOR = "GroupQueryAttention"
_COS, _SIN = 7, 8  # places of its inputs
# What the operator takes, by its own check of the tables: heads of whole sixteens, and at most
# half a head of angles, in eights.
_HEAD_MULTIPLE, _ANGLE_MULTIPLE = 16, 8
# Tables may take this share of the bytes of the other constants, so that a small model with a very
# long context is not made larger by them.
_LARGEST_SHARE = 1 / 32
_LEAST_BYTES = 1 << 22
_PROBES = np.array([[3, 0, 5, 5, 1, 2, 4]])  # positions out of order, and none of them large


@dataclass(frozen=True)
class _Rotation:
    """One attention whose query and key turn by the same angles."""

    attention: ir.Node
    turns: tuple[ir.Node, ir.Node]  # RotaryEmbedding of query and key
    cos: ir.Value
    sin: ir.Value

    @property
    def x(self) -> ir.Value:
        """The query before it turns, [batch, heads, sequence, size]."""
        value = self.turns[0].inputs[0]
        assert value is not None
        return value

    @property
    def head_size(self) -> int:
        """Numbers of a head."""
        size = self.x.shape[3] if self.x.shape is not None else None
        assert isinstance(size, int), "attention was lowered, so its sizes are known"
        return size


def rotate_inside(model: ir.Model, slots: int) -> list[Match]:
    """Move every rotation that a table describes into its attention.

    Args:
        model: A backbone whose attention is lowered; changed in place.
        slots: Positions that a cache may have.
    """
    tables: dict[tuple[int, int], tuple[ir.Value, ir.Value] | str] = {}
    matches: list[Match] = []
    for rotation in list(_rotations(model)):
        key = (id(rotation.cos), id(rotation.sin))
        if key not in tables:
            tables[key] = _tables(model, rotation, slots, len(tables))
        found = tables[key]
        where = rotation.attention.name or _OPERATOR
        if isinstance(found, str):
            matches.append(Match(where, "rotary positions outside attention", None, found))
            continue
        _move(rotation, found)
        matches.append(Match(where, "RotaryEmbedding of q and k", f"inside {_OPERATOR}"))
    return matches


def _rotations(model: ir.Model) -> Iterator[_Rotation]:
    for node in model.graph:
        if node.op_type != _OPERATOR:
            continue
        turns = [_turn(value) for value in node.inputs[:2]]
        if turns[0] is None or turns[1] is None:
            continue
        cos, sin = turns[0].inputs[1:3]
        same = list(turns[1].inputs[1:]) == [cos, sin] and len(turns[0].inputs) == len("xcs")
        if (
            same
            and cos is not None
            and sin is not None
            and _interleaved(turns[0]) == _interleaved(turns[1])
        ):
            yield _Rotation(node, (turns[0], turns[1]), cos, sin)


def _turn(flat: ir.Value | None) -> ir.Node | None:
    """The rotation whose result, as it is, the attention reads: flat = Reshape(Transpose(it))."""
    value = flat
    for op_type in ("Reshape", "Transpose", "RotaryEmbedding"):
        node = value.producer() if value is not None else None
        alone = value is not None and len(list(value.uses())) == 1
        if node is None or node.op_type != op_type or node.domain or not alone:
            return None
        value = node.inputs[0]
    return node


def _interleaved(turn: ir.Node) -> int:
    return int(attribute(turn, "interleaved", 0))


def _tables(
    model: ir.Model, rotation: _Rotation, slots: int, index: int
) -> tuple[ir.Value, ir.Value] | str:
    """Tables of cos and sin, [slots, angles], as constants of the graph, or why there are none."""
    for value in (rotation.cos, rotation.sin):
        value.type = value.type or rotation.x.type
    probes = _PROBES % slots
    found = run_between(
        model.graph,
        step_positions(model),
        [rotation.cos, rotation.sin],
        [np.arange(slots)[None], probes],
    )
    if found is None:
        return "its angles depend on more than the position"
    whole, probed = found
    if not all(np.array_equal(t[0][probes[0]], p[0]) for t, p in zip(whole, probed, strict=True)):
        return "its angles depend on the other positions of a step"
    size, angles = rotation.head_size, whole[0].shape[-1]
    turned = int(attribute(rotation.turns[0], "rotary_embedding_dim", 0)) or size
    if size % _HEAD_MULTIPLE or angles % _ANGLE_MULTIPLE or 2 * angles != turned:
        return f"{_OPERATOR} does not turn {2 * angles} of {size} numbers of a head"
    taken = sum(table.nbytes for table in whole)
    given = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value)
    if taken > max(given * _LARGEST_SHARE, _LEAST_BYTES):
        return f"tables for {slots} positions would take {taken / 1e6:.1f} MB"
    made = []
    for name, table in zip(("cos", "sin"), whole, strict=True):
        tensor = ir.tensor(np.ascontiguousarray(table[0]), name=f"headport.rotary.{index}.{name}")
        made.append(ir.val(tensor.name, const_value=tensor))
        model.graph.register_initializer(made[-1])
    return made[0], made[1]


def _move(rotation: _Rotation, tables: tuple[ir.Value, ir.Value]) -> None:
    node = rotation.attention
    for turn in rotation.turns:
        before = turn.inputs[0]
        assert before is not None
        ir.convenience.replace_all_uses_with(turn.outputs[0], before)
    for place, table in zip((_COS, _SIN), tables, strict=True):
        node.replace_input_with(place, table)
    node.attributes["do_rotary"] = ir.AttrInt64("do_rotary", 1)
    node.attributes["rotary_interleaved"] = ir.AttrInt64(
        "rotary_interleaved", _interleaved(rotation.turns[0])
    )
