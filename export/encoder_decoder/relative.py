"""Relative positions: a row of scores for each distance, read off the model itself.

T5 and its kin add a learned number per head to each score, looked up by the distance in buckets
that grow with it; from some distance on all share the last. What a bucket is stays the model's own
business: its function is asked for the bias of a stretch of text, whose ends hold all distances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from headport.errors import ExportError

__all__ = [
    "RelativeBias",
    "far_rows",
    "near_rows",
    "relative_modules",
    "relative_table",
    "with_bias",
]

_BEYOND = 8  # distances looked at beyond the last one that may differ


@dataclass(frozen=True)
class RelativeBias:
    """Stands in place of the bias that a decoder hands from layer to layer."""

    table: torch.Tensor  # [R, heads]; row r: a key r tokens before the query, the last: or more


def relative_modules(half: Any) -> list[Any]:
    """The attention modules of an encoder or decoder that have relative positions, in order."""
    found = (m for m in half.modules() if getattr(m, "has_relative_attention_bias", False))
    return list(found)


@torch.no_grad()
def relative_table(module: Any, *, both_ways: bool = False) -> torch.Tensor:
    """Scores by distance of one attention module.

    Args:
        module: Its own function is asked.
        both_ways: Also of keys behind the query.

    Returns:
        [R, heads], row r for a key r tokens before the query, the last one for all from there on.
        With `both_ways` [2 R - 1, heads]: the farthest before, to the farthest behind.

    Raises:
        ExportError: If there is no distance from which on they stay the same.
    """
    rows = int(module.relative_attention_max_distance) + 1
    length = rows + _BEYOND
    bias = module.compute_bias(length, length)  # [1, heads, query, key]
    before = _settled(bias[0, :, -1, :].flip(-1).T, rows, module)
    if not both_ways:
        return before
    behind = _settled(bias[0, :, 0, :].T, rows, module)
    return torch.cat([before.flip(0), behind[1:]])


def _settled(by_distance: torch.Tensor, rows: int, module: Any) -> torch.Tensor:
    if not torch.equal(by_distance[rows:], by_distance[rows - 1].expand(_BEYOND, -1)):
        raise ExportError(
            f"{type(module).__name__}: its relative positions still differ beyond a distance of "
            f"{rows - 1}, which its config calls the largest"
        )
    return by_distance[:rows].contiguous()


def near_rows(table: torch.Tensor) -> Callable[..., RelativeBias]:
    """What stands for a decoder's bias function: the table itself."""
    marker = RelativeBias(table)
    return lambda *_args, **_kwargs: marker


def far_rows(table: torch.Tensor) -> Callable[..., torch.Tensor]:
    """An encoder's bias function by a table of both directions: query, key → [1, heads, ., .]."""
    farthest = len(table) // 2

    def bias(query: Any, key: Any, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        apart = torch.arange(key)[None, :] - torch.arange(query)[:, None]
        places = apart.clamp(-farthest, farthest) + farthest
        return torch.nn.functional.embedding(places, table).permute(2, 0, 1)[None]

    return bias


@contextmanager
def with_bias(modules: list[Any], functions: list[Callable[..., Any]]) -> Iterator[None]:
    """Let modules compute their bias by other functions while the context lasts."""
    for module, function in zip(modules, functions, strict=True):
        module.compute_bias = function
    try:
        yield
    finally:
        for module in modules:
            del module.__dict__["compute_bias"]
