"""Faults of a bundle's tokenizer: the run ends before any logit, and names the piece."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.validate.planted.row import Row

__all__ = ["ROWS"]


def _edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        file = folder / "tokenizer.json"
        tokenizer = json.loads(file.read_text(encoding="utf-8"))
        change(tokenizer)
        file.write_text(json.dumps(tokenizer), encoding="utf-8")

    return plant


def _with_bos(tokenizer: dict[str, Any]) -> None:
    piece = {"SpecialToken": {"id": "<|end|>", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [piece, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [0], "tokens": ["<|end|>"]}},
    }


def _exchange_two(tokenizer: dict[str, Any]) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["h"], vocabulary["e"] = vocabulary["e"], vocabulary["h"]


def _with_leading_space(tokenizer: dict[str, Any]) -> None:
    tokenizer["pre_tokenizer"]["add_prefix_space"] = True


def _row(fault: str, change: Callable[[dict[str, Any]], None]) -> Row:
    return Row(
        fault,
        "tokenizer",
        _edit(change),
        frozenset({"ids differ: the run ends"}),
        "first differing piece",
    )


ROWS = (
    _row("a BOS that the checkpoint does not add", _with_bos),
    _row("two tokens change places", _exchange_two),
    _row("a space put before every text", _with_leading_space),
)
