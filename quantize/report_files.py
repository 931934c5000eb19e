"""Reports of a measuring verb, written in the form that each file's name asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headport.bundle import write_text
from headport.errors import OutputError, UsageError

__all__ = ["Renderers", "check_report_files", "write_reports"]

# ending → the document as text; `.json` is always known
Renderers = Mapping[str, Callable[[dict[str, Any]], str]]


def check_report_files(files: Sequence[Path], renderers: Renderers, *, force: bool) -> None:
    """Refuse files that cannot be written, before the work whose results they are to hold.

    Raises:
        UsageError: If a name has another ending.
        OutputError: If a file exists and `force` is False.
    """
    endings = [".json", *renderers]
    for file in files:
        if file.suffix not in endings:
            raise UsageError(
                f"--report {file}: a name that ends in {', '.join(endings[:-1])} or "
                f"{endings[-1]} was expected"
            )
        if file.is_file() and not force:
            raise OutputError(f"{file} exists; choose another output or pass --force")


def write_reports(
    files: Sequence[Path], report: msgspec.Struct, renderers: Renderers, text: str, *, force: bool
) -> dict[str, Any]:
    """Write the reports and give the document that they were made of.

    Args:
        files: As `check_report_files` let them pass.
        report: What was found.
        renderers: By ending.
        text: What the terminal shows, for the message if a file cannot be written.
        force: Replace existing files.

    Raises:
        OutputError: If a file cannot be written; the figures took long, so they are in the message.
    """
    document: dict[str, Any] = msgspec.to_builtins(report)
    written = msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"
    texts = {
        file: renderers[file.suffix](document) if file.suffix in renderers else written
        for file in files
    }
    try:
        write_text(texts, force=force)
    except OutputError as error:
        raise OutputError(f"{error}\n\n{text}") from error
    return document
