"""Groups of matrices that are stored alike: one kind, such as `v_proj`, in some layers.

Groups are read off the weights' names, as `headport quantize --override` addresses them: the first
number of a module path is taken for the layer, and what lies around it for the kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape
from itertools import pairwise

from headport.quantize.backbone_plan import module_path

__all__ = ["Group", "find_groups", "number_patterns"]


@dataclass(frozen=True)
class Group:
    """Matrices of one kind in neighbouring layers."""

    kind: str  # pattern of the kind in all layers
    layers: tuple[int, ...]  # ascending; empty where names hold no number
    names: tuple[str, ...]  # of the weights
    patterns: tuple[str, ...]  # that fit these weights and no other matrix

    @property
    def label(self) -> str:
        """The kind, and the first and last layer."""
        if not self.layers:
            return self.kind
        first, last = self.layers[0], self.layers[-1]
        return f"{self.kind} {first}" if first == last else f"{self.kind} {first}-{last}"


def find_groups(names: Sequence[str], parts: int) -> list[Group]:
    """Sort matrices into groups.

    Args:
        names: Of the backbone's weights, in graph order.
        parts: Each kind's layers are cut into this many parts, or as many as there are layers.

    Returns:
        Groups in the order of their kinds, lower layers first; every name is in one of them.
    """
    kinds: dict[tuple[str, str], dict[int, list[str]]] = {}
    for name in names:
        before, layer, after = _split(name)
        kinds.setdefault((before, after), {}).setdefault(layer, []).append(name)
    groups = []
    for (before, after), layers in kinds.items():
        for part in _cut(sorted(layers), parts):
            own = tuple(name for layer in part for name in layers[layer])
            if part[0] < 0:
                groups.append(Group(before, (), own, _checked([before], own, names)))
                continue
            patterns = [f"{before}{each}{after}" for each in number_patterns(part[0], part[-1])]
            kind = f"{before}*{after}"
            groups.append(Group(kind, tuple(part), own, _checked(patterns, own, names)))
    return groups


def number_patterns(first: int, last: int) -> list[str]:
    """Patterns that together fit the decimal numbers from `first` to `last`, and no other."""
    patterns, start = [], first
    while start <= last:
        digits = str(start)
        free = 0  # last digits that may be any
        while (
            free + 1 < len(digits)
            and start % 10 ** (free + 1) == 0
            and start + 10 ** (free + 1) - 1 <= last
        ):
            free += 1
        size = 10**free
        low = int(digits[-free - 1])
        high = min(9, low + (last + 1 - start) // size - 1)
        one = "?" if (low, high) == (0, 9) else str(low) if low == high else f"[{low}-{high}]"
        patterns.append(digits[: len(digits) - free - 1] + one + "?" * free)
        start += (high - low + 1) * size
    return patterns


def _split(name: str) -> tuple[str, int, str]:
    """Pattern before the layer, layer or -1, pattern after it."""
    parts = module_path(name).split(".")
    place = next((n for n, part in enumerate(parts) if part.isdecimal()), None)
    if place is None:
        return escape(module_path(name)), -1, ""
    before = "".join(f"{escape(part)}." for part in parts[:place])
    return before, int(parts[place]), "".join(_after(parts[place + 1 :]))


def _after(parts: Iterable[str]) -> Iterator[str]:
    # Other numbers, such as those of experts, do not tell kinds apart.
    yield from (".*" if part.isdecimal() else f".{escape(part)}" for part in parts)


def _cut(layers: list[int], parts: int) -> list[list[int]]:
    count = min(parts, len(layers))
    edges = [len(layers) * n // count for n in range(count + 1)]
    return [layers[a:b] for a, b in pairwise(edges)]


def _checked(patterns: list[str], own: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """The patterns if they fit these names alone, else one for each name."""
    paths = {name: module_path(name) for name in names}
    fitting = {
        name
        for name, path in paths.items()
        if any(fnmatchcase(path, p) or fnmatchcase(name, p) for p in patterns)
    }
    return tuple(patterns) if fitting == set(own) else tuple(escape(paths[name]) for name in own)
