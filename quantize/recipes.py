"""Recipes of a sweep: `key=value` pairs of `headport quantize`, and the ones tried by default."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headport.command import record_from_mapping
from headport.errors import UsageError
from headport.quantize.head import check_options
from headport.quantize.options import Options

__all__ = ["DEFAULT_RECIPES", "Recipe", "parse_recipe"]

_KEYS = (
    *("head", "block", "asymmetric", "positive_scales", "activations"),
    *("rescore", "certify", "bound"),
)
DEFAULT_RECIPES = (
    "head=fp16",
    "head=bf16",
    "head=fp8",
    "head=int8-row",
    "head=int8-row,compensated",
    "head=int8,block=32",
    "head=int8,block=64",
    "head=int8,block=64,activations=rounded",
    "head=int8,block=64,activations=exact",
    "head=int8,block=64,compensated",
    "head=int8,block=128",
    "head=int8,block=64,certify",
    "head=int8,block=64,certify,compensated",
    "head=int4,block=32",
    "head=int4,block=32,compensated",
    "head=int4,block=32,asymmetric,compensated",
    "head=int4,block=64,compensated",
    "head=int4,block=128,compensated",
    "head=int4,block=32,rescore",
    "head=int4,block=32,rescore,compensated",
)


@dataclass(frozen=True)
class Recipe:
    """One way to store a head."""

    text: str
    options: Options  # paths are those of the sweep and never read

    @property
    def compensated(self) -> bool:
        """Whether it needs calibration texts."""
        return bool(self.options.calibration)


def parse_recipe(text: str, bundle: Path, output: Path) -> Recipe:
    """Read a recipe such as `head=int4,block=32,asymmetric,compensated`.

    A key without a value is a switch; `compensated` asks for the sweep's calibration texts.

    Raises:
        UsageError: If a key is unknown, or the options contradict each other.
    """
    values: dict[str, Any] = {"bundle": bundle, "output": output}
    hints = typing.get_type_hints(Options)
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key == "compensated" and not value:
            values["calibration"] = (output,)
        elif key not in _KEYS:
            known = ", ".join((*_KEYS, "compensated"))
            raise UsageError(f"recipe {text!r}: no key {key!r}; known are {known}")
        elif hints[key] is bool:
            values[key] = _switch(text, key, value)
        elif key == "rescore" and not value:
            values[key] = 0
        else:
            values[key] = int(value) if value.isdecimal() else value
    options = record_from_mapping(Options, values, f"recipe {text!r}")
    check_options(options)
    return Recipe(text, options)


def _switch(text: str, key: str, value: str) -> bool:
    if value not in ("", "true", "false"):
        raise UsageError(f"recipe {text!r}: {key} is a switch, {value!r} is not true or false")
    return value != "false"
