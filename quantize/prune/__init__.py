"""Vocabulary pruning: bundle → bundle that knows fewer tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headport.quantize.prune.command import Options, prune

__all__ = ["Options", "prune"]


def __getattr__(name: str) -> Any:
    # Lazy: the command imports ONNX libraries.
    if name in __all__:
        from headport.quantize.prune import command

        return getattr(command, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
