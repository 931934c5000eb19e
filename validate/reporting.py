"""`headport report`: a report.json as pages for readers and files for pipelines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

from headport.bundle import check_text_files, write_text
from headport.command import OptionRecord, Outcome, option, positional
from headport.errors import UsageError
from headport.validate.markdown import render_markdown
from headport.validate.reading import read_report
from headport.validate.recipes import check_same_model, read_sweep
from headport.validate.report import Report
from headport.validate.terminal import render_terminal
from headport.validate.views.github import append_summary, workflow_commands
from headport.validate.views.junit import render_junit
from headport.validate.views.page import render_page

__all__ = ["FORMATS", "SUMMARY", "Options", "run"]

SUMMARY = "Show a report of `validate --json` again, or write it as HTML, Markdown or JUnit XML."

# ending → form
FORMATS: dict[str, Callable[[Report], str]] = {
    ".html": render_page,
    ".md": render_markdown,
    ".xml": render_junit,
    ".txt": lambda report: render_terminal(report) + "\n",
}


class Options(OptionRecord, frozen=True):
    """Options of `headport report`."""

    report: Annotated[Path, positional("what `headport validate --json` wrote, now or earlier")]
    output: Annotated[
        tuple[Path, ...],
        option(
            f"files to write; the ending says the form: {', '.join(FORMATS)} (JUnit)",
            flag="-o",
            metavar="FILE",
        ),
    ] = ()
    sweep: Annotated[
        Path | None,
        option("what `headport sweep --report F.json` wrote, to be shown in HTML", metavar="FILE"),
    ] = None
    github: Annotated[
        bool,
        option("annotations on stdout, and a summary in the file that GITHUB_STEP_SUMMARY names"),
    ] = False
    force: Annotated[bool, option("replace existing files")] = False


def _check(options: Options) -> None:
    for file in options.output:
        if file.suffix.lower() not in FORMATS:
            raise UsageError(
                f"--output: a file that ends in {', '.join(FORMATS)} was expected, {file} given"
            )
    if options.sweep is not None and not any(_is_page(file) for file in options.output):
        raise UsageError("--sweep has no effect without a page: give --output FILE.html")
    check_text_files(options.output, force=options.force)


def _is_page(file: Path) -> bool:
    return file.suffix.lower() == ".html"


def run(options: Options) -> Outcome:
    """Write what was asked for, or show the report; exit 0 whatever its verdict is."""
    _check(options)
    report = read_report(options.report)
    pages = FORMATS
    if options.sweep is not None:
        sweep = read_sweep(options.sweep)
        check_same_model(sweep, report)
        pages = FORMATS | {".html": partial(render_page, sweep=sweep)}
    files = {file: pages[file.suffix.lower()](report) for file in options.output}
    write_text(files, force=options.force)
    text = "\n".join(map(str, options.output)) or render_terminal(report)
    if options.github:
        append_summary(report)
        text = workflow_commands(report) or text
    return Outcome(text, report)
