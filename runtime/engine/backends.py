"""The two libraries that build plans, one row each, and what an installed one offers.

Both have the same Python interface but for some of its parts. What a version has is looked up by
name in the module itself, never concluded from its version number.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from headport.errors import UsageError

__all__ = ["BACKENDS", "Backend", "compute_capabilities", "load_backend", "missing_options"]


@dataclass(frozen=True)
class Backend:
    """One library."""

    name: str  # as users name it
    module: str
    install: str


BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        backend.name: backend
        for backend in (
            Backend(
                "tensorrt",
                "tensorrt",
                "pip install tensorrt, from NVIDIA's index, on a machine with a driver",
            ),
            Backend("tensorrt-rtx", "tensorrt_rtx", "pip install 'headport[tensorrt-rtx]'"),
        )
    }
)

# Option → where the module must have what it needs: (class, attribute).
_NEEDS = {
    "compute_capability": (("ComputeCapability", ""), ("IBuilderConfig", "set_compute_capability")),
    "workspace": (("MemoryPoolType", "WORKSPACE"), ("IBuilderConfig", "set_memory_pool_limit")),
    "timing_cache": (
        ("IBuilderConfig", "create_timing_cache"),
        ("IBuilderConfig", "set_timing_cache"),
    ),
    "version_compatible": (("BuilderFlag", "VERSION_COMPATIBLE"),),
    "strip_weights": (("BuilderFlag", "STRIP_PLAN"),),
    "weight_streaming": (("BuilderFlag", "WEIGHT_STREAMING"),),
}


def load_backend(name: str) -> Any:
    """Import a backend's module.

    Raises:
        UsageError: If it is unknown, not installed, or does not load.
    """
    if name not in BACKENDS:
        raise UsageError(f"--backend {name}: use one of {', '.join(BACKENDS)}")
    backend = BACKENDS[name]
    try:
        return importlib.import_module(backend.module)
    except ImportError as error:
        raise UsageError(
            f"--backend {name} needs the package {backend.module}, which does not load here "
            f"({error}); {backend.install}"
        ) from error


def missing_options(trt: Any, options: Mapping[str, Any]) -> Iterator[str]:
    """Options that were given and that this module has no means for."""
    for name, needs in _NEEDS.items():
        if not options.get(name):
            continue
        for owner, attribute in needs:
            found = getattr(trt, owner, None)
            if found is None or (attribute and not hasattr(found, attribute)):
                yield name
                break


def compute_capabilities(trt: Any) -> tuple[str, ...]:
    """Names of the GPU generations that a backend compiles for without having one."""
    kinds = getattr(trt, "ComputeCapability", None)
    if kinds is None:
        return ()
    names = (name for name in dir(kinds) if name.startswith("SM"))
    return tuple(sorted(names, key=lambda name: int(name[2:])))
