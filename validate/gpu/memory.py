"""Memory in use on the GPU, as the driver counts it for all processes."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path

from headport.gpu_probe import needed_libraries
from headport.providers import PROVIDERS

__all__ = ["used_memory"]


def used_memory() -> int | None:
    """Bytes in use on the first card; None where the CUDA runtime cannot be asked."""
    spec, library = find_spec("onnxruntime"), PROVIDERS["cuda"].library
    if spec is None or spec.origin is None or library is None:
        return None
    file = Path(spec.origin).parent / "capi" / library
    names = needed_libraries(file) if file.is_file() else ()
    runtime = next((name for name in names if name.startswith("libcudart")), None)
    if runtime is None:
        return None
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    try:
        status = ctypes.CDLL(runtime).cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    except (OSError, AttributeError):
        return None
    return None if status != 0 else total.value - free.value
