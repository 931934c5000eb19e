"""The files beside the graphs that name token ids, rewritten for a smaller vocabulary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headport.quantize.prune.id_fields import Rename, rename_fields
from headport.quantize.prune.rewrite import rewrite_tokenizer
from headport.quantize.prune.tokens import TOKENIZER, TokenTable

__all__ = ["renaming", "rewrite_companions"]

Int64 = npt.NDArray[np.int64]

_SIZES = ("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size")


def rewrite_companions(
    folder: Path, table: TokenTable, kept: Int64, old_sizes: frozenset[int]
) -> list[str]:
    """Rewrite tokenizer and configuration in a draft.

    Args:
        folder: The draft's folder, which holds the files of the bundle before.
        table: The tokenizer before.
        kept: Ids that stay, ascending, [K]; their places are the new ids.
        old_sizes: Numbers that a field of `config.json` gives for the old vocabulary.

    Returns:
        Notes: ids that a file named and that no longer exist.
    """
    rename = renaming(kept)
    (folder / TOKENIZER).write_text(rewrite_tokenizer(table, kept), encoding="utf-8")
    notes = []
    for name in ("config.json", "generation_config.json"):
        fields = _read(folder / name)
        if fields is None:
            continue
        made, lost = rename_fields(fields, rename)
        notes += [f"{name}, left out because no such token is there: {each}" for each in lost]
        if name == "config.json":
            made = _resized(made, old_sizes, len(kept))
        _write(folder / name, made)
    config = _read(folder / "tokenizer_config.json")
    if config is not None and isinstance(config.get("added_tokens_decoder"), dict):
        added = {int(old): token for old, token in config["added_tokens_decoder"].items()}
        config["added_tokens_decoder"] = {
            str(new): token for old, token in added.items() if (new := rename(old)) is not None
        }
        _write(folder / "tokenizer_config.json", config)
    added_tokens = _read(folder / "added_tokens.json")
    if added_tokens is not None:
        found = {token: rename(old) for token, old in added_tokens.items()}
        _write(folder / "added_tokens.json", {t: n for t, n in found.items() if n is not None})
    return notes


def renaming(kept: Int64) -> Rename:
    """Old id → new id."""
    numbers = {int(old): new for new, old in enumerate(kept)}
    return numbers.get


def _resized(config: Mapping[str, Any], old_sizes: frozenset[int], size: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            made[name] = _resized(value, old_sizes, size)
        elif name in _SIZES and value in old_sizes:
            made[name] = size
        else:
            made[name] = value
    return made


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _write(path: Path, fields: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
