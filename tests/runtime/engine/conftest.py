from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headport.runtime.engine.backends import load_backend
from headport.runtime.engine.builder import build_plan
from headport.runtime.engine.request import BuildAnswer, BuildRequest
from tests.runtime.engine.standing_in import FAKE, standing_in


@pytest.fixture
def separate_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A stand-in for tensorrt_rtx, for this process and those it starts."""
    source = Path(__file__).resolve().parents[3] / "src"
    monkeypatch.setenv("PYTHONPATH", f"{FAKE}:{source}")
    with standing_in():
        yield "tensorrt-rtx"


@pytest.fixture
def fake_backend(separate_backend: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The stand-in without a process of its own, which takes seconds to start."""

    def build_here(request: BuildRequest, *_: Any, **__: Any) -> BuildAnswer:
        return build_plan(load_backend(request.backend), request)

    monkeypatch.setattr("headport.runtime.engine.plan.build_apart", build_here)
    return separate_backend
