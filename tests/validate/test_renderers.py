"""One report, three forms; whatever text says, it stays text."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser

import pytest

from headport.validate.markdown import render_markdown
from headport.validate.report import Report
from headport.validate.tables import report_sections, visible
from headport.validate.terminal import render_terminal
from headport.validate.views.page import render_page
from tests.validate.reports import metrics, report

RENDERERS = [render_terminal, render_markdown, render_page]
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
        self.counts: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.text = ""

    @property
    def tags(self) -> set[str]:
        return set(self.counts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] += 1
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def page(found: Report) -> _Page:
    parser = _Page()
    parser.feed(render_page(found))
    return parser


def test_hostile_text_adds_no_tag_and_no_attribute_to_the_page() -> None:
    plain, hostile = page(report()), page(report(name=HOSTILE, text=HOSTILE))
    assert hostile.tags == plain.tags
    assert hostile.attributes == plain.attributes
    assert "<script>alert(1)</script>" in hostile.text, "shown as text"
    assert hostile.counts["script"] == 1 and "img" not in plain.tags, "the page's own script"


def test_the_page_loads_nothing() -> None:
    text = render_page(report())
    assert "default-src 'none'" in text
    assert not re.search(r"src\s*=|href=\"(?!#)|url\(|@import|://", text)
    assert "light-dark(" in text and "color-scheme: light dark" in text
    assert len(text.encode()) < 3 << 20


def test_the_page_lets_its_own_script_run_and_no_other() -> None:
    text = render_page(report())
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text and "unsafe" not in text
    assert text.index("Content-Security-Policy") < text.index("<style>")


def test_a_page_of_many_long_positions_stays_small() -> None:
    position = report(text="x" * 240).worst[0]
    found = report(worst=(position,) * 40, notes=())
    assert len(render_page(found).encode()) < 3 << 20


def test_a_page_without_what_old_reports_lack() -> None:
    text = render_page(report(distributions=None, attribution=None, bisection=None, worst=()))
    assert "Calibration" not in text and "the two sides agree everywhere" in text.lower()


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
    assert "x" * 500 in render_page(found)
