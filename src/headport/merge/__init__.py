"""Merging: a bundle's graphs as the one graph that other runtimes load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headport.merge.command import Options, merge

__all__ = ["Options", "merge"]


def __getattr__(name: str) -> Any:
    # Lazy: the command imports ONNX libraries.
    if name in __all__:
        from headport.merge import command

        return getattr(command, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
