"""Rows of logits are computed in memory that the process has already."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys

import pytest

from headport.freed_memory import ENVIRONMENT, keep_freed_memory

ROWS, PAGES = 200, 96  # of 4 KiB, as a row of 49,152 float64 logits has


def faults(*calls: str, environment: dict[str, str] | None = None) -> int:
    """Pages that a process of its own had to be given for `ROWS` arrays, each freed at once."""
    code = (
        "import resource, numpy as np",
        *calls,
        "ask = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt",
        f"rows = lambda: len([np.ones({PAGES} << 9) for _ in range(4)])",
        f"rows(); start = ask(); [rows() for _ in range({ROWS // 4})]; print(ask() - start)",
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)],
        env=kept | (environment or {}),
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc as glibc has it")
@pytest.mark.skipif(resource.getpagesize() != 4096, reason="pages of 4 KiB are counted")
def test_pages_of_freed_rows_are_used_again() -> None:
    whole = ROWS * PAGES
    assert faults() > whole / 4  # else there would be nothing to do
    keep = "from headport.freed_memory import keep_freed_memory; keep_freed_memory()"
    assert faults(keep) < whole / 20
    assert faults(environment=ENVIRONMENT) < whole / 20


def test_it_may_be_called_again() -> None:
    keep_freed_memory()
    keep_freed_memory()
