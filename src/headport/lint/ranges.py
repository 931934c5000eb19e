"""How large the values of a backbone become on texts, against what half precision holds.

A graph that is right in float32 may give infinity in float16, in one channel of one layer, for some
texts. So the float32 graph is run with an output more per value, its largest magnitude.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from headport.bundle import Bundle
from headport.cache_ports import is_past
from headport.errors import UsageError
from headport.graphs import write_graphs
from headport.lint.findings import Finding, Severity
from headport.lint.tensorrt_numbers import LARGEST_HALF
from headport.manifest import Graph
from headport.progress import track
from headport.runtime.text import Tokens
from headport.session import open_session

__all__ = ["find_overflows", "measure_ranges"]

Int64 = npt.NDArray[np.int64]

RULE = "overflowing-value"
_MARGIN = 4.0  # other texts may give values this much larger
_WINDOW = 512  # tokens that see each other
_PREFIX = "headport.range."
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
_MASKS = ("Where", "CastLike", "Constant")  # the lowest number of float16, on purpose


def find_overflows(
    bundle: Bundle, graph: str, model: ir.Model, files: Sequence[Path], limit: int
) -> Iterator[Finding]:
    """Values that half precision cannot hold, or hardly.

    Args:
        bundle: As it was opened; its tokenizer reads the texts.
        graph: Name of the backbone.
        model: It, with all functions written out; used up.
        files: UTF-8 texts.
        limit: At most this many tokens of each.

    Raises:
        UsageError: If a text cannot be read or is empty.
    """
    half = bundle.manifest.model.dtype == "fp16"
    for node, (value, largest) in measure_ranges(bundle, model, files, limit).items():
        if not largest > LARGEST_HALF / _MARGIN:
            continue
        beyond = not largest <= LARGEST_HALF
        severity: Severity = "error" if beyond and half else "warning"
        yield Finding(
            RULE,
            severity,
            graph,
            node,
            f"{value} reaches {largest:.4g} on the texts",
            f"float16 ends at {LARGEST_HALF:g}, and the engine gives infinity without a word",
            "export with --dtype fp32" if half else "keep --dtype fp32 for this model",
        )


def measure_ranges(
    bundle: Bundle, model: ir.Model, files: Sequence[Path], limit: int
) -> dict[str, tuple[str, float]]:
    """Node → the value it gives, and the largest magnitude of that value on the texts.

    Args:
        bundle: Its tokenizer reads the texts.
        model: A backbone with growing caches; used up.
        files: UTF-8 texts.
        limit: At most this many tokens of each.
    """
    tokens = Tokens(bundle)
    windows = [w for file in files for w in _windows(tokens, file, limit)]
    backbone = bundle.manifest.backbone
    watched = _watch(model)
    found = dict.fromkeys(watched, 0.0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_graphs({"backbone": model}, {"backbone": backbone.file}, folder)
        session = open_session(folder / backbone.file, bundle.manifest.session_options)
        for ids in track(windows, "ranges", unit="window"):
            feeds = _feeds(backbone, ids)
            given = session.run(feeds, [_PREFIX + value for value in watched])
            for value in watched:
                # NaN is larger than anything.
                found[value] = float(np.fmax(found[value], _size(given[_PREFIX + value])))
    return {node: (value, found[value]) for value, node in watched.items()}


def _size(given: npt.NDArray[np.generic]) -> float:
    size = float(np.asarray(given, np.float64))
    return np.inf if np.isnan(size) else size


def _watch(model: ir.Model) -> dict[str, str]:
    """Give the graph an output more per floating-point value; value → node."""
    watched = {}
    graph = model.graph
    for node in list(graph):
        value = node.outputs[0]
        if value.dtype not in _FLOATS or node.op_type in _MASKS or not value.name:
            continue
        size = ir.node("Abs", [value])
        largest = ir.node("ReduceMax", [size.outputs[0]], {"keepdims": 0})
        output = largest.outputs[0]
        output.name, output.dtype, output.shape = _PREFIX + value.name, value.dtype, ir.Shape([])
        graph.insert_after(node, [size, largest])
        graph.outputs.append(output)
        watched[value.name] = node.name or node.op_type
    return watched


def _feeds(backbone: Graph, ids: Int64) -> dict[str, npt.NDArray[np.generic]]:
    feeds: dict[str, npt.NDArray[np.generic]] = {
        "input_ids": ids[None],
        "attention_mask": np.ones((1, len(ids)), np.int64),
    }
    kinds = {"float": np.float32, "float16": np.float16}
    named = {"batch": 1}
    for port in backbone.inputs:
        if is_past(port.name):
            shape = [d if isinstance(d, int) else named.get(d, 0) for d in port.shape]
            feeds[port.name] = np.zeros(shape, kinds[port.dtype])
    return feeds


def _windows(tokens: Tokens, file: Path, limit: int) -> list[Int64]:
    try:
        ids = np.array(tokens.encode(file.read_text("utf-8"))[:limit], np.int64)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: a UTF-8 text was expected: {error}") from error
    if not len(ids):
        raise UsageError(f"{file}: a text was expected, nothing is in it")
    return [ids[start : start + _WINDOW] for start in range(0, len(ids), _WINDOW)]
