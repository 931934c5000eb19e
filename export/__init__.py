"""Export: a PyTorch checkpoint becomes portable ONNX graphs in a bundle.

Importing the room is cheap; torch, transformers and onnx load with the names that need them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = [
    "Checkpoint",
    "Context",
    "Options",
    "OwnModel",
    "attend",
    "export",
    "find_checkpoint",
    "load_model",
    "load_tokenizer",
]

_HOMES = {
    "Checkpoint": "headport.export.checkpoint",
    "Context": "headport.export.own_model",
    "Options": "headport.export.command",
    "OwnModel": "headport.export.own_model",
    "attend": "headport.export.own_model",
    "export": "headport.export.command",
    "find_checkpoint": "headport.export.checkpoint",
    "load_model": "headport.export.checkpoint",
    "load_tokenizer": "headport.export.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
