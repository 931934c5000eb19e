"""Running the products of a written backbone: each alone on given rows, and all on real ones.

Both runs are of the written file itself with other inputs and outputs, so what is looked at is the
node, the tensor and the kernel that ship.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from headport.bundle import Bundle
from headport.cache_ports import is_state
from headport.errors import ParityError
from headport.given_rows import EMBEDDING_ROWS
from headport.kernels import GAMMA, NORMED, PRODUCT, PRODUCT_OUTPUTS, SKIP, UNGATED
from headport.lowering.matrices import find_products
from headport.lowering.siblings import INPUT, OUTPUTS, PARTS, SUMS
from headport.session import SessionSettings, open_session

__all__ = [
    "Observed",
    "WrittenProduct",
    "open_up",
    "run_alone",
    "run_lookup",
    "run_prompt",
    "run_real",
    "written_products",
]

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]

_TOKENS = 12  # of the real run
_FILE = "products.onnx"  # exists while its session is opened
_PRODUCTS = ("MatMulNBits", PRODUCT)
_PACKED = ".nbits"  # ends the names of weights that lowering has packed
_SUFFIXES = (".int8", ".int4", ".fp16")


@dataclass(frozen=True)
class WrittenProduct:
    """One product of a written backbone."""

    name: str  # of the matrix
    node: ir.Node  # Gemm, MatMulNBits or BlockMatMul
    size: tuple[int, int]  # N, K
    start: int = 0  # where its outputs begin, in a product that computes several
    around: tuple[ir.Value, ir.Value] | None = None  # x and y, where the node has others

    @property
    def x(self) -> ir.Value:
        """Input, float [..., K]."""
        value = self.around[0] if self.around else self.node.inputs[0]
        assert value is not None
        return value

    @property
    def y(self) -> ir.Value:
        """Output, float [..., ≥ N]."""
        return self.around[1] if self.around else self.node.outputs[0]

    def read(self, rows: ir.Value) -> None:
        """Multiply these rows, as they are."""
        if INPUT in self.node.metadata_props:  # x becomes two rows on its way
            ir.convenience.replace_all_uses_with(self.x, rows)
            return
        # Others that read x may be given other rows.
        self.node.replace_input_with(0, rows)
        if _has_norm(self.node):
            for place in (SKIP, GAMMA):
                self.node.replace_input_with(place, None)

    def own(self, found: Float64) -> Float64:
        """Its columns of the output, [rows, N]."""
        return found[:, self.start : self.start + self.size[0]]


@dataclass(frozen=True)
class Observed:
    """What a product was given and gave."""

    name: str
    x: Float64  # [rows, K]
    y: Float64  # [rows, N]


def written_products(model: ir.Model) -> list[WrittenProduct]:
    """The products with stored matrices, portable and lowered, in graph order."""
    found = []
    portable = {id(p.product): p for p in find_products(model)}
    for node in model.graph:
        if id(node) in portable:
            product = portable[id(node)]
            shape = product.restore.inputs[0].shape  # type: ignore[union-attr]
            assert shape is not None
            N, K = (int(d) for d in shape.numpy())
            found.append(WrittenProduct(product.name, node, (N, K)))
        elif node.op_type in _PRODUCTS and node.inputs[1] is not None:
            found += _written(model.graph, node, (node.inputs[1].name or "").split(PARTS))
    return found


def _written(graph: ir.Graph, node: ir.Node, weights: Sequence[str]) -> Iterator[WrittenProduct]:
    N, K = node.attributes["N"].as_int(), node.attributes["K"].as_int()
    counts = [int(n) for n in node.metadata_props.get(OUTPUTS, str(N)).split()]
    for index, (weight, count) in enumerate(zip(weights, counts, strict=True)):
        name = weight.removesuffix(_PACKED)
        for suffix in _SUFFIXES:
            name = name.removesuffix(suffix)
        if INPUT in node.metadata_props:
            ends = (node.metadata_props[INPUT], node.metadata_props[SUMS].split(PARTS)[index])
            x, y = (_value(graph, end) for end in ends)
            yield WrittenProduct(name, node, (count, K), around=(x, y))
        else:
            around = open_up(node) if node.op_type == PRODUCT else None
            yield WrittenProduct(name, node, (count, K), sum(counts[:index]), around)


def _has_norm(node: ir.Node) -> bool:
    return node.op_type == PRODUCT and len(node.inputs) > GAMMA and node.inputs[GAMMA] is not None


def open_up(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """What the product itself takes and gives, where its node does more; None: nothing more.

    Args:
        node: BlockMatMul; given the outputs that this takes.
    """
    is_gated, has_norm = node.attributes["activation"].as_string() != "none", _has_norm(node)
    if not (is_gated or has_norm):
        return None
    name = node.outputs[0].name
    if len(node.outputs) < PRODUCT_OUTPUTS:
        kept = len(node.outputs)
        node.resize_outputs(PRODUCT_OUTPUTS)
        for value in node.outputs[kept:]:
            value.name = ""
    for place in ((NORMED,) if has_norm else ()) + ((UNGATED,) if is_gated else ()):
        node.outputs[place].name = node.outputs[place].name or f"{name}.inner.{place}"
    x = node.outputs[NORMED] if has_norm else node.inputs[0]
    assert x is not None
    return x, node.outputs[UNGATED if is_gated else 0]


def _value(graph: ir.Graph, name: str) -> ir.Value:
    return next(value for node in graph for value in node.outputs if value.name == name)


@contextmanager
def _opened(bundle: Bundle, model: ir.Model, settings: SessionSettings | None) -> Iterator[Any]:
    # Beside the bundle's own graphs, because external data is found from there.
    file = bundle.path / _FILE
    ir.save(model, file)
    try:
        yield open_session(file, bundle.manifest.session_options, settings)
    finally:
        file.unlink()


def run_alone(
    bundle: Bundle,
    rows: Callable[[str, int], Array],
    settings: SessionSettings | None = None,
) -> list[Observed]:
    """Every product on rows of our own.

    Args:
        bundle: Written, sealed or not.
        rows: A matrix and its K → float32 [n, K]; one array, if many have the same.
        settings: Session settings.
    """
    model = ir.load(bundle.path / bundle.manifest.backbone.file)
    graph = model.graph
    products = written_products(model)
    given = [rows(product.name, product.size[1]) for product in products]
    inputs: dict[int, ir.Value] = {}
    feeds: dict[str, Array] = {}
    for product, array in zip(products, given, strict=True):
        if id(array) not in inputs:
            name = f"rows_{len(inputs)}"
            inputs[id(array)] = ir.val(name, ir.DataType.FLOAT, ["rows", array.shape[1]])
            feeds[name] = array
        product.read(inputs[id(array)])
        product.y.type = ir.TensorType(ir.DataType.FLOAT)
        product.y.shape = None
    graph.inputs[:] = list(inputs.values())
    graph.outputs[:] = list({id(p.y): p.y for p in products}.values())
    common_passes.RemoveUnusedNodesPass()(model)
    with _opened(bundle, model, settings) as session:
        found = session.run(feeds)
    return [
        Observed(p.name, array.astype(np.float64), p.own(found[p.y.name or ""].astype(float)))
        for p, array in zip(products, given, strict=True)
    ]


def run_real(bundle: Bundle, settings: SessionSettings | None = None) -> list[Observed]:
    """Every product on what reaches it in a prompt of random tokens."""
    model = ir.load(bundle.path / bundle.manifest.backbone.file)
    products = written_products(model)
    found = run_prompt(bundle, model, [v for p in products for v in (p.x, p.y)], settings)
    return [Observed(p.name, found[p.x.name or ""], p.own(found[p.y.name or ""])) for p in products]


def run_prompt(
    bundle: Bundle,
    model: ir.Model,
    watched: Iterable[ir.Value],
    settings: SessionSettings | None = None,
) -> dict[str, Float64]:
    """Values inside of a written backbone, on a prompt of random tokens.

    Args:
        bundle: Written, sealed or not.
        model: Its backbone, as it was loaded; its outputs change.
        watched: What to return.
        settings: Session settings.

    Returns:
        By name, [tokens, width].
    """
    outputs = {id(v): v for v in watched}
    for value in outputs.values():
        value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
    model.graph.outputs[:] = list(outputs.values())
    feeds = _prompt(model.graph.inputs, bundle.manifest.vocabulary.size, _tokens(bundle))
    with _opened(bundle, model, settings) as session:
        return {name: _rows(value) for name, value in session.run(feeds).items()}


def run_lookup(
    bundle: Bundle,
    table: str,
    token_ids: Iterable[npt.NDArray[np.int64]],
    settings: SessionSettings | None = None,
) -> Iterator[Float64]:
    """The rows that a written backbone looks up in a stored table.

    Args:
        bundle: Written, sealed or not.
        table: Name of the weight that was stored.
        token_ids: Each [n].
        settings: Session settings.

    Yields:
        For each, [n, H].
    """
    model = ir.load(bundle.path / bundle.manifest.backbone.file)
    graph = model.graph
    rows = [v for n in graph for v in n.outputs if v.name == f"{table}.rows"]
    if not rows:
        raise ParityError(f"the written backbone looks nothing up in {table}; nothing was written")
    rows[0].type = ir.TensorType(ir.DataType.FLOAT)
    graph.outputs[:] = rows
    common_passes.RemoveUnusedNodesPass()(model)
    graph.inputs[:] = [port for port in graph.inputs if port.name == "input_ids"]
    with _opened(bundle, model, settings) as session:
        for ids in token_ids:
            yield _rows(session.run({"input_ids": ids[None]})[rows[0].name or ""])


def _tokens(bundle: Bundle) -> int:
    return max(1, min(_TOKENS, bundle.manifest.model.max_context - 1))


def _rows(array: Array) -> Float64:
    return array.reshape(-1, array.shape[-1]).astype(np.float64)


def _prompt(ports: Sequence[ir.Value], vocab_size: int, tokens: int) -> dict[str, Array]:
    # One row of `tokens` tokens and an empty cache, in the terms of a portable or lowered backbone.
    rng = np.random.Generator(np.random.Philox(key=5))
    scalars: dict[str, Array] = {
        "input_ids": rng.integers(0, vocab_size, (1, tokens)),
        "attention_mask": np.ones((1, tokens), np.int64),
        "seqlens_k": np.array([tokens - 1], np.int32),
        "query_seqlens": np.array([tokens], np.int32),
        "total_sequence_length": np.array(tokens, np.int32),
        "position_ids": np.arange(tokens)[None],
        EMBEDDING_ROWS: np.full((1, tokens), -1, np.int64),
    }
    lowered = any(port.name == "seqlens_k" for port in ports)
    feeds = {}
    for port in ports:
        name = port.name or ""
        if name in scalars:
            feeds[name] = scalars[name]
            continue
        assert port.shape is not None and port.dtype is not None
        free = 1 if is_state(name) else tokens if lowered else 0
        named = {"batch": 1, "given": 1}  # a row of embeddings that no place reads
        dims = [d if isinstance(d, int) else named.get(str(d.value), free) for d in port.shape]
        feeds[name] = np.zeros(dims, port.dtype.numpy())
    return feeds
