"""Which heads of a bundle are quantised: those that are named, or all that have a large matrix."""

from __future__ import annotations

from collections.abc import Sequence

from headport.bundle import Bundle
from headport.errors import QuantizeError, UsageError
from headport.head_parts import all_parts, parts_of
from headport.manifest import AdaptiveHead, Head, Manifest, TasksHead, TreeHead, ValueHead

__all__ = ["chosen_heads"]


def chosen_heads(bundle: Bundle, names: Sequence[str] = ()) -> dict[str, Head]:
    """The heads and parts of heads that are to be quantised, by name.

    Args:
        bundle: A portable bundle.
        names: Heads, with all their parts, or parts as `headport inspect` lists them; none: heads
            over the vocabulary, shortlists and tails of adaptive heads, members of trees.

    Raises:
        UsageError: If a name is none of the bundle's.
        QuantizeError: If the bundle is lowered or has nothing to quantise, what is named has
            nothing to gain, or is quantised already.
    """
    manifest = bundle.manifest
    if manifest.target != "portable":
        raise QuantizeError(
            f"{bundle.path} is lowered to {manifest.target}; quantise the portable bundle it was "
            "made from, then lower again"
        )
    chosen = _named(manifest, names) if names else _large(manifest)
    if not chosen:
        known = ", ".join(all_parts(manifest)) or "none"
        raise QuantizeError(f"{bundle.path}: no head with a large matrix in it (heads: {known})")
    for name, head in chosen.items():
        if head.quantization is not None:
            which = "the head" if list(chosen) == ["lm"] else f"head {name}"
            raise QuantizeError(
                f"{bundle.path}: {which} is already stored as {head.quantization.format}; "
                "quantise the bundle it was made from"
            )
    return chosen


def _large(manifest: Manifest) -> dict[str, Head]:
    found = dict(manifest.heads)
    for name, head in manifest.task_heads.items():
        match head:
            case AdaptiveHead():
                found |= parts_of(name, head)
            case TreeHead():
                found[f"{name}.members"] = head.members
    return found


def _named(manifest: Manifest, names: Sequence[str]) -> dict[str, Head]:
    parts = all_parts(manifest)
    found: dict[str, Head] = {}
    for name in names:
        other = manifest.task_heads.get(name)
        if isinstance(other, ValueHead):
            raise QuantizeError(
                f"--name {name}: the weight of a value head is one row, so there is nothing to gain"
            )
        if isinstance(other, TasksHead | AdaptiveHead | TreeHead):
            found |= parts_of(name, other)
        elif name in parts:
            found[name] = parts[name]
        else:
            known = ", ".join(dict.fromkeys([*manifest.task_heads, *parts])) or "none"
            raise UsageError(f"--name {name}: no such head in the bundle (heads: {known})")
    return found
