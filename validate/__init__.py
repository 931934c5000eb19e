"""Validate: a bundle as it runs, compared with its PyTorch reference; the result is a report.

Importing the room is cheap; its parts load with the names that need them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["Options", "Report", "validate"]

_HOMES = {
    "Options": "headport.validate.command",
    "Report": "headport.validate.report",
    "validate": "headport.validate.command",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
