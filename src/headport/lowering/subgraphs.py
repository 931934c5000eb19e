"""Running what lies between two places of a graph, to learn what it computes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from headport.session import SessionSettings, open_session

__all__ = ["run_between"]

Array = npt.NDArray[Any]

_IR_VERSION = 10


def run_between(
    graph: ir.Graph, given: ir.Value, wanted: Sequence[ir.Value], runs: Sequence[Array]
) -> list[list[Array]] | None:
    """Compute values from one other value and constants, on the CPU.

    Args:
        graph: Left as it is.
        given: What each run sets; its type is taken from the arrays.
        wanted: What each run computes; their types must be known.
        runs: A value of `given` for each run.

    Returns:
        For each run the wanted values in order; None where they depend on something else.
    """
    if any(value.producer() is None for value in wanted):  # an input, or a constant
        return None
    try:
        part = ir.convenience.extract(graph, [given], wanted)
    except ValueError:
        return None
    part.inputs[0].type = ir.TensorType(ir.DataType.from_numpy(np.asarray(runs[0]).dtype))
    part.inputs[0].shape = None
    for copied, original in zip(part.outputs, wanted, strict=True):
        copied.type = original.type
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "part.onnx"
        ir.save(ir.Model(part, ir_version=_IR_VERSION), file)
        session = open_session(file, {}, SessionSettings(threads=1, provider="cpu"))
        found = [session.run({part.inputs[0].name or "": array}) for array in runs]
    return [[run[value.name or ""] for value in part.outputs] for run in found]
