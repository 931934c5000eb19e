"""Memory that arrays were freed from stays with the process, for the next ones.

glibc's malloc asks the system for every block of 128 KiB or more, and gives it back when it is
freed; so each row of logits comes as new pages, and touching those costs more than computing on
them (mallopt(3), M_MMAP_THRESHOLD). Once a block of up to 32 MiB has been freed, blocks up to that
size are kept, and up to twice as much of what is free. Freeing one is all that this file does;
other systems' allocators are left as they are.
"""

from __future__ import annotations

import functools

import numpy as np

__all__ = ["ENVIRONMENT", "keep_freed_memory"]

_LARGEST = (32 << 20) - (64 << 10)  # below DEFAULT_MMAP_THRESHOLD_MAX of 64-bit glibc

# The same for a process that is started.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}


@functools.cache
def keep_freed_memory() -> None:
    """Let this process keep what it frees; without effect the second time."""
    np.empty(_LARGEST, np.uint8)  # never touched, so that it costs nothing
