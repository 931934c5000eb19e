"""Tests with the real library: `make test-tensorrt` installs it in an environment of its own."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def rtx() -> Any:
    """The module tensorrt_rtx."""
    try:
        return importlib.import_module("tensorrt_rtx")
    except ImportError as error:
        pytest.skip(f"tensorrt_rtx is not installed ({error}); run `make test-tensorrt`")


@pytest.fixture(scope="session")
def half_bundle(rtx: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in half precision whose heads are wide enough for TensorRT's Attention."""
    from headport.export.command import Options, export
    from tests.conftest import llama_config, save_model

    folder = tmp_path_factory.mktemp("checkpoint") / "wide"
    checkpoint = save_model(folder, llama_config(hidden_size=128))
    output = tmp_path_factory.mktemp("bundle") / "half"
    return export(Options(model=str(checkpoint), output=output, dtype="fp16")).path
