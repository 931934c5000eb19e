"""The option `exact` of the verbs, and what it means to a generator."""

from __future__ import annotations

from typing import Literal

__all__ = ["EXACT", "ExactChoice"]

ExactChoice = Literal["auto", "always", "never"]
EXACT: dict[ExactChoice, bool | None] = {"auto": None, "always": True, "never": False}
