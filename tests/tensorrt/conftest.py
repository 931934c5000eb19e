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
def wide_checkpoint(rtx: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose heads are wide enough for TensorRT's Attention."""
    from tests.conftest import llama_config, save_model

    folder = tmp_path_factory.mktemp("checkpoint") / "wide"
    return save_model(folder, llama_config(hidden_size=128))


@pytest.fixture(scope="session")
def half_bundle(wide_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It in half precision."""
    from headport.export.command import Options, export

    output = tmp_path_factory.mktemp("bundle") / "half"
    return export(Options(model=str(wide_checkpoint), output=output, dtype="fp16")).path
