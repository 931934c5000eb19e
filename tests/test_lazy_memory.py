from __future__ import annotations

import sys

import numpy as np
import psutil
import pytest

from headport.lazy_memory import lazy_zeros


def test_zeros_that_can_be_written() -> None:
    found = lazy_zeros((3, 5), np.float16)
    assert found.shape == (3, 5) and found.dtype == np.float16 and not found.any()
    assert found.flags.c_contiguous and found.flags.writeable
    found[1] = 2
    assert found.sum() == 10
    assert lazy_zeros((3, 0), np.float32).shape == (3, 0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages as Linux has them")
def test_memory_is_taken_as_it_is_written() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    found = lazy_zeros((64, 1 << 20), np.float32)  # 64 places, 4 MB apart
    found[:, 0] = 1.0
    assert process.memory_info().rss - before < 16 << 20
    assert found[:, 0].sum() == 64
