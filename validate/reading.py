"""Reports as files: of this release, and of every earlier schema version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from headport.errors import UsageError
from headport.validate.report import REPORT_SCHEMA_VERSION, Metrics, Report

__all__ = ["read_report"]

_Document = dict[str, Any]
_HOW = "write it with `headport validate … --json`"


def read_report(file: Path) -> Report:
    """Read a report that `headport validate --json` wrote, now or earlier.

    Figures that an earlier version did not have are null in what is returned.

    Raises:
        UsageError: If the file is missing, cut short, something else, damaged, or of a later
            schema version.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file}: a report was expected: {error.strerror}") from error
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{file}: no complete JSON document, {len(data)} bytes ({error}); {_HOW}"
        ) from error
    version = _version(document)
    if version is None:
        raise UsageError(f"{file}: no report of headport validate, {_found(document)}; {_HOW}")
    if not 1 <= version <= REPORT_SCHEMA_VERSION:
        raise UsageError(
            f"{file}: a report of schema version 1 to {REPORT_SCHEMA_VERSION} was expected, "
            f"version {version} found; read it with the release of headport that wrote it"
        )
    try:
        for step in _STEPS[version - 1 :]:
            step(document)
        return msgspec.convert(document, Report)
    except (msgspec.ValidationError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{file}: a damaged report of schema version {version} ({error}); {_HOW}"
        ) from error


def _version(document: Any) -> int | None:
    """The schema version of what looks like a report."""
    if not isinstance(document, dict) or not {"verdict", "gates", "slices"} <= document.keys():
        return None
    version = document.get("schema_version")
    return version if isinstance(version, int) else None


def _found(document: Any) -> str:
    if not isinstance(document, dict):
        return f"a JSON {type(document).__name__} found"
    return f"a JSON object with {', '.join(list(document)[:4]) or 'no keys'} found"


def _all_metrics(document: _Document) -> list[_Document]:
    parts = [document, *document["slices"], *document.get("position_slices", ())]
    return [part["metrics"] for part in parts]


def _from_1(document: _Document) -> None:
    for metrics in _all_metrics(document):
        for name in Metrics.__struct_fields__:
            metrics.setdefault(name, {"value": None})
    for gate in document["gates"]:
        gate |= {"margin": 0.0, "by": "value", "low": None, "high": None, "reason": ""}
        gate |= {"detectable": None, "tokens_needed": None, "tokens_recommended": None}
    document["protocol"] |= {
        "overlap": 0,
        "ignored_ids": (),
        "weights": "every token counts once",
        "confidence": "none: this release knew no intervals",
    }
    document["timing"] |= {"extra": 0.0}
    document |= {"baseline": None, "regressions": (), "bootstrap": {}, "by_document": ()}
    document |= {"position_slices": (), "attribution": None, "noise_floor": None, "sampler": None}
    counts = dict.fromkeys(("positions", "near_ties", "by_noise", "unexplained"), 0)
    document["flips"] = {**counts, "noise_factor": 0.0, "widest": ()}


def _from_2(document: _Document) -> None:
    document["bisection"] = None


def _from_3(document: _Document) -> None:
    flips = document["flips"]
    if "by_noise" in flips:  # as before the noise was measured over the whole run
        flips["within_noise"] = flips.pop("by_noise")
        flips["beyond_noise"] = flips.pop("unexplained")
        flips["noise"] = None
    for position in document["worst"]:
        position |= {"reference_top": (), "candidate_top": ()}
    document["distributions"] = None


def _from_4(document: _Document) -> None:
    told = "Of the reference only the likeliest tokens"  # how a note of theirs begins
    document["protocol"]["top_only"] = any(note.startswith(told) for note in document["notes"])
    document["schema_version"] = 5


# Step n makes version n + 2 of version n + 1.
_STEPS: tuple[Callable[[_Document], None], ...] = (_from_1, _from_2, _from_3, _from_4)
