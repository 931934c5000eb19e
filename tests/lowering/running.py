"""Running a graph as it is written, for tests of one pass."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx_ir as ir

from headport.session import SessionSettings, open_session


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All outputs of a model, by name."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        ir.save(model, file)
        return open_session(file, {}, SessionSettings(threads=1)).run(feeds)
