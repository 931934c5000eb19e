"""`headport report`: every form from one report.json, and one clear line for wrong use."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest

from headport.cli import main
from headport.validate.reporting import FORMATS
from tests.validate.reports import report
from tests.validate.test_reading import OLD


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "report.json"
    path.write_bytes(msgspec.json.encode(report(verdict="failed")))
    return path


def test_every_form_at_once(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = [file.with_suffix(ending) for ending in FORMATS]
    assert main(["report", str(file), "-o", *map(str, outputs)]) == 0, "showing is no gate"
    starts = ("<!doctype html>", "# Validation: failed", "<?xml", "FAILED: ")
    for output, start in zip(outputs, starts, strict=True):
        assert output.read_text(encoding="utf-8").startswith(start)
    assert capsys.readouterr().out.split() == [str(output) for output in outputs]
    assert main(["report", str(file), "-o", str(outputs[0])]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["report", str(file), "-o", str(outputs[0]), "--force"]) == 0


def test_without_output_it_is_shown(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(file)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("FAILED: ") and "What to do next" in out


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_old_reports_become_every_form(version: int, tmp_path: Path) -> None:
    outputs = [tmp_path / f"old{ending}" for ending in FORMATS]
    source = OLD / f"version-{version}.json"
    assert main(["report", str(source), "-o", *map(str, outputs), "--quiet"]) == 0
    ET.parse(tmp_path / "old.xml")


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (("page.pdf",), "a file that ends in .html, .md, .xml, .txt was expected"),
        (("a.html", "a.html"), "a.html was given 2 times"),
    ],
)
def test_wrong_outputs_are_refused(
    output: tuple[str, ...],
    says: str,
    file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(file.parent)
    assert main(["report", str(file), "-o", *output]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert list(file.parent.iterdir()) == [file], "nothing was written"


def test_what_is_no_report_gets_one_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_bytes(file.read_bytes()[:500])
    assert main(["report", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "no complete JSON document, 500 bytes" in error


def test_github_gets_a_summary_and_annotations(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = msgspec.structs.replace(report().gates[0], verdict="failed")
    file.write_bytes(msgspec.json.encode(report(verdict="failed", gates=(gate,))))
    summary = file.with_name("summary.md")
    summary.write_text("earlier step\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert main(["report", str(file), "--github"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "::error title=headport failed%3A kl_mean (all texts)::kl_mean 4.000e-04"
    )
    text = summary.read_text(encoding="utf-8")
    assert text.startswith("earlier step\n# Validation: failed") and "Do not ship" in text
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(file.parent / "no" / "summary.md"))
    assert main(["report", str(file), "--github"]) == 2
    assert "GITHUB_STEP_SUMMARY names" in capsys.readouterr().err
