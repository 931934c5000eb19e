"""The stand-in for TensorRT's library, and nothing of it left behind.

Later tests of the same process ask whether the real library is installed, by importing it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

FAKE = Path(__file__).parent / "fake"
_NAME = "tensorrt_rtx"


@contextmanager
def standing_in() -> Iterator[ModuleType]:
    """It is what `import tensorrt_rtx` gives, until this ends."""
    before = sys.modules.pop(_NAME, None)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(FAKE))
            yield importlib.import_module(_NAME)
    finally:
        sys.modules.pop(_NAME, None)
        if before is not None:
            sys.modules[_NAME] = before
