"""`--head NAME=SPEC`: which heads a bundle gets beside the model's own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headport.errors import UsageError

__all__ = ["AUTO", "HEAD_HELP", "HeadRequest", "parse_heads"]

AUTO = "auto"
HEAD_HELP = (
    "one more head: a file that headport.export.heads.save_head or TRL wrote, or `auto` to name "
    "the head that the checkpoint itself holds"
)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")  # graphs and files are named after it
_TAKEN = ("lm", "mlm")  # the models' own


@dataclass(frozen=True)
class HeadRequest:
    """One head that is asked for."""

    name: str
    file: Path | None  # None: the one in the checkpoint


def parse_heads(texts: Sequence[str]) -> tuple[HeadRequest, ...]:
    """Read `NAME=FILE` and `NAME=auto`.

    Raises:
        UsageError: If one is malformed, or a name is given twice or taken.
    """
    found: dict[str, HeadRequest] = {}
    for text in texts:
        name, equals, source = text.partition("=")
        if not equals or not source or not _NAME.fullmatch(name):
            raise UsageError(
                f"--head {text}: NAME=FILE or NAME=auto was expected, with a name of letters, "
                "digits, - and _"
            )
        if name in found or name in _TAKEN:
            why = "is the model's own head" if name in _TAKEN else "was given twice"
            raise UsageError(f"--head {text}: the name {name} {why}; choose another")
        found[name] = HeadRequest(name, None if source == AUTO else Path(source))
    if sum(request.file is None for request in found.values()) > 1:
        raise UsageError("--head: a checkpoint holds one head of its own; give `auto` once")
    return tuple(found.values())
