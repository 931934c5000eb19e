"""One checkpoint of each kind, and the bundles made from it, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.sourced.models import save_sourced


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a model → its folder."""
    folder = tmp_path_factory.mktemp("sourced")
    return cache(lambda name: save_sourced(folder / name, name))


@pytest.fixture(scope="session")
def bundle(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Name of a model → its portable bundle."""
    from headport.export.command import Options, export

    folder = tmp_path_factory.mktemp("sourced-bundles")
    return cache(
        lambda name: export(Options(model=str(checkpoint(name)), output=folder / name)).path
    )


@pytest.fixture(scope="session")
def lowered(
    bundle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Name of a model → its bundle lowered to ort-cpu."""
    from headport.lowering.command import Options, lower

    folder = tmp_path_factory.mktemp("sourced-lowered")
    return cache(
        lambda name: (
            lower(Options(bundle=bundle(name), output=folder / name, target="ort-cpu")).path
        )
    )
