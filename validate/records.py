"""Documents as records: a .jsonl file says where each one ends, what is prompt, what it weighs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from headport.errors import UsageError

__all__ = ["Record", "is_records", "parse_records"]


@dataclass(frozen=True)
class Record:
    """One document and how it counts."""

    content: str
    prompt_characters: int = 0  # at its beginning: context that is not scored
    weight: float = 1.0


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    weight: float = 1.0


def is_records(file: str) -> bool:
    """Whether a file name says that its lines are records."""
    return file.lower().endswith(".jsonl")


def parse_records(content: str, file: str) -> tuple[Record, ...]:
    """One record per line that is not blank.

    A line is {"text": …} or {"prompt": …, "completion": …}, of which the completion alone is
    scored, each with an optional "weight" ≥ 0.

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
            f'{file}: lines {{"text": …}} or {{"prompt": …, "completion": …}} with an optional '
            f'"weight" were expected; {"; ".join(faults[:5])}'
        )
    return tuple(records)


def _record(line: _Line) -> Record:
    if not (math.isfinite(line.weight) and line.weight >= 0):
        raise ValueError(f"a weight of 0 or more was expected, {line.weight:g} found")
    if line.text is not None and line.prompt is None and line.completion is None:
        return Record(line.text, 0, line.weight)
    if line.text is None and line.prompt is not None and line.completion is not None:
        return Record(line.prompt + line.completion, len(line.prompt), line.weight)
    raise ValueError("text alone, or prompt and completion, were expected")
