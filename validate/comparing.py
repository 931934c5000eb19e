"""`headport compare`: two reports side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from headport.bundle import check_text_files, write_text
from headport.command import OptionRecord, Outcome, option, positional
from headport.errors import UsageError
from headport.validate import markdown, webpage
from headport.validate.baseline import check_comparable
from headport.validate.changes import DECISIVE, Change, changes
from headport.validate.evidence import Record
from headport.validate.reading import read_report
from headport.validate.report import Report
from headport.validate.section import Section
from headport.validate.tables import interval_text, number_text, visible
from headport.validate.terminal import render_section

__all__ = ["SUMMARY", "Options", "ReportComparison", "run"]

SUMMARY = "Hold two reports on the same texts against each other: better, worse, within noise."

_FORMATS: dict[str, Callable[[str, str, Sequence[Section]], str]] = {
    ".md": markdown.render_sections,
    ".html": webpage.render_sections,
}


class Options(OptionRecord, frozen=True):
    """Options of `headport compare`."""

    before: Annotated[Path, positional("earlier report, or that of the first of two bundles")]
    now: Annotated[Path, positional("report to hold against it")]
    output: Annotated[
        Path | None,
        option(f"also write the comparison ({', '.join(_FORMATS)})", flag="-o", metavar="FILE"),
    ] = None
    gate: Annotated[
        bool,
        option(
            "exit 1 if a figure became worse beyond the noise, or if KL, top-1 agreement or "
            "perplexity of all texts has no interval to tell by"
        ),
    ] = False
    force: Annotated[bool, option("replace an existing file")] = False


class ReportComparison(Record, frozen=True):
    """What `--json` writes."""

    before: str  # file
    now: str
    bundles: tuple[str, str]
    changes: tuple[Change, ...]


def run(options: Options) -> Outcome:
    """Compare; exit 0, or with `gate` 1 where something became worse or nothing can be told.

    Raises:
        UsageError: If a file is no report, or the two are about different material.
    """
    if options.output is not None:
        _check_output(options.output, force=options.force)
    before, now = read_report(options.before), read_report(options.now)
    check_comparable(before, now, options.before)
    found = changes(before, now)
    title = "Comparison of two validations"
    lead, sections = _lead(before, now, found), _sections(found)
    if options.output is not None:
        page = _FORMATS[options.output.suffix.lower()](title, lead, sections)
        write_text({options.output: page}, force=options.force)
    text = "\n\n".join([lead, *map(render_section, sections)])
    stops = any(change.outcome == "worse" or _is_blind(change) for change in found)
    document = ReportComparison(
        before=options.before.name,
        now=options.now.name,
        bundles=(before.candidate.bundle, now.candidate.bundle),
        changes=found,
    )
    return Outcome(text, document, 1 if options.gate and stops else 0)


def _is_blind(change: Change) -> bool:
    """Whether a figure that a gate must know is not known, such as with one document."""
    return change.outcome == "unknown" and change.slice is None and change.metric in DECISIVE


def _check_output(output: Path, *, force: bool) -> None:
    if output.suffix.lower() not in _FORMATS:
        raise UsageError(
            f"--output: a file that ends in {' or '.join(_FORMATS)} was expected, {output} given"
        )
    check_text_files([output], force=force)


def _lead(before: Report, now: Report, found: Sequence[Change]) -> str:
    counts = Counter(change.outcome for change in found)
    shown = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    names = [f"{r.candidate.bundle} (head {r.candidate.head})" for r in (before, now)]
    return visible(
        f"{names[1]} against {names[0]}, both held against {now.reference.checkpoint} on "
        f"{now.tokens_scored} tokens: {shown}. Of figures without drift one in twenty lies beyond "
        "its 95 % interval by chance."
    )


def _sections(found: Sequence[Change]) -> list[Section]:
    columns = ("metric", "before", "now", "change", "95 % interval", "outcome", "documents")
    names = dict.fromkeys(change.slice for change in found)
    return [
        Section(
            visible("All texts" if name is None else f"Text {name}"),
            columns,
            tuple(_row(change) for change in found if change.slice == name),
        )
        for name in names
    ]


def _row(change: Change) -> tuple[str, ...]:
    return (
        change.metric,
        number_text(change.metric, change.before),
        number_text(change.metric, change.now),
        "–" if change.change is None else f"{change.change:+.2e}",
        interval_text("", change.low, change.high),
        change.outcome,
        "paired" if change.paired else "independent",
    )
