"""Checkpoints and bundles of the families, each made once for all tests of the room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headport.bundle import Bundle
from headport.export.command import Options, export
from tests.export.families import save_family

FamilyBundle = Callable[[str], tuple[Path, Bundle]]


@pytest.fixture(scope="session")
def family_bundle(tmp_path_factory: pytest.TempPathFactory) -> FamilyBundle:
    """Family name → its checkpoint folder and the fp32 bundle exported from it."""
    made: dict[str, tuple[Path, Bundle]] = {}

    def get(family: str) -> tuple[Path, Bundle]:
        if family not in made:
            folder = tmp_path_factory.mktemp("family")
            checkpoint = save_family(family, folder)
            bundle = export(Options(model=str(checkpoint), output=folder / "bundle"))
            made[family] = checkpoint, bundle
        return made[family]

    return get
