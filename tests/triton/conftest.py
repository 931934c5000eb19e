"""Tests with a real tritonserver: `make test-triton` installs it in an environment of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headport.runtime.triton.command import Options, triton
from tests.triton.server import Server, running


@pytest.fixture(scope="module")
def repository(tiny_lowered: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A streaming model, one of whole replies, and one with a single slot."""
    assert np.__version__ < "2", "this python backend gives empty outputs with NumPy 2"
    output = tmp_path_factory.mktemp("triton") / "repository"
    for name, changes in (
        ("tiny", {}),
        ("whole", {"whole_replies": True}),
        ("narrow", {"slots": 1}),
    ):
        options = Options(
            bundle=tiny_lowered,
            output=output,
            name=name,
            threads=1,
            environment=sys.prefix,
            **changes,
        )
        triton(options)
    return output


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with these models."""
    scratch = tmp_path_factory.mktemp("server")
    with running(repository, scratch, "tiny", "whole", "narrow") as found:
        yield found
