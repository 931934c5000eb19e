"""Heads in words, for `headport inspect`."""

from __future__ import annotations

from collections.abc import Iterator

from headport.head_parts import parts_of
from headport.manifest import AdaptiveHead, Head, TaskHead, TasksHead, TreeHead, ValueHead

__all__ = ["stored_as", "task_head_lines"]

_POOLING = {"none": "per position", "last": "per text, at its last token"}


def stored_as(head: Head) -> str:
    """How a head's weight is stored."""
    how = head.quantization
    if how is None:
        return "not quantised"
    block = f" block {how.block}" if how.block else ""
    zeros = "" if how.symmetric else " with zero points"
    errors = ", errors compensated" if how.rounding == "compensated" else ""
    return f"{how.format}{zeros}{block}{errors}, activations {how.activations}"


def task_head_lines(name: str, head: TaskHead) -> Iterator[str]:
    """What a head gives, and then, where it is made of several parts, each of them."""
    yield f"{_gives(head)}: {head.meaning}"
    for part, entry in parts_of(name, head).items():
        before = f", after the graph {entry.transform}" if entry.transform else ""
        label = part.removeprefix(name).lstrip(".") or "weight"
        yield f"  {label}: {entry.vocab_size} outputs, {stored_as(entry)}{before}"


def _gives(head: TaskHead) -> str:
    match head:
        case ValueHead():
            return f"value, one scalar {_POOLING[head.pooling]}{_padding(head.pad_id)}"
        case TasksHead():
            named = ", ".join(
                f"{task} ({', '.join(each.labels)})" for task, each in head.tasks.items()
            )
            return f"tasks {named}, {_POOLING[head.pooling]}{_padding(head.pad_id)}"
        case AdaptiveHead():
            cuts = ", ".join(map(str, head.cutoffs[:-1]))
            return f"adaptive softmax over {head.cutoffs[-1]} tokens, cut at {cuts}"
        case TreeHead():
            return (
                f"tree softmax over {head.members.vocab_size} tokens in "
                f"{head.classes.vocab_size} classes"
            )


def _padding(pad_id: int | None) -> str:
    return "" if pad_id is None else f" (padding is token {pad_id})"
