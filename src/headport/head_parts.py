"""The heads of a bundle by name: those of a vocabulary, and the parts that other heads are made of.

Whatever a head gives, it is made of products with one matrix each, and each is a `Head` of its own:
a graph, a weight in the ledger, quantised or not. A part is named after its head:

    value     NAME                             tasks  NAME.TASK
    adaptive  NAME.shortlist, NAME.tail1 …     tree   NAME.classes, NAME.members
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headport.errors import BundleError
from headport.manifest import (
    AdaptiveHead,
    Head,
    Manifest,
    TaskHead,
    TasksHead,
    TreeHead,
    ValueHead,
)

__all__ = ["all_parts", "find_head", "head_graphs", "parts_of", "with_heads"]


def parts_of(name: str, head: TaskHead) -> dict[str, Head]:
    """The parts of one head that is not of a vocabulary, by the part's name."""
    match head:
        case ValueHead():
            return {name: head.head}
        case TasksHead():
            return {f"{name}.{task}": each.head for task, each in head.tasks.items()}
        case AdaptiveHead():
            tails = {f"{name}.tail{n}": tail for n, tail in enumerate(head.tails, 1)}
            return {f"{name}.shortlist": head.shortlist, **tails}
        case TreeHead():
            return {f"{name}.classes": head.classes, f"{name}.members": head.members}


def all_parts(manifest: Manifest) -> dict[str, Head]:
    """Every head of a vocabulary, and every part of the other heads, by name."""
    found = dict(manifest.heads)
    for name, head in manifest.task_heads.items():
        found |= parts_of(name, head)
    return found


def find_head(manifest: Manifest, name: str) -> Head:
    """The head of a vocabulary, or the part, of this name.

    Raises:
        BundleError: If there is none.
    """
    found = all_parts(manifest)
    if name not in found:
        raise BundleError(f"no head {name!r} in the bundle (heads: {', '.join(found) or 'none'})")
    return found[name]


def head_graphs(head: Head) -> list[str]:
    """The graphs that a head is computed by, what comes before it first."""
    return [graph for graph in (head.transform, head.graph) if graph is not None]


def with_heads(manifest: Manifest, changed: Mapping[str, Head]) -> Manifest:
    """The manifest with other entries for some heads or parts, by their names."""
    heads = {name: changed.get(name, head) for name, head in manifest.heads.items()}
    others = {name: _with_parts(name, head, changed) for name, head in manifest.task_heads.items()}
    return msgspec.structs.replace(manifest, heads=heads, task_heads=others)


def _with_parts(name: str, head: TaskHead, changed: Mapping[str, Head]) -> TaskHead:
    parts = {part: changed.get(part, entry) for part, entry in parts_of(name, head).items()}
    match head:
        case ValueHead():
            return msgspec.structs.replace(head, head=parts[name])
        case TasksHead():
            tasks = {
                task: msgspec.structs.replace(each, head=parts[f"{name}.{task}"])
                for task, each in head.tasks.items()
            }
            return msgspec.structs.replace(head, tasks=tasks)
        case AdaptiveHead():
            shortlist, *tails = parts.values()
            return msgspec.structs.replace(head, shortlist=shortlist, tails=tuple(tails))
        case TreeHead():
            classes, members = parts.values()
            return msgspec.structs.replace(head, classes=classes, members=members)
