"""The page in a browser: it stands, stays silent, loads nothing, and works by keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from headport.validate.recipes import RecipeSweep
from headport.validate.report import Report
from headport.validate.views.page import render_page
from tests.validate.reports import report
from tests.validate.views.browser import CHROMIUM, Browser, open_browser
from tests.validate.views.test_recipes import swept

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian's package)")

HOSTILE = (
    "</td></script><script>window.pwned=1</script><img src=http://evil.example/x onerror=pwned=2>"
    "\x1b[2J\x00\u202e\u2066\"'><svg onload=pwned=3>שלום &lt;b&gt; javascript:pwned=4"
)
ROWS = "[...document.querySelectorAll('#worst-table > tbody > tr')]"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as found:
        yield found


def several(text: str = "the head") -> Report:
    """A report with three different worst positions, one in another text."""
    found = report(text=text)
    first = found.worst[0]
    others = [
        msgspec.structs.replace(first, kl=kl, slice=name, context=context, document=index)
        for index, (kl, name, context) in enumerate(
            [(5e-3, "prose", "alpha beta"), (2e-2, "code", "def add"), (1e-5, "prose", "omega")]
        )
    ]
    return msgspec.structs.replace(found, worst=tuple(others))


def show(browser: Browser, folder: Path, found: Report, recipes: RecipeSweep | None = None) -> None:
    file = folder / "report.html"
    file.write_text(render_page(found, recipes), encoding="utf-8")
    browser.errors.clear()
    browser.requests.clear()
    browser.media()
    browser.open(file)


def column(browser: Browser, index: int) -> list[str]:
    return browser.value(f"{ROWS}.filter(r => !r.hidden).map(r => r.cells[{index}].textContent)")


def test_it_stands_without_errors_and_asks_for_nothing(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, several())
    assert browser.value("document.querySelector('h1').innerText").startswith("Passed")
    plots = browser.value(
        "[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().height)"
    )
    assert len(plots) >= 8
    assert min(h for h in plots if h) > 20, "folded ones have no height"
    assert browser.errors == []
    assert browser.requests == [(tmp_path / "report.html").as_uri()]


def test_the_policy_stops_what_escaping_would_let_through(browser: Browser, tmp_path: Path) -> None:
    page = render_page(report())
    injected = "<script>window.pwned=1</script><img src='http://127.0.0.1:9/x' onerror='pwned=2'>"
    file = tmp_path / "broken.html"
    file.write_text(page.replace("<main>", "<main>" + injected), encoding="utf-8")
    browser.errors.clear()
    browser.open(file)
    assert browser.value("window.pwned") is None
    assert any("Content Security Policy" in error for error in browser.errors)


def test_hostile_text_stays_text(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, report(name=HOSTILE, text=HOSTILE))
    assert browser.value("window.pwned") is None
    assert browser.value("document.querySelectorAll('script').length") == 1
    assert browser.value("document.querySelectorAll('img, iframe, object, embed').length") == 0
    text = browser.value("document.body.textContent")
    assert "<script>window.pwned=1</script>" in text and "\\u202e" in text and "\\x1b[2J" in text
    assert browser.errors == []
    assert len(browser.requests) == 1


def test_sorting_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, several())
    assert column(browser, 0) == ["5.000e-03", "2.000e-02", "1.000e-05"]
    browser.tab_to("e.closest('#worst-table') && e.textContent === 'KL'")
    browser.press("Enter")
    assert column(browser, 0) == ["2.000e-02", "5.000e-03", "1.000e-05"]
    sorted_by = "document.activeElement.closest('th').getAttribute('aria-sort')"
    assert browser.value(sorted_by) == "descending"
    browser.press("Enter")
    assert column(browser, 0) == ["1.000e-05", "5.000e-03", "2.000e-02"]
    browser.tab_to("e.closest('#worst-table') && e.textContent === 'text'")
    browser.press("Enter")
    assert column(browser, 1) == ["code", "prose", "prose"]
    assert browser.value("document.querySelectorAll('[aria-sort]').length") == 1
    assert browser.errors == []


def test_recipes_beside_the_report(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, several(), swept())
    sizes = (
        "[...document.querySelectorAll('#recipes svg')].map(s => s.getBoundingClientRect().width)"
    )
    assert [width > 300 for width in browser.value(sizes)] == [True, True]
    browser.tab_to("e.closest('#recipes table') && e.textContent === 'step, ms'")
    browser.press("Enter")
    steps = "[...document.querySelectorAll('#recipes tbody tr')].map(r => r.cells[6].textContent)"
    assert browser.value(steps) == ["3.000", "2.000", "0.900", "0.800", "0.500"]
    assert browser.errors == [] and len(browser.requests) == 1


def test_filtering_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, several())
    browser.tab_to("e.type === 'search'")
    browser.write("OMEGA")
    assert [c[:5] for c in column(browser, 3)] == ["omega"]
    assert browser.value("document.querySelector('output').textContent") == "1 of 3 shown"
    assert browser.value("document.querySelector('output').getAttribute('aria-live')") == "polite"
    browser.value("document.activeElement.select()")
    browser.write("no such word")
    assert column(browser, 3) == []
    browser.value("document.activeElement.select()")
    browser.write(" ")
    browser.tab_to("e.tagName === 'SELECT'")
    for _ in range(2):
        browser.press("ArrowDown")
    assert browser.value("document.activeElement.value") == "code"
    assert column(browser, 1) == ["code"]


def test_top_lists_open_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, several())
    browser.tab_to("e.tagName === 'SUMMARY' && e.closest('#worst-table')")
    browser.press("Enter")
    opened = "document.activeElement.parentElement"
    assert browser.value(f"{opened}.open") is True
    assert browser.value(f"{opened}.querySelectorAll('table > tbody > tr').length") == 10


def test_light_and_dark_by_the_system_and_by_the_button(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, several())
    ground = "getComputedStyle(document.body).backgroundColor"
    light = browser.value(ground)
    browser.media(scheme="dark")
    dark = browser.value(ground)
    assert light == "rgb(255, 255, 255)" and dark != light
    browser.tab_to("e.id === 'theme'")
    browser.press("Enter")
    assert browser.value("document.activeElement.textContent") == "Theme: light"
    assert browser.value(ground) == light
    browser.media(scheme="light")
    browser.press("Enter")
    assert browser.value(ground) == dark
    browser.press("Enter")
    assert browser.value(ground) == light, "as the system says"
    browser.media("print", scheme="dark")
    assert browser.value(ground) == light, "paper is white"
    assert browser.value("getComputedStyle(document.querySelector('nav')).display") == "none"
    browser.media()
    assert browser.pdf().startswith(b"%PDF")


def test_a_screen_reader_finds_names_everywhere(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, several())
    unnamed = (
        "[...document.querySelectorAll('svg, nav, section, .scroll')].filter("
        "e => !e.getAttribute('aria-label') && !e.getAttribute('aria-labelledby')).length"
    )
    assert browser.value(unnamed) == 0
    assert browser.value("document.querySelectorAll('table:not(:has(caption))').length") == 0
    assert browser.value("document.querySelectorAll('th:not([scope])').length") == 0
    labels = "[...document.querySelectorAll('input, select')].every(e => e.closest('label'))"
    assert browser.value(labels) is True
    assert browser.value("document.documentElement.lang") == "en"
    ids = "[...document.querySelectorAll('nav a')].every(a => document.querySelector(a.hash))"
    assert browser.value(ids) is True


def test_a_narrow_screen_is_not_wider_than_itself(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, several())
    browser.resize(380, 800)
    wide = "document.documentElement.scrollWidth"
    assert browser.value(wide) <= 390
