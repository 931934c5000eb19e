"""pytest plugin: a bundle under test, its report, and gates that fail a test with their reasons.

pytest loads it wherever headport is installed, so it imports nothing but pytest by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from headport.bundle import Bundle
    from headport.validate.report import Report

__all__ = [
    "assert_gates",
    "headport_bundle",
    "headport_report",
    "pytest_addoption",
    "pytest_report_header",
]

_Found = TypeVar("_Found")

# option → (help, form in an ini file); `--headport-bundle` on the command line wins
_SETTINGS: dict[str, tuple[str, str]] = {
    "bundle": ("bundle folder that is tested", "string"),
    "reference": ("checkpoint, or what `headport reference` wrote", "string"),
    "text": ("texts to validate on", "args"),
    "gates": ("limits (TOML; default: those of the bundle's recipe)", "string"),
    "baseline": ("earlier report that must not be worse", "string"),
    "max_tokens": ("tokens to score in all; 0: all", "string"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options and ini settings; a relative path is taken from the folder of the ini file."""
    group = parser.getgroup("headport", "headport: bundles and their validation")
    for name, (text, kind) in _SETTINGS.items():
        more: dict[str, Any] = {"action": "append"} if kind == "args" else {}
        flag = f"--headport-{name.replace('_', '-')}"
        group.addoption(flag, dest=f"headport_{name}", default=None, help=text, **more)
        parser.addini(f"headport_{name}", text, type=kind, default=[] if kind == "args" else None)  # type: ignore[arg-type]


def pytest_report_header(config: pytest.Config) -> list[str]:
    """What is tested, where it was said."""
    bundle = _setting(config, "bundle")
    if not bundle:
        return []
    reference = _setting(config, "reference") or "no reference"
    return [f"headport: bundle {bundle}, {reference}"]


def _setting(config: pytest.Config, name: str) -> Any:
    given = config.getoption(f"headport_{name}")
    return given if given is not None else config.getini(f"headport_{name}")


def _path(config: pytest.Config, name: str) -> Path | None:
    value = _setting(config, name)
    return (config.rootpath / value) if value else None


def _required(config: pytest.Config, name: str, fixture: str) -> Any:
    value = _setting(config, name)
    if not value:
        # A gate that skips itself would let everything through.
        pytest.fail(
            f"{fixture}: --headport-{name} was expected on pytest's command line, or "
            f"headport_{name} in its ini file; neither is there",
            pytrace=False,
        )
    return value


def _plainly(make: Callable[[], _Found]) -> _Found:
    """What `make` gives; an expected fault fails the test by its message, without our traceback."""
    from headport.errors import HeadportError

    try:
        return make()
    except HeadportError as error:
        pytest.fail(f"headport: {error}", pytrace=False)


@pytest.fixture(scope="session")
def headport_bundle(pytestconfig: pytest.Config) -> Bundle:
    """The bundle of --headport-bundle, every checksum compared; once per session."""
    from headport.bundle import Bundle

    folder = pytestconfig.rootpath / _required(pytestconfig, "bundle", "headport_bundle")
    return _plainly(lambda: Bundle.open(folder))


@pytest.fixture(scope="session")
def headport_report(pytestconfig: pytest.Config, headport_bundle: Bundle) -> Report:
    """The bundle validated against --headport-reference; once per session."""
    from headport.validate.command import Options, validate
    from headport.validate.store import is_store

    config = pytestconfig
    reference = str(_required(config, "reference", "headport_report"))
    local = config.rootpath / reference  # else module:function
    reference = str(local) if local.exists() else reference
    texts: tuple[Path, ...] = ()
    if not is_store(reference):
        names = _required(config, "text", "headport_report")
        texts = tuple(config.rootpath / name for name in names)
    options = Options(
        bundle=headport_bundle.path,
        reference=reference,
        text=texts,
        gates=_path(config, "gates"),
        baseline=_path(config, "baseline"),
        max_tokens=_tokens(config),
    )
    return _plainly(lambda: validate(options))


def _tokens(config: pytest.Config) -> int:
    value = _setting(config, "max_tokens") or "0"
    if not str(value).isdecimal():
        pytest.fail(f"headport_max_tokens: a number was expected, {value!r} found", pytrace=False)
    return int(value)


@pytest.fixture
def assert_gates(request: pytest.FixtureRequest) -> Callable[..., None]:
    """A function that fails the test unless every gate passed.

    `assert_gates()` takes the session's `headport_report`; `assert_gates(report)` another one, or
    the path of a report.json; `slice=` holds the gates of one text alone.
    """

    def check(report: Report | Path | str | None = None, *, slice: str | None = None) -> None:
        from headport.validate.reading import read_report
        from headport.validate.report import Report as RecordedReport

        if report is None:
            found = request.getfixturevalue("headport_report")
        elif isinstance(report, RecordedReport):
            found = report
        else:
            file = Path(report)
            found = _plainly(lambda: read_report(file))
        faults = _faults(found, slice)
        if faults:
            pytest.fail("\n".join(faults), pytrace=False)

    return check


def _faults(report: Report, name: str | None) -> list[str]:
    """A line for each gate that did not pass, and what to do."""
    from headport.validate.advice import next_steps
    from headport.validate.tables import gate_texts, headline

    gates = [
        (gate, text)
        for gate, text in zip(report.gates, gate_texts(report), strict=True)
        if name in (None, gate.slice)
    ]
    if not gates:
        return [f"no gate holds the text {name!r}: nothing would be tested"]
    lines = [f"  {g.slice or 'all texts'}: {g.verdict}: {t}" for g, t in gates if not _good(g)]
    if name is None:
        lines += [
            f"  {r.metric} against {report.baseline}: {r.verdict}"
            for r in report.regressions
            if not _good(r)
        ]
        if report.sampler is not None and not _good(report.sampler):
            lines.append(f"  samplers: {report.sampler.verdict}")
        if not lines and report.verdict != "passed":
            lines.append(f"  {report.verdict}: {report.tokens_scored} tokens were scored")
    if not lines:
        return []
    return [headline(report), *lines, *(f"  → {step}" for step in next_steps(report))]


def _good(found: Any) -> bool:
    return bool(found.verdict == "passed")
