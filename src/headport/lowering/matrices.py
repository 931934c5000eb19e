"""Finding the matrices of a backbone: what multiplies with them, before and after quantising.

    before: MatMul(x, W [K, N])   MatMul(x, Transpose(W [N, K]))   Gemm(x, W, b?)
    after:  Reshape → Gemm(x, Ŵ [N, K], transB=1) → Reshape,  Ŵ = DequantizeLinear(…) or Cast(…)

`headport.quantize.backbone_pass` makes the second form of the first; lowering passes start from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from headport.lowering.emit import attribute

__all__ = ["Matrix", "Product", "Table", "find_matrices", "find_products", "find_tables"]

_TRANSPOSED = ".transposed"  # the suffix of headport/export/hygiene.py
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
# By operator of Ŵ, the suffixes of the tensors it is made of.
_RESTORED_BY = {"DequantizeLinear": (".int8", ".int4"), "Cast": (".fp16",)}


@dataclass(frozen=True)
class Matrix:
    """A weight that products read, and nothing else does."""

    name: str  # as the checkpoint calls it
    value: ir.Value  # the initialiser
    rows_first: bool  # it is stored [N, K], outputs first
    products: tuple[ir.Node, ...]  # MatMul or Gemm, in graph order

    @property
    def shape(self) -> tuple[int, int]:
        """N outputs, K inputs."""
        assert self.value.shape is not None
        first, second = (int(d) for d in self.value.shape.numpy())
        return (first, second) if self.rows_first else (second, first)


@dataclass(frozen=True)
class Table:
    """A weight [V, H] that is looked up by token id, and nothing else does."""

    name: str
    value: ir.Value
    gathers: tuple[ir.Node, ...]


@dataclass(frozen=True)
class Product:
    """y = x Ŵᵀ in a quantised backbone."""

    name: str  # of the matrix
    restore: ir.Node  # gives Ŵ
    product: ir.Node  # the Gemm

    # Looked for each time: a product may read what another one gives, which a pass replaces.
    @property
    def x(self) -> ir.Value:
        """Input, float [..., K]."""
        value = self.product.inputs[0]
        assert value is not None
        return _before(value)

    @property
    def y(self) -> ir.Value:
        """Output, float [..., N]."""
        return _after(self.product.outputs[0])


def find_matrices(model: ir.Model) -> tuple[list[Matrix], dict[str, str]]:
    """All matrices in graph order, and those that are left: name → why.

    A weight of two or more dimensions is left where something else than a product reads it as
    well, and where it has more than two.
    """
    matrices, left = [], {}
    tables = {id(table.value) for table in find_tables(model)}
    order = {id(node): index for index, node in enumerate(model.graph)}
    for value in model.graph.initializers.values():
        if not _is_weight(value) or id(value) in tables:
            continue
        name = (value.name or "").removesuffix(_TRANSPOSED)
        found = list(_readers(value))
        sides = {side for _, side in found}
        if len(value.shape or ()) != 2 or None in sides or len(sides) != 1:
            users = sorted({node.op_type for node, _ in found})
            left[name] = f"read by {', '.join(users) or 'nothing'}"
            continue
        (rows_first,) = sides
        nodes = sorted((node for node, _ in found), key=lambda node: order[id(node)])
        assert rows_first is not None
        matrices.append(Matrix(name, value, rows_first, tuple(nodes)))
    return sorted(matrices, key=lambda m: order[id(m.products[0])]), left


def _is_weight(value: ir.Value) -> bool:
    dims = value.shape or ()
    return len(dims) >= 2 and value.dtype in _FLOATS and 0 not in dims


def _readers(value: ir.Value) -> Iterator[tuple[ir.Node, bool | None]]:
    # (node, whether it reads [N, K]); None where it is no product.
    for use in value.uses():
        node = use.node
        if node.op_type == "Transpose" and not node.domain and _swaps(node):
            for product, side in _readers(node.outputs[0]):
                yield product, None if side is None else not side
        else:
            yield node, _side(node, use.idx)
    if value.is_graph_output():
        yield next(iter(value.graph or ())), None


def _swaps(node: ir.Node) -> bool:
    return tuple(attribute(node, "perm", (1, 0))) == (1, 0)


def _side(node: ir.Node, place: int) -> bool | None:
    if node.domain or place != 1:
        return None
    if node.op_type == "MatMul":
        return False
    plain = (attribute(node, "transA", 0), attribute(node, "alpha", 1.0)) == (0, 1.0)
    if node.op_type == "Gemm" and plain and attribute(node, "beta", 1.0) == 1.0:
        return bool(attribute(node, "transB", 0))
    return None


def find_tables(model: ir.Model) -> list[Table]:
    """The tables of input embeddings: what Gather looks up by `input_ids`."""
    tables = []
    for value in model.graph.initializers.values():
        nodes = [use.node for use in value.uses()]
        if _is_weight(value) and len(value.shape or ()) == 2 and nodes:
            alone = all(n.op_type == "Gather" and n.inputs[0] is value for n in nodes)
            if alone and all(attribute(n, "axis", 0) == 0 and _by_id(n.inputs[1]) for n in nodes):
                tables.append(Table(value.name or "", value, tuple(nodes)))
    return tables


def _by_id(value: ir.Value | None) -> bool:
    while value is not None and not value.is_graph_input():
        node = value.producer()
        if node is None or node.op_type not in ("Cast", "Reshape", "Unsqueeze", "Squeeze"):
            return False
        value = node.inputs[0]
    return value is not None and value.name == "input_ids"


def find_products(model: ir.Model) -> list[Product]:
    """The products of a quantised backbone, in graph order."""
    found = []
    for node in model.graph:
        restored = node.inputs[1] if node.op_type == "Gemm" else None
        restore = restored.producer() if restored is not None else None
        name = None if restore is None else _matrix_name(restore)
        if name is not None and restore is not None and attribute(node, "transB", 0) == 1:
            found.append(Product(name, restore, node))
    return found


def _matrix_name(restore: ir.Node) -> str | None:
    stored = restore.inputs[0]
    if stored is None or not stored.is_initializer():
        return None
    for suffix in _RESTORED_BY.get(restore.op_type, ()):
        if (stored.name or "").endswith(suffix):
            return (stored.name or "").removesuffix(suffix)
    return None


def _before(x: ir.Value) -> ir.Value:
    node = x.producer()
    return node.inputs[0] if _is_ours(node) and node.inputs[0] is not None else x  # type: ignore


def _after(y: ir.Value) -> ir.Value:
    uses = list(y.uses())
    node = uses[0].node if len(uses) == 1 else None
    return node.outputs[0] if _is_ours(node) else y  # type: ignore[union-attr]


def _is_ours(node: ir.Node | None) -> bool:
    # A Reshape that the quantising pass put around a Gemm, told from the model's own by its name.
    return node is not None and node.op_type == "Reshape" and (node.name or "").startswith(FLAT)


FLAT = "headport.flat."  # begins the names of Reshape nodes around a Gemm
