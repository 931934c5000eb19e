"""Quantize room: bundle → bundle, with the head's weight stored in fewer bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headport.quantize.command import Options, quantize

__all__ = ["Options", "quantize"]


def __getattr__(name: str) -> Any:
    # Lazy: the command imports ONNX libraries.
    if name in __all__:
        from headport.quantize import command

        return getattr(command, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
