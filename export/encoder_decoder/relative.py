"""Relative positions of a decoder: a row of scores for each distance, read off the model itself.

T5 and its kin add a learned number per head to each score, looked up by the distance in buckets
that grow with it; from some distance on all share the last. What a bucket is stays the model's own
business: its function is asked for the bias of a stretch of text, whose last row holds all
distances.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from headport.errors import ExportError

__all__ = ["RelativeBias", "relative_modules", "relative_table", "with_tables"]

_BEYOND = 8  # distances looked at beyond the last one that may differ


@dataclass(frozen=True)
class RelativeBias:
    """Stands in place of the bias that a decoder hands from layer to layer."""

    table: torch.Tensor  # [R, heads]; row r: a key r tokens before the query, the last: or more


def relative_modules(decoder: Any) -> list[Any]:
    """The attention modules of a decoder that have relative positions of their own, in order."""
    found = (m for m in decoder.modules() if getattr(m, "has_relative_attention_bias", False))
    return list(found)


@torch.no_grad()
def relative_table(module: Any) -> torch.Tensor:
    """Scores by distance of one attention module, [R, heads].

    Raises:
        ExportError: If there is no distance from which on they stay the same.
    """
    rows = int(module.relative_attention_max_distance) + 1
    length = rows + _BEYOND
    bias = module.compute_bias(length, length)  # [1, heads, query, key]
    by_distance = bias[0, :, -1, :].flip(-1).T
    if not torch.equal(by_distance[rows:], by_distance[rows - 1].expand(_BEYOND, -1)):
        raise ExportError(
            f"{type(module).__name__}: its relative positions still differ beyond a distance of "
            f"{rows - 1}, which its config calls the largest"
        )
    table: torch.Tensor = by_distance[:rows].contiguous()
    return table


@contextmanager
def with_tables(modules: list[Any], tables: list[torch.Tensor]) -> Iterator[None]:
    """Let modules hand on their tables in place of a bias while the context lasts."""
    for module, table in zip(modules, tables, strict=True):
        marker = RelativeBias(table)
        module.compute_bias = lambda *_args, _marker=marker, **_kwargs: _marker
    try:
        yield
    finally:
        for module in modules:
            del module.__dict__["compute_bias"]
