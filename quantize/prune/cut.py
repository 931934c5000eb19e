"""Cutting a bundle's graphs down to kept tokens, and saying so in its manifest."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from headport.errors import BundleError, QuantizeError
from headport.ledger import find_tensor
from headport.manifest import Head, Manifest
from headport.quantize.prune.check import CutTensor
from headport.quantize.prune.rows import keep_head_rows, keep_table_rows

__all__ = ["columns_of", "cut_heads", "cut_tables", "described_heads"]

Int64 = npt.NDArray[np.int64]

# What the formats of `headport.quantize.formats` add to a weight's name.
_SUFFIXES = (".int8", ".int4", ".uint4", ".fp16", ".bf16", ".fp8", ".scale", ".zero")


def columns_of(kept: Int64, available: Int64) -> Int64:
    """The head's column of each kept id, [K].

    Args:
        kept: Ids, each of them available.
        available: Id of each column.
    """
    order = np.argsort(available)
    found: Int64 = order[np.searchsorted(available, kept, sorter=order)]
    return found


def cut_heads(
    manifest: Manifest, models: Mapping[str, ir.Model], columns: Int64, *, alone: bool
) -> tuple[CutTensor, ...]:
    """Leave every head, and what gives all logits beside candidates, some of its columns.

    Args:
        manifest: Of the bundle that is pruned.
        models: Its graphs; changed in place.
        columns: Columns that stay, in their new order, [K].
        alone: The backbone stays whole, so what it shares with a head is shared no longer.

    Raises:
        QuantizeError: If a head gives more candidates than tokens are kept, or has a form whose
            rows cannot be told.
    """
    for name, head in manifest.heads.items():
        if head.candidates is not None and head.candidates.count >= len(columns):
            raise QuantizeError(
                f"head {name} gives {head.candidates.count} candidates per row, which takes more "
                f"tokens than that, and {len(columns)} would be kept; prune first, then quantise"
            )
    found: list[CutTensor] = []
    for head in manifest.heads.values():
        for graph in _graphs_of(head):
            names = keep_head_rows(models[graph], columns, head.vocab_size)
            renamed = _rename_shared(manifest, models[graph], graph, names) if alone else {}
            found += [CutTensor(graph, each, renamed.get(each, each)) for each in names]
    return tuple(found)


def cut_tables(
    manifest: Manifest, models: Mapping[str, ir.Model], kept: Int64
) -> tuple[CutTensor, ...]:
    """Leave the backbone the input embeddings of some tokens.

    Args:
        manifest: Of the bundle that is pruned.
        models: Its graphs; changed in place.
        kept: Ids that stay, in their new order, [K].

    Raises:
        QuantizeError: If the backbone uses token ids for more than looking up rows.
    """
    graph = manifest.backbone_name
    names = keep_table_rows(models[graph], kept)
    return tuple(CutTensor(graph, name, name) for name in names)


def described_heads(
    before: Manifest, after: Manifest, cuts: tuple[CutTensor, ...], count: int
) -> dict[str, Head]:
    """Manifest entries of heads that were cut.

    Args:
        before: Of the bundle that is pruned.
        after: With the written graphs and ledger.
        cuts: What was cut.
        count: Kept tokens, K.
    """
    renamed = {(cut.graph, cut.before): cut.after for cut in cuts}

    def entry(graph: str, ledger_name: str) -> tuple[str, bool]:
        """The ledger's name of a weight, and whether the backbone reads the same entry."""
        initializer = _initializer(before, graph, ledger_name)
        tensor = find_tensor(after, graph, renamed.get((graph, initializer), initializer))
        return tensor.name, _reads_backbone(after, tensor.consumers)

    heads = {}
    for name, head in after.heads.items():
        weight, tied = entry(head.graph, head.weight)
        form = head.candidates
        if form is not None:
            original, original_tied = entry(form.full, form.original)
            form = msgspec.structs.replace(form, original=original, original_tied=original_tied)
        heads[name] = msgspec.structs.replace(
            head, vocab_size=count, weight=weight, tied=tied, candidates=form
        )
    return heads


def _graphs_of(head: Head) -> list[str]:
    return [head.graph] if head.candidates is None else [head.graph, head.candidates.full]


def _rename_shared(
    manifest: Manifest, model: ir.Model, graph: str, names: list[str]
) -> dict[str, str]:
    """Rename what the backbone holds whole under the same name: a name means one tensor."""
    stems = {_stem(name) for name in names if _is_shared(manifest, graph, name)}
    renamed = {}
    for name in names:
        if (stem := _stem(name)) in stems:
            renamed[name] = f"{stem}.kept{name.removeprefix(stem)}"
    for old, new in renamed.items():
        value = model.graph.initializers.pop(old)
        value.name = new
        assert value.const_value is not None
        value.const_value.name = new
        model.graph.initializers[new] = value
    return renamed


def _stem(name: str) -> str:
    return next((name.removesuffix(s) for s in _SUFFIXES if name.endswith(s)), name)


def _is_shared(manifest: Manifest, graph: str, name: str) -> bool:
    return any(
        f"{graph}:{name}" in tensor.consumers and _reads_backbone(manifest, tensor.consumers)
        for tensor in manifest.tensors
    )


def _reads_backbone(manifest: Manifest, consumers: tuple[str, ...]) -> bool:
    readers = {consumer.partition(":")[0] for consumer in consumers}
    return any(manifest.graphs[reader].role == "backbone" for reader in readers)


def _initializer(manifest: Manifest, graph: str, ledger_name: str) -> str:
    """A tensor's name inside a graph, from the ledger's name for it."""
    for tensor in manifest.tensors:
        names = [c.partition(":")[2] for c in tensor.consumers if c.startswith(f"{graph}:")]
        if tensor.name == ledger_name and names:
            return names[0]
    raise BundleError(f"the tensor ledger has no {ledger_name!r} that {graph} reads")
