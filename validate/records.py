"""Documents as records: a .jsonl file says where each one ends, what is scored, what it weighs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec

from headport.errors import UsageError

__all__ = ["REPLIES", "Messages", "Record", "is_records", "parse_records"]

Messages = tuple[dict[str, Any], ...]

REPLIES = "assistant"  # the role whose messages are scored


@dataclass(frozen=True)
class Record:
    """One document and how it counts."""

    content: str  # of a conversation: empty, as the chat template writes the text
    prompt_characters: int = 0  # at its beginning: context that is not scored
    weight: float = 1.0
    messages: Messages | None = None  # a conversation, of which the replies are scored
    source: str | None = None  # of a pair, whose content is the target
    features: str | None = None  # of a pair: the file that stands for a source

    @property
    def is_pair(self) -> bool:
        """Whether it is for a model that reads a source first."""
        return self.source is not None or self.features is not None


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: Messages | None = None
    source: str | None = None
    features: str | None = None
    target: str | None = None
    weight: float = 1.0


def is_records(file: str) -> bool:
    """Whether a file name says that its lines are records."""
    return file.lower().endswith(".jsonl")


def parse_records(content: str, file: str) -> tuple[Record, ...]:
    """One record per line that is not blank.

    A line is {"text": …}, {"prompt": …, "completion": …}, of which the completion alone is scored,
    or {"messages": [{"role": …, "content": …}, …]}, of which the assistant's messages are scored;
    for encoder-decoder models {"source": …, "target": …} or {"features": FILE, "target": …}, of
    which the target is scored. Each has an optional "weight" ≥ 0.

    Raises:
        UsageError: If a line is something else; all faults are named.
    """
    records, faults = [], []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            records.append(_record(msgspec.json.decode(line.encode(), type=_Line)))
        except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
            faults.append(f"line {number}: {error}")
    if not records and not faults:
        faults = ["no line"]
    if faults:
        raise UsageError(
            f'{file}: lines {{"text": …}}, {{"prompt": …, "completion": …}}, {{"messages": […]}} '
            f'or {{"source": …, "target": …}} with an optional "weight" were expected; '
            f"{'; '.join(faults[:5])}"
        )
    return tuple(records)


def _record(line: _Line) -> Record:
    if not (math.isfinite(line.weight) and line.weight >= 0):
        raise ValueError(f"a weight of 0 or more was expected, {line.weight:g} found")
    given = {name for name in _FORMS if getattr(line, name) is not None}
    if given == {"text"} and line.text is not None:
        return Record(line.text, 0, line.weight)
    if given == {"prompt", "completion"} and line.prompt is not None:
        return Record(f"{line.prompt}{line.completion}", len(line.prompt), line.weight)
    if given == {"messages"} and line.messages is not None:
        return Record("", 0, line.weight, _checked(line.messages))
    if given in ({"source", "target"}, {"features", "target"}):
        return _pair(line)
    raise ValueError(
        "text alone, prompt and completion, source and target, or messages alone were expected"
    )


_FORMS = ("text", "prompt", "completion", "messages", "source", "features", "target")


def _pair(line: _Line) -> Record:
    target = line.target or ""
    for name, value in (("source", line.source), ("features", line.features), ("target", target)):
        if value is not None and not value.strip():
            raise ValueError(f"a {name} was expected, an empty one found")
    return Record(target, 0, line.weight, source=line.source, features=line.features)


def _checked(messages: Messages) -> Messages:
    for place, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise ValueError(f"message {place}: a role was expected, as in chat templates")
    if not any(message["role"] == REPLIES for message in messages):
        raise ValueError(f"messages with at least one of role {REPLIES!r} were expected")
    return messages
