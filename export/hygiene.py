"""What an exported graph still needs before it is fit to ship: names, dimensions, no leftovers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from headport.cache_ports import SOURCE_MASK, free_dimensions, is_cross, is_state
from headport.errors import ExportError
from headport.export.functions import ATTENTION, DOMAIN, define_functions
from headport.export.names import name_nodes
from headport.export.onnx_weights import finite
from headport.given_rows import EMBEDDING_ROWS, EMBEDDINGS
from headport.graphs import BlockTensor

__all__ = [
    "check_attention",
    "check_constants",
    "finish_graph",
    "store_transposed",
]

_BLOCK_BYTES = 1 << 24
_MASKING = ("Where", "ScatterElements")
_FREE = {
    "input_ids": ("batch", "sequence"),
    "attention_mask": ("batch", "total_sequence"),
    "hidden_states": ("batch", "sequence"),
    EMBEDDING_ROWS: ("batch", "sequence"),
    EMBEDDINGS: ("given",),
    SOURCE_MASK: ("source_batch", "source"),
}


def store_transposed(model: ir.Model) -> None:
    """Replace `Transpose(weight)` by a weight that is transposed when it is written.

    A weight with another use keeps its Transpose, or it would be stored twice.
    """
    for node in list(model.graph):
        value = node.inputs[0] if node.inputs else None
        if node.op_type != "Transpose" or value is None or value.const_value is None:
            continue
        perm = node.attributes["perm"].as_ints() if "perm" in node.attributes else (1, 0)
        if len(value.uses()) != 1 or tuple(perm) != (1, 0):
            continue
        transposed = _transposed(value)
        model.graph.register_initializer(transposed)
        ir.convenience.replace_all_uses_with(node.outputs[0], transposed)
        model.graph.remove(node, safe=True)
        assert value.name is not None
        del model.graph.initializers[value.name]


def _transposed(value: ir.Value) -> ir.Value:
    tensor = value.const_value
    assert tensor is not None
    name = f"{value.name}.transposed"
    rows, columns = reversed(tensor.shape.numpy())
    step = max(1, _BLOCK_BYTES * rows // max(1, tensor.nbytes))

    def pieces() -> Iterator[npt.NDArray[Any]]:
        source = tensor.numpy()
        for start in range(0, rows, step):
            yield finite(np.ascontiguousarray(source[:, start : start + step].T), kind, name)

    kind = tensor.dtype
    lazy = BlockTensor(pieces, kind, (rows, columns), name)
    return ir.Value(name=name, type=ir.TensorType(kind), shape=lazy.shape, const_value=lazy)


def finish_graph(
    model: ir.Model,
    cache_dims: Mapping[str, tuple[int, ...]],
    name: str = "backbone",
    free: Mapping[str, tuple[str, ...]] = _FREE,
) -> None:
    """Make an optimised backbone or encoder fit to ship.

    Args:
        model: The graph; changed in place.
        cache_dims: Name of each cache port (`past_key_values.N.key`, `present_conv_states.N` …) →
            its fixed dimensions, in order: heads and size per head, or all of a state but batch.
        name: Of the graph.
        free: Name of each other port → symbols of its first dimensions; the rest are fixed.
    """
    graph = model.graph
    graph.name = name
    model.producer_name, model.producer_version = "headport", None
    _order_ports(model)
    _take_batch_from_ids(model)
    _type_norms(model)
    _bound_masks(model)
    common_passes.CommonSubexpressionEliminationPass()(model)
    common_passes.RemoveUnusedNodesPass()(model)
    _name_dimensions(model, cache_dims, free)
    define_functions(model)
    name_nodes(model, prefix="model.")
    _strip(model)


def _order_ports(model: ir.Model) -> None:
    # Caches layer by layer, key before value, as other toolkits list them; then states.
    for ports in (model.graph.inputs, model.graph.outputs):
        ports[:] = sorted(ports, key=_port_order)


def _port_order(value: ir.Value) -> tuple[int, int, str]:
    kind, *rest = (value.name or "").split(".")
    if not rest:
        return (0, 0, "")
    if is_state(kind):
        return (2, int(rest[0]), kind)
    return (3 if is_cross(kind) else 1, int(rest[0]), rest[1])


def _take_batch_from_ids(model: ir.Model) -> None:
    # The exporter reads the batch size off any input; a lowering that replaces caches and masks
    # must not find other nodes depending on them.
    graph = model.graph
    ids = next((value for value in graph.inputs if value.name == "input_ids"), None)
    if ids is None:
        return
    for node in graph:
        source = node.inputs[0] if node.inputs else None
        if node.op_type != "Shape" or source is ids or not (source and source.is_graph_input()):
            continue
        start = node.attributes["start"].as_int() if "start" in node.attributes else 0
        end = node.attributes["end"].as_int() if "end" in node.attributes else None
        if (start, end) == (0, 1):
            node.replace_input_with(0, ids)


def _type_norms(model: ir.Model) -> None:
    # The optimiser fuses a half-precision norm whose weight is applied in float32 into an operator
    # with two types, which type inference gets wrong; the input is widened as the model does it.
    for node in list(model.graph):
        if node.op_type != "RMSNormalization":
            continue
        x, scale, y = node.inputs[0], node.inputs[1], node.outputs[0]
        assert x is not None and scale is not None
        if x.dtype == scale.dtype or scale.dtype is None:
            continue
        cast = ir.node("Cast", [x], {"to": scale.dtype})
        cast.outputs[0].name = f"{y.name}_input"
        cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(scale.dtype), x.shape
        model.graph.insert_before(node, cast)
        node.replace_input_with(0, cast.outputs[0])
        y.type = ir.TensorType(scale.dtype)


def _bound_masks(model: ir.Model) -> None:
    # Routers mask experts with an infinity. What ranks last and weighs nothing does so as well as
    # the largest finite number, which no cast turns into a NaN.
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.size != 1 or not tensor.dtype.is_floating_point():
            continue
        uses = value.uses()
        if not uses or any(use.node.op_type not in _MASKING for use in uses):
            continue
        number: Any = tensor.numpy()
        if np.isinf(number).all():
            bounded = np.nan_to_num(number, nan=np.nan)
            value.const_value = ir.Tensor(bounded, tensor.dtype, name=value.name)


def _name_dimensions(
    model: ir.Model,
    cache_dims: Mapping[str, tuple[int, ...]],
    free_dims: Mapping[str, tuple[str, ...]],
) -> None:
    graph = model.graph
    renamed: dict[str, str] = {}
    for value in (*graph.inputs, *graph.outputs):
        assert value.name is not None and value.shape is not None
        old = list(value.shape)
        if value.name in free_dims:
            free_axes = free_dims[value.name]
            rest = (d for d in old[len(free_axes) :] if isinstance(d, int))
            new: list[int | str] = [*free_axes, *rest]
        else:
            fixed, free = iter(cache_dims[value.name]), free_dimensions(value.name)
            new = [free[axis] if axis in free else next(fixed) for axis in range(len(old))]
        faults = [(o, n) for o, n in zip(old, new, strict=True) if isinstance(o, int) and o != n]
        if faults:
            raise ExportError(
                f"{value.name} was traced with shape {value.shape}, {new} was expected: "
                "the model fixes a dimension that must stay free"
            )
        for o, n in zip(old, new, strict=True):
            if not isinstance(o, int) and isinstance(n, str) and o.value is not None:
                renamed.setdefault(str(o.value), n)
        value.shape = ir.Shape(new)
    for node in graph:
        if node.op_type in ("Cos", "Sin") and node.inputs[0] is not None:
            # The rotary fusion makes these without a type.
            node.outputs[0].type, node.outputs[0].shape = node.inputs[0].type, node.inputs[0].shape
        for value in node.outputs:
            if value.shape is not None and not value.is_graph_output():
                value.shape = ir.Shape([_renamed(d, renamed) for d in value.shape])


def _renamed(dim: int | ir.SymbolicDim, names: Mapping[str, str]) -> int | str | None:
    if isinstance(dim, int):
        return dim
    return names.get(str(dim.value)) if dim.value is not None else None


def _strip(model: ir.Model) -> None:
    # Exporters record stack traces and source paths of the machine in metadata.
    common_passes.ClearMetadataAndDocStringPass()(model)
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    for node in model.graph:
        for value in node.outputs:
            value.metadata_props.clear()


def check_attention(model: ir.Model, layers: int, architecture: str) -> None:
    """Raise `ExportError` unless every layer's attention became the one operator."""
    found = sum(
        node.domain == DOMAIN and node.op_type.startswith(ATTENTION) for node in model.graph
    )
    if found != layers:
        raise ExportError(
            f"{architecture}: {layers} attention layers expected in the graph, {found} found; "
            "this architecture is not supported yet"
        )


def check_constants(model: ir.Model) -> None:
    """Raise `ExportError` if a floating-point constant is NaN or infinite.

    Weights that are read when they are written are looked at then.
    """
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or isinstance(tensor, BlockTensor):
            continue
        finite(tensor.numpy(), tensor.dtype, value.name or "")
