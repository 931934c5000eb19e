"""One report, three forms; whatever text says, it stays text."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest

from headport.validate.markdown import render_markdown
from headport.validate.report import Report
from headport.validate.tables import report_sections, visible
from headport.validate.terminal import render_terminal
from headport.validate.webpage import render_webpage
from tests.validate.reports import metrics, report

RENDERERS = [render_terminal, render_markdown, render_webpage]
HOSTILE = (
    "</td><script>alert(1)</script>|\n# head\n![x](http://evil/x.png)`code`"
    "\x1b[2J\x07\u202e\u200b&amp;<img src=x onerror=y> www.evil.example @team"
)


@pytest.mark.parametrize("render", RENDERERS)
def test_verdict_figures_and_gates_are_there(render: Callable[[Report], str]) -> None:
    text = render(report(verdict="failed"))
    assert "failed" in text.lower() and "42 tokens" in text
    assert "4.000e-04" in text and "1.001000" in text and "99.0000%" in text
    assert "0.002" in text, "the gate's limit"
    assert "in short" in text, "the protocol stands with the figures"


@pytest.mark.parametrize("render", RENDERERS)
def test_control_characters_never_come_through(render: Callable[[Report], str]) -> None:
    text = render(report(name="a\x1b[31m\u202eb", text=HOSTILE))
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e\u200b]", text)
    assert "\\x1b[31m" in text or "\\x1b&#91;31m" in text or "&#92;x1b&#91;31m" in text


def test_visible_spells_out_what_cannot_be_seen() -> None:
    assert visible("a\nb\t\x1b\u202e中 é🙂") == "a\\nb\\t\\x1b\\u202e中 é🙂"


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def page(found: Report) -> _Page:
    parser = _Page()
    parser.feed(render_webpage(found))
    return parser


def test_hostile_text_adds_no_tag_and_no_attribute_to_the_page() -> None:
    plain, hostile = page(report()), page(report(name=HOSTILE, text=HOSTILE))
    assert hostile.tags == plain.tags
    assert hostile.attributes == plain.attributes
    assert "<script>alert(1)</script>" in hostile.text, "shown as text"
    assert "script" not in plain.tags and "img" not in plain.tags and "a" not in plain.tags


def test_the_page_loads_nothing() -> None:
    text = render_webpage(report())
    assert "default-src 'none'" in text
    assert not re.search(r"(src|href)\s*=|url\(|@import", text)
    assert "prefers-color-scheme: dark" in text


def test_hostile_text_opens_no_markup_in_markdown() -> None:
    text = render_markdown(report(name=HOSTILE, text=HOSTILE))
    assert "<" not in text and "![" not in text and "`" not in text and "://" not in text
    assert "www." not in text and "@" not in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    rows = sum(len(section.rows) + 2 for section in report_sections(report()))
    assert len(tables) == rows
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert len(headings) == 1 + len(report_sections(report()))


def test_markdown_rows_have_as_many_cells_as_their_table() -> None:
    for part in render_markdown(report(text="a|b")).split("\n\n"):
        widths = {line.count("|") for line in part.splitlines() if line.startswith("|")}
        assert len(widths) <= 1


def test_null_figures_are_dashes() -> None:
    text = render_terminal(report(metrics=metrics(perplexity_ratio=None)))
    assert re.search(r"perplexity_ratio +– ", text)


def test_terminal_columns_line_up_under_wide_characters() -> None:
    lines = render_terminal(report(name="中文")).splitlines()
    header = next(line for line in lines if line.strip().startswith("metric") and "中文" in line)
    row = next(line for line in lines if line.strip().startswith("kl_max"))
    assert header.index("中文") == row.rindex("5.000e-03")


def test_long_cells_are_cut_on_the_terminal_only() -> None:
    found = report(text="x" * 500, notes=())
    assert max(len(line) for line in render_terminal(found).splitlines()) < 300
    assert "x" * 500 in render_webpage(found)
