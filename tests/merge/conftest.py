"""Bundles that are merged: portable, INT8, certified, tied, windowed, lowered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headport.lowering import Options as LowerOptions
from headport.lowering import lower
from headport.quantize.command import Options as QuantizeOptions
from headport.quantize.command import quantize


def exported(checkpoint: Path, output: Path, **changes: Any) -> Path:
    """A portable bundle of a checkpoint."""
    from headport.export.command import Options, export

    return export(Options(model=str(checkpoint), output=output, **changes)).path


@pytest.fixture(scope="session")
def tied_bundle(tiny_llama_tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Portable bundle whose head is the embedding."""
    return exported(tiny_llama_tied, tmp_path_factory.mktemp("merge") / "tied")


@pytest.fixture(scope="session")
def gemma2_bundle(tiny_gemma2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Portable bundle with softcaps, and a window on every other layer."""
    return exported(tiny_gemma2, tmp_path_factory.mktemp("merge") / "gemma2")


@pytest.fixture(scope="session")
def int8_bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Portable bundle with an INT8 head."""
    output = tmp_path_factory.mktemp("merge") / "int8"
    return quantize(QuantizeOptions(bundle=tiny_bundle, output=output, head="int8", block=32)).path


@pytest.fixture(scope="session")
def int8_lowered(int8_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`int8_bundle` lowered to ort-cpu: residual rows through MatMulNBits."""
    output = tmp_path_factory.mktemp("merge") / "int8-cpu"
    return lower(LowerOptions(bundle=int8_bundle, output=output, target="ort-cpu")).path


@pytest.fixture(scope="session")
def certified_bundle(tied_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Portable bundle whose head gives candidates with a certificate."""
    output = tmp_path_factory.mktemp("merge") / "certified"
    options = QuantizeOptions(
        bundle=tied_bundle, output=output, head="int8", rescore=16, certify=True
    )
    return quantize(options).path
