"""Bundles that more than one test of the room needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from headport.export.command import Options, export


@pytest.fixture(scope="session")
def tiny_half_bundle(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama exported in half precision."""
    output = tmp_path_factory.mktemp("half") / "bundle"
    return export(Options(model=str(tiny_llama), output=output, dtype="fp16")).path
