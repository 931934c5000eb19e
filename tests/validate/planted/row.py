"""A planted fault as a row of the table, and the ways of planting one in a bundle's files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from tests.validate import sabotage

__all__ = [
    "KL",
    "LOGITS",
    "PERPLEXITY",
    "TOP1",
    "Row",
    "attention",
    "constant",
    "exchange",
    "row",
    "weight",
]

LOGITS, KL, TOP1 = "max_abs_logit_error", "kl_mean", "top1_agreement_tie_adjusted"
PERPLEXITY = "perplexity_ratio"
Change = Callable[[Any], Any]

# As the tensor ledger names them → as NumPy reads their bytes; 4-bit numbers in pairs.
_NUMPY = {"float": "<f4", "int8": "<i1", "uint8": "<u1", "int4": "<u1", "uint4": "<u1"}


@dataclass(frozen=True)
class Row:
    """One fault."""

    fault: str
    where: str  # as the table says it
    plant: Callable[..., Any]
    gates: frozenset[str] = frozenset()  # that must fail
    part: str = ""  # that must be named
    bundle: str = ""  # which bundle a copy is damaged of


def row(
    fault: str, bundle: str, plant: sabotage.Fault, gates: set[str], part: str, where: str = ""
) -> Row:
    """A fault in the files of a bundle."""
    return Row(fault, where or f"{bundle} bundle", plant, frozenset(gates), part, bundle)


def weight(fragment: str, change: Change) -> sabotage.Fault:
    """Change the first tensor whose name holds the fragment; 4-bit numbers come as raw bytes."""

    def plant(folder: Path) -> None:
        manifest = sabotage.read_manifest(folder)
        tensor = next(t for t in manifest.tensors if fragment in t.name)
        dtype = np.dtype(_NUMPY[tensor.dtype])
        values = np.frombuffer(sabotage.read_bytes(folder, tensor), dtype)
        if tensor.dtype not in ("int4", "uint4"):
            values = values.reshape(tensor.shape)
        changed = np.ascontiguousarray(change(values.copy()), dtype)
        assert changed.tobytes() != values.tobytes(), f"{tensor.name} stays as it was"
        sabotage.write_bytes(folder, tensor, changed.tobytes())

    return plant


def constant(fragment: str, change: Change) -> sabotage.Fault:
    """Change a small tensor of the backbone's graph, which lies in its `.onnx` file."""

    def plant(folder: Path) -> None:
        file = folder / sabotage.read_manifest(folder).graphs["backbone"].file
        model = ir.load(file)
        value = next(v for n, v in model.graph.initializers.items() if fragment in n)
        assert value.const_value is not None
        value.const_value = ir.Tensor(change(value.const_value.numpy().copy()), name=value.name)
        ir.save(model, file)

    return plant


def exchange(first: str, second: str) -> sabotage.Fault:
    """Two tensors of equal shape change places."""

    def plant(folder: Path) -> None:
        manifest = sabotage.read_manifest(folder)
        one, other = (next(t for t in manifest.tensors if n in t.name) for n in (first, second))
        data = [sabotage.read_bytes(folder, tensor) for tensor in (one, other)]
        sabotage.write_bytes(folder, one, data[1])
        sabotage.write_bytes(folder, other, data[0])

    return plant


def attention(name: str, change: Change) -> sabotage.Fault:
    """Change an attribute of every attention call."""

    def plant(folder: Path) -> None:
        manifest = sabotage.read_manifest(folder)
        file = folder / manifest.graphs["backbone"].file
        model = ir.load(file)
        calls = [
            node for node in model.graph if name in node.attributes and "window" in node.attributes
        ]
        assert calls, "no attention call to change"
        for node in calls:
            found = node.attributes[name]
            value = change(found.value)
            made = ir.AttrInt64 if isinstance(value, int) else ir.AttrFloat32
            node.attributes[name] = made(name, value)
        ir.save(model, file)

    return plant
