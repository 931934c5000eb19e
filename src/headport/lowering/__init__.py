"""Lowering: rewriting the portable graphs of a bundle for one target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headport.lowering.command import Options, lower

__all__ = ["Options", "lower"]


def __getattr__(name: str) -> Any:
    # Lazy: the command imports ONNX libraries.
    if name in __all__:
        from headport.lowering import command

        return getattr(command, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
